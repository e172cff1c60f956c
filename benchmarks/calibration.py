"""What the layers of a row take here, for the suite ``model``."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import dense, gru, resnet, single
from benchmarks.harness import Contender, measure
from benchmarks.propagation import scan
from lp_jax import planning
from lp_jax.nn import GRU

Sizes = tuple[str, int, int, int]
"""Network, width, layers, batch."""


def problem(network: str, width: int, layers: int, batch: int) -> dict[str, Any]:
    """The layers alone, as arguments of `lp_jax.calibrate`, with weights as the suites draw them."""
    _, drawn = single.NETWORKS[network](width, layers, batch)
    if network == "dense":
        weights, y, _ = drawn
        return {"step": lambda y, at: dense.residual_layer(y, at.params, at.dt), "params": weights, "y0": y}
    if network == "conv":
        y = np.random.default_rng(0).normal(size=(batch, 28, 28, width)).astype(np.float32)
        layer = functools.partial(resnet.residual_layer, "auto")
        return {"step": lambda y, at: layer(y, at.params, at.dt), "params": drawn.network.layers, "y0": y}
    if network == "gru":
        module = GRU(gru.FEATURES, width, units=gru.UNITS, rngs=nnx.Rngs(0))
        return module.problem(drawn.x)
    return {"step": drawn.step, "params": drawn.params, "y0": drawn.y}


def machine(sizes: Sizes, updates: bool, fewer: bool, *, batched: bool = False) -> planning.Machine:
    """Calibrated in this process, on its first device; with what a step with a scan takes beside the layers as ``fixed``.

    Args:
        sizes: of the row.
        updates: whether a step updates weights, too.
        fewer: whether to measure how a layer's time falls with the examples.
        batched: whether to measure layers at once, too.
    """
    network, width, layers, batch = sizes
    quarter = problem(network, width, layers, max(1, batch // 4)) if fewer else {}
    parts = {name: quarter[name] for name in ("y0", "shared", "data") if name in quarter}
    found = planning.calibrate(**problem(*sizes), fewer=parts or None, batched=batched, name=", ".join(map(str, sizes)))
    (timing,) = measure(
        [Contender(name="lax.scan", call=scans(sizes, updates, 1))], rounds=9, warmup=2, min_time=0.05, budget=10.0
    )
    update = _UPDATE * found.adding if updates else 0.0
    beside = float(np.median(timing.seconds)) - layers * (sum(found.per_layer) + update)
    return dataclasses.replace(found, update=update, fixed=max(0.0, beside))


_UPDATE = 5 / 3  # of an addition of gradients: with momentum three arrays are read and two written, not two and one


def scans(sizes: Sizes, updates: bool, devices: int) -> Callable[[], Any]:
    """A training step by a scan, or its gradient alone, on each of so many devices at the same time."""
    calls = [_on(device, sizes, updates) for device in jax.devices()[:devices]]
    if devices == 1:
        return calls[0]
    pool = ThreadPoolExecutor(devices)
    return lambda: list(pool.map(lambda call: jax.block_until_ready(call()), calls))


def _on(device: jax.Device, sizes: Sizes, updates: bool) -> Callable[[], Any]:
    network, width, layers, batch = sizes
    with jax.default_device(device):
        if updates:
            made: Any = single.NETWORKS[network](width, layers, batch)[0](None)
        else:
            made = dense.Gradient(scan, dense.random_problem(layers, width, batch))

    def call() -> Any:
        with jax.default_device(device):
            return made()

    return call
