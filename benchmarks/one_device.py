"""Contenders of one process: a scan, the library's solvers and PyTorch on the same network."""

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

from benchmarks.command import Field, wanted
from benchmarks.harness import Contender, Tell, relative_error
from benchmarks.manifest import jax_threads
from benchmarks.networks import Network, Pair
from benchmarks.training import trainer


class Entry(NamedTuple):
    """A contender to be built: without solvers it is a scan."""

    name: str
    network: Network
    solvers: Pair | None = None

    @property
    def family(self) -> str:
        if self.solvers is None:
            return "scan" if self.name == "lax.scan" else "other scan"
        return "exact" if self.name.startswith("Serial") or "1 level" in self.name else "iterated"


def field(
    entries: Iterable[Entry],
    options: argparse.Namespace,
    tell: Tell,
    *,
    updates: bool = True,
    torch_threads: Sequence[int] = (),
) -> Field:
    """Build the contenders that are wanted."""
    contenders: list[Contender] = []
    first, *others = entries
    exact = None
    for entry in [first, *(entry for entry in others if wanted(entry.name, options))]:
        tell(f"compiling {entry.name}")
        call = trainer(entry.network, entry.solvers, updates=updates)
        exact = call.gradient if exact is None else exact
        error = relative_error(call.gradient, exact)
        facts = {"family": entry.family, "threads": jax_threads(), "gradient_error": error}
        contenders.append(Contender(name=entry.name, call=call, facts=facts | call.facts))
    names = {f"PyTorch, {n} thread{'s' * (n > 1)}": n for n in torch_threads}
    names = {name: n for name, n in names.items() if wanted(name, options)}
    if names and (reason := why_no_torch(first.network.name)) is not None:
        return Field(contenders, [("PyTorch", reason)])
    for name, threads in names.items():
        from benchmarks.torch_loop import Loop

        tell(f"first step of {name}")
        loop = Loop(first.network, threads)
        facts = {
            "family": "torch",
            "threads": threads,
            "gradient_error": relative_error(loop.gradient, exact),
        }
        facts["residual_norm"] = math.nan
        contenders.append(Contender(name=name, call=loop, before=loop.take_threads, facts=facts))
    return Field(contenders, [])


def why_no_torch(network: str) -> str | None:
    if network in ("voxels", "paragru", "paralstm"):
        return "it has no loop of this network"
    if jax.default_backend() != "cpu":
        return "its loop is timed on a CPU only"
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return f"{error}; it is in the extra bench: pip install -e '.[bench]'"
    return None
