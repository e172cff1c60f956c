"""Pairs of solvers that several suites share, and what their evaluations in a row allow."""

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.networks import Pair
from lp_jax import MGRIT, Picard, Rediscretize
from lp_jax.planning import training_step


def two_one(**fields: Any) -> Pair:
    """MGRIT, two cycles forward and one backward, each with a skipped down-cycle; F on the finest level, FCF below."""
    solver = MGRIT(iterations=2, relaxation=("F", "FCF"), skip_downcycle=True, **fields)
    return solver, dataclasses.replace(solver, iterations=1)


_INJECTED: dict[str, Any] = {"levels": 3, "coarsening": 4, "coarse_step": Rediscretize(), "interval_map": "loop"}


def _identity(layers: int, workers: int, forward: int, adjoint: int) -> Pair:
    """One interval per worker, and nothing in the place of its layers: the coarse problem is a sum."""
    fields: dict[str, Any] = {
        "levels": 2,
        "coarsening": -(-layers // workers),
        "coarse_step": Picard(sweeps=0),
        "storage": "all",
        "interval_map": "loop",
    }
    return MGRIT(iterations=forward, **fields), MGRIT(iterations=adjoint, **fields)


SETTINGS: dict[str, Callable[[int, int], Pair]] = {
    "3 levels, injection, 2/1": lambda n, p: (MGRIT(iterations=2, **_INJECTED), MGRIT(iterations=1, **_INJECTED)),
    "3 levels, injection, 2/1, all stored": lambda n, p: (
        MGRIT(iterations=2, storage="all", **_INJECTED),
        MGRIT(iterations=1, **_INJECTED),
    ),
    "identity, 2/1": lambda n, p: _identity(n, p, 2, 1),
    "identity, 2/2": lambda n, p: _identity(n, p, 2, 2),
    "Picard, 2/1": lambda n, p: (Picard(sweeps=2), Picard(sweeps=1)),
}
"""Of several workers, from the numbers of layers and workers: the forward and the adjoint solver."""


def counted_ratio(name: str, layers: int, workers: int) -> float:
    """Time over that of serial propagation, if only evaluations took time and a transposed one took two.

    A transposed evaluation is one for the state and one for the parameters; solvers need the latter once, in their last sweep.
    Source: cost of a training step, S = N (1 + b) / (C_forward + b C_adjoint) with b = 2; Guenther et al. 2020.
    """
    return training_step(*SETTINGS[name](layers, workers), layers, workers=workers, looped=True).depth() / (3 * layers)
