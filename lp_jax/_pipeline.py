"""`pipeline`: a function mapped over microbatches, whose layers run device after device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from lp_jax._arrays._types import PyTree
from lp_jax._comms._comm import Comm
from lp_jax._parallel import Rules
from lp_jax._programs import _inputs
from lp_jax._programs._asked import Piping, asked
from lp_jax._solvers._serial import Serial

_AXIS = "lp_jax.microbatches"


def pipeline(
    f: Callable[..., PyTree],
    comm: Comm | Mesh | None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    checkpoint: bool = False,
) -> Callable[..., PyTree]:
    """Return ``jax.vmap(f, in_axes, out_axes)``, over microbatches, with the layers of ``f`` spread over devices.

    The scans over layers inside, all that `parallel` solves, and each `solve` and `scan` without a solver of its own, run device
    after device: microbatch m + 1 enters a device as m leaves it. With M microbatches on P devices that takes M + P - 1 turns
    forward and as many back, for the cotangents of the states; then each device forms the gradients of its own layers. Every
    layer is evaluated once, and the numbers are those of ``jax.vmap`` to rounding. All else, such as an embedding and the loss,
    is mapped by ``jax.vmap``, on every device.

    The gradient goes outside, as in the example. That of an operand that all microbatches share is summed as they pass, so that
    no array has an axis for layers and one for microbatches. A device keeps, for every microbatch, what its layers need for
    the gradient.

    Args:
        f: any function that can be traced, of one microbatch.
        comm: where the layers live: a mesh (its axis "layers"), `MeshComm` or `MPIComm`. On MPI ranks every scan with
            floating-point numbers in its carry counts as one over this rank's layers: a scan over time goes outside.
        in_axes: as for ``jax.vmap``: the axis of the microbatches in every argument; None for what they share.
        out_axes: as for ``jax.vmap``.
        checkpoint: whether a device keeps only the states that enter it, one for each microbatch, and evaluates its layers
            again for the gradient.

    Raises:
        ValueError: without an axis of microbatches, and for scans that cannot be a pipeline: in a gradient or a function with a
            derivative of its own, and with side effects.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> mesh = jax.make_mesh((2,), ("layers",))
        >>> def loss(weights, x):
        ...     y, _ = jax.lax.scan(lambda y, w: (y + 0.1 * jnp.tanh(y @ w), None), x, weights)
        ...     return jnp.mean(y ** 2)
        >>> piped = lp_jax.pipeline(loss, mesh, in_axes=(None, 0))
        >>> x = jnp.ones((4, 2, 8))  # 4 microbatches of 2 examples
        >>> gradient = jax.grad(lambda weights: piped(weights, x).mean())(jnp.zeros((16, 8, 8)))
        >>> gradient.shape
        (16, 8, 8)

    References:
        Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019; Qi, Wan,
        Huang, Lin, "Zero bubble pipeline parallelism", ICLR 2024, for gradients of weights apart from those of states.
    """
    where = _inputs.comm(comm)
    # All layers run one after another; `strict` refuses scans that could not be a part of the pipeline.
    rules = Rules(solver=Serial(), comm=where, strict=True)
    if not any(axis is not None for axis in jax.tree.leaves(in_axes, is_leaf=lambda x: x is None)):
        raise ValueError(
            f"pipeline needs an axis of microbatches in at least one argument; got "
            f"in_axes={in_axes!r}. Give it the axis as for "
            "jax.vmap, like in_axes=(None, 0) for (params, x), with x.reshape(8, -1, *x.shape[1:]) "
            "for 8 microbatches."
        )

    @functools.wraps(f)
    def one(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # The number of the microbatch is an array that the vmap below maps, so each solve depends on it.
        piping = Piping(where, lax.axis_index(_AXIS), checkpoint, object())
        with asked(asked.value._replace(piping=piping)):
            return rules.call(f, args, kwargs)

    return jax.vmap(one, in_axes, out_axes, axis_name=_AXIS)
