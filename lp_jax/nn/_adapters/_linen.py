"""Flax Linen: a scan of a module class."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen
from flax.core.scope import PRNGSequenceFilter, in_filter

from lp_jax._arrays._types import PyTree
from lp_jax._comms._comm import Comm
from lp_jax._scan import scan as scan_layers
from lp_jax._solvers._solver import Solver
from lp_jax.nn._adapters._axes import moved


def linen_scan(
    target: type[linen.Module],
    *,
    variable_axes: Mapping[str, int] = MappingProxyType({}),
    split_rngs: Mapping[PRNGSequenceFilter, bool] = MappingProxyType({}),
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    length: int | None = None,
    reverse: bool = False,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    comm: Comm | None = None,
    **options: Any,
) -> Callable[..., Callable[..., PyTree]]:
    """Scan a module class like ``flax.linen.scan``, with a solver. Parameters and random keys are those of ``linen.scan``.

    Args:
        target: the class of a layer, ``__call__(self, carry, *xs) -> (carry, y)``.
        variable_axes: axis of the layers in each collection, ``{"params": 0}``.
        split_rngs: which random streams differ from layer to layer.
        in_axes: axis of the layers in the inputs after the carry, which may be negative; ``linen.broadcast`` for inputs that all
            layers share. A tree of axes may be a prefix of the inputs.
        out_axes: axis of the layers in ``y``, or a tree of axes that is a prefix of it.
        length: number of layers; None takes it from the inputs.
        reverse: whether to begin with the last layer.
        solver: as for `lp_jax.scan`.
        adjoint_solver: as for `lp_jax.scan`.
        comm: as for `lp_jax.scan`.
        **options: ``variable_broadcast``, ``metadata_params``, ``unroll`` and others of ``linen.scan``.

    Raises:
        ValueError: if a layer writes into a collection while it is applied; for ``variable_carry``, ``data_transform``,
            ``methods`` and broadcast ``out_axes``; and for axes out of range.
        TypeError: if ``target`` is not a module class.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import linen
        >>> from lp_jax import nn
        >>> class Block(linen.Module):
        ...     @linen.compact
        ...     def __call__(self, x, _):
        ...         return x + 0.1 * linen.tanh(linen.Dense(4)(x)), None
        >>> class Model(linen.Module):
        ...     @linen.compact
        ...     def __call__(self, x):
        ...         axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        ...         blocks = nn.linen_scan(Block, length=16, **axes)  # was: linen.scan
        ...         return blocks(name="blocks")(x, None)[0]
        >>> variables = Model().init(jax.random.key(0), jnp.ones((2, 4)))
        >>> Model().apply(variables, jnp.ones((2, 4))).shape
        (2, 4)
    """
    if not (isinstance(target, type) and issubclass(target, linen.Module)):
        raise TypeError(
            f"linen_scan takes the class of a layer, a linen.Module; got {target!r}. Make a module with its __call__ of it, or "
            "take linen.scan."
        )
    for name in ("variable_carry", "data_transform", "methods"):
        if options.get(name):
            raise ValueError(
                f"{name}={options[name]!r} is not supported: a solver evaluates all layers at the same time. Pass what changes "
                "from layer to layer in the carry, or take linen.scan."
            )
    if linen.broadcast in jax.tree.leaves(out_axes):
        raise ValueError(
            f"out_axes={out_axes!r} must be axes: every layer has a y of its own. Take linen.scan, or one of them."
        )
    axes: dict[str, Any] = {"variable_axes": variable_axes, "in_axes": in_axes, "out_axes": out_axes}
    lifted = linen.scan(target, length=length, reverse=reverse, split_rngs=split_rngs, **axes, **options)
    layered = functools.partial(scan_layers, solver=solver, adjoint_solver=adjoint_solver, comm=comm)

    def make(*args: Any, **fields: Any) -> Callable[..., PyTree]:
        scanned = lifted(*args, **fields)
        layer = target(*args, **{k: v for k, v in fields.items() if k not in ("name", "parent")}, parent=None)

        def call(carry: PyTree, *xs: PyTree) -> PyTree:
            if scanned.is_initializing():
                return scanned(carry, *xs)
            if changing := [name for name in variable_axes if scanned.is_mutable_collection(name)]:
                raise ValueError(
                    f"layers of a solver cannot write into collections; {changing} are mutable in this apply."
                )
            metadata, scope = options.get("metadata_params", {}), scanned.scope
            assert scope is not None

            def leading(tree: PyTree, axis: int) -> PyTree:
                return moved(linen.meta.remove_axis(tree, axis, metadata) if metadata else tree, axis, 0)

            shared = dict(scanned.variables)
            variables = {key: leading(shared.pop(key), axis) for key, axis in variable_axes.items() if key in shared}
            over = jax.tree.map(lambda axis, x: () if axis is linen.broadcast else moved(x, axis, 0), in_axes, xs)
            layers = length or len(jax.tree.leaves((over, variables))[0])
            rngs = {name: rng for name, rng in scope.rngs.items() if _split(split_rngs, name) is not None}
            keys = {name: jax.random.split(r.rng, layers) for name, r in rngs.items() if _split(split_rngs, name)}
            counts = scope.rng_counters

            def body(counts: PyTree, carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
                variables, over, keys, _ = x
                inputs = jax.tree.map(lambda axis, x, mine: x if axis is linen.broadcast else mine, in_axes, xs, over)
                mine = {name: rngs[name].replace(rng=key) for name, key in keys.items()}
                bound = layer.bind({**shared, **variables}, rngs=cast(Any, {**rngs, **mine}))
                cast(Any, bound.scope).rng_counters = counts
                return bound(carry, *inputs)

            stacked = (variables, over, keys, jnp.arange(layers, dtype=jnp.int32))

            def draw() -> None:
                """Count the keys of a layer, as a trace of ``linen.scan`` does, which makes one trace for all layers."""
                if rngs:
                    jax.eval_shape(functools.partial(body, counts), carry, jax.tree.map(lambda x: x[0], stacked))

            if options.get("check_constancy_invariants", True):
                draw()
            drawn = _copied(counts)
            layer_of = lambda carry, x: body(_copied(drawn), carry, x)  # noqa: E731
            draw()
            carry, ys = layered(layer_of, carry, stacked, layers, reverse)
            return carry, jax.tree.map(lambda axis, y: moved(y, 0, axis), out_axes, ys)

        return call

    return make


def _copied(counts: PyTree) -> PyTree:
    """Copy the numbers of keys that a Linen scope and its inner scopes have drawn."""
    return {name: _copied(count) if isinstance(count, dict) else count for name, count in counts.items()}


def _split(split_rngs: Mapping[PRNGSequenceFilter, bool], stream: str) -> bool | None:
    """Return whether a random stream differs from layer to layer; None if layers do not have it."""
    return next((split for names, split in split_rngs.items() if in_filter(names, stream)), None)
