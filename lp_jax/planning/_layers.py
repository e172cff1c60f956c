"""What a network's state and layers hold."""

import jax

from lp_jax._traced import Operands, Traced
from lp_jax._types import State

_MOST_NUMBERS = 256  # of an example's state, for full Jacobians


def small(y0: State) -> bool:
    """Whether full Jacobians are thinkable: examples along the first axis of all leaves, and few numbers in each."""
    leaves = jax.tree.leaves(y0)
    return all(x.ndim > 1 for x in leaves) and sum(x.size for x in leaves) // examples_of(y0) <= _MOST_NUMBERS


def examples_of(y0: State) -> int:
    """Return the leading axis of all of the state's leaves; 1 where they have none in common."""
    leading = {x.shape[0] if x.ndim > 1 else 1 for x in jax.tree.leaves(y0)}
    return leading.pop() if len(leading) == 1 else 1


def kept_bytes(traced: Traced, operands: Operands) -> int:
    """Return the bytes that the linearisation of a layer holds besides its state."""
    first = jax.tree.map(lambda x: x[0], operands.slices)
    common = operands.common
    linearised = traced.chain(*operands, traced.workers).linearised
    kept = jax.eval_shape(linearised.evaluate, common.y0, first, (common.shared, common.closed_over))[2]
    return sum(x.size * x.dtype.itemsize for x in kept)
