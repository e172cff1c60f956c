"""The same networks in PyTorch, one layer or time step after another. Needs the extra ``bench``."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.networks import HEADS, Network, Weights
from benchmarks.training import LEARNING_RATE, MOMENTUM

torch: Any = importlib.import_module("torch")  # so that types can be checked without it
F = torch.nn.functional


class Loop:
    """Takes training steps with PyTorch, one per call.

    Each layer has tensors of its own; matrices before and after the layers, and those of recurrent units, are (out, in).
    """

    def __init__(self, network: Network, threads: int):
        self._threads, self._loss, weights = threads, LOSSES[network.name], network.weights
        stacked = network.name != "gru"
        layers: Any = jax.tree.map(_turned, weights.layers)
        if stacked:
            count = len(jax.tree.leaves(weights.layers)[0])
            layers = [
                jax.tree.map(lambda p, n=n: _leaf(p[n]), weights.layers) for n in range(count)
            ]
        opening, closing = jax.tree.map(_turned, (weights.opening, weights.closing))
        self._weights = Weights(opening, layers, closing)
        self._batch = torch.tensor(network.x), torch.tensor(network.target)
        self._sgd = torch.optim.SGD(
            jax.tree.leaves(self._weights), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        self.take_threads()
        self()
        if stacked:
            self.gradient = jax.tree.map(lambda *ps: np.stack([_gradient(p) for p in ps]), *layers)
        else:
            self.gradient = jax.tree.map(lambda p: _gradient(p).T, layers)

    def take_threads(self) -> None:
        """Set the threads of PyTorch, which are the process's; take tiny numbers as 0, as XLA does.

        Where a gradient fades over many steps, arithmetic with denormal numbers would take most of the time.
        """
        torch.set_num_threads(self._threads)
        torch.set_flush_denormal(True)

    def __call__(self) -> None:
        self._sgd.zero_grad()
        self._loss(self._weights, *self._batch).backward()
        self._sgd.step()


def _dense(weights: Weights, y: Any, target: Any) -> Any:
    h = 1 / len(weights.layers)
    for w, b in weights.layers:
        y = y + h * torch.tanh(torch.addmm(b, y, w))
    return 0.5 * (y - target).square().sum()


def _conv(weights: Weights, images: Any, labels: Any) -> Any:
    y = F.relu(F.conv2d(images, *weights.opening, padding=1))
    h = 1 / len(weights.layers)
    for w1, b1, w2, b2 in weights.layers:
        y = y + h * F.relu(F.conv2d(F.relu(F.conv2d(y, w1, b1, padding=1)), w2, b2, padding=1))
    inner, outer = weights.closing
    return F.cross_entropy(F.linear(F.relu(F.linear(y.flatten(1), *inner)), *outer), labels.long())


def _gru(weights: Weights, x: Any, labels: Any) -> Any:
    units = weights.layers
    states = [x.new_zeros(len(x), recurrent[0].shape[1]) for _, recurrent in units]
    for entering in x.unbind(1):
        for number, (inputs, recurrent) in enumerate(units):
            states[number] = entering = _cell(entering, states[number], inputs, recurrent)
    return F.cross_entropy(F.linear(states[-1], *weights.closing), labels.long())


def _cell(x: Any, h: Any, inputs: Any, recurrent: Any) -> Any:
    (xr, xz, xn), (hr, hz, hn) = (
        F.linear(x, *inputs).chunk(3, 1),
        F.linear(h, *recurrent).chunk(3, 1),
    )
    n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    rate = 1 - torch.sigmoid(xz + hz)
    return (h + rate * n) / (1 + rate)


def _encoder(weights: Weights, y: Any, target: Any) -> Any:
    h = 1 / len(weights.layers)
    for layer in weights.layers:
        attended = _attention(y, layer["attention"])
        y = y + h * (attended + _feed_forward(y + attended, layer["feed_forward"]))
    return 0.5 * (y - target).square().mean()


def _attention(y: Any, p: Any) -> Any:
    heads = min(HEADS, y.shape[-1])
    q, k, v = _linear(_norm(y, p["norm"]), p["query_key_value"]).chunk(3, -1)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return _linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), p["out"])


def _feed_forward(y: Any, p: Any) -> Any:
    return _linear(F.gelu(_linear(_norm(y, p["norm"]), p["inner"]), approximate="tanh"), p["outer"])


def _norm(y: Any, p: Any) -> Any:
    return F.layer_norm(y, y.shape[-1:], p["scale"], p["bias"], eps=1e-6)


def _linear(y: Any, p: Any) -> Any:
    return F.linear(y, p["kernel"].T, p["bias"])


LOSSES: dict[str, Callable[[Weights, Any, Any], Any]] = {
    "dense": _dense,
    "conv": _conv,
    "gru": _gru,
    "encoder": _encoder,
}
"""By name of the network."""


def _leaf(array: np.ndarray) -> Any:
    return torch.tensor(array, requires_grad=True)


def _turned(array: np.ndarray) -> Any:
    return _leaf(array.T if array.ndim == 2 else array)


def _gradient(leaf: Any) -> np.ndarray:
    return leaf.grad.numpy().copy()
