"""Suite 4: training steps on one device, with every kind of solver beside what one would use instead.

Dense and convolutional ResNets in two and three dimensions, transformer encoders, and implicit GRUs, whose time steps are
the layers. Where one layer fills only a part of the device, all layers at once take less time than one after another;
where it fills all of it, as it does a processor of few cores, they take as many times longer as they do more work. The
error of the gradient stands beside every time.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import lp_jax
from benchmarks import dense, gru, report, resnet, stacks
from benchmarks.command import Field, Row, Suite, network_row, run, wanted
from benchmarks.harness import Contender, Tell, relative_error
from benchmarks.manifest import jax_threads
from benchmarks.propagation import scan, solved
from benchmarks.training import Trainer

Pair = tuple[Any, Any]
Train = Callable[[Pair | None], Trainer]
"""Makes a contender of two solvers, or the baseline of None."""


def _mgrit(forward: int, adjoint: int, **fields: Any) -> Pair:
    return tuple(lp_jax.MGRIT(iterations=k, storage="all", **fields) for k in (forward, adjoint))  # type: ignore[return-value]


def known_solvers(network: str, layers: int) -> dict[str, tuple[str, Pair]]:
    """By name: family, forward and adjoint solver."""
    serial = lp_jax.Serial()
    checkpointed = lp_jax.Serial(checkpoint_every=math.isqrt(layers))
    found: dict[str, tuple[str, Pair]] = {
        "Serial": ("exact", (serial, serial)),
        "Serial, checkpoints": ("exact", (checkpointed, checkpointed)),
        "injection, 3 levels, 2/1": (
            "iterated",
            _mgrit(2, 1, levels=3, coarsening=4, coarse_step=lp_jax.Rediscretize()),
        ),
        "Picard 1, 2 levels, 2/1": ("iterated", _mgrit(2, 1, coarsening=8, coarse_step=lp_jax.Picard(sweeps=1))),
        "Picard 2, 2 levels, 1/1": ("iterated", _mgrit(1, 1, coarsening=8, coarse_step=lp_jax.Picard(sweeps=2))),
        "Picard 1, 3 levels, 2/1": (
            "iterated",
            _mgrit(2, 1, levels=3, coarsening=8, coarse_step=lp_jax.Picard(sweeps=1)),
        ),
        "Picard to 1e-3/1e-2": ("iterated", (lp_jax.Picard(sweeps=32, rtol=1e-3), lp_jax.Picard(sweeps=32, rtol=1e-2))),
        "Picard, 8 windows, 3/2": (
            "iterated",
            (lp_jax.Picard(sweeps=3, windows=8), lp_jax.Picard(sweeps=2, windows=8)),
        ),
    }
    if network == "voxels":
        thorough = {"coarsening": 4, "relaxation": "FCF", "coarse_step": lp_jax.Rediscretize()}
        found["injection, FCF, 2/2"] = ("iterated", _mgrit(2, 2, **thorough))
        found["injection, FCF, 2/2, half the points"] = (
            "iterated",
            _mgrit(2, 2, spatial=lp_jax.spatial(3), **thorough),
        )
    if network == "gru":
        for jacobian, iterations in (("full", 6), ("diagonal", 10)):
            solver = lp_jax.Newton(jacobian=jacobian, iterations=iterations, batch_axes=1)
            found[f"Newton, {jacobian}, {iterations}"] = ("iterated", (solver, solver.for_adjoint()))
    return found


def _dense(width: int, layers: int, batch: int) -> tuple[Train, Any]:
    problem = weights, y, target = dense.random_problem(layers, width, batch)

    def train(solvers: Pair | None) -> Trainer:
        propagate = scan if solvers is None else solved(*solvers)

        def loss(weights: Any, y: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, residual = propagate(dense.residual_layer, weights, y)
            return 0.5 * jnp.sum((y - target) ** 2), residual

        return Trainer(loss, jax.tree.map(jnp.copy, weights), (y, target), lambda weights: weights)

    return train, problem


def _conv(width: int, layers: int, batch: int) -> tuple[Train, Any]:
    problem = resnet.Problem.random(width, layers, size=28, batch=batch)

    def train(solvers: Pair | None) -> Trainer:
        return resnet.trainer(scan if solvers is None else solved(*solvers), "auto", problem)

    return train, problem


def _gru(width: int, steps: int, batch: int) -> tuple[Train, Any]:
    problem = gru.Problem.random(width, steps, batch)
    return lambda solvers: gru.trainer(problem, solvers, None, lambda tree: tree), problem


def _encoder(width: int, layers: int, batch: int) -> tuple[Train, Any]:
    problem = stacks.encoder(width, layers, batch)
    return functools.partial(stacks.trainer, problem), problem


def _voxels(width: int, layers: int, batch: int) -> tuple[Train, Any]:
    problem = stacks.voxels(width, layers, batch)
    return functools.partial(stacks.trainer, problem), problem


MOST_JACOBIANS = 2 * 2**30
"""Bytes of full Jacobians above which Newton's method sits out: its prefix products take several times as much."""


def why_no_newton(width: int, steps: int, batch: int) -> str | None:
    """Why full Jacobians of a GRU's steps are too large, or None."""
    size = 4 * steps * batch * (gru.UNITS * width) ** 2
    return (
        None
        if size <= MOST_JACOBIANS
        else f"the Jacobians of {steps} steps that it evaluates would take {size / 2**30:.0f} GiB"
    )


NETWORKS: dict[str, Callable[[int, int, int], tuple[Train, Any]]] = {
    "dense": _dense,
    "conv": _conv,
    "gru": _gru,
    "encoder": _encoder,
    "voxels": _voxels,
}
"""From width, layers and batch to trainers, and the problem that PyTorch is timed on."""


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    """The baseline first: a scan."""
    network, width, layers, batch = row
    tell("drawing weights")
    train, problem = NETWORKS[network](width, layers, batch)
    contenders: list[Contender] = []
    left_out: list[tuple[str, str]] = []
    exact = None
    entries: dict[str, tuple[str, Pair | None]] = {"lax.scan": ("scan", None), **known_solvers(network, layers)}
    for name, (family, solvers) in entries.items():
        if exact is not None and not wanted(name, options):
            continue
        if name.startswith("Newton") and (too_large := why_no_newton(width, layers, batch)) is not None:
            left_out.append((name, too_large))
            continue
        tell(f"compiling {name}")
        steps = train(solvers)
        exact = steps.gradient if exact is None else exact
        error = relative_error(steps.gradient, exact)
        facts = {"family": family, "threads": jax_threads(), "gradient_error": error}
        contenders.append(Contender(name=name, call=steps, facts=facts | steps.facts))
    name = "PyTorch, 1 thread"
    if not wanted(name, options):
        return Field(contenders, left_out)
    reason = "it has no loop of this network" if network == "voxels" else resnet.why_no_torch()
    if reason is not None:
        return Field(contenders, [*left_out, ("PyTorch", reason)])
    from benchmarks.torch_loop import LOOPS

    tell(f"first step of {name}")
    loop = LOOPS[network](problem, 1)
    facts = {
        "family": "torch",
        "threads": 1,
        "gradient_error": relative_error(loop.gradient, exact),
        "residual_norm": math.nan,
    }
    return Field([*contenders, Contender(name=name, call=loop, before=loop.take_threads, facts=facts)], left_out)


SUITE = Suite(
    name="single",
    title="Training steps on one device",
    about=__doc__ or "",
    examples=[
        ("", "all rows"),
        ("--quick", "tiny rows, to see that all works"),
        ("--rows dense,64,4096,32 encoder,128,128,4", "two rows"),
        ("--only Picard Serial", "fewer contenders"),
    ],
    sizes=("network", "width", "layers", "batch"),
    rows=[
        ("dense", 16, 1024, 32),
        ("dense", 64, 256, 32),
        ("dense", 64, 1024, 32),
        ("dense", 64, 4096, 32),
        ("dense", 64, 16384, 32),
        ("dense", 512, 256, 32),
        ("conv", 8, 64, 50),
        ("encoder", 128, 64, 4),
        ("encoder", 128, 128, 4),
        ("encoder", 128, 512, 4),
        ("voxels", 4, 64, 4),
        ("gru", 64, 128, 16),
        ("gru", 16, 1024, 16),
        ("gru", 64, 1024, 16),
        ("gru", 64, 16384, 16),
    ],
    quick_rows=[("dense", 4, 64, 4), ("encoder", 8, 64, 2), ("gru", 4, 64, 4)],
    field=field,
    draw=functools.partial(report.panels, x="ms per step, × lax.scan, gradient error"),
    row=network_row(NETWORKS),
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
