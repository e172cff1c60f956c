"""Published speedups, and those measured with TorchBraid, against what counting evaluations gives.

A layer takes one unit of time forward and two backward, messages take nothing, each worker evaluates its layers one after
another. What is left out makes published figures smaller. The table is in docs/benchmarks.md.
"""

import math

import pytest

from lp_jax import MGRIT, Rediscretize, Serial
from lp_jax.planning import Machine, predict

UNIT = Machine(at_once=(1,), forward=(1,), adjoint=(1,), gradient=(1,))

TWO = {"levels": 2, "coarsening": 64}
THREE = {"levels": 3, "coarsening": 4}
FIVE = {"levels": 5, "coarsening": 4}
# layers, workers, hierarchy, forward and adjoint cycles, published speedup over serial propagation
PUBLISHED = {
    "TorchBraid, slides 2024: Tiny ImageNet, blocks of 64 layers": (64, 16, THREE, (2, 1), 2.5),
    "TorchBraid, slides 2024: encoder, 128 blocks": (128, 8, THREE, (2, 1), 2.5),
    "Moon & Cyr 2022: implicit GRU, 128 steps": (128, 32, THREE, (2, 1), 6.5),
    "Kirby et al. 2020: 4096 layers": (4096, 64, TWO, (2, 2), 10.2),
}
# layers; milliseconds of serial propagation, of TorchBraid on one rank and on two
MEASURED = {
    "ResNet, 3 channels": (32, 100, 194, 168),
    "ResNet, 8 channels": (64, 321, 711, 451),
    "ResNet, 4 channels": (256, 1066, 2058, 1146),
    "GRU, 128 steps, 64 units": (128, 79, 184, 106),
    "GRU, 128 steps, 100 units": (128, 162, 386, 210),
    "GRU, 1024 steps, 64 units": (1024, 807, 1605, 833),
    "GRU, 1024 steps, 100 units": (1024, 1534, 3324, 1711),
}
FIGURES = PUBLISHED | {
    f"TorchBraid, measured: {name}, {workers} rank": (
        layers,
        workers,
        THREE,
        (2, 1),
        serial / parallel,
    )
    for name, (layers, serial, *times) in MEASURED.items()
    for workers, parallel in enumerate(times, start=1)
}


def counted(layers, workers, hierarchy, cycles):
    """Speedup with injection, F-relaxation on the finest level and FCF below, states recomputed, as `lp_jax` cuts layers."""
    solvers = (MGRIT(iterations=count, coarse_step=Rediscretize(), **hierarchy) for count in cycles)
    serial = predict(Serial(), Serial(), layers, UNIT).seconds
    return serial / predict(*solvers, layers, UNIT, workers=workers).seconds


def counted_by_levels(layers, workers, hierarchy, cycles):
    """The same by the formula of a cycle, where every level is cut evenly, as XBraid does."""
    m, deep = hierarchy["coarsening"], hierarchy["levels"] - 1
    finest, *coarse = (math.ceil(layers / m ** (level + 1) / workers) for level in range(deep))
    down = (m + 1) * finest + (2 * m + 1) * sum(coarse)
    up = (m - 1) * sum(coarse) + layers // m**deep
    # the first cycle starts on the coarsest level; the last sweep visits every layer
    forward, adjoint = ((count - 1) * down + count * up + m * finest for count in cycles)
    states_again = cycles[1] * (m - 1) * finest
    gradients = m * finest
    return 3 * layers / (forward + 2 * adjoint + states_again + gradients)


@pytest.mark.parametrize("figure", FIGURES)
def test_published_speedups_are_counted_within_thirty_percent(figure):
    *setting, speedup = FIGURES[figure]
    assert 0.7 < counted_by_levels(*setting) / speedup < 1.3


@pytest.mark.parametrize(
    "layers, hierarchy, cycles, crossover",
    [
        pytest.param(64, THREE, (2, 1), 4, id="TorchBraid, slides 2024: Tiny ImageNet"),
        pytest.param(1024, FIVE, (5, 5), 16, id="Guenther et al. 2020: peaks, converged"),
    ],
)
def test_published_crossovers_are_counted(layers, hierarchy, cycles, crossover):
    """The first power of two of workers that are faster than one with serial propagation."""
    assert (
        next(2**k for k in range(20) if counted_by_levels(layers, 2**k, hierarchy, cycles) > 1)
        == crossover
    )


@pytest.mark.parametrize(
    "layers, hierarchy, cycles", [(64, THREE, (2, 1)), (4096, TWO, (2, 2)), (1024, FIVE, (5, 5))]
)
def test_the_planner_counts_what_the_formula_does_where_every_worker_holds_an_interval_of_every_level(
    layers, hierarchy, cycles
):
    intervals = layers // hierarchy["coarsening"] ** (hierarchy["levels"] - 1)
    for workers in (1, intervals // 2, intervals):
        setting = layers, workers, hierarchy, cycles
        assert counted(*setting) == pytest.approx(counted_by_levels(*setting), rel=1e-12)
    assert counted(layers, 4 * intervals, hierarchy, cycles) == counted(
        layers, intervals, hierarchy, cycles
    )
