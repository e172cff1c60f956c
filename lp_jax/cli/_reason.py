"""Why a layer-parallel step takes the time that it takes: what it does, times what each of that takes on this machine."""

import dataclasses
import time

import jax
import numpy as np
import optax

from lp_jax import MeshComm, Problem, Serial, planning
from lp_jax._solver import Solver
from lp_jax._types import PyTree
from lp_jax.train import init_state

_ENOUGH = 1.25  # a ratio that is off by less is explained


def why(
    problem: Problem,
    pair: tuple[Solver, Solver],
    comm: MeshComm | None,
    *,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    measured: float,
) -> str:
    """Return the reason in a few sentences, and whether it accounts for the ratio that was measured.

    Args:
        problem: the layers, on one device.
        pair: solvers of the layer-parallel step.
        comm: where its layers live.
        optimizer: updates the parameters in both steps.
        params: all parameters.
        measured: time of the layer-parallel step in parts of the exact one's.
    """
    layers, workers = problem.layers, 1 if comm is None else comm.size
    machine = planning.calibrate(problem)
    machine = dataclasses.replace(machine, update=_update(optimizer, params) / layers)
    if comm is not None:
        machine = dataclasses.replace(machine, **planning.interconnect(comm)._asdict())
    exact = planning.predict(Serial(), Serial(), layers, machine).seconds
    ours = planning.predict(*pair, layers, machine, workers=workers).seconds
    counted = planning.training_step(*pair, layers, workers=workers)
    alone = planning.training_step(Serial(), Serial(), layers).depth()
    most = max(batch.layers for batch in counted.batches)
    sent = f" and {counted.states + counted.reductions} messages of {machine.state_bytes} bytes" if workers > 1 else ""
    text = (
        f"Why: an exact step is {alone} evaluations of one layer, one after another, {1e6 * sum(machine.per_layer) / 3:.2g} us "
        f"each on this machine. A layer-parallel step is {counted.depth()} evaluations of {most} layers at once{sent}. With the "
        f"optimizer's update, {1e3 * machine.update * layers:.2g} ms on one device, that makes {1e3 * ours:.2g} ms instead of "
        f"{1e3 * exact:.2g}, or {ours / exact:.2f} of the time, if each part takes as long as alone. Measured: {measured:.2f}."
    )
    explained = 1 / _ENOUGH <= ours / exact / measured <= _ENOUGH
    return text if explained else f"{text} What is between the two, these counts do not explain."


def _update(optimizer: optax.GradientTransformation, params: PyTree) -> float:
    """Seconds of the optimizer's update of all parameters, on one device."""
    opt_state = init_state(params, optimizer).opt_state

    @jax.jit
    def update(params: PyTree, opt_state: PyTree) -> PyTree:
        updates, opt_state = optimizer.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    spent = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(update(params, opt_state))
        spent.append(time.perf_counter() - start)
    return float(np.median(spent))
