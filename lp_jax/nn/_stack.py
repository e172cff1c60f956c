"""The seam between Flax NNX and the solver: a module as a pure step with stacked parameters."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from lp_jax import _check
from lp_jax._solver import Solver
from lp_jax._types import Layer, PyTree, State

MakeModule = Callable[[nnx.Rngs], nnx.Module]


@dataclasses.dataclass(frozen=True)
class ModuleStep:
    """A module's ``__call__`` as ``step(y, layer)``. Equal for equal modules, so that programs are found again."""

    graphdef: nnx.GraphDef

    def __call__(self, y: State, layer: Layer) -> State:
        module: Any = nnx.merge(self.graphdef, layer.params)
        if "key" in inspect.signature(module.__call__).parameters:
            return module(y, layer.t, layer.dt, key=layer.data)
        if layer.data is not None:
            name = type(module).__name__
            raise TypeError(
                f"data was given, but {name}.__call__ has nowhere to take it. Let it accept a keyword `key`, "
                "__call__(self, y, t, dt, *, key=None), which gets this layer's slice of data; or leave data out."
            )
        return module(y, layer.t, layer.dt)


def stack(make_module: MakeModule, num_layers: int, *, rngs: nnx.Rngs) -> tuple[ModuleStep, PyTree]:
    """Turn a module that is one layer into the first two arguments of `lp_jax.solve`.

    The module's ``__call__(y, t, dt) -> y_next`` is one step. If it has a keyword ``key``, as in
    ``__call__(y, t, dt, *, key=None)``, it gets the layer's slice of ``solve``'s ``data``, or None without data. This
    is how dropout is done: an ``nnx.Dropout(rate)`` built without ``rngs``, called as ``dropout(y, rngs=key)``, and
    ``data=jax.random.split(key, num_layers)``: the masks then depend on nothing but the key and the layer.

    Args:
        make_module: ``make_module(rngs)`` builds one layer; called once, under ``jax.vmap`` over the layers' keys.
        num_layers: number of layers N.
        rngs: source of the initial parameters; one key of its stream ``params`` is used.

    Returns:
        ``(step, params)``. ``step`` is hashable, and equal for modules built alike, so that a second call of ``solve``
        reuses the compiled program. ``params`` is a nested dict of arrays, leaves ``(num_layers, ...)``.

    Raises:
        ValueError: for ``num_layers`` below 1, and for a module that holds anything but `nnx.Param`: running
            statistics, stored random streams, arrays.
        TypeError: for ``rngs`` or a module that are none.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> step, params = nn.stack(lambda rngs: nn.DenseResidual(8, rngs=rngs), 64, rngs=nnx.Rngs(0))
        >>> params["inner"]["kernel"].shape
        (64, 8, 8)
        >>> lp_jax.solve(step, params, jnp.ones((4, 8), "float32")).y1.shape
        (4, 8)
    """
    return as_step(stacked_module(make_module, num_layers, rngs))


def stacked_module(
    make_module: MakeModule, num_layers: int, rngs: nnx.Rngs, comm: Any = None, solvers: Sequence[Solver] = ()
) -> nnx.Module:
    """N layers as one module, whose parameters have the layers as their leading axis; with ``comm`` on its workers."""
    num_layers = _check.integer("num_layers", num_layers, least=1)
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs must be an nnx.Rngs, like nnx.Rngs(0); got {rngs!r} ({type(rngs).__name__}).")

    graphdefs = []

    def make(key: jax.Array) -> PyTree:
        module = make_module(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise TypeError(f"make_module(rngs) must build an nnx.Module; got {type(module).__name__}.")
        _refuse_state(module)
        # split here: a module that leaves vmap as a pytree has forgotten which of its parameters are one and the same
        graphdef, state = nnx.split(module)
        graphdefs.append(graphdef)
        return nnx.to_pure_dict(state)

    keys = jax.random.split(rngs.params(), num_layers)
    params = jax.vmap(make)(keys) if comm is None else comm.init(jax.vmap(make), keys, solvers)
    return nnx.merge(graphdefs[0], params)


def as_step(module: nnx.Module) -> tuple[ModuleStep, PyTree]:
    """A stacked module as a pure step and its parameters."""
    graphdef, state = nnx.split(module)
    return ModuleStep(graphdef), nnx.to_pure_dict(state)


def _refuse_state(module: nnx.Module) -> None:
    """A layer is evaluated many times per solve, in any order: what it would change in itself has no meaning."""
    others = {
        ".".join(map(str, path)): type(value)
        for path, value in nnx.to_flat_state(nnx.state(module))
        if not isinstance(value, nnx.Param)
    }
    if not others:
        return
    found = ", ".join(f"{path} ({kind.__name__})" for path, kind in others.items())
    advice = []
    if any(issubclass(kind, nnx.BatchStat) for kind in others.values()):
        advice.append("use nnx.LayerNorm or nnx.GroupNorm, which keep no running statistics")
    if any(issubclass(kind, nnx.RngState) for kind in others.values()):
        advice.append(
            "build nnx.Dropout(rate) without rngs, let __call__ accept a keyword `key`, and pass "
            "data=jax.random.split(key, num_layers)"
        )
    if not advice:
        advice.append("make it an nnx.Param, or compute it in __call__")
    raise ValueError(
        f"{type(module).__name__} holds more than nnx.Param: {found}. A layer is evaluated several times per solve, "
        f"so it must be a pure function of its parameters: {'; '.join(advice)}."
    )
