"""Estimate the times of a network's layers from their arithmetic and a device's data sheet. Nothing is run."""

import jax

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import OF_NEWTON, Processor, processor
from lp_jax._arrays._types import Arrays, PyTree
from lp_jax._problem import Problem
from lp_jax._programs._program import Program
from lp_jax._programs._traced import trace
from lp_jax._solvers._serial import Serial
from lp_jax.planning._machine import Machine
from lp_jax.planning._measure import arrays, examples_of, kept_bytes, small


def estimate(problem: Problem, *, device: str | None = None) -> Machine:
    """Estimate a `Machine` from the operations of a layer's program, to a factor of a few; `calibrate` measures it.

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
        >>> machine.seconds("forward", 64) < 4 * machine.seconds("forward", 1)
        True
    """
    machines: list[Machine] = []

    def look(arrays: dict[str, PyTree]) -> None:
        program, operands = trace(problem.replace(**arrays), (Serial(),))
        known = program.workers.processor if device is None else processor(device, device)
        machines.append(_machine(program, operands, known))

    jax.eval_shape(look, arrays(problem))
    return machines[0]


def _machine(program: Program, arrays: Arrays, known: Processor) -> Machine:
    layer, layers = program.traced.footprint, program.workers.layers
    y, params = arrays.y0, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays.slices.params)
    sizes = tuple(sorted({1, max(1, layers // 16), layers}))
    started, single = known.launch * layer.kernels, known.one(layer, steps=layers)
    times = tuple(started + single if n == 1 else known.batch(layer, n) for n in sizes)
    several = sizes[-2] if len(sizes) > 2 else layers
    across = (started + several * layer.branches * single) / known.batch(layer, several)  # relaxation sums nothing up
    examples, auto = examples_of(y), known.at_once(layer, layers)
    numbers = sum(x.size for x in jax.tree.leaves(y)) // examples
    newton = tuple(
        known.launch * OF_NEWTON + t + n * known.jacobians(examples, numbers) for n, t in zip(sizes, times, strict=True)
    )
    layer_bytes = _tree.nbytes(params)
    forward, backward = known.serial(layer, layers)
    return Machine(
        at_once=sizes,
        forward=times,
        adjoint=times,
        gradient=times,
        newton=newton if small(y) else None,
        serial=(forward / layers, backward / layers),
        across=(across, across, across),
        auto=None if auto >= layers else auto,
        examples=examples,
        overhead=started / (started + single),
        adding=3 * layer_bytes / known.bandwidth,  # two are read, one is written
        state_bytes=_tree.nbytes(y),
        kept_bytes=kept_bytes(program, arrays),
        layer_bytes=layer_bytes,
    )
