"""The default over MPI ranks beside `lax.scan` on one: value and gradient of the networks of suite `default`, and five more.

Started by MPI, with a core for each rank: ``mpirun --bind-to core -n 2 python -m benchmarks.ranks_default``. All ranks wait at
a barrier before each call; a call takes as long as on the slowest rank. The order of the programs changes from round to
round, as a program is slower after another one than after itself.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("MPI4JAX_NO_WARN_JAX_VERSION", "1")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import lp_jax
from benchmarks import default
from benchmarks.networks import NETWORKS, SERIAL
from lp_jax.cli._heap import keep_heap

MORE = "dense,128,128,32 encoder,32,64,4 conv,8,64,50 gru,64,128,50 mlp,32,128,16"


def gradient(
    given: dict[str, Any], comm: lp_jax.MPIComm | None, solver: lp_jax.Solver | None
) -> Callable[[], Any]:
    """Value and gradient of a loss of the last state and aux, compiled and called once."""
    operands = {
        name: given.pop(name) for name in ("params", "y0", "shared", "data") if name in given
    }

    def loss(differentiated: dict[str, Any], others: dict[str, Any]) -> jax.Array:
        solution = lp_jax.solve(**differentiated, **others, **given, solver=solver, comm=comm)
        seen = jax.tree.leaves((solution.y1, solution.aux))
        return sum(jnp.mean(jnp.sin(x.astype(jnp.float32))) for x in seen)

    differentiated = {
        name: operands.pop(name) for name in ("params", "y0", "shared") if name in operands
    }
    call = jax.jit(jax.value_and_grad(loss))

    def run() -> Any:
        return jax.block_until_ready(call(differentiated, operands))

    run()
    return run


def measure(row: str, comm: lp_jax.MPIComm, rounds: int) -> dict[str, float] | None:
    """Median seconds of every program, of the slowest rank; on rank 0."""
    name, *sizes = row.split(",")
    width, layers, batch = map(int, sizes)
    network = NETWORKS[name](width, layers, batch, **({"size": 8} if name == "conv" else {}))
    weights, x = jax.tree.map(jnp.asarray, (network.weights, network.x))
    whole = network.problem(weights, x, SERIAL)
    whole.pop("comm", None)
    steps = jax.tree.leaves((whole.get("params"), whole.get("data")))[0].shape[0]
    mine = lp_jax.layer_slices(steps, comm.size, lp_jax.Serial())[comm.rank]
    part = dict(whole)
    for stacked in ("params", "data"):
        part[stacked] = jax.tree.map(lambda x: x[mine], whole.get(stacked))
    programs = {
        "scan": gradient(dict(whole), None, lp_jax.Serial()) if comm.rank == 0 else lambda: None,
        "default": gradient(dict(part), comm, None),
        "default again": gradient(dict(part), comm, None),
    }
    spent: dict[str, list[float]] = {which: [] for which in programs}
    orders = list(itertools.permutations(programs))
    for turn in range(rounds):
        for which in orders[turn % len(orders)]:
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            programs[which]()
            spent[which].append(time.perf_counter() - start)
    medians = {which: float(np.median(seconds)) for which, seconds in spent.items()}
    everywhere = MPI.COMM_WORLD.gather(medians)
    jax.clear_caches()
    if everywhere is None:
        return None
    return {which: max(ranks[which] for ranks in everywhere) for which in programs}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=f"{default.SUITE.rows} {MORE}".split())
    parser.add_argument("--rounds", type=int, default=48)
    options = parser.parse_args()
    keep_heap()
    comm = lp_jax.MPIComm(patience=300)
    ratios = []
    if comm.rank == 0:
        print(
            "| network, width, layers, batch | scan, ms | default | again |\n|--|--:|--:|--:|",
            flush=True,
        )
    for row in options.rows:
        seconds = measure(row, comm, options.rounds)
        if seconds is None:
            continue
        scan = seconds.pop("scan")
        ratios.append(tuple(s / scan for s in seconds.values()))
        first, again = ratios[-1]
        print(f"| {row} | {1e3 * scan:.3g} | {first:.2f} | {again:.2f} |", flush=True)
    if comm.rank == 0:
        for which, column in zip(("default", "again"), zip(*ratios, strict=True), strict=True):
            within, above = sum(r <= 1.05 for r in column), sum(r > 1.3 for r in column)
            print(f"{which}: {within} of {len(column)} within 1.05 of the scan, {above} above 1.3")
    return 0


if __name__ == "__main__":
    sys.exit(main())
