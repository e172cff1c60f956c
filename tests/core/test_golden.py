"""What PyMGRIT and TorchBraid/XBraid compute, entry by entry (see golden/README.md for the definitions).

Histories are followed through the solver's own methods, which is what `solve` runs: the tests of gradients call it. On several
devices and ranks a solve has the numbers of one; see test_mesh.py and test_mpi.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import INJECT, Dense, cases, conv_step, dense_step, relative_error

import lp_jax
from lp_jax._arrays import _tree

ROUNDING = 16 * np.finfo(np.float64).eps
RELAX = {0: "F", 1: "FCF", 2: "FCFCF"}
START = {True: "cascade", False: "guess"}


@pytest.fixture(scope="module")
def dense(golden):
    return Dense.load(golden)


def relaxed(solver, levels, u):
    """The norm, and all states after F-relaxation."""
    squares = _tree.sum_of_squares(lp_jax.multigrid.residual(levels[0], u))
    return jnp.sqrt(squares), lp_jax.multigrid.f_relax(levels[0], u)


def relaxed_and_swept(solver, levels, u):
    """Also the final sweep's last state."""
    return *relaxed(solver, levels, u), solver.finish(levels, u, None)[0][-1]


@functools.partial(jax.jit, static_argnames=("step", "cycles", "watch", "nested"))
def history(solver, step, params, y0, guess, coarse, t1, data=None, *, cycles, watch, nested=False):
    """After each cycle: the norm during it, and what ``watch`` makes of the C-points that it leaves.

    From the guess; where ``coarse`` is true from the coarsest level: by the cascade, which is the first cycle then, or, if
    ``nested``, by PyMGRIT's nested iteration before it. Where a solve starts is data, so that both are one program.
    """
    levels = lp_jax.multigrid.hierarchy(lp_jax.Problem(step, params, y0, data=data, t1=t1), solver)
    from_guess, first = (
        dataclasses.replace(solver, start=s).init(levels, guess) for s in ("guess", "cascade")
    )
    if nested:  # a V-cycle on every level on the way up: the cascade of an F-cycle
        first = lp_jax.Start(
            dataclasses.replace(solver, start="cascade", cycle="F").init(levels, None).state
        )

    def body(u, cycle):
        improved, residual = solver.improve(levels, u)
        spent = coarse & (cycle < first.spent)
        u, norm = jnp.where(spent, u, improved), jnp.where(spent, -1.0, levels[0].norm(residual))
        return u, (norm, *watch(solver, levels, u))

    return jax.lax.scan(body, jnp.where(coarse, first.state, from_guess.state), jnp.arange(cycles))[
        1
    ]


def agree(got, wanted, what):
    """1e-7 relative where the recorded entry is above 1e-12, plus the rounding of sums over O(1) states.

    A residual of 1e-10 is a difference of states near 1, so its last digits are rounding: the two recorded codes differ
    from each other by up to 1e-16 in the same entries, which is 1e-7 relative at 1e-9 and 1e-4 at 1e-12.
    """
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert np.array_equal(got == -1, wanted == -1), what
    above = wanted > 1e-12
    assert above.any(), what
    np.testing.assert_allclose(got[above], wanted[above], rtol=1e-7, atol=ROUNDING, err_msg=what)


def by_structure(stored):
    """The cases in an order in which those that share a compiled program follow each other."""
    return sorted(
        stored,
        key=lambda case: [
            case["N"],
            case["levels"],
            case["cf"],
            cycle_of(case),
            *relaxation_of(case),
        ],
    )


def cycle_of(case):
    return "F" if case.get("option") == "fmg" else case.get("cycle", "V")


def relaxation_of(case):
    """On the finest level, and below."""
    return tuple(
        RELAX[case.get(name, case.get("cf_iter"))] for name in ("nrelax_fine", "nrelax_coarse")
    )


def solver_of(case, **fields):
    c_weight = 1.3 if case.get("option") == "cwt1.3" else case.get("weight_c", 1.0)
    return lp_jax.MGRIT(
        levels=case["levels"],
        coarsening=case["cf"],
        relaxation=relaxation_of(case),
        coarse_step=INJECT,
        cycle=cycle_of(case),
        c_weight=c_weight,
        **({"start": START[case.get("skip_downcycle", False)]} | fields),
    )


def initial_guess(dense, option, m):
    if option.endswith("random"):
        return dense.guess[m::m]
    return np.stack(
        [dense.y0 if option.endswith("constant") else np.zeros_like(dense.y0)] * (64 // m)
    )


@pytest.mark.parametrize("part", range(5))
def test_dense_histories(golden, dense, part):
    """XBraid's and PyMGRIT's: settings that both recorded are one program."""
    by_xbraid, by_pymgrit = (
        cases(golden, f"dense_{name}.json") for name in ("xbraid_forward", "pymgrit")
    )
    assert (len(by_xbraid), len(by_pymgrit)) == (96, 54)
    for case in by_structure(by_xbraid + by_pymgrit)[part * 30 : part * 30 + 30]:
        solver, serial = solver_of(case, start="guess"), dense.serial[case["T"]][1:]
        guess = initial_guess(dense, case.get("option") or case["init"], case["cf"])
        arguments = (
            dense_step,
            dense.params,
            dense.y0,
            guess,
            case.get("skip_downcycle", False),
            case["T"],
        )
        found = history(solver, *arguments, cycles=10, watch=relaxed_and_swept)
        what = {name: value for name, value in case.items() if not isinstance(value, list)}
        if "rnorm" in case:
            norms, _, _, last = (np.asarray(x)[:8] for x in found)
            agree(norms, case["rnorm"], f"rnorm of {what}")
            agree(
                np.linalg.norm(last - serial[-1][None], axis=(1, 2)),
                case["err_yN_l2"],
                f"err_yN of {what}",
            )
            continue
        norms, after, states, _ = map(np.asarray, found)
        agree(after, case["conv"], f"conv of {what}")
        if case["cf_iter"] == 0:
            agree(norms[1:], case["conv"][:-1], f"residual_norms of {what}")
        error = states - serial[None]
        agree(
            np.linalg.norm(error.reshape(10, -1), axis=1),
            case["err_spacetime_l2"],
            f"spacetime error of {what}",
        )
        agree(np.abs(error).max(axis=(1, 2, 3)), case["err_max"], f"maximal error of {what}")
        agree(
            np.linalg.norm(error[:, -1], axis=(1, 2)),
            case["err_final_l2"],
            f"final error of {what}",
        )


def backward_euler(y, layer):
    return y / (1 + layer.dt)


@pytest.mark.parametrize("part", range(3))
def test_dahlquist(golden, part):
    stored = cases(golden, "dahlquist_pymgrit.json")
    assert len(stored) == 90
    for case in by_structure(stored)[part * 30 : part * 30 + 30]:
        solver, steps, nested = solver_of(case), case["N"], case["nested_iteration"]
        exact = (1 + case["dt"]) ** -np.arange(1.0, steps + 1)
        arguments = (
            None,
            jnp.ones(()),
            np.zeros(-(-steps // case["cf"])),
            nested,
            case["T"],
            np.arange(steps),
        )
        # nested iterations are recorded of 64 steps only
        _, after, states = history(
            solver, backward_euler, *arguments, cycles=12, watch=relaxed, nested=steps == 64
        )
        error = np.linalg.norm(states - exact[None], axis=1)
        agree(after, case["conv"], f"conv of {solver}, nested {nested}")
        agree(error, case["err_spacetime_l2"], f"error of {solver}, nested {nested}")


def tolerance_for(norms, k):
    """A tolerance that ends a solve after exactly ``k`` cycles, or None if none does; counts then come from the settings.

    Counts are structure and would each compile a program; tolerances are data.
    """
    norms = np.asarray(norms)
    if k == len(norms) and norms[-1] >= 0:
        return -1.0
    before, last = norms[: k - 1], norms[k - 1]
    before = before[before >= 0]
    if last < 0 or (before.size and before.min() <= last):
        return None
    return float(np.sqrt(last * before.min())) if before.size else float(last)


def with_cycles(solver, norms, k):
    atol = tolerance_for(norms, k)
    return (
        dataclasses.replace(solver, iterations=k)
        if atol is None
        else dataclasses.replace(solver, atol=atol)
    )


@functools.partial(jax.jit, static_argnames="step")
def pulled(forward, adjoint, step, params, y0, target, t1=1.0, guess=None):
    """The solution, gradients of half the squared distance to the target, and the adjoint solve's stats."""
    guess = "zeros" if guess is None else guess
    solution, pull = lp_jax.solve_vjp(
        step, params, y0, t1=t1, solver=forward, adjoint_solver=adjoint, guess=guess
    )
    gradients, stats = pull(solution.y1 - target)
    return solution, (*gradients.params, gradients.y0), stats


def gradient(forward, adjoint, dense, t1):
    """Last state, gradients, and both solves' stats."""
    solution, gradients, stats = pulled(
        forward, adjoint, dense_step, dense.params, dense.y0, dense.target, t1
    )
    return solution.y1, gradients, solution.stats, stats


COUNTS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize(
    ("part", "storage"), list(zip(range(6), ("c_points", "all") * 3, strict=True))
)
def test_xbraid_gradient(golden, dense, storage, part):
    """The gradient's error after (k_f, k_b) cycles is no larger than XBraid's, in every entry."""
    stored = cases(golden, "dense_xbraid_gradient.json")
    assert len(stored) == 48
    exact = {t1: gradient(lp_jax.Serial(), lp_jax.Serial(), dense, t1)[:2] for t1 in (1.0, 4.0)}
    for case in by_structure(stored)[part * 8 : part * 8 + 8]:
        solver = solver_of(case, iterations=8, storage=storage, atol=-1.0)
        _, _, forward_stats, _ = gradient(solver, solver, dense, case["T"])
        rows = {(row["fwd"], row["bwd"]): row for row in case["table"]}
        assert set(rows) == {(f, b) for f in COUNTS for b in COUNTS}
        for f in COUNTS:
            forward = with_cycles(solver, forward_stats.residual_norms, f)
            found = {8: gradient(forward, solver, dense, case["T"])}
            norms = found[8][-1].residual_norms
            found |= {
                b: gradient(forward, with_cycles(solver, norms, b), dense, case["T"])
                for b in COUNTS[:-1]
            }
            for b, (y1, gradients, *stats) in found.items():
                assert [int(s.iterations) for s in stats] == [f, b]
                names, wanted = ("y", "gW", "gb", "gx"), (exact[case["T"]][0], *exact[case["T"]][1])
                for name, g, w in zip(names, (y1, *gradients), wanted, strict=True):
                    recorded = rows[f, b][f"err_{name}"]
                    if recorded > 1e-12:
                        error = relative_error(g, w)
                        assert error <= 1.05 * recorded, (name, f, b, error, recorded, solver)


def conv_problem(golden):
    """Parameters, state and target of the stored convolutional network, and all that is stored."""
    z = {k: jnp.asarray(v) for k, v in np.load(golden / "conv_torchbraid.npz").items()}
    return tuple(z[k] for k in ("w1", "b1", "w2", "b2")), z["x0"], z["target"], z


def test_torchbraid_conv(golden):
    """The convolutional network: residual norms as recorded, errors no larger than recorded."""
    stored = cases(golden, "conv_torchbraid.json")
    assert len(stored) == 9
    *problem, z = conv_problem(golden)
    exact = {"y": z["exact_y"]} | {
        f"g{k}": z[f"exact_g{k}"] for k in ("_w1", "_b1", "_w2", "_b2", "x")
    }
    for case in stored:
        s = case["settings"]
        relaxation = RELAX[s.get("nr0", s["nrelax_fine"])], RELAX[s["nrelax_coarse"]]
        hierarchy = {
            "levels": s["levels"],
            "coarsening": s["cf"],
            "relaxation": relaxation,
            "coarse_step": INJECT,
        }
        solvers = [
            lp_jax.MGRIT(**hierarchy, iterations=s[k], start=START[s["skip"]]) for k in ("kf", "kb")
        ]
        zeros = None if s["skip"] else np.zeros((32 // s["cf"], *problem[1].shape))
        solution, gradients, _ = pulled(*solvers, conv_step, *problem, guess=zeros)
        compared = set(exact)
        if s["calls"] == 2 and not s["skip"]:
            # That code starts a second call from the states of the first, and its adjoint too, which ours cannot:
            # a solve is a pure function. The forward solve can be given the trajectory.
            solution, gradients, _ = pulled(
                *solvers, conv_step, *problem, guess=solution.trajectory
            )
            compared = {"y"}
        if s["levels"] > 1:
            np.testing.assert_allclose(
                solution.stats.residual_norms[-1], case["stats"]["fwd_rnorm"], rtol=1e-7
            )
        got = dict(zip(exact, (solution.y1, *gradients), strict=True))
        for name in compared:
            error, recorded = relative_error(got[name], exact[name]), case["err"][name]
            assert error <= (1.05 * recorded if recorded > 1e-12 else 1e-12), (
                case["name"],
                name,
                error,
                recorded,
            )


# Gradient errors of an independent NumPy/JAX probe of the algorithm: factor 4, skipped down-cycle, F on the finest level and
# FCF below, all parameters as one vector. (levels, cycles forward, backward): injection, mean, Picard 1 and 2 sweeps.
PROBED = {
    ("smooth", 3, 2, 1): (1.9e-1, 1.8e-1, 1.6e-1, 2.2e-2),
    ("conv", 3, 2, 1): (1.7e-1, 1.0e-1, 2.3e-2, 3.1e-3),
    ("conv", 2, 1, 1): (2.2e-1, 6.3e-1, 2.5e-2, 7.2e-4),
}


def gradient_errors(levels, cycles, *problem):
    """Of so many cycles forward and backward, for each of the probe's coarse steps."""

    def by_params(forward, adjoint):
        return pulled(forward, adjoint, *problem)[1][:-1]

    exact = by_params(lp_jax.Serial(), lp_jax.Serial())
    for how in (
        INJECT,
        lp_jax.Rediscretize(params="mean"),
        lp_jax.Picard(sweeps=1),
        lp_jax.Picard(sweeps=2),
    ):
        solvers = (
            lp_jax.MGRIT(levels=levels, coarsening=4, iterations=k, coarse_step=how) for k in cycles
        )
        yield relative_error(by_params(*solvers), exact)


@pytest.mark.parametrize("case", PROBED, ids=lambda c: "-".join(map(str, c)))
def test_gradient_error_by_coarse_step(golden, dense, case):
    """The probe's table, to its two digits."""
    kind, levels, *cycles = case
    smooth = dense_step, dense.params, dense.y0, dense.target, 4.0
    problem = smooth if kind == "smooth" else (conv_step, *conv_problem(golden)[:3])
    for error, probed in zip(gradient_errors(levels, cycles, *problem), PROBED[case], strict=True):
        assert abs(error - probed) <= 0.05 * probed
