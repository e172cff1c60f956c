"""Suite 1: a training step of a convolutional ResNet, on 28 x 28 images.

Opening layer relu(conv(y)), N layers ``y + h relu(conv(relu(conv(y))))`` with h = 1/N, closing layers
C*784 -> 32 -> 10, batch 50; forward, backward and update of SGD with momentum.
"""

import argparse
import functools
import sys

import lp_jax
from benchmarks import one_device
from benchmarks.command import Field, Row, Suite, run
from benchmarks.harness import Tell
from benchmarks.networks import SERIAL, Pair, conv, two_one
from benchmarks.one_device import Entry

BATCH = 50
FORMULATIONS = ("auto", "products", "xla")

PAIRS: dict[str, Pair] = {
    "Serial": SERIAL,
    "MGRIT 1 level": (lp_jax.MGRIT(levels=1), lp_jax.MGRIT(levels=1)),
    "MGRIT 3 levels, injection": two_one(levels=3, coarsening=4, coarse_step=lp_jax.Rediscretize()),
    "MGRIT 3 levels, Picard 1": two_one(levels=3, coarsening=4, coarse_step=lp_jax.Picard(sweeps=1)),
    "MGRIT 2 levels, Picard 1": two_one(levels=2, coarsening=4, coarse_step=lp_jax.Picard(sweeps=1)),
}


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    size, batch = (8, 4) if options.quick else (28, BATCH)
    channels, layers = row
    drawn = {c: conv(channels, layers, batch, size=size, formulation=c) for c in FORMULATIONS}
    network = drawn.pop(options.conv)
    scans = [Entry(f"lax.scan, {c}", other) for c, other in drawn.items() if c != "auto"]
    solvers = [Entry(name, network, pair) for name, pair in PAIRS.items()]
    entries = [Entry("lax.scan", network), *scans, *solvers]
    return one_device.field(entries, options, tell, torch_threads=options.torch_threads)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conv",
        choices=FORMULATIONS,
        default="auto",
        help="formulation of the convolution for baseline and solvers, as for lp_jax.nn.convolve; the scan is timed with the "
        "others too (default: auto)",
    )
    parser.add_argument(
        "--torch-threads",
        nargs="+",
        type=int,
        choices=range(1, 257),
        metavar="N",
        default=[1, 2],
        help="threads of PyTorch, each a contender (default: 1 2)",
    )


SUITE = Suite(
    name="resnet",
    title="Training step of a convolutional ResNet",
    about=__doc__ or "",
    examples=[
        ("", "the three rows"),
        ("--quick", "a tiny row, to see that all works"),
        ("--rows 8,64 --rounds 30", "one row, with more rounds"),
        ("--threads 1 --torch-threads 1", "one thread for everyone"),
        ("--conv xla", "solvers on XLA's own convolution"),
    ],
    sizes=("channels", "layers"),
    rows="3,32 8,64 4,256",
    quick_rows="2,32",
    field=field,
    add_options=_add_options,
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
