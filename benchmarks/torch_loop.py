"""The same network in PyTorch, one layer after another. Needs the extra ``bench``."""

import importlib
from typing import Any

import numpy as np

from benchmarks import resnet

torch: Any = importlib.import_module("torch")  # so that types can be checked without it
F = torch.nn.functional


class TorchTrainer:
    """Takes training steps with PyTorch, one per call.

    Attributes:
        gradient: of the layers, at the initial weights, stacked as in JAX.
    """

    def __init__(self, problem: "resnet.Problem", threads: int):
        network = problem.network
        self._threads = threads
        self._opening = [_leaf(p) for p in network.opening]
        self._layers = [[_leaf(p[n]) for p in network.layers] for n in range(len(network.layers.b1))]
        self._closing = [[_leaf(w.T), _leaf(b)] for w, b in network.closing]
        leaves = [p for group in (self._opening, *self._layers, *self._closing) for p in group]
        self._sgd = torch.optim.SGD(leaves, lr=resnet.LEARNING_RATE, momentum=resnet.MOMENTUM)
        self._images = torch.tensor(problem.images)
        self._labels = torch.tensor(problem.labels, dtype=torch.int64)
        self.take_threads()
        self()
        gradients = [[p.grad.numpy().copy() for p in layer] for layer in self._layers]
        self.gradient = resnet.Convolved(*(np.stack(p) for p in zip(*gradients, strict=True)))

    def take_threads(self) -> None:
        """Set the threads of PyTorch, which are the process's."""
        torch.set_num_threads(self._threads)

    def __call__(self) -> None:
        """One step."""
        self._sgd.zero_grad()
        y = F.relu(F.conv2d(self._images, *self._opening, padding=1))
        h = 1 / len(self._layers)
        for w1, b1, w2, b2 in self._layers:
            y = y + h * F.relu(F.conv2d(F.relu(F.conv2d(y, w1, b1, padding=1)), w2, b2, padding=1))
        hidden, out = self._closing
        logits = F.linear(F.relu(F.linear(y.flatten(1), *hidden)), *out)
        F.cross_entropy(logits, self._labels).backward()
        self._sgd.step()


def _leaf(array: np.ndarray) -> Any:
    return torch.tensor(array, requires_grad=True)
