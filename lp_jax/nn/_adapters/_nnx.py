"""Flax NNX: scans over a module stacked by ``nnx.vmap``, and MaxText's call of one."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
from flax import nnx

from lp_jax._arrays._types import PyTree
from lp_jax._comms._comm import Comm
from lp_jax._scan import scan as scan_layers
from lp_jax._solvers._solver import Solver
from lp_jax.nn._adapters._axes import moved


def scan(
    f: Callable[..., PyTree] | None = None,
    *,
    in_axes: PyTree = (nnx.Carry, 0),
    out_axes: PyTree = (nnx.Carry, 0),
    length: int | None = None,
    reverse: bool = False,
    transform_metadata: Mapping[str, object] | None = None,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    comm: Comm | None = None,
    remat: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] | None = None,
) -> Callable[..., PyTree]:
    """Scan like ``nnx.scan``, with a solver: modules stacked by ``nnx.vmap`` are applied one after another.

    Variables other than ``nnx.Param`` that ``f`` changes (running statistics, counts of random streams) are changed in the
    stacked module, once per layer, from the states of the last sweep. On every visit of a layer they have the
    values with which the call began, so that a dropout's mask stays the same.

    Args:
        f: the function of a layer. Without it, `scan` returns a decorator.
        in_axes: for every argument of ``f``: ``nnx.Carry``, the axis of the layers, ``nnx.StateAxes`` for a module, or None
            for an argument that all layers share. One argument is the carry, which holds arrays only.
        out_axes: ``nnx.Carry``, or a tuple of it and axes.
        length: number of layers, if no argument has it.
        reverse: whether to begin with the last layer.
        transform_metadata: as for ``nnx.scan``; the name of the layers' axis is taken off a layer's metadata.
        solver: as for `lp_jax.scan`.
        adjoint_solver: as for `lp_jax.scan`.
        comm: as for `lp_jax.scan`.
        remat: wraps the body, as ``jax.checkpoint`` does.

    Raises:
        ValueError: if axes are out of range or do not fit the arguments, or if layers make new variables.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> @nnx.vmap(in_axes=0, out_axes=0)
        ... def make(key):
        ...     return nnx.Linear(4, 4, rngs=nnx.Rngs(key))
        >>> layers = make(jax.random.split(jax.random.key(0), 16))
        >>> @nn.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)  # was: nnx.scan
        ... def forward(layer, x):
        ...     return x + 0.1 * nnx.tanh(layer(x))
        >>> forward(layers, jnp.ones((2, 4))).shape
        (2, 4)
    """
    options = {name: value for name, value in locals().items() if name != "f"}
    if f is None:
        return functools.partial(scan, **options)
    layered = functools.partial(scan_layers, solver=solver, adjoint_solver=adjoint_solver, comm=comm)

    @functools.wraps(f)
    def scanned(*args: PyTree) -> PyTree:
        if len(in_axes) != len(args):
            raise ValueError(f"in_axes has {len(in_axes)} entries for {len(args)} arguments; got in_axes={in_axes}.")
        if sum(axes is nnx.Carry for axes in in_axes) != 1:
            raise ValueError(f"in_axes must have one nnx.Carry, the state that passes through; got {in_axes}.")
        at = in_axes.index(nnx.Carry)
        stacks = {i: _Stack.of(args[i], in_axes[i]) for i in range(len(args)) if in_axes[i] not in (nnx.Carry, None)}

        def body(carry: PyTree, xs: dict[int, PyTree]) -> tuple[PyTree, PyTree]:
            layer = [*args]
            layer[at] = carry
            for i, stack in stacks.items():
                layer[i] = stack.one(xs[i], transform_metadata)
            carry, ys = _split_outputs(f(*layer), out_axes)
            return carry, (ys, {i: stack.changed(layer[i]) for i, stack in stacks.items()})

        xs = {i: stack.arrays for i, stack in stacks.items()}
        carry, (ys, changed) = layered(body if remat is None else remat(body), args[at], xs, length, reverse)
        for i, stack in stacks.items():
            stack.update(args[i], changed[i])
        return _join_outputs(carry, ys, out_axes)

    return scanned


def apply_scanned_layers(
    layers: nnx.Module,
    carry: PyTree,
    *,
    length: int | None = None,
    param_scan_axis: int = 0,
    apply_fn: Callable[[nnx.Module, PyTree], PyTree] | None = None,
    remat: bool = False,
    remat_policy: Callable[..., bool] | None = None,
    prevent_cse: bool = True,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    comm: Comm | None = None,
) -> PyTree:
    """Apply a stacked NNX module layer by layer, like MaxText's ``apply_scanned_layers``, with a solver.

    Args:
        layers: the stacked module, as MaxText's ``create_scanned_layers`` returns it: parameters have the axis of the layers
            at ``param_scan_axis``, all other variables at 0.
        carry: the state that passes through the layers.
        length: number of layers; None takes it from the parameters.
        param_scan_axis: axis of the layers in the parameters.
        apply_fn: ``apply_fn(layer, carry) -> carry``; None calls the layer.
        remat: whether a layer's intermediate values are computed again for the gradient.
        remat_policy: chooses intermediate values that are kept nevertheless.
        prevent_cse: as for ``jax.checkpoint``.
        solver: as for `lp_jax.scan`.
        adjoint_solver: as for `lp_jax.scan`.
        comm: as for `lp_jax.scan`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> make = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)), out_axes=nnx.StateAxes({nnx.Param: 1, ...: 0}))
        >>> layers = make(jax.random.split(jax.random.key(0), 16))
        >>> nn.apply_scanned_layers(
        ...     layers, jnp.ones((2, 4)), param_scan_axis=1, apply_fn=lambda layer, x: x + 0.1 * nnx.tanh(layer(x))
        ... ).shape
        (2, 4)
    """
    checkpoint = functools.partial(jax.checkpoint, policy=remat_policy, prevent_cse=prevent_cse)
    axes = nnx.StateAxes([(nnx.Param, param_scan_axis), (..., 0)])
    return scan(
        apply_fn or (lambda layer, carry: layer(carry)),
        in_axes=(axes, nnx.Carry),
        out_axes=nnx.Carry,
        length=length,
        solver=solver,
        adjoint_solver=adjoint_solver,
        comm=comm,
        remat=checkpoint if remat else None,
    )(layers, carry)


class _Stack(NamedTuple):
    """An argument with an entry for every layer: its arrays, the layers' axis moved to the front."""

    graphdef: nnx.GraphDef | None  # None for plain arrays
    filters: tuple[nnx.filterlib.Filter, ...]
    axes: tuple[int | None, ...]
    arrays: list[PyTree]
    same: list[PyTree]  # states that all layers share, for those without an axis

    @classmethod
    def of(cls, value: PyTree, axes: PyTree) -> "_Stack":
        if not (axes is None or isinstance(axes, int | nnx.StateAxes)):
            raise ValueError(
                f"in_axes has {axes!r} for one argument; give each argument one axis, nnx.StateAxes, nnx.Carry or None, and pass "
                "what has other axes as an argument of its own."
            )
        if not _holds_state(value) and not isinstance(axes, nnx.StateAxes):
            return cls(None, (), (axes,), [moved(value, axes, 0)], [None])
        filters, axes = (axes.filters, axes.axes) if isinstance(axes, nnx.StateAxes) else ((...,), (axes,))
        graphdef, *states = nnx.split(value, *filters)
        arrays = [None if axis is None else moved(state, axis, 0) for state, axis in zip(states, axes, strict=True)]
        return cls(graphdef, filters, axes, arrays, states)

    def one(self, arrays: list[PyTree], metadata: Mapping[str, object] | None) -> PyTree:
        """The argument of one layer."""
        if self.graphdef is None:
            return arrays[0]
        states = [same if x is None else x for x, same in zip(arrays, self.same, strict=True)]
        if metadata:
            pairs = zip(states, self.axes, strict=True)
            states = [s if axis is None else nnx.spmd.remove_axis(s, axis, metadata) for s, axis in pairs]
        return nnx.merge(self.graphdef, *states)

    def changed(self, module: PyTree) -> list[PyTree]:
        """The variables of a layer other than parameters, after its call."""
        if self.graphdef is None:
            return []
        _, *states = nnx.split(module, *self.filters)
        for old, state in zip(self.same, states, strict=True):
            if new := set(dict(nnx.to_flat_state(state))) - set(dict(nnx.to_flat_state(old))):
                names = ", ".join(".".join(map(str, path)) for path in sorted(new))
                raise ValueError(f"a layer made new variables, {names}; a solver's layer cannot. Return them from it.")
        kept = [nnx.filter_state(state, nnx.Not(nnx.Param)) for state in states]
        return [None if axis is None else nnx.to_pure_dict(k) for k, axis in zip(kept, self.axes, strict=True)]

    def update(self, module: PyTree, changed: list[PyTree]) -> None:
        """Write the changed variables of the layers into the stacked module."""
        for values, axis in zip(changed, self.axes, strict=False):
            if jax.tree.leaves(values):
                nnx.update(module, nnx.State(moved(values, 0, axis)))


def _holds_state(value: PyTree) -> bool:
    """Return whether an argument holds NNX state: a module, random streams, variables, or a tree of such."""
    kinds = (nnx.Pytree, nnx.Variable)
    return any(isinstance(x, kinds) for x in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, kinds)))


def _split_outputs(out: PyTree, axes: PyTree) -> tuple[PyTree, list[PyTree]]:
    if axes is nnx.Carry:
        return out, []
    if not (isinstance(out, tuple) and len(out) == len(axes) and sum(a is nnx.Carry for a in axes) == 1):
        named = str(axes).replace(str(nnx.Carry), "nnx.Carry")
        raise ValueError(
            f"out_axes={named} must have one nnx.Carry and an entry for every output; the function returned {out!r}. With "
            "out_axes=(nnx.Carry, 0) it returns a pair, `return carry, y`, and y may be None; to return only the carry, say "
            "out_axes=nnx.Carry."
        )
    at = axes.index(nnx.Carry)
    return out[at], [y for i, y in enumerate(out) if i != at]


def _join_outputs(carry: PyTree, ys: Sequence[PyTree], axes: PyTree) -> PyTree:
    if axes is nnx.Carry:
        return carry
    values = iter(ys)
    return tuple(carry if axis is nnx.Carry else moved(next(values), 0, axis) for axis in axes)
