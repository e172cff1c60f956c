"""Training steps on one device, with every kind of solver, beside a scan and PyTorch.

Dense and convolutional ResNets in two and three dimensions, transformer encoders, and implicit GRUs, whose time steps are
the layers. Where one layer fills only a part of the device, all layers at once take less time than one after another;
where it fills all of it, as it does a processor of few cores, they take as many times longer as they do more work. The
error of the gradient stands beside every time.
"""

import argparse
import functools
import math
import sys
from typing import Any

import lp_jax
from benchmarks import one_device
from benchmarks.command import Field, Row, Suite, network_row, run
from benchmarks.harness import Tell
from benchmarks.networks import NETWORKS, SERIAL, UNITS, Pair
from benchmarks.one_device import Entry
from lp_jax._choice._fastest import SWEEPS


def _mgrit(forward: int, adjoint: int, **fields: Any) -> Pair:
    first, second = (
        lp_jax.MGRIT(iterations=k, storage="all", **fields) for k in (forward, adjoint)
    )
    return first, second


def pairs(network: str, layers: int) -> dict[str, Pair]:
    checkpointed = lp_jax.Serial(checkpoint_every=math.isqrt(layers))
    if network in (
        "paragru",
        "paralstm",
    ):  # states that move far in a step: for Newton's method alone
        newton = functools.partial(lp_jax.Newton, batch_axes=1)
        return {
            "Serial": SERIAL,
            "Serial, checkpoints": (checkpointed, checkpointed),
            "Newton, full, 4/1": (newton(iterations=4), newton(iterations=1)),
            "Newton, diagonal, 4/1": (
                newton(jacobian="diagonal", iterations=4),
                newton(jacobian="diagonal", iterations=1),
            ),
        }
    injection = lp_jax.Rediscretize()
    one, two = (lp_jax.Picard(sweeps=sweeps) for sweeps in (1, 2))
    solvers: dict[str, Pair] = {
        "Serial": SERIAL,
        "Serial, checkpoints": (checkpointed, checkpointed),
        "injection, 3 levels, 2/1": _mgrit(2, 1, levels=3, coarsening=4, coarse_step=injection),
        "Picard 1, 2 levels, 2/1": _mgrit(2, 1, coarsening=8, coarse_step=one),
        "Picard 2, 2 levels, 1/1": _mgrit(1, 1, coarsening=8, coarse_step=two),
        "Picard 1, 3 levels, 2/1": _mgrit(2, 1, levels=3, coarsening=8, coarse_step=one),
        TO_A_TOLERANCE: SWEEPS,
        "Picard, 8 windows, 3/2": (
            lp_jax.Windowed(sweeps=3, windows=8),
            lp_jax.Windowed(sweeps=2, windows=8),
        ),
    }
    if network == "voxels":
        thorough = {"coarsening": 4, "relaxation": "FCF", "coarse_step": injection}
        solvers["injection, FCF, 2/2"] = _mgrit(2, 2, **thorough)
    if network == "gru":
        for jacobian, iterations in (("full", 6), ("diagonal", 10)):
            solver = lp_jax.Newton(jacobian=jacobian, iterations=iterations, batch_axes=1)
            solvers[f"Newton, {jacobian}, {iterations}"] = solver, solver.for_adjoint()
    return solvers


TO_A_TOLERANCE = "Picard to 1e-3/1e-2"

MOST_JACOBIANS = 2 * 2**30
"""Bytes of full Jacobians above which Newton's method sits out: its prefix products take several times as much."""


NUMBERS = {"gru": UNITS, "paragru": 1, "paralstm": 2}
"""Of the state of an example, for each unit of width."""


def why_no_newton(size: int, steps: int, batch: int) -> str | None:
    """Return why full Jacobians of this many states are too large, or None."""
    nbytes = 4 * steps * batch * size**2
    if nbytes <= MOST_JACOBIANS:
        return None
    return f"the Jacobians of {steps} steps that it evaluates would take {nbytes / 2**30:.0f} GiB"


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    name, width, layers, batch = row
    tell("drawing weights")
    network = NETWORKS[name](width, layers, batch)
    solvers = pairs(name, layers)
    reason = why_no_newton(NUMBERS.get(name, 0) * width, layers, batch)
    too_large = (
        []
        if reason is None
        else [(each, reason) for each in solvers if each.startswith("Newton, full")]
    )
    entries = [Entry("lax.scan", network)]
    entries += [
        Entry(each, network, pair) for each, pair in solvers.items() if each not in dict(too_large)
    ]
    built = one_device.field(entries, options, tell, torch_threads=(1,))
    return built._replace(left_out=[*too_large, *built.left_out])


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
    rows="dense,16,1024,32 dense,64,256,32 dense,64,1024,32 dense,64,4096,32 dense,64,16384,32 dense,512,256,32 conv,8,64,50 "
    "encoder,128,64,4 encoder,128,128,4 encoder,128,512,4 voxels,4,64,4 gru,64,128,16 gru,16,1024,16 gru,64,1024,16 "
    "gru,64,16384,16",
    quick_rows="dense,4,64,4 encoder,8,64,2 gru,4,64,4",
    field=field,
    row=network_row(NETWORKS),
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
