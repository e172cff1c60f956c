"""``lp-jax train``: from options to results, by one of three methods."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console

from lp_jax import Solver, nn, planning, train
from lp_jax._arrays._types import PyTree
from lp_jax.cli import _options, _report as report
from lp_jax.cli._errors import CommandError, UsageError
from lp_jax.cli._experiment import SERIAL, Experiment, Run, described, experiment
from lp_jax.cli._launch import Launch, launched
from lp_jax.cli._menu import PROBLEMS as HELP, description
from lp_jax.cli._plan import make_plan
from lp_jax.cli._problems import PROBLEMS, Settings, prepare
from lp_jax.cli._workers import spread, workers
from lp_jax.nn._export import first_difference
from lp_jax.planning._words import code
from lp_jax.train._controller import gradient_error
from lp_jax.train._log import measured
from lp_jax.train._types import Batch


def run(name: str, args: Sequence[str]) -> None:
    args = list(_options.spelled_out(args))
    look = _options.first_look(args, f"lp-jax train {name}")
    with launched(look, ["train", name, *args]) as processes, contextlib.ExitStack() as stack:
        problem = PROBLEMS[name]
        folder = look.out
        console = report.plain_console(stderr=True, quiet=not processes.is_root)
        earlier = processes.once(lambda: report.stored_run(folder, name)) if look.resume else None
        stored = (
            {}
            if earlier is None
            else _options.overridden(earlier["options"], look, problem.sources)
        )
        kind = problem.kind(look.model or stored.get("model"))
        if earlier is not None and kind != earlier["fingerprint"]["model"]:
            raise _another_model(folder, earlier["fingerprint"], {"model": kind})
        parser = _options.parser_of(
            f"lp-jax train {name}", problem, kind, description(HELP[name], problem.examples)
        )
        _options.add_training(parser, problem.models[kind], name)
        options, kept = _options.parse(parser, problem, args, stored)
        pair = _options.solvers(options, problem.models[kind])
        if not options.no_pictures:
            import_module(
                "lp_jax.viz"
            )  # which takes half a second; it fails now rather than after the training
        made_here = earlier is None and processes.once(lambda: report.new_run(folder))
        processes.once(lambda: stack.enter_context(report.locked(folder, console.print)))
        if earlier is None and processes.is_root:
            stack.callback(report.drop_if_not_begun, folder, made_here)
        settings, task = prepare(name, vars(options))
        depths_of(options, settings)
        if earlier is not None and first_difference(earlier["fingerprint"], settings.fingerprint()):
            raise _another_model(folder, earlier["fingerprint"], settings.fingerprint())
        sizes = spread(options, settings)
        console.print(
            "\n".join(filter(None, (described(settings, task, processes.size), task.about)))
        )
        if options.solver == "auto":
            if processes.size > 1:
                why = "--solver auto measures, and each process could choose another solver"
                raise UsageError(f"{why}; pass the solver that lp-jax plan recommends.")
            plan = make_plan(settings, task, workers=min(sizes.get("layers", 1), settings.layers))
            console.print(f"auto: {plan.reason}")
            pair = plan.solver, plan.adjoint_solver
        texts = {"solver": repr(pair[0]), "adjoint_solver": repr(pair[1])}
        mine = json.loads(
            json.dumps(settings.flat() | texts, default=str)
        )  # as another process receives it
        if difference := first_difference(processes.once(lambda: mine), mine):
            raise CommandError(f"this process was started otherwise than the first: {difference}.")
        made = experiment(
            settings, task, workers(options, sizes, settings.layers, processes.size, pair), pair
        )
        if earlier is not None and any(earlier[which] != text for which, text in texts.items()):
            console.print(f"the solver changes, from {earlier['solver']}")
        if processes.is_root:
            elsewhere = (
                _options.OF_THIS_CALL
                if processes.size == 1
                else (*_options.OF_THIS_CALL, "devices", "mesh")
            )
            kept = {option: value for option, value in kept.items() if option not in elsewhere}
            stored = {
                "problem": name,
                "options": kept,
                "fingerprint": settings.fingerprint(),
                **texts,
            }
            report.write_json(folder / report.CONFIG, stored)
        for line in filter(
            None, (made.place.about, f"forward: {code(pair[0])}", f"adjoint: {code(pair[1])}")
        ):
            console.print(line)
        report.show(_runs(made, options, console, processes), options, console, processes.is_root)


def _another_model(
    folder: Path, there: Mapping[str, object], here: Mapping[str, object]
) -> CommandError:
    difference = first_difference(
        {name: value for name, value in there.items() if name in here}, here
    )
    return CommandError(
        f"the run in {folder} is of another model: {difference}; choose another --out."
    )


def _runs(
    made: Experiment, options: argparse.Namespace, console: Console, processes: Launch
) -> list[Run]:
    """Train with the solvers and then, to compare, serially on one device."""
    folder = options.out
    again = f"lp-jax train {made.settings.problem}"
    trained = [(made, folder, options.method)]
    if not (made.solvers[0].exact and options.method == "direct") and not options.no_compare:
        path = folder / "serial"
        if processes.size == 1:
            trained.append((experiment(made.settings, made.task, solvers=SERIAL), path, "direct"))
        else:
            console.print(
                f"to compare, in one process: {again} --serial --out {shlex.quote(str(path))}"
            )
    try:
        return [
            train_one(one, options, path, console, processes, method)
            for one, path, method in trained
        ]
    except train.Interrupted as interruption:
        console.print(
            f"lp-jax: {interruption}; go on with: {again} --out {shlex.quote(str(folder))} --resume"
        )
        raise SystemExit(128 + interruption.signal) from None


def train_one(
    made: Experiment,
    options: argparse.Namespace,
    folder: Path,
    console: Console,
    launch: Launch,
    method: str,
) -> Run:
    """Train from the newest checkpoint in ``folder``, if there is one. All processes of ``launch`` call this together."""
    name = (
        ("serial" if made.solvers[0].exact else "layer-parallel") if method == "direct" else method
    )
    begun = time.perf_counter()
    if launch.is_root:
        folder.mkdir(parents=True, exist_ok=True)
    log = train.Log(folder / "metrics.jsonl" if launch.is_root else None)
    before = log.of("train")[-1:]
    optimizer = optax.adam(made.settings.training.learning_rate)
    steps = made.task.steps_per_epoch
    arguments = {
        "log": log,
        "log_every": options.log_every,
        "checkpoint_every": options.checkpoint_every,
        "meter": train.Bar(name, console),
        "agree": launch.agree if launch.size > 1 else None,
    }
    fingerprint = made.settings.fingerprint() | ({} if method == "direct" else {"method": method})
    kept = {"config": fingerprint, "skip_damaged": options.skip_damaged}
    solver, adjoint_solver = made.solvers
    if method == "nested":
        _, state, _ = depth_by_depth(
            made,
            depths_of(options, made.settings),
            optimizer,
            measures=lambda model: _measures(
                dataclasses.replace(made, model=model), options, steps
            ),
            folder=folder / "checkpoints",
            **kept,
            **arguments,
        )
    else:
        batches: Callable[[int], Iterable[Batch]] = made.batches
        if method == "one-shot":
            batch = made.place.share(
                jax.tree.map(lambda *parts: np.concatenate(parts), *made.task.batches(0))
            )
            batches, steps = (lambda epoch: [batch]), 1
            step_fn, state = train.one_shot(
                made.loss_fn,
                made.params,
                optax.chain(train.scale_by_lbfgs(20, ranks=made.place.ranks), optax.scale(-1.0)),
                batch,
                solver=solver,
                adjoint_solver=adjoint_solver,
                line_search=train.Backtracking(solver=adjoint_solver),
                ranks=made.place.ranks,
            )
        else:
            step_fn = train.make_train_step(made.loss_fn, optimizer, ranks=made.place.ranks)
            state = train.init_state(made.params, optimizer)
        state = made.place.everywhere(state)
        controller = None
        if options.controller and not solver.exact:
            controller = train.Controller(
                made.loss_fn, bound=options.controller, ranks=made.place.ranks
            )
            state = state._replace(
                control=made.place.everywhere(controller.begin(solver, adjoint_solver))
            )
        with train.Checkpoints(
            folder / "checkpoints", ranks=made.place.ranks, **kept
        ) as checkpoints:
            if checkpoints.latest is not None:
                state = checkpoints.restore(state)
                console.print(f"{name}: going on after step {int(state.step)}")
            log.rewind(int(state.step))
            state, _ = train.fit(
                step_fn,
                state,
                batches,
                steps_per_epoch=steps,
                epochs=made.settings.training.epochs,
                solver=solver,
                adjoint_solver=adjoint_solver,
                controller=controller,
                measures=_measures(made, options, steps),
                checkpoints=checkpoints,
                **arguments,
            )
    if launch.is_root and not (log.of("train") and log.of("test")):
        raise CommandError(
            f"{log.path} has lost the rows of this run, so it has no table; choose another --out."
        )
    seconds = time.perf_counter() - begun if log.of("train")[-1:] != before else None
    examples = made.settings.training.batch_size * made.task.steps_per_epoch // steps
    return Run(name, made, state, log, examples, seconds)


def depth_by_depth(
    made: Experiment, depths: Sequence[int], optimizer: optax.GradientTransformation, **options: Any
) -> tuple[nn.Classifier, train.TrainState, train.Log]:
    """Train at each depth for the same number of epochs; ``options`` are those of `lp_jax.train.nested`."""
    settings = made.settings
    ends = [settings.training.epochs * i // len(depths) for i in range(len(depths) + 1)]
    parts = [
        train.Depth(layers, end - begin, *made.solvers)
        for layers, (begin, end) in zip(depths, itertools.pairwise(ends), strict=True)
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


def depths_of(options: argparse.Namespace, settings: Settings) -> list[int]:
    """Return the numbers of layers that ``--method nested`` goes through; refuse a method that does not suit this network."""
    method = options.method
    layers = settings.layers
    if method == "one-shot" and settings.model.dropout > 0:
        raise UsageError("--method one-shot needs the same network in every step; add --dropout 0.")
    if options.depths and method != "nested":
        raise UsageError(f"--depths goes with --method nested; got {method}.")
    if options.controller and method == "nested":
        raise UsageError(f"--controller goes with --method direct and one-shot; got {method}.")
    depths = list(options.depths or [layers // part for part in (4, 2, 1) if layers % part == 0])
    factors = [deeper / depth for depth, deeper in itertools.pairwise(depths)]
    wrong = (
        depths[-1] != layers
        or not factors
        or not all(factor > 1 and factor.is_integer() for factor in factors)
    )
    if method == "nested" and wrong:
        raise UsageError(
            f"--depths must have two numbers or more, each a multiple of the one before, and end with the {layers} layers of "
            f"the network; got {depths}."
        )
    return depths


def _measures(
    made: Experiment, options: argparse.Namespace, steps_per_epoch: int
) -> list[train.Every]:
    """Return the measurements during training: the test set's score, and the error of the gradient."""
    total = steps_per_epoch * made.settings.training.epochs
    test_fn = made.loss(made.tested)[0]

    def test(state: train.TrainState, batch: Batch) -> dict[str, object]:
        return train.evaluate(test_fn, state.params, made.task.test_batches)._asdict()

    def restarted(
        params: PyTree, operands: Batch, *solvers: Solver | None
    ) -> tuple[jax.Array, train.Info]:
        batch, restart = operands
        exact = all(solver is None or solver.exact for solver in solvers)
        return made.loss_fn(params, batch, *solvers, *(() if exact else (restart,)))

    def probe(state: train.TrainState, batch: Batch) -> dict[str, object]:
        loss_fn, operands = made.loss_fn, batch  # whose programs other measurements use, too
        if state.restart is not None:
            loss_fn = restarted
            operands = (batch, state.restart)
        # with enough iterations to show the convergence
        longer = [
            s if s.has_tolerance else planning.with_effort(s, max(s.iterations + 2, 4))
            for s in made.solvers
        ]
        error = gradient_error(
            loss_fn, state.params, operands, *made.solvers, ranks=made.place.ranks
        )
        solves = train.residuals(made.model, state.params, batch, *longer, loss=made.task.measure)
        return {
            "gradient_error": error.relative,
            "gradient_cosine": error.cosine,
            **{f"gradient_error_{name}": part for name, part in error.groups.items()},
            **measured("forward_residual", solves.forward.residual_norms.tolist()),
            "forward_scale": float(solves.forward_scale),
            **measured("adjoint_residual", solves.adjoint.residual_norms.tolist()),
            "adjoint_scale": float(solves.adjoint_scale),
        }

    probe_every = options.probe_every or max(1, total // 6)
    every = steps_per_epoch if steps_per_epoch > 1 else max(1, total // 20)
    measures = [] if made.exact else [train.Every("probe", probe_every, probe)]
    return [
        *measures,
        train.Every("test", every, test),
    ]  # its line shows the gradient's error of the same step
