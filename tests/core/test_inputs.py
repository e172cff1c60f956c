"""Bad input: refused at trace time, naming the argument, what it got, what it wanted and what to do."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import INJECT, dense_params, dense_state, dense_step

import lp_jax
from lp_jax._levels._result import DONE, NON_FINITE, NOT_CONVERGED, NOT_FALLING

PARAMS, Y0 = dense_params(12, 3), dense_state(2, 3)


def square(y, layer):
    return y @ layer.params["w"] + layer.params["b"]


def solve(step=dense_step, params=PARAMS, y0=Y0, **arguments):
    return lp_jax.solve(step, params, y0, **arguments)


def refused(error, *words):
    """A message that holds all these words, in order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words)))


HALVE = (lambda u: u[..., ::2], lambda v: jnp.repeat(v, 2, axis=-1))
TRAJECTORY = lp_jax.MGRIT(coarse_step=lp_jax.Picard(around="trajectory"), spatial=HALVE)
BY_TIME = {
    "step": lambda y, layer: y + layer.dt * layer.params * y,
    "params": jnp.ones(12),
    "y0": dense_state(2, 4),
}
OF_3, SAME = jnp.zeros((3, 2, 3), jnp.float32), {"step": lambda y, layer: y}
WITH_TANH = {"w": jnp.ones((6, 4, 4)), "activation": jnp.tanh}
UNEQUAL, SECANT, WINDOWED = (
    {"params": (PARAMS[0], PARAMS[1][1:])},
    lp_jax.Secant(sweeps=2),
    lp_jax.Windowed(windows=2),
)
DOWN = [0.0, 1, 2, 3, 2, 5, 6, 7, 8, 9, 10, 11, 12]
REFUSED = [
    (ValueError, "params | one leading length | [0]: 12, params[1]: 11 | shared", UNEQUAL),
    (ValueError, "params | data | params[0]: 12 | data: 5", {"data": jnp.ones(5)}),
    (ValueError, "params and data have no arrays | stack | steps=N", {"params": ()}),
    (ValueError, "steps=11 | 12 layers | leave steps out", {"steps": 11}),
    (ValueError, "steps must be at least 1; got 0", {"params": None, "steps": 0}),
    (TypeError, "steps must be an integer", {"params": None, "steps": 12.0}),
    (ValueError, "params | leading length 0 | at least one layer", {"params": jnp.ones((0, 3))}),
    (ValueError, "params['w'] is a scalar | shared", {"params": {"w": jnp.ones(())}}),
    (TypeError, "params['activation'] is | equinox.partition", {"params": WITH_TANH}),
    (
        TypeError,
        "step | float64[2,3] | came out as float64[2,2]",
        {"step": lambda y, layer: y[:, :2]},
    ),
    (
        TypeError,
        "step | float64[2,3] | as float32[2,3] | Cast",
        {"step": lambda y, layer: y.astype(jnp.float32)},
    ),
    (
        TypeError,
        "step must return a state | got {y: float64[2,3]}",
        {"step": lambda y, layer: {"y": y}},
    ),
    (TypeError, "step | has_aux=True", {"step": lambda y, layer: (y, y)}),
    (TypeError, "(y_next, aux) with has_aux=True | leave has_aux out", {"has_aux": True}),
    (TypeError, "y0['i'] | int64 | shared", {"y0": {"i": jnp.arange(3)}, **SAME}),
    (ValueError, "y0 has no arrays", {"y0": {}, **SAME}),
    (TypeError, "solver | MGRIT(...) | Call it", {"solver": lp_jax.MGRIT}),
    (TypeError, "adjoint_solver | 'serial'", {"adjoint_solver": "serial"}),
    (
        ValueError,
        "Picard | tolerance | fixed effort",
        {"solver": lp_jax.MGRIT(coarse_step=lp_jax.Picard(rtol=1e-3))},
    ),
    (
        ValueError,
        "the sweeps before it. Take Picard(sweeps=2)",
        {"solver": lp_jax.MGRIT(coarse_step=SECANT)},
    ),
    (
        TypeError,
        "coarse_step | Rediscretize | 'inject'",
        {"solver": lp_jax.MGRIT(coarse_step="inject")},
    ),
    (
        TypeError,
        "coarsest | Serial(), Picard | MGRIT",
        {"solver": lp_jax.MGRIT(coarsest=lp_jax.MGRIT())},
    ),
    (ValueError, "coarsest | windows=2 | Take Picard", {"solver": lp_jax.MGRIT(coarsest=WINDOWED)}),
    (ValueError, 'around="trajectory" | spatial', {"solver": TRAJECTORY, **BY_TIME}),
    (ValueError, "guess | 'constant' | 'ones'", {"guess": "ones"}),
    (
        ValueError,
        "guess | float64[12,2,3] | float64[3,2,3]",
        {"guess": OF_3.astype(float), "solver": lp_jax.Picard()},
    ),
    (
        ValueError,
        "guess | float64[3,2,3] | float32[3,2,3]",
        {"guess": OF_3, "solver": lp_jax.MGRIT()},
    ),
    (
        ValueError,
        "guess | windows=2 | take Picard",
        {"guess": jnp.zeros((12, 2, 3)), "solver": WINDOWED},
    ),
    (ValueError, "t1 | later than t0 | t0=1.0, t1=0.5", {"t0": 1.0, "t1": 0.5}),
    (ValueError, "t1 | finite", {"t1": np.inf}),
    (ValueError, "t1 | 13 times | (12,)", {"t1": np.linspace(0, 1, 12)}),
    (ValueError, "t1 | strictly increasing | t1[3]=3.0, t1[4]=2.0", {"t1": DOWN}),
    (ValueError, "t0 must be a scalar | (2,)", {"t0": np.zeros(2)}),
    (TypeError, "t0 must be a number | got '2'", {"t0": "2"}),
    (TypeError, "t1 must be a number | got '2'", {"t1": "2"}),
    (TypeError, "comm | None | 'layers'", {"comm": "layers"}),
]
"""The error, words of its message in order, and arguments of `solve`."""


@pytest.mark.parametrize(
    ("error", "words", "arguments"), REFUSED, ids=[words for _, words, _ in REFUSED]
)
def test_bad_arguments_are_refused_in_words(error, words, arguments):
    with refused(error, *words.split(" | ")):
        solve(**arguments)


SOLVERS = lp_jax.Picard, lp_jax.MGRIT, lp_jax.Newton


@pytest.mark.parametrize(
    ("error", "words", "make", "fields"),
    [
        (ValueError, "levels | at least 1 | 0", lp_jax.MGRIT, {"levels": 0}),
        (TypeError, "levels | integer | 2.0", lp_jax.MGRIT, {"levels": 2.0}),
        (ValueError, "coarsening | at least 2 | 1", lp_jax.MGRIT, {"coarsening": 1}),
        (ValueError, "coarsening | at least 2 | 0", lp_jax.MGRIT, {"coarsening": (4, 0)}),
        (ValueError, "iterations | at least 1 | 0", lp_jax.MGRIT, {"iterations": 0}),
        (TypeError, "iterations | boolean", lp_jax.MGRIT, {"iterations": True}),
        (ValueError, "min_coarse | at least 1", lp_jax.MGRIT, {"min_coarse": 0}),
        (ValueError, "relaxation | \"FCF\" | 'FC'", lp_jax.MGRIT, {"relaxation": "FC"}),
        (ValueError, "relaxation | 'CF'", lp_jax.MGRIT, {"relaxation": ("F", "CF")}),
        (ValueError, "cycle | 'V' or 'F' or 'W' | 'w'", lp_jax.MGRIT, {"cycle": "w"}),
        (
            ValueError,
            "storage | 'c_point' | Did you mean 'c_points'?",
            lp_jax.MGRIT,
            {"storage": "c_point"},
        ),
        (ValueError, "at_once | 'scan'", lp_jax.MGRIT, {"at_once": "scan"}),
        (
            ValueError,
            "spatial | pair (restrict, prolong) | 3",
            lp_jax.MGRIT,
            {"spatial": (None, 3)},
        ),
        (ValueError, "sweeps | at least 1", lp_jax.Picard, {"sweeps": -1}),
        (ValueError, "sweeps | at least 1 | Identity()", lp_jax.Picard, {"sweeps": 0}),
        (
            ValueError,
            "windows=4 | at least 2 | sweeps=1",
            lp_jax.Windowed,
            {"windows": 4, "sweeps": 1, "rtol": 1e-3},
        ),
        (ValueError, "around | 'start' or 'trajectory'", lp_jax.Picard, {"around": "end"}),
        (ValueError, "checkpoint_every | at least 1", lp_jax.Serial, {"checkpoint_every": 0}),
        *(
            (ValueError, "fallback=True got no tolerance | rtol=1e-3", make, {"fallback": True})
            for make in SOLVERS
        ),
        *(
            (ValueError, "rtol must be a number | got nan", make, {"rtol": np.nan})
            for make in SOLVERS
        ),
        *(
            (TypeError, "rtol must be a number | '1e-3'", make, {"rtol": "1e-3"})
            for make in SOLVERS
        ),
        (
            ValueError,
            "'inject' or 'mean', or a function | 'left'",
            lp_jax.Rediscretize,
            {"params": "left"},
        ),
    ],
)
def test_bad_settings_are_refused_in_words(error, words, make, fields):
    with refused(error, *words.split(" | ")):
        make(**fields)


def test_a_trajectory_is_never_ignored():
    """The default cycle starts from it, in place of skipping its down-cycle."""
    exact = solve(solver=lp_jax.Serial(checkpoint_every=4)).trajectory
    skipping = lp_jax.MGRIT(coarsening=4, iterations=1, coarse_step=INJECT)
    norms = solve(solver=skipping, guess=exact).stats.residual_norms
    assert norms.shape == (1,) and norms[0] < 1e-14
    assert solve(solver=skipping).stats.residual_norms[0] == -1


def test_non_finite_is_a_result_not_an_exception():
    """With a tolerance a residual that is no number ends the loop."""
    explode = lambda y, layer: y * 1e200  # noqa: E731
    solver = lp_jax.MGRIT(coarsening=2, iterations=50, rtol=1e-8, coarse_step=INJECT, start="guess")
    assert int(solve(explode, solver=solver).stats.iterations) < 5
    solution = jax.jit(lambda: solve(explode, solver=lp_jax.MGRIT(coarse_step=INJECT)))()
    assert int(solution.result) == NON_FINITE
    with refused(lp_jax.SolveError, "not finite", "Serial()"):
        solution.raise_if_failed()


def test_not_converging_is_a_result_not_an_exception():
    solver = lp_jax.MGRIT(coarsening=2, iterations=2, rtol=1e-12, coarse_step=INJECT)
    solution = jax.jit(lambda: solve(solver=solver, t1=8.0))()
    assert int(solution.result) == NOT_CONVERGED
    with refused(lp_jax.SolveError, "tolerance", "iterations", "Residual norms: [–"):
        solution.raise_if_failed()
    with refused(lp_jax.SolveError, "under jit"):
        jax.jit(lambda: solve(solver=solver).raise_if_failed().y1)()
    converged = solve(
        solver=lp_jax.MGRIT(coarsening=2, iterations=12, rtol=1e-10, coarse_step=INJECT)
    )
    assert converged.raise_if_failed() is converged


def backwards(layer, y):
    return y + layer.dt * layer.params


def branching(y, layer):
    return y if y[0] > 0 else y * layer.params


LAYERS = [{"w": jnp.eye(4), "b": jnp.zeros(4)} for _ in range(6)]


@pytest.mark.parametrize(
    ("step", "params", "words"),
    [
        (square, LAYERS, ("a list of 6 equal trees", "jnp.stack(leaves)")),
        (
            square,
            [{"w": jnp.eye(4), "b": jnp.zeros(3)}] * 2,
            ("a list of 2 equal trees", "jnp.stack(leaves)"),
        ),
        (
            backwards,
            jnp.ones((6, 4)),
            ("lp_jax called backwards(y, layer), the state first, with y: float64[4]",),
        ),
        (branching, jnp.ones((6, 4)), ("branching",)),  # an error of jax names the step
    ],
)
def test_what_is_meant_otherwise_is_recognised(step, params, words):
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        lp_jax.solve(step, params, jnp.ones(4))
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert all(word in said for word in words)


def test_the_level_is_static_under_checkpoint():
    levels = []

    @jax.checkpoint
    def step(y, layer):
        levels.append(layer.level)
        return y + layer.dt * layer.params * (2.0 if layer.level > 0 else 1.0)

    lp_jax.solve(step, jnp.ones((16, 4)), jnp.ones(4), solver=lp_jax.MGRIT(coarse_step=INJECT))
    assert set(levels) == {0, 1}


def test_a_solution_is_shown_in_a_line():
    solution = lp_jax.solve(
        lambda y, layer: y + layer.params, jnp.ones((16, 4)), jnp.ones(4), solver=lp_jax.MGRIT()
    )
    shown = repr(solution)
    assert "y1=float64[4], stats=Stats(iterations=2, residual_norms=[–, " in shown
    assert "result=0 (done as asked)" in shown and len(shown) < 200


@pytest.mark.parametrize(
    "solver, dtype",
    [
        (lp_jax.Picard(sweeps=32, rtol=1e-6), "bfloat16"),
        (lp_jax.MGRIT(iterations=10, rtol=1e-6), "float16"),
    ],
    ids=str,
)
def test_a_tolerance_below_rounding_is_met_there(solver, dtype):
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(64, 16, 16)) / 4)

    def step(y, layer):
        wide = y.astype("float64")
        return (wide + layer.dt.astype("float64") * jnp.tanh(wide @ layer.params)).astype(dtype)

    y0 = jnp.asarray(np.random.default_rng(1).normal(size=(4, 16)), dtype)

    @jax.jit
    def run(weights, y0):
        solution, pullback = lp_jax.solve_vjp(step, weights, y0, solver=solver)
        return solution, pullback(solution.y1)[1]

    solution, stats = run(weights, y0)
    assert solution.result == 0 and solution.stats.iterations <= 5 and stats.iterations <= 5


def test_aux_of_another_structure_in_another_call():
    calls = itertools.count()

    def step(y, layer):
        return y + layer.dt * layer.params * y, {"y": y} if next(calls) % 2 else (y,)

    with refused(
        TypeError, "same structure in every call", "{'y': *}", "(*,)", "nothing but its arguments"
    ):
        lp_jax.solve(step, jnp.ones(8), jnp.ones(()), has_aux=True, solver=lp_jax.MGRIT())


def test_residuals_that_do_not_fall_have_a_code():
    def step(y, layer):
        return y + layer.dt * layer.params * y

    solver = lp_jax.MGRIT(
        coarsening=8, iterations=3, relaxation="F", start="guess", coarse_step=INJECT
    )
    falls, grows = (
        lp_jax.solve(step, jnp.full(32, z), jnp.ones(()), solver=solver) for z in (-8.0, -32.0)
    )
    assert falls.stats.residual_norms[-1] < falls.stats.residual_norms[0] and falls.result == DONE
    assert (
        grows.stats.residual_norms[-1] > grows.stats.residual_norms[0]
        and grows.result == NOT_FALLING
    )
    with refused(lp_jax.SolveError, "larger than the first", "Residual norms"):
        grows.raise_if_failed()
