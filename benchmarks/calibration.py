"""What the layers of a row take here, for the suite ``model``: alone, and while a neighbour is at work."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
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


def machine(
    sizes: Sizes, updates: bool, fewer: bool, *, batched: bool = False, neighbour: bool = False
) -> planning.Machine:
    """Calibrated in this process, on its first device; with what a step with a scan takes beside the layers as ``fixed``.

    Args:
        sizes: of the row.
        updates: whether a step updates weights, too.
        fewer: whether to measure how a layer's time falls with the examples.
        batched: whether to measure layers at once, too.
        neighbour: whether the second device trains meanwhile.
    """
    network, width, layers, batch = sizes
    quarter = problem(network, width, layers, max(1, batch // 4)) if fewer else {}
    parts = {name: quarter[name] for name in ("y0", "shared", "data") if name in quarter}
    with _training(sizes, updates) if neighbour else contextlib.nullcontext():
        name = ", ".join(map(str, sizes))
        found = planning.calibrate(**problem(*sizes), fewer=parts or None, batched=batched, name=name)
        scanned = Contender(name="lax.scan", call=_scan(sizes, updates))
        (timing,) = measure([scanned], rounds=9, warmup=2, min_time=0.05, budget=10.0)
    beside = float(np.median(timing.seconds)) - sizes[2] * sum(found.per_layer)
    return dataclasses.replace(found, fixed=max(0.0, beside))


def _scan(sizes: Sizes, updates: bool) -> Any:
    """A training step, or its gradient alone, by a scan."""
    if updates:
        return single.NETWORKS[sizes[0]](*sizes[1:])[0](None)
    return dense.Gradient(scan, dense.random_problem(sizes[2], sizes[1], sizes[3]))


@contextlib.contextmanager
def _training(sizes: Sizes, updates: bool) -> Iterator[None]:
    """The second device at work, step after step."""
    other = jax.devices()[1]
    with jax.default_device(other):
        call = _scan(sizes, updates)
    done = threading.Event()

    def work() -> None:
        with jax.default_device(other):
            while not done.is_set():
                jax.block_until_ready(call())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
