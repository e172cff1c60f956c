"""Explain the time of a layer-parallel step: its operations, times their seconds on this machine."""

import dataclasses
import math

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lp_jax import MeshComm, Picard, Problem, Serial, planning
from lp_jax._arrays._types import PyTree
from lp_jax.planning import _measure
from lp_jax.train import init_state

_TURNS = 3
_ENOUGH = 1.25  # a ratio within this factor counts as explained


def why(
    problem: Problem,
    pair: tuple[Picard, Picard],
    comm: MeshComm | None,
    *,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    measured: float,
) -> str:
    """Return the reason in a few sentences, and whether it explains the measured ratio.

    Args:
        problem: the layers, on one device.
        pair: solvers of the layer-parallel step: sweeps that keep linearisations for the adjoint.
        comm: devices of its layers.
        optimizer: updates the parameters in both steps.
        params: all parameters.
        measured: time of the layer-parallel step divided by that of the exact one.
    """
    layers, workers = problem.layers, 1 if comm is None else comm.size
    update = _update(optimizer, params)
    serial = planning.training_step(Serial(), Serial(), layers).depth()
    there = problem
    if comm is not None:  # all devices at work, with their messages
        spread = jax.device_put(problem.params, NamedSharding(comm.mesh, PartitionSpec(comm.axis)))
        there = dataclasses.replace(problem, params=spread, comm=comm)
    # in turns, as the speed of a machine varies
    times = [(layers * sum(_measure.serial(problem)), *_measure.sweep(there, math.inf)) for _ in range(_TURNS)]
    exact, forward, adjoint, gradient = np.median(times, axis=0).tolist()
    sweeps, back = (solver.iterations for solver in pair)
    counted = planning.training_step(*pair, layers, workers=workers)
    most = max(batch.layers for batch in counted.batches)
    ours = (sweeps + 1) * forward + back * adjoint + gradient + update / workers
    ratio = ours / (exact + update)
    sent = f", messages included ({counted.states + counted.reductions})" if workers > 1 else ""
    text = (
        f"Why: an exact step is {serial} evaluations of one layer, one after another, {1e6 * exact / serial:.2g} us each on this "
        f"machine. A layer-parallel step is {counted.depth()} evaluations of {most} layers at once: {sweeps + 1} forward of "
        f"{1e3 * forward:.2g} ms, {back} adjoint of {1e3 * adjoint:.2g} and the gradient of {1e3 * gradient:.2g}{sent}. With the "
        f"optimizer's update, {1e3 * update:.2g} ms on one device, that makes {1e3 * ours:.2g} ms instead of "
        f"{1e3 * (exact + update):.2g}, or {ratio:.2f} of the time. Measured: {measured:.2f}."
    )
    explained = 1 / _ENOUGH <= ratio / measured <= _ENOUGH
    return text if explained else f"{text} These counts do not explain the difference."


def _update(optimizer: optax.GradientTransformation, params: PyTree) -> float:
    """Seconds of the optimizer's update of all parameters, on one device."""
    opt_state = init_state(params, optimizer).opt_state

    @jax.jit
    def update(params: PyTree, opt_state: PyTree) -> PyTree:
        updates, opt_state = optimizer.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return _measure.seconds([lambda: update(params, opt_state)])[0]
