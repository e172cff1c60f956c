"""What a network's layers would take on a device, from their arithmetic and its data sheet: nothing is run."""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import processor
from lp_jax._arrays._products import cost, switches
from lp_jax._arrays._types import Arrays, PyTree
from lp_jax._problem import Problem
from lp_jax._programs._program import Program
from lp_jax._programs._traced import trace
from lp_jax._solvers._picard import Picard
from lp_jax._solvers._serial import Serial
from lp_jax.planning._candidates import RECOMMENDED, Pair
from lp_jax.planning._cost import predict
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import arrays, examples_of, kept_bytes, small

# Read off programs that XLA compiled for an H200 (benchmarks/results/h200), whose loops are graphs of kernels:
_LAUNCH = 1.4e-6  # seconds of a kernel that has nothing to do, measured on an H200 (docs/gpu.md)
_REACHED = 2 / 3  # of a data sheet's bandwidth, measured there
_BESIDE = 2  # kernels beside each product, and one more
_FUSED = 0.5  # of the bytes that the operations of a layer would move one by one
_PASSES = 10  # of an iteration of Newton's method over its Jacobians
_NEWTON = 100  # its kernels

_SWEEPS = 10, 6  # that the tolerances of `RECOMMENDED` take: 5 to 14 forward, on networks at their start and trained


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator, by its data sheet."""

    flops: float  # per second, of products in the precision that JAX uses by default for float32
    bandwidth: float  # of its memory, in bytes per second
    platform: str = "gpu"
    batch: float = 0.0  # seconds of several layers at once, beside what one takes


# Of the vendor: dense TF32 products (on TPUs bfloat16), HBM.
DEVICES = {
    "B200": Device(1.1e15, 8.0e12),
    "H200": Device(4.9e14, 4.8e12),
    "H100": Device(4.9e14, 3.35e12),
    "A100": Device(1.56e14, 2.0e12),
    "V100": Device(1.57e13, 9.0e11),
    "TPU v4": Device(2.75e14, 1.2e12),
    "TPU v5": Device(1.97e14, 8.1e11),
    "cpu": Device(1e11, 3e10, "cpu", 5e-5),  # two cores
}
_UNKNOWN = Device(2e13, 1e12)


def estimate(problem: Problem, *, device: str | None = None) -> Machine:
    """Estimate a `Machine` from the compiler's count of a layer's operations, good to a factor of a few; `calibrate` measures it.

    Args:
        problem: the network. Only shapes matter, so its arrays may be traced, or be `jax.ShapeDtypeStruct`.
        device: part of its name in `jax.Device.device_kind`, such as "H100"; None is the one at hand.

    Returns:
        A `Machine` without an interconnect. On a CPU only ratios mean anything.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jnp.zeros((64, 32, 32)), jnp.zeros((8, 32)))
        >>> machine = planning.estimate(problem, device="H100")
        >>> machine.seconds("forward", 64) < 1.1 * machine.seconds("forward", 1)
        True
    """
    return _estimated(problem, device)[0]


def _estimated(problem: Problem, device: str | None) -> tuple[Machine, int]:
    """The machine, and the number of layers on all workers."""
    found: list[tuple[Machine, int]] = []

    def look(arrays: dict[str, PyTree]) -> None:
        program, operands = trace(problem.replace(**arrays), (Serial(),))
        found.append((_machine(program, operands, _device(device)), program.workers.layers))

    jax.eval_shape(look, arrays(problem))
    return found[0]


def _machine(program: Program, arrays: Arrays, sheet: Device) -> Machine:
    bandwidth = _REACHED * sheet.bandwidth
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays.slices)
    y, beside = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays.y0, arrays.shared))
    step = program.chain(arrays).step(0)

    def taken(steps: int) -> float:
        """Seconds of a layer, of so many at once, beside its launch."""
        several, stacked = (
            (step, (y, first)) if steps == 1 else (jax.vmap(step, (0, 0, None)), _stacked((y, first), steps))
        )
        counted: Any = jax.jit(several).lower(*stacked, beside).cost_analysis() or {}
        # a step that XLA sees nothing in moves its state
        moved = max(_FUSED * counted.get("bytes accessed", 0.0) / steps, 2 * _tree.nbytes(y))
        return float(max(counted.get("flops", 0.0) / steps / sheet.flops, moved / bandwidth))

    launched = _LAUNCH * (1 + _BESIDE * cost(step, y, first, beside).depth)
    alone = taken(1)
    each_of_several = taken(2) if switches(jax.make_jaxpr(step)(y, first, beside).jaxpr) else alone
    sizes = np.unique([1, max(1, program.workers.layers // 16), program.workers.layers])
    at_once = tuple(int(n) for n in sizes)
    times = tuple(launched + sheet.batch * (n > 1) + n * (each_of_several if n > 1 else alone) for n in at_once)
    layers, examples = program.workers.layers, examples_of(arrays.y0)
    auto = processor(sheet.platform).at_once(program.footprint, layers)
    numbers = sum(x.size for x in jax.tree.leaves(y)) // examples
    solved = _PASSES * examples * 4 * numbers**2 / bandwidth + 2 * examples * numbers**3 / sheet.flops
    newton = tuple(_LAUNCH * _NEWTON + t + n * solved for n, t in zip(at_once, times, strict=True))
    layer_bytes = _tree.nbytes(first.params)
    return Machine(
        at_once=at_once,
        forward=times,
        linearise=times,
        adjoint=times,
        gradient=times,
        newton=newton if small(y) else None,
        auto=None if auto >= layers else auto,
        examples=examples,
        overhead=launched / (launched + alone),
        adding=3 * layer_bytes / bandwidth,  # two are read, one is written
        state_bytes=_tree.nbytes(y),
        kept_bytes=kept_bytes(program, arrays),
        layer_bytes=layer_bytes,
    )


def _stacked(tree: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)


def auto(problem: Problem, *, device: str | None = None) -> Pair:
    """Return the solvers of ``solver="auto"``, forward and adjoint: sweeps to a tolerance, or `Serial` if that is as fast.

    It is decided by `estimate`, which has the same arguments, so by shapes and devices: the same, whenever and in whatever
    process it is traced. Where it is serial propagation, a warning says so; `plan` measures.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jnp.zeros((64, 32, 32)), jnp.zeros((8, 32)))
        >>> type(planning.auto(problem, device="H100")[0]).__name__
        'Picard'
    """
    machine, layers = _estimated(problem, device)
    workers = problem.comm.size
    serial = predict(Serial(), Serial(), layers, machine, workers=workers).seconds
    forward, adjoint = (Picard(sweeps=sweeps) for sweeps in _SWEEPS)
    parallel = predict(forward, adjoint, layers, machine, workers=workers).seconds
    if parallel < serial:
        return RECOMMENDED
    where = "one layer fills it" if machine.auto == 1 else "a layer fills it, or there are few of them"
    warnings.warn(
        f"solver='auto' is Serial() for these {layers} layers on {workers} device{'s' * (workers > 1)}: {where}, so that sweeps, "
        f"which do about {sum(_SWEEPS) // 2} times the work, are not faster. lp_jax.plan tells what would be.",
        stacklevel=2,
    )
    return Serial(), Serial()


def _device(name: str | None) -> Device:
    """The data sheet."""
    name = jax.devices()[0].device_kind if name is None else name
    return next((device for kind, device in DEVICES.items() if kind.lower() in name.lower()), _UNKNOWN)
