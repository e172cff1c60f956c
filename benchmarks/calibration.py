"""What the layers of a row take here, for the suite ``model``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import dense, gru, resnet, single
from benchmarks.harness import Contender, measure
from benchmarks.propagation import scan
from lp_jax import Problem, Serial, planning, solve_vjp
from lp_jax.nn import GRU

Sizes = tuple[str, int, int, int]
"""Network, width, layers, batch."""

_UPDATE = 5 / 3  # of an addition of gradients: with momentum three arrays are read and two written, not two and one


def problem(network: str, width: int, layers: int, batch: int) -> Problem:
    """The layers alone, with weights as the suites draw them."""
    _, drawn = single.NETWORKS[network](width, layers, batch)
    if network == "dense":
        weights, y, _ = drawn
        return Problem(lambda y, at: dense.residual_layer(y, at.params, at.dt), weights, y)
    if network == "conv":
        y = np.random.default_rng(0).normal(size=(batch, 28, 28, width)).astype(np.float32)
        layer = functools.partial(resnet.residual_layer, "auto")
        return Problem(lambda y, at: layer(y, at.params, at.dt), drawn.network.layers, y)
    if network == "gru":
        module = GRU(gru.FEATURES, width, units=gru.UNITS, rngs=nnx.Rngs(0))
        return module.problem(drawn.x)
    return Problem(drawn.step, drawn.params, drawn.y)


def machine(sizes: Sizes, updates: bool, fewer: bool, *, batched: bool = False) -> planning.Machine:
    """Calibrated in this process, on its first device; with what a step with a scan takes beside the layers as ``fixed``.

    Args:
        sizes: of the row.
        updates: whether a step updates weights, too.
        fewer: whether to measure how a layer's time falls with the examples.
        batched: whether to measure layers at once, too.
    """
    network, width, layers, batch = sizes
    parts = None
    if fewer:
        quarter = problem(network, width, layers, max(1, batch // 4))
        parts = {name: getattr(quarter, name) for name in ("y0", "shared", "data")}
    found = planning.calibrate(problem(*sizes), fewer=parts, batched=batched, name=", ".join(map(str, sizes)))
    scanned = Contender(name="lax.scan", call=_scan(sizes, updates))
    (timing,) = measure([scanned], rounds=9, warmup=2, min_time=0.05, budget=10.0)
    update = _UPDATE * found.adding if updates else 0.0
    beside = float(np.median(timing.seconds)) - layers * (sum(found.per_layer) + update)
    return dataclasses.replace(found, update=update, fixed=max(0.0, beside))


def _scan(sizes: Sizes, updates: bool) -> Any:
    """A training step, or its gradient alone, by a scan."""
    if updates:
        return single.NETWORKS[sizes[0]](*sizes[1:])[0](None)
    return dense.Gradient(scan, dense.random_problem(sizes[2], sizes[1], sizes[3]))


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
