"""``lp-jax train``: from options to results."""

import argparse
import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from lp_jax._arrays._types import PyTree
from lp_jax.cli import _options
from lp_jax.cli import _report as report
from lp_jax.cli._errors import CommandError, UsageError
from lp_jax.cli._experiment import SERIAL, Experiment, Run, described, experiment
from lp_jax.cli._launch import Launch, launched
from lp_jax.cli._menu import description
from lp_jax.cli._methods import check_method, train_one
from lp_jax.cli._models import Pair
from lp_jax.cli._plan import make_plan
from lp_jax.cli._problem import Settings
from lp_jax.cli._settings import find, prepare
from lp_jax.cli._task import Task
from lp_jax.cli._workers import spread, workers
from lp_jax.nn._export import first_difference
from lp_jax.planning._words import code
from lp_jax.train import Interrupted, predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CLASSES = 100  # of a legible picture


def run(name: str, args: Sequence[str]) -> None:
    args = list(_options.spelled_out(args))
    look = _options.first_look(args, f"lp-jax train {name}")
    with launched(look, ["train", name, *args]) as processes, contextlib.ExitStack() as stack:
        _train(name, args, look, processes, stack)


def _train(
    name: str, args: Sequence[str], look: argparse.Namespace, processes: Launch, stack: contextlib.ExitStack
) -> None:
    problem, folder, console = find(name), look.out, report.plain_console(stderr=True, quiet=not processes.is_root)
    earlier = processes.once(lambda: report.stored_run(folder, name)) if look.resume else None
    stored = None if earlier is None else _options.overridden(earlier["options"], look)
    kind = problem.kind(look.model or (stored or {}).get("model"))
    if earlier is not None and kind != earlier["fingerprint"]["model"]:
        raise _another_model(folder, earlier["fingerprint"], {"model": kind})
    _options.check_trusted(stored or {}, look, problem.sources)
    parser = _options.parser_of(f"lp-jax train {name}", problem, kind, description(problem.about, problem.examples))
    _options.add_training(parser, problem.models[kind], name)
    options, kept = _options.parse(parser, problem, args, stored)
    pair = _options.solvers(options, problem.models[kind])
    if not options.no_pictures:
        import_module("lp_jax.viz")  # which takes half a second; it fails now rather than after the training
    if earlier is None:
        processes.once(lambda: report.new_run(folder))
    processes.once(lambda: stack.enter_context(report.locked(folder, console.print)))
    if earlier is None and processes.is_root:
        stack.callback(report.drop_if_not_begun, folder)
    settings, task = prepare(name, vars(options))
    check_method(options, settings)
    if earlier is not None and first_difference(earlier["fingerprint"], settings.fingerprint()):
        raise _another_model(folder, earlier["fingerprint"], settings.fingerprint())
    sizes = spread(options, settings)
    console.print("\n".join(filter(None, (described(settings, task, processes.size), task.about))))
    if options.solver == "auto":
        pair = _recommended(settings, task, sizes, console, processes)
    texts = {"solver": repr(pair[0]), "adjoint_solver": repr(pair[1])}
    mine = json.loads(json.dumps(settings.flat() | texts, default=str))  # as another process receives it
    if difference := first_difference(processes.once(lambda: mine), mine):
        raise CommandError(f"this process was started otherwise than the first: {difference}.")
    made = experiment(settings, task, workers(options, sizes, settings.layers, processes.size, pair), pair)
    if earlier is not None and any(earlier[which] != text for which, text in texts.items()):
        console.print(f"the solver changes, from {earlier['solver']}")
    if processes.is_root:
        elsewhere = _options.OF_THIS_CALL if processes.size == 1 else (*_options.OF_THIS_CALL, "devices", "mesh")
        kept = {option: value for option, value in kept.items() if option not in elsewhere}
        report.write_json(
            folder / report.CONFIG, {"problem": name, "options": kept, "fingerprint": settings.fingerprint(), **texts}
        )
    for line in (made.place.about, f"forward: {code(pair[0])}", f"adjoint: {code(pair[1])}"):
        if line:
            console.print(line)
    _show(_runs(made, options, console, processes), options, console, processes.is_root)


def _another_model(folder: Path, there: Mapping[str, object], here: Mapping[str, object]) -> CommandError:
    difference = first_difference({name: value for name, value in there.items() if name in here}, here)
    return CommandError(f"the run in {folder} is of another model: {difference}; choose another --out.")


def _runs(made: Experiment, options: argparse.Namespace, console: Console, processes: Launch) -> list[Run]:
    """Train with the solvers and then, to compare, serially on one device."""
    folder, problem = options.out, made.settings.problem
    trained = [(made, folder, options.method)]
    if not (made.solvers[0].exact and options.method == "direct") and not options.no_compare:
        path = folder / "serial"
        if processes.size == 1:
            trained.append((experiment(made.settings, made.task, solvers=SERIAL), path, "direct"))
        else:
            again = f"lp-jax train {problem} --serial --out {shlex.quote(str(path))}"
            console.print(f"to compare, in one process: {again}")
    try:
        return [train_one(one, options, path, console, processes, method) for one, path, method in trained]
    except Interrupted as interruption:
        again = f"lp-jax train {problem} --out {shlex.quote(str(folder))} --resume"
        console.print(f"lp-jax: {interruption}; go on with: {again}")
        raise SystemExit(128 + interruption.signal) from None


def _recommended(settings: Settings, task: Task, sizes: Mapping[str, int], console: Console, processes: Launch) -> Pair:
    if processes.size > 1:
        raise UsageError(
            "--solver auto measures, and each process could choose another solver; pass the solver that lp-jax plan recommends."
        )
    plan = make_plan(settings, task, console, workers=min(sizes.get("layers", 1), settings.layers))
    console.print(f"auto: {plan.reason}")
    return plan.solver, plan.adjoint_solver


def _show(runs: Sequence[Run], options: argparse.Namespace, console: Console, is_root: bool) -> None:
    """Show table, summary and pictures. All processes measure; the first one shows."""
    folder, made, params = options.out, runs[0].made, runs[0].state.params
    figures, samples, errors = {}, None, None
    if made.task.samples is not None:
        with console.status("a few answers, to read"):
            samples = made.task.samples(lambda x: np.array(predict(made.tested, params, x)))
    if not options.no_pictures:
        answers = _answers(made, params)
        if not made.exact:
            with console.status("for a picture, other solvers are compiled and their gradients measured"):
                errors = report.gradient_errors(made, params)
    if not is_root:
        return
    report.write_json(folder / "summary.json", report.summary(runs))
    if not options.no_pictures:
        figures = report.pictures(runs, errors) | answers
    names = ["metrics.jsonl", "summary.json", "config.json", "checkpoints", *report.save(folder, figures)]
    if samples is not None:
        (folder / "samples.txt").write_text(samples + "\n", encoding="utf-8")
        names.append("samples.txt")
    out = report.plain_console()
    out.print(report.table(runs), soft_wrap=False)
    for remark in report.remarks(runs):
        out.print(remark)
    if samples is not None:
        out.print(f"\n{samples}\n")
    out.print(f"In {folder}: {', '.join(names)}")


def _answers(made: Experiment, params: PyTree) -> "dict[str, Figure]":
    """Return the picture of the network's answers on the test set, by file name."""
    from sklearn import metrics  # here: it takes a second to import

    from lp_jax import viz

    task = made.task
    if task.unscaled is None and task.outputs > _MOST_CLASSES:
        return {}
    pairs = [(y, np.asarray(predict(made.tested, params, x))) for x, y in task.test_batches]
    truth, answers = (np.concatenate(column) for column in zip(*pairs, strict=True))
    if task.unscaled is not None:
        return {"predictions.png": viz.predictions(task.unscaled(truth), task.unscaled(answers))}
    matrix = metrics.confusion_matrix(truth.ravel(), answers.argmax(axis=-1).ravel(), labels=np.arange(task.outputs))
    return {"confusion.png": viz.confusion(matrix, task.names)}
