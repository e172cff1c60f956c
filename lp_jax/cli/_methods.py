"""The methods of ``lp-jax train``, and a run of one of them."""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console

from lp_jax import nn, planning, train
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver
from lp_jax.cli._errors import CommandError, UsageError
from lp_jax.cli._experiment import Experiment, Run, experiment
from lp_jax.cli._launch import Launch
from lp_jax.cli._problem import Settings
from lp_jax.train._controller import gradient_error
from lp_jax.train._log import flat
from lp_jax.train._types import Batch, StepFn

_PROBES = 6  # of the gradient in a run, by default
_TESTS = 20  # in a run, if each step is an epoch


def train_one(
    made: Experiment, options: argparse.Namespace, folder: Path, console: Console, launch: Launch, method: str
) -> Run:
    """Train from the newest checkpoint in ``folder``, if there is one.

    All processes of ``launch`` call this together; the log of process 0 is the one in ``folder``.
    """
    name = ("serial" if made.solvers[0].exact else "layer-parallel") if method == "direct" else method
    begun = time.perf_counter()
    if launch.is_root:
        folder.mkdir(parents=True, exist_ok=True)
    log = train.Log(folder / "metrics.jsonl" if launch.is_root else None)
    before = log.of("train")[-1:]
    optimizer, steps = optax.adam(made.settings.training.learning_rate), made.task.steps_per_epoch
    arguments: dict[str, Any] = {
        "log": log,
        "log_every": options.log_every,
        "checkpoint_every": options.checkpoint_every,
        "meter": train.Bar(name, console),
        "agree": launch.agree if launch.size > 1 else None,
    }
    fingerprint = made.settings.fingerprint() | ({} if method == "direct" else {"method": method})
    if method == "nested":
        _, state, _ = depth_by_depth(
            made,
            schedule(options, made.settings),
            optimizer,
            measures=lambda model: _measures(dataclasses.replace(made, model=model), options, steps),
            folder=folder / "checkpoints",
            config=fingerprint,
            skip_damaged=options.skip_damaged,
            **arguments,
        )
    else:
        batches: Callable[[int], Iterable[Batch]] = made.batches
        if method == "one-shot":
            batch = made.place.share(jax.tree.map(lambda *parts: np.concatenate(parts), *made.task.batches(0)))
            batches, steps = (lambda epoch: [batch]), 1
            step_fn, state = _one_shot(made, batch)
        else:
            step_fn = train.make_train_step(made.loss_fn, optimizer, ranks=made.place.ranks)
            state = train.init_state(made.params, optimizer)
        state, controller = made.place.everywhere(state), None
        if options.controller and not made.solvers[0].exact:
            controller = train.Controller(made.loss_fn, bound=options.controller, ranks=made.place.ranks)
            state = state._replace(control=made.place.everywhere(controller.begin(*made.solvers)))
        kept: dict[str, Any] = {"skip_damaged": options.skip_damaged, "ranks": made.place.ranks}
        with train.Checkpoints(folder / "checkpoints", config=fingerprint, **kept) as checkpoints:
            if checkpoints.latest is not None:
                state = checkpoints.restore(state)
                console.print(f"{name}: going on after step {int(state.step)}")
            state, _ = train.fit(
                step_fn,
                state,
                batches,
                steps_per_epoch=steps,
                epochs=made.settings.training.epochs,
                solver=made.solvers[0],
                adjoint_solver=made.solvers[1],
                controller=controller,
                measures=_measures(made, options, steps),
                checkpoints=checkpoints,
                **arguments,
            )
    if launch.is_root and not (log.of("train") and log.of("test")):
        raise CommandError(f"{log.path} has lost the rows of this run, so it has no table; choose another --out.")
    seconds = time.perf_counter() - begun if log.of("train")[-1:] != before else None
    examples = made.settings.training.batch_size * made.task.steps_per_epoch // steps
    return Run(name, made, state, log, examples, seconds)


def _one_shot(made: Experiment, batch: Batch) -> tuple[StepFn, train.TrainState]:
    """Return a step with all examples, by L-BFGS, whose trials use the adjoint solver, and the first state."""
    solver, adjoint_solver = made.solvers
    return train.one_shot(
        made.loss_fn,
        made.params,
        optax.chain(train.scale_by_lbfgs(20, ranks=made.place.ranks), optax.scale(-1.0)),
        batch,
        solver=solver,
        adjoint_solver=adjoint_solver,
        line_search=train.Backtracking(solver=adjoint_solver),
        ranks=made.place.ranks,
    )


def depth_by_depth(
    made: Experiment, depths: Sequence[int], optimizer: optax.GradientTransformation, **options: Any
) -> tuple[nn.Classifier, train.TrainState, train.Log]:
    """Train at each depth for the same number of epochs; ``options`` are those of `lp_jax.train.nested`."""
    settings = made.settings
    ends = [settings.training.epochs * (i + 1) // len(depths) for i in range(len(depths))]
    parts = [
        train.Depth(layers, end - begin, *made.solvers)
        for layers, begin, end in zip(depths, [0, *ends], ends, strict=False)
    ]
    return train.nested(
        experiment(settings, made.task, made.place, made.solvers, depths[0]).model,
        optimizer,
        made.batches,
        parts,
        steps_per_epoch=made.task.steps_per_epoch,
        loss=made.loss,
        ranks=made.place.ranks,
        **options,
    )


def schedule(options: argparse.Namespace, settings: Settings) -> list[int]:
    """Return the numbers of layers that ``--method nested`` goes through: those of ``--depths``, or a quarter, half and all."""
    layers = settings.layers
    depths = options.depths or [layers // part for part in (4, 2, 1) if layers % part == 0]
    factors = [deeper / depth for depth, deeper in itertools.pairwise(depths)]
    if depths[-1] != layers or not factors or not all(factor > 1 and factor.is_integer() for factor in factors):
        raise UsageError(
            f"--depths must have two numbers or more, each a multiple of the one before, and end with the {layers} layers of "
            f"the network; got {depths}."
        )
    return list(depths)


def check_method(options: argparse.Namespace, settings: Settings) -> None:
    """Refuse a method that does not suit this network."""
    method = options.method
    if method == "one-shot" and settings.model.dropout > 0:
        raise UsageError("--method one-shot needs the same network in every step; add --dropout 0.")
    if options.depths and method != "nested":
        raise UsageError(f"--depths goes with --method nested; got {method}.")
    if options.controller and method == "nested":
        raise UsageError(f"--controller goes with --method direct and one-shot; got {method}.")
    if method == "nested":
        schedule(options, settings)


def _measures(made: Experiment, options: argparse.Namespace, steps_per_epoch: int) -> list[train.Every]:
    """Return the measurements during training: the test set's score, and the error of the gradient."""
    total = steps_per_epoch * made.settings.training.epochs

    def test(state: train.TrainState, batch: Batch) -> dict[str, object]:
        return train.evaluate(made.test_fn, state.params, made.task.test_batches)._asdict()

    def restarted(
        params: PyTree, operands: Batch, solver: Solver, adjoint_solver: Solver | None
    ) -> tuple[jax.Array, train.Info]:
        batch, restart = operands
        exact = solver.exact and (adjoint_solver is None or adjoint_solver.exact)
        return made.loss_fn(params, batch, solver, adjoint_solver, *(() if exact else (restart,)))

    def probe(state: train.TrainState, batch: Batch) -> dict[str, object]:
        loss_fn, operands = made.loss_fn, batch  # whose programs other measurements use, too
        if state.restart is not None:
            loss_fn, operands = restarted, (batch, state.restart)
        # with enough iterations to show the convergence
        longer = [s if s.has_tolerance else planning.with_effort(s, max(s.iterations + 2, 4)) for s in made.solvers]
        error = gradient_error(loss_fn, state.params, operands, *made.solvers, ranks=made.place.ranks)
        return {
            "gradient_error": error.relative,
            "gradient_cosine": error.cosine,
            **flat("gradient_error", error.groups),
            **made.residuals(state.params, batch, *longer),
        }

    probe_every = options.probe_every or max(1, total // _PROBES)
    every = steps_per_epoch if steps_per_epoch > 1 else max(1, total // _TESTS)
    measures = [] if made.exact else [train.Every("probe", probe_every, probe)]
    return [*measures, train.Every("test", every, test)]  # its line shows the gradient's error of the same step
