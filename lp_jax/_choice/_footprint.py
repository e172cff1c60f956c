"""Cost and memory of a layer, read from its program."""

import math
import sys
from typing import NamedTuple

import jax
from jax.extend import core

from lp_jax._arrays import _tree
from lp_jax._arrays._jaxpr import ALONE, array_type, is_switch, live, walk
from lp_jax._arrays._outer import has_few
from lp_jax._arrays._types import PyTree
from lp_jax._choice._cost import cost_of, most_alive

# Parts of the names of operations that call code of unknown cost.
_OPAQUE = ("callback", "ffi_call", "custom_call", "custom_partitioning", "pallas_call")


class Footprint(NamedTuple):
    """Cost and memory of one evaluation of a layer."""

    operands: int  # bytes of the layer's own parameters and data
    working: int  # bytes of its states and of the arrays that are alive between them
    flops: float  # of its products
    # whether these numbers are known; they are not if the program has a callback or a foreign call
    counted: bool = True
    # whether the gradients of weights are sums of two to a few outer products: see `with_few_terms`
    few: bool = False
    one_row: bool = False  # whether all of its products have one row
    numbers: float = 0.0  # that its other operations compute; a convolution counts its products
    convolved: float = 0.0  # of these, products of convolutions, beyond one for each result
    kernels: int = 1  # its products and reductions, with those operations that fuse with them
    # work in a batch of layers relative to one layer's, because a batch evaluates all branches of a switch
    branches: float = 1.0
    operations: int = 0  # of its program; the time to compile grows with them
    # whether a batch of layers would compute something else than one layer after another
    alone: bool = False


def footprint(
    program: core.Jaxpr, operands: PyTree, *, terms: int = 0, batched: bool = True
) -> Footprint:
    """Read a layer's program, traced for one layer's ``operands``; products of at most ``terms`` rows are few.

    Without ``batched``, the program is not traced for a batch of layers, and ``branches`` is 1.
    """
    nbytes = _tree.nbytes(operands)
    if not all(
        isinstance(size, int) for v in program.invars for size in array_type(v).shape
    ):  # of `jax.export`
        return Footprint(0, 0, math.inf, counted=False)
    program = live(program)
    try:
        flops, numbers, kernels, convolved, _ = cost_of(program)
    except ValueError:  # a loop whose length is data
        return Footprint(nbytes, 0, math.inf, counted=False)
    # without products and reductions, too, some operations are not fused
    kernels = 1 + max(1, kernels)
    operations = list(walk(program.eqns))
    names = {equation.primitive.name for equation in operations}
    kinds = {str(getattr(v.aval, "dtype", "")) for one in operations for v in one.invars}
    # A batch of such keys draws other numbers than one key after another.
    alone = not kinds.isdisjoint(ALONE) or "rng_bit_generator" in names
    # Printing does not count, because it changes no result.
    opaque = any(part in name for name in names - {"debug_callback"} for part in _OPAQUE)
    # `vmap` turns a switch with an index for each layer into a selection among all branches, each of which is evaluated.
    switches = batched and any(map(is_switch, operations))
    branches = _at_once_cost(program) / max(1.0, flops + numbers) if switches else 1.0
    one_row = has_few(program, 1) and not has_few(program, sys.maxsize, least=2)
    return Footprint(
        operands=nbytes,
        working=most_alive(program),
        flops=flops,
        # A layer that draws other numbers in a batch must not be batched, so its cost is no use to the choice.
        counted=not (alone or opaque),
        few=has_few(program, terms, least=2),
        one_row=one_row,
        numbers=numbers,
        convolved=convolved,
        kernels=kernels,
        branches=branches,
        operations=len(operations),
        alone=alone,
    )


def _at_once_cost(program: core.Jaxpr) -> float:
    """Return the flops and the numbers of other operations of one layer that is evaluated in a batch."""

    def layer(constants: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
        return core.jaxpr_as_fun(core.ClosedJaxpr(program, constants))(*operands)

    # Two layers are the smallest batch; half its cost is that of a layer. Constants have no axis of layers.
    constants, operands = (
        [
            jax.ShapeDtypeStruct((*more, *array_type(v).shape), array_type(v).dtype)
            for v in variables
        ]
        for more, variables in (((), program.constvars), ((2,), program.invars))
    )
    layers = jax.vmap(layer, in_axes=(None, 0))
    cost = cost_of(live(jax.make_jaxpr(layers)(constants, operands).jaxpr))
    return (cost.flops + cost.numbers) / 2
