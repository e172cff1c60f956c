"""Data, model and loss of a training, and a run of it."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lp_jax import Serial, Solver, nn, planning
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._default import SERIAL as SERIAL
from lp_jax.cli._launch import check_memory
from lp_jax.cli._models import Pair, Task
from lp_jax.cli._problems import Settings
from lp_jax.cli._workers import ONE_DEVICE, Place, rank_grid
from lp_jax.planning._schedule import count
from lp_jax.train import Log, TrainState
from lp_jax.train._controller import gradient_error
from lp_jax.train._log import Row, unflat
from lp_jax.train._types import Batch, LossFn

_training_step = functools.lru_cache(maxsize=1024)(planning.training_step)
_count = functools.lru_cache(maxsize=1024)(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A network for a task, with its solvers, on its devices."""

    settings: Settings
    task: Task
    solvers: Pair
    place: Place
    model: nn.Classifier  # at its initial parameters

    @functools.cached_property
    def tested(self) -> nn.Classifier:
        """The network in evaluation mode: no dropout, running statistics."""
        tested: Any = nnx.clone(self.model)
        tested.eval()
        return tested

    def loss(self, model: nn.Classifier) -> tuple[LossFn, PyTree]:
        """Return the loss of a network, on batches ``(inputs, labels)`` with a key for dropout, and its parameters."""
        loss_fn, params = self.task.loss(model)
        return self.place.loss(loss_fn), self.place.everywhere(params)

    @functools.cached_property
    def loss_fn(self) -> LossFn:
        return self.loss(self.model)[0]

    @functools.cached_property
    def params(self) -> PyTree:
        """The initial parameters."""
        return self.loss(self.model)[1]

    @property
    def exact(self) -> bool:
        return all(solver.exact for solver in self.solvers)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, on the devices that use them."""
        seed = self.settings.training.seed
        for number, batch in enumerate(self.task.batches(epoch)):
            x, labels = self.place.share(batch)
            if self.settings.model.dropout == 0:
                yield x, labels
            else:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), epoch), number)
                yield x, labels, self.place.everywhere(key)

    def gradient_error(self, params: PyTree, batch: Batch, *solvers: Solver) -> float:
        """Return the relative error of the gradient with these solvers."""
        return float(
            gradient_error(self.loss_fn, params, batch, *solvers, ranks=self.place.ranks).relative
        )


def described(settings: Settings, task: Task, processes: int = 1) -> str:
    """Return one line on the network, before anything is made for it; refuse one that does not fit this machine's memory."""
    shapes = nnx.eval_shape(lambda: experiment(settings, task).model)
    leaves = jax.tree.leaves(nnx.state(shapes, nnx.Param))
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    model = settings.model
    line = (
        f"{settings.sources.get('name', settings.problem)}: {settings.kind}, {settings.layers} {model.layer_name}, "
        f"{model.width} wide, {count:,} parameters, t1 = {settings.t1:g} ({model.about()})"
    )
    # parameters, a gradient and the two moments of Adam
    check_memory(
        line, 4 * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / processes
    )
    return line


def experiment(
    settings: Settings,
    task: Task,
    place: Place = ONE_DEVICE,
    solvers: Pair | None = None,
    layers: int | None = None,
) -> Experiment:
    """Build the model, with its layers on the devices that use them; ``layers`` replaces their number in the settings."""
    pair = solvers or settings.model.solvers
    model = settings.model.build(
        task,
        layers or settings.layers,
        nnx.Rngs(settings.training.seed),
        t1=settings.t1,
        solver=pair[0],
        adjoint_solver=pair[1],
        comm=place.comm,
    )
    # ranks ask for the paths of the parameters that are spread over them
    if place.ranks is not None:
        spread = [
            "/".join(map(str, (*path, "layers")))
            for path, part in nnx.iter_modules(model)
            if isinstance(part, nn.LayerParallel) and part.comm.splits and part.weights is None
        ]
        place = rank_grid(dataclasses.replace(place.ranks, trunk=tuple(spread)))
    return Experiment(settings=settings, task=task, solvers=pair, place=place, model=model)


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished training."""

    name: str  # in tables and pictures
    made: Experiment
    state: TrainState  # the last one
    log: Log
    examples: int  # of a step
    # of this call, with compiling and measuring; None if nothing was left to train
    seconds: float | None = None

    @property
    def rows(self) -> list[Row]:
        """Rows of the log, with work and depth in those of training."""
        others = [row for row in self.log.rows if row["kind"] != "train"]
        layers = self.made.settings.layers
        return others + with_costs(
            self.log.rows, self.made.solvers, layers=layers, examples=self.examples
        )

    def summary(self) -> Row:
        test = self.log.of("test")[-1]
        probes = self.log.of("probe")
        last = self.rows[-1]
        summary = {
            "steps": int(self.state.step),
            **({} if test["accuracy"] is None else {"test_accuracy": test["accuracy"]}),
            "test_loss": test["loss"],
            # the first time of each process includes its compilation
            "time_per_step": float(np.median([row["step_time"] for row in self.log.of("train")])),
            "seconds": self.seconds,
            "devices": self.made.place.devices,
            "work": last["work"],
            "depth": last["depth"],
        }
        if probes and not self.made.exact:  # a resumed run may have had others before
            summary |= {name: probes[-1][name] for name in ("gradient_error", "gradient_cosine")}
            summary["gradient_error_step"] = probes[-1]["step"]
        return summary


def with_costs(rows: Sequence[Row], solvers: Pair, *, layers: int, examples: int) -> list[Row]:
    """Return the rows of training with work and depth up to there, without probes.

    Tolerances count as the iterations that they took: forward those of each row, adjoint those of the last probe. A row without
    iterations was a serial step of a controller.
    """
    probed = next((unflat("adjoint_residual", row) for row in rows if row["kind"] == "probe"), [])
    found = []
    work = 0.0
    depth = 0.0
    for row in rows:
        if row["kind"] == "depth":
            layers = row["layers"]
        elif row["kind"] == "probe":
            probed = unflat("adjoint_residual", row)
        elif row["kind"] == "train":
            forward, adjoint = solvers
            taken = len(unflat("forward_residual", row))
            if forward.has_tolerance and not taken:
                forward = adjoint = Serial()
            if forward.has_tolerance:
                forward = planning.with_effort(forward, taken)
            if adjoint.has_tolerance and probed:
                adjoint = planning.with_effort(adjoint, len(probed))
            gradient = _training_step(forward, adjoint, layers)
            trials = row.get("trials", 0)
            trial = _count(
                adjoint, layers
            )  # of a line search: a forward solve with the adjoint's iterations
            work += float(examples * (gradient.work() + trials * trial.work()))
            depth += float(gradient.depth() + trials * trial.depth())
            found.append({**row, "work": work, "depth": depth})
    return found
