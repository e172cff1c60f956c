"""Two workers against one, on the processor: host devices of one process, MPI ranks, and serial propagation.

Rows of conv are training steps, dense rows loss and gradient as in suite `dense`, rows of gru training steps of two
implicit gated recurrent units on top of each other, whose time steps are the layers. Serial propagation, on one
thread and on all, PyTorch and the workers live in processes of their own, one thread per worker; they are built
one after the other, wait without spinning, and are timed in turn, with memory kept from step to step. A time of several
ranks is that of the slowest.
"""

import argparse
import functools
import itertools
import sys
from importlib.util import find_spec

from benchmarks.command import Field, Row, Suite, add_numbers, network_row, run, wanted
from benchmarks.group import Group, why_no_mpi
from benchmarks.harness import Contender, Tell, relative_error
from benchmarks.manifest import cores
from benchmarks.networks import SETTINGS, counted_ratio
from benchmarks.one_device import why_no_torch


def field(row: Row, options: argparse.Namespace, tell: Tell) -> Field:
    network, _, layers, _ = row
    workers, left_out = options.workers, []
    entries = [("lax.scan, 1 thread", "scan", "jax", 1)]
    if cores() > 1:
        entries.append((f"lax.scan, {cores()} threads", "other scan", "jax", cores()))
    if network == "gru":
        entries += [("Serial, 1 thread", "exact", "jax", 1)]
    for name, (family, kind, label) in itertools.product(
        SETTINGS, (("iterated", "devices", "devices"), ("ranks", "ranks", "ranks"))
    ):
        entries.append(
            (f"{name}, {workers} {label}", family, kind, 1 if kind == "ranks" else workers)
        )
    if reason := why_no_mpi():
        left_out.append(("MPI ranks", reason))
        entries = [entry for entry in entries if entry[2] != "ranks"]
    if network != "dense":
        if reason := why_no_torch(network):
            left_out.append(("PyTorch", reason))
        else:
            entries += [
                (f"PyTorch, {n} thread{'s' * (n > 1)}", "torch", "torch", n) for n in (1, 2)
            ]
    if find_spec("torchbraid") is None:
        left_out.append(
            ("TorchBraid", "it is not installed; its measured times are in benchmarks/README.md")
        )
    groups: dict[tuple[str, int], Group] = {}
    contenders: list[Contender] = []
    exact = None

    def close() -> None:
        for group in groups.values():
            group.close()

    try:
        for name, family, kind, threads in entries:
            if exact is not None and not wanted(name, options):
                continue
            key = (kind, threads if kind == "jax" else 0)
            if key not in groups:
                tell(f"starting processes: {kind}")
                groups[key] = Group(
                    kind, workers=workers, threads=cores() if kind == "torch" else threads
                )
            tell(f"building {name}")
            group, setting = groups[key], name.rsplit(", ", 1)[0]
            label = setting if setting in SETTINGS else name
            gradient, facts = group.build(label, row, options.quick, options.conv)
            exact = gradient if exact is None else exact
            facts |= {
                "family": family,
                "threads": threads,
                "gradient_error": relative_error(gradient, exact),
            }
            facts.setdefault("residual_norm", float("nan"))
            if setting in SETTINGS:
                facts["counted_ratio"] = counted_ratio(setting, layers, workers)

            def elsewhere(
                calls: int, group: Group = group, label: str = label
            ) -> tuple[float, float]:
                return group.time(label, calls)

            contenders.append(Contender(name=name, elsewhere=elsewhere, facts=facts))
    except BaseException:
        close()
        raise
    return Field(contenders, left_out, close)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_numbers(parser, ("--workers", 2, "Number of devices, and of ranks (default: 2)."))
    about = "Formulation of the convolution (default: auto)."
    parser.add_argument("--conv", choices=("auto", "products", "xla"), default="auto", help=about)


SUITE = Suite(
    name="ranks",
    title="Layers on two workers of one processor",
    about=__doc__ or "",
    examples=[
        ("", "all rows"),
        ("--quick", "a tiny row, to see that all works"),
        ("--rows conv,4,256,50 gru,64,128,50 --rounds 30", "two rows, with more rounds"),
        ("--only identity thread", "the identity coarse step, and what is serial"),
    ],
    sizes=("network", "width", "layers", "batch"),
    rows="conv,3,32,50 conv,8,64,50 conv,4,256,50 dense,64,256,32 dense,128,256,32 dense,64,1024,32 "
    "gru,64,128,50 gru,100,128,100 gru,64,1024,50 gru,100,1024,100",
    quick_rows="conv,2,32,4 dense,4,32,4 gru,4,32,4",
    field=field,
    add_options=_add_options,
    row=network_row(("conv", "dense", "gru")),
)
main = functools.partial(run, SUITE)

if __name__ == "__main__":
    sys.exit(main())
