"""Data, model and loss of a training, and a run of it."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from lp_jax import Serial, nn
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver
from lp_jax.cli._cost import with_costs
from lp_jax.cli._launch import check_memory
from lp_jax.cli._models import Pair
from lp_jax.cli._problem import Settings
from lp_jax.cli._task import Task
from lp_jax.cli._workers import ONE_DEVICE, Place, holding
from lp_jax.train import Log, TrainState, residuals
from lp_jax.train._controller import gradient_error
from lp_jax.train._log import Row, measured
from lp_jax.train._types import Batch, LossFn


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
    def _training(self) -> tuple[LossFn, PyTree]:
        return self.loss(self.model)

    @property
    def loss_fn(self) -> LossFn:
        """Loss of training."""
        return self._training[0]

    @property
    def params(self) -> PyTree:
        """The initial parameters."""
        return self._training[1]

    @functools.cached_property
    def test_fn(self) -> LossFn:
        """Loss of evaluation."""
        return self.loss(self.tested)[0]

    @property
    def exact(self) -> bool:
        """Whether both solvers are exact."""
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
        return float(gradient_error(self.loss_fn, params, batch, *solvers, ranks=self.place.ranks).relative)

    def residuals(self, params: PyTree, batch: Batch, *solvers: Solver) -> Row:
        """Return the residual norms of a forward and an adjoint solve, as columns of a row of kind "probe"."""
        solves = residuals(self.model, params, batch, *solvers, loss=self.task.measure)
        return {
            **measured("forward_residual", solves.forward.residual_norms.tolist()),
            "forward_scale": float(solves.forward_scale),
            **measured("adjoint_residual", solves.adjoint.residual_norms.tolist()),
            "adjoint_scale": float(solves.adjoint_scale),
        }


def described(settings: Settings, task: Task, processes: int = 1) -> str:
    """Return one line on the network, before anything is made for it; refuse one that does not fit this machine's memory.

    It needs its parameters, a gradient and the two moments of Adam, spread over ``processes``.
    """
    shapes = nnx.eval_shape(lambda: experiment(settings, task).model)
    leaves = jax.tree.leaves(nnx.state(shapes, nnx.Param))
    line = settings.describe(sum(math.prod(leaf.shape) for leaf in leaves))
    check_memory(line, 4 * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) / processes)
    return line


def experiment(
    settings: Settings, task: Task, place: Place = ONE_DEVICE, solvers: Pair | None = None, layers: int | None = None
) -> Experiment:
    """Build the model, with its layers on the devices that use them; ``layers`` replaces their number in the settings."""
    pair = solvers or settings.model.solvers
    solve = {"solver": pair[0], "adjoint_solver": pair[1], "comm": place.comm}
    rngs = nnx.Rngs(settings.training.seed)
    model = settings.model.build(task, layers or settings.layers, settings.t1, rngs, **solve)
    return Experiment(settings=settings, task=task, solvers=pair, place=holding(place, model), model=model)


SERIAL: Pair = (Serial(), Serial())


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished training."""

    name: str  # in tables and pictures
    made: Experiment
    state: TrainState  # the last one
    log: Log
    examples: int  # of a step
    seconds: float | None = None  # of this call, with compiling and measuring; None if nothing was left to train

    @property
    def rows(self) -> list[Row]:
        """Rows of the log, with work and depth in those of training."""
        others, layers = [row for row in self.log.rows if row["kind"] != "train"], self.made.settings.layers
        return others + with_costs(self.log.rows, self.made.solvers, layers=layers, examples=self.examples)

    def summary(self) -> Row:
        test, probes, last = self.log.of("test")[-1], self.log.of("probe"), self.rows[-1]
        # the first time of each process includes its compilation
        times = [row["step_time"] for row in self.log.of("train")]
        probed = {}
        if probes and not self.made.exact:  # a resumed run may have had others before
            probed = {name: probes[-1][name] for name in ("gradient_error", "gradient_cosine")}
            probed["gradient_error_step"] = probes[-1]["step"]
        return {
            "steps": int(self.state.step),
            **({} if test["accuracy"] is None else {"test_accuracy": test["accuracy"]}),
            "test_loss": test["loss"],
            "time_per_step": float(np.median(times)),
            "seconds": self.seconds,
            "devices": self.made.place.devices,
            "work": last["work"],
            "depth": last["depth"],
            **probed,
        }
