"""Estimate the times of a network's layers from their arithmetic and a device's data sheet. Nothing is run."""

import dataclasses
import warnings

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
_LAUNCH = 1.4e-6  # seconds of an empty kernel, measured on an H200 (docs/benchmarks.md)
_REACHED = 2 / 3  # of a data sheet's bandwidth, measured on an H200
_EXTRA_KERNELS = 2  # per product
_FUSED = 0.5  # of the bytes that the operations of a layer would move one by one
_PASSES = 10  # over the Jacobians, in an iteration of Newton's method
_NEWTON = 100  # kernels of an iteration of Newton's method

_SWEEPS = 10, 6  # to the tolerances of `RECOMMENDED`: 5 to 14 forward, on new and trained networks


@dataclasses.dataclass(frozen=True)
class Device:
    """Numbers of a device, from its data sheet."""

    flops: float  # per second, of products in the precision that JAX uses by default for float32
    bandwidth: float  # of its memory, in bytes per second
    platform: str = "gpu"
    batch: float = 0.0  # fixed seconds of a batch of several layers


# From the vendors: dense TF32 products (bfloat16 on TPUs), HBM.
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
    """Estimate a `Machine` from the compiler's count of a layer's operations, to a factor of a few; `calibrate` measures it.

    Args:
        problem: the network. Only shapes matter, so its arrays may be traced, or be `jax.ShapeDtypeStruct`.
        device: a part of `jax.Device.device_kind`, such as "H100"; None means the device at hand.

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
    return _estimate(problem, device)[0]


def _estimate(problem: Problem, device: str | None) -> tuple[Machine, int]:
    """The machine, and the number of layers on all workers."""
    machines: list[tuple[Machine, int]] = []

    def look(arrays: dict[str, PyTree]) -> None:
        program, operands = trace(problem.replace(**arrays), (Serial(),))
        machines.append((_machine(program, operands, _device(device)), program.workers.layers))

    jax.eval_shape(look, arrays(problem))
    return machines[0]


def _machine(program: Program, arrays: Arrays, sheet: Device) -> Machine:
    bandwidth = _REACHED * sheet.bandwidth
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays.slices)
    y, shared = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays.y0, arrays.shared))
    step = program.chain(arrays).step(0)

    def taken(steps: int) -> float:
        """Seconds of a layer in a batch of ``steps``, without its launch."""
        several, stacked = (
            (step, (y, first)) if steps == 1 else (jax.vmap(step, (0, 0, None)), _stacked((y, first), steps))
        )
        counted = jax.jit(several).lower(*stacked, shared).cost_analysis() or {}
        # a step whose operations XLA does not see at least moves its state
        moved = max(_FUSED * counted.get("bytes accessed", 0.0) / steps, 2 * _tree.nbytes(y))
        return float(max(counted.get("flops", 0.0) / steps / sheet.flops, moved / bandwidth))

    launched = _LAUNCH * (1 + _EXTRA_KERNELS * cost(step, y, first, shared).depth)
    single = taken(1)
    each_of_several = taken(2) if switches(jax.make_jaxpr(step)(y, first, shared).jaxpr) else single
    sizes = np.unique([1, max(1, program.workers.layers // 16), program.workers.layers])
    at_once = tuple(int(n) for n in sizes)
    times = tuple(launched + sheet.batch * (n > 1) + n * (each_of_several if n > 1 else single) for n in at_once)
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
        overhead=launched / (launched + single),
        adding=3 * layer_bytes / bandwidth,  # two are read, one is written
        state_bytes=_tree.nbytes(y),
        kept_bytes=kept_bytes(program, arrays),
        layer_bytes=layer_bytes,
    )


def _stacked(tree: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)


def auto(problem: Problem, *, device: str | None = None) -> Pair:
    """Return the solvers of ``solver="auto"``, forward and adjoint: sweeps to a tolerance, or `Serial` if that is as fast.

    `estimate`, which has the same arguments, decides by shapes and devices. So every process that traces the network gets
    the same solvers. A warning says when they are serial. `plan` measures instead of estimating.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jnp.zeros((64, 32, 32)), jnp.zeros((8, 32)))
        >>> type(planning.auto(problem, device="H100")[0]).__name__
        'Picard'
    """
    machine, layers = _estimate(problem, device)
    workers = problem.comm.size
    serial = predict(Serial(), Serial(), layers, machine, workers=workers).seconds
    forward, adjoint = (Picard(sweeps=sweeps) for sweeps in _SWEEPS)
    parallel = predict(forward, adjoint, layers, machine, workers=workers).seconds
    if parallel < serial:
        return RECOMMENDED
    where = "one layer fills it" if machine.auto == 1 else "a layer fills it, or there are few of them"
    warnings.warn(
        f"solver='auto' is Serial() for these {layers} layers on {workers} device{'s' * (workers > 1)}: {where}, so that sweeps, "
        f"which do about {sum(_SWEEPS) // 2} times the work, are not faster. lp_jax.plan looks for solvers that are.",
        stacklevel=2,
    )
    return Serial(), Serial()


def _device(name: str | None) -> Device:
    """Return the data sheet of a device; a typical one for an unknown name."""
    name = jax.devices()[0].device_kind if name is None else name
    return next((device for kind, device in DEVICES.items() if kind.lower() in name.lower()), _UNKNOWN)
