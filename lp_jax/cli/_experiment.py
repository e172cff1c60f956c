"""What is trained: data, model, loss; and one training of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from lp_jax import nn
from lp_jax._solver import Solver
from lp_jax._types import PyTree
from lp_jax.cli._launch import Launch
from lp_jax.cli._models import Pair, Site
from lp_jax.cli._problem import Settings
from lp_jax.cli._task import Task
from lp_jax.cli._workers import OneDevice, Place
from lp_jax.train import (
    Bar,
    Batch,
    Controller,
    Every,
    Log,
    LossFn,
    TrainState,
    classification,
    evaluate,
    fit,
    flat,
    gradient_error,
    init_state,
    make_train_step,
    measured,
    residuals,
)


class Experiment(NamedTuple):
    """Settings made into arrays and functions."""

    settings: Settings
    task: Task
    solvers: Pair  # forward and adjoint
    model: nn.Classifier  # the network at its initial parameters
    tested: nn.Classifier  # the network in evaluation mode: no dropout, running statistics
    loss_fn: LossFn  # loss of training, on batches ``(inputs, labels)``, with a key where there is dropout
    test_fn: LossFn  # loss of evaluation
    params: PyTree  # the initial parameters
    batches: Callable[[int], Iterable[Any]]  # batches of training, by epoch
    place: Place  # where all this lives


def experiment(settings: Settings, task: Task, place: Place = OneDevice(), solvers: Pair | None = None) -> Experiment:
    """Build the model, its layers where they will be used."""
    pair, rngs = solvers or settings.model.solvers, nnx.Rngs(settings.training.seed)
    model = settings.model.build(Site(task, settings.layers, settings.t1, pair, place.comm, rngs))
    place = place.holding(model)
    loss_fn, params = classification(model)
    tested: Any = nnx.clone(model)
    tested.eval()
    test_fn, _ = classification(tested)

    dropout = getattr(settings.model, "dropout", 0.0)

    def batches(epoch: int) -> Iterator[Any]:
        for number, batch in enumerate(task.batches(epoch)):
            x, labels = place.share(batch)
            if not dropout:
                yield x, labels
            else:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(settings.training.seed), epoch), number)
                yield x, labels, place.everywhere(key)

    return Experiment(
        settings=settings,
        solvers=pair,
        task=task,
        model=model,
        tested=tested,
        loss_fn=place.loss(loss_fn),
        test_fn=place.loss(test_fn),
        params=place.everywhere(params),
        batches=batches,
        place=place,
    )


_PROBES = 6  # of the gradient in a run, if not said otherwise


class Run(NamedTuple):
    """A finished training."""

    name: str
    state: TrainState
    log: Log

    def summary(self) -> dict[str, Any]:
        test, probes = self.log.of("test")[-1], self.log.of("probe")
        # the first time of each process holds its compilation
        times = [row["step_time"] for row in self.log.of("train")]
        probed = {name: probes[-1][name] for name in ("gradient_error", "gradient_cosine")} if probes else {}
        return {
            "steps": int(self.state.step),
            "test_accuracy": test["accuracy"],
            "test_loss": test["loss"],
            "time_per_step": float(np.median(times)),
            **probed,
        }


def _longer(solver: Solver) -> Solver:
    """Return the solver with enough iterations to see how fast they converge; unchanged where a tolerance ends them."""
    return solver if solver.has_tolerance else solver.with_effort(max(solver.iterations + 2, 4))


def train_one(
    made: Experiment, solvers: Pair, options: Mapping[str, Any], folder: Path, console: Console, launch: Launch
) -> Run:
    """Train with a pair of solvers, from the newest checkpoint in ``folder`` if there is one.

    All processes of ``launch`` call this together; the log of process 0 is the one in ``folder``.
    """
    solver, adjoint_solver = solvers
    name = "serial" if solver.exact else "layer-parallel"
    training, place = made.settings.training, made.place
    optimizer = optax.adam(training.learning_rate)
    state = place.everywhere(init_state(made.params, optimizer))
    total = made.task.steps_per_epoch * training.epochs
    controller = None
    if options["controller"] and not solver.exact:
        controller = Controller(made.loss_fn, bound=options["controller"], global_sums=place.whole)
        state = state._replace(control=place.everywhere(controller.begin(solver, adjoint_solver)))

    def test(state: TrainState, batch: Batch) -> dict[str, Any]:
        return evaluate(made.test_fn, state.params, made.task.test_batches)._asdict()

    def probe(state: TrainState, batch: Batch) -> dict[str, Any]:
        error = gradient_error(made.loss_fn, state.params, batch, solver, adjoint_solver, global_sums=place.whole)
        solves = residuals(made.model, state.params, batch, *map(_longer, solvers))
        return {
            "gradient_error": error.relative,
            "gradient_cosine": error.cosine,
            **flat("gradient_error", error.groups),
            **measured("forward_residual", solves.forward.residual_norms.tolist()),
            "forward_scale": solves.forward_scale,
            **measured("adjoint_residual", solves.adjoint.residual_norms.tolist()),
            "adjoint_scale": solves.adjoint_scale,
        }

    measures = [Every("test", made.task.steps_per_epoch, test)]
    if not (solver.exact and adjoint_solver.exact):
        measures.append(Every("probe", options["probe_every"] or max(1, total // _PROBES), probe))
    if launch.is_root:
        folder.mkdir(parents=True, exist_ok=True)
    with place.checkpoints(folder / "checkpoints", made.settings.fingerprint()) as checkpoints:
        if checkpoints.latest is not None:
            state = checkpoints.restore(state)
            console.print(f"{name}: going on after step {int(state.step)}", markup=False, highlight=False)
        state, log = fit(
            make_train_step(made.loss_fn, optimizer, global_sums=place.whole),
            state,
            made.batches,
            steps_per_epoch=made.task.steps_per_epoch,
            epochs=training.epochs,
            solver=solver,
            adjoint_solver=adjoint_solver,
            controller=controller,
            measures=measures,
            log=Log(folder / "metrics.jsonl" if launch.is_root else None),
            log_every=options["log_every"],
            checkpoints=checkpoints,
            checkpoint_every=options["checkpoint_every"],
            meter=Bar(name, console),
            agree=launch.agree if launch.size > 1 else None,
        )
    return Run(name, state, log)
