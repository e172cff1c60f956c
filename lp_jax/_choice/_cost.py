"""Cost of a program, as if its loops were unrolled: its products, other numbers, kernels, memory."""

import math
from typing import NamedTuple

from jax.extend import core

from lp_jax._arrays._jaxpr import (
    array_type,
    axes_of,
    called,
    inside,
    is_product,
    is_scan,
    nbytes,
    scan_parts,
    size,
    variables,
)


class Cost(NamedTuple):
    """Cost of a program. Of the branches of a switch, the most expensive one counts."""

    flops: float  # of its products
    numbers: float  # results of its other operations; of a convolution, its products
    kernels: int  # its products and reductions, with those operations that fuse with them
    # of the numbers, those that are products of convolutions, beyond one for each result
    convolved: float
    products: int  # that count in `flops`


def cost_of(jaxpr: core.Jaxpr, terms: int | None = None) -> Cost:
    """Return the cost of a program; with ``terms``, of its products only those whose entries sum so many terms."""
    flops = 0.0
    numbers = 0.0
    kernels = 0
    convolved = 0.0
    products = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        results = sum(map(size, equation.outvars))
        if name == "while":
            raise ValueError(
                "A loop whose length is data has no cost before it runs; leave tolerances out."
            )
        if is_product(equation):
            own = _flops(equation, terms)
            flops += own
            products += own > 0
            kernels += 2
        elif programs := called(equation):
            # Tuples compare by their first number, the flops, so this is the branch with the most flops.
            each = max(cost_of(program, terms) for program in programs)
            turns = scan_parts(equation).length if is_scan(equation) else 1
            flops += turns * each.flops
            numbers += turns * each.numbers
            convolved += turns * each.convolved
            products += turns * each.products
            kernels += each.kernels if turns == 1 else turns * (each.kernels + 1)
        elif name == "conv_general_dilated":
            shape = array_type(equation.invars[1]).shape
            # `rhs_spec` has the kernel's axis of output features first. An output is a sum over all its other axes.
            multiplied = results * math.prod(shape) / shape[axes_of(equation).rhs_spec[0]]
            numbers += multiplied
            convolved += multiplied - results
            kernels += 2
        else:
            numbers += results
            kernels += name.startswith(("reduce", "arg", "cum", "sort"))
    return Cost(flops, numbers, kernels, convolved, products)


def _flops(equation: core.JaxprEqn, terms: int | None) -> float:
    """Return the flops of a product; 0 if its sums do not have ``terms`` terms."""
    shape = array_type(equation.invars[0]).shape
    (contracted, _), _ = axes_of(equation)
    summed = math.prod(shape[i] for i in contracted)
    if terms not in (None, summed):
        return 0.0
    return 2.0 * size(equation.outvars[0]) * summed


def most_alive(jaxpr: core.Jaxpr) -> int:
    """Return the largest number of bytes of arrays that are alive at the same time in a program. Inputs do not count."""
    inputs = {*jaxpr.constvars, *jaxpr.invars}
    # From the end of the program on, where its results are alive, an array lives from its last use back to its own operation.
    alive = {*variables(jaxpr.outvars)} - inputs
    most = 0
    for equation in reversed(jaxpr.eqns):
        alive |= {*variables(equation.invars)} - inputs
        # The outputs of a called program are alive both inside and outside, and count once.
        within = max(map(most_alive, inside(equation)), default=0)
        outputs = sum(map(nbytes, equation.outvars))
        most = max(most, sum(map(nbytes, alive)) + max(0, within - outputs))
        alive -= {*equation.outvars}
    return most
