"""docs/extending.md: its examples run, are short, use public names only, and what they bring works as what is inside."""

import contextlib
import dataclasses
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import mesh

import lp_jax
from lp_jax import planning, viz
from lp_jax.planning._schedule import count

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SECTIONS = {
    s.splitlines()[0]: "".join(re.findall(r"```python\n(.*?)```", s, re.DOTALL))
    for s in PAGE.read_text().split("## ")[1:]
}


@pytest.fixture(scope="module", autouse=True)
def as_a_user_has_it():
    """JAX's own rules for ranks and dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def page(as_a_user_has_it, tmp_path_factory):
    """What the page's code defines, run from top to bottom, and what it printed."""
    names, printed = {}, io.StringIO()
    with contextlib.chdir(tmp_path_factory.mktemp("page")), contextlib.redirect_stdout(printed):
        for block in BLOCKS:
            exec(compile(block, str(PAGE), "exec"), names)
        assert Path("block_jacobi.png").stat().st_size > 10_000
    exact = gradient(names["problem"], lp_jax.Serial())
    return names | {"printed": printed.getvalue().splitlines(), "gradient": exact}


def gradient(problem, solver, **changed):
    problem = problem.replace(**changed)
    return jax.jit(
        jax.grad(lambda p: jnp.sum(problem.replace(params=p).solve(solver=solver).y1 ** 2))
    )(problem.params)


def assert_close(got, wanted, rtol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


def test_five_examples_of_public_names_in_thirty_lines_each():
    assert list(SECTIONS) == [
        "A coarse step",
        "A relaxation",
        "A solver",
        "A comm",
        "An architecture",
    ]
    for title, code in SECTIONS.items():
        lines = [
            line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")
        ]
        assert 0 < len(lines) <= 30, (title, len(lines))
        assert not re.search(r"lp_jax\.\w*\._|lp_jax\._|import _|from lp_jax\S*\._", code), title


def test_a_coarse_step_converges_to_serial_propagation(page):
    """Eight intervals: finite termination after eight cycles, forward and adjoint."""
    solver = lp_jax.MGRIT(coarsening=4, iterations=8, coarse_step=page["two_layers"])
    assert page["error"](solver) < 1e-14
    assert_close(gradient(page["problem"], solver, comm=mesh(3)), page["gradient"], 1e-12)
    injected, halves = page["printed"][0].split()
    assert float(halves) < float(injected)


def test_injection_as_a_function_is_the_built_in_injection(page):
    """On several levels, and where the last interval is short."""

    def inject(step, y, layers):
        return step(y, jax.tree.map(lambda x: x[0], layers)._replace(dt=jnp.sum(layers.dt)))

    solvers = [
        lp_jax.MGRIT(levels=3, coarse_step=c, iterations=2) for c in (inject, lp_jax.Rediscretize())
    ]
    problem = page["problem"].replace(
        params=jax.tree.map(lambda x: np.asarray(x)[:27], page["params"])
    )
    assert_close(*(problem.solve(solver=solver).y1 for solver in solvers), 1e-14)


def test_a_relaxation_is_one_of_the_words_where_it_does_the_same(page):
    def fcf(level, u):
        return lp_jax.multigrid.c_relax(level, u)

    word, function = (
        lp_jax.MGRIT(relaxation=r, iterations=2, coarse_step=lp_jax.Rediscretize())
        for r in ("FCF", fcf)
    )
    assert_close(gradient(page["problem"], function), gradient(page["problem"], word), 1e-14)
    assert page["error"](page["relaxed"]) < page["error"](page["injection"])


def test_a_solver_is_differentiated_on_any_comm(page):
    """Eight intervals of four layers, the last one short: exact after eight iterations."""
    solver = page["BlockJacobi"](iterations=8)
    params = jax.tree.map(lambda x: np.asarray(x)[:30], page["params"])
    exact = gradient(page["problem"], lp_jax.Serial(), params=params)
    for comm in (None, mesh(3)):
        assert_close(gradient(page["problem"], solver, params=params, comm=comm), exact, 1e-12)
    tolerant = page["BlockJacobi"](iterations=30, atol=1e-13)
    solution = page["problem"].replace(params=params).solve(solver=tolerant)
    assert solution.stats.iterations == 8 + 1 and solution.result == 0  # one more to see that it is


def test_a_solver_stands_in_for_a_coarse_step_and_the_coarsest_level(page):
    inside = page["BlockJacobi"](size=2, iterations=4)
    for fields in (
        {"coarsening": 8, "coarse_step": inside, "iterations": 1},
        {"coarsest": inside, "iterations": 8},
    ):
        assert page["error"](lp_jax.MGRIT(**fields)) < 1e-14


def test_a_solver_is_planned_and_drawn(page):
    """Each iteration propagates through four layers, eight of them at a time; so does the final sweep."""
    solver = page["BlockJacobi"](iterations=6)
    assert any("BlockJacobi" in line for line in page["printed"])
    counted = count(solver, 32)
    assert counted.depth("forward") == 7 * 4 and counted.work("forward") == 7 * 32
    assert viz.hierarchy(solver, 32).get_suptitle() == "32 layers in intervals of 4, all at once"


def fields(cls):
    return lp_jax.register()(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


def test_what_is_registered_for_a_solver_is_taken(page):
    """Of one that nobody knows, with a state of its own and a number of rounds: Jacobi's method on the layers."""

    @fields
    class Jacobi(lp_jax.Solver):
        rounds: int = 3

        @property
        def iterations(self):
            return self.rounds

        def init(self, levels, guess):
            return lp_jax.Start({"states": super().init(levels, guess).state})

        def improve(self, levels, state):
            relaxed = lp_jax.multigrid.c_relax(levels[0], state["states"])
            change = jax.tree.map(jnp.subtract, relaxed, state["states"])
            return {"states": relaxed}, lp_jax.multigrid.measure(levels[0], change)

        def c_points(self, levels, state):
            return state["states"]

    @fields
    class Counted(Jacobi):
        iteration_name = "round"

        def with_effort(self, iterations):
            return Counted(rounds=iterations)

    solver = Jacobi()
    with pytest.raises(
        TypeError,
        match=r"Jacobi has no field `iterations`; give it a method `with_effort`",
    ):
        solver.with_effort(5)

    @planning.held.register
    def _(solver: Jacobi, machine: planning.Machine, layers: int, workers: int):
        return 7 * layers // workers, 5

    @viz.describe.register
    def _(solver: Jacobi, layers: int):
        return viz.Described(f"{layers} layers, round and round", "a note")

    assert planning.predict(solver, solver, 32, page["gpu"])[-2:] == (7 * 32, 5)
    assert (
        Counted().with_effort(5) == Counted(rounds=5)
        and Counted(rounds=2).summary == "2 Counted rounds"
    )
    figure = viz.hierarchy(solver, 32)
    assert (
        figure.get_suptitle() == "32 layers, round and round"
        and figure.get_supxlabel().startswith("A note.")
    )
    assert "3 Jacobi iterations" in viz.schedule(solver, 32, workers=2).get_supxlabel()
    assert_close(
        gradient(page["problem"], Jacobi(rounds=32)), page["gradient"], 1e-12
    )  # changes no number of a solve


@pytest.mark.parametrize(
    ("end", "result"), [("met", "done as asked"), ("given_up", "the residual norm did not")]
)
def test_a_solver_says_when_its_iterations_end(end, result, page):
    """By a rule of its own in the place of a tolerance: here after the third iteration."""

    @fields
    class Patient(page["BlockJacobi"]):
        def terminate(self, levels, before, after, residual, progress):
            assert before.shape == after.shape == (levels[0].intervals, 4, 8)
            return progress._replace(**{end: progress.done == 2})

    solution = page["problem"].solve(solver=Patient(rtol=1.0, iterations=8))
    assert int(solution.stats.iterations) == 3
    assert lp_jax.RESULTS[int(solution.stats.result)].startswith(result)


def test_a_coarse_step_of_a_class_runs_is_planned_and_drawn(page):
    """The interval's first layer, for all of its time."""

    @fields
    class First(lp_jax.CoarseStep):
        def coarsen(self, chain, level, span, *, at_once):
            return lp_jax.Rediscretize().coarsen(chain, level, span, at_once=at_once)

    ours, theirs = (
        lp_jax.MGRIT(levels=3, iterations=2, coarse_step=step)
        for step in (First(), lp_jax.Rediscretize())
    )
    assert page["error"](ours) == page["error"](theirs)
    assert count(ours, 32).work() == count(theirs, 32).work()
    assert "Coarse step: First." in viz.hierarchy(ours, 32).get_supxlabel()


def test_a_comm_counts_the_messages_of_a_program(page):
    """The coarse solve of the first cycle and of the second; the second's sweep and the final one; the norms; the end."""
    assert +page["comm"].messages == {"pipeline": 2, "shift": 2, "sum": 2}
    plain = page["error"](page["injection"], comm=mesh(2))
    np.testing.assert_allclose(
        page["error"](page["injection"], comm=page["Counted"](mesh(2))), plain, rtol=1e-12
    )


def test_an_architecture_has_the_gradient_of_its_layers_one_after_another(page):
    """Eight intervals: finite termination after eight cycles."""
    graph, params = nnx.split(page["trunk"])

    def loss(params, solver):
        x, v = (
            nnx.merge(graph, params).solve((jnp.ones((4, 8)), jnp.zeros((4, 8))), solver=solver).y1
        )
        return jnp.sum(x**2) + jnp.sum(v)

    got, wanted = (
        jax.jit(jax.value_and_grad(loss))(params, s)
        for s in (lp_jax.MGRIT(iterations=8), lp_jax.Serial())
    )
    assert_close(got, wanted, 1e-12)
