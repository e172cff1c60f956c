"""What a step sees, and what the solver carries for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

PyTree = Any
State = PyTree  # the activations between two layers: any pytree of inexact arrays


class Layer(NamedTuple):
    """One layer, as the second argument of ``step(y, layer)``.

    Attributes:
        params: this layer's slice of ``params`` (leading layer axis removed).
        shared: ``shared``, the same for every layer.
        data: this layer's slice of ``data``.
        t: time at which the layer starts, a scalar of the state's real dtype, in the units of ``t0`` and ``t1``.
        dt: time that the layer spans, same dtype and units. On a coarse level it spans several fine layers.
        index: global index of the (left-most) fine layer, an int32 scalar.
        level: static int, 0 on the finest level.
    """

    params: PyTree
    shared: PyTree
    data: PyTree
    t: jax.Array
    dt: jax.Array
    index: jax.Array  # type: ignore[assignment]
    level: int


class Slices(NamedTuple):
    """The stacked part of `Layer`; every leaf has the layers as its leading axis.

    ``valid`` is False for layers that only pad a short interval (their step is the identity); None where there are none.
    """

    params: PyTree
    data: PyTree
    t: jax.Array
    dt: jax.Array
    index: jax.Array  # type: ignore[assignment]
    valid: jax.Array | None = None


Step = Callable[[State, Layer], State]
"""What the user writes: ``step(y, layer) -> y_next``."""

SliceStep = Callable[[State, PyTree, PyTree], State]
"""What the solver runs: ``step(u, x, shared) -> u_next``, with ``x`` one slice of a level's stacked operands."""
