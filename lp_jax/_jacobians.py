"""Jacobians of a step by the state that enters it, and how they multiply: whole ones, and those of small blocks."""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lp_jax._types import State

StateStep = Callable[[State], State]


class Jacobians(abc.ABC):
    """One kind of Jacobian of steps ``state -> state``, for states like a given one."""

    @abc.abstractmethod
    def join(self, state: State) -> jax.Array:
        """A state as an array, which the Jacobian multiplies."""

    @abc.abstractmethod
    def part(self, vector: jax.Array) -> State:
        """Undo `join`."""

    @abc.abstractmethod
    def linearise(self, step: StateStep, u: State, *, transposed: bool) -> tuple[State, jax.Array]:
        """The state after the step, and the step's Jacobian.

        ``transposed``: the step is an adjoint one. Whole Jacobians are then taken by its transpose, which is the derivative
        that the network's own step has: its first products are those of unit vectors, the same for all layers that share
        weights.
        """

    @abc.abstractmethod
    def damped(self, jacobian: jax.Array, damp: Callable[[jax.Array, bool], jax.Array]) -> jax.Array:
        """The Jacobian as ``damp(jacobian, is_matrix)`` changes it; see `Damping`."""

    @abc.abstractmethod
    def apply(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        """A Jacobian times a vector."""

    @abc.abstractmethod
    def compose(self, first: jax.Array, second: jax.Array) -> jax.Array:
        """The Jacobian of one step after the other, ``second @ first``."""

    @abc.abstractmethod
    def identity(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        """The Jacobian of the step that changes nothing."""


class Full(Jacobians):
    """Whole Jacobians ``(*batch, d, d)`` of states as vectors ``(*batch, d)``, all leaves side by side.

    A Jacobian takes d evaluations of the step's derivative.
    """

    def __init__(self, state: State, batch_axes: int | None) -> None:
        leaves, self._structure = jax.tree.flatten(state)
        self._shapes = [jnp.shape(x) for x in leaves]
        self._dtypes = [x.dtype for x in leaves]
        if batch_axes is None and any(len(shape) > 1 for shape in self._shapes):
            raise ValueError(
                f"Newton got a state with leaves of shapes {self._shapes}. Say along how many of their leading axes a layer "
                "treats entries independently, like examples: Newton(batch_axes=1), or batch_axes=0 if there are none. "
                "A full Jacobian has the square of the other numbers as entries."
            )
        self._axes = batch_axes or 0
        _check_batches(self._shapes, self._axes)

    def join(self, state: State) -> jax.Array:
        leaves = [x.reshape(*x.shape[: self._axes], -1) for x in jax.tree.leaves(state)]
        with jax.numpy_dtype_promotion("standard"):
            return jnp.concatenate(leaves, axis=-1)

    def part(self, vector: jax.Array) -> State:
        leaves, begin = [], 0
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            size = math.prod(shape[self._axes :])
            leaves.append(vector[..., begin : begin + size].reshape(shape).astype(dtype))
            begin += size
        return jax.tree.unflatten(self._structure, leaves)

    def linearise(self, step: StateStep, u: State, *, transposed: bool) -> tuple[State, jax.Array]:
        def joined(v: jax.Array) -> tuple[jax.Array, State]:
            u_next = step(self.part(v))
            return self.join(u_next), u_next

        v = self.join(u)
        units = jnp.eye(v.shape[-1], dtype=v.dtype)
        if transposed:
            _, pull, u_next = jax.vjp(joined, v, has_aux=True)
            return u_next, jax.vmap(lambda unit: pull(jnp.broadcast_to(unit, v.shape))[0], out_axes=-2)(units)
        _, derivative, u_next = jax.linearize(joined, v, has_aux=True)
        return u_next, jax.vmap(lambda unit: derivative(jnp.broadcast_to(unit, v.shape)), out_axes=-1)(units)

    def damped(self, jacobian: jax.Array, damp: Callable[[jax.Array, bool], jax.Array]) -> jax.Array:
        return damp(jacobian, True)

    def apply(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        return jnp.sum(matrix * vector[..., None, :], axis=-1)

    def compose(self, first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.matmul(second, first, precision=lax.Precision.HIGHEST)

    def identity(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), shape)


class Blocks(Jacobians):
    """What k leaves of one shape make of each other where each number acts on those at its own place only.

    Blocks ``(k, k, *shape)``, of states ``(k, *shape)``. A state of leaves of several shapes is one vector, k = 1: the
    diagonal. A Jacobian takes k evaluations of the step's derivative, in directions of signs: exact where it is of such
    blocks, else the sum of an entry's row with these signs, whose mean over all choices of signs is the entry.

    Reference:
        Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", Applied Numerical Mathematics, 2007.
    """

    def __init__(self, state: State, batch_axes: int | None) -> None:
        leaves, self._structure = jax.tree.flatten(state)
        self._like = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves]
        axes = batch_axes or 0
        _check_batches([x.shape for x in self._like], axes)
        self._alike = len({x.shape for x in self._like}) == 1
        self._signs = [_signs(x.shape[axes:]) for x in self._like]

    def join(self, state: State) -> jax.Array:
        leaves = jax.tree.leaves(state)
        with jax.numpy_dtype_promotion("standard"):
            return jnp.stack(leaves) if self._alike else jnp.concatenate([x.reshape(-1) for x in leaves])[None]

    def part(self, vector: jax.Array) -> State:
        if self._alike:
            leaves = list(vector)
        else:
            sizes = [math.prod(x.shape) for x in self._like]
            leaves = jnp.split(vector[0], np.cumsum(sizes)[:-1])
        leaves = [x.reshape(like.shape).astype(like.dtype) for x, like in zip(leaves, self._like, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)

    def linearise(self, step: StateStep, u: State, *, transposed: bool) -> tuple[State, jax.Array]:
        u_next, derivative = jax.linearize(step, u)
        signs = [jnp.broadcast_to(s, x.shape).astype(x.dtype) for s, x in zip(self._signs, self._like, strict=True)]
        every = jax.tree.unflatten(self._structure, signs)
        at = self.join(every)

        def column(direction: State) -> jax.Array:
            return self.join(derivative(direction)) * at

        if not self._alike:
            return u_next, column(every)[None]
        zeros = [jnp.zeros(x.shape, x.dtype) for x in self._like]
        directions = [[*zeros[:j], signs[j], *zeros[j + 1 :]] for j in range(len(signs))]
        columns = [column(jax.tree.unflatten(self._structure, direction)) for direction in directions]
        return u_next, jnp.stack(columns, axis=1)

    def damped(self, jacobian: jax.Array, damp: Callable[[jax.Array, bool], jax.Array]) -> jax.Array:
        if len(jacobian) == 1:
            return damp(jacobian, False)
        return jnp.moveaxis(damp(jnp.moveaxis(jacobian, (0, 1), (-2, -1)), True), (-2, -1), (0, 1))

    def apply(self, matrix: jax.Array, vector: jax.Array) -> jax.Array:
        return jnp.sum(matrix * vector[None], axis=1)

    def compose(self, first: jax.Array, second: jax.Array) -> jax.Array:
        return jnp.sum(second[:, :, None] * first[None], axis=1)

    def identity(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        eye = jnp.eye(shape[0], dtype=dtype)
        return jnp.broadcast_to(eye.reshape(*eye.shape, *(1,) * (len(shape) - 2)), shape)


def _signs(shape: tuple[int, ...]) -> np.ndarray:
    """1 or -1 for each number of a leaf, the same for all examples and leaves of this shape."""
    return np.random.default_rng(0).choice([-1.0, 1.0], size=shape)


def _check_batches(shapes: list[tuple[int, ...]], axes: int) -> None:
    batches = {shape[:axes] for shape in shapes}
    if len(batches) > 1 or any(len(shape) < axes for shape in shapes):
        raise ValueError(f"Newton(batch_axes={axes}) needs leaves that agree in their first {axes} axes; got {shapes}.")
