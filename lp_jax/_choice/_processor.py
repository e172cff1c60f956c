"""Devices: their numbers, and all choices of programs that depend on them."""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable

import jax

from lp_jax._arrays import _tree
from lp_jax._arrays._jaxpr import walk
from lp_jax._arrays._types import PyTree
from lp_jax._choice._footprint import Footprint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """Numbers of a device: its times in seconds, and the numbers by which programs for it are chosen."""

    flops: float  # a second, of products in the precision that JAX uses by default for float32
    bandwidth: float  # bytes a second of its memory
    cache_bytes: float = 0.0  # of parameters that stay in a cache between two sweeps
    cache_bandwidth: float = math.inf  # bytes a second of this cache
    kernel: float  # to start a kernel in a loop over layers
    row_kernel: float  # the same for products of one row
    operation: float = 0.0  # more for each operation of a layer, where they are seldom fused
    convolves: bool = False  # whether convolutions are as fast as products are
    backward: float  # kernels of a layer's gradient, relative to those of its evaluation
    launch: float  # to start a kernel that evaluates several layers
    # more for each kernel of a layer in a batch, where products have a few rows
    few_rows: float = 0.0
    latency: float  # of a message to another worker
    launches: bool = True  # whether each turn of a loop is launched anew: few long turns are cheap
    # whether one layer leaves most of it idle: layers at once, and gradients apart from cotangents, then cost little
    wide: bool = True
    # of layers whose serial propagation is unrolled where turns are not launched: most bytes, most kernels; and the time of
    # their kernels then on one worker, relative to `kernel`
    unroll_bytes: float = 2**13
    unroll_kernels: float = 4
    unrolled: float = 1.0
    # A sweep adds increments up and measures their change. This takes `sum_kernels` kernels each time that the number of
    # layers doubles, and `sum_passes` passes over the states. States of up to `cached_states` bytes stay in the cache.
    sum_kernels: float = 0.0
    sum_passes: float = 0.0
    cached_states: float = 0.0
    # In a relay, `of_weights` is the part of a gradient's kernels that form the weights' gradients, on all workers at once.
    # Each worker takes part in the turns of all and selects its own result, which takes `turn_kernels` kernels for each kernel
    # of a layer in a turn, and `turn_passes` passes over its states.
    of_weights: float = 0.5
    # Most of a relay's time that another pair may be predicted to take. Measured times differ from predictions by up to a
    # factor of two; the cycles of a compiler differ by less.
    relay_gain: float = 0.55
    turn_kernels: float = 0.0
    turn_passes: float = 0.0
    link: float = math.inf  # bytes a second to the next worker, if fewer than of the memory
    # most terms of a weight's gradient that is a sum of outer products: `with_few_terms`
    outer_terms: int = 0
    chain_flops: float = math.inf  # in the time of one turn of a loop
    # a step in a kernel for elementwise steps; None where there is no such kernel
    kernel_step: float | None = None

    def at_once(self, layer: Footprint, steps: int) -> int:
        """Return how many of ``steps`` layers are evaluated at once."""
        if not layer.counted:
            return 1
        each = max(1, layer.operands + 2 * layer.working)  # working memory is written and read
        if self.wide or steps * each <= _MOST_BYTES or layer.flops < layer.operands:
            return max(steps, 1)
        return max(1, min(steps, _CHUNK_BYTES // each))

    def one(self, layer: Footprint, *, steps: int, bandwidth: float | None = None) -> float:
        """Return the seconds of a layer's arithmetic, one of ``steps`` layers, without the start of its kernels.

        ``bandwidth`` is that of its states, by default the memory's.
        """
        cached = steps * layer.operands <= self.cache_bytes
        read = layer.operands / (self.cache_bandwidth if cached else self.bandwidth)
        products = layer.convolved if self.convolves else 0.0
        moved = _BYTES * (layer.numbers - products) / (bandwidth or self.bandwidth)
        return max((layer.flops + 2 * products) / self.flops, read + moved)

    def swept(self, layer: Footprint, steps: int) -> float:
        """Return the bytes a second of the states in a sweep over ``steps`` layers."""
        cached = steps * layer.working <= self.cached_states
        return self.cache_bandwidth if cached else self.bandwidth

    def serial(self, layer: Footprint, steps: int, workers: int = 1) -> tuple[float, float]:
        """Return the seconds of serial propagation through ``steps`` layers: forward, and the further seconds of the gradient.

        Over several ``workers`` it is a relay, without its messages.
        """
        each = self.row_kernel if layer.one_row else self.kernel
        each = each * layer.kernels + self.operation * layer.operations
        each *= self.unrolled if workers == 1 and self.serial_unroll(layer) > 1 else 1.0
        started = each if layer.flops >= _UNROLL_FLOPS or self.wide else 0.0
        one = self.one(layer, steps=steps)
        # Cotangents go from worker to worker, and gradients of weights may then be formed by all workers at once.
        idle = (1 - 1 / workers) if self.two_passes(layer) else 0.0
        back = self.backward * started * (1 - self.of_weights * idle) + one * (2 - idle)
        return steps * (started + one), steps * back

    def two_passes(self, layer: Footprint) -> bool:
        """Return whether a relay forms gradients apart from cotangents. On a CPU products of few rows or flops are not worth it.

        Layers whose cost is not known, such as those with callbacks, may be as dear as any.
        """
        worth = not layer.few and layer.flops >= _APART_FLOPS
        return self.wide or worth or not layer.counted

    def batch(self, layer: Footprint, steps: int) -> float:
        """Return the seconds of one sweep over ``steps`` layers: an evaluation of each, and a sum of their increments."""
        starts = (layer.kernels + OF_A_SUM) * math.ceil(steps / self.at_once(layer, steps))
        one = layer.branches * self.one(layer, steps=steps, bandwidth=self.swept(layer, steps))
        one += self.few_rows * layer.few * layer.kernels
        return self.launch * starts + steps * one

    def newton(self, steps: int, matrices: int, numbers: int) -> float:
        """Return the seconds of an iteration of Newton's method, without its evaluations of the layers.

        Each of the ``steps`` layers has ``matrices`` Jacobians of ``numbers`` columns.
        """
        one = matrices * (_PASSES * 4 * numbers**2 / self.bandwidth + 2 * numbers**3 / self.flops)
        return self.launch * _OF_NEWTON + steps * one

    def serial_unroll(self, layer: Footprint) -> int:
        """Return the number of turns of serial propagation to unroll."""
        if self.launches:
            return _SOME
        fused = layer.few or (layer.one_row and self.row_kernel < self.kernel)
        fits = layer.operands + layer.working <= self.unroll_bytes
        fits &= layer.counted and not fused and layer.kernels <= self.unroll_kernels
        return _SOME if fits and layer.flops >= _UNROLL_FLOPS else 1

    def contracts(self, layer: Footprint) -> bool:
        """Return whether gradients of shared weights are formed by one product after the loop.

        In unrolled turns they are not, because XLA fuses the products of JAX's own derivative there.
        """
        return self.wide and (self.launches or self.serial_unroll(layer) == 1)

    def multiplies(self, flops: float) -> bool:
        """Return whether to solve a chain of linear maps by products of maps, not map after map; ``flops`` are a product's."""
        return self.wide or (isinstance(flops, int | float) and flops <= self.chain_flops)

    def loop_unroll(self, count: int, body: Callable[..., PyTree], *arguments: PyTree) -> int:
        """Return how many of a loop's ``count`` turns to unroll; fewer where turns are large and take long to compile."""
        if not self.launches:
            return 1
        operations = 1 + len(list(walk(jax.make_jaxpr(body)(*arguments).eqns)))
        most = max(1, _MOST // operations)
        if count > _ALL:
            return min(_SOME, most)
        return _tree.divisor(count, most)


# per number that an operation other than a product computes: half of them are fused away
_BYTES = 4
_PASSES = 10  # over the Jacobians, in an iteration of Newton's method
_OF_NEWTON = 100  # kernels of such an iteration
OF_A_SUM = 6  # kernels of the sums of increments in a sweep
_SOME = 8  # turns of a loop that are unrolled
_ALL = 16  # most turns of one that is unrolled as a whole
_MOST = 2048  # operations of all turns that are unrolled
# On a CPU: the most bytes of layers that are all evaluated at once; and, where there are more, the bytes of those that are.
# Layers of less than a flop per byte of operands are not split, because copying operands would cost more.
_MOST_BYTES = 36_000_000
_CHUNK_BYTES = 2**23
# Where turns are not launched: least flops of a layer for which serial propagation is unrolled, because the compiler of a CPU
# makes one kernel of a smaller loop. A layer with more kernels, such as a GRU's, is slower unrolled there, and takes four times
# as long to compile. With products of a few rows it is not unrolled: the
# sums of outer products would be too, and are then slow.
_UNROLL_FLOPS = 256
# On a CPU: least flops of a layer whose gradient a relay forms in a loop of its own, as measured over two ranks.
_APART_FLOPS = 4096

CPU = Processor(
    flops=6e10,
    bandwidth=1e10,
    cache_bytes=8e6,
    cache_bandwidth=6e10,
    kernel=2e-7,
    row_kernel=2e-7 if jax.__version_info__ < (0, 11) else 1e-8,  # the newer compiler fuses them
    backward=4.0,
    launch=5e-7,
    few_rows=3e-8,
    latency=3e-5,
    launches=False,
    wide=False,
    outer_terms=16,
    chain_flops=1e5,
)
ACCELERATOR = Processor(
    flops=2e13,
    bandwidth=7e11,
    kernel=1.4e-6,
    row_kernel=1.4e-6,
    backward=1.5,
    launch=1.4e-6,
    latency=1e-5,
)


def _tpu(flops: float, bandwidth: float, vmem: float, link: float, clock: float) -> Processor:
    """Return the numbers of a TPU from its data sheet; cycles were fitted to programs for a v5e (benchmarks/tpu_costs.py).

    The compiler places what fits in VMEM. Of the memory's bandwidth, layers of some kilobytes reach a half.
    """
    return Processor(
        flops=flops,
        bandwidth=bandwidth / 2,
        cache_bytes=vmem / 2,
        cache_bandwidth=1.2 * bandwidth,
        kernel=300 / clock,
        row_kernel=300 / clock,
        operation=300 / clock,
        convolves=True,
        backward=1.5,
        launch=2000 / clock,
        latency=1e-6,
        launches=False,
        unroll_bytes=1.5e5,
        unroll_kernels=3,
        unrolled=0.75,
        sum_kernels=2,
        sum_passes=8,
        cached_states=vmem / 2,
        of_weights=0.0,
        relay_gain=0.95,
        turn_kernels=4.5,
        turn_passes=6,
        link=link,
    )


def _gpu(flops: float, bandwidth: float, kernel_step: float | None = None) -> Processor:
    """Return the numbers of a GPU from its data sheet; a step in a kernel was measured on an H200, and holds for its like."""
    return dataclasses.replace(
        ACCELERATOR, flops=flops, bandwidth=bandwidth, kernel_step=kernel_step
    )


# By kind: flops of products and bytes of the memory, both a second. Dense TF32 products of NVIDIA's and AMD's data sheets, and
# two thirds of their bandwidth, as measured on an H200.
_GPUS = {
    "B200": _gpu(1.1e15, 5.3e12),
    "GB200": _gpu(1.1e15, 5.3e12),  # has the same chip
    "GH200": _gpu(4.9e14, 2.7e12, 1.7e-7),  # an H100 with 4 TB/s
    "H200": _gpu(4.9e14, 3.2e12, 1.7e-7),
    "H100": _gpu(4.9e14, 2.2e12, 1.7e-7),
    "A100": _gpu(1.56e14, 1.3e12),
    "V100": _gpu(1.57e13, 6.0e11),
    "L40S": _gpu(1.83e14, 5.8e11),
    "L4": _gpu(6.0e13, 2.0e11),
    "RTX 5090": _gpu(1.05e14, 1.2e12),
    "RTX 4090": _gpu(8.3e13, 6.7e11),
    "MI300X": _gpu(6.5e14, 3.5e12),
}
# By kind, of what JAX calls a device (the chip; of a TPU7x one of its two cores): flops a second of bfloat16 and bytes a second
# of the memory (docs.cloud.google.com/tpu/docs), bytes of VMEM (jax/_src/pallas/mosaic/tpu_info.py; of a v4 its CMEM), bytes a
# second of a link to a neighbour, one way (jax-ml.github.io/scaling-
# book/tpus), and cycles a second (flops over those of a cycle
# of its matrix units).
_TPUS = {
    "TPU v4": _tpu(2.75e14, 1.2e12, 1.34e8, 4.5e10, 1.05e9),
    "TPU v5e": _tpu(1.97e14, 8.2e11, 1.34e8, 4.5e10, 1.5e9),
    "TPU v5p": _tpu(4.59e14, 2.77e12, 1.34e8, 9e10, 1.75e9),
    "TPU v6e": _tpu(9.18e14, 1.64e12, 1.34e8, 9e10, 1.75e9),
    "TPU 7x": _tpu(1.153e15, 3.7e12, 6.7e7, 9e10, 2.2e9),
}
TPU = _TPUS["TPU v5e"]  # the slowest, for kinds that are unknown
_SHEETS = {"cpu": CPU, **_TPUS, **_GPUS}
# as `jax.Device.device_kind` has them, where that is another name
_ALSO = {"tpu v5 lite": "TPU v5e", "tpu v5": "TPU v5p", "tpu v6 lite": "TPU v6e", "tpu7x": "TPU 7x"}


def _known(kind: str) -> Processor | None:
    """Return the numbers of a kind; None for one without a data sheet.

    The name of a GPU is looked for as whole words, because devices have longer ones: "NVIDIA A100-SXM4-40GB". A laptop's GPU and
    a part of one (MIG) are other devices. A TPU has one name, of which the last word is enough.
    """
    kind = _ALSO.get(kind.lower(), kind)
    for name, found in _SHEETS.items():
        words = name.replace("TPU ", "(TPU )?")
        if name in _GPUS:
            words = rf"(.*\b)?{name}\b(?!.*\b(mig|laptop)\b).*"
        if re.fullmatch(words, kind, re.IGNORECASE):
            return found
    return None


@functools.cache
def processor(platform: str, kind: str = "", devices: int = 1) -> Processor:
    """Return the numbers of a device by its platform, such as "cpu", and ``jax.Device.device_kind``.

    Measured on two cores (docs/internals.md) and on an H200 (docs/gpu.md), for TPUs counted (benchmarks/tpu_costs.py); other
    kinds have flops and bytes of a data sheet. An unknown kind has generic numbers, and says so once.
    """
    found = _known(kind or platform)
    if found is None and kind:
        warnings.warn(
            f"lp_jax does not know what layers cost on a device of kind {kind!r}, and chooses "
            f"solvers as for a generic one. If it is like one of {', '.join(_SHEETS)}, solve "
            f"within lp_jax.planning.assume(name). lp_jax.calibrate measures it.",
            stacklevel=2,
        )
    found = found or (TPU if platform == "tpu" else ACCELERATOR)
    # A kernel that marches through the layers cannot be partitioned over several devices.
    return found if devices == 1 else dataclasses.replace(found, kernel_step=None)


def at_hand(platform: str, kind: str = "") -> Processor:
    """Return the numbers of a platform's devices; where there are none, as when compiling for another machine, of ``kind``."""
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        return processor(platform, kind)
    return processor(platform, devices[0].device_kind, len(devices))


def named(device: str) -> Processor:
    """Return the numbers of a kind with a data sheet; refuse other names."""
    found = _known(device)
    if found is None:
        raise ValueError(
            f"device must be one of {', '.join(_SHEETS)}, or what jax.Device.device_kind says of "
            f"one; got {device!r}."
        )
    return found
