"""`parallel`: a function whose scans are solved; `scans`: the scans that a function has."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from lp_jax._arrays import _tree
from lp_jax._arrays._jaxpr import (
    NESTED,
    as_scan,
    bind,
    evaluate,
    has_rule,
    in_gradient,
    is_array,
    is_scan,
    rerun,
    scan_parts,
    scopes,
    source,
    walk,
)
from lp_jax._arrays._place import at_home
from lp_jax._arrays._types import PyTree
from lp_jax._choice._fastest import Fastest, typical
from lp_jax._choice._footprint import footprint
from lp_jax._comms._comm import Comm
from lp_jax._problem import SOLVED, Problem, solve_traced
from lp_jax._programs import _inputs
from lp_jax._scan import as_problem, refuse_stretched, started
from lp_jax._solvers._solver import Solver

# whether a scan is solved, and by what
Where = Callable[["Scan"], "bool | Solver | tuple[Solver, Solver]"]
_LEFT = "left as it is: "
_NO_SCAN = (
    "got a function without a scan, {}, and solves nothing. Stack the equal blocks of a Python "
    "loop and scan over them: jax.lax.scan(lambda x, block: (apply(block, x), None), x, "
    "jax.tree.map(lambda *x: jnp.stack(x), *blocks)), or for NNX modules nnx.scan over "
    "lp_jax.nn.stack(blocks)"
)
_REFUSED = TypeError, ValueError, NotImplementedError, NameError


class Scan(NamedTuple):
    """A scan inside a function; `scans` says what its fields are."""

    length: int
    reverse: bool
    carry: tuple[jax.ShapeDtypeStruct, ...]
    flops: float
    name: str
    source: str
    problem: Problem | None = None
    takes: str = ""
    seconds: float | None = None
    scan_seconds: float = 0.0
    sweeps: Sequence[int] = ()


class Scans(tuple[Scan, ...]):
    """The scans of a function, in the order in which they run; printed, a line for each."""

    def __str__(self) -> str:
        lines = []
        for one in self:
            carry = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in one.carry)
            seconds = "" if one.seconds is None else f", {1e3 * one.seconds:.3g} ms predicted"
            if one.seconds and one.scan_seconds > one.seconds:
                if one.sweeps:
                    seconds += " if {} sweeps forward and {} back are enough".format(*one.sweeps)
                seconds += f", {1e3 * one.scan_seconds:.3g} ms for the scan"
            back = ", from the end" if one.reverse else ""
            lines.append(
                f"{one.source}: {one.length} steps{back}, carry {carry}: {one.takes}{seconds}"
            )
        return "\n".join(lines) or "no scan"


def parallel(
    f: Callable[..., PyTree],
    *,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    comm: Comm | None = None,
    where: Where | None = None,
) -> Callable[..., PyTree]:
    """Return ``f`` with its scans solved: ``jax.lax.scan``, however it got there, becomes `lp_jax.scan`.

    ``linen.scan``, ``nnx.scan``, stacked modules of Equinox and Haliax, and loops of a known length all end in a scan. The
    function is traced as under ``jax.jit``; arrays are its variables, other arguments constants. A gradient goes outside, as in
    the example. For functions of NNX modules, whose state is updated, see `lp_jax.nn.parallel`.

    The outermost scans are solved, those with floating-point numbers in the carry. What cannot be solved stays as it is: steps
    with side effects, functions with derivatives of their own, a carry whose integers follow from its floating-point numbers.
    Without ``solver`` the default decides for every scan. `scans` tells what is done with each.

    Args:
        f: any function that can be traced.
        solver: of all scans, as for `lp_jax.scan`; None is the default, ``Fastest()``.
        adjoint_solver: as for `lp_jax.scan`.
        comm: as for `lp_jax.scan`.
        where: ``where(scan)``: whether a scan is solved, or its solver, or its two solvers; ``scan`` has the fields that `scans`
            lists. If it is not solved, the scans in its step are looked at.

    Raises:
        TypeError: for solvers that are none.
        ValueError: for solvers that stretch dt, as for `lp_jax.scan`.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> def loss(weights):
        ...     body = lambda y, w: (y + 0.01 * jnp.tanh(w * y), None)
        ...     return jnp.sum(jax.lax.scan(body, jnp.ones(4), weights)[0])
        >>> gradient = jax.grad(lp_jax.parallel(loss, solver=lp_jax.Picard(sweeps=6)))(jnp.ones(64))
        >>> bool(jnp.allclose(gradient, jax.grad(loss)(jnp.ones(64)), rtol=1e-2))
        True
    """
    rules = Rules(solver, adjoint_solver, comm, where)

    @functools.wraps(f)
    def solved(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return rules.call(f, args, kwargs)

    return solved


def scans(f: Callable[..., PyTree], **options: Any) -> Callable[..., Scans]:
    """Return a function of the same arguments that tells which scans ``f`` has and what `parallel` does with each.

    It evaluates ``f`` once, without ``jit``; ``jax.eval_shape`` of it only traces. ``options`` are those of `parallel`.

    Returns:
        A tuple that prints as a list. An entry has ``length``, ``reverse``, shapes of the ``carry``, ``flops`` of the products of
        a step, ``name`` (its scopes), ``source`` (file, line, function), ``problem`` for `plan`, `diagnose` and `gradient_error`
        (None if it cannot be solved; its arrays have values where those of ``f`` have, outside of loops), ``takes`` (what
        `parallel` does), ``seconds`` (predicted for value and gradient, where the default decides) and ``scan_seconds`` (those of
        the scan). Of sweeps it assumes ``sweeps``, forward and in the adjoint: 5 and 3 at the default's tolerance;
        `planning.diagnose` counts those that a problem takes.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> f = lambda w: jax.lax.scan(lambda y, w: (y + 0.1 * jnp.tanh(w * y), None), jnp.ones(4), w)[0]
        >>> (one,) = lp_jax.scans(f)(jnp.ones(64))
        >>> one.length, one.takes
        (64, 'left as it is: nothing is faster')
        >>> one.problem.layers
        64
    """

    def found(*args: PyTree, **kwargs: PyTree) -> Scans:
        seen: list[Scan] = []
        Rules(**options, tell=seen.append).call(f, args, kwargs)
        return Scans(seen)

    return found


@dataclasses.dataclass(frozen=True)
class Rules:
    """The options of `parallel`, and the evaluation of a program by them.

    If there is a ``tell``, it is called with every scan, and jitted functions are evaluated inline.
    """

    solver: Solver | None = None
    adjoint_solver: Solver | None = None
    comm: Comm | None = None
    where: Where | None = None
    tell: Callable[[Scan], object] | None = None
    in_gradient: bool = False  # whether the program is a part of a gradient
    strict: bool = False  # whether a scan that cannot be solved is refused

    def __post_init__(self) -> None:
        _inputs.comm(self.comm)
        _inputs.solvers(self.solver, self.adjoint_solver, optional=True)

    def call(self, f: Callable[..., PyTree], args: PyTree, kwargs: PyTree) -> PyTree:
        # Arrays become inputs of the program; all other arguments are constants of its trace.
        mask = [
            isinstance(x, jax.Array | np.ndarray | np.generic)
            for x in jax.tree.leaves((args, kwargs))
        ]
        arrays, combine = _tree.partition((args, kwargs), mask)

        def flat(*arrays: jax.Array) -> PyTree:
            args, kwargs = combine(arrays)
            return f(*args, **kwargs)

        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        # on a rank without layers, a solve has no scan
        if not (any(map(is_scan, walk(closed.eqns))) or _inputs.comm(self.comm).splits):
            self._warn(_NO_SCAN.format(getattr(f, "__name__", f)), self.solver)
        pairs = zip(closed.jaxpr.outvars, self.run(closed, *arrays), strict=True)
        # Results with the type of an array may be Python or NumPy constants; values of other types stay as they are.
        out = [jnp.asarray(x) if is_array(v) else x for v, x in pairs]
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    def run(self, program: core.ClosedJaxpr, *args: Any) -> list[Any]:
        """Evaluate a program, its scans solved."""
        return evaluate(program, args, self._operation)

    def _operation(self, eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        """Evaluate an operation. If there are scans in the programs within it, these are solved."""
        # All programs within an operation of a gradient are parts of that gradient, too.
        if in_gradient(eqn) and not self.in_gradient:
            return dataclasses.replace(self, in_gradient=True)._operation(eqn, ins)
        # A solve has its own solver, and nothing is said of the scans in it.
        if SOLVED in scopes(eqn):
            return bind(eqn, ins)
        if has_rule(eqn, "jvp") or has_rule(eqn, "vjp"):
            for one in filter(is_scan, walk([eqn])):
                self._left(one, "it is in a function with a derivative of its own", self.solver)
        # An operation without scans is evaluated as it was.
        if not _has_scan([eqn]):
            return bind(eqn, ins)
        if is_scan(eqn):
            return self._scan(eqn, ins)
        # `scans` evaluates calls inline, because values of arrays are lost within a jitted function.
        return rerun(eqn, ins, self.run, inline=self.tell is not None)

    def _scan(self, eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        if not all(map(is_array, eqn.invars)):
            self._left(eqn, "its operands are no arrays", self.solver)
            return bind(eqn, ins)
        home = jax.sharding.get_abstract_mesh()
        # The body is evaluated on the mesh of this trace, also where a solve calls it within a shard_map of its own.
        given = as_scan(eqn, ins, lambda program, *args: at_home(program, home, args, bind))
        about, out = self._solve(eqn, given)
        if self.tell is not None:
            self.tell(about)
        if out is not None:
            return out
        chosen = about.problem is not None and about.seconds is not None  # by the default
        if chosen or not _has_scan(scan_parts(eqn).body.eqns):
            return bind(eqn, ins)
        # The scan stays, and scans within its step are looked at.
        return rerun(eqn, ins, self.run, inline=False)

    def _solve(
        self, eqn: core.JaxprEqn, given: tuple[Any, ...]
    ) -> tuple[Scan, list[jax.Array] | None]:
        """Describe a scan, and solve it. The results are None if the scan stays as it is."""
        closed, length, reverse, *_ = scan_parts(eqn)
        program, comm = closed.jaxpr, _inputs.comm(self.comm)
        about = Scan(
            length=length,
            reverse=reverse,
            carry=tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in given[1]),
            flops=footprint(program, [], batched=False).flops,
            name=scopes(eqn),
            source=source(eqn),
        )

        def stays(why: str) -> tuple[Scan, None]:
            return about._replace(takes=_LEFT + why), None

        # A pipeline refuses scans that it cannot spread, but without floating-point numbers there is nothing to spread.
        nothing = self.strict and not any(map(_tree.inexact, given[1]))
        if nothing or not (about.length or comm.splits):
            return stays("nothing to solve")
        wanted = True if self.where is None else self.where(about)
        if wanted is False:
            return stays("where(scan) is False")
        solvers = self.solver, self.adjoint_solver
        if wanted is not True:
            # `where` may name the solvers of this scan.
            solvers = wanted if isinstance(wanted, tuple) else (wanted, None)
            _inputs.solvers(*solvers, optional=True)

        def left(why: str) -> tuple[Scan, None]:
            self._left(eqn, why, solvers[0])
            return stays(why)

        # Collectives over axes of a shard_map work in a solve; the name of a vmap's axis gets lost there.
        devices = jax.sharding.get_abstract_mesh().manual_axes
        if any(getattr(effect, "name", None) not in devices for effect in program.effects):
            return left("its step has side effects")
        if not any(map(_tree.inexact, given[1])):
            return left("no floating-point numbers in the carry")
        if any(in_gradient(one) and _has_scan([one]) for one in walk(program.eqns, into=NESTED)):
            return stays("its step takes the gradient of a scan, as in a loop over training steps")
        if self.in_gradient and self.strict:
            raise ValueError(
                "lp_jax.pipeline got a function that takes a gradient. Take the gradient of the "
                "pipeline: jax.grad(lambda params: lp_jax.pipeline(loss, ...)(params, "
                "batches).mean())."
            )
        if self.in_gradient:
            warnings.warn(
                "lp_jax.parallel got a function that takes a gradient, and leaves its scans as "
                "they are. Take the gradient of the parallel function: "
                "jax.grad(lp_jax.parallel(loss)).",
                stacklevel=2,
            )
            return stays("part of a gradient; lp_jax.parallel goes inside")
        # A solver that stretches dt is the user's mistake, and none of the scan's, so its error is not caught.
        refuse_stretched(*solvers)
        try:
            body, *operands, reverse = given
            one = as_problem(body, *started(body, *operands), reverse, comm)
            # The body is traced once, for the default's choice and for the solve.
            tracing = one.begin(*solvers)
            named = solvers[0] or Fastest()
            about = about._replace(takes=str(named), problem=one.problem)
            if named.chooses:
                taken, seconds = tracing.chosen
                processor = tracing.workers.processor
                about = about._replace(
                    takes=str(taken[0]),
                    seconds=seconds,
                    scan_seconds=sum(processor.serial(tracing.footprint, tracing.workers.layers)),
                    sweeps=[typical(each.rtol) for each in taken if each.errors_fall_fast],
                )
                # On one device that is not wide the scan stays as it is. Elsewhere the solve unrolls some turns of it.
                if taken[0].exact and comm.size == 1 and not processor.wide:
                    return about._replace(takes=_LEFT + "nothing is faster"), None
            return about, jax.tree.leaves(one.results(solve_traced(tracing)))
        except _REFUSED as error:
            return left(_first_line(error))

    def _left(self, eqn: core.JaxprEqn, why: str, solver: Solver | None) -> None:
        """Warn that a scan is left as it is, unless there are scans inside it, which are looked at next."""
        if self.strict:
            raise ValueError(
                f"lp_jax.pipeline cannot spread a scan, {source(eqn)}: {why.rstrip('.')}. Take "
                "that out of the scan, or this scan out of the function."
            )
        if not _has_scan(scan_parts(eqn).body.eqns):
            self._warn(f"leaves a scan as it is, {source(eqn)}: {why.rstrip('.')}", solver)

    def _warn(self, what: str, solver: Solver | None) -> None:
        """Warn that a solver or comm is named and not used. Python shows each text once."""
        if self.strict:
            raise ValueError(f"lp_jax.pipeline {what}.")
        named = solver is not None and not solver.chooses
        if self.tell is None and (named or self.comm is not None):
            warnings.warn(
                f"lp_jax.parallel {what}. If that is meant, name no solver and no comm, or return "
                f"False from where(scan).",
                stacklevel=2,
            )


def _has_scan(equations: Sequence[core.JaxprEqn]) -> bool:
    return any(map(is_scan, walk(equations, into=NESTED)))


def _first_line(error: Exception) -> str:
    if "check_vma" in str(error):
        return (
            "its step has branches or loops of what differs between devices of a shard_map with "
            "check_vma=True"
        )
    return str(error).split("\n")[0]
