"""Serial propagation in a kernel, for steps that act on each number of the state by itself; long chains in intervals."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _tree
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import Advance, CPoints, PyTree, SliceStep, Stacked, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._sweep import sweep
from lp_jax._solvers import _kernel
from lp_jax._solvers._kernel import march, split
from lp_jax._solvers._solver import Solver, Start

_FULL, _LONG, _MOST = 16_384, 4096, 128  # numbers from which intervals lose; steps from which they gain; most intervals


def intervals(steps: int, places: int) -> int:
    """Number of intervals that a chain is cut into."""
    most = 1 if places >= _FULL or steps < _LONG else min(_MOST, steps // 64)
    return max(k for k in range(1, most + 1) if steps % k == 0)


def _solve(level: Level, step: SliceStep, y0: State, xs: Stacked, shared: PyTree) -> tuple[Stacked, jax.Array]:
    """States after every step, and the number of iterations of Newton's method on the states that enter intervals.

    An iteration propagates the states through all intervals at once, with their derivatives. The first k intervals are exact
    after k iterations; an adjoint chain, which is affine, takes one. Derivatives are those of a scan.
    """
    reverse = level.reverse

    def in_turn(y0: State, xs: Stacked, shared: PyTree) -> tuple[Stacked, jax.Array]:
        scan = functools.partial(lax.scan, reverse=reverse, unroll=level.unroll)
        return scan(lambda u, x: (step(u, x, shared),) * 2, y0, xs)[1], jnp.int32(0)

    def joined(y0: State, xs: Stacked, shared: PyTree) -> tuple[Stacked, jax.Array]:
        wide, count = _tree.wide(y0), intervals(_tree.leading(xs), jax.tree.leaves(y0)[0].size)
        units, zero = _tree.repeat(_units(wide), count), _tree.repeat(_tree.zeros_like(wide), 1)

        def derivative(state: tuple[State, list[State]], x: PyTree, shared: PyTree) -> tuple[State, list[State]]:
            return _columns(lambda u: _tree.wide(step(_tree.narrow(u, y0), x, shared)), *state)

        def entering(leaving: Stacked) -> Stacked:
            return _tree.push(leaving, wide, reverse=reverse)

        def body(carry: tuple[Stacked, jax.Array, jax.Array]) -> tuple[Stacked, jax.Array, jax.Array]:
            old, done, _ = carry
            reached, columns = march(derivative, (entering(old), units), xs, shared, reverse=reverse, ends=True)
            change = march(_affine, zero, (columns, _tree.sub(reached, old)), None, reverse=reverse)
            new = jax.tree.map(lambda u, d, r: jnp.where(jnp.isfinite(u + d), u + d, r), old, change, reached)
            pairs = zip(*map(jax.tree.leaves, (new, old)), strict=True)
            limit = math.sqrt(jnp.finfo(jax.tree.leaves(wide)[0].dtype).eps)  # the next iteration squares it
            close = [jnp.max(jnp.abs(a - b)) <= limit * jnp.max(jnp.abs(a)) for a, b in pairs]
            return new, done + 1, jnp.all(jnp.stack(close)) | reverse

        carry = _tree.repeat(wide, count), jnp.int32(0), jnp.asarray(False)
        if count > 1:
            carry = lax.while_loop(lambda carry: ~carry[2] & (carry[1] < count), body, carry)
        return march(step, _tree.narrow(entering(carry[0]), y0), xs, shared, reverse=reverse), carry[1]

    @jax.custom_jvp
    def run(*operands: PyTree) -> tuple[Stacked, jax.Array]:
        if _kernel.INTERPRET:
            return joined(*operands)
        if _kernel.launch() is None:
            return in_turn(*operands)
        return lax.platform_dependent(*operands, cuda=joined, default=in_turn)

    @run.defjvp
    def _(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        return run(*primals), jax.jvp(in_turn, primals, tangents)[1]

    return run(y0, xs, shared)


def _units(u: State) -> list[State]:
    """For each leaf of a state the state of ones in this leaf, and of zeros elsewhere."""
    leaves, structure = jax.tree.flatten(u)
    return [
        jax.tree.unflatten(structure, [jnp.full_like(x, i == j) for i, x in enumerate(leaves)])
        for j in range(len(leaves))
    ]


def _columns(step: Callable[[State], State], u: State, directions: list[State]) -> tuple[State, list[State]]:
    """The state after a step, and its derivatives along ``directions``."""
    u, derivative = jax.linearize(step, u)
    return u, [derivative(direction) for direction in directions]


def _affine(d: State, maps: tuple[list[State], State], _: PyTree) -> State:
    """The map ``d -> A d + b`` at each place, A by its columns."""
    columns, total = maps
    for column, number in zip(columns, jax.tree.leaves(d), strict=True):
        total = jax.tree.map(lambda b, a, number=number: b + a * number, total, column)
    return total


def _refusal(step: SliceStep, u: State, x: PyTree, shared: PyTree) -> str:
    """Why a kernel cannot march through a chain of these steps, or with their derivatives; empty if it can."""

    def derivative(u: State, x: PyTree, shared: PyTree) -> tuple[State, list[State]]:
        return _columns(lambda u: step(u, x, shared), u, _units(u))

    return next((why for f in (step, derivative) if isinstance(why := split(f, u, x, shared), str)), "")


def places(step: SliceStep, u: State, x: PyTree, shared: PyTree) -> int:
    """Numbers of a leaf of the state, if the default may solve a chain of these steps by `Elementwise`; else 0."""
    one_device = jax.sharding.get_abstract_mesh().size <= 1  # a kernel is not partitioned
    fits = one_device and not _refusal(step, u, x, shared) and _kernel.launch() is not None
    return jax.tree.leaves(u)[0].size if fits else 0


@register()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Elementwise(Solver):
    """Serial propagation in one kernel, for steps that act on each number of the state by itself, on one NVIDIA GPU.

    On other devices it is a scan. Long chains are cut into intervals, which Newton's method joins to rounding.
    """

    @property
    def iterations(self) -> int:
        return 0

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        if chain.workers.size > 1 or chain.padded or jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "Elementwise() is one kernel: for one device, outside of shard_map and without padding; got "
                f"{chain.workers.size} worker(s), padded={chain.padded}. Leave solver out: the default takes another."
            )
        return (chain.finest(1, at_once=chain.at_once(math.inf)),)

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        level, xs, reverse = levels[0], levels[0].xs, levels[0].reverse
        own = _tree.entry_like(xs[0] if reverse else xs)
        if why := _refusal(level.origin or level.step, level.y0, own, level.shared):
            raise TypeError(
                f"Elementwise() takes steps that act on each number of the state by itself; this one has {why}. Take "
                "lp_jax.Serial() or lp_jax.Newton(), or leave solver out."
            )

        def step(u: State, x: PyTree, shared: PyTree) -> State:
            return _tree.add(level.step(u, x[0], shared), x[1])

        def pull(lam: State, x: PyTree, shared: PyTree) -> tuple[State, list[State]]:
            return _columns(lambda lam: level.step(lam, x, shared), lam, _units(lam))

        if not reverse:
            u, taken = _solve(level, step, level.y0, (xs, level.rhs), level.shared)
            return Start(u, taken=taken)
        total, columns = sweep(level, _tree.repeat(_tree.zeros_like(level.y0), level.steps), advance=pull)
        lam, taken = _solve(level, _affine, _tree.wide(level.y0), _tree.wide((columns, total)), None)
        return Start(_tree.narrow(lam, level.y0), taken=taken)

    def finish(self, levels: Sequence[Level], u: CPoints, advance: Advance | None) -> tuple[CPoints, PyTree]:
        return u, None if advance is None else sweep(levels[0], levels[0].incoming(u), advance=advance)[1]
