"""A GRU by cuDNN, through PyTorch, with the weights and batches of ``benchmarks.gpu``."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu_models import Data, Model

torch: Any = importlib.import_module("torch")  # so that types can be checked without it


class _Network(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, model: Model):
        super().__init__()
        weights = {name: torch.tensor(np.asarray(value)) for name, value in model.weights.items()}
        features, units = weights["inputs"].shape[0], weights["state"].shape[0]
        self.gru = torch.nn.GRU(features, units, batch_first=True)
        self.leave = torch.nn.Linear(units, weights["leave"].shape[1], bias=False)
        with torch.no_grad():
            self.gru.weight_ih_l0.copy_(weights["inputs"].T)
            self.gru.weight_hh_l0.copy_(weights["state"].T)
            self.gru.bias_ih_l0.copy_(weights["bias"])
            self.gru.bias_hh_l0.zero_()
            self.leave.weight.copy_(weights["leave"].T)
        self.to("cuda")

    def forward(self, x: Any) -> Any:
        return self.leave(self.gru(x)[1][0])


def gradient(model: Model, x: Any, labels: Any) -> Callable[[], "Pending"]:
    """A call that takes the gradient; what it returns is waited for as an array of JAX is."""
    network = _Network(model)
    x, labels = torch.tensor(np.asarray(x)).cuda(), torch.tensor(np.asarray(labels)).long().cuda()

    def call() -> Pending:
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(x), labels).backward()
        return Pending()

    return call


class Pending:
    """Work on the GPU that was begun."""

    def block_until_ready(self) -> None:
        torch.cuda.synchronize()


class Training:
    """A training by Adam; an update per call."""

    def __init__(self, model: Model, data: Data, limits: Any, batches: np.ndarray):
        self._network = _Network(model)
        self._adam = torch.optim.Adam(self._network.parameters(), lr=limits.rate)
        self._batches = list(torch.tensor(batches).cuda())
        self._x, self._test_x = (torch.tensor(x).cuda() for x in (data.x, data.test_x))
        self._labels, self._test = (
            torch.tensor(y).long().cuda() for y in (data.labels, data.test_labels)
        )
        torch.nn.functional.cross_entropy(
            self._network(self._x[:8]), self._labels[:8]
        ).backward()  # starts cuDNN
        torch.cuda.synchronize()

    def update(self, number: int) -> Any:
        at = self._batches[number]
        self._adam.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._network(self._x[at]), self._labels[at])
        loss.backward()
        self._adam.step()
        return loss

    def wait(self, value: Any) -> float:
        torch.cuda.synchronize()
        return float(value.detach())

    def accuracy(self) -> float:
        with torch.no_grad():
            return float((self._network(self._test_x).argmax(-1) == self._test).float().mean())
