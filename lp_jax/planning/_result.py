"""A plan: the solvers compared, the recommended ones and the reason, as data and as text."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lp_jax._choice._fastest import SERIAL, Pair
from lp_jax._solvers._solver import Solver
from lp_jax.planning._compiled import Compiled
from lp_jax.planning._cost import Cost, Piped, fastest_pipeline, predict
from lp_jax.planning._machine import Machine
from lp_jax.planning._spread import comparison
from lp_jax.planning._words import align, code, milliseconds, numbered, pair

DEVICES = tuple(2**exponent for exponent in range(13))
# A solver is recommended if it is predicted this many times as fast as serial propagation; predictions err by as much.
WORTH = 1.15

_MOST = 8  # lines of a table
_UNKNOWN = 3  # iterations to a tolerance, before a probe


class Probed(NamedTuple):
    """The relative 2-norm error of the gradient that a pair of solvers gave, and the iterations that they took."""

    error: float
    iterations: int
    adjoint_iterations: int


class Choice(NamedTuple):
    """A pair of solvers, its predicted cost, and the probe if there was one, whose iterations the cost of a tolerance is for."""

    solver: Solver
    adjoint_solver: Solver
    cost: Cost
    probed: Probed | None = None

    @property
    def error(self) -> float | None:
        """Error of the gradient: 0 for serial propagation, None without a probe."""
        if self.solver.exact and self.adjoint_solver.exact:
            return 0.0
        return None if self.probed is None else self.probed.error

    def within(self, error: float) -> bool:
        """Return whether the gradient is known to have at most this error."""
        return self.error is not None and self.error <= error


class Devices(NamedTuple):
    """Seconds of a training step on a number of devices, spread in several ways; None where that is impossible."""

    devices: int
    layers: float | None  # all devices along the layers
    data: float | None  # along the examples, with serial propagation
    both: float | None  # in the best ``split``
    split: tuple[int, int]  # workers along the layers, and along the examples
    pipeline: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The solvers to use, and why, as data; printed as tables.

    Example:
        >>> from lp_jax import planning
        >>> flat = dict.fromkeys(("forward", "adjoint", "gradient"), (1e-5, 1e-5))
        >>> plan = planning.choose(64, planning.Machine(at_once=(1, 1024), **flat))
        >>> plan.best.error, plan.speedup, plan.choices[0].cost.seconds < plan.serial_seconds
        (0.0, 1.0, True)
    """

    choices: tuple[Choice, ...]  # all that were compared, fastest first
    best: Choice
    serial: Choice  # serial propagation on as many workers
    machine: Machine
    layers: int
    workers: int
    error: float  # largest error of the gradient that is allowed
    # number of solvers that are predicted faster than ``best`` but were not probed for lack of time; a solver counts once,
    # whatever the number of its tolerances
    unprobed: int
    note: str = ""
    # programs that spread the loss over ``topology``, by the way that they do, with `plan(topology=)`
    spread: Mapping[str, Compiled] = dataclasses.field(default_factory=dict)

    @property
    def solver(self) -> Solver:
        """The forward solver to use."""
        return self.best.solver

    @property
    def adjoint_solver(self) -> Solver:
        """The adjoint solver to use."""
        return self.best.adjoint_solver

    @property
    def serial_seconds(self) -> float:
        """Predicted seconds of a training step with serial propagation on one worker."""
        return predict(*SERIAL, self.layers, self.machine).seconds

    @property
    def speedup(self) -> float:
        """Predicted speedup over serial propagation on one worker."""
        return self.serial_seconds / self.best.cost.seconds

    @property
    def code(self) -> str:
        """The recommended solvers as arguments of `lp_jax.solve`, to paste."""
        forward, adjoint = (
            code(solver, prefix="lp_jax.") for solver in (self.solver, self.adjoint_solver)
        )
        return f"solver={forward}, adjoint_solver={adjoint}"

    @property
    def pipeline(self) -> Piped | None:
        """The fastest `lp_jax.pipeline` on these workers, which is exact; None on one worker."""
        if self.workers == 1:
            return None
        return fastest_pipeline(self.layers, self.machine, self.workers)

    @property
    def reason(self) -> str:
        """The reason for this recommendation, in words."""
        late = (
            f" Left out for lack of time: {numbered(self.unprobed, 'faster solver')}."
            if self.unprobed
            else ""
        )
        if not self.solver.exact:
            times = f"{self.speedup:.0f}" if self.speedup >= 10 else f"{self.speedup:.2g}"
            text = f"predicted {times} times as fast as serial propagation on one worker"
            if self.workers > 1 and self.machine.message(self.machine.state_bytes) == 0:
                text += ", message times unknown, taken as zero: plan(comm=mesh) measures them"
            return f"{text}.{late}"
        faster = [c for c in self.choices if c.cost.seconds * WORTH <= self.serial.cost.seconds]
        measured = [c for c in faster if c.error is not None]
        text = (
            f"{numbered(len(measured or faster), 'solver')} predicted faster than serial "
            "propagation"
        )
        if measured:
            return f"{text}, none with a gradient error of at most {self.error:.0e}.{late}"
        if faster:
            return late.strip() or f"{text}. Their gradient errors were not measured."
        looped = self.machine.at_once == (1,)
        why = (
            "layers run one after another"
            if looped
            else "a layer fills the device, or there are few of them"
        )
        return (
            f"No parallel solver is predicted {WORTH} times as fast as serial propagation, "
            f"because {why}.{late}"
        )

    def scaling(self, devices: Sequence[int] = DEVICES) -> list[Devices]:
        """Predict times on other numbers of devices, with the solvers that are known to be exact enough on any number."""
        # Serial propagation, over several workers a relay, is always one of them. Cycles over one interval for each worker are
        # not tried: as many as make them exact take what the relay takes, and send more messages.
        pairs = [fix_iterations(c[:2], c.probed) for c in self.choices if c.within(self.error)]

        def best(among: Sequence[Pair], workers: int, data_workers: int) -> float | None:
            """Return the seconds of the fastest pair on this many devices; None if they are too many."""
            if workers > self.layers or data_workers > self.machine.examples:
                return None
            return min(
                predict(
                    *pair, self.layers, self.machine, workers=workers, data_workers=data_workers
                ).seconds
                for pair in among
            )

        def row(count: int) -> Devices:
            splits = [(p, count // p) for p in range(1, count + 1) if count % p == 0]
            times = {split: best(pairs, *split) for split in splits}
            # Tuples compare by their first number, so this is the fastest split.
            options = [(seconds, split) for split, seconds in times.items() if seconds is not None]
            both, split = min(options, default=(None, (count, 1)))
            piped = fastest_pipeline(self.layers, self.machine, count).cost.seconds
            turns = piped if 1 < count <= self.layers else None
            return Devices(count, times[count, 1], best([SERIAL], 1, count), both, split, turns)

        return [row(count) for count in devices]

    def __str__(self) -> str:
        # The fastest of the solvers that were probed are shown, or of all if none was.
        probed = [c for c in self.choices if c.probed is not None]
        shown = (*(probed or self.choices)[:_MOST], self.best, self.serial)
        rows = []
        for c in {id(c): c for c in shown}.values():
            error = (
                "?"
                if c.error is None
                else f"{c.error:.1e}"
                if math.isfinite(c.error)
                else "diverges"
            )
            error = "exact" if c.error == 0 else error
            taken = c.probed and f"{c.probed.iterations}/{c.probed.adjoint_iterations}"
            rows.append((c.cost, error, taken or "", pair(*c[:2])))
        instead, piped = [], self.pipeline
        if piped and piped.microbatches > 1:
            rows.append((piped.cost, "exact", "", f"pipeline, {piped.microbatches} microbatches"))
            if piped.cost.seconds < self.best.cost.seconds:
                instead.append(
                    "  or, exact and faster, lp_jax.pipeline(f, comm, in_axes=...) with "
                    f"{piped.microbatches} microbatches"
                )
        table: list[tuple[str, ...]] = [
            ("ms", "speedup", "gradient error", "MB", "iterations", "solver")
        ]
        for cost, error, *others in sorted(rows, key=lambda row: row[0].seconds):
            speedup = f"{self.serial_seconds / cost.seconds:.2f}"
            size = f"{cost.bytes / 1e6:.3g}"
            table.append((milliseconds(cost.seconds), speedup, error, size, *others))
        more: list[tuple[str, ...]] = [
            ("devices", "layers", "examples", "pipeline", "both", "as", "")
        ]
        for d in self.scaling():
            if d.both is not None:
                spent = map(milliseconds, (d.layers, d.data, d.pipeline, d.both))
                more.append((f"{d.devices}", *spent, "{} x {}".format(*d.split), ""))
        name = f" of {self.machine.name}" if self.machine.name else ""
        unknown = "" if self.machine.latency else "; message times unknown, taken as zero"
        lines = [
            f"{self.layers} layers on {numbered(self.workers, 'worker')}{name}, gradient error at "
            f"most {self.error:.0e}",
            "",
            *align(table),
            "",
            f"Use {self.code}",
            *(f"  {note}" for note in (self.reason, self.note) if note),
            *instead,
            "",
            f"ms of a training step on more devices, spread along{unknown}",
            *map(str.rstrip, align(more)),
            *(
                ["", "A loss and its gradient, compiled", *comparison(self.spread)]
                if self.spread
                else []
            ),
        ]
        return "\n".join(lines)

    __repr__ = __str__


def fix_iterations(solvers: Pair, probed: Probed | None) -> Pair:
    """Return the solvers with the probed numbers of iterations instead of tolerances; with three if there was no probe."""
    taken = (_UNKNOWN, _UNKNOWN) if probed is None else probed[1:]
    forward, adjoint = (
        solver.with_effort(max(1, iterations)) if solver.has_tolerance else solver
        for solver, iterations in zip(solvers, taken, strict=True)
    )
    return forward, adjoint
