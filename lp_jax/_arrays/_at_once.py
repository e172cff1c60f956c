"""Number of layers that are evaluated at once, and other choices between programs that compute the same numbers.

All of them go by size: the cost and the memory of a layer are read from its program when it is traced, and `Processor` has
measured numbers. No other module depends on the device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lp_jax._arrays import _tree
from lp_jax._arrays._outer import has_few
from lp_jax._arrays._products import cost_of, inside, most_alive, opaque
from lp_jax._arrays._types import PyTree


class Footprint(NamedTuple):
    """Cost and memory of one evaluation of a layer.

    Attributes:
        operands: bytes of the layer's own parameters and data.
        working: bytes of its states and of the arrays that are alive between them.
        flops: flops of its products.
        counted: whether these numbers are known; not with a callback or a foreign call in the program.
        few: whether it has a product of a few rows, at least two: see `with_few_terms`.
    """

    operands: int
    working: int
    flops: float
    counted: bool = True
    few: bool = False


def footprint(program: core.Jaxpr, operands: PyTree, *, terms: int = 0) -> Footprint:
    """Read a layer's program, traced for one layer's ``operands``; products of at most ``terms`` rows are few."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(operands))
    try:
        flops = cost_of(program).work
    except ValueError:  # a loop whose length is data
        return Footprint(nbytes, 0, math.inf, counted=False)
    return Footprint(
        nbytes, most_alive(program), flops, counted=not opaque(program), few=has_few(program, terms, least=2)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """Limits of a device, by which programs for the same numbers are chosen.

    Attributes:
        whole: bytes that all layers may hold to be evaluated at once; None for any.
        part: bytes of the layers evaluated at once, where they are not all.
        copied: flops per byte of a layer's operands below which the layers are not split, as copying the operands would
            cost more.
        short: most turns of a loop over layers at once that is unrolled as a whole.
        some: turns of a longer loop that are unrolled; 1 for none.
        small: most bytes of a layer for which serial propagation is unrolled; None for any. Layers with products of a few
            rows are not: the sums of outer products would be unrolled too, and are then slower.
        tiny: least flops of a layer for which it is unrolled: a CPU's compiler makes one kernel of a smaller loop.
        terms: most terms for which the gradient of a weight is a sum of outer products: see `with_few_terms`.
        turn: flops in the time of one turn of a loop; None where a turn is never worth its time.
    """

    whole: int | None
    part: int
    copied: float
    short: int
    some: int
    small: int | None
    tiny: int
    terms: int
    turn: float | None

    def at_once(self, layer: Footprint, steps: int) -> int:
        """Number of ``steps`` layers that are evaluated at once."""
        if not layer.counted:
            return 1
        each = max(1, layer.operands + 2 * layer.working)  # working memory is written and read
        if self.whole is None or steps * each <= self.whole or layer.flops < self.copied * layer.operands:
            return max(steps, 1)
        return max(1, min(steps, self.part // each))

    @property
    def launches(self) -> bool:
        """Whether each turn of a loop is launched anew, so that few long turns are cheap, wasted work included."""
        return self.some > 1

    def serial_unroll(self, layer: Footprint) -> int:
        """Number of turns of serial propagation to unroll."""
        if self.small is None:
            return _SOME
        fits = layer.counted and not layer.few and layer.operands + layer.working <= self.small
        return _SOME if fits and layer.flops >= self.tiny else 1

    def multiplies(self, flops: float) -> bool:
        """Whether to solve a chain of linear maps by products of maps, of ``flops`` each, and not map after map."""
        return self.turn is None or flops <= self.turn

    def loop_unroll(self, count: int, body: Callable[..., PyTree], *arguments: PyTree) -> int:
        """Number of a loop's ``count`` turns to unroll.

        All of a short loop, some of a longer one; fewer where turns are large and take long to compile.
        """
        if not self.launches:
            return 1
        most = max(1, _MOST // _operations(jax.make_jaxpr(body)(*arguments).jaxpr))
        if count > self.short:
            return min(self.some, most)
        return next(turns for turns in range(min(count, most), 0, -1) if count % turns == 0)


_MOST = 2048  # operations of all turns that are unrolled


def _operations(jaxpr: core.Jaxpr) -> int:
    """Number of operations of a program, loops counted once."""
    return 1 + sum(sum(map(_operations, inside(equation))) or 1 for equation in jaxpr.eqns)


_SOME = 8
CPU = Processor(whole=36_000_000, part=2**23, copied=1.0, short=1, some=1, small=2**13, tiny=256, terms=16, turn=1e5)
ACCELERATOR = Processor(whole=None, part=0, copied=0.0, short=16, some=_SOME, small=None, tiny=0, terms=0, turn=None)


def processor(platform: str) -> Processor:
    """Return the limits for a kind of device.

    For a CPU they are from the grid of the suite ``at_once`` on two cores with 32 MB of cache, jax 0.10.2 and 0.12
    (docs/internals.md, "Layers at once on a CPU"); for an accelerator from an H200 (docs/gpu.md), on which sweeps over 256,
    128 and 64 of 1,024 layers at a time took 1.6, 2.0 and 2.7 times as long as over all of them.
    """
    return CPU if platform == "cpu" else ACCELERATOR


def in_chunks(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], carry: PyTree, xs: PyTree, size: int, *, reverse: bool = False
) -> tuple[PyTree, PyTree]:
    """Run ``carry, ys = f(carry, xs)`` on ``size`` entries of ``xs`` at a time; a shorter rest comes last.

    Leaves of ``xs`` and ``ys`` have the same leading axis; ``f`` gets and returns at most ``size`` of its entries.
    """
    n = _tree.leading(xs)
    size = chunk(n, size)
    if size >= n:
        return f(carry, xs)
    if size == 1:  # XLA copies operands that enter a loop with an axis of length 1

        def one(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
            carry, y = f(carry, jax.tree.map(lambda x: x[None], x))
            return carry, jax.tree.map(lambda y: y[0], y)

        return lax.scan(one, carry, xs, reverse=reverse)
    whole = n - n % size
    start = n - whole if reverse else 0
    middle = jax.tree.map(lambda x: x[start : start + whole], xs) if whole < n else xs
    left = jax.tree.map(lambda x: x[: n - whole] if reverse else x[whole:], xs) if whole < n else None
    carry, ys = lax.scan(f, carry, _tree.split(middle, size), reverse=reverse)
    ys = _tree.merge(ys)
    if left is None:
        return carry, ys
    carry, rest = f(carry, left)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([b, a] if reverse else [a, b]), ys, rest)


def chunk(n: int, most: int) -> int:
    """Size of chunks of ``n`` entries: ``most``, or somewhat fewer where that makes all chunks equal."""
    if most >= n:
        return n
    even = max(size for size in range(1, most + 1) if n % size == 0)
    return even if 2 * even > most else most


def batched(one: Callable[..., PyTree], size: int) -> Callable[..., PyTree]:
    """Apply ``one`` to each of ``size`` entries of the leading axis of all its arguments."""
    if size != 1:
        return jax.vmap(one)
    first = functools.partial(jax.tree.map, lambda x: x[0])
    return lambda *operands: jax.tree.map(lambda x: jnp.asarray(x)[None], one(*map(first, operands)))
