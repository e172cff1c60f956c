"""Classifiers around a scan, as one writes them by hand, and their data: what ``benchmarks.gpu`` trains."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lp_jax
from benchmarks import corpora
from lp_jax import nn

Scan = Callable[..., Any]
"""``scan(body, init, xs) -> (carry, ys)``: `jax.lax.scan` or `lp_jax.scan`."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A classifier: what comes before the scan, the scan, and what comes after it.

    Attributes:
        weights: of all parts.
        parts: ``parts(weights, x)``: body, initial carry and xs of the scan.
        leave: ``leave(weights, carry)``: the logits, classes last.
    """

    weights: Any
    parts: Callable[[Any, jax.Array], tuple[Any, Any, Any]]
    leave: Callable[[Any, Any], jax.Array]

    def logits(self, weights: Any, x: jax.Array, scan: Scan) -> jax.Array:
        return self.leave(weights, scan(*self.parts(weights, x))[0])

    def loss(self, scan: Scan) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
        """Mean cross entropy; labels below 0 do not count."""

        def loss(weights: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
            chance = jax.nn.log_softmax(self.logits(weights, x, scan).astype(jnp.float32))
            taken = jnp.take_along_axis(chance, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
            return -jnp.sum(jnp.where(labels < 0, 0, taken)) / jnp.sum(labels >= 0)

        return loss

    def astype(self, dtype: Any) -> "Model":
        """The same with weights of another dtype; inputs are cast to theirs."""
        return dataclasses.replace(
            self, weights=jax.tree.map(lambda x: jnp.asarray(x, dtype), self.weights)
        )


def _normal(rng: np.random.Generator, scale: float, *shape: int) -> np.ndarray:
    return (scale * rng.normal(size=shape)).astype(np.float32)


def dense(width: int, layers: int, features: int = 64, classes: int = 10) -> Model:
    """Residual layers of one matrix, ``y + tanh(y W + b) / N``."""
    rng, h = np.random.default_rng(0), 1 / layers
    weights = {
        "enter": _normal(rng, features**-0.5, features, width),
        "layers": (
            _normal(rng, width**-0.5, layers, width, width),
            np.zeros((layers, width), np.float32),
        ),
        "leave": _normal(rng, width**-0.5, width, classes),
    }

    def body(y: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return y + jnp.asarray(h, y.dtype) * jnp.tanh(y @ p[0] + p[1]), None

    return Model(
        weights, lambda w, x: (body, x.astype(w["enter"].dtype) @ w["enter"], w["layers"]), _linear
    )


def blocks(width: int, layers: int, features: int = 64, classes: int = 10) -> Model:
    """Residual blocks of four dense layers with layer norm and swish (arXiv 2503.14858), the sum not scaled."""
    rng = np.random.default_rng(0)
    weights = {
        "enter": _normal(rng, features**-0.5, features, width),
        "layers": (
            _normal(rng, width**-0.5, layers, 4, width, width),
            np.zeros((layers, 4, width), np.float32),
        ),
        "leave": _normal(rng, width**-0.5, width, classes),
    }

    def body(y: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = y
        for i in range(4):
            x = x @ p[0][i] + p[1][i]
            x = x - jnp.mean(x, -1, keepdims=True)
            x = jax.nn.swish(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))
        return y + x, None

    return Model(
        weights, lambda w, x: (body, x.astype(w["enter"].dtype) @ w["enter"], w["layers"]), _linear
    )


def encoder(width: int, layers: int, sizes: tuple[int, ...], classes: int) -> Model:
    """Pre-norm layers of a transformer with step 1/N, over embedded words: inputs ``(batch, words, columns)``."""
    rng = np.random.default_rng(0)
    step, params = nn.stack(
        lambda rngs: nn.EncoderLayer(width, 4, depth=layers, rngs=rngs), layers, rngs=nnx.Rngs(0)
    )
    weights = {
        "enter": [_normal(rng, 0.5, size, width) for size in sizes],
        "layers": params,
        "leave": _normal(rng, width**-0.5, width, classes),
    }
    dt = jnp.float32(1 / layers)

    def body(y: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return step(y, lp_jax.Layer(p, None, None, 0 * dt, dt, jnp.int32(0), 0)), None

    def parts(weights: Any, x: jax.Array) -> tuple[Any, Any, Any]:
        embedded: Any = sum(table[x[..., i]] for i, table in enumerate(weights["enter"]))
        return body, embedded, weights["layers"]

    return Model(weights, parts, _linear)


def gru(units: int, features: int = 1, classes: int = 10) -> Model:
    """cuDNN's GRU: the reset gate acts on the product. The product with the inputs is taken of all times at once."""
    rng = np.random.default_rng(0)
    weights = {
        "inputs": _normal(rng, features**-0.5, features, 3 * units),
        "bias": np.zeros(3 * units, np.float32),
        "state": _normal(rng, units**-0.5, units, 3 * units),
        "leave": _normal(rng, units**-0.5, units, classes),
    }

    def parts(weights: Any, x: jax.Array) -> tuple[Any, Any, Any]:
        def body(h: jax.Array, gates: jax.Array) -> tuple[jax.Array, None]:
            (xr, xz, xn), (hr, hz, hn) = (
                jnp.split(gates, 3, -1),
                jnp.split(h @ weights["state"], 3, -1),
            )
            z = jax.nn.sigmoid(xz + hz)
            return (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h, None

        gates = x.astype(weights["bias"].dtype).swapaxes(0, 1) @ weights["inputs"] + weights["bias"]
        return body, jnp.zeros((len(x), units), gates.dtype), gates

    return Model(weights, parts, _linear)


def diagonal(kind: Any, units: int, features: int = 1, classes: int = 10) -> Model:
    """A cell whose numbers act on themselves alone: `nn.ParaGRU` or `nn.ParaLSTM`."""
    rng, cell = np.random.default_rng(0), kind(features, units, rngs=nnx.Rngs(0))
    weights = {
        name: np.asarray(getattr(cell, name)[...]) for name in ("kernel", "bias", "recurrent")
    }
    weights["leave"] = _normal(rng, units**-0.5, units, classes)

    def parts(weights: Any, x: jax.Array) -> tuple[Any, Any, Any]:
        gates = x.astype(weights["bias"].dtype).swapaxes(0, 1) @ weights["kernel"] + weights["bias"]
        diagonals = tuple(weights["recurrent"][:, None])
        start = cell.start(len(x), gates.dtype)
        return (
            lambda y, x: (kind.step(y, x, diagonals), None),
            start,
            tuple(jnp.split(gates, 3, -1)),
        )

    return Model(weights, parts, lambda weights, y: kind.output(y) @ weights["leave"])


def with_resets(model: Model, every: int = 64) -> Model:
    """A recurrent model whose state begins again in each example, on average after ``every`` steps."""

    def parts(weights: Any, x: jax.Array) -> tuple[Any, Any, Any]:
        body, init, xs = model.parts(weights, x)
        again = jnp.asarray(np.random.default_rng(3).random((x.shape[1], len(x), 1)) * every < 1)

        def begin_again(carry: Any, x: Any) -> tuple[Any, Any]:
            x, again = x
            return body(jax.tree.map(lambda start, y: jnp.where(again, start, y), init, carry), x)

        return begin_again, init, (xs, again)

    return dataclasses.replace(model, parts=parts)


def _linear(weights: Any, y: jax.Array) -> jax.Array:
    return y @ weights["leave"]


MODELS: dict[str, Callable[[int, int], Model]] = {
    "dense": dense,
    "blocks": blocks,
    "gru": lambda units, steps: gru(units),
    "paragru": lambda units, steps: diagonal(nn.ParaGRU, units),
    "paralstm": lambda units, steps: diagonal(nn.ParaLSTM, units),
    "gru, resets": lambda units, steps: with_resets(gru(units)),
    "paragru, resets": lambda units, steps: with_resets(diagonal(nn.ParaGRU, units)),
}
"""By name, from width and layers or time steps."""

RECURRENT = ("gru", "paragru", "paralstm", "gru, resets", "paragru, resets")


class Data(NamedTuple):
    """Examples and labels, to train on and held out."""

    x: np.ndarray
    labels: np.ndarray
    test_x: np.ndarray
    test_labels: np.ndarray


@functools.cache
def digits(side: int = 8) -> Data:
    """The digits of scikit-learn, 64 pixels in [0, 1]; enlarged to ``side`` x ``side``. A fifth is held out."""
    found = importlib.import_module("sklearn.datasets").load_digits()
    images = found.images.astype(np.float32) / 16
    if side != 8:
        images = importlib.import_module("scipy.ndimage").zoom(
            images, (1, side / 8, side / 8), order=1
        )
    at = np.random.default_rng(0).permutation(len(images))
    x, labels, held = (
        images.reshape(len(images), -1)[at],
        found.target.astype(np.int32)[at],
        len(at) // 5,
    )
    return Data(x[held:], labels[held:], x[:held], labels[:held])


def in_time(data: Data) -> Data:
    """One pixel after another, ``(examples, pixels, 1)``."""
    return data._replace(x=data.x[..., None], test_x=data.test_x[..., None])


def tagging(folder: Path, words: int) -> tuple[Data, tuple[int, ...], int]:
    """Words and their parts of speech from a treebank; rows of each embedding table, and the number of tags."""
    found = corpora.gum(folder, max_length=words)
    arrays = [
        corpora.padded(rows, words, fill=fill)
        for part in (found.train, found.test)
        for rows, fill in ((part.x, 0), (part.y, corpora.UNLABELLED))
    ]
    return Data(*arrays), found.sizes, found.classes
