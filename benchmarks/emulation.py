"""Layers that sleep as long as an accelerator would compute, and the gradient of their weights by every method.

Programs, meshes, messages and numbers are real, only the time of a layer is not: the forward evaluation, the cotangent of the
state and the gradient of the weights each end with a callback that sleeps, in proportion to the examples that it got.
"""

import collections
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import lp_jax
from lp_jax import MGRIT, Identity, Picard, Rediscretize, Serial, planning

WIDTH, EXAMPLES, TIME = 4, 16, 2.0
"""Of the layers that are really computed; and the time that all of them span."""

KINDS = ("forward", "adjoint", "gradient")
"""Kinds of evaluations of a layer: the next state, the cotangent of the state, the gradient of the weights."""

MICROBATCHES = (2, 4, 8)

Pair = tuple[lp_jax.Solver | None, lp_jax.Solver | None]


def set_devices(count: int) -> None:
    """Let the processor be so many devices, unless XLA_FLAGS says how many it is. Before JAX looks for devices."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def accelerator(device: str, seconds: float) -> planning.Machine:
    """A machine whose layers take so many seconds for each of the three kinds, on average, in the ratio of a layer that fills it.

    So more layers at once take as many times longer, and a part of the examples that part of the time. Messages take no time
    but the host's own.
    """
    times = [getattr(planning.estimate(wide(64), device=device), kind)[0] for kind in KINDS]
    return machine([3 * seconds * time / sum(times) for time in times], name=device)


def wide(layers: int) -> lp_jax.Problem:
    """Shapes of dense layers that fill an accelerator."""
    weights = jax.ShapeDtypeStruct((layers, 8192, 8192), "float32")
    return lp_jax.Problem(_dense, weights, jax.ShapeDtypeStruct((4096, 8192), "float32"))


def machine(seconds: list[float], name: str = "given") -> planning.Machine:
    """A machine whose layers take these seconds: forward, cotangent of the state, gradient of the weights."""
    times: dict[str, Any] = {kind: (time,) for kind, time in zip(KINDS, seconds, strict=True)}
    return planning.Machine(at_once=(1,), **times, examples=EXAMPLES, name=name)


def _dense(y: jax.Array, layer: lp_jax.Layer) -> jax.Array:
    return y + layer.dt * jnp.tanh(y @ layer.params)


class Wind:
    """Sleeps in the place of accelerators, and counts evaluations of whole layers. Several threads call it."""

    def __init__(self, machine: planning.Machine):
        self.machine = machine
        self.blows = True  # else nobody sleeps: what is left is the host's own time
        self._calls: collections.deque[tuple[str, float]] = collections.deque()
        self._late = threading.local()  # seconds that a thread has slept too long so far

    def spend(self, kind: str, layers: float) -> None:
        """Stay as long as an accelerator would for so many layers; parts of the examples are parts of a layer.

        A host wakes sleepers late. What a thread has slept too long it sleeps less the next time.
        """
        end = time.perf_counter() + layers * self.machine.seconds(kind, 1)
        self._calls.append((kind, layers))
        if self.blows:
            end -= getattr(self._late, "seconds", 0.0)
            time.sleep(max(0.0, end - time.perf_counter()))
            self._late.seconds = max(0.0, time.perf_counter() - end)

    def counted(self) -> dict[str, float]:
        """Evaluations of each kind since this was last called."""
        counts = dict.fromkeys(KINDS, 0.0)
        while self._calls:
            kind, layers = self._calls.popleft()
            counts[kind] += layers
        return counts

    def layer(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """A product of states and weights that takes its time."""

        def spent(kind: str, examples: int, value: jax.Array) -> jax.Array:
            def sleep(values: Any) -> np.ndarray:
                self.spend(kind, values.size / value.size * examples / EXAMPLES)
                return np.asarray(values)

            shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
            return jax.pure_callback(sleep, shape, value, vmap_method="broadcast_all")

        @jax.custom_vjp
        def product(y: jax.Array, w: jax.Array) -> jax.Array:
            return spent("forward", len(y), y @ w)

        def forward(y: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
            return product(y, w), (y, w)

        def backward(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, w = kept
            return spent("adjoint", len(y), g @ w.T), spent("gradient", len(y), y.T @ g)

        product.defvjp(forward, backward)
        return product


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the layers live: so many devices of this process, or all ranks."""

    kind: str  # "devices" or "ranks"
    workers: int

    @functools.cached_property
    def mesh(self) -> Any:
        devices = jax.devices()[: self.workers]
        return jax.make_mesh(
            (self.workers,), ("layers",), axis_types=(AxisType.Auto,), devices=devices
        )

    def comm(self, **options: Any) -> Any:
        if self.workers == 1:
            return None
        return lp_jax.MPIComm() if self.kind == "ranks" else lp_jax.MeshComm(self.mesh, **options)

    def spread(self, weights: np.ndarray, pair: Pair = (None, None)) -> Any:
        """The layers, on the workers that hold them; on a rank those of the rank."""
        if self.workers == 1:
            return jnp.asarray(weights)
        if self.kind == "devices":
            return jax.device_put(weights, NamedSharding(self.mesh, P("layers")))
        solver, adjoint_solver = (
            Serial() if pair[0] is None else pair[0],
            pair[1],
        )
        runs = lp_jax.layer_slices(len(weights), self.workers, solver, adjoint_solver)
        return jnp.asarray(weights[runs[lp_jax.MPIComm().rank]])

    def everywhere(self, x: np.ndarray) -> Any:
        if self.kind == "ranks" or self.workers == 1:
            return jnp.asarray(x)
        return jax.device_put(x, NamedSharding(self.mesh, P()))


class Drawn(NamedTuple):
    """The network: weights of all layers, and the examples."""

    weights: np.ndarray
    x: np.ndarray


def drawn(layers: int) -> Drawn:
    rng = np.random.default_rng(0)
    weights, x = (rng.normal(size=shape) for shape in ((layers, WIDTH, WIDTH), (EXAMPLES, WIDTH)))
    return Drawn((weights / 2).astype(np.float32), x.astype(np.float32))


class Program:
    """The gradient of all weights by one method. Called, it takes as long as it would on accelerators."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        wind: Wind,
        facts: Mapping[str, Any],
    ):
        self._function, self._arguments, self._wind = jax.jit(function), arguments, wind
        self.gradient = np.asarray(jax.block_until_ready(self.awake()))
        wind.counted()
        jax.block_until_ready(self.awake())
        self.facts = {**facts, "evaluations": wind.counted()}

    def __call__(self) -> Any:
        self._wind.blows = True
        return self._function(*self._arguments)

    def awake(self) -> Any:
        """The same without sleep: what callbacks and messages take on this host."""
        self._wind.blows = False
        return self._function(*self._arguments)


def methods(layers: int, workers: int, kind: str = "devices") -> list[str]:
    """Names of the programs for so many workers; those of one are a scan, and the default."""
    if workers == 1:
        return [SCAN, DEFAULT]
    names = [RELAY, DEFAULT, "Fastest(rtol=None)"]
    names += [pipelined(m) for m in MICROBATCHES if hasattr(lp_jax, "pipeline")]
    names += [INTERVALS, *([DATA] if kind == "devices" else [])]
    few = ["identity, 2/1"] if workers > 2 or layers > 2 else []
    return [*names, *few, "sweeps, 2/1", "sweeps, 3/2", "injection, 2/1"]


SCAN, RELAY, DEFAULT = "lax.scan", "relay, Serial()", "the default"
INTERVALS, DATA = "one interval each, exact", "data parallel"


def pipelined(microbatches: int) -> str:
    return f"pipeline, {microbatches} microbatches"


def awake(name: str) -> str:
    """Name of the same program without sleep."""
    return f"{name}, awake"


def microbatches_of(name: str) -> int:
    """Their number in a pipeline; 1 for a relay, which is one, and 0 for all others."""
    if name == RELAY:
        return 1
    found = [m for m in MICROBATCHES if pipelined(m) == name]
    return found[0] if found else 0


def pair_of(name: str, layers: int, workers: int) -> Pair:
    """The solvers of a method by its name."""
    kept = functools.partial(MGRIT, storage="all")
    each = functools.partial(kept, coarsening=layers // workers, coarse_step=Identity())
    few = functools.partial(kept, levels=2, coarsening=4, coarse_step=Rediscretize())
    pairs: dict[str, Callable[[], Pair]] = {
        RELAY: lambda: (Serial(), Serial()),
        DEFAULT: lambda: (None, None),
        "Fastest(rtol=None)": lambda: (lp_jax.Fastest(rtol=None), None),
        INTERVALS: lambda: (each(iterations=workers), each(iterations=workers)),
        "identity, 2/1": lambda: (
            each(iterations=2, start="guess"),
            each(iterations=1, start="guess"),
        ),
        "sweeps, 2/1": lambda: (Picard(sweeps=2), Picard(sweeps=1)),
        "sweeps, 3/2": lambda: (Picard(sweeps=3), Picard(sweeps=2)),
        "injection, 2/1": lambda: (few(iterations=2), few(iterations=1)),
    }
    return pairs[name]()


def ideal(name: str, layers: int, machine: planning.Machine, workers: int) -> float | None:
    """Seconds by a formula, of what is no iteration; None for the others.

    A pipeline of M microbatches makes M + P - 1 turns forward and as many back, in each of which a worker evaluates its
    layers for one of them and sends a state, and then all workers form their weights' gradients at the same time. A relay
    is one with M = 1. The weights' gradients of data parallelism are summed for nothing.
    Source of the last part of a pipeline: Qi et al., "Zero bubble pipeline parallelism", arXiv 2401.10241.
    """
    if name == SCAN:
        return layers * sum(machine.per_layer)
    if name == DATA:
        return layers * sum(machine.divided(workers).per_layer)
    if m := microbatches_of(name):
        part, mine = machine.divided(m), math.ceil(layers / workers)
        sent = part.message(part.state_bytes) if workers > 1 else 0.0
        turn = mine * (part.seconds("forward", 1) + part.seconds("adjoint", 1)) + 2 * sent
        return (m + workers - 1) * turn + m * mine * part.seconds("gradient", 1)
    return None


def build(name: str, place: Place, layers: int, machine: planning.Machine) -> Program:
    """The program of a method, compiled and called, with what is known of it: prediction, ideal, evaluations."""
    wind, (weights, x) = Wind(machine), drawn(layers)
    product, dt = wind.layer(), TIME / layers

    def step(y: jax.Array, layer: lp_jax.Layer) -> jax.Array:
        return y + layer.dt * jnp.tanh(product(y, layer.params))

    def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
        body = lambda y, w: (y + dt * jnp.tanh(product(y, w)), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

    workers, best = place.workers, ideal(name, layers, machine, place.workers)
    facts: dict[str, Any] = {"name": name, "ideal_seconds": best, "takes": ""}
    microbatches = 0 if name == RELAY else microbatches_of(name)
    if name in (SCAN, DATA) or microbatches:
        facts["predicted_seconds"] = best
        held = place.everywhere(weights) if name == DATA else place.spread(weights)
        gradient: Callable[..., Any] = jax.grad(scanned)
        if name == DATA:
            gradient = _data_parallel(gradient, place.mesh)
        elif microbatches:
            mapped = lp_jax.pipeline(scanned, place.comm(), in_axes=(None, 0))
            gradient = jax.grad(
                lambda w, x: mapped(w, x.reshape(microbatches, -1, *x.shape[1:])).mean()
            )
        return Program(gradient, (held, place.everywhere(x)), wind, facts)
    pair = pair_of(name, layers, workers)
    comm = place.comm(
        **({"sequential": "relay"} if name == RELAY and place.kind == "devices" else {})
    )
    held, states = place.spread(weights, pair), place.everywhere(x)
    named = pair[0] or lp_jax.Fastest()
    if named.chooses:
        problem = lp_jax.Problem(step, held, states, t1=TIME, comm=comm)
        taken = planning.default(problem, solver=named)
        facts["takes"] = taken.solver.summary
        pair_taken: Any = taken.solver, taken.adjoint_solver
    else:
        pair_taken = pair
    facts["predicted_seconds"] = predicted(pair_taken, layers, machine, workers)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        solver, adjoint_solver = pair
        solution = lp_jax.solve(
            step, weights, x, t1=TIME, solver=solver, adjoint_solver=adjoint_solver, comm=comm
        )
        return jnp.mean(solution.y1**2)

    return Program(jax.grad(loss), (held, states), wind, facts)


def predicted(pair: Any, layers: int, machine: planning.Machine, workers: int) -> float | None:
    """The planner's seconds; None where it does not know the solver."""
    forward, adjoint = pair
    try:
        seconds = planning.predict(
            forward, adjoint or forward, layers, machine, workers=workers
        ).seconds
    except (NotImplementedError, TypeError):
        return None
    return seconds if math.isfinite(seconds) else None


def _data_parallel(gradient: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """Each device with its part of the examples and all weights; the gradients are averaged."""

    def own(weights: jax.Array, x: jax.Array) -> Any:
        return jax.lax.pmean(gradient(weights, x), "layers")

    # each device differentiates its own examples, so that nothing is differentiated through the map
    return jax.shard_map(
        own, mesh=mesh, in_specs=(P(), P("layers")), out_specs=P(), check_vma=False
    )
