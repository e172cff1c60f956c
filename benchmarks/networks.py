"""The networks of all suites: equal layers that one solve goes through, weights as at initialisation, and a batch.

Inputs and labels are random, since the time of a step does not depend on them. All arrays are NumPy's, in float32, and the
same in every process.

| name | one layer | loss |
|---|---|---|
| ``dense`` | ``y + h tanh(y W + b)`` | half the squared distance to a target |
| ``conv`` | ``y + h relu(conv(relu(conv(y))))`` on images, one convolution before, two dense layers after | cross entropy |
| ``encoder`` | pre-norm attention (four heads, 32 tokens) and feed-forward | half the mean squared distance |
| ``voxels`` | two convolutions over 16 x 16 x 16 points | half the mean squared distance |
| ``gru`` | a time step of two implicit units on top of each other, a dense layer on the last state | cross entropy |
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import lp_jax
from lp_jax import MGRIT, Identity, Picard, Rediscretize, nn
from lp_jax.planning import training_step

HEADS, TOKENS, POINTS = 4, 32, 16
FEATURES, UNITS = 9, 2
SERIAL = lp_jax.Serial(), lp_jax.Serial()

Pair = tuple[Any, Any]
"""A forward and an adjoint solver."""


class Weights(NamedTuple):
    """All weights of a network."""

    opening: Any  # of what comes before the layers
    layers: Any  # of the layers, leaves ``(layers, ...)``; of the GRU those of its units, which all time steps share
    closing: Any  # of what comes after the layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A network, its initial weights and a batch."""

    name: str
    weights: Weights
    x: np.ndarray  # the inputs, examples first
    target: np.ndarray  # what the loss compares with
    problem: Callable[
        ..., dict[str, Any]
    ]  # ``problem(weights, x, solvers, comm)``: arguments of `lp_jax.solve`
    scan: Callable[
        ..., Any
    ]  # ``scan(weights, x, unroll=1)``: the last state, as one writes it by hand
    measure: Callable[
        [Any, Any, jax.Array], jax.Array
    ]  # ``measure(closing, y1, target)``: the loss

    def loss(
        self, solvers: Pair | None = None, comm: Any = None
    ) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Return ``loss(weights, x, target)`` by these solvers, or by a scan; it also gives the last residual norm, or NaN."""

        def loss(weights: Weights, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
            norm = jnp.float32(jnp.nan)
            if solvers is None:
                y1 = self.scan(weights, x)
            else:
                problem = self.problem(weights, x, solvers, comm)
                solution = lp_jax.solve(**problem, solver=solvers[0], adjoint_solver=solvers[1])
                y1, stats = solution.y1, solution.stats
                norm = jnp.append(norm, stats.residual_norms)[stats.iterations]
                norm = jnp.where(norm < 0, jnp.nan, norm)  # of a skipped down-cycle
            return self.measure(weights.closing, y1, target), norm

        return loss


def through(step: Any, h: float, params: Any, y: jax.Array, *, unroll: int = 1) -> jax.Array:
    dt = jnp.asarray(h, y.dtype)

    def body(y: jax.Array, params: Any) -> tuple[jax.Array, None]:
        return step(y, lp_jax.Layer(params, None, None, 0 * dt, dt, jnp.int32(0), 0)), None

    return lax.scan(body, y, params, unroll=unroll)[0]


def _residual(
    name: str,
    step: Any,
    weights: Weights,
    x: np.ndarray,
    target: np.ndarray,
    measure: Callable[[Any, Any, jax.Array], jax.Array],
    enter: Callable[[Any, jax.Array], jax.Array] = lambda opening, x: x,
) -> Network:
    """Residual layers with h = 1/N; ``enter(opening, x)`` is the state that enters them."""
    h = 1 / len(jax.tree.leaves(weights.layers)[0])

    def problem(
        weights: Weights, x: jax.Array, solvers: Pair | None = None, comm: Any = None
    ) -> dict[str, Any]:
        return {
            "step": step,
            "params": weights.layers,
            "y0": enter(weights.opening, x),
            "comm": comm,
        }

    def scan(weights: Weights, x: jax.Array, unroll: int = 1) -> jax.Array:
        return through(step, h, weights.layers, enter(weights.opening, x), unroll=unroll)

    return Network(
        name=name, weights=weights, x=x, target=target, problem=problem, scan=scan, measure=measure
    )


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _uniform(rng: np.random.Generator, bound: float, *shape: int) -> np.ndarray:
    return (rng.uniform(-1, 1, shape) * bound).astype(np.float32)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def _linear(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
    kernel, bias = weights
    return x @ kernel + bias.reshape(*[1] * (x.ndim - 1), -1)


def half_mean_square(closing: Any, y1: jax.Array, target: jax.Array) -> jax.Array:
    return 0.5 * jnp.mean((y1 - target) ** 2)


def dense(width: int, layers: int, batch: int) -> Network:
    """Layers of a matrix each."""

    def step(y: jax.Array, layer: lp_jax.Layer) -> jax.Array:
        w, b = layer.params
        return y + layer.dt * jnp.tanh(y @ w + b[None])

    def half_square(closing: Any, y1: jax.Array, target: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum((y1 - target) ** 2)

    rng = np.random.default_rng(0)
    stacked = (
        _normal(rng, layers, width, width) / np.float32(math.sqrt(width)),
        0.1 * _normal(rng, layers, width),
    )
    x, target = (_normal(rng, batch, width) for _ in range(2))
    return _residual("dense", step, Weights(None, stacked, None), x, target, half_square)


class Convolved(NamedTuple):
    """Weights of a convolutional layer, stacked over the layers: (N, C, C, 3, 3) and (N, C), twice."""

    w1: Any
    b1: Any
    w2: Any
    b2: Any


def conv(
    channels: int, layers: int, batch: int, *, size: int = 28, formulation: str = "auto"
) -> Network:
    """Layers of two convolutions each, weights as PyTorch draws them: uniform within 1 / sqrt(fan in)."""
    hidden, classes = 32, 10

    def convolve(y: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return (
            nn.convolve(y, w.transpose(2, 3, 1, 0), formulation=formulation) + b[None, None, None]
        )

    def enter(opening: Any, images: jax.Array) -> jax.Array:
        return jax.nn.relu(convolve(images.transpose(0, 2, 3, 1), *opening))

    def step(y: jax.Array, layer: lp_jax.Layer) -> jax.Array:
        p = layer.params
        return y + layer.dt * jax.nn.relu(
            convolve(jax.nn.relu(convolve(y, p.w1, p.b1)), p.w2, p.b2)
        )

    def measure(closing: Any, y: jax.Array, labels: jax.Array) -> jax.Array:
        inner, outer = closing
        flat = y.transpose(0, 3, 1, 2).reshape(labels.size, -1)  # PyTorch's order
        return _cross_entropy(_linear(jax.nn.relu(_linear(flat, inner)), outer), labels)

    rng = np.random.default_rng(0)

    def convolved(inputs: int, *stack: int) -> tuple[np.ndarray, np.ndarray]:
        bound = 1 / math.sqrt(9 * inputs)
        return _uniform(rng, bound, *stack, channels, inputs, 3, 3), _uniform(
            rng, bound, *stack, channels
        )

    def linear(inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
        bound = 1 / math.sqrt(inputs)
        return _uniform(rng, bound, inputs, outputs), _uniform(rng, bound, outputs)

    opening = convolved(1)
    stacked = Convolved(*convolved(channels, layers), *convolved(channels, layers))
    weights = Weights(
        opening, stacked, (linear(channels * size**2, hidden), linear(hidden, classes))
    )
    images = _normal(rng, batch, 1, size, size)
    labels = rng.integers(0, classes, batch).astype(np.int32)
    return _residual("conv", step, weights, images, labels, measure, enter)


def encoder(width: int, layers: int, batch: int) -> Network:
    """The library's layers of a transformer."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nn.EncoderLayer(width, min(HEADS, width), depth=layers, rngs=rngs)

    return _modules("encoder", make, layers, (batch, TOKENS, width))


def voxels(width: int, layers: int, batch: int) -> Network:
    """The library's convolutions in three dimensions, and smooth states: what a coarser grid in space is for."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return nn.ConvResidual(width, kernel=(3, 3, 3), rngs=rngs)

    network = _modules("voxels", make, layers, (batch, *(POINTS,) * 3, width))
    waves = np.sin(np.arange(POINTS) * (2 * np.pi / POINTS)).astype(np.float32)
    smooth = (waves[:, None, None] * waves[:, None] * waves)[..., None]
    return dataclasses.replace(network, x=network.x[:, :1, :1, :1] * smooth)


class Mlp(nnx.Module):
    """A residual block of four dense layers, each with layer norm and swish."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(4)])
        self.norm = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(4)])

    def __call__(self, y: jax.Array, t: jax.Array, dt: jax.Array) -> jax.Array:
        x = y
        for dense, norm in zip(self.dense, self.norm, strict=True):
            x = nnx.swish(norm(dense(x)))
        return y + x


def mlp(width: int, layers: int, batch: int) -> Network:
    """Blocks of four dense layers, as in networks of a thousand layers for reinforcement learning (arXiv 2503.14858)."""
    return _modules("mlp", lambda rngs: Mlp(width, rngs=rngs), layers, (batch, width))


def _modules(
    name: str, make: Callable[[nnx.Rngs], nnx.Module], layers: int, shape: tuple[int, ...]
) -> Network:
    rng = np.random.default_rng(0)
    step, params = nn.stack(make, layers, rngs=nnx.Rngs(0))
    x, target = (_normal(rng, *shape) for _ in range(2))
    return _residual(
        name,
        step,
        Weights(None, jax.tree.map(np.asarray, params), None),
        x,
        target,
        half_mean_square,
    )


def gru(hidden: int, steps: int, batch: int) -> Network:
    """Two implicit units; each has a kernel and a bias for its inputs and for its state, drawn as PyTorch draws them."""
    classes, bound = 6, hidden**-0.5
    rng = np.random.default_rng(0)

    def gates(inputs: int) -> tuple[np.ndarray, np.ndarray]:
        return _uniform(rng, bound, inputs, 3 * hidden), _uniform(rng, bound, 3 * hidden)

    def problem(
        weights: Weights, x: jax.Array, solvers: Pair = SERIAL, comm: Any = None
    ) -> dict[str, Any]:
        module = _recurrent(nn.GRU, hidden, solvers, comm, units=UNITS)
        for number, unit in enumerate(weights.layers):
            for part, (kernel, bias) in zip(
                (module.inputs[number], module.recurrent[number]), unit, strict=True
            ):
                part.kernel, part.bias = nnx.Param(kernel), nnx.Param(bias)
        return vars(module.problem(x))

    units = [(gates(FEATURES if number == 0 else hidden), gates(hidden)) for number in range(UNITS)]
    x = _normal(rng, batch, steps, FEATURES)
    closing = _uniform(rng, bound, hidden, classes), _uniform(rng, bound, classes)
    return Network(
        name="gru",
        weights=Weights(None, units, closing),
        x=x,
        target=rng.integers(0, classes, batch).astype(np.int32),
        problem=problem,
        scan=_scan_gru,
        measure=lambda closing, states, labels: _cross_entropy(
            _linear(states[-1], closing), labels
        ),
    )


def _recurrent(kind: Any, hidden: int, solvers: Pair, comm: Any, **fields: Any) -> Any:
    """A module whose weights are still to be put in."""
    make = functools.partial(
        kind, FEATURES, hidden, solver=solvers[0], adjoint_solver=solvers[1], comm=comm, **fields
    )
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def _scan_gru(weights: Weights, x: jax.Array, unroll: int = 1) -> tuple[jax.Array, ...]:
    """The first map of the inputs is taken of all times at once."""
    units = weights.layers

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

    zeros = (jnp.zeros((len(x), units[0][1][0].shape[0]), x.dtype),) * len(units)
    return lax.scan(step, zeros, _linear(x.swapaxes(0, 1), units[0][0]), unroll=unroll)[0]


def diagonal(
    name: str, kind: type[nn.ParaGRU] | type[nn.ParaLSTM], hidden: int, steps: int, batch: int
) -> Network:
    """A cell whose numbers act on themselves alone; a loss of its last state."""
    rng = np.random.default_rng(0)
    cell = kind(FEATURES, hidden, rngs=nnx.Rngs(0))
    names = ("kernel", "bias", "recurrent")
    x, target = _normal(rng, batch, steps, FEATURES), _normal(rng, batch, hidden)

    def problem(
        weights: Weights, x: jax.Array, solvers: Pair = SERIAL, comm: Any = None
    ) -> dict[str, Any]:
        module = _recurrent(kind, hidden, solvers, comm)
        for each, value in zip(names, weights.layers, strict=True):
            setattr(module, each, nnx.Param(value))
        return vars(module.problem(x))

    def scan(weights: Weights, x: jax.Array, unroll: int = 1) -> Any:
        kernel, bias, recurrent = weights.layers
        gates = jnp.split(_linear(x.swapaxes(0, 1), (kernel, bias)), 3, -1)
        of_state = tuple(recurrent[:, None])
        start = cell.start(len(x), gates[0].dtype)
        return lax.scan(
            lambda y, x: (kind.step(y, x, of_state), None), start, tuple(gates), unroll=unroll
        )[0]

    return Network(
        name=name,
        weights=Weights(None, tuple(np.asarray(getattr(cell, each)[...]) for each in names), None),
        x=x,
        target=target,
        problem=problem,
        scan=scan,
        measure=lambda closing, y1, target: half_mean_square(closing, kind.output(y1), target),
    )


NETWORKS: dict[str, Callable[..., Network]] = {
    "dense": dense,
    "conv": conv,
    "gru": gru,
    "encoder": encoder,
    "voxels": voxels,
    "mlp": mlp,
    "paragru": functools.partial(diagonal, "paragru", nn.ParaGRU),
    "paralstm": functools.partial(diagonal, "paralstm", nn.ParaLSTM),
}
"""By name, from width or channels, layers or time steps, and batch."""

RECURRENT = ("gru", "paragru", "paralstm")
"""Their time steps are the layers, and share all weights."""


def two_one(**fields: Any) -> Pair:
    """MGRIT, two cycles forward and one backward, each with a skipped down-cycle; F on the finest level, FCF below."""
    solver = MGRIT(iterations=2, relaxation=("F", "FCF"), start="cascade", **fields)
    return solver, dataclasses.replace(solver, iterations=1)


def _injected(**fields: Any) -> Pair:
    """Three levels, two cycles forward and one backward; ``fields`` are those of the forward solve."""
    cycle = MGRIT(levels=3, coarsening=4, coarse_step=Rediscretize(), at_once=1, iterations=1)
    return dataclasses.replace(cycle, iterations=2, **fields), cycle


def _identity(layers: int, workers: int, forward: int, adjoint: int) -> Pair:
    """One interval per worker, and nothing in the place of its layers: the coarse problem is a sum."""
    length = -(-layers // workers)
    cycle = MGRIT(levels=2, coarsening=length, coarse_step=Identity(), storage="all", at_once=1)
    return dataclasses.replace(cycle, iterations=forward), dataclasses.replace(
        cycle, iterations=adjoint
    )


SETTINGS: dict[str, Callable[[int, int], Pair]] = {
    "3 levels, injection, 2/1": lambda n, p: _injected(),
    "3 levels, injection, 2/1, all stored": lambda n, p: _injected(storage="all"),
    "identity, 2/1": lambda n, p: _identity(n, p, 2, 1),
    "identity, 2/2": lambda n, p: _identity(n, p, 2, 2),
    "Picard, 2/1": lambda n, p: (Picard(sweeps=2), Picard(sweeps=1)),
}
"""Of several workers, from the numbers of layers and workers: the forward and the adjoint solver."""


def counted_ratio(name: str, layers: int, workers: int) -> float:
    """Time over that of serial propagation, if only evaluations took time and a transposed one took two.

    A transposed evaluation is one for the state and one for the parameters; solvers need the latter once, in their last sweep.
    Source: cost of a training step, S = N (1 + b) / (C_forward + b C_adjoint) with b = 2; Guenther et al. 2020.
    """
    return training_step(
        *SETTINGS[name](layers, workers), layers, workers=workers, at_once=1
    ).depth() / (3 * layers)
