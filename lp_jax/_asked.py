"""A context that replaces the solvers of all solves traced inside it, or has each report what it measured.

The caches of ``jax.jit`` know of it, so that a function that was traced before is traced anew.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from lp_jax._solver import Solver, Stats


class Asked(NamedTuple):
    """Replacements and reports that hold for the solves inside the context.

    Attributes:
        solvers: forward and adjoint solver in the place of each solve's own; None keeps these.
        report: ``report(direction, iteration, layers, stats)``, called on the host with what each solve measured.
    """

    solvers: tuple[Solver, Solver | None] | None = None
    report: Callable[[str, str, int, Stats], None] | None = None


asked = jax.make_user_context(Asked())


def tell(direction: str, solver: Solver, layers: int, stats: Stats) -> None:
    """Report a solve, where a report is asked for."""
    report = asked.value.report
    if report is not None:
        name = f"{type(solver).__name__} {solver.iteration_name}"

        def call(stats: Stats) -> None:
            report(direction, name, layers, stats)

        jax.debug.callback(call, jax.lax.stop_gradient(stats))
