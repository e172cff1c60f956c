"""The same networks in PyTorch, one layer or time step after another. Needs the extra ``bench``."""

import importlib
from typing import Any

import jax
import numpy as np

from benchmarks import dense, gru, resnet, stacks
from benchmarks.training import LEARNING_RATE, MOMENTUM

torch: Any = importlib.import_module("torch")  # so that types can be checked without it
F = torch.nn.functional


class _Loop:
    """Takes training steps with PyTorch, one per call; a subclass says what of.

    Args:
        network: the weights, any tree of tensors.
        threads: of PyTorch, while this is timed.
    """

    def __init__(self, network: Any, threads: int):
        self._threads = threads
        self._sgd = torch.optim.SGD(jax.tree.leaves(network), lr=LEARNING_RATE, momentum=MOMENTUM)
        self.take_threads()
        self()

    def take_threads(self) -> None:
        """Set the threads of PyTorch, which are the process's; tiny numbers are taken as 0, as XLA does.

        Where a gradient fades over many steps, arithmetic with denormal numbers would take most of the time.
        """
        torch.set_num_threads(self._threads)
        torch.set_flush_denormal(True)

    def __call__(self) -> None:
        """One step."""
        self._sgd.zero_grad()
        self._loss().backward()
        self._sgd.step()

    def _loss(self) -> Any:
        raise NotImplementedError


class ResNetLoop(_Loop):
    """The convolutional network.

    Attributes:
        gradient: of the layers, at the initial weights, stacked as in JAX.
    """

    def __init__(self, problem: resnet.Problem, threads: int):
        network = problem.network
        layers = [[p[n] for p in network.layers] for n in range(len(network.layers.b1))]
        closing = [(w.T, b) for w, b in network.closing]
        self._opening, self._layers, self._closing = jax.tree.map(_leaf, (network.opening, layers, closing))
        self._images, self._labels = torch.tensor(problem.images), torch.tensor(problem.labels, dtype=torch.int64)
        super().__init__((self._opening, self._layers, self._closing), threads)
        gradients = [[_gradient(p) for p in layer] for layer in self._layers]
        self.gradient = resnet.Convolved(*(np.stack(p) for p in zip(*gradients, strict=True)))

    def _loss(self) -> Any:
        y = F.relu(F.conv2d(self._images, *self._opening, padding=1))
        h = 1 / len(self._layers)
        for w1, b1, w2, b2 in self._layers:
            y = y + h * F.relu(F.conv2d(F.relu(F.conv2d(y, w1, b1, padding=1)), w2, b2, padding=1))
        hidden, out = self._closing
        return F.cross_entropy(F.linear(F.relu(F.linear(y.flatten(1), *hidden)), *out), self._labels)


class GRULoop(_Loop):
    """The recurrent network.

    Attributes:
        gradient: of the units, at the initial weights, as in JAX.
    """

    def __init__(self, problem: gru.Problem, threads: int):
        self._units, self._closing = jax.tree.map(
            lambda p: _leaf(p.T) if p.ndim == 2 else _leaf(p), (problem.units, problem.closing)
        )
        self._x, self._labels = torch.tensor(problem.x), torch.tensor(problem.labels, dtype=torch.int64)
        super().__init__((self._units, self._closing), threads)
        self.gradient = jax.tree.map(lambda p: _gradient(p).T, self._units)

    def _loss(self) -> Any:
        hidden = self._units[0][1][0].shape[1]
        states = [self._x.new_zeros(len(self._x), hidden) for _ in self._units]
        for entering in self._x.unbind(1):
            for number, (inputs, recurrent) in enumerate(self._units):
                states[number] = entering = _cell(entering, states[number], inputs, recurrent)
        return F.cross_entropy(F.linear(states[-1], *self._closing), self._labels)


class DenseLoop(_Loop):
    """The dense network.

    Attributes:
        gradient: of the layers, at the initial weights, stacked as in JAX.
    """

    def __init__(self, problem: dense.Problem, threads: int):
        weights, y, target = jax.tree.map(np.array, problem)
        self._layers = [(_leaf(w), _leaf(b)) for w, b in zip(*weights, strict=True)]
        self._y, self._target = torch.tensor(y), torch.tensor(target)
        super().__init__(self._layers, threads)
        self.gradient = tuple(np.stack([_gradient(p) for p in ps]) for ps in zip(*self._layers, strict=True))

    def _loss(self) -> Any:
        y, h = self._y, 1 / len(self._layers)
        for w, b in self._layers:
            y = y + h * torch.tanh(torch.addmm(b, y, w))
        return 0.5 * (y - self._target).square().sum()


class EncoderLoop(_Loop):
    """The transformer.

    Attributes:
        gradient: of the layers, at the initial weights, stacked as in JAX.
    """

    def __init__(self, problem: stacks.Problem, threads: int):
        layers = len(jax.tree.leaves(problem.params)[0])
        self._layers = [jax.tree.map(lambda x, n=n: _leaf(x[n]), problem.params) for n in range(layers)]
        self._heads = min(stacks.HEADS, problem.y.shape[-1])
        self._y, self._target = torch.tensor(problem.y), torch.tensor(problem.target)
        super().__init__(self._layers, threads)
        self.gradient = jax.tree.map(lambda *ps: np.stack([_gradient(p) for p in ps]), *self._layers)

    def _loss(self) -> Any:
        y, h = self._y, 1 / len(self._layers)
        for layer in self._layers:
            attended = _attention(y, layer["attention"], self._heads)
            y = y + h * (attended + _feed_forward(y + attended, layer["feed_forward"]))
        return 0.5 * (y - self._target).square().mean()


def _attention(y: Any, p: Any, heads: int) -> Any:
    q, k, v = _dense(_norm(y, p["norm"]), p["query_key_value"]).chunk(3, -1)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v)
    return _dense(out.transpose(1, 2).flatten(2), p["out"])


def _feed_forward(y: Any, p: Any) -> Any:
    return _dense(F.gelu(_dense(_norm(y, p["norm"]), p["inner"]), approximate="tanh"), p["outer"])


def _norm(y: Any, p: Any) -> Any:
    return F.layer_norm(y, y.shape[-1:], p["scale"], p["bias"], eps=1e-6)


def _dense(y: Any, p: Any) -> Any:
    return F.linear(y, p["kernel"].T, p["bias"])


def _cell(x: Any, h: Any, inputs: Any, recurrent: Any) -> Any:
    (xr, xz, xn), (hr, hz, hn) = F.linear(x, *inputs).chunk(3, 1), F.linear(h, *recurrent).chunk(3, 1)
    n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    rate = 1 - torch.sigmoid(xz + hz)
    return (h + rate * n) / (1 + rate)


LOOPS: dict[str, type[_Loop]] = {"dense": DenseLoop, "conv": ResNetLoop, "gru": GRULoop, "encoder": EncoderLoop}
"""By the networks of the suite ``single``."""


def _leaf(array: np.ndarray) -> Any:
    return torch.tensor(array, requires_grad=True)


def _gradient(leaf: Any) -> np.ndarray:
    return leaf.grad.numpy().copy()
