"""Copies of a network that average their gradients.

For use within a `jax.shard_map` over the data axis of a mesh, where every copy has a share of the batch.
"""

import optax
from jax import lax


def average_gradients(axis: str) -> optax.GradientTransformation:
    """Average gradients over an axis of a mesh: the first link of an optimizer's chain.

    Args:
        axis: name of the mesh's axis; it must be manual, as in `jax.shard_map` over it.

    Example:
        >>> import functools, jax, jax.numpy as jnp, optax
        >>> from jax.sharding import PartitionSpec as P
        >>> from lp_jax import train
        >>> mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> optimizer = optax.chain(train.average_gradients("data"), optax.sgd(1.0))
        >>> @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        ... def first_step(gradient):
        ...     return optimizer.update(gradient[0], optimizer.init(gradient[0]))[0][None]
        >>> print(-first_step(jnp.asarray([[1.0, 2.0], [9.0, 3.0]])))
        [[5.  2.5]
         [5.  2.5]]
    """
    return optax.stateless(lambda gradient, _: lax.pmean(gradient, axis))
