"""`scan`: ``jax.lax.scan`` with a solver."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._jaxpr import following, varying_axes
from lp_jax._arrays._place import gathered
from lp_jax._arrays._types import CPoints, Layer, PyTree, Stacked, State
from lp_jax._comms._comm import Comm
from lp_jax._comms._mesh import same_over
from lp_jax._problem import Problem, solve_traced
from lp_jax._programs import _inputs
from lp_jax._programs._traced import Tracing, begin
from lp_jax._solution import Solution
from lp_jax._solvers._solver import Solver

Body = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # ``body(carry, x) -> (carry, y)``


@_check.check_arguments
def scan(
    body: Body,
    init: PyTree,
    xs: Stacked = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    *,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    guess: str | CPoints = "constant",
    adjoint_guess: CPoints | None = None,
    comm: Comm | None = None,
) -> tuple[PyTree, PyTree]:
    """``jax.lax.scan`` over layers, with a solver that evaluates all of them at once.

    With ``solver=Serial()`` values and gradients are those of ``jax.lax.scan``; with another solver they are as close as it
    converges: ``lp_jax.scanned(body, init, xs).solve()`` returns the residual norms.

    Args:
        body: ``body(carry, x) -> (carry, y)``, a pure function. It may close over arrays, traced and differentiated ones too.
        init: the first carry. Its inexact leaves are solved for; without such leaves, this is ``jax.lax.scan``. Integers and
            keys are allowed where the body computes them from one another and from ``x`` only (a counter, a key that is
            split); elsewhere only layers one after another give them, as the default and `Serial` do.
        xs: operands of the layers, leaves ``(N, ...)``; or None, with a ``length``.
        length: number of layers, if ``xs`` has no leaves.
        reverse: whether to scan from the last entry of ``xs`` to the first.
        unroll: for compatibility with ``jax.lax.scan``; the solver decides how layers are evaluated.
        _split_transpose: as ``unroll``.
        solver: as for `solve`; a coarse step that stretches dt (`Rediscretize`) is refused, as a scan has no dt.
        adjoint_solver: as for `solve`.
        guess: as for `solve`, with states in the order in which they are computed.
        adjoint_guess: as for `solve`, in the same order.
        comm: as for `solve`.

    Returns:
        The last carry, and the ``ys``, stacked; gradients flow through both.

    Raises:
        ValueError: for lengths that do not agree, and for solvers that stretch dt.
        TypeError: for a body that changes its carry's structure, shapes or dtypes, or does not return a pair; for integers
            in the carry that depend on its inexact leaves, except with the default and exact solvers on one device.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> def body(y, layer):
        ...     w, b = layer
        ...     y = y + 0.1 * jnp.tanh(y @ w + b)
        ...     return y, jnp.mean(y)
        >>> layers = (jnp.zeros((32, 4, 4)), jnp.ones((32, 4)))
        >>> y, means = lp_jax.scan(body, jnp.zeros(4), layers)  # was: jax.lax.scan
        >>> y.shape, means.shape
        ((4,), (32,))
    """
    # This is `jax.lax.scan` itself, for carries that need no solve.
    plain = functools.partial(_tree.scan, body, init, xs, length, reverse, unroll, _split_transpose)
    init, xs, length = started(body, init, xs, length)
    comm = _inputs.comm(comm)
    solved_for = any(map(_tree.inexact, jax.tree.leaves(init)))
    if not solved_for:
        _refuse_split(comm, "a carry without floating-point numbers")
    # Without inexact leaves or layers there is nothing to solve. A rank without layers takes part all the same.
    if not solved_for or not (length or comm.splits):
        return plain()
    try:
        one = as_problem(body, init, xs, length, reverse, comm)
    # Integers that follow from the state come from a plain scan only. The default and exact solvers may take it; others may not.
    except _IntegersFollow:
        if comm.size == 1 and (solver is None or solver.chooses or solver.exact):
            return plain()
        raise
    refuse_stretched(solver, adjoint_solver)
    tracing = one.begin(solver, adjoint_solver)
    return one.results(solve_traced(tracing, guess, adjoint_guess))


def scanned(
    body: Body,
    init: PyTree,
    xs: Stacked,
    length: int | None = None,
    reverse: bool = False,
    *,
    comm: Comm | None = None,
) -> Problem:
    """Return the `Problem` of a `scan`, with its arguments, for `solve`, `plan` and `calibrate`.

    The step is a layer of time 1 (``t1 = N``; on MPI ranks all layers together are). The state is the carry, or the list of its
    leaves if it holds other classes than dict, list and tuple, with None for integers and keys. Aux is the ``ys``, in the order
    in which they are computed.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.scanned(lambda y, w: (y + 0.01 * jnp.sin(w * y), None), jnp.ones(3), jnp.ones(64))
        >>> solution = problem.solve(solver=lp_jax.MGRIT(iterations=3))
        >>> bool(solution.stats.residual_norms[-1] < 1e-3)
        True
    """
    return as_problem(body, *started(body, init, xs, length), reverse, _inputs.comm(comm)).problem


@dataclasses.dataclass(frozen=True)
class _BodyStep:
    """A scan's body as ``step(y, layer)``. ``layer.data`` begins with the leaves of the carry that are not solved for."""

    body: Body
    carry: jax.tree_util.PyTreeDef
    # of what is solved for, with None in the places of the other leaves
    state: jax.tree_util.PyTreeDef
    # which leaves of the carry are weakly typed, as Python numbers are: such a leaf takes the dtype of an array beside it
    weak: tuple[bool, ...]

    @classmethod
    def of(cls, body: Body, init: PyTree) -> "_BodyStep":
        """The state has the structure of the carry, or is a list of its leaves, as a foreign class may convert what it holds."""
        leaves, carry = jax.tree.flatten(init)
        state = _inexact(leaves)
        if _is_plain(carry):
            state = jax.tree.unflatten(carry, state)
        return cls(body, carry, jax.tree.structure(state), tuple(map(_is_weak, leaves)))

    def __call__(self, y: State, layer: Layer) -> tuple[State, PyTree]:
        fixed, _ = layer.data
        carry, out = self.body(self.carry_of(y, fixed), layer.params)
        return self.solved_for(jax.tree.leaves(carry)), out

    def carry_of(self, y: State, fixed: list[Any]) -> PyTree:
        """Put a carry together from the state and from the leaves that are not solved for."""
        leaves = [
            # JAX has no function that makes an array weakly typed, so this binds its primitive.
            lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
            if weak
            else x
            for x, weak in zip(_join(y, fixed), self.weak, strict=True)
        ]
        return jax.tree.unflatten(self.carry, leaves)

    def solved_for(self, leaves: list[Any]) -> State:
        return jax.tree.unflatten(self.state, jax.tree.leaves(_inexact(leaves)))


@dataclasses.dataclass(frozen=True)
class ScanProblem:
    """A scan as a `Problem`, and the way back from a solution to what the scan returns."""

    problem: Problem
    plain: Callable[[], tuple[PyTree, PyTree]]  # the scan itself
    init: PyTree
    last: list[Any]  # leaves of the last carry that are not solved for, None for the others
    reverse: bool

    def begin(self, solver: Solver | None, adjoint_solver: Solver | None) -> Tracing:
        """Trace the body for these solvers. A ``jacobian_of`` of theirs is another body."""

        def of_step(solver: Any) -> Any:
            other = getattr(solver, "jacobian_of", None)
            if other is None:
                return solver
            return dataclasses.replace(solver, jacobian_of=_BodyStep.of(other, self.init))

        return begin(self.problem, of_step(solver), of_step(adjoint_solver))

    def results(self, solution: Solution) -> tuple[PyTree, PyTree]:
        """The last carry and the ys of a solution."""
        step: Any = self.problem.step  # a `_BodyStep`
        last = step.carry_of(solution.y1, self.last)
        # A solve gives aux in the order in which the layers run; `lax.scan` stacks the ys in the order of xs.
        out = last, _tree.flip(solution.aux) if self.reverse else solution.aux
        if not varying_axes(*jax.tree.leaves(out)):
            return out
        # Within a shard_map a solve's results vary between all devices; the types of the plain scan say which axes are meant.
        kinds = jax.eval_shape(self.plain)
        return jax.tree.map(lambda x, kind: same_over(x, varying_axes(kind)), out, kinds)


def as_problem(
    body: Body, init: PyTree, xs: Stacked, n: int, reverse: bool, comm: Comm
) -> ScanProblem:
    """A scan of `started` operands as a problem."""
    plain = functools.partial(_tree.scan, body, init, xs, n, reverse)
    if reverse:
        _refuse_split(comm, "reverse=True")
        # The layers of a problem run forward, so they are put in the order in which they run.
        xs = _tree.flip(xs)
    fixed, last = _fixed(body, init, xs, n, comm)
    # The layers' numbers are stacked even if nothing else is, as a network needs some stacked array.
    data = fixed, jnp.arange(n, dtype=jnp.int32)
    step = _BodyStep.of(body, init)
    y0 = step.solved_for(jax.tree.leaves(init))
    # A rank knows only its own number of layers, so there the whole scan takes time 1. A body never sees the time.
    whole = 1.0 if comm.splits else float(n)
    problem = Problem(step, xs, y0, data=data, t1=whole, comm=comm, has_aux=True)
    return ScanProblem(problem, plain, init, last, reverse)


def started(body: Body, init: PyTree, xs: Stacked, length: Any) -> tuple[PyTree, Stacked, int]:
    """The carry with the dtypes that ``lax.scan`` gives it, ``xs`` as arrays, and the number of layers.

    `lax.scan` itself refuses lengths that disagree, and bodies that change the carry.
    """
    init, xs = _inputs.arrays(init, "init"), _inputs.arrays(xs, "xs")
    for path, leaf in jax.tree.leaves_with_path(xs):
        if leaf.ndim == 0:
            raise ValueError(
                f"xs{jax.tree_util.keystr(path)} is a scalar; every leaf of xs must have the "
                f"layers as its leading axis."
            )
    # lists of leaves, as classes of others may convert what they hold
    kinds = jax.eval_shape(
        lambda init, xs: jax.tree.leaves(_tree.scan(body, init, xs, length)[0]),
        init,
        jax.tree.map(gathered, xs),
    )
    leaves, structure = jax.tree.flatten(init)
    pairs = zip(leaves, kinds, strict=True)
    # `lax.scan` promotes a weakly typed carry to what the body returns, which may be weakly typed, too. Keys, which have no
    # astype, are never weak.
    typed = [x.astype(kind.dtype) if _is_weak(x) and not kind.weak_type else x for x, kind in pairs]
    n = _tree.leading(xs) if jax.tree.leaves(xs) else length
    return jax.tree.unflatten(structure, typed), xs, _check.integer("length", n, least=0)


def _fixed(
    body: Body, init: PyTree, xs: Stacked, length: int, comm: Comm
) -> tuple[list[Any], list[Any]]:
    """The leaves of the carry that are not inexact: as they enter every layer, and as they leave the last one."""
    leaves, structure = jax.tree.flatten(init)
    inexact = list(map(_tree.inexact, leaves))
    start = _others(leaves)
    if all(inexact):
        return start, start
    # A scan over all layers computes these leaves, before the solve.
    _refuse_split(comm, "a carry with integers or keys")
    program = jax.make_jaxpr(body)(init, _tree.entry_like(xs)).jaxpr
    # Does an integer of the next carry depend on a floating-point leaf of this one?
    solved = [*inexact, *[False] * (len(program.invars) - len(inexact))]
    # `follows` goes on with the results of y, which the loop below leaves out.
    follows = following(program, solved)
    for (path, leaf), known, follow in zip(
        jax.tree.leaves_with_path(init), inexact, follows, strict=False
    ):
        if follow and not known:
            raise _IntegersFollow(
                f"init{jax.tree_util.keystr(path)} has dtype {leaf.dtype}, and body computes it "
                f"from floating-point leaves of "
                "the carry, which are solved for iteratively. Return it as y instead, or make it "
                "floating point."
            )
    # Integers do not depend on the state, so any state gives them: the scan runs over the body with the first one, and XLA drops
    # all that only the state needs.
    state = lax.stop_gradient(_inexact(leaves))

    def advance(fixed: list[Any], x: PyTree) -> tuple[list[Any], list[Any]]:
        carry = jax.tree.unflatten(structure, _join(state, fixed))
        return _others(list(map(jnp.asarray, jax.tree.leaves(body(carry, x)[0])))), fixed

    # `lax.scan` refuses a leading axis that is spread over an explicit axis of a mesh, so every device gets all of xs.
    everywhere = jax.tree.map(
        lambda x: jax.sharding.reshard(x, gathered(x).sharding) if _tree.explicit(x) else x, xs
    )
    last, entering = _tree.scan(advance, start, lax.stop_gradient(everywhere), length=length)
    return entering, last


def refuse_stretched(solver: Solver | None, adjoint_solver: Solver | None) -> None:
    """Refuse solvers that take one layer with a longer dt for several."""
    for name, value in (("solver", solver), ("adjoint_solver", adjoint_solver)):
        if getattr(value, "stretches_dt", False):
            raise ValueError(
                f"{name}={value!r} has a coarse step that takes one layer with a longer dt for "
                f"several. A scan's body knows no "
                "dt: take coarse_step=Picard(sweeps=1), the default, or bring the layers as "
                "lp_jax.solve(step, ...), whose step gets its dt."
            )


class _IntegersFollow(TypeError):
    """Integers in the carry are computed from what is solved for: only one layer after another gives them."""


def _refuse_split(comm: Comm, what: str) -> None:
    if comm.splits:
        raise ValueError(
            f"{what} needs all layers in one place, and comm={comm!r} gives each process only its "
            f"own. Use MeshComm, or one "
            "process."
        )


def _is_plain(structure: jax.tree_util.PyTreeDef) -> bool:
    """Whether a tree is made of dictionaries, lists and tuples."""
    node = structure.node_data()
    plain = node is None or issubclass(node[0], (dict, list, tuple, type(None)))
    return plain and all(map(_is_plain, structure.children()))


def _is_weak(x: Any) -> bool:
    return getattr(x, "weak_type", False)


def _inexact(leaves: list[Any]) -> list[Any]:
    return [x if _tree.inexact(x) else None for x in leaves]


def _others(leaves: list[Any]) -> list[Any]:
    return [None if _tree.inexact(x) else x for x in leaves]


def _join(state: State, fixed: list[Any]) -> list[Any]:
    """The leaves of a carry."""
    solved_for = iter(jax.tree.leaves(state))
    return [next(solved_for) if x is None else x for x in fixed]
