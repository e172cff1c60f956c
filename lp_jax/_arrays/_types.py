"""The argument of a step, and the names of the trees that the solver works on, by the leading axis of their leaves."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
from jax.typing import ArrayLike

PyTree = Any
StrPath = str | os.PathLike[str]
"""The name of a file or a folder, as `open` takes it."""

if TYPE_CHECKING:
    from jaxtyping import Inexact, PyTree as Tree, Shaped

    State: TypeAlias = Tree[Inexact[jax.Array, "..."]]
    Points: TypeAlias = Tree[Inexact[jax.Array, "steps ..."]]
    CPoints: TypeAlias = Tree[Inexact[jax.Array, "intervals ..."]]
    Stacked: TypeAlias = Tree[Shaped[jax.Array, "layers ..."]]
    Scalar: TypeAlias = Inexact[jax.Array, ""]
else:
    State = Points = CPoints = Stacked = Any
    Scalar = jax.Array


@jax.tree_util.register_static
class Static(int):
    """An integer that is structure of a pytree, not a leaf: transformations of JAX leave it as it is."""


class Layer(NamedTuple):
    """One layer, as the second argument of ``step(y, layer)``.

    Attributes:
        params: this layer's slice of ``params`` (leading layer axis removed).
        shared: ``shared``, the same for every layer.
        data: this layer's slice of ``data``.
        t: time at which the layer starts, a scalar of the state's real dtype, in the units of ``t0`` and ``t1``.
        dt: time that the layer spans, same dtype and units. On a coarse level it spans several fine layers.
        index: global index of the (left-most) fine layer, an int32 scalar.
        level: static int, 0 on the finest level; static under `jax.checkpoint` and the like, too.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> layer = lp_jax.Layer(jnp.zeros((8, 8)), shared=None, data=None, t=jnp.zeros(()), dt=jnp.ones(()), index=0, level=0)
        >>> step(jnp.ones(8), layer).shape  # one layer, by hand
        (8,)
    """

    params: PyTree
    shared: PyTree
    data: PyTree
    t: jax.Array
    dt: jax.Array
    index: jax.Array  # type: ignore[assignment]
    level: int


class Slices(NamedTuple):
    """The stacked part of `Layer`: leaves ``(layers, ...)``. Padding has ``index`` >= N and ``dt`` = 0."""

    params: Stacked
    data: Stacked
    t: jax.Array
    dt: jax.Array
    index: jax.Array  # type: ignore[assignment]


# the caller's ``shared``, and traced values that the step closes over
Shared = tuple[PyTree, tuple[jax.Array, ...]]


class Arrays(NamedTuple):
    """The arrays of a solve. Its gradient has the same type, with None for parts without gradient."""

    slices: Slices
    y0: State
    shared: Shared
    solver: PyTree = None  # of the forward solve; its tolerances are arrays
    adjoint_solver: PyTree = None
    # C-points at which the forward solve starts; None for the solver's own start
    guess: CPoints | None = None
    # the same for the adjoint solve; in a gradient, where that solve ended
    adjoint_guess: CPoints | None = None
    # its gradient counts how solves ended; None where no count is wanted
    watch: jax.Array | None = None
    # zeros whose gradient is how the adjoint solve ended, its stats and its C-points; None where that is not wanted
    ended: PyTree = None


Times = ArrayLike | Sequence[float]  # a time, or increasing times
Step = Callable[[State, Layer], State]  # the user's: ``step(y, layer) -> y_next``
# a step of a problem: the user's step on a level, by its number, or another of the user's steps
StepKey = int | Step
# ``step(u, x, shared) -> u_next``, ``x`` a slice of a level's operands
SliceStep = Callable[[State, PyTree, PyTree], State]
# ``advance(u, x, shared) -> (u_next, emitted)``
Advance = Callable[[State, PyTree, PyTree], tuple[State, PyTree]]
# (restrict, prolong) between two levels
Transfer = tuple[Callable[[State], State], Callable[[State], State]]
