"""Jacobians of a step with respect to the state that enters it, whole or in small blocks, and how they multiply."""

import abc
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import reshard
from jax.typing import DTypeLike

from lp_jax._arrays import _tree
from lp_jax._arrays._jaxpr import has_rule, walk
from lp_jax._arrays._types import PyTree, State
from lp_jax._solvers._coupling import COUPLED, UNKNOWN, acts_in_place, example_axes

StateStep = Callable[[State], State]
Step = Callable[[State, PyTree], State]


class Jacobians(abc.ABC):
    """A kind of Jacobian of steps ``state -> state``, for states of given shapes."""

    axes = -2, -1  # of the rows and of the columns
    # number of Jacobians that are composed at a time: many, where matrices are most of the memory traffic
    group = 8

    @abc.abstractmethod
    def join(self, state: State) -> jax.Array:
        """Turn a state into the array that the Jacobian multiplies."""

    @abc.abstractmethod
    def part(self, vector: jax.Array) -> State:
        """Undo `join`."""

    @abc.abstractmethod
    def linearise(self, step: StateStep, u: State, *, transposed: bool) -> tuple[State, jax.Array]:
        """Return the state after the step, and the step's Jacobian; of an adjoint step by its transpose (``transposed``)."""

    def operands(self, step: Step, u: State, xs: PyTree) -> PyTree:
        """The operands of all layers, ``(N, ...)``, at which Jacobians are computed."""
        return xs

    @abc.abstractmethod
    def apply(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        """A Jacobian times a vector."""

    @abc.abstractmethod
    def compose(self, first: jax.Array, second: jax.Array) -> jax.Array:
        """The Jacobian of two steps in sequence, ``second @ first``."""

    def damp(
        self, jacobian: jax.Array, change: Callable[[jax.Array, bool], jax.Array]
    ) -> jax.Array:
        """Apply ``change(jacobian, is_matrix)``, a `Damping`, to a Jacobian."""
        return jnp.moveaxis(
            change(jnp.moveaxis(jacobian, self.axes, (-2, -1)), True), (-2, -1), self.axes
        )

    def identity(self, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        """The Jacobian of the identity."""
        size = shape[self.axes[0]]
        others = [
            i for i in range(len(shape)) if i not in (axis % len(shape) for axis in self.axes)
        ]
        return jnp.broadcast_to(jnp.expand_dims(jnp.eye(size, dtype=dtype), others), shape)

    def flops(self, shape: Sequence[int]) -> float:
        """Flops of `compose`, for Jacobians of one layer of a shape."""
        return 2.0 * math.prod(shape) * shape[self.axes[0]]


class Whole(Jacobians):
    """Whole Jacobians of states as vectors ``(*batch, d)``, all leaves side by side."""

    def __init__(
        self, state: State, batch_axes: int | None, *, refuses_unknown: bool = False
    ) -> None:
        self._refuses_unknown = refuses_unknown
        leaves, self._structure = jax.tree.flatten(state)
        self._shapes = [jnp.shape(x) for x in leaves]
        self._dtypes = [x.dtype for x in leaves]
        self._axes = _batches(self._shapes, batch_axes)

    def join(self, state: State) -> jax.Array:
        leaves = [x.reshape(*x.shape[: self._axes], -1) for x in jax.tree.leaves(state)]
        with jax.numpy_dtype_promotion("standard"):
            return jnp.concatenate(leaves, axis=-1)

    def part(self, vector: jax.Array) -> State:
        leaves, begin = [], 0
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            size = math.prod(shape[self._axes :])
            leaves.append(_cast(vector[..., begin : begin + size].reshape(shape), dtype))
            begin += size
        return jax.tree.unflatten(self._structure, leaves)

    def derivative(
        self, step: StateStep, u: State, *, transposed: bool
    ) -> tuple[State, Callable[[jax.Array], jax.Array], int]:
        """Return the state after the step, and the map from a unit vector to a column (-1) or a row (-2) of the Jacobian."""
        v = self.join(u)
        v_next, derivative, transposed = _linearise(
            lambda v: self.join(step(self.part(v))), v, transposed=transposed
        )
        # The Jacobian of one example is whole only if no example depends on another, which the program of the derivative shows.
        found = example_axes(derivative, (), v, self._axes) if self._axes else ()
        coupled = COUPLED in found
        if (
            self._axes
            and not transposed
            and all(len(shape) == self._axes for shape in self._shapes)
        ):
            # A state whose leaves have no axis but that of the examples has more likely units there.
            coupled = coupled or not acts_in_place(
                jax.linearize(step, u)[1], u
            )  # more likely units than examples
        if coupled:
            raise ValueError(
                f"Newton(batch_axes={self._axes}) takes a Jacobian for each example, and the step "
                f"combines entries along the first axes of a state with leaves of shapes "
                f"{self._shapes}, as a normalisation over the batch does. Say batch_axes=0, for "
                "one Jacobian of the whole state, or take another solver. Inside jax.vmap a state "
                "has no axis of examples."
            )
        if UNKNOWN in found and self._refuses_unknown:
            raise ValueError(
                f"Newton(batch_axes={self._axes}) solves an adjoint system in one iteration if the "
                "step treats entries along the first axes of its state independently, and the "
                "step's program does not show whether it does. Set a tolerance, rtol=1e-3, with "
                "which the solution is measured; or say batch_axes=0, for one Jacobian of the "
                "whole state."
            )
        return self.part(v_next), derivative, -2 if transposed else -1


class Full(Whole):
    """Full Jacobians ``(*batch, d, d)``, one for each example, by d evaluations of the step's derivative."""

    def linearise(self, step: StateStep, u: State, *, transposed: bool) -> tuple[State, jax.Array]:
        v = self.join(u)
        # Each unit vector is given to all examples, and gives one column (or row) for each.
        units = _tree.varying(jnp.eye(v.shape[-1], dtype=v.dtype), v)
        u_next, derivative, axis = self.derivative(step, u, transposed=transposed)
        return u_next, jax.vmap(lambda unit: derivative(_tree.broadcast(unit, v)), out_axes=axis)(
            units
        )

    def apply(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        return jnp.einsum("...ij,...j->...i", matrix, vector, precision=lax.Precision.HIGHEST)

    def compose(self, first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.matmul(second, first, precision=lax.Precision.HIGHEST)


class Shared(Whole):
    """One whole Jacobian for all examples, transposed, ``(d, d)``: at the mean of their states and of their operands.

    Every example is at the mean and takes a unit vector of its own: each evaluation gives as many columns as there are examples.
    """

    axes = -1, -2
    group = 2

    def _mean(self, x: jax.Array) -> jax.Array:
        """The mean over the examples, repeated for each of them."""
        axes = tuple(range(self._axes))
        mean = jnp.mean(_tree.wide(x), axis=axes, keepdims=True).astype(x.dtype)
        return _tree.broadcast(mean, x)

    def operands(self, step: Step, u: State, xs: PyTree) -> PyTree:
        """With the mean over examples where each example has its own."""
        x = _tree.entry_like(xs)
        jax.eval_shape(
            lambda u, x: self.derivative(lambda u: step(u, x), u, transposed=False)[0], u, x
        )  # refuses
        own = own_operands(step, u, x, self._shapes[0][: self._axes])
        return jax.tree.map(lambda x, own: jax.vmap(self._mean)(x) if own else x, xs, own)

    def linearise(self, step: StateStep, u: State, *, transposed: bool) -> tuple[State, jax.Array]:
        """At the mean of the states, of a step that has the mean operands."""
        state = jax.tree.map(self._mean, u)
        u_next, derivative, axis = self.derivative(step, state, transposed=transposed)
        center = self.join(state)
        batch, size = center.shape[:-1], center.shape[-1]
        # With B examples an evaluation gives B rows, so ``ceil(d / B)`` evaluations are enough.
        turns = -(-size // math.prod(batch))
        # Rows beyond d are zeros, and are cut off afterwards.
        units = jnp.eye(turns * math.prod(batch), size, dtype=center.dtype).reshape(
            turns, *batch, size
        )
        units = _tree.varying(units, center)
        # Each device forms the rows of its own examples; all devices need all rows, as the Jacobian is one for all examples.
        if _tree.explicit(center):
            place, everywhere = (jax.typeof(x).sharding for x in (center, units[0]))
            rows = jax.vmap(lambda unit: reshard(derivative(reshard(unit, place)), everywhere))(
                units
            )
        else:
            rows = jax.vmap(derivative)(units)
        rows = rows.reshape(-1, size)[:size]
        return u_next, rows.T if axis == -2 else rows

    def apply(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        return jnp.matmul(vector, matrix, precision=lax.Precision.HIGHEST)

    def compose(self, first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.matmul(first, second, precision=lax.Precision.HIGHEST)


def own_operands(step: Step, u: State, x: PyTree, batch: tuple[int, ...]) -> PyTree:
    """Flag the leaves of a step's operand that have a part for each example, by their shapes and the step's program."""
    axes = len(batch)
    # Only leaves whose first axes have the lengths of the batch can have a part for each example.
    alike = [
        jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.shape[:axes] == batch
        for leaf in jax.tree.leaves(x)
    ]

    def pull(u: State, x: PyTree, cotangent: State) -> PyTree:
        some, combine = _tree.partition(x, alike)
        return jax.vjp(lambda new: step(u, combine(new)), some)[1](cotangent)[0]

    kinds = (tuple(range(axes)), UNKNOWN)
    own = [found in kinds for found in example_axes(pull, (u, x), u, axes)]
    return _tree.partition(x, alike)[1](own, fill=False)


def _cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return a part of a joined vector in the dtype of its leaf. The vector is complex if one of its leaves is."""
    return (x if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.real(x)).astype(dtype)


class Blocks(Jacobians):
    """Block-diagonal Jacobians ``(k, k, *batch, *place)`` for k leaves of equal shape, as states ``(k, *batch, *place)``.

    Leaves of several shapes, k of each, are k vectors: parameters with two moments are three. If shapes occur in different
    numbers, all leaves are one vector, k = 1, with a diagonal Jacobian. Blocks take k evaluations of the step's derivative if its
    program shows that it couples only equal positions; otherwise one for each number of an example's state.
    """

    axes = 0, 1

    def __init__(self, state: State, batch_axes: int | None) -> None:
        leaves, self._structure = jax.tree.flatten(state)
        self._like = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves]
        self._batch_axes = batch_axes
        places: dict[tuple[int, ...], list[int]] = {}
        for i, x in enumerate(self._like):
            places.setdefault(x.shape, []).append(i)
        # `places` has the leaves of each shape. If all shapes occur k times, the i-th leaves of all shapes form the i-th vector.
        self._paired = len(set(map(len, places.values()))) == 1
        self._blocks = (
            list(zip(*places.values(), strict=True))
            if self._paired
            else [tuple(range(len(leaves)))]
        )
        self._vectors = (
            None if len(places) == 1 else Full([leaves[i] for i in self._blocks[0]], batch_axes)
        )

    def join(self, state: State) -> jax.Array:
        leaves = jax.tree.leaves(state)
        if self._vectors is not None:
            leaves = [self._vectors.join([leaves[i] for i in block]) for block in self._blocks]
        with jax.numpy_dtype_promotion("standard"):
            return jnp.stack(leaves)

    def part(self, vector: jax.Array) -> State:
        parts: dict[int, jax.Array] = {}
        for block, joined in zip(self._blocks, vector, strict=True):
            parts |= dict(
                zip(
                    block,
                    [joined] if self._vectors is None else self._vectors.part(joined),
                    strict=True,
                )
            )
        return jax.tree.unflatten(
            self._structure, [_cast(parts[i], x.dtype) for i, x in enumerate(self._like)]
        )

    def linearise(self, step: StateStep, u: State, *, transposed: bool) -> tuple[State, jax.Array]:
        u_next, derivative, transposed = _linearise(step, u, transposed=transposed)
        joined = self.join(u)
        leaves, across = range(len(joined)), 0 if transposed else 1

        def of(leaf: int, places: jax.Array) -> jax.Array:
            """Directional derivative along one leaf (its transpose if transposed)."""
            direction = [places if i == leaf else jnp.zeros_like(places) for i in leaves]
            return self.join(derivative(self.part(_tree.varying(jnp.stack(direction), joined))))

        # A direction of ones gives the derivatives at all positions at once, because no position depends on another.
        if self._paired and acts_in_place(derivative, self.part(joined)):
            return u_next, jnp.stack([of(i, jnp.ones_like(joined[0])) for i in leaves], axis=across)
        axes = _batches([x.shape for x in self._like], self._batch_axes)
        batch, place = joined.shape[1 : 1 + axes], joined.shape[1 + axes :]
        number = math.prod(place)

        # Otherwise the diagonal is picked from full columns, one position at a time.
        def entries(i: jax.Array) -> jax.Array:
            here = (jnp.arange(number) == i).astype(joined.dtype).reshape((1,) * axes + place)
            columns = [
                of(leaf, _tree.broadcast(here, joined[0])).reshape(-1, *batch, number)
                for leaf in leaves
            ]
            return jnp.stack(columns, axis=across)[..., i]

        blocks = lax.map(entries, jnp.arange(number), batch_size=min(number, _AT_ONCE))
        return u_next, jnp.moveaxis(blocks, 0, -1).reshape(len(joined), *joined.shape)

    def damp(
        self, jacobian: jax.Array, change: Callable[[jax.Array, bool], jax.Array]
    ) -> jax.Array:
        return change(jacobian, False) if len(jacobian) == 1 else super().damp(jacobian, change)

    def apply(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        return functools.reduce(
            jnp.add, (matrix[:, j] * vector[j][None] for j in range(len(vector)))
        )

    def compose(self, first: jax.Array, second: jax.Array) -> jax.Array:
        return functools.reduce(
            jnp.add, (second[:, j, None] * first[j][None] for j in range(len(first)))
        )


def _linearise(function: StateStep, u: State, *, transposed: bool) -> tuple[State, StateStep, bool]:
    """The value of the function, and its derivative or the transpose of its derivative; and whether it is the transpose.

    A function with a `jax.custom_vjp` has no forward derivative, and is pulled back: rows of the Jacobian instead of columns.
    """
    if transposed or any(has_rule(one, "vjp") for one in walk(jax.make_jaxpr(function)(u).eqns)):
        value, pull = jax.vjp(function, u)
        return value, lambda cotangent: pull(cotangent)[0], True
    return *jax.linearize(function, u), False


_AT_ONCE = 32  # evaluations; all at once would take the memory of a full Jacobian


def _batches(shapes: list[tuple[int, ...]], axes: int | None) -> int:
    """Number of leading axes of examples."""
    if axes is None and any(len(shape) > 1 for shape in shapes):
        raise ValueError(
            f"Newton got a state with leaves of shapes {shapes}. Say along how many of their "
            f"leading axes a layer "
            "treats entries independently, like examples: Newton(batch_axes=1), or batch_axes=0 if "
            "there are none. A full Jacobian has the square of the other numbers as entries, a "
            "diagonal one takes an evaluation for each."
        )
    axes = axes or 0
    batches = {shape[:axes] for shape in shapes}
    if len(batches) > 1 or any(len(shape) < axes for shape in shapes):
        raise ValueError(
            f"Newton(batch_axes={axes}) needs leaves that agree in their first {axes} axes; got "
            f"{shapes}."
        )
    return axes
