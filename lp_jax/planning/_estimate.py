"""Estimate the times of a network's layers from their arithmetic and a device's data sheet. Nothing is run."""

import jax

from lp_jax._arrays import _tree
from lp_jax._arrays._at_once import OF_A_SUM, OF_NEWTON, Processor, processor
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


_PASSES = 4  # over the states, in a sweep's sum of them: fits what was measured on CPUs and counted for an H200


def _machine(program: Program, arrays: Arrays, known: Processor) -> Machine:
    layer, layers, y = program.traced.footprint, program.workers.layers, arrays.y0
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays.slices.params)
    most = known.at_once(layer, layers)
    sizes = sorted({max(2, most // part) for part in (64, 8, 1)}) if most > 1 else []
    batches = [known.batch(layer, size) for size in sizes]
    sweeps = [t + size * _PASSES * _tree.nbytes(y) / known.bandwidth for size, t in zip(sizes, batches, strict=True)]
    forward, backward = (seconds / layers for seconds in known.serial(layer, layers))
    examples = examples_of(y)
    numbers = sum(x.size for x in jax.tree.leaves(y)) // examples
    jacobians = known.jacobians(examples, numbers)
    fixed = known.launch * layer.kernels + known.one(layer._replace(flops=0.0, numbers=0.0), steps=layers)
    whole = known.launch * layer.kernels + known.one(layer, steps=layers)
    return Machine(
        at_once=(1, *sizes),
        forward=(forward, *sweeps),
        adjoint=(backward / 2, *sweeps),
        gradient=(backward / 2, *batches),
        newton=tuple(
            known.launch * OF_NEWTON + seconds + size * jacobians
            for size, seconds in zip((1, *sizes), (forward, *batches), strict=True)
        )
        if small(y)
        else None,
        relaxation=(batches[-1] - known.launch * OF_A_SUM) / sweeps[-1] if sizes else 1.0,
        examples=examples,
        overhead=fixed / whole,  # kernels start, and parameters are read, for any number of examples
        state_bytes=_tree.nbytes(y),
        kept_bytes=kept_bytes(program, arrays),
        layer_bytes=_tree.nbytes(params),
    )
