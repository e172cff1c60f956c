"""Problems of `lp-jax train`, for the suites that train: the one module here that knows the command line's own."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.networks import SERIAL
from lp_jax.cli._experiment import Experiment, experiment
from lp_jax.cli._settings import prepare
from lp_jax.train import init_state, make_train_step


def load(problem: str, model: str, path: Path, *, seed: int, **options: Any) -> Experiment:
    """Load a problem with its settings on the command line, apart from ``options``."""
    return experiment(*prepare(problem, {"model": model, "data": path, "seed": seed} | options))


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, the numbers of exact training steps after which it is looked at, and the number of examples."""

    name: str
    problem: str
    model: str
    steps: tuple[int, ...]
    data: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    examples: int | None = None


_GUM = "gum/en_gum-ud-train.conllu.gz"
_ENCODER = {"layers": 32, "width": 32, "t1": 1.0}
_DECODER = {"layers": 16, "width": 64, "t1": 16.0, "batch_size": 16}
_GRU = {"name": "BasicMotions"}

NETWORKS = [
    *(Network(f"digits, dense, T = {t1}", "digits", "dense", (0, 840), options={"t1": t1}) for t1 in (1.0, 4.0, 16.0)),
    Network("peaks, dense, T = 5", "peaks", "dense", (5000,)),
    Network("MNIST, convolutions, T = 1", "mnist", "conv", (0, 400), "mnist10k", {"width": 4}, 10),
    Network("GUM, encoder, T = 1", "gum", "transformer", (0, 200), "gum", _ENCODER),
    Network("text, decoder, h = 1", "text", "transformer", (0, 200, 1200), _GUM, _DECODER, 4),
    Network("BasicMotions, implicit GRU", "timeseries", "gru", (0, 240), "ucr", _GRU),
]


def trained(made: Experiment, steps: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Numbers of training steps, and the parameters after them."""
    optimizer = optax.adam(made.settings.training.learning_rate)
    step_fn = make_train_step(made.loss_fn, optimizer)
    state = init_state(made.params, optimizer)
    batches = itertools.chain.from_iterable(map(made.batches, itertools.count()))
    for wanted in steps:
        for batch in itertools.islice(batches, wanted - int(state.step)):
            state, _ = step_fn(state, batch, *SERIAL)
        yield wanted, jax.tree.map(jnp.copy, state.params)
