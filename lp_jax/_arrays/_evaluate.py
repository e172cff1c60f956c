"""Programs (jaxprs) evaluated in another way, or on another mesh than the one they were traced on."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import AbstractMesh, PartitionSpec, Sharding

from lp_jax._arrays import _tree
from lp_jax._arrays._products import Operation, array_type, called, inside, scan_parts, walk
from lp_jax._arrays._types import PyTree


def evaluate(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], operation: Operation
) -> list[Any]:
    """Evaluate a program, with each operation's scopes, place in the source, and mesh."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
            eqn.ctx.manager,
        ):
            env.update(zip(eqn.outvars, operation(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def bind(eqn: core.JaxprEqn, ins: Sequence[Any]) -> Sequence[Any]:
    """The operation as it was."""
    name, p = eqn.primitive.name, eqn.params
    if name == "pvary" and _tree.varying_axes(ins[0]) >= set(p["axes"]):
        return ins  # within a solve all states vary between the devices of a shard_map
    kinds = [_tree.varying_axes(v.aval) for v in eqn.invars]
    if len(set(kinds)) == 1:  # as lax.add and the like make their operands
        ins = _tree.varying(tuple(ins), tuple(ins))
    here = jax.sharding.get_abstract_mesh()
    nothing_free = here.manual_axes and not here.auto_axes + here.explicit_axes
    # vmap of a constraint asks for a place on axes of the compiler, where none is left, too
    void = nothing_free and any(e.primitive.name == "sharding_constraint" for e in walk([eqn]))
    if inside(eqn) and (void or [*map(_tree.varying_axes, ins)] != kinds):
        return anew(eqn, _tree.varying(tuple(ins), tuple(ins)), bind)
    if void:
        return ins
    out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(p))
    return out if eqn.primitive.multiple_results else [out]


def moved(home: AbstractMesh, operation: Operation = bind) -> Operation:
    """Operations of a program that was traced on the mesh ``home``, on that of the caller.

    JAX refuses a program whose types hold another mesh than its operands have, so all programs within are traced again. Within
    a solve over a mesh, whose axes are the compiler's or the solve's own, types have no place: what asks for one is left out,
    and what constrains the compiler keeps those axes that are the compiler's.
    """
    here = jax.sharding.get_abstract_mesh()

    def there(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        with jax.sharding.use_abstract_mesh(here):
            if inside(eqn):
                return anew(eqn, ins, there)
            if eqn.primitive.name in _PLACED:
                return [_constrained(x, eqn.params) for x in ins]
            kept = {k: None if isinstance(v, Sharding) else v for k, v in eqn.params.items()}
            return operation(eqn.replace(params=kept), ins)

    return operation if here == home else there


def one_by_one(operation: Operation = bind) -> Operation:
    """Operations of which a batch has the results of one after another.

    Under ``vmap``, keys other than those of threefry draw numbers for the whole batch from the first key.
    """

    def drawn(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        if draws(eqn):
            kind = jax.random.key_impl(ins[0])

            def draw(data: jax.Array, *others: Any) -> Sequence[Any]:
                return operation(eqn, [jax.random.wrap_key_data(data, impl=kind), *others])

            # ``jax_debug_key_reuse`` does not know what becomes of keys here: they enter as numbers, and leave as clones
            out = jax.custom_batching.sequential_vmap(draw)(jax.random.key_data(ins[0]), *ins[1:])
            return _tree.with_fresh_keys(out)
        return anew(eqn, ins, drawn) if any(map(draws, walk([eqn]))) else operation(eqn, ins)

    return drawn


def draws(eqn: core.JaxprEqn) -> bool:
    """Whether an operation draws from a key, or makes keys of one, other than threefry's."""
    names = "random_bits", "random_split", "random_fold_in", "random_gamma"
    return eqn.primitive.name in names and array_type(eqn.invars[0]).dtype.name != "key<fry>"


_PLACED = "sharding_constraint", "reshard", "mesh_cast"


def _constrained(x: jax.Array, p: dict[str, Any]) -> jax.Array:
    """The array, with the part of its constraint that names axes of the compiler."""
    free = jax.sharding.get_abstract_mesh().auto_axes
    spec = getattr(p.get("sharding", p.get("dst_sharding")), "spec", ())
    if not free:
        return x

    def left(names: Any) -> Any:
        if not isinstance(names, str | tuple):
            return names
        return tuple(n for n in np.atleast_1d(names) if n in free) or PartitionSpec.UNCONSTRAINED

    return lax.with_sharding_constraint(x, PartitionSpec(*map(left, spec)))


def anew(eqn: core.JaxprEqn, ins: Sequence[Any], operation: Operation) -> Sequence[Any]:
    """An operation with programs in it, which are traced again: what their operations do is up to ``operation``."""
    name, p = eqn.primitive.name, eqn.params

    def function(program: Any) -> Callable[..., list[Any]]:
        closed = program if isinstance(program, core.ClosedJaxpr) else core.ClosedJaxpr(program, ())
        return lambda *args: evaluate(closed.jaxpr, closed.consts, args, operation)

    if name == "scan":
        (consts, carries), body = scan_parts(eqn), function(p["jaxpr"])
        at = consts + carries

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            out = body(*ins[:consts], *carry, *x)
            return list(map(_tree.varying, out[:carries], carry)), out[carries:]

        options = {k: p[k] for k in ("length", "reverse", "unroll")}
        carry, out = _tree.scan(step, list(ins[consts:at]), list(ins[at:]), **options)
        return [*carry, *out]
    if name == "while":
        start, end = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        condition, body = function(p["cond_jaxpr"]), function(p["body_jaxpr"])
        return _tree.while_loop(
            lambda carry: condition(*ins[:start], *carry)[0],
            lambda carry: list(map(_tree.varying, body(*ins[start:end], *carry), carry)),
            list(ins[end:]),
        )
    if name == "cond":
        return lax.switch(ins[0], list(map(function, p["branches"])), *ins[1:])
    if name == "shard_map":
        here = jax.sharding.get_abstract_mesh()
        axes = p.get("newly_manual_axes", p.get("manual_axes"))  # the latter before jax 0.10.2
        options = {key: p[key] for key in ("in_specs", "check_vma")} | {"axis_names": axes}
        options["mesh"] = here if here.manual_axes else p["mesh"]
        spread = jax.shard_map(function(p["jaxpr"]), **options, out_specs=[*p["out_specs"]])
        return jax.jit(spread)(*ins)  # outside of jit, JAX has no symbolic zeros within one
    if name == "linear_solve":
        ends = [0, *itertools.accumulate(p["const_lengths"])]
        matvec, _, solve, back = (
            program and functools.partial(function(program), *ins[start:end])
            for program, start, end in zip(p["jaxprs"], ends[:-1], ends[1:], strict=True)
        )
        return lax.custom_linear_solve(
            lambda x: matvec(*x),
            list(ins[ends[-1] :]),
            lambda _, b: solve(*b),
            back and (lambda _, b: back(*b)),
        )
    if name.startswith(("custom_jvp", "custom_vjp")):
        return _with_its_rule(eqn, function(p["call_jaxpr"]), operation)(*ins)
    if not called(eqn):
        return bind(eqn, ins)
    program = function(next(p[key] for key in ("jaxpr", "call_jaxpr", "call") if key in p))
    if "prevent_cse" in p:
        program = jax.checkpoint(program, prevent_cse=p["prevent_cse"], policy=p["policy"])
    return program(*ins)


def _with_its_rule(
    eqn: core.JaxprEqn, function: Callable[..., list[Any]], operation: Operation
) -> Callable[..., Sequence[Any]]:
    """A function with a derivative rule of its own.

    The rule is known where the function was traced, and only there. So it is traced on that mesh, and its operations are
    evaluated on this one.
    """
    kinds, results = (list(map(array_type, each)) for each in (eqn.invars, eqn.outvars))

    def at_home(f: Callable[..., PyTree], *kinds: PyTree) -> tuple[core.ClosedJaxpr, Any]:
        with eqn.ctx.manager:
            closed, shape = jax.make_jaxpr(f, return_shape=True)(*kinds)
        return closed, jax.tree.structure(shape)

    def here(program: tuple[core.ClosedJaxpr, Any], *operands: PyTree) -> PyTree:
        (closed, structure), leaves = program, jax.tree.leaves(operands)
        values = evaluate(closed.jaxpr, closed.consts, leaves, operation)
        return jax.tree.unflatten(structure, values)

    def as_it_was(combine: Callable[..., PyTree], new: list[Any]) -> tuple[list[Any], list[Any]]:
        out = list(bind(eqn, combine(new)))
        return _tree.partition(out)[0], out

    def pushed(operands: list[Any], dots: list[Any]) -> tuple[list[Any], list[Any]]:
        new, combine = _tree.partition(operands)
        _, dots, out = jax.jvp(functools.partial(as_it_was, combine), (new,), (dots,), has_aux=True)
        return out, dots

    def pulled(*operands: Any) -> tuple[list[Any], PyTree]:
        new, combine = _tree.partition(list(operands))
        _, pull, out = jax.vjp(functools.partial(as_it_was, combine), new, has_aux=True)
        return out, pull

    linearised = functools.cache(lambda: at_home(pulled, *kinds))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        dots, _ = _tree.partition(list(tangents), list(map(_tree.inexact, kinds)))
        program = at_home(pushed, kinds, _tree.partition(kinds)[0])
        out, dots = here(program, list(primals), dots)
        each, none = iter(dots), jax.dtypes.float0
        return out, [next(each) if _tree.inexact(x) else np.zeros(x.shape, none) for x in out]

    def fwd(*operands: Any) -> tuple[list[Any], PyTree]:
        out, pull = here(linearised(), *operands)
        return out, pull

    def bwd(pull: PyTree, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        mask, structure = list(map(_tree.inexact, results)), jax.tree.structure(pull)
        seen, _ = _tree.partition(list(cotangents), mask)
        kept = linearised()[0].out_avals[len(results) :]

        def back(kept: list[Any], seen: list[Any]) -> PyTree:
            return jax.tree.unflatten(structure, kept)(seen)[0]

        program = at_home(back, kept, _tree.partition(results)[0])
        return tuple(_tree.partition(kinds)[1](here(program, pull, seen), fill=None))

    f = (jax.custom_jvp if eqn.primitive.name.startswith("custom_jvp") else jax.custom_vjp)(
        function
    )
    f.defjvp(jvp) if isinstance(f, jax.custom_jvp) else f.defvjp(fwd, bwd)
    return f
