"""Numbers of a chain against NumPy's, and predicted numbers of iterations against those that solvers take."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import dense_step

import lp_jax
from benchmarks import diagnosis
from lp_jax import planning
from lp_jax.planning._diagnose import Diagnosis, Rehearsal
from lp_jax.planning._words import code

N, D, BATCH = 24, 3, 6


def linear(y, layer):
    return y + layer.dt * (y @ layer.params)


def matrices(scale):
    return scale * np.random.default_rng(0).normal(size=(N, D, D))


def states():
    return jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, D)))


def test_the_numbers_are_those_of_the_jacobians():
    """A linear chain: singular values of every ``J - I``, and the norm of the whole product, to what a random start gives."""
    a = matrices(2.0)
    found = planning.diagnose(lp_jax.Problem(linear, jnp.asarray(a), states()), solvers=())
    norms = [np.linalg.norm(m / N, 2) for m in a]
    assert found.lipschitz == pytest.approx(sum(norms), rel=0.02)
    product = np.linalg.multi_dot([np.eye(D) + m / N for m in a])
    largest = np.log(np.linalg.norm(product, 2)) / N
    assert largest - 2 / N < found.lyapunov <= largest + 1e-12
    assert found.growth == pytest.approx(np.exp(N * found.lyapunov))


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (0.099, "forgets: a disturbance is 9.9e-02 times"),
        (0.101, "keeps disturbances: a disturbance is 0.1 times"),
        (1.0, "keeps disturbances: a disturbance is 1.0 times"),
        (9.9, "keeps disturbances: a disturbance is 9.9 times"),
        (1001.0, "amplifies: a disturbance is 1.0e+03 times"),
    ],
)
def test_a_scalar_chain_has_its_exponent(factor, text):
    """Its step has a derivative of its own, and no forward mode; the transposed derivative is enough."""

    @jax.custom_vjp
    def scaled(y):
        return factor ** (1 / N) * y

    scaled.defvjp(lambda y: (scaled(y), None), lambda _, w: (factor ** (1 / N) * w,))
    problem = lp_jax.Problem(
        lambda y, layer: scaled(y), None, jnp.ones((BATCH, 1)), data=jnp.zeros((N, BATCH))
    )
    found = planning.diagnose(problem, solvers=())
    assert found.lyapunov == pytest.approx(np.log(factor) / N, abs=1e-12)
    assert found.lipschitz == pytest.approx(N * abs(factor ** (1 / N) - 1), abs=1e-12)
    assert found.verdict == f"This chain {text} as large after the last layer."


def test_leaves_start_from_unlike_numbers():
    """The mode a - b of two leaves grows; where both started from equal numbers, it would not be seen."""

    def step(y, layer):
        a, b = y
        mean, half = 0.25 * (a + b), 0.65 * (a - b)
        return mean + half, mean - half

    problem = lp_jax.Problem(step, jnp.zeros(N), (jnp.ones(D), jnp.ones(D)))
    found = planning.diagnose(problem, solvers=())
    assert found.lyapunov == pytest.approx(np.log(1.3), abs=2 / N)


def test_resets_are_no_growth():
    """Packed sequences: every eighth layer leaves nothing of the state, and the others double it."""
    keeps = jnp.arange(N) % 8 != 0
    step = lambda y, layer: jnp.where(layer.data, 2.0, 0.0) * y  # noqa: E731
    found = planning.diagnose(lp_jax.Problem(step, None, states(), data=keeps), solvers=())
    assert found.lyapunov == pytest.approx(np.log(2.0)) and found.resets == 3
    assert found.growth == pytest.approx(2.0**6)
    assert "amplifies: a disturbance is 64.0 times as large before the next reset" in str(found)


def test_what_converges_too_slowly_is_no_yes():
    """Both took 15 and 9 sweeps; one device evaluates all layers in no time, the other one layer after another."""
    one = Rehearsal(lp_jax.Picard(sweeps=32, rtol=1e-3), lp_jax.Picard(sweeps=32), 15, 9, 0, 0)
    found = Diagnosis(N, 4, 1.0, 0.0, 0, sweep=1e-3, serial=27e-3, rehearsals=(one,))
    assert found.verdict.endswith("Converges: Picard.")
    assert found.answer == "yes: Picard takes at least 27 sweeps, Serial() the time of 27.0"
    found = dataclasses.replace(found, serial=26e-3)
    assert found.verdict.endswith("not to be faster than Serial() here: Picard. Take Serial().")
    assert str(found).startswith("no: Picard takes at least 27 sweeps, Serial() the time of 26.0\n")
    found = dataclasses.replace(found, rehearsals=(one._replace(result=1),))
    assert found.answer == "no: none converges"
    assert found.verdict.endswith("Does not converge: Picard. Take Serial().")


def test_no_rehearsal_starts_when_time_is_over(capsys):
    """The time is said first, and what was left out last."""
    found = planning.diagnose(network(1.0), seconds=0.0)
    assert capsys.readouterr().err.startswith("diagnose: at most 0 s")
    assert not found.rehearsals and found.answer.startswith("unknown")
    assert found.verdict.endswith("Left out for lack of time: Picard, MGRIT, Newton.")


def recurrent(batch=16, width=8):
    rng = np.random.default_rng(0)
    weights, inputs = (
        rng.normal(size=(width, width)) / width**0.5,
        rng.normal(size=(64, batch, width)),
    )
    step = lambda y, layer: jnp.tanh(y @ layer.shared + layer.data)  # noqa: E731
    return lp_jax.Problem(
        step, None, jnp.zeros((batch, width)), shared=jnp.asarray(weights), data=jnp.asarray(inputs)
    )


def network(t1):
    return lp_jax.Problem(
        dense_step, (jnp.asarray(matrices(1.0)), jnp.zeros((N, D))), states(), t1=t1
    )


PROBLEMS = {"T = 4": network(4.0), "recurrent": recurrent()}
OWN = [
    lp_jax.Picard(sweeps=20, rtol=1e-3),
    (lp_jax.MGRIT(iterations=20, rtol=1e-4), lp_jax.Serial()),
]


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_predicted_is_what_is_taken(name):
    """Within two, on the whole batch; what does not converge is not said to."""
    problem = PROBLEMS[name]
    cotangent = jnp.cos(problem.solve(solver=lp_jax.Serial()).y1)
    found = planning.diagnose(
        problem, cotangent=cotangent, solvers=OWN if name == "T = 4" else None
    )
    assert found.examples == 4
    if name == "T = 4":
        picard, cycles = found.rehearsals
        assert (picard.solver, cycles.solver, cycles.adjoint_solver) == (OWN[0], *OWN[1])
        assert picard.iterations > 3 and picard.adjoint_iterations > 3
    else:
        assert [type(r.solver) for r in found.rehearsals] == [
            lp_jax.Picard,
            lp_jax.MGRIT,
            lp_jax.Newton,
        ]

    @jax.jit
    def taken(solver, adjoint_solver):
        solution, pullback = problem.solve_vjp(solver=solver, adjoint_solver=adjoint_solver)
        return solution, pullback(cotangent)[1]

    for r in found.rehearsals[:: 1 if name == "T = 4" else 2]:
        solution, stats = taken(r.solver, r.adjoint_solver)
        assert (r.result == 0) == (int(solution.result) == 0)
        assert (r.adjoint_result == 0) == (int(stats.result) == 0)
        if r.converges:
            assert abs(r.iterations - int(solution.stats.iterations)) <= 2
            assert abs(r.adjoint_iterations - int(stats.iterations)) <= 2
    if name == "recurrent":  # it forgets, and sweeps do not converge
        assert [r.converges for r in found.rehearsals] == [False, False, True]
        assert "Converges: Newton. Does not converge: Picard, MGRIT." in found.verdict
        text = str(found)
        assert repr(found) == text and "\n64 layers, measured on 4 examples\n" in text
        assert (
            "Lyapunov exponent       -" in text
            and f"-        -  {code(found.rehearsals[0].solver)}" in text
        )


def test_examples_are_cut_where_the_step_takes_fewer():
    """Inputs (N, B, ...) and masks (B, ...) go with the state; where the step knows the batch, it stays whole."""
    inputs, mask = jnp.ones((N, BATCH, D)), jnp.ones((BATCH, D))

    def given(y, layer):
        return y + layer.dt * layer.data * layer.shared

    knows = lambda y, layer: y + layer.dt * mask  # noqa: E731
    for step, shared, count in (
        (given, mask, 2),
        (given, jnp.ones((1, D)), 2),
        (knows, None, BATCH),
    ):
        problem = lp_jax.Problem(step, None, states(), data=inputs, shared=shared)
        assert planning.diagnose(problem, examples=2, solvers=()).examples == count
    alone = lp_jax.Problem(linear, jnp.asarray(matrices(1.0)), jnp.ones(D))
    assert planning.diagnose(alone, solvers=()).examples == 1


def test_impossible_arguments_are_refused():
    with pytest.raises(TypeError, match=r"lp_jax\.Problem"):
        planning.diagnose(linear)
    with pytest.raises(ValueError, match="examples"):
        planning.diagnose(network(1.0), examples=0)
    with pytest.raises(TypeError, match="solver"):
        planning.diagnose(network(1.0), solvers=["Picard"])


def test_predictions_of_the_committed_table_hold():
    """A dozen networks, twice each: nine of ten within two or a quarter, and none said to converge that does not."""
    folder = Path(lp_jax.__file__).parents[1] / "benchmarks" / "results" / "cpu"
    rows = json.loads((folder / "diagnosis.json").read_text())["rows"]
    assert len({row["network"] for row in rows}) >= 12
    every = diagnosis.judged(rows)
    assert sum(diagnosis.holds(*both) for both in every) > 0.9 * len(every)
    assert not any(predicted is not None and taken is None for predicted, taken in every)
    wanted = {(3, 5): True, (3, 6): False, (20, 16): True, (21, 16): False, (None, None): True}
    wanted |= {(None, 30): False, (5, None): False}
    assert {both: diagnosis.holds(*both) for both in wanted} == wanted
