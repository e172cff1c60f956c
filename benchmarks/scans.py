"""Scans that are not layers of a network: iterations that each needs, and the error against `jax.lax.scan`.

Samplers of diffusion models, returns, a Kalman filter, Markov chains, optimizers and differential equations, each solved to a
tolerance. Everything is in float64, so that errors are those of the solvers.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lp_jax
from benchmarks import report
from benchmarks.command import Progress, add_only, common_parser, new_result, results_folder, wanted
from benchmarks.scan_problems import (
    Scan,
    advantages,
    banana,
    diffusion,
    heat,
    hmc,
    kalman,
    logistic,
    lorenz,
    mala,
    training,
    two_modes,
)
from lp_jax import planning

Made = Scan | lp_jax.Problem  # a problem where the step needs its dt


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the table; ``reason`` says why it ends as it does."""

    name: str
    steps: int
    make: Callable[[int], Made]
    solver: lp_jax.Solver
    reason: str


def sweeps(rtol: float = 1e-3) -> lp_jax.Picard:
    return lp_jax.Picard(sweeps=100, rtol=rtol)


def newton(**fields: Any) -> lp_jax.Newton:
    return lp_jax.Newton(**{"iterations": 1000, "rtol": 1e-6, "batch_axes": 0} | fields)


def cycles(**fields: Any) -> lp_jax.MGRIT:
    usual = {
        "levels": 5,
        "relaxation": "FCF",
        "iterations": 30,
        "rtol": 1e-6,
        "coarse_step": lp_jax.Rediscretize(),
    }
    return lp_jax.MGRIT(**usual | fields)


def regression(steps: int, *, size: float) -> Scan:
    """MALA from the mode."""
    log_density, mode = logistic()
    return mala(steps, log_density, mode, size=size)


def in_two_modes(steps: int, *, path: int) -> Scan:
    half = 1.5
    return hmc(
        steps, functools.partial(two_modes, half=half), jnp.full(2, half), size=0.2, path=path
    )


def adam(steps: int, *, rate: float) -> Scan:
    """With ``eps_root``, as its square root has no derivative at zero."""
    return training(steps, optax.adam(rate, eps_root=1e-10))


_SMOOTH = "a step changes a sample little"
_NOISE = "the same, with noise that is fixed"
_FORGETS = "chains with the same noise meet"
_HELD = "the gradient is outside of the Jacobian"


def _hmc(path: int, reason: str) -> Case:
    return Case(
        f"HMC, two modes, path of {path}",
        256,
        functools.partial(in_two_modes, path=path),
        newton(),
        reason,
    )


def _lorenz(time: float, reason: str, *, coarse: int = 0) -> Case:
    guessed, solver = (
        f", from {coarse} coarse steps" if coarse else "",
        newton(rtol=None, atol=1e-6),
    )
    make = functools.partial(lorenz, time=time, coarse=coarse)
    return Case(
        f"Lorenz, time {time:g}{guessed}", 1024, make, solver if coarse else newton(), reason
    )


def cases() -> list[Case]:
    """The rows, in order."""
    some = functools.partial
    return [
        Case("DDIM sampler", 100, some(diffusion, eta=0.0), sweeps(), _SMOOTH),
        Case("DDIM sampler", 1000, some(diffusion, eta=0.0), sweeps(), _SMOOTH),
        Case("DDPM sampler", 100, some(diffusion, eta=1.0), sweeps(), _NOISE),
        Case("DDPM sampler", 1000, some(diffusion, eta=1.0), sweeps(), _NOISE),
        Case(
            "generalised advantages",
            2048,
            advantages,
            newton(jacobian="diagonal", iterations=1, rtol=None, batch_axes=None),
            "linear: one iteration is exact",
        ),
        Case("Kalman filter, mean and covariance", 2000, kalman, newton(), "it forgets its start"),
        Case(
            "MALA, logistic regression, size .05",
            1000,
            some(regression, size=0.05),
            newton(),
            _FORGETS,
        ),
        Case(
            "MALA, logistic regression, size .1",
            1000,
            some(regression, size=0.1),
            newton(),
            "most proposals are refused",
        ),
        Case(
            "MALA, two modes",
            1000,
            some(mala, log_density=two_modes, start=jnp.full(1, 2.0), size=2.0),
            newton(),
            "chains part, but only between the modes",
        ),
        Case(
            "MALA, banana",
            1000,
            some(mala, log_density=banana, start=jnp.ones(2), size=0.1),
            newton(),
            "a small difference grows",
        ),
        _hmc(2, _FORGETS),
        _hmc(10, "a difference grows along a path"),
        _hmc(40, "a difference grows along a path"),
        *(
            Case(
                f"Adam, rate {rate:.0e}",
                64,
                some(adam, rate=rate),
                newton(jacobian="diagonal", rtol=1e-3),
                _HELD,
            )
            for rate in (3e-4, 1e-3, 3e-3, 1e-2)
        ),
        Case(
            "SGD, rate 1",
            64,
            lambda steps: training(steps, optax.sgd(1.0)),
            sweeps(),
            "a step at the best rate overshoots",
        ),
        Case("heat equation", 4096, heat, cycles(), "a longer dt damps as short ones do"),
        Case(
            "heat equation",
            4096,
            heat,
            cycles(coarse_step=lp_jax.Picard(sweeps=1)),
            "sweeps are explicit, the equation is stiff",
        ),
        _lorenz(2.0, "the time is short"),
        _lorenz(2.0, "the guess is near", coarse=64),
        _lorenz(10.0, "errors grow along the path"),
        _lorenz(10.0, "the guess is rough", coarse=64),
        _lorenz(10.0, "the guess is near", coarse=256),
    ]


def solved(made: Made, solver: lp_jax.Solver) -> tuple[lp_jax.Solution, Any]:
    """The solution, and all states by a scan, in the order in which they are computed."""
    if isinstance(made, lp_jax.Problem):
        return _solve(made, solver), _solve(made, lp_jax.Serial()).aux
    problem = lp_jax.scanned(made.body, made.init, made.xs, reverse=made.reverse)
    if made.jacobian_of is not None and hasattr(solver, "jacobian_of"):
        step = lp_jax.scanned(made.jacobian_of, made.init, made.xs).step
        solver = dataclasses.replace(solver, jacobian_of=step)  # type: ignore[type-var]
    scan = jax.jit(functools.partial(jax.lax.scan, made.body, reverse=made.reverse))
    _, exact = scan(made.init, made.xs)
    return _solve(problem, solver, made.guess), jax.tree.map(
        lambda x: x[::-1], exact
    ) if made.reverse else exact


def _solve(
    problem: lp_jax.Problem, solver: lp_jax.Solver, guess: Any = "constant"
) -> lp_jax.Solution:
    arrays = {name: getattr(problem, name) for name in ("params", "y0", "data")}
    return jax.jit(lambda arrays: problem.replace(**arrays).solve(solver=solver, guess=guess))(
        arrays
    )


def largest_error(found: Any, exact: Any) -> float:
    """Of any number, divided by the largest number of its array; infinite where one is not finite."""

    def of(found: jax.Array, exact: jax.Array) -> float:
        with np.errstate(all="ignore"):
            error = float(np.max(np.abs(np.subtract(found, exact))) / np.max(np.abs(exact)))
        return error if math.isfinite(error) else math.inf

    return max(map(of, jax.tree.leaves(found), jax.tree.leaves(exact)))


def measured(case: Case, steps: int | None = None) -> dict[str, Any]:
    """Solve, and compare with a scan."""
    steps = steps or case.steps
    made = case.make(steps)
    solution, exact = solved(made, case.solver)
    taken = int(solution.stats.iterations)
    waiting = in_a_row(case.solver, taken, steps)
    error = largest_error(solution.aux, exact)
    converged = int(solution.result) == 0 and error < _WRONG
    return {
        "problem": case.name,
        "steps": steps,
        "method": method(case.solver),
        "iterations": taken,
        "in_a_row": waiting,
        "error": error,
        "verdict": verdict(converged, waiting, steps),
        "reason": case.reason,
    }


_WRONG = 0.1  # error of what counts as diverged, whatever the residual norms say


def in_a_row(solver: lp_jax.Solver, taken: int, steps: int) -> int:
    """Evaluations that wait for each other: all steps at once in an iteration and once in the end, or those of cycles."""
    if solver.stride(steps) == 1 and not solver.exact:
        return taken + 1
    return planning.training_step(solver.with_effort(taken), lp_jax.Serial(), steps).depth(
        "forward"
    )


def verdict(converged: bool, waiting: int, steps: int) -> str:
    """In words, from what was measured alone."""
    gain = steps / waiting
    if not converged:
        return "fails"
    if gain < _NOTHING:
        return "no gain"
    return f"{'works' if gain >= _LITTLE else 'little gain'}, {gain:.0f} times fewer"


_NOTHING, _LITTLE = 1.5, 4  # times fewer evaluations in a row


def method(solver: lp_jax.Solver) -> str:
    """In a few words, with the tolerance."""
    name = type(solver).__name__
    if hasattr(solver, "jacobian"):
        name += f", {solver.jacobian}"
    if hasattr(solver, "coarse_step"):
        name += f", {type(solver.coarse_step).__name__}"
    if not solver.has_tolerance:
        return name
    limit = f"{solver.atol:.0e} absolute" if solver.rtol is None else f"{solver.rtol:.0e}"
    return f"{name}, to {limit.replace('e-0', 'e-')}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each row."""
    head = [
        "problem",
        "steps",
        "method",
        "iterations",
        "in a row",
        "largest error",
        "verdict",
        "why",
    ]
    lines = [
        [
            row["problem"],
            f"{row['steps']:,}",
            row["method"],
            str(row["iterations"]),
            str(row["in_a_row"]),
            report.scientific(row["error"]),
            row["verdict"],
            row["reason"],
        ]
        for row in rows
    ]
    return report.pipes([head, *lines])


LEGEND = (
    "Iterations: sweeps, Newton iterations or cycles until the residual norm is below the tolerance, which is relative to the "
    "first one unless it says absolute. The last iteration is the one that sees it. In a row: evaluations of a step, or of a "
    "step with its derivative, that wait for each other; a scan has as many as steps. Largest error: of any number of any state "
    "against `jax.lax.scan` (against `lp_jax.Serial()` for the heat equation), divided by the largest number; a dash is one that "
    "is not finite."
)


def text(result: report.Result) -> str:
    return report.page(result, table(result["rows"]), LEGEND)


QUICK = 32  # steps


EXAMPLES = [("", "all problems"), ("--only Kalman", "one of them")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common_parser("scans", __doc__ or "", EXAMPLES)
    add_only(parser, "Run only problems with one of these in their names.")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    out = results_folder(parser, options)
    result = new_result("scans", "Scans that are not layers", arguments, {"float": "float64"})
    chosen = [case for case in cases() if wanted(case.name, options)]
    if not chosen:
        names = dict.fromkeys(case.name for case in cases())
        parser.error(
            f"no name has {' or '.join(options.only)} in it; there are: {'; '.join(names)}."
        )
    progress = Progress()
    for number, case in enumerate(chosen, 1):
        progress(f"{number} of {len(chosen)}: {case.name}")
        result["rows"].append(measured(case, QUICK if options.quick else None))
        paths = report.save(result, out, None, text)
        jax.clear_caches()
    progress.clear()
    print(table(result["rows"]))
    print("Wrote " + ", ".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
