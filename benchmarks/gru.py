"""A training step of an implicit GRU: two units on top of each other, nine inputs, a dense layer on the last state.

Sequences and labels are random: the time of a step does not depend on them. The weights are drawn as PyTorch draws
them, uniform within 1 / sqrt(hidden).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import lp_jax
from benchmarks.training import Trainer
from lp_jax.nn import GRU

FEATURES, UNITS, CLASSES = 9, 2, 6
SERIAL = (lp_jax.Serial(), lp_jax.Serial())


class Problem(NamedTuple):
    """What all contenders start from, as NumPy arrays in float32.

    Attributes:
        units: of each the map of its inputs and that of its state, each a kernel ``(inputs, 3 hidden)`` and a bias.
        closing: kernel and bias.
        x: ``(batch, time, features)``.
        labels: ``(batch,)``.
    """

    units: list[tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]]
    closing: tuple[np.ndarray, np.ndarray]
    x: np.ndarray
    labels: np.ndarray

    @classmethod
    def random(cls, hidden: int, steps: int, batch: int) -> "Problem":
        """The same in every process."""
        rng = np.random.default_rng(0)

        def uniform(*shape: int) -> np.ndarray:
            return (rng.uniform(-1, 1, shape) * hidden**-0.5).astype(np.float32)

        def gates(inputs: int) -> tuple[np.ndarray, np.ndarray]:
            return uniform(inputs, 3 * hidden), uniform(3 * hidden)

        units = [(gates(FEATURES if number == 0 else hidden), gates(hidden)) for number in range(UNITS)]
        x = rng.normal(size=(batch, steps, FEATURES)).astype(np.float32)
        closing = uniform(hidden, CLASSES), uniform(CLASSES)
        return cls(units, closing, x, rng.integers(0, CLASSES, batch).astype(np.int32))


Network = tuple[Any, Any]
"""Units and closing layer, as in a problem."""


def by_hand(units: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last state of the uppermost unit, by a scan; the first map of the inputs is taken of all times at once."""

    def cell(h: jax.Array, inputs: jax.Array, recurrent: tuple[jax.Array, jax.Array]) -> jax.Array:
        (xr, xz, xn), (hr, hz, hn) = jnp.split(inputs, 3, 1), jnp.split(_linear(h, recurrent), 3, 1)
        n = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
        rate = 1 - jax.nn.sigmoid(xz + hz)
        return (h + rate * n) / (1 + rate)

    def step(states: tuple[jax.Array, ...], gates: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        out: list[jax.Array] = []
        for number, ((between, recurrent), h) in enumerate(zip(units, states, strict=True)):
            out.append(cell(h, gates if number == 0 else _linear(out[-1], between), recurrent))
        return tuple(out), None

    hidden = units[0][1][0].shape[0]
    zeros = (jnp.zeros((len(x), hidden), x.dtype),) * len(units)
    states, _ = lax.scan(step, zeros, _linear(x.swapaxes(0, 1), units[0][0]))
    return states[-1], jnp.full((), jnp.nan, x.dtype)


def solved(units: Any, x: jax.Array, solvers: tuple[Any, Any], comm: Any = None) -> tuple[jax.Array, jax.Array]:
    """The same by the library's module, and the last residual norm."""
    hidden = units[0][1][0].shape[0]
    solver, adjoint_solver = solvers

    def make() -> GRU:
        return GRU(
            FEATURES, hidden, units=UNITS, solver=solver, adjoint_solver=adjoint_solver, comm=comm, rngs=nnx.Rngs(0)
        )

    gru = nnx.eval_shape(make)
    for parts, number in ((gru.inputs, 0), (gru.recurrent, 1)):
        for part, unit in zip(parts, units, strict=True):
            part.kernel, part.bias = map(nnx.Param, unit[number])
    solution = gru.solve(x)
    norms = solution.stats.residual_norms
    return solution.y1[-1], norms[-1] if norms.size else jnp.full((), jnp.nan, x.dtype)


def trainer(problem: Problem, solvers: tuple[Any, Any] | None, comm: Any, place: Any, *, ahead: bool = True) -> Trainer:
    """Training steps by the library, or by hand where no solvers are given.

    Args:
        problem: what is trained.
        solvers: forward and adjoint.
        comm: where the time steps live.
        place: puts arrays where every worker has them.
        ahead: whether to compile ahead of the first call.
    """

    def loss(network: Network, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        units, closing = network
        last, residual = by_hand(units, x) if solvers is None else solved(units, x, solvers, comm)
        logits = jax.nn.log_softmax(_linear(last, closing))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1)), residual

    network, batch = place(jax.tree.map(jnp.array, ((problem.units, problem.closing), (problem.x, problem.labels))))
    return Trainer(loss, network, batch, lambda network: network[0], ahead=ahead)


def _linear(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    kernel, bias = weights
    return x @ kernel + bias.reshape(*[1] * (x.ndim - 1), -1)
