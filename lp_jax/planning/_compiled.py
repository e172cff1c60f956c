"""Programs for accelerators that are not here: whether they fit, what they send, and what the compiler expects them to take."""

import dataclasses
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lp_jax._arrays._types import PyTree
from lp_jax._choice._processor import processor
from lp_jax.planning._estimate import assume
from lp_jax.planning._hlo import COLLECTIVES, Text

TARGETS = {path.stem: path.read_text() for path in (Path(__file__).parent / "targets").iterdir()}
"""A description of each GPU that XLA's compiler reads in place of the GPU, by its name."""
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
"""Environment variables that libtpu reads, because it would ask a TPU's host for them otherwise."""
_NO_KERNEL = re.compile(r"parameter|constant|tuple|get-tuple-element|bitcast|while|call|.*-done")


def topology(name: str, **axes: int) -> Mesh:
    """Return a mesh of accelerators that need not be here, to compile programs for.

    Args:
        name: a kind and how many of them: "h200:4", "h100:1", or a TPU's and its shape, "v5e:2x4", "v5p:2x2x4", "v6e:2x4".
        axes: names of the mesh's axes and their sizes; the first devices that they need are taken. By default there is one axis,
            "layers", for all devices.

    XLA's compiler for the devices has to be installed, on Linux: ``pip install 'lp_jax[tpu-program]'`` (200 MB) or
    ``'lp_jax[gpu-program]'`` (1.2 GB). Set ``JAX_PLATFORMS=cpu``, as the process would look for the devices otherwise. One
    process at a time compiles for TPUs; another one waits for it, and says so.

    Raises:
        ValueError: if the compiler is missing or does not know the name, or the axes need more devices.
    """
    kind, _, count = name.lower().partition(":")
    if kind in TARGETS:
        platform, named = "cuda", ""
        options = {"target_config": TARGETS[kind], "topology": f"1x1x{count or 1}"}
    else:
        platform, named = "tpu", name.lower()
        # the two cores of a v4 are one device
        options = {"chip_config_name": "megacore"} if kind == "v4" else {}
        # The user's own settings win, because the right operand of | does.
        os.environ.update(_NO_TPU | os.environ)
    for attempt in itertools.count():
        try:
            devices = topologies.get_topology_desc(named, platform, **options).devices
            break
        except RuntimeError as error:
            if "lockfile" not in str(error):
                raise ValueError(
                    f"XLA cannot compile for {name!r} here ({error}). Set JAX_PLATFORMS=cpu before "
                    f"Python starts, install "
                    "'lp_jax[tpu-program]' or 'lp_jax[gpu-program]', and name devices like v5e:2x4 "
                    "or "
                    f"{', '.join(f'{kind}:8' for kind in sorted(TARGETS))}."
                ) from error
            if attempt == 0:
                print(
                    "Another process uses libtpu. Waiting until it ends; if there is none, remove "
                    "/tmp/libtpu_lockfile.",
                    file=sys.stderr,
                )
            time.sleep(1)
    axes = axes or {"layers": len(devices)}
    if math.prod(axes.values()) > len(devices):
        raise ValueError(f"{name!r} has {len(devices)} devices; got more in axes {axes}.")
    return mesh_of(devices, **axes)


def mesh_on(on: str | Mesh) -> Mesh:
    """Return the mesh that `topology` makes of a name; a mesh is returned as it is."""
    return topology(on) if isinstance(on, str) else on


def mesh_of(devices: Any, **axes: int) -> Mesh:
    """Return a mesh of the first of some devices, with axes of these names and sizes."""
    first = np.ravel(devices)[: math.prod(axes.values())]
    return Mesh(first.reshape(*axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Memory, messages and work of a compiled program on each device, read from its text: nothing was run. `compiled` makes it.

    Example:
        >>> from lp_jax import planning
        >>> memory = {"arguments": 60 * 2**30, "outputs": 0, "temporaries": 2**30}
        >>> found = planning.Compiled("NVIDIA H100 80GB HBM3", 8, memory, 0.75 * 79.1 * 2**30, 1.5)
        >>> found.fits
        False
    """

    device: str
    """`jax.Device.device_kind`."""
    devices: int
    memory: Mapping[str, int]
    """Bytes of the ``arguments``, of the ``outputs`` that take no donated argument's place, and of the ``temporaries``, the
    program itself included. Of a program that a TPU does not hold only the sum is known, ``all``."""
    limit: float
    """Bytes that a program may take; infinity for a TPU that holds it, as only its compiler knows."""
    seconds: float
    """Time to compile."""
    messages: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """For each collective, the number of times that it runs and the bytes that it brings."""
    kernels: int = 0
    """Number of kernel launches. A launch in a loop counts once for each turn."""
    cycles: int = 0
    """Cycles of a TPU's core, as its compiler estimates them; 0 for a GPU, because its compiler estimates none."""
    unknown_loops: int = 0
    """Loops that turn until something happens, such as a tolerance that is met. They count as one turn."""

    @property
    def fits(self) -> bool:
        """Whether the memory of a device holds the program."""
        return sum(self.memory.values()) <= self.limit

    def __str__(self) -> str:
        total = _gib(sum(self.memory.values()))
        limit = f" of {_gib(self.limit)}" if self.limit < math.inf else ""
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in self.memory.items())
        messages = self.messages.items()
        sent = ", ".join(f"{n:,} {kind} of {size / 1e6:.3g} MB" for kind, (n, size) in messages)
        lines = [
            f"{self.devices} x {self.device}: {'fits' if self.fits else 'OUT OF MEMORY'}",
            f"  memory    {total}{limit} GiB a device: {parts}",
            f"  compiled  in {self.seconds:.1f} s",
            f"  messages  {sent or 'none'}",
            f"  work      {self.kernels:,} kernels, {self.cycles / 1e6:,.3f} million cycles by the "
            f"compiler's estimate",
            f"  loops     {self.unknown_loops} of unknown length, which count as one turn",
        ]
        return "\n".join(lines[: 6 if self.kernels else 2])


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}"


def compiled(f: Callable[..., PyTree], *shapes: PyTree, on: str | Mesh) -> Compiled:
    """Compile a function for accelerators that need not be here: what it needs, sends and does on each. Nothing is run.

    Args:
        f: a loss, its gradient, or a training step, jitted or not. If it donates arguments, so does the compiled program.
        shapes: its arguments, arrays or `jax.ShapeDtypeStruct`. Of a sharding the partition is taken, `NamedSharding.spec`; what
            has none is on every device.
        on: a mesh from `topology`, or its first argument. Give a `pipeline` or a `MeshComm` inside of ``f`` the same mesh.

    A default inside (``solver=None``) chooses for these devices, as within `assume`. For a GPU the program may take three
    quarters of the memory, as JAX lets it unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise; for a TPU XLA decides
    itself what fits. An argument that XLA drops, since nothing depends on it, takes no memory.

    Example, where libtpu is installed::

        mesh = planning.topology("v5e:2x4")
        piped = lp_jax.pipeline(loss, mesh, in_axes=(None, 0))
        print(planning.compiled(jax.grad(lambda p, x: piped(p, x).mean()), params, x, on=mesh))
    """
    mesh = mesh_on(on)
    lowered = lower(f, shapes, mesh)
    # Tracing and lowering are not timed, because they take as long for any device.
    start = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # The compiler reports the size of a program that does not fit only in the text of its error.
        known = re.search(r"RESOURCE_EXHAUSTED\D+([\d.]+)G\D+([\d.]+)G", str(error))
        if known is None:
            raise
        used, limit = (int(float(size) * 2**30) for size in known.groups())
        kind, seconds = mesh.devices.flat[0].device_kind, time.perf_counter() - start
        return Compiled(kind, mesh.size, {"all": used}, limit, seconds)
    return read_program(program, mesh, time.perf_counter() - start)


def lower(f: Callable[..., PyTree], shapes: PyTree, mesh: Mesh) -> jax.stages.Lowered:
    """Trace and lower ``f(*shapes)`` as on the devices of a mesh that are not here."""
    device = mesh.devices.flat[0]
    there = processor(device.platform, device.device_kind, mesh.size)

    def place(x: Any) -> jax.ShapeDtypeStruct:
        # The shapes may have shardings on another mesh; their partition is applied to this one.
        spec = getattr(getattr(x, "sharding", None), "spec", PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    # A default inside of the function chooses for the devices that it is compiled for.
    with jax.default_device(device.platform), assume(there):
        jitted: Any = f if hasattr(f, "trace") else jax.jit(f)
        traced = jitted.trace(*jax.tree.map(place, shapes))
    return traced.lower()


def read_program(program: jax.stages.Compiled, mesh: Mesh, seconds: float) -> Compiled:
    """Return memory, messages and work of a compiled program; ``seconds`` is the time that it took to compile."""
    text, size = Text(program.as_text() or ""), program.memory_analysis()
    assert size is not None
    messages: dict[str, tuple[int, int]] = {}
    kernels = cycles = unknown = 0
    for _, one, times in text.executed():
        kind = one.operation.removesuffix("-done")
        cycles += times * one.cycles
        kernels += times * (_NO_KERNEL.fullmatch(one.operation) is None)
        unknown += one.operation == "while" and text.trips(one) is None
        if kind in COLLECTIVES:  # what is started has its result where it is done
            before = messages.get(kind, (0, 0))
            messages[kind] = before[0] + times, before[1] + times * one.nbytes
    # A donated argument's memory is that of an output too, and counts as the argument's.
    memory = {
        "arguments": size.argument_size_in_bytes,
        "outputs": size.output_size_in_bytes - size.alias_size_in_bytes,
        "temporaries": size.temp_size_in_bytes + size.generated_code_size_in_bytes,
    }
    device = mesh.devices.flat[0].device_kind
    target = next((text for text in TARGETS.values() if device in text), "")
    whole = re.search(r"device_memory_size: (\d+)", target)
    # JAX preallocates this share of a GPU, 0.75 unless the variable says otherwise.
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
    limit = share * int(whole[1]) if whole else math.inf
    return Compiled(device, mesh.size, memory, limit, seconds, messages, kernels, cycles, unknown)
