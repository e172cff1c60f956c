"""docs/extending.md: its examples run, are short, use public names only, and what they bring works as what is inside."""

import contextlib
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import lp_jax
from lp_jax import planning, viz

PAGE = Path(__file__).resolve().parents[1] / "docs" / "extending.md"
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
    return names | {"printed": printed.getvalue().splitlines()}


def mesh_comm(workers):
    mesh = jax.make_mesh((workers,), ("layers",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers])
    return lp_jax.MeshComm(mesh)


def gradient(problem, solver, **changed):
    problem = problem.replace(**changed)
    return jax.jit(jax.grad(lambda p: jnp.sum(problem.replace(params=p).solve(solver=solver).y1 ** 2)))(problem.params)


def assert_close(got, wanted, rtol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(jnp.abs(b).max()))


def test_five_examples_of_public_names_in_thirty_lines_each():
    assert list(SECTIONS) == ["A coarse step", "A relaxation", "A solver", "A comm", "An architecture"]
    for title, code in SECTIONS.items():
        lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        assert 0 < len(lines) <= 30, (title, len(lines))
        assert not re.search(r"lp_jax\.\w*\._|lp_jax\._|import _|from lp_jax\S*\._", code), title


def test_a_coarse_step_converges_to_serial_propagation(page):
    """Eight intervals: finite termination after eight cycles, forward and adjoint."""
    solver = lp_jax.MGRIT(coarsening=4, iterations=8, coarse_step=page["two_layers"])
    assert page["error"](solver) < 1e-14
    exact = gradient(page["problem"], lp_jax.Serial())
    assert_close(gradient(page["problem"], solver), exact, 1e-12)
    assert_close(gradient(page["problem"], solver, comm=mesh_comm(3)), exact, 1e-12)
    injected, halves = page["printed"][0].split()
    assert float(halves) < float(injected)


def test_injection_as_a_function_is_the_built_in_injection(page):
    def inject(step, y, layers):
        return step(y, jax.tree.map(lambda x: x[0], layers)._replace(dt=jnp.sum(layers.dt)))

    solvers = [lp_jax.MGRIT(levels=3, coarse_step=c, iterations=2) for c in (inject, lp_jax.Rediscretize())]
    for steps in (32, 27):
        params = jax.tree.map(lambda x: x[:steps], page["params"])  # noqa: B023
        ours, theirs = (gradient(page["problem"], solver, params=params) for solver in solvers)
        assert_close(ours, theirs, 1e-14)


def test_a_relaxation_is_one_of_the_words_where_it_does_the_same(page):
    def fcf(level, u):
        return lp_jax.c_relax(level, u)

    word, function = (lp_jax.MGRIT(levels=3, coarsening=2, relaxation=r, iterations=2) for r in ("FCF", fcf))
    assert_close(gradient(page["problem"], function), gradient(page["problem"], word), 1e-14)
    assert page["error"](page["relaxed"]) < page["error"](page["injection"])


@pytest.mark.parametrize("layers", [32, 30])
def test_a_solver_is_differentiated_on_any_comm(page, layers):
    """Eight intervals of four layers, the last one short or not: exact after eight iterations."""
    solver = page["BlockJacobi"](iterations=8)
    params = jax.tree.map(lambda x: x[:layers], page["params"])
    exact = gradient(page["problem"], lp_jax.Serial(), params=params)
    for comm in (None, mesh_comm(2), mesh_comm(3)):
        assert_close(gradient(page["problem"], solver, params=params, comm=comm), exact, 1e-12)
    tolerant = page["BlockJacobi"](iterations=30, atol=1e-13)
    solution = page["problem"].replace(params=params).solve(solver=tolerant)
    assert solution.stats.iterations == 8 + 1 and solution.result == 0  # one more to see that it is


def test_a_solver_stands_in_for_a_coarse_step_and_the_coarsest_level(page):
    inside = page["BlockJacobi"](size=2, iterations=4)
    for solver in (
        lp_jax.MGRIT(coarsening=8, coarse_step=inside, iterations=1),
        lp_jax.MGRIT(coarsest=inside, iterations=8),
    ):
        assert page["error"](solver) < 1e-14


def test_a_solver_is_planned(page):
    """Each iteration propagates through four layers, eight of them at a time; so does the final sweep."""
    found = next(c for c in page["plan"].choices if isinstance(c.solver, page["BlockJacobi"]))
    assert found.error is not None and found.time.seconds > 0
    assert any("BlockJacobi" in line for line in str(page["plan"]).splitlines())
    counted = planning.count(found.solver, 32)
    assert counted.depth("forward") == 7 * 4 and counted.work("forward") == 7 * 32


def test_a_solver_is_drawn(page):
    title = viz.hierarchy(page["BlockJacobi"](iterations=6), 32).get_suptitle()
    assert "6 BlockJacobi iterations" in title and "32 layers" in title


def test_a_comm_counts_the_messages_of_a_program(page):
    """The coarse solve of the first cycle and of the second; the second's sweep and the final one; the norms; the end."""
    assert +page["comm"].messages == {"relay": 2, "shift": 2, "sum": 1, "broadcast": 1}
    plain = page["error"](page["injection"], comm=mesh_comm(2))
    np.testing.assert_allclose(page["error"](page["injection"], comm=page["Counted"](mesh_comm(2))), plain, rtol=1e-12)


def test_an_architecture_has_the_gradient_of_its_layers_one_after_another(page):
    """Eight intervals: finite termination after eight cycles."""
    graph, params = nnx.split(page["trunk"])

    def loss(params, solver):
        x, v = nnx.merge(graph, params).solve((jnp.ones((4, 8)), jnp.zeros((4, 8))), solver=solver).y1
        return jnp.sum(x**2) + jnp.sum(v)

    got, wanted = (jax.jit(jax.value_and_grad(loss))(params, s) for s in (lp_jax.MGRIT(iterations=8), lp_jax.Serial()))
    assert_close(got, wanted, 1e-12)
