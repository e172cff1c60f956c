"""The training loop. On SIGINT (Ctrl-C) and SIGTERM the step is finished first."""

import contextlib
import dataclasses
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

import jax

from lp_jax import Solver
from lp_jax._arrays import _check
from lp_jax._choice._fastest import Fastest, sweeps_to
from lp_jax._levels._result import DONE
from lp_jax._programs import _inputs
from lp_jax.train._checkpoint import Checkpoints
from lp_jax.train._controller import Controller
from lp_jax.train._divergence import DivergenceError, convergence_warning, divergence_message
from lp_jax.train._log import Log
from lp_jax.train._types import Batch, Metrics, StepFn, TrainState


class Interrupted(RuntimeError):
    """A signal stopped the training after a finished step, which is saved in the last checkpoint."""

    def __init__(self, number: int, step: int, path: str | None):
        saved = f"saved to {path}" if path else "nothing is saved without checkpoints"
        super().__init__(f"{signal.Signals(number).name}: stopped after step {step}; {saved}")
        self.signal = number
        self.step = step


@contextlib.contextmanager
def _first_signal() -> Iterator[Callable[[], int | None]]:
    """Hold back the first SIGINT or SIGTERM; yield a function that returns it. A second one acts as usual."""
    received = []
    with contextlib.ExitStack() as handlers:  # previous ones, restored on exit

        def receive(number: int, frame: FrameType | None) -> None:
            # Restoring the previous handlers at once lets a second Ctrl-C stop a step that hangs.
            received.append(number)
            handlers.close()

        # elsewhere Python allows no handlers
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers.callback(signal.signal, number, signal.signal(number, receive))
        yield lambda: received[0] if received else None


class Every(NamedTuple):
    """A measurement at the first step, at every ``steps``-th and at the last, as rows of a ``kind``: "test", "probe", ...

    ``measure(state, batch)`` gets the state after the step and its batch, and returns flat values, as in rows of a `Log`.
    """

    kind: str
    steps: int
    measure: Callable[[TrainState, Batch], Mapping[str, object]]


def fit(
    step_fn: StepFn,
    state: TrainState,
    batches: Callable[[int], Iterable[Batch]],
    *,
    steps_per_epoch: int,
    epochs: int,
    solver: Solver | None = None,
    adjoint_solver: Solver | None = None,
    controller: Controller | None = None,
    measures: Sequence[Every] = (),
    log: Log | None = None,
    log_every: int = 10,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int | None = None,
    agree: Callable[[int | None], int | None] | None = None,
) -> tuple[TrainState, Log]:
    """Train from ``state`` to the end of the last epoch; return the last state and the log.

    A run that is resumed from a checkpoint has the same numbers as one without a break, bit for bit. When residual norms grow
    over the cycles of a solve, or a tolerance is not met, a warning is logged: a row of kind "warning" with a ``message``.

    Args:
        step_fn: the training step, as `make_train_step` returns it.
        state: the first state, from `init_state` or `Checkpoints.restore`; the first step takes its arrays.
        batches: ``batches(epoch)`` gives the batches of an epoch, always the same ones in the same order.
        steps_per_epoch: number of batches of an epoch.
        epochs: number of epochs of the whole run, including those before ``state``.
        solver: solver of the forward solve, as for `make_train_step`.
        adjoint_solver: solver of the adjoint solve, as for `make_train_step`.
        controller: sets the tolerances of the solvers. Its probes are rows of kind "control". To resume a run, put
            ``controller.begin(solver, adjoint_solver)`` into the state's ``control``.
        measures: measurements at some of the steps.
        log: the log that gets the rows, and may show them; a new one if None. Rows of kind "train" have the columns step, epoch,
            accuracy (of classes), forward_residual_1, ..., step_time (seconds per step, the mean since the host last waited), and
            what `Metrics` has: loss, gradient_norm, trials, result, adjoint_result.
        log_every: number of steps after which metrics are fetched.
        checkpoints: where states are saved: at every ``checkpoint_every``-th step, at the last one, and on a signal.
        checkpoint_every: number of steps between two checkpoints; None is ``steps_per_epoch``.
        agree: for several processes that train together, `Ranks.agree` for example: ``agree(signal)`` returns one of the
            signals (or None) that they received, so that all stop at the same step, when metrics are fetched.

    Raises:
        DivergenceError: if loss, gradient or parameters are not finite; the message has advice.
        Interrupted: after SIGINT or SIGTERM, when the step is finished and saved.
        ValueError, TypeError: for arguments that cannot be, an epoch of another number of batches among them.

    Example:
        >>> import jax.numpy as jnp, lp_jax, optax
        >>> from lp_jax import train
        >>> def loss_fn(params, batch, solver, adjoint_solver):
        ...     step = lambda u, layer: u + layer.dt * layer.params * u
        ...     solution = lp_jax.solve(step, params, batch, solver=solver, adjoint_solver=adjoint_solver)
        ...     info = train.Info(jnp.int32(len(batch)), solution.stats, solution.result)
        ...     return jnp.mean((solution.y1 - 2) ** 2), info
        >>> optimizer = optax.sgd(1.0)
        >>> step_fn = train.make_train_step(loss_fn, optimizer)
        >>> state = train.init_state(jnp.zeros(8), optimizer)
        >>> size = train.Every("size", 8, lambda state, batch: {"norm": optax.tree.norm(state.params)})
        >>> options = dict(steps_per_epoch=5, epochs=4, solver=lp_jax.MGRIT(), measures=[size])
        >>> state, log = train.fit(step_fn, state, lambda epoch: [jnp.ones(4)] * 5, **options)
        >>> first, *_, last = log.of("train")
        >>> last["step"], last["loss"] < 0.1 * first["loss"], [row["step"] for row in log.of("size")]
        (20, True, [1, 8, 16, 20])
        >>> try:
        ...     train.fit(step_fn, state, lambda epoch: [jnp.full(4, jnp.nan)] * 5, steps_per_epoch=5, epochs=5)
        ... except train.DivergenceError as error:
        ...     print(str(error).partition(". ")[0])
        ... except train.Interrupted as stopped:  # by Ctrl-C or SIGTERM
        ...     print(stopped)
        stopped at step 21: 4 of the 4 numbers in batch are not finite
    """
    _inputs.solvers(optional=True, solver=solver, adjoint_solver=adjoint_solver)
    _check.integer("steps_per_epoch", steps_per_epoch, least=1)
    _check.integer("log_every", log_every, least=1)
    _check.integer("epochs", epochs, least=0)
    if not callable(batches):
        raise TypeError(
            "batches must be a function batches(epoch) that gives the batches of an epoch, for a "
            f"list `lambda epoch: list`; got {type(batches).__name__}."
        )
    log = log or Log()
    done = step = int(state.step)
    last = steps_per_epoch * epochs
    # Without checkpoints no step is a multiple.
    save_every = math.inf if checkpoints is None else checkpoint_every or steps_per_epoch

    def batch_of(step: int) -> Batch:
        epoch, number = divmod(step - 1, steps_per_epoch)
        return next(
            itertools.islice(batches(epoch), number, None), None
        )  # None: it gave the batch only once

    record = _Recorder(log, steps_per_epoch, checkpoints, batch_of)
    solvers = (solver, adjoint_solver)
    named = solver or Fastest()
    # of the default a controller sets the tolerances of sweeps, and refuses one without a tolerance
    forward, adjoint = named, named.for_adjoint()
    if named.chooses and named.rtol:
        forward, adjoint = sweeps_to(named.rtol)
    pair = forward, adjoint_solver or adjoint
    if controller is not None:
        state = state._replace(control=controller.begin(*pair)) if state.control is None else state
        solvers = controller.solvers(state.control, *pair)
    with _first_signal() as received:
        for epoch in range(done // steps_per_epoch, epochs):
            # A resumed run skips the batches that were done before its checkpoint, so it sees those that remain.
            for batch in itertools.islice(batches(epoch), step - epoch * steps_per_epoch, None):
                if controller is not None and controller.due(step):
                    record.flush(step)
                    # Metrics are fetched before the probe and the clock starts after it, so that its time is in no step's time.
                    control, decided = controller.probe(state.control, state.params, batch, *pair)
                    log.write(kind="control", step=step + 1, **decided)
                    record.restart_clock()
                    state = state._replace(control=control)
                    solvers = controller.solvers(control, *pair)
                # The call returns before the device is done. The metrics stay there, so
                # that the host runs ahead of it until it fetches.
                state, metrics = step_fn(state, batch, *solvers)
                step += 1
                record.pending.append((epoch, metrics))
                due = [m for m in measures if step in (1, last) or step % m.steps == 0]
                saves = step == last or step % save_every == 0
                # The first step of a process compiles, and is fetched on its own to keep that out of the others' times.
                fetches = due or saves or step == done + 1 or step % log_every == 0
                stop = received()
                if agree is not None:
                    # All processes fetch at the same steps, and agree there; one that stopped
                    # elsewhere would leave the others in a collective.
                    stop = agree(stop) if fetches else None
                if fetches or stop is not None:
                    record.flush(step)
                for m in due:
                    log.write(kind=m.kind, step=step, **m.measure(state, batch))
                if checkpoints is not None and (saves or stop is not None):
                    checkpoints.save(state)
                if due or saves:
                    record.restart_clock()
                if stop is not None:
                    saved = None if checkpoints is None else str(checkpoints.folder / str(step))
                    raise Interrupted(stop, step, saved)
            if step != (epoch + 1) * steps_per_epoch:
                number = step - epoch * steps_per_epoch
                raise ValueError(
                    f"batches({epoch}) gave {number} batches; steps_per_epoch is {steps_per_epoch}."
                )
    return state, log


@dataclasses.dataclass
class _Recorder:
    """Fetches metrics from the device, writes rows and warnings, and raises an error if they are not finite."""

    log: Log
    quiet: int  # number of steps during which a warning is not repeated
    checkpoints: Checkpoints | None
    batch_of: Callable[[int], Batch]

    def __post_init__(self) -> None:
        self.warned: dict[str, int] = {}  # the last step of a warning, by its solve
        # of the steps since the last flush, with their epochs
        self.pending: list[tuple[int, Metrics]] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last flush from the step times."""
        self.clock = time.perf_counter()

    def flush(self, step: int) -> None:
        """Fetch and log the metrics of the steps up to ``step``."""
        if not self.pending:
            return
        # One transfer fetches the metrics of all pending steps, and waits for the last of them.
        fetched = jax.device_get(self.pending)
        self.pending = []
        step_time = (time.perf_counter() - self.clock) / len(fetched)
        for number, (epoch, metrics) in enumerate(fetched, step - len(fetched) + 1):
            info = metrics.info
            norms = info.stats.residual_norms.tolist()
            columns = {
                "epoch": epoch,
                "loss": metrics.loss,
                "accuracy": None if info.correct is None else int(info.correct) / int(info.total),
                "gradient_norm": metrics.gradient_norm,
                # Negative norms mark iterations that were not made or not measured; NaN is kept, because it is a finding.
                **{f"forward_residual_{i}": x for i, x in enumerate(norms, 1) if not x < 0},
                "trials": metrics.trials,
                "result": info.result,
                "adjoint_result": metrics.adjoint_result,
                "step_time": step_time,
            }
            known = {name: value for name, value in columns.items() if value is not None}
            self.log.write(kind="train", step=number, **known)
            if not metrics.finite:
                said = "No checkpoint was saved before."
                saved = self.checkpoints
                if saved is not None and saved.latest is not None:
                    said = f"The last checkpoint is that of step {saved.latest}, in {saved.folder}."
                raise DivergenceError(
                    f"{divergence_message(number, metrics, self.batch_of(number))} {said}"
                )
            # The norms of the adjoint solve do not leave the gradient, so its result is all that a warning can use.
            scale, adjoint_result = float(info.scale), int(metrics.adjoint_result or DONE)
            warnings = {
                "forward": convergence_warning("forward", norms, scale, int(info.result)),
                "adjoint": convergence_warning("adjoint", (), result=adjoint_result),
            }
            if metrics.stuck:
                warnings["line search"] = (
                    f"the line search tried {metrics.trials} step lengths, and none lowers the "
                    f"loss enough; the parameters stay "
                    "as they are. Loss and gradient may not fit each other: take more iterations, "
                    "forward and adjoint. Or the training is at its end."
                )
            for solve, message in warnings.items():
                if message and number - self.warned.get(solve, -math.inf) >= self.quiet:
                    self.warned[solve] = number
                    self.log.write(kind="warning", step=number, solve=solve, message=message)
        self.restart_clock()
