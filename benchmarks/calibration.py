"""What the layers of a row take here, for the suite ``model``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness import Contender, measure
from benchmarks.networks import NETWORKS
from benchmarks.training import trainer
from lp_jax import Problem, Serial, planning, solve_vjp

Sizes = tuple[str, int, int, int]
"""Network, width, layers, batch."""

_UPDATE = 5 / 3  # of an addition of gradients: with momentum three arrays are read and two written, not two and one


def problem(network: str, width: int, layers: int, batch: int) -> Problem:
    """The layers only, with weights as the suites draw them."""
    drawn = NETWORKS[network](width, layers, batch)
    return Problem(**drawn.problem(*jax.tree.map(jnp.asarray, (drawn.weights, drawn.x))))


def machine(sizes: Sizes, updates: bool, fewer: bool, *, batched: bool = False) -> planning.Machine:
    """Calibrate in this process, on its first device; what a step with a scan takes besides the layers is ``fixed``."""
    network, width, layers, batch = sizes
    parts = None
    if fewer:
        quarter = problem(network, width, layers, max(1, batch // 4))
        parts = {name: getattr(quarter, name) for name in ("y0", "shared", "data")}
    found = planning.calibrate(problem(*sizes), fewer=parts, batched=batched, name=", ".join(map(str, sizes)))
    scanned = Contender(name="lax.scan", call=trainer(NETWORKS[network](*sizes[1:]), updates=updates))
    (timing,) = measure([scanned], rounds=9, warmup=2, min_time=0.05, budget=10.0)
    update = _UPDATE * found.adding if updates else 0.0
    besides = float(np.median(timing.seconds)) - layers * (sum(found.per_layer) + update)
    return dataclasses.replace(found, update=update, fixed=max(0.0, besides))


def gradients(sizes: Sizes, devices: int) -> Callable[[], Any]:
    """That of all layers, by serial propagation, on each of so many devices at the same time, in one program."""
    given = problem(*sizes)
    arrays = {name: getattr(given, name) for name in ("params", "y0", "shared", "data")}

    def gradient(arrays: dict[str, Any]) -> Any:
        solution, pullback = solve_vjp(**(vars(given) | arrays), solver=Serial())
        return pullback(solution.y1)[0]

    if devices == 1:
        return functools.partial(jax.jit(gradient), jax.tree.map(jnp.asarray, arrays))
    mesh = jax.make_mesh((devices,), ("copies",), axis_types=(AxisType.Auto,))

    def own(copies: dict[str, Any]) -> Any:
        return jax.tree.map(lambda x: x[None], gradient(jax.tree.map(lambda x: x[0], copies)))

    spread = jax.shard_map(own, mesh=mesh, in_specs=P("copies"), out_specs=P("copies"), check_vma=False)
    copies = jax.tree.map(lambda x: jnp.stack([x] * devices), arrays)
    return functools.partial(jax.jit(spread), jax.device_put(copies, NamedSharding(mesh, P("copies"))))
