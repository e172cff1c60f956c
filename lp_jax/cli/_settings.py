"""What makes a run what it is."""

import dataclasses
from typing import Any

from lp_jax.cli._catalog import MODELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes a run what it is, the solvers apart. Two runs of equal settings take the same batches.

    Attributes:
        problem: one of the catalog.
        data: folder or file of the data, None for what needs none.
        name: of the data set in that folder, where there are several.
        model: one of the catalog.
        layers: number of layers, or of steps of the sequence.
        width: size of the state, of it at each position, or number of channels.
        stride: of the opening convolution.
        t1: time at which the last layer ends.
        heads: of attention.
        buffers: serial layers before and after those that are solved in parallel, each.
        dropout: rate.
        units: recurrent units on top of each other.
        epochs: number of epochs.
        batch_size: examples per step.
        learning_rate: of Adam.
        seed: of the split, the initial parameters and the order of the batches.
    """

    problem: str
    data: str | None
    name: str | None
    model: str
    layers: int
    width: int
    stride: int
    t1: float
    heads: int
    buffers: int
    dropout: float
    units: int
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int

    @property
    def blocks(self) -> int:
        """Number of solves that the layers are cut into."""
        return 4 if self.model == "pooled" else 1

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree in; the length of a run and its learning rate may change on the way."""
        free = ("data", "epochs", "learning_rate")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}

    def describe(self, count: int) -> str:
        """One line on what is trained, a network of ``count`` parameters."""
        what = "steps" if self.model == "gru" else "layers"
        problem = self.problem if self.name is None else self.name
        return (
            f"{problem}: {self.model}, {self.layers} {what}, {self.width} wide, {count:,} parameters, t1 = {self.t1:g} "
            f"({MODELS[self.model]})"
        )
