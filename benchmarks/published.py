"""Published speedups beside what counting evaluations says, where enough of their settings is known.

A step of the network is one unit of time forward and two backward, messages take nothing, each worker evaluates its layers one
after another. What is left out (pooling and closing layers, an interpreter, messages) makes the published figures smaller.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from benchmarks.propagation import Pair
from lp_jax import MGRIT, Rediscretize, Serial
from lp_jax.planning import Machine, predict

UNIT = Machine(at_once=(1,), forward=(1,), linearise=(1,), adjoint=(1,), gradient=(1,), serial=(1, 2), looped=True)
SERIAL = Serial(), Serial()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of a paper, or one that was measured with its code.

    Attributes:
        system: who.
        network: what, in words.
        layers: number of layers that one solve has.
        workers: number of workers.
        levels: of the hierarchy.
        coarsening: its factor.
        cycles: forward and adjoint.
        speedup: over serial propagation; None where it is the crossover that was published: ``workers`` then.
        note: what explains a deviation.
    """

    system: str
    network: str
    layers: int
    workers: int
    levels: int = 3
    coarsening: int = 4
    cycles: tuple[int, int] = (2, 1)
    speedup: float | None
    note: str = ""

    @property
    def solvers(self) -> Pair:
        """Injection, F-relaxation on the finest level and FCF below, states recomputed."""
        fields = {"levels": self.levels, "coarsening": self.coarsening, "coarse_step": Rediscretize()}
        forward, adjoint = (MGRIT(iterations=count, **fields) for count in self.cycles)
        return forward, adjoint

    def predicted(self, workers: int | None = None) -> float:
        """Speedup, as counted."""
        alone = predict(*SERIAL, self.layers, UNIT)
        return alone.seconds / predict(*self.solvers, self.layers, UNIT, workers=workers or self.workers).seconds

    @property
    def crossover(self) -> int:
        """First power of two of workers that are faster than one with serial propagation."""
        return next(2**k for k in range(20) if self.predicted(2**k) > 1)


FIGURES = (
    Published(
        system="TorchBraid, slides 2024",
        network="Tiny ImageNet, 4 blocks of 64 layers",
        layers=64,
        workers=16,
        speedup=2.5,
        note="pooling and the layers between blocks are serial",
    ),
    Published(system="the same", network="the same: crossover", layers=64, workers=4, speedup=None),
    Published(system="TorchBraid, slides 2024", network="encoder, 128 blocks, GUM", layers=128, workers=8, speedup=2.5),
    Published(
        system="Moon & Cyr 2022",
        network="implicit GRU, 128 steps, one node",
        layers=128,
        workers=32,
        speedup=6.5,
        note="at most 5 can be counted; a baseline that has costs of its own per step would explain more",
    ),
    Published(
        system="Kirby et al. 2020",
        network="MNIST, 4096 layers, blocks of 64",
        layers=4096,
        workers=64,
        levels=2,
        coarsening=64,
        cycles=(2, 2),
        speedup=10.2,
        note="cycles are not given: 2/2 is assumed",
    ),
    Published(
        system="Guenther et al. 2020",
        network="peaks, 1024 layers, converged: crossover",
        layers=1024,
        workers=16,
        levels=5,
        cycles=(5, 5),
        speedup=None,
        note="five cycles are assumed, which converge there",
    ),
    *(
        Published(
            system="TorchBraid, measured",
            network=f"{network}, {workers} rank{'s' * (workers > 1)}",
            layers=layers,
            workers=workers,
            speedup=serial / parallel,
            note="in C and Python",
        )
        for network, layers, serial, *times in (
            ("ResNet, 3 channels, 32 layers", 32, 100, 194, 168),
            ("ResNet, 8 channels, 64 layers", 64, 321, 711, 451),
            ("ResNet, 4 channels, 256 layers", 256, 1066, 2058, 1146),
            ("GRU, 128 steps, 64 units", 128, 79, 184, 106),
            ("GRU, 128 steps, 100 units", 128, 162, 386, 210),
            ("GRU, 1024 steps, 64 units", 1024, 807, 1605, 833),
            ("GRU, 1024 steps, 100 units", 1024, 1534, 3324, 1711),
        )
        for workers, parallel in enumerate(times, start=1)
    ),
)


def table(figures: Sequence[Published] = FIGURES) -> str:
    """A line for each figure."""
    lines = [
        "| system | network | workers | published | counted | counted / published | |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for one in figures:
        if one.speedup is None:
            said, counted, ratio = f"from {one.workers}", f"from {one.crossover}", one.crossover / one.workers
        else:
            said, counted, ratio = f"{one.speedup:.2f}", f"{one.predicted():.2f}", one.predicted() / one.speedup
        lines.append(
            f"| {one.system} | {one.network} | {one.workers} | {said} | {counted} | {ratio:.2f} | {one.note} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__).parse_args(arguments)
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
