"""Data, model and loss of a training, and a run of it."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from lp_jax import nn, planning
from lp_jax._arrays._types import PyTree
from lp_jax._solvers._solver import Solver
from lp_jax.cli._call import Options
from lp_jax.cli._cost import with_costs
from lp_jax.cli._errors import UsageError
from lp_jax.cli._launch import Launch
from lp_jax.cli._models import Pair, Site
from lp_jax.cli._problem import Settings
from lp_jax.cli._task import Task
from lp_jax.cli._workers import OneDevice, Place
from lp_jax.train import (
    Backtracking,
    Bar,
    Controller,
    Depth,
    Every,
    Info,
    Log,
    LossFn,
    StepFn,
    TrainState,
    evaluate,
    fit,
    gradient_error,
    init_state,
    make_train_step,
    nested,
    one_shot,
    residuals,
    scale_by_lbfgs,
)
from lp_jax.train._log import Row, flat, measured
from lp_jax.train._types import Batch
from lp_jax.train.contrib import mgopt

Optimizer: TypeAlias = optax.GradientTransformation


class Experiment(NamedTuple):
    """Settings made into arrays and functions."""

    settings: Settings
    task: Task
    solvers: Pair  # forward and adjoint
    place: Place  # devices of layers and examples
    model: nn.Classifier  # the network at its initial parameters
    tested: nn.Classifier  # the network in evaluation mode: no dropout, running statistics
    loss_fn: LossFn  # loss of training, on batches ``(inputs, labels)``, with a key for dropout
    test_fn: LossFn  # loss of evaluation
    params: PyTree  # the initial parameters

    def of(self, model: nn.Classifier) -> "Experiment":
        """Return the same with another network."""
        return _around(self.settings, self.task, self.solvers, self.place, model)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, on the devices that use them."""
        seed = self.settings.training.seed
        for number, batch in enumerate(self.task.batches(epoch)):
            x, labels = self.place.share(batch)
            if not self.has_dropout:
                yield x, labels
            else:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), epoch), number)
                yield x, labels, self.place.everywhere(key)

    @property
    def has_dropout(self) -> bool:
        return getattr(self.settings.model, "dropout", 0.0) > 0


def experiment(settings: Settings, task: Task, place: Place = OneDevice(), solvers: Pair | None = None) -> Experiment:
    """Build the model, with its layers on the devices that use them."""
    pair = solvers or settings.model.solvers
    model = built(settings, task, place, pair, settings.layers)
    return _around(settings, task, pair, place.holding(model), model)


def built(settings: Settings, task: Task, place: Place, solvers: Pair, layers: int) -> nn.Classifier:
    """Return the model with this number of layers."""
    rngs = nnx.Rngs(settings.training.seed)
    return settings.model.build(Site(task, layers, settings.t1, solvers, place.comm, rngs))


def _around(settings: Settings, task: Task, solvers: Pair, place: Place, model: nn.Classifier) -> Experiment:
    tested: Any = nnx.clone(model)
    tested.eval()
    loss_fn, params = task.loss(model)
    return Experiment(
        settings=settings,
        task=task,
        solvers=solvers,
        place=place,
        model=model,
        tested=tested,
        loss_fn=place.loss(loss_fn),
        test_fn=place.loss(task.loss(tested)[0]),
        params=place.everywhere(params),
    )


_PROBES = 6  # of the gradient in a run, by default
_TESTS = 20  # in a run, if each step is an epoch


class Run(NamedTuple):
    """A finished training."""

    name: str
    state: TrainState
    log: Log
    solvers: Pair
    layers: int  # of a block
    blocks: int
    examples: int  # of a step
    devices: int = 1
    seconds: float | None = None  # of this call, with compiling and measuring; None if nothing was left to train

    @property
    def rows(self) -> list[Row]:
        """Rows of the log, with work and depth in those of training."""
        others = [row for row in self.log.rows if row["kind"] != "train"]
        sizes = {"layers": self.layers, "blocks": self.blocks, "examples": self.examples}
        return others + with_costs(self.log.rows, self.solvers, **sizes)

    def summary(self) -> Row:
        test, probes, last = self.log.of("test")[-1], self.log.of("probe"), self.rows[-1]
        # the first time of each process includes its compilation
        times = [row["step_time"] for row in self.log.of("train")]
        probed = {}
        if probes and not all(solver.exact for solver in self.solvers):  # a resumed run may have had others before
            probed = {name: probes[-1][name] for name in ("gradient_error", "gradient_cosine")}
            probed["gradient_error_step"] = probes[-1]["step"]
        return {
            "steps": int(self.state.step),
            **({} if test["accuracy"] is None else {"test_accuracy": test["accuracy"]}),
            "test_loss": test["loss"],
            "time_per_step": float(np.median(times)),
            "seconds": self.seconds,
            "devices": self.devices,
            "work": last["work"],
            "depth": last["depth"],
            **probed,
        }


def _longer(solver: Solver) -> Solver:
    """Return the solver with enough iterations to show its convergence; unchanged if it has a tolerance."""
    return solver if solver.has_tolerance else planning.with_effort(solver, max(solver.iterations + 2, 4))


def train_one(
    made: Experiment,
    solvers: Pair,
    options: Options,
    folder: Path,
    console: Console,
    launch: Launch,
    method: str,
) -> Run:
    """Train with a pair of solvers, from the newest checkpoint in ``folder`` if there is one.

    All processes of ``launch`` call this together; the log of process 0 is the one in ``folder``.
    """
    name = "serial" if solvers[0].exact and method == "direct" else "layer-parallel" if method == "direct" else method
    begun = time.perf_counter()
    if launch.is_root:
        folder.mkdir(parents=True, exist_ok=True)
    log = Log(folder / "metrics.jsonl" if launch.is_root else None)
    arguments: dict[str, Any] = {
        "log": log,
        "log_every": options.log_every,
        "checkpoint_every": options.checkpoint_every,
        "meter": Bar(name, console),
        "agree": launch.agree if launch.size > 1 else None,
    }
    blocks = made.settings.model.blocks
    layers = made.settings.layers // blocks
    optimizer = optax.adam(made.settings.training.learning_rate)
    if method == "nested":
        rows = len(log.of("train"))
        steps = made.task.steps_per_epoch
        _, state, _ = depth_by_depth(
            made,
            schedule(options, made.settings),
            solvers,
            optimizer,
            measures=lambda model: _measures(made.of(model), solvers, options, steps),
            folder=folder / "checkpoints",
            config=_fingerprint(made, "nested"),
            **arguments,
        )
        seconds = time.perf_counter() - begun if len(log.of("train")) > rows else None
        examples = made.settings.training.batch_size
        return Run(name, state, log, solvers, layers, blocks, examples, made.place.devices, seconds)
    start = STARTS[method](made, solvers, options, optimizer)
    state, controller = made.place.everywhere(start.state), None
    if options.controller and not solvers[0].exact:
        controller = Controller(made.loss_fn, bound=options.controller, ranks=made.place.ranks)
        state = state._replace(control=made.place.everywhere(controller.begin(*solvers)))
    with made.place.checkpoints(folder / "checkpoints", _fingerprint(made, method)) as checkpoints:
        if checkpoints.latest is not None:
            state = checkpoints.restore(state)
            console.print(f"{name}: going on after step {int(state.step)}", markup=False, highlight=False)
        first = int(state.step)
        state, _ = fit(
            start.step_fn,
            state,
            start.batches,
            steps_per_epoch=start.steps_per_epoch,
            epochs=made.settings.training.epochs,
            solver=solvers[0],
            adjoint_solver=solvers[1],
            controller=controller,
            measures=_measures(made, solvers, options, start.steps_per_epoch),
            checkpoints=checkpoints,
            **arguments,
        )
    examples = made.settings.training.batch_size * made.task.steps_per_epoch // start.steps_per_epoch
    seconds = time.perf_counter() - begun if int(state.step) > first else None
    return Run(name, state, log, solvers, layers, blocks, examples, made.place.devices, seconds)


class Start(NamedTuple):
    """The beginning of a method, as arguments of `lp_jax.train.fit`."""

    step_fn: StepFn
    state: TrainState
    batches: Callable[[int], Iterable[Batch]]
    steps_per_epoch: int


def _direct(made: Experiment, solvers: Pair, options: Options, optimizer: Optimizer) -> Start:
    step_fn = make_train_step(made.loss_fn, optimizer, ranks=made.place.ranks)
    return Start(step_fn, init_state(made.params, optimizer), made.batches, made.task.steps_per_epoch)


def _one_shot(made: Experiment, solvers: Pair, options: Options, optimizer: Optimizer) -> Start:
    """Take all examples in each step, and L-BFGS, whose trials use the adjoint solver."""
    batch = made.place.share(jax.tree.map(lambda *parts: np.concatenate(parts), *made.task.batches(0)))
    step_fn, state = one_shot(
        made.loss_fn,
        made.params,
        optax.chain(scale_by_lbfgs(20, ranks=made.place.ranks), optax.scale(-1.0)),
        batch,
        solver=solvers[0],
        adjoint_solver=solvers[1],
        line_search=Backtracking(solver=solvers[1]),
        ranks=made.place.ranks,
    )
    return Start(step_fn, state, lambda epoch: [batch], 1)


def _mgopt(made: Experiment, solvers: Pair, options: Options, optimizer: Optimizer) -> Start:
    depths = schedule(options, made.settings)
    step_fn, state = mgopt(
        made.model,
        optimizer,
        levels=len(depths),
        factor=depths[1] // depths[0],
        loss=functools.partial(_loss, made),
        ranks=made.place.ranks,
    )
    return Start(step_fn, state, made.batches, made.task.steps_per_epoch)


STARTS: Mapping[str, Callable[..., Start]] = {"direct": _direct, "one-shot": _one_shot, "mgopt": _mgopt}


def depth_by_depth(
    made: Experiment, depths: Sequence[int], solvers: Pair, optimizer: Optimizer, **options: Any
) -> tuple[nn.Classifier, TrainState, Log]:
    """Train at each depth for the same number of epochs; ``options`` are those of `lp_jax.train.nested`."""
    settings = made.settings
    ends = [settings.training.epochs * (i + 1) // len(depths) for i in range(len(depths))]
    parts = [
        Depth(layers // settings.model.blocks, end - begin, *solvers)
        for layers, begin, end in zip(depths, [0, *ends], ends, strict=False)
    ]
    return nested(
        built(settings, made.task, made.place, solvers, depths[0]),
        optimizer,
        made.batches,
        parts,
        steps_per_epoch=made.task.steps_per_epoch,
        loss=functools.partial(_loss, made),
        ranks=made.place.ranks,
        **options,
    )


def schedule(options: Options, settings: Settings) -> list[int]:
    """Return the numbers of layers of a method's stages: those of ``--depths``, or parts of the network's."""
    parts, layers = _PARTS[options.method], settings.layers
    depths = options.depths or [layers // part for part in parts if layers % part == 0]
    factors = [deeper / depth for depth, deeper in itertools.pairwise(depths)]
    if depths[-1] != layers or not factors or not all(factor > 1 and factor.is_integer() for factor in factors):
        raise UsageError(
            f"--depths must have two numbers or more, each a multiple of the one before, and end with the {layers} layers of "
            f"the network; got {depths}."
        )
    if options.method == "mgopt" and len(set(factors)) > 1:
        raise UsageError(f"--depths of mgopt must grow by one factor, like [16, 32, 64]; got {depths}.")
    return list(depths)


def check_method(options: Options, settings: Settings) -> None:
    """Refuse a method that does not suit this network."""
    method = options.method
    if method == "one-shot" and getattr(settings.model, "dropout", 0.0) > 0:
        raise UsageError("--method one-shot needs the same network in every step; add --dropout 0.")
    if method not in _PARTS:
        if options.depths:
            raise UsageError(f"--depths goes with --method nested and mgopt; got {method}.")
        return
    if options.controller:
        raise UsageError(f"--controller goes with --method direct and one-shot; got {method}.")
    schedule(options, settings)


_PARTS = {"nested": (4, 2, 1), "mgopt": (2, 1)}
"""Methods with several depths: the default divisors of the network's number of layers."""


def _loss(made: Experiment, model: nn.Classifier) -> tuple[LossFn, PyTree]:
    of = made.of(model)
    return of.loss_fn, of.params


def _fingerprint(made: Experiment, method: str) -> dict[str, object]:
    """Return the settings in which checkpoints must agree."""
    settings = made.settings.fingerprint()
    return settings if method == "direct" else settings | {"method": method}


def _measures(made: Experiment, solvers: Pair, options: Options, steps_per_epoch: int) -> list[Every]:
    """Return the measurements during training: the test set's score, and the error of the gradient."""
    solver, adjoint_solver = solvers
    total = steps_per_epoch * made.settings.training.epochs

    def test(state: TrainState, batch: Batch) -> dict[str, object]:
        return evaluate(made.test_fn, state.params, made.task.test_batches)._asdict()

    def restarted(
        params: PyTree, operands: Batch, solver: Solver, adjoint_solver: Solver | None
    ) -> tuple[jax.Array, Info]:
        batch, restart = operands
        exact = solver.exact and (adjoint_solver is None or adjoint_solver.exact)
        return made.loss_fn(params, batch, solver, adjoint_solver, *(() if exact else restart))

    def probe(state: TrainState, batch: Batch) -> dict[str, object]:
        restart = () if state.restart is None else (state.restart,)
        error = gradient_error(
            restarted, state.params, (batch, restart), solver, adjoint_solver, ranks=made.place.ranks
        )
        solves = residuals(made.model, state.params, batch, *map(_longer, solvers), loss=made.task.measure)
        return {
            "gradient_error": error.relative,
            "gradient_cosine": error.cosine,
            **flat("gradient_error", error.groups),
            **measured("forward_residual", solves.forward.residual_norms.tolist()),
            "forward_scale": solves.forward_scale,
            **measured("adjoint_residual", solves.adjoint.residual_norms.tolist()),
            "adjoint_scale": solves.adjoint_scale,
        }

    probe_every = options.probe_every or max(1, total // _PROBES)
    every = steps_per_epoch if steps_per_epoch > 1 else max(1, total // _TESTS)
    measures = [] if solver.exact and adjoint_solver.exact else [Every("probe", probe_every, probe)]
    return [*measures, Every("test", every, test)]  # its line shows the gradient's error of the same step
