"""The default beside `lax.scan` on one device: time of loss and gradient, compile time, and the gradient's error.

The rows are networks of all kinds and sizes. The default should never take longer than the scan, beyond the noise that a second
scan shows, and less where sweeps win. The table names what it took and the time that it predicted.
"""

import argparse
import functools
import sys

import jax

import lp_jax
from benchmarks import one_device
from benchmarks.command import Field, Row, Suite, network_row, run
from benchmarks.harness import Tell
from benchmarks.networks import NETWORKS, SERIAL
from benchmarks.one_device import Entry
from lp_jax import planning


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    name, width, layers, batch = row
    network = NETWORKS[name](width, layers, batch, **({"size": 8} if name == "conv" else {}))
    weights, x = jax.tree.map(jax.numpy.asarray, (network.weights, network.x))
    taken = planning.default(lp_jax.Problem(**network.problem(weights, x, SERIAL)))
    about = taken.solver.summary + (" at most" if taken.solver.has_tolerance else "")
    entries = [
        Entry("lax.scan", network),
        Entry("lax.scan again", network),
        Entry("Serial", network, SERIAL),
        Entry(f"the default: {about}", network, (None, None)),
    ]
    return one_device.field(entries, options, tell, updates=False)


SUITE = Suite(
    name="default",
    title="The default beside lax.scan",
    about=__doc__ or "",
    examples=[
        ("", "the whole grid, ten minutes"),
        ("--quick", "tiny rows, to see that all works"),
        ("--rows dense,16,4096,4 conv,8,64,50", "two rows"),
    ],
    sizes=("network", "width", "layers", "batch"),
    rows="dense,4,16384,1 dense,8,4096,4 dense,16,4096,1 dense,32,1024,1 dense,10,3000,3 dense,20,2000,2 dense,64,8,16 "
    "dense,40,300,24 dense,64,1024,1 dense,96,64,32 dense,256,64,8 mlp,8,1024,2 mlp,64,24,32 encoder,16,256,1 encoder,64,24,2 "
    "conv,6,48,8 gru,8,1024,4 gru,24,300,16 paragru,16,1024,4",
    quick_rows="dense,4,32,4",
    field=field,
    row=network_row(NETWORKS),
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
