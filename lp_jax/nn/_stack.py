"""The interface between Flax NNX and the solver: a module as a pure step with stacked parameters."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from lp_jax import Comm, Layer, Solver, _parallel, _pipeline
from lp_jax._arrays import _check
from lp_jax._arrays._jaxpr import called, follow
from lp_jax._arrays._types import PyTree, State
from lp_jax._comms._comm import OneDevice

MakeModule = Callable[[nnx.Rngs], nnx.Module]


@dataclasses.dataclass(frozen=True)
class ModuleStep:
    """A module's ``__call__`` as ``step(y, layer)``. Equal for equal modules, so that programs are reused."""

    graphdef: nnx.GraphDef

    def __call__(self, y: State, layer: Layer) -> State:
        module = nnx.merge(self.graphdef, layer.params)
        return _call(module, y, layer, data=layer.data, shared=layer.shared)


@dataclasses.dataclass(frozen=True)
class TrunkStep:
    """A layer of `LayerParallel` as a step: `ModuleStep` with a key for each call, and running statistics as aux.

    The ``data`` of its solve are the caller's data and the running statistics; ``shared`` is the caller's, and the key.
    """

    graphdef: nnx.GraphDef
    updates: bool

    def __call__(self, y: State, layer: Layer) -> PyTree:
        data, stats = layer.data
        shared, key = layer.shared
        module = nnx.merge(self.graphdef, layer.params, stats)
        # The index is the layer's number in the whole network, so masks do not depend on the worker, nor on the sweep.
        key = None if key is None else jax.random.fold_in(key, layer.index)
        y = _call(module, y, layer, data=data, shared=shared, key=key)
        return (y, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))) if self.updates else y


def _call(
    module: nnx.Module,
    y: State,
    layer: Layer,
    *,
    data: PyTree,
    shared: PyTree,
    key: jax.Array | None = None,
) -> State:
    """Call the module with the keywords that it has."""
    signature = inspect.signature(module.__call__)
    keywords = signature.parameters
    name = type(module).__name__
    try:
        # The call is checked before it is made, because a TypeError from inside the module would look the same.
        signature.bind_partial(y, layer.t, layer.dt)
    except TypeError:
        raise TypeError(
            f"{name}.__call__{signature} is called with (y, t, dt), the state, the time and its "
            "step. A layer without time may ignore both, with t1 = the number of layers; or stack "
            "it by nnx.vmap, apply it with nnx.scan and wrap the function in lp_jax.nn.parallel."
        ) from None
    # data are the layers' keys
    if data is not None and "data" not in keywords and "key" in keywords:
        if key is not None:
            raise ValueError(
                f"data and key were both given, but {name}.__call__ has no keyword `data`, so both "
                "would be its `key`. Leave one out, or let it accept `data`."
            )
        data, key = None, data
    arguments = {"data": data, "key": key, "shared": shared}
    for argument, value in arguments.items():
        if value is not None and argument not in keywords:
            raise TypeError(
                f"{argument} was given, but {name}.__call__ has no such keyword. Let it accept "
                f"one, __call__(self, y, t, dt, *, {argument}=None), or leave {argument} out."
            )
    # Every step has an index, so a module that has no such keyword is no mistake.
    arguments["index"] = layer.index
    return module(
        y, layer.t, layer.dt, **{k: value for k, value in arguments.items() if k in keywords}
    )


def stack(
    make_module: MakeModule | Sequence[PyTree],
    num_layers: Any = None,
    *,
    rngs: Any = None,
) -> Any:
    """Turn a module that is one layer into the first two arguments of `lp_jax.solve`; or stack blocks that are there.

    **Blocks.** For an ``nnx.List``, or a list or tuple, of equal blocks, the result is one block whose arrays have the blocks
    as leading axis, for ``nnx.scan``, ``jax.lax.scan`` and `unstack`: a scan can be solved, and a Python loop cannot. Blocks are
    modules of NNX or Equinox, or other pytrees, such as parameters of Linen. All variables are stacked, with random streams.

    **A layer.** The module's ``__call__(y, t, dt) -> y_next`` is one step. It may have any of these keywords, and gets them
    by name:

    - ``data``: the layer's slice of the solve's ``data``, or None.
    - ``key``: the layer's random key. Without a keyword ``data``, it is the layer's slice of the solve's ``data``. For
      dropout, build ``nnx.Dropout(rate)`` without ``rngs``, call it as ``dropout(y, rngs=key)``, and pass
      ``data=jax.random.split(key, num_layers)``. The masks then depend only on the key and the layer.
    - ``shared``: the ``shared`` of the solve, the same for all layers; a padding mask, for example.
    - ``index``: number of the layer, an int32 scalar.

    ``make_module(rngs)`` builds one layer; it is called once, under ``jax.vmap`` over keys of the layers, which come from one
    key of the stream ``params`` of ``rngs``.

    Returns:
        ``(step, params)``. ``step`` is hashable, and equal for modules built alike, so that programs are reused. ``params`` is a
        nested dict of arrays, leaves ``(num_layers, ...)``.

    Raises:
        ValueError: if ``num_layers`` is below 1, or the module holds anything but `nnx.Param`: stored random streams,
            arrays, running statistics (`LayerParallel` carries these); and for blocks that differ in more than their numbers.
        TypeError: if ``rngs`` is not an `nnx.Rngs`, or ``make_module`` does not build an `nnx.Module`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> step, params = nn.stack(lambda rngs: nn.DenseResidual(8, rngs=rngs), 64, rngs=nnx.Rngs(0))
        >>> params["inner"]["kernel"].shape
        (64, 8, 8)
        >>> lp_jax.solve(step, params, jnp.ones((4, 8), "float32")).y1.shape
        (4, 8)
        >>> nn.stack([nn.DenseResidual(8, rngs=nnx.Rngs(n)) for n in range(24)]).inner.kernel.shape
        (24, 8, 8)
    """
    if not callable(make_module):
        graphdefs, states = zip(*map(nnx.split, make_module), strict=True)
        if other := next((g for g in graphdefs if g != graphdefs[0]), None):
            raise ValueError(
                "blocks that are stacked may differ in the numbers of their arrays only; got other "
                f"trees, or other functions in them, such as initializers: {graphdefs[0]} and "
                f"{other}."
            )
        return _merged(graphdefs[0], jax.tree.map(lambda *x: jnp.stack(x), *states))
    graphdef, params = nnx.split(stacked_module(make_module, num_layers, rngs, holds=nnx.Param))
    return ModuleStep(graphdef), nnx.to_pure_dict(params)


def stacked_module(
    make_module: MakeModule,
    num_layers: int,
    rngs: nnx.Rngs,
    comm: Comm = OneDevice(),
    solvers: Sequence[Solver] | None = (),
    *,
    holds: Any = (nnx.Param, nnx.BatchStat),
) -> nnx.Module:
    """Return N layers as one module whose variables have the layers as leading axis, on the workers of ``comm``.

    ``solvers`` are the solvers of the layers; None for variables that all workers hold. ``holds`` are the kinds of variables
    that a layer may have.
    """
    num_layers = _check.integer("num_layers", num_layers, least=1)
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"rngs must be an nnx.Rngs, like nnx.Rngs(0); got {rngs!r} ({type(rngs).__name__})."
        )

    graphdefs = []

    def make(key: jax.Array) -> PyTree:
        module = make_module(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"make_module(rngs) must build an nnx.Module; got {type(module).__name__}."
            )
        if others := nnx.to_flat_state(nnx.state(module, nnx.Not(holds))):
            raise ValueError(_state_refused(module, others))
        # Split here: a module that leaves vmap as a pytree no longer knows which of its parameters are the same one.
        graphdef, state = nnx.split(module)
        graphdefs.append(graphdef)
        return nnx.to_pure_dict(state)

    # `vmap` over keys draws all layers in one program, and `comm.init` makes each worker's layers where they will live.
    keys = jax.random.split(rngs.params(), num_layers)
    params = comm.init(jax.vmap(make), keys, solvers)
    return _merged(graphdefs[0], params)


def _merged(graphdef: nnx.GraphDef, stacked: PyTree) -> Any:
    """Return stacked variables as a module; a layer's metadata lack the layers' axis, which nnx.vmap would add, too."""
    module = nnx.merge(graphdef, stacked)
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        metadata: Any = getattr(variable, "get_metadata", dict)()
        if names := metadata.get("out_sharding"):
            variable.set_metadata(out_sharding=("layers", *names))
    return module


def trunk_step(module: nnx.Module) -> tuple[TrunkStep, PyTree, PyTree]:
    """Return a stacked module as a pure step, its parameters and its running statistics."""
    graphdef, *states = nnx.split(module, nnx.Param, nnx.BatchStat)
    params, stats = map(nnx.to_pure_dict, states)
    updates = any(  # in eval() mode a call changes no running statistics
        not getattr(part, "use_running_average", False)
        for _, part in nnx.iter_modules(module)
        if any(isinstance(value, nnx.BatchStat) for value in vars(part).values())
    )
    return TrunkStep(graphdef, updates), params, stats


def _state_refused(module: nnx.Module, others: Sequence[tuple[PyTree, object]]) -> str:
    """Say why a layer may not have these variables, and what to do instead."""
    listed = ", ".join(
        f"{'.'.join(map(str, path))} ({type(value).__name__})" for path, value in others
    )
    instead = {
        nnx.BatchStat: "use nn.LayerParallel without a spline, which carries running statistics, "
        "or nnx.LayerNorm",
        nnx.RngState: "build nnx.Dropout(rate) without rngs, let __call__ accept a keyword `key`, "
        "and pass data=jax.random.split(key, num_layers)",
    }
    advice = [
        text
        for kind, text in instead.items()
        if any(isinstance(value, kind) for _, value in others)
    ]
    return (
        f"{type(module).__name__} holds more than nnx.Param: {listed}. A layer is evaluated "
        f"several times per solve, so it must be a pure function of its parameters: "
        f"{'; '.join(advice) or 'make it an nnx.Param, or compute it in __call__'}."
    )


def parallel(f: Callable[..., PyTree], **options: Any) -> Callable[..., PyTree]:
    """`lp_jax.parallel` for a function whose arguments hold NNX modules, as ``nnx.jit`` is ``jax.jit`` for such.

    Statistics, counters, sown values and random streams that ``f`` changes are changed in the caller's modules, also in a carry.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layers = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 16))
        >>> def loss(layers, x):
        ...     step = nnx.scan(lambda x, layer: x + 0.1 * nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        ...     return jnp.mean(step(x, layers) ** 2)
        >>> value, gradient = nnx.value_and_grad(nn.parallel(loss, solver=lp_jax.Picard(sweeps=4)))(layers, jnp.ones((2, 4)))
        >>> gradient["kernel"].shape
        (16, 4, 4)
    """

    @functools.wraps(f)
    def solved(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with nnx.update_context(tag := object()):  # modules that come out are those that went in
            with nnx.split_context(tag) as context:
                graphdef, state = context.split((args, kwargs))

            @functools.wraps(f)
            def pure(state: nnx.State) -> PyTree:
                with nnx.merge_context(tag, inner=True) as context:
                    given = context.merge(graphdef, state)
                out = f(*given[0], **given[1])
                with nnx.split_context(tag) as context:
                    return context.split((given, out))

            # `pure` is a function of arrays, as lp_jax.parallel wants it: it takes the
            # state of NNX, and returns graph and state after the call.
            parts = _parallel.parallel(pure, **options)(state)
            # NNX writes the new state into the caller's modules here, as `nnx.jit` does.
            with nnx.merge_context(tag, inner=False) as context:
                return context.merge(*parts)[1]

    return solved


def pipeline(f: Callable[..., PyTree], *args: Any, **options: Any) -> Callable[..., PyTree]:
    """`lp_jax.pipeline`, with its arguments, for a function whose arguments hold NNX modules; these have None in ``in_axes``.

    All microbatches share a module, so that a call must leave it as it is.

    Raises:
        ValueError: as `lp_jax.pipeline`, and for a call that changes a module.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> layers = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 16))
        >>> def loss(layers, x):
        ...     step = nnx.scan(lambda x, layer: x + 0.1 * nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        ...     return jnp.mean(step(x, layers) ** 2)
        >>> piped = nn.pipeline(loss, jax.make_mesh((2,), ("layers",)), in_axes=(None, 0))
        >>> value, gradient = nnx.value_and_grad(lambda layers, x: piped(layers, x).mean())(layers, jnp.ones((4, 2, 4)))
        >>> gradient["kernel"].shape
        (16, 4, 4)
    """

    @functools.wraps(f)
    def pure(*args: PyTree, **kwargs: PyTree) -> PyTree:
        graphdef, state = nnx.split((args, kwargs))

        def run(state: nnx.State) -> PyTree:
            given = nnx.merge(graphdef, state)
            out = f(*given[0], **given[1])
            return nnx.split(given)[1], out

        program, (left, out) = jax.make_jaxpr(run, return_shape=True)(state)
        # The first `count` results are the state that the call leaves. It is unchanged if each of them is the input itself.
        inputs, count = program.jaxpr.invars, len(jax.tree.leaves(left))
        if follow(program.jaxpr, inputs, _kept, None)[:count] != inputs:
            raise ValueError(
                "lp_jax.nn.pipeline got a function that changes a module, such as running "
                "statistics, counts of random streams or sown values, and all microbatches share "
                "it. Call module.eval() before; pass keys as an argument with an axis of "
                "microbatches, for nnx.Dropout(rate)(x, rngs=key)."
            )
        # The traced program is evaluated, so that f is not traced a second time.
        leaves = core.jaxpr_as_fun(program)(*jax.tree.leaves(state))
        return jax.tree.unflatten(jax.tree.structure(out), leaves[count:])

    return _pipeline.pipeline(pure, *args, **options)


def _kept(eqn: core.JaxprEqn, ins: list[Any]) -> list[Any]:
    """Return what an operation returns: a transformation of NNX returns the inputs of a module that it leaves alone."""
    programs = called(eqn)
    # The branches of a switch may return different inputs.
    return follow(programs[0], ins, _kept, None) if len(programs) == 1 else eqn.outvars
