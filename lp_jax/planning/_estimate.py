"""What a network's layers would take on a device, from their arithmetic and its data sheet: nothing is run."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from lp_jax import _tree
from lp_jax._picard import Picard
from lp_jax._problem import Operands, Problem, prepare
from lp_jax._serial import Serial
from lp_jax._types import PyTree, State
from lp_jax.planning._calibrate import examples_of, kept_bytes, small
from lp_jax.planning._candidates import RECOMMENDED, Pair
from lp_jax.planning._cost import predict
from lp_jax.planning._machine import Machine

_KERNELS = 3  # of the smallest layer

_SWEEPS = 10, 6  # that the tolerances of `RECOMMENDED` take: 5 to 14 forward, on networks at their start and trained


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator, by its data sheet.

    Attributes:
        flops: per second, of products in the precision that JAX uses by default for float32.
        bandwidth: of its memory, in bytes per second.
        layer: seconds of the smallest layer: its kernels, one after the other.
    """

    flops: float
    bandwidth: float
    layer: float


# Of the vendor: dense TF32 products (on TPUs bfloat16), HBM. The smallest layer is a guess: `_KERNELS` of 5 us.
DEVICES = {
    "B200": Device(1.1e15, 8.0e12, 1.5e-5),
    "H200": Device(4.9e14, 4.8e12, 1.5e-5),
    "H100": Device(4.9e14, 3.35e12, 1.5e-5),
    "A100": Device(1.56e14, 2.0e12, 1.5e-5),
    "V100": Device(1.57e13, 9.0e11, 1.5e-5),
    "TPU v4": Device(2.75e14, 1.2e12, 1.5e-5),
    "TPU v5": Device(1.97e14, 8.1e11, 1.5e-5),
}
_UNKNOWN = Device(2e13, 1e12, 1.5e-5)


def estimate(
    step: Callable[..., Any],
    params: PyTree,
    y0: State,
    *,
    device: str | None = None,
    shared: PyTree = None,
    data: PyTree = None,
    t0: float = 0.0,
    t1: Any = 1.0,
    has_aux: bool = False,
    comm: Any = None,
) -> Machine:
    """A `Machine` by the compiler's count of a layer's operations: to within a factor, where `calibrate` measures.

    Args:
        step: as for `lp_jax.solve`, like ``params``, ``y0``, ``shared``, ``data``, ``t0``, ``t1``, ``has_aux`` and ``comm``. Only
            shapes matter, so all of it may be traced, or be `jax.ShapeDtypeStruct`.
        params: leaves ``(N, ...)``.
        y0: the state that enters.
        device: part of its name in `jax.Device.device_kind`, such as "H100"; None is the one at hand.
        shared: what all layers see.
        data: leaves ``(N, ...)``.
        t0: time at which the first layer starts.
        t1: time at which the last one ends.
        has_aux: whether the step returns ``(y_next, aux)``.
        comm: where the layers live.

    Returns:
        A `Machine` without an interconnect. On a CPU layers run one after another (``looped``), and only ratios mean anything.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> machine = planning.estimate(step, jnp.zeros((64, 32, 32)), jnp.zeros((8, 32)), device="H100")
        >>> machine.seconds("forward", 64) < 1.1 * machine.seconds("forward", 1)
        True
    """
    options = {"shared": shared, "data": data, "t0": t0, "t1": t1, "has_aux": has_aux, "comm": comm}
    return _estimated(step, params, y0, options, device)[0]


def _estimated(
    step: Callable[..., Any], params: PyTree, y0: State, options: dict[str, Any], device: str | None
) -> tuple[Machine, int]:
    """The machine, and the number of layers on all workers."""
    found: list[tuple[Machine, int]] = []
    arrays = {"params": params, "y0": y0, "shared": options["shared"], "data": options["data"]}

    def trace(arrays: dict[str, Any]) -> None:
        problem, operands = prepare(step, **(options | arrays), solvers=(Serial(),))
        found.append((_machine(problem, operands, *_device(device)), problem.steps))

    jax.eval_shape(trace, arrays)
    return found[0]


def _machine(problem: Problem, operands: Operands, sheet: Device, looped: bool) -> Machine:
    common = operands.common
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), operands.slices)
    y, beside = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (common.y0, tuple(common[1:])))
    counted: Any = jax.jit(problem.step(0)).lower(y, first, beside).cost_analysis() or {}
    moved = max(
        counted.get("bytes accessed", 0.0), 2 * _tree.nbytes(y)
    )  # a step that XLA sees nothing in moves its state
    alone = max(counted.get("flops", 0.0) / sheet.flops, moved / sheet.bandwidth)
    sizes = np.unique([1, max(1, problem.steps // 16), problem.steps])
    at_once = (1,) if looped else tuple(int(n) for n in sizes)
    times = tuple(sheet.layer * (not looped) + n * alone for n in at_once)
    examples = examples_of(common.y0)
    numbers = sum(x.size for x in jax.tree.leaves(y)) // examples
    steps = 2 * math.ceil(math.log2(problem.steps + 1)) * sheet.layer / _KERNELS  # of the scan, two products in each
    composed = 2 * 2 * examples * numbers**3 / sheet.flops
    newton = tuple(
        t + steps * (not looped) + n * (numbers * alone + composed) for n, t in zip(at_once, times, strict=True)
    )
    layer_bytes = _tree.nbytes(first.params)
    return Machine(
        at_once=at_once,
        forward=times,
        linearise=times,
        adjoint=times,
        gradient=times,
        newton=newton if small(y) else None,
        looped=looped,
        examples=examples,
        overhead=0.0 if looped else sheet.layer / (sheet.layer + alone),
        adding=3 * layer_bytes / sheet.bandwidth,  # two are read, one is written
        state_bytes=_tree.nbytes(y),
        kept_bytes=kept_bytes(problem, operands),
        layer_bytes=layer_bytes,
    )


def auto(step: Callable[..., Any], params: PyTree, y0: State, *, device: str | None = None, **problem: Any) -> Pair:
    """What ``solver="auto"`` means: sweeps to a tolerance, or serial propagation where these cannot be faster.

    Decided by `estimate`, so by shapes and devices alone: the same program, whenever and in whatever process it is traced.
    Where it is serial propagation, a warning says so; `plan` measures.

    Args:
        step: as for `estimate`, like all other arguments.
        params: leaves ``(N, ...)``.
        y0: the state that enters.
        device: as for `estimate`.
        **problem: the others.

    Returns:
        The forward and the adjoint solver.

    Example:
        >>> import jax.numpy as jnp, warnings
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> solver, _ = planning.auto(step, jnp.zeros((64, 32, 32)), jnp.zeros((8, 32)), device="H100")
        >>> type(solver).__name__
        'Picard'
    """
    defaults: dict[str, Any] = {"shared": None, "data": None, "t0": 0.0, "t1": 1.0, "has_aux": False, "comm": None}
    machine, layers = _estimated(step, params, y0, defaults | problem, device)
    workers = 1 if problem.get("comm") is None else problem["comm"].size
    serial = predict(Serial(), Serial(), layers, machine, workers=workers).seconds
    forward, adjoint = (Picard(sweeps=sweeps) for sweeps in _SWEEPS)
    parallel = predict(forward, adjoint, layers, machine, workers=workers).seconds
    if parallel < serial:
        return RECOMMENDED
    where = "layers run one after another on it" if machine.looped else "a layer fills it, or there are few of them"
    warnings.warn(
        f"solver='auto' is Serial() for these {layers} layers on {workers} device{'s' * (workers > 1)}: {where}, so that sweeps, "
        f"which do about {sum(_SWEEPS) // 2} times the work, are not faster. lp_jax.plan tells what would be.",
        stacklevel=2,
    )
    return Serial(), Serial()


def _device(name: str | None) -> tuple[Device, bool]:
    """The data sheet, and whether layers run one after another there."""
    if name is None:
        here = jax.devices()[0]
        name = "cpu" if here.platform == "cpu" else here.device_kind
    known = next((device for kind, device in DEVICES.items() if kind.lower() in name.lower()), _UNKNOWN)
    return known, name.lower() == "cpu"
