"""Serial propagation in a kernel, for steps that act on each number of the state by itself. Long chains are cut into intervals.

Each thread takes one number, whose state stays in registers. All that does not depend on the state, such as products of
inputs with weights, is computed before, for all steps at once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from lp_jax._arrays import _tree
from lp_jax._arrays._check import register
from lp_jax._arrays._jaxpr import (
    INLINED,
    array_type,
    bind,
    dependents,
    evaluate,
    live,
    part,
    through_calls,
    variables,
)
from lp_jax._arrays._types import CPoints, PyTree, SliceStep, Stacked, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._sweep import sweep
from lp_jax._levels._tolerance import eps_of
from lp_jax._solvers._solver import AllStates, Start

_SAME_ORDER = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy")
_BY_ITSELF = """abs add add_any and ceil clamp convert_element_type cos cosh div eq exp exp2 expm1
    floor ge gt integer_pow le log log1p logistic lt max min mul ne neg not
    one_minus_square or pow rsqrt select_n sign sin sinh sqrt square sub tan
    tanh xor""".split()  # noqa: SIM905
_BLOCK = 32  # numbers, one for each thread
_UNROLL = 8  # steps whose operands are loaded together
# Operations of the steps whose operands are loaded together; longer programs take long to compile.
_MOST = 1024
INTERPRET = False  # run it on any device, for tests
_FULL = 16_384  # numbers from which intervals lose
_LONG, _INTERVALS = 4096, 128  # steps from which intervals gain; most of them


def split(
    step: SliceStep, u: State, x: PyTree, shared: PyTree
) -> tuple[core.ClosedJaxpr, core.ClosedJaxpr, int, list[Any]] | str:
    """Split a step's program in two.

    Returns:
        What does not depend on the state, from ``x``, ``shared`` and constants to operands of the rest; the rest, which acts on
        each number by itself, from the state and these operands to the next state; the number of operands that differ from
        step to step, which come first; and the constants. Or why there is no such split.
    """
    leaves, of_x = jax.tree.leaves(u), len(jax.tree.leaves(x))
    if len({leaf.shape for leaf in leaves}) > 1 or not all(
        jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves
    ):
        return "leaves of several shapes, or that are not real"
    closed, inputs = jax.make_jaxpr(step)(u, x, shared), jax.tree.leaves((u, x, shared))
    inline = through_calls(_with_broadcasts, INLINED)
    # a trace of its evaluation has neither calls nor rules of derivatives
    whole = jax.make_jaxpr(lambda args, consts: evaluate(closed, args, inline, consts))(
        inputs, closed.consts
    )
    n, sizes, arguments = len(leaves), (1, leaves[0].size), whole.jaxpr.invars
    equations = live(whole.jaxpr).eqns
    # `moving` values depend on the state, `varying` ones on what differs from step to step.
    moving = dependents(equations, arguments[:n])
    varying = dependents(equations, arguments[n : n + of_x])
    early, late, single = [], [], {}
    for equation in equations:
        name, operands = equation.primitive.name, variables(equation.invars)
        if moving.isdisjoint(operands):
            early.append(equation)
            if name == "broadcast_in_dim" and all(array_type(v).size == 1 for v in operands):
                single[equation.outvars[0]] = equation  # stays one number
            continue
        if name not in (*_BY_ITSELF, *_SAME_ORDER) or any(
            array_type(v).size not in sizes for v in operands
        ):
            return f"{name} of numbers that depend on the state"
        # A broadcast of one number is done within the kernel, where it costs no memory traffic.
        late += [*(single.pop(v) for v in operands if v in single), equation]
    known = moving.union(*(equation.outvars for equation in late))
    used = variables([*(v for equation in late for v in equation.invars), *whole.jaxpr.outvars])
    needed = sorted(
        dict.fromkeys(v for v in used if v not in known), key=lambda v: v not in varying
    )
    first = part(whole, invars=arguments[n:], eqns=early, outvars=needed)
    rest = part(whole, invars=[*arguments[:n], *needed], eqns=late)
    return first, rest, len(varying.intersection(needed)), closed.consts


def _with_broadcasts(equation: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """The operation as it was, after broadcasts of its operands as operations of their own."""
    if equation.primitive.name in _BY_ITSELF:
        shape = array_type(equation.outvars[0]).shape
        operands = [jnp.broadcast_to(x, shape) if jnp.ndim(x) else x for x in operands]
    return bind(equation, operands)


def _evaluate(rest: core.ClosedJaxpr, operands: Sequence[jax.Array], block: int) -> list[jax.Array]:
    """The state after a step at a block of places, in single precision at least. Operands are blocks, or single numbers."""

    def operation(equation: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[jax.Array]:
        values = [
            jnp.asarray(x, _wide(array_type(v)))
            for x, v in zip(operands, equation.invars, strict=True)
        ]
        if equation.primitive.name in _SAME_ORDER:
            return values
        if any(x.ndim for x in values):
            values = [jnp.broadcast_to(x, (block,)) for x in values]
        if equation.primitive.name == "convert_element_type":
            return [values[0].astype(_wide(array_type(equation.outvars[0])))]
        return bind(equation, values)

    results = zip(evaluate(rest, operands, operation), rest.jaxpr.outvars, strict=True)
    return [jnp.broadcast_to(jnp.asarray(x, _wide(array_type(v))), (block,)) for x, v in results]


def _wide(x: Any) -> jnp.dtype:
    half = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return jnp.dtype(jnp.float32) if half else x.dtype


def launch() -> Any:
    """Return the launch parameters of Pallas' Triton backend, which jax 0.12 deprecates, or None where it is missing."""
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return None
    return triton.CompilerParams(num_warps=1, num_stages=1)


def march(
    step: SliceStep,
    starts: State,
    xs: Stacked,
    shared: PyTree,
    *,
    reverse: bool,
    ends: bool = False,
) -> Stacked:
    """States after every step (or only the ``ends``) of a chain cut into intervals, from ``starts`` that enter them."""
    from jax.experimental import pallas

    leaves, structure = jax.tree.flatten(starts)
    u, x = _tree.entry_like((starts, xs))
    parts = split(step, u, x, shared)
    assert not isinstance(parts, str)
    first, rest, number, consts = parts
    n, places, intervals = len(leaves), leaves[0][0].size, _tree.leading(starts)
    steps = _tree.leading(xs)
    length = steps // intervals
    block = math.gcd(places, _BLOCK)  # it must divide the places
    # Fewer steps are unrolled if the step has many operations.
    unroll = max(1, min(_UNROLL, length, _MOST // max(1, len(rest.eqns))))

    def early(x: PyTree) -> list[jax.Array]:
        return core.jaxpr_as_fun(first)(*jax.tree.leaves((x, shared)), *consts)

    def spec(x: jax.Array, rows: int, follows: int = 1) -> Any:
        return pallas.BlockSpec((rows, block)[: x.ndim], lambda c, p: (c * follows, p)[: x.ndim])

    def kernel(*refs: Any) -> None:
        rows = refs[n : n + number]
        common = [ref[0] for ref in refs[n + number : -n]]
        out = refs[-n:]

        # Operands of the next steps are loaded before those of this turn are used, so that the loads are under way meanwhile.
        def load(i: jax.Array) -> list[jax.Array]:
            # The last turn would load beyond the end.
            i = jnp.minimum(i, length - 1)
            return [ref[length - 1 - i if reverse else i] for ref in rows]

        def turn(
            k: jax.Array, carry: tuple[list[jax.Array], Any], count: int = unroll
        ) -> tuple[list[jax.Array], Any]:
            state, now = carry
            coming = [load((k + 1) * unroll + j) for j in range(unroll)]
            # This Python loop unrolls; the state stays in registers between steps.
            for j in range(count):
                state, i = _evaluate(rest, [*state, *now[j], *common], block), k * unroll + j
                for ref, x in zip(out, state, strict=True):
                    ref[0 if ends else length - 1 - i if reverse else i] = x.astype(ref.dtype)
            return state, coming

        state = [ref[0].astype(_wide(ref)) for ref in refs[:n]]
        carry = state, [load(jnp.int32(j)) for j in range(unroll)]
        whole = jnp.int32(length // unroll)
        # The steps that are left over are a shorter turn.
        turn(whole, _tree.fori_loop(jnp.int32(0), whole, turn, carry), length % unroll)

    def flat(x: jax.Array, rows: int) -> jax.Array:
        return x.reshape((rows, places)[: 1 + (x.size > rows)])

    initial = [x.reshape(intervals, places) for x in leaves]
    # `each` has the operands that differ from step to step, ``(steps, places)``; `common` those that all steps share.
    each = [flat(x, steps) for x in jax.vmap(lambda x: early(x)[:number])(xs)]
    common, written = [flat(x, 1) for x in early(_tree.take(xs, 0))[number:]], 1 if ends else length
    results = pallas.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((intervals * written, places), x.dtype) for x in leaves],
        grid=(intervals, places // block),
        in_specs=[
            *(spec(x, 1) for x in initial),
            *(spec(x, length) for x in each),
            *(spec(x, 1, 0) for x in common),
        ],
        out_specs=[spec(x, written) for x in initial],
        compiler_params=launch(),
        interpret=INTERPRET,
    )(*initial, *each, *common)
    return jax.tree.unflatten(
        structure, [y.reshape(-1, *x.shape[1:]) for x, y in zip(leaves, results, strict=True)]
    )


def intervals(steps: int, places: int) -> int:
    """Number of intervals that a chain is cut into."""
    return _tree.divisor(
        steps, 1 if places >= _FULL or steps < _LONG else min(_INTERVALS, steps // 64)
    )


def _solve(
    level: Level, step: SliceStep, y0: State, xs: Stacked, shared: PyTree
) -> tuple[Stacked, jax.Array]:
    """States after every step, and the number of iterations of Newton's method on the states that enter intervals.

    An iteration propagates the states through all intervals at once, with their derivatives. The first k intervals are exact
    after k iterations; an adjoint chain, which is affine, takes one. Derivatives are those of a scan.
    """
    reverse = level.reverse

    def in_turn(y0: State, xs: Stacked, shared: PyTree) -> tuple[Stacked, jax.Array]:
        scan = functools.partial(_tree.scan, reverse=reverse, unroll=level.unroll)
        return scan(lambda u, x: (step(u, x, shared),) * 2, y0, xs)[1], jnp.int32(0)

    def joined(y0: State, xs: Stacked, shared: PyTree) -> tuple[Stacked, jax.Array]:
        wide, count = _tree.wide(y0), intervals(_tree.leading(xs), jax.tree.leaves(y0)[0].size)
        # The derivative along each leaf starts from a unit direction at every interval.
        units, zero = _tree.repeat(_units(wide), count), _tree.repeat(_tree.zeros_like(wide), 1)

        def derivative(
            state: tuple[State, list[State]], x: PyTree, shared: PyTree
        ) -> tuple[State, list[State]]:
            return _columns(lambda u: _tree.wide(step(_tree.narrow(u, y0), x, shared)), *state)

        # the states that enter the intervals, from those that leave them
        entering = functools.partial(_tree.push, entry=wide, reverse=reverse)

        def body(
            carry: tuple[Stacked, jax.Array, jax.Array],
        ) -> tuple[Stacked, jax.Array, jax.Array]:
            old, done, _ = carry
            reached, columns = march(
                derivative, (entering(old), units), xs, shared, reverse=reverse, ends=True
            )
            # Newton's correction of the states between intervals is an affine chain itself, and so another march.
            change = march(_affine, zero, (columns, _tree.sub(reached, old)), None, reverse=reverse)
            # Where a correction overflows, the propagated state is taken, so that the first k intervals stay exact.
            new = jax.tree.map(
                lambda u, d, r: jnp.where(jnp.isfinite(u + d), u + d, r), old, change, reached
            )
            # the next iteration squares it
            limit = math.sqrt(eps_of(jax.tree.leaves(wide)[0]))
            # Each number of the state is compared with its own size.
            close = jax.tree.map(
                lambda a, b: jnp.max(jnp.abs(a - b), axis=0) <= limit * jnp.max(jnp.abs(a), axis=0),
                new,
                old,
            )
            met = jnp.stack([jnp.all(x) for x in jax.tree.leaves(close)])
            return new, done + 1, jnp.all(met) | reverse

        carry = _tree.repeat(wide, count), jnp.int32(0), jnp.asarray(False)
        if count > 1:
            carry = _tree.while_loop(lambda carry: ~carry[2] & (carry[1] < count), body, carry)
        return march(
            step, _tree.narrow(entering(carry[0]), y0), xs, shared, reverse=reverse
        ), carry[1]

    @jax.custom_jvp
    def run(*operands: PyTree) -> tuple[Stacked, jax.Array]:
        if INTERPRET:
            return joined(*operands)
        if launch() is None:
            return in_turn(*operands)
        return lax.platform_dependent(*operands, cuda=joined, default=in_turn)

    @run.defjvp
    def _(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        # The kernel has no derivative rule; its values are those of the scan, whose derivative is taken.
        return run(*primals), jax.jvp(in_turn, primals, tangents)[1]

    return run(y0, xs, shared)


def _units(u: State) -> list[State]:
    """For each leaf of a state the state of ones in this leaf, and of zeros elsewhere."""
    leaves, structure = jax.tree.flatten(u)
    ones = [[jnp.full_like(x, i == j) for i, x in enumerate(leaves)] for j in range(len(leaves))]
    return [jax.tree.unflatten(structure, one) for one in ones]


def _columns(
    step: Callable[[State], State], u: State, directions: list[State]
) -> tuple[State, list[State]]:
    """The state after a step, and its derivatives along ``directions``."""
    u, derivative = jax.linearize(step, u)
    return u, [derivative(direction) for direction in directions]


def _with_columns(step: SliceStep) -> SliceStep:
    """The step, which also returns its derivatives along the leaves of the state."""
    return lambda u, x, shared: _columns(lambda u: step(u, x, shared), u, _units(u))


def _affine(d: State, maps: tuple[list[State], State], _: PyTree) -> State:
    """The map ``d -> A d + b`` at each place, A by its columns."""
    columns, total = maps
    for column, number in zip(columns, jax.tree.leaves(d), strict=True):
        total = jax.tree.map(lambda b, a, number=number: b + a * number, total, column)
    return total


def _refusal(step: SliceStep, u: State, x: PyTree, shared: PyTree) -> str:
    """Say why no kernel can march through a chain of these steps or of their derivatives; the text is empty if one can."""
    parts = (split(f, u, x, shared) for f in (step, _with_columns(step)))
    return next((why for why in parts if isinstance(why, str)), "")


def places(step: SliceStep, u: State, x: PyTree, shared: PyTree) -> int:
    """Return the size of a leaf of the state if the default may solve a chain of these steps by `Elementwise`, else 0."""
    one_device = jax.sharding.get_abstract_mesh().size <= 1  # a kernel is not partitioned
    fits = one_device and not _refusal(step, u, x, shared) and launch() is not None
    return jax.tree.leaves(u)[0].size if fits else 0


@register()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Elementwise(AllStates):
    """Serial propagation in one kernel, for steps that act on each number of the state by itself, on one NVIDIA GPU.

    On other devices it is a scan. Long chains are cut into intervals, which Newton's method joins to rounding.
    """

    iterations = 0
    summary = "serial, in one kernel"

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        if chain.workers.size > 1 or chain.padded or jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "Elementwise() is one kernel: for one device, outside of shard_map and without "
                f"padding; got {chain.workers.size} worker(s), padded={chain.padded}. Leave "
                "solver out: the default takes another."
            )
        return (chain.finest(1, at_once=chain.at_once(math.inf)),)

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        level, xs, reverse = levels[0], levels[0].xs, levels[0].reverse
        # An adjoint level has (operands, states, sources) of its layers as operands.
        own = _tree.entry_like(xs[0] if reverse else xs)
        if why := _refusal(level.origin or level.step, level.y0, own, level.shared):
            raise TypeError(
                f"Elementwise() takes steps that act on each number of the state by itself; this "
                f"one has {why}. Take lp_jax.Serial() or lp_jax.Newton(), or leave solver out."
            )

        if not reverse:
            u, taken = _solve(
                level,
                lambda u, x, shared: _tree.add(level.step(u, x[0], shared), x[1]),
                level.y0,
                (xs, level.rhs),
                level.shared,
            )
            return Start(u, taken=taken)
        # An adjoint step is affine: one sweep over all layers gives its matrix by columns and its constant part.
        total, columns = sweep(
            level,
            _tree.repeat(_tree.zeros_like(level.y0), level.steps),
            advance=_with_columns(level.step),
        )
        lam, taken = _solve(
            level, _affine, _tree.wide(level.y0), _tree.wide((columns, total)), None
        )
        return Start(_tree.narrow(lam, level.y0), taken=taken)
