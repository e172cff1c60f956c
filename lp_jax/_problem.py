"""What is solved, as one value."""

import dataclasses
from typing import Any

import jax

from lp_jax import _check, _inputs
from lp_jax._comm import Comm
from lp_jax._types import PyTree, Stacked, State, Step


@_check.called_right
@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A deep network and the state that enters it: what `solve` solves, as one value.

    ``vars(problem)`` are the arguments of `solve`: ``lp_jax.solve(**vars(problem), solver=...)``. The planner
    (`plan`, `calibrate`), `hierarchy` and ``nn.LayerParallel.problem`` speak it.

    Args:
        step: ``step(y, layer) -> y_next``, see `solve`.
        params: parameters of the layers; leaves ``(N, ...)``. Shapes (`jax.ShapeDtypeStruct`) are enough to plan with.
        y0: the state entering layer 0, a pytree of floating-point or complex arrays.
        shared: what every layer sees as ``layer.shared``, not stacked.
        data: per-layer inputs; leaves ``(N, ...)``, seen as ``layer.data``.
        t0: time at which layer 0 starts.
        t1: time at which the last layer ends, or N + 1 increasing times.
        comm: where the layers live; None is one device.
        has_aux: whether ``step`` returns ``(y_next, aux)``.

    Raises:
        ValueError: for leaves of different lengths or none.
        TypeError: for an integer state, a step that is no function, and a ``comm`` that is not a `Comm`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> problem = lp_jax.Problem(step, jnp.ones(64), jnp.ones(()))
        >>> problem.layers
        64
        >>> round(float(lp_jax.solve(**vars(problem)).y1), 2)
        2.7
    """

    step: Step
    params: Stacked
    y0: State
    _: dataclasses.KW_ONLY
    shared: PyTree = None
    data: Stacked = None
    t0: Any = 0.0
    t1: Any = 1.0
    comm: Comm | None = None
    has_aux: bool = False

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise TypeError(f"step must be a function step(y, layer) -> y_next; got {self.step!r}.")
        object.__setattr__(self, "y0", _inputs.state(self.y0))
        object.__setattr__(self, "comm", _inputs.comm(self.comm))
        for name in ("params", "shared", "data"):
            object.__setattr__(self, name, _inputs.arrays(getattr(self, name), name))
        _inputs.number_of_layers(self.params, self.data, alone=self.comm is None)

    @property
    def layers(self) -> int:
        """Number of layers that were passed: all of them but with `MPIComm`, where it is this rank's."""
        return int(jax.tree.leaves((self.params, self.data))[0].shape[0])
