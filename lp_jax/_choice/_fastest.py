"""`Fastest`, the default: the fastest pair by the cost of a layer, read from its program, and a device's times."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from lp_jax._arrays._check import register
from lp_jax._choice._footprint import Footprint
from lp_jax._choice._processor import Processor
from lp_jax._solvers._elementwise import Elementwise, intervals
from lp_jax._solvers._newton import Newton
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax._solvers._sweeps import Picard

Pair = tuple[Solver, Solver]
"""A forward and an adjoint solver."""

Option = tuple[float, Pair]
"""Predicted seconds, and the pair that takes them."""

SERIAL: Pair = Serial(), Serial()


@register()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fastest(Solver):
    """The default: the solvers that are predicted to be fastest for a network and a device; ``solver=None`` is its short form.

    They are chosen when a solve is traced, forward and adjoint, by the cost of a layer; `planning.default` says which.

    Args:
        rtol: tolerance of sweeps and of Newton's method, where these are chosen; that of the adjoint's sweeps is ten times as
            large, that of Newton's method with shared Jacobians twenty times. A tighter one takes more iterations, so that they
            pay less often. None takes exact methods only, so that numbers depend on the device by rounding only. The choice
            depends on it: it is a Python number, and another one compiles again.

    Raises:
        ValueError: for an ``rtol`` that is not between 0 and 0.05; and where a single method is wanted: as a part of another
            solver, as an ``adjoint_solver`` by itself, for a hierarchy.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> from lp_jax import planning
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)
        >>> problem = lp_jax.Problem(step, jax.ShapeDtypeStruct((512, 64, 64), "float32"), jnp.zeros((32, 64), "float32"))
        >>> with planning.assume("H200"):
        ...     for solver in (lp_jax.Fastest(), lp_jax.Fastest(rtol=None)):
        ...         print(solver, "takes", type(planning.default(problem, solver=solver).solver).__name__)
        Fastest(rtol=0.001) takes Picard
        Fastest(rtol=None) takes Serial
    """

    rtol: float | None = 1e-3
    chooses = True

    def __post_init__(self) -> None:
        rtol = self.rtol
        if rtol is not None and not (isinstance(rtol, float) and 0 < rtol < 0.05):
            raise ValueError(
                f"rtol of Fastest must be a float between 0 and 0.05, or None for exact methods "
                f"only; got {rtol!r}. Some of the "
                "tolerances are 20 times as large, and the choice depends on it, so that it cannot "
                "be traced."
            )

    def resolve(self, steps: int = 1, *, warm: bool = False) -> NoReturn:
        raise ValueError(
            f"{self!r} stands for solvers that are chosen for a whole network, and here a single "
            f"method is wanted. Name one, like Picard(...) or Serial(); "
            f"lp_jax.planning.default(problem, solver={self!r}) returns those that it stands for."
        )

    iterations = keeps_states = property(resolve)


def sweeps_to(rtol: Any) -> tuple[Picard, Picard]:
    """Return sweeps to a tolerance that fall back to serial propagation; gradient errors stay below ten times ``rtol``."""
    forward = Picard(sweeps=32, rtol=rtol, fallback=True)
    return forward, dataclasses.replace(forward, rtol=10 * rtol)


def typical(rtol: Any) -> int:
    """Return the number of sweeps to a tolerance on networks near an ODE.

    There s sweeps leave an error of ``(L T)^(s + 1) / (s + 1)!``, because they do so for y' = L y. With L T = 2/3 the number is 5
    at 1e-3 and 3 at 1e-2, as was measured.
    """
    return 1 + sum(_LT**s / math.factorial(s) > rtol for s in range(2, 33))


SWEEPS = sweeps_to(1e-3)
_LT = 2 / 3  # Lipschitz constant of the layers times the time of the network
_LAST = 3  # sweeps that a solve makes besides: the last evaluations, the gradient
_GAIN = 0.55  # most of the time of serial propagation that another pair may be predicted to take
# Seconds that sweeps and Newton's method must save in a call for each
# operation of the step's program: they take some 50 ms more
# to compile for each, in their many copies of the step, which pays after 2,500 calls.
_COMPILING = 2e-5
_ITERATIONS, _RELAXATIONS = 10, 16
# The fixed costs of one kernel through the layers: it takes as long as 30 launches of other kernels, and moves as many bytes
# as 2 evaluations of all layers.
_STARTS = 30
_MOVED = 2
MOST_NUMBERS = 256  # of an example's state, for Jacobians


class Layers(NamedTuple):
    """A network and its device, as the choice sees them: known when the network is traced."""

    footprint: Footprint
    layers: int
    workers: int
    processor: Processor
    state: int  # bytes of the state
    # number of examples along the first axis of the state, if the layer's program keeps them apart; else 0
    examples: int
    numbers: int  # of an example's state
    recurrent: bool  # whether all layers have the same weights
    # whether each layer has arrays of its own although the weights are shared, like the inputs of a recurrent network
    driven: bool = False
    # number of leaves of the state, if a layer combines only numbers at equal positions of them; else 0
    in_place: int = 0
    # numbers in a leaf of the state, if one kernel may march through all layers; else 0
    places: int = 0


def choose(layers: Layers, rtol: float | None = 1e-3) -> tuple[Pair, float]:
    """Return the pair that is predicted to be fastest, and its seconds of value and gradient.

    It is serial propagation, over several workers a relay, unless another pair is predicted to take at most 0.55 of its time
    (0.95 of a relay's on TPUs), and to save more than its longer compilation costs. Without an ``rtol`` only exact methods are
    compared. Cycles over one interval for each worker are not compared, because as many as make them exact cost what a relay
    does, and send more messages. Sweeps get a budget: they may cost as much as serial propagation, so that on a network on which
    they fail they at most double its time.
    """
    serial = _serial(layers)
    # Without a known cost nothing can be compared, so the solver that always works is taken.
    if not layers.footprint.counted:
        return SERIAL, serial
    options = list(_kernel(layers))
    if rtol is not None:
        options += _newton(layers, rtol)
        # The states of driven networks move as far in a step as they are large, so that sweeps fail there.
        moving = layers.recurrent and layers.driven
        if not moving and not layers.places:  # a kernel is exact, and moves fewer bytes
            options += _sweeps(layers, rtol)
    # Sweeps and Newton's method, which have tolerances, compile the step many times, and must earn that back.
    compiled = serial - _COMPILING * layers.footprint.operations
    gain = _GAIN if layers.workers == 1 else layers.processor.relay_gain
    faster = [
        (seconds, pair)
        for seconds, pair in options
        if seconds <= gain * serial and (seconds <= compiled or not pair[0].has_tolerance)
    ]
    seconds, pair = min([*faster, (serial, SERIAL)], key=lambda option: option[0])
    return pair, seconds


def _serial(at: Layers) -> float:
    """Return the seconds of serial propagation and its gradient. Over several workers it is a relay, whose turns cost more."""
    p, others = at.processor, at.workers - 1
    turns = at.workers * p.launch * p.turn_kernels * at.footprint.kernels
    turns += at.layers * p.turn_passes * at.state / p.bandwidth
    propagated = sum(p.serial(at.footprint, at.layers, at.workers))
    return propagated if not others else propagated + turns + 2 * others * _message(at)


def _message(at: Layers) -> float:
    p = at.processor
    return p.latency + at.state / min(p.bandwidth, p.link)


def _sweeps(at: Layers, rtol: float) -> Iterator[Option]:
    """Yield the time of sweeps over all layers, with a budget of as many sweeps as cost what serial propagation costs.

    Nothing is yielded where these are fewer than are expected to be needed.
    """
    mine = math.ceil(at.layers / at.workers)
    # A prefix sum over W workers takes about log2 W messages.
    messages = 0 if at.workers == 1 else 2 + (at.workers - 1).bit_length()
    p, levels = at.processor, (mine - 1).bit_length()
    summed = mine * p.sum_passes * at.state / p.swept(at.footprint, mine)
    summed += levels * p.sum_kernels * p.launch
    one = p.batch(at.footprint, mine) + summed + messages * _message(at)
    swept = sweeps_to(rtol)
    expected = [min(typical(s.rtol), at.layers) for s in swept]
    needed = sum(expected)
    budget = int(min(_serial(at) / one, 1000)) - _LAST
    if budget < needed:
        return
    # The budget of sweeps is shared in proportion to the expected numbers, so that both solves fail late alike.
    forward, backward = (
        dataclasses.replace(s, sweeps=min(s.sweeps, budget * sweeps // needed))
        for s, sweeps in zip(swept, expected, strict=True)
    )
    yield one * (needed + _LAST), (forward, backward)


def _kernel(at: Layers) -> Iterator[Option]:
    """Yield the time of one kernel through all layers, or through intervals of them.

    Intervals take two iterations forward, one back, and a last march.
    """
    if not (at.places and at.processor.kernel_step):
        return
    count = intervals(at.layers, at.places)
    # steps of the adjoint take half the time
    steps = 1.5 * at.layers if count == 1 else 4 * (at.layers / count + count)
    solver = Elementwise()
    marched = _STARTS * at.processor.launch + at.processor.kernel_step * steps
    moved = _MOVED * at.processor.batch(at.footprint, at.layers)
    yield marched + moved, (solver, solver)


def _newton(at: Layers, rtol: float) -> Iterator[Option]:
    """Yield the times of Newton's method on a recurrent network with a small state, on a device that a layer does not fill.

    Iterations are in proportion to the digits of the tolerance, as where errors fall by a factor: with shared Jacobians they do,
    with others fewer are enough.
    """
    if not (
        at.recurrent
        and at.examples
        and at.numbers <= MOST_NUMBERS
        and at.processor.wide
        and at.workers == 1
    ):
        return
    d, p = at.numbers, at.processor
    solver = Newton(iterations=_ITERATIONS, batch_axes=1, rtol=rtol, fallback=True)
    relaxed = dataclasses.replace(solver, relaxations=_RELAXATIONS)
    shared = dataclasses.replace(solver, jacobian="shared", iterations=16, rtol=20 * rtol)
    # solver, matrices and columns of each, iterations forward and back to 1e-3
    kinds = [(relaxed, at.examples, d, 5 + 1), (shared, 1, d, 5 + 5)]
    if at.in_place:
        diagonal = dataclasses.replace(solver, jacobian="diagonal")
        kinds = [(diagonal, at.examples * d // at.in_place, at.in_place, 4 + 2)]
    for forward, matrices, columns, iterations in kinds:
        # of the whole batch: a shared Jacobian takes a column from each example
        evaluations = max(1.0, min(matrices, at.examples) / at.examples * columns)
        evaluated = at.layers * evaluations * p.one(at.footprint, steps=at.layers)
        each = p.newton(at.layers, matrices, columns) + evaluated
        relaxing = forward.relaxations * p.batch(at.footprint, at.layers)
        seconds = iterations * math.log(rtol, 1e-3) * each + relaxing
        yield seconds, (forward, forward.for_adjoint())
