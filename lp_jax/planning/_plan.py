"""Which solver for a network on a machine: the fastest one whose gradient is as exact as asked for."""

import dataclasses
import functools
import math
import re
import time as clock
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lp_jax import _tree
from lp_jax._serial import Serial
from lp_jax._solve import solve_vjp
from lp_jax._solver import Solver
from lp_jax._types import PyTree, State
from lp_jax.planning._calibrate import calibrate, small
from lp_jax.planning._candidates import Pair, cycles, exact_cycles, newton, sweeps
from lp_jax.planning._cost import Time, pipeline, predict
from lp_jax.planning._machine import Machine
from lp_jax.planning._memory import Memory, memory
from lp_jax.planning._text import WORTH, code, table
from lp_jax.planning._wires import Wires

SERIAL = (Serial(), Serial())
DEVICES = tuple(2**exponent for exponent in range(13))


class Probed(NamedTuple):
    """What a gradient by a pair of solvers was.

    Attributes:
        error: its distance from the exact one, relative, in the 2-norm.
        iterations: that the forward solve took.
        adjoint_iterations: that the adjoint solve took.
    """

    error: float
    iterations: int
    adjoint_iterations: int


Probe = Callable[[Solver, Solver], Probed]


class Choice(NamedTuple):
    """A pair of solvers, and what is known of it.

    Attributes:
        solver: of the forward solve.
        adjoint_solver: of the adjoint solve.
        time: predicted, of a training step; with a tolerance for as many iterations as the probe took.
        memory: predicted, of a worker.
        probed: what its gradient was, if it was taken.
    """

    solver: Solver
    adjoint_solver: Solver
    time: Time
    memory: Memory
    probed: Probed | None = None

    @property
    def error(self) -> float | None:
        """Of the gradient: 0 for serial propagation, None if nobody looked."""
        if self.solver.exact and self.adjoint_solver.exact:
            return 0.0
        return None if self.probed is None else self.probed.error


class Devices(NamedTuple):
    """Seconds of a training step on a number of devices; None where something cannot use so many.

    Attributes:
        devices: how many.
        layers: all of them along the layers, with the fastest solver that is exact enough.
        data: all along the examples, serial propagation.
        both: the best division between the two.
        split: that division: workers along the layers, and along the examples.
        pipeline: microbatches following each other along the layers.
    """

    devices: int
    layers: float | None
    data: float | None
    both: float | None
    split: tuple[int, int]
    pipeline: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to use, and why. ``print(plan)`` shows it.

    Attributes:
        choices: all solvers that were looked at, fastest first.
        best: the one to use.
        serial: serial propagation on as many workers: one after the other.
        machine: what layers take.
        layers: number of layers.
        workers: number of workers that they are spread over.
        error: largest error of the gradient that was asked for.
        unprobed: how many would be faster than ``best``, if their gradient is exact enough, which nobody looked at.
    """

    choices: tuple[Choice, ...]
    best: Choice
    serial: Choice
    machine: Machine
    layers: int
    workers: int
    error: float
    unprobed: int

    @property
    def solver(self) -> Solver:
        """Of the forward solve."""
        return self.best.solver

    @property
    def adjoint_solver(self) -> Solver:
        """Of the adjoint solve."""
        return self.best.adjoint_solver

    @property
    def alone(self) -> float:
        """Seconds of a training step with serial propagation on one worker, as predicted."""
        return predict(*SERIAL, self.layers, self.machine).seconds

    @property
    def speedup(self) -> float:
        """Of a training step over that, as predicted."""
        return self.alone / self.best.time.seconds

    @property
    def code(self) -> str:
        """The recommendation, to be pasted."""
        names = re.compile(r"\b(?=[A-Z]\w*\()")  # of classes, where they are called
        return names.sub("lp_jax.", f"solver={code(self.solver)}, adjoint_solver={code(self.adjoint_solver)}")

    def exact_enough(self) -> list[Choice]:
        """Those whose gradient is known to be as exact as asked for."""
        return [choice for choice in self.choices if choice.error is not None and choice.error <= self.error]

    def scaling(self, devices: Sequence[int] = DEVICES) -> list[Devices]:
        """Predicted times on other numbers of devices, with the solvers that were seen to be exact enough.

        Their gradient does not depend on the number of workers. One that needs no look is that of as many cycles as there are
        intervals, one interval per worker: it is exact.

        Args:
            devices: how many.
        """
        pairs = [_counted((c.solver, c.adjoint_solver), c.probed) for c in self.exact_enough()]
        return [self._on(count, pairs) for count in devices]

    def _on(self, devices: int, pairs: Sequence[Pair]) -> Devices:
        @functools.cache
        def best(workers: int, data_workers: int) -> float | None:
            if workers > self.layers or data_workers > self.machine.examples:
                return None
            known = [*pairs, *exact_cycles(self.layers, workers)]
            spent = (predict(*p, self.layers, self.machine, workers=workers, data_workers=data_workers) for p in known)
            return min(t.seconds for t in spent)

        data = None
        if devices <= self.machine.examples:
            data = predict(*SERIAL, self.layers, self.machine, data_workers=devices).seconds
        splits = [(p, devices // p) for p in range(1, devices + 1) if devices % p == 0]
        options = [(seconds, split) for split in splits if (seconds := best(*split)) is not None]
        both, split = min(options, default=(None, (devices, 1)))
        piped = None
        if 1 < devices <= self.layers:
            parts = [2**k for k in range(self.machine.examples.bit_length())]
            piped = min(pipeline(self.layers, self.machine, devices, part) for part in parts)
        return Devices(devices, best(devices, 1), data, both, split, piped)

    def __str__(self) -> str:
        return table(self)


def plan(
    step: Callable[..., Any],
    params: PyTree,
    y0: State,
    *,
    cotangent: State | None = None,
    error: float = 1e-2,
    workers: int = 1,
    machine: Machine | None = None,
    wires: Wires | None = None,
    seconds: float = 10.0,
    shared: PyTree = None,
    data: PyTree = None,
    t0: float = 0.0,
    t1: Any = 1.0,
    has_aux: bool = False,
    comm: Any = None,
    fewer: Mapping[str, Any] | None = None,
) -> Plan:
    """Recommend solvers: calibrate, predict times, probe gradients in their order until one is exact enough.

    Args:
        step: as for `lp_jax.solve`, like ``params``, ``y0``, ``shared``, ``data``, ``t0``, ``t1`` and ``has_aux``.
        params: leaves ``(N, ...)``.
        y0: a typical state: times and errors are those of this batch.
        cotangent: of the last state, as a loss gives it; None is that state itself, as a sum of squares gives it.
        error: largest relative error of the gradient, in the 2-norm.
        workers: number of workers that the layers will be spread over; all runs here on one.
        machine: what layers take; None measures it (`calibrate`).
        wires: what messages take, by `planning.wires`; None leaves that to ``machine``.
        seconds: after so many no further gradient is compiled; what was not looked at is told.
        shared: what all layers see.
        data: leaves ``(N, ...)``.
        t0: time at which the first layer starts.
        t1: time at which the last one ends.
        has_aux: whether the step returns ``(y_next, aux)``.
        comm: None: where the layers will live is what ``workers`` says.
        fewer: as for `calibrate`.

    Returns:
        The `Plan`; serial propagation where nothing that is exact enough is predicted to be faster by 15 %.

    Raises:
        ValueError: for an error that is not positive, for more workers than layers, for a ``comm``.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> flat = dict.fromkeys(("forward", "linearise", "adjoint", "gradient"), (1e-5, 1e-5))
        >>> gpu = planning.Machine(layers=(1, 1024), **flat)  # that a layer does not fill
        >>> plan = planning.plan(step, jnp.ones((64, 4, 4)) / 8, jnp.ones((2, 4)), machine=gpu)
        >>> plan.solver
        Picard(sweeps=32, windows=1, rtol=0.01, atol=None, around='start', storage='all')
    """
    if comm is not None:
        raise ValueError("plan got a comm; it works on one device. Pass comm=None, and workers=P for the prediction.")
    problem = {"shared": shared, "data": data, "t0": t0, "t1": t1, "has_aux": has_aux}
    if machine is None:
        worth = small(y0) and jax.default_backend() != "cpu"  # Newton's method is depth for much work
        machine = calibrate(step, params, y0, fewer=fewer, newton=worth, **problem)
    if wires is not None:
        machine = dataclasses.replace(machine, **wires._asdict())
    probe = _probe(step, params, y0, cotangent, problem)
    return choose(_tree.leading((params, data)), machine, error=error, workers=workers, probe=probe, seconds=seconds)


def choose(
    layers: int,
    machine: Machine,
    *,
    error: float = 1e-2,
    workers: int = 1,
    probe: Probe | None = None,
    seconds: float = 10.0,
) -> Plan:
    """`plan` for a network of which no more is known than what its layers take.

    Args:
        layers: number of layers.
        machine: what they take.
        error: as for `plan`.
        workers: as for `plan`.
        probe: ``probe(solver, adjoint_solver)`` tells what a gradient by them is; without one nothing but serial
            propagation is known to be exact enough, and the others are in the order of their times.
        seconds: as for `plan`.

    Raises:
        ValueError: as for `plan`.
    """
    _refuse(layers, workers, error)

    def choice(pair: Pair, probed: Probed | None = None) -> Choice:
        spent = predict(*_counted(pair, probed), layers, machine, workers=workers)
        return Choice(*pair, spent, memory(pair[0], layers, machine, workers=workers), probed)

    serial = choice(SERIAL)
    limit, end = serial.time.seconds / WORTH, clock.monotonic() + seconds
    found = [serial]
    families = [(sweeps(), True), (newton() if machine.newton is not None else [], False)]
    for family, scales in families:  # sweeps may be what more devices are for, even where they cannot win here
        swept = [choice(pair) for pair in family]
        if probe is not None and (scales or any(c.time.seconds < limit for c in swept)):
            for number, pair in enumerate(family):  # loosest tolerance first; one program for all
                swept[number] = choice(pair, probe(*pair))
                reached = swept[number].error
                if reached is None or not math.isfinite(reached) or (reached <= error and clock.monotonic() > end):
                    break
        found += swept
    limit = min([limit, *(c.time.seconds for c in found if c.error is not None and c.error <= error)])
    unprobed = 0
    for candidate in sorted(map(choice, cycles(layers, workers)), key=lambda c: c.time.seconds):
        if probe is not None and candidate.time.seconds < limit:
            if clock.monotonic() > end:
                unprobed += 1
            else:
                candidate = choice(candidate[:2], probe(candidate.solver, candidate.adjoint_solver))
                if candidate.error is not None and candidate.error <= error:
                    limit = candidate.time.seconds
        found.append(candidate)
    found.sort(key=lambda c: c.time.seconds)
    best = next(c for c in found if c.error is not None and c.error <= error)
    best = best if best.time.seconds * WORTH <= serial.time.seconds else serial
    return Plan(tuple(found), best, serial, machine, layers, workers, error, unprobed)


def _counted(pair: Pair, probed: Probed | None) -> Pair:
    """The solvers with as many iterations as were taken where a tolerance ends them; few, if nobody looked."""
    _, *taken = Probed(0.0, _UNKNOWN, _UNKNOWN) if probed is None else probed

    forward, adjoint = (
        solver.with_effort(max(1, count)) if solver.has_tolerance else solver
        for solver, count in zip(pair, taken, strict=True)
    )
    return forward, adjoint


_UNKNOWN = 3


def _refuse(layers: int, workers: int, error: float) -> None:
    if layers < 1:
        raise ValueError(f"layers must be at least 1; got {layers}.")
    if not 1 <= workers <= layers:
        raise ValueError(
            f"workers must be from 1 to the number of layers, {layers}, so that each has one; got {workers}."
        )
    if not error > 0:
        raise ValueError(f"error must be a positive number, like 1e-2; got {error}.")


def _probe(step: Callable[..., Any], params: PyTree, y0: State, cotangent: State | None, problem: Mapping) -> Probe:
    """Of the gradient by all parameters and shared values of a network."""
    static = {name: problem[name] for name in ("t0", "t1", "has_aux")}
    arrays = {"params": params, "y0": y0, "shared": problem["shared"], "data": problem["data"]}
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None  # it runs a few times only

    @functools.partial(jax.jit, compiler_options=fast)
    def gradient(arrays: dict[str, Any], cotangent: State | None, solver: Solver, adjoint_solver: Solver) -> Any:
        solution, pullback = solve_vjp(step, **arrays, **static, solver=solver, adjoint_solver=adjoint_solver)
        found, stats = pullback(solution.y1 if cotangent is None else cotangent)
        leaves = [x for x in jax.tree.leaves((found.params, found.shared)) if x.dtype != jax.dtypes.float0]
        return leaves, solution.stats.iterations, stats.iterations

    @jax.jit
    def distance(found: list[jax.Array], exact: list[jax.Array]) -> jax.Array:
        apart = sum(jnp.sum(jnp.abs(a - b) ** 2) for a, b in zip(found, exact, strict=True))
        return jnp.sqrt(apart / sum(jnp.sum(jnp.abs(b) ** 2) for b in exact))

    exact: list[list[jax.Array]] = []

    def probe(solver: Solver, adjoint_solver: Solver) -> Probed:
        if not exact:
            exact.append(gradient(arrays, cotangent, *SERIAL)[0])
        found, iterations, adjoint_iterations = gradient(arrays, cotangent, solver, adjoint_solver)
        return Probed(float(distance(found, exact[0])), int(iterations), int(adjoint_iterations))

    return probe
