"""Cost of a program, as if its loops were unrolled: its products, other numbers, kernels, memory."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import core

from lp_jax._arrays._jaxpr import (
    ALONE,
    array_type,
    axes_of,
    called,
    follow,
    inside,
    is_product,
    is_scan,
    is_switch,
    nbytes,
    scan_parts,
    size,
    variables,
    walk,
)


class Cost(NamedTuple):
    """Cost of a program. Of the branches of a switch, the most expensive one counts."""

    flops: float  # of its products
    numbers: float  # results of its other operations; of a convolution, its products
    kernels: int  # its products and reductions, with those operations that fuse with them
    convolved: (
        float  # of the numbers, those that are products of convolutions, beyond one for each result
    )


def cost_of(jaxpr: core.Jaxpr, terms: int | None = None) -> Cost:
    """Return the cost of a program; with ``terms``, of its products only those whose entries sum so many terms."""
    flops = 0.0
    numbers = 0.0
    kernels = 0
    convolved = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        results = sum(map(size, equation.outvars))
        if name == "while":
            raise ValueError(
                "A loop whose length is data has no cost before it runs; leave tolerances out."
            )
        if is_product(equation):
            flops += _flops(equation, terms)
            kernels += 2
        elif programs := called(equation):
            # Tuples compare by their first number, the flops, so this is the branch with the most flops.
            each = max(cost_of(program, terms) for program in programs)
            turns = scan_parts(equation).length if is_scan(equation) else 1
            flops += turns * each.flops
            numbers += turns * each.numbers
            convolved += turns * each.convolved
            kernels += each.kernels if turns == 1 else turns * (each.kernels + 1)
        elif name == "conv_general_dilated":
            shape = array_type(equation.invars[1]).shape
            # `rhs_spec` has the kernel's axis of output features first. An output is a sum over all its other axes.
            products = results * math.prod(shape) / shape[axes_of(equation).rhs_spec[0]]
            numbers += products
            convolved += products - results
            kernels += 2
        else:
            numbers += results
            kernels += name.startswith(("reduce", "arg", "cum", "sort"))
    return Cost(flops, numbers, kernels, convolved)


def _flops(equation: core.JaxprEqn, terms: int | None) -> float:
    """Return the flops of a product; 0 if its sums do not have ``terms`` terms."""
    shape = array_type(equation.invars[0]).shape
    (contracted, _), _ = axes_of(equation)
    summed = math.prod(shape[i] for i in contracted)
    if terms not in (None, summed):
        return 0.0
    return 2.0 * size(equation.outvars[0]) * summed


def depth_of(jaxpr: core.Jaxpr, terms: int | None = None) -> float:
    """Return the length of the longest chain of products in which each needs the one before; ``terms`` is as for `cost_of`."""
    return max(_depths(jaxpr, [0.0] * len(jaxpr.invars), terms), default=0.0)


def _depths(jaxpr: core.Jaxpr, entering: Sequence[float], terms: int | None) -> list[float]:
    """Return the depth of each output, given the depths of the inputs."""

    def operation(equation: core.JaxprEqn, operands: list[float]) -> Sequence[float]:
        if is_scan(equation):
            return _scan_depths(equation, operands, terms)
        # The first operand of a switch is the index, which its branches do not get but its results wait for.
        first = int(is_switch(equation))
        if ends := [_depths(program, operands[first:], terms) for program in called(equation)]:
            return [max((*operands[:first], *each)) for each in zip(*ends, strict=True)]
        counts = is_product(equation) and _flops(equation, terms) > 0
        return [max(operands, default=0.0) + counts] * len(equation.outvars)

    return follow(jaxpr, entering, operation, 0.0)


def _scan_depths(
    equation: core.JaxprEqn, entering: list[float], terms: int | None
) -> Sequence[float]:
    body, length, *_, consts, carries = scan_parts(equation)
    fixed = entering[:consts]
    state = entering[consts : consts + carries]
    xs = entering[consts + carries :]
    history = []
    for turn in range(length):
        reached = _depths(body.jaxpr, (*fixed, *state, *xs), terms)
        state = reached[:carries]
        history.append(reached)
        if len(history) >= 4:  # regular from here on, if three differences agree
            steps = [
                [b - a for a, b in zip(*pair, strict=True)]
                for pair in itertools.pairwise(history[-4:])
            ]
            if steps[0] == steps[1] == steps[2]:
                return [r + (length - 1 - turn) * s for r, s in zip(reached, steps[0], strict=True)]
    return history[-1] if history else [*state, *[0.0] * (len(equation.outvars) - carries)]


def draws_alone(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program draws from keys that draw other numbers in a batch."""
    equations = list(walk(jaxpr.eqns))
    kinds = {str(getattr(v.aval, "dtype", "")) for e in equations for v in e.invars}
    names = {e.primitive.name for e in equations}
    return bool(kinds & {*ALONE}) or "rng_bit_generator" in names


_OPAQUE = ("callback", "ffi_call", "custom_call", "custom_partitioning", "pallas_call")


def opaque(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program calls code of unknown cost. Printing does not count, because it changes no result."""
    names = {equation.primitive.name for equation in walk(jaxpr.eqns)} - {"debug_callback"}
    return any(part in name for name in names for part in _OPAQUE)


def most_alive(jaxpr: core.Jaxpr) -> int:
    """Return the largest number of bytes of arrays that are alive at the same time in a program. Inputs do not count."""
    last: dict[core.Var, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        last.update((v, number) for v in variables(equation.invars))
    # A result lives until the end of the program.
    last.update((v, len(jaxpr.eqns)) for v in variables(jaxpr.outvars))
    alive: dict[core.Var, int] = {}
    most = 0
    for number, equation in enumerate(jaxpr.eqns):
        alive.update((v, nbytes(v)) for v in equation.outvars if v in last)
        # The outputs of a called program are alive both inside and outside, and count once.
        within = max(map(most_alive, inside(equation)), default=0)
        most = max(most, sum(alive.values()) + max(0, within - sum(map(nbytes, equation.outvars))))
        alive = {v: size for v, size in alive.items() if last[v] > number}
    return most
