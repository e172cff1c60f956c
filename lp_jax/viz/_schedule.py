"""The space-time picture of a training step: the work of each worker over time."""

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax.planning import summary
from lp_jax.planning._schedule import count
from lp_jax.planning._words import numbered
from lp_jax.planning._work import Event, Schedule
from lp_jax.viz._style import BLUE, GREEN, INK, NOTE, ORANGE, PURPLE, RED, SKY, bracket, dress, figure, legend, note

COLOURS = {
    "propagation": BLUE,
    "sweep": BLUE,
    "relaxation": BLUE,
    "coarse relaxation": SKY,
    "coarse right-hand side": ORANGE,
    "coarse solve": RED,
    "correction": PURPLE,
    "Newton iteration": PURPLE,
    "final sweep": GREEN,
    "states again": "#BBBBBB",
    "gradient": "#444444",
}
"""Colour of each phase of a solve. The gradient is a phase of its own."""

_LANE = 0.6  # height of a worker's blocks, of 1
_LONGEST = 5  # times the step's length: how much of serial propagation is drawn
_MOST_LABELS = 17


class Block(NamedTuple):
    """A phase of a worker without a pause, in evaluations of a layer."""

    worker: int
    phase: str
    start: float
    end: float


class Message(NamedTuple):
    """A state that a worker sends to the next one, in an adjoint solve to the previous one."""

    worker: int
    to: int
    time: float


class Timeline(NamedTuple):
    """Blocks and messages of a solve, and its end."""

    blocks: list[Block]
    messages: list[Message]
    end: float


def schedule(
    solver: Solver,
    num_layers: int,
    *,
    workers: int = 8,
    adjoint_solver: Solver | None = None,
    at_once: float = 1,
) -> Figure:
    """Draw the work of each worker over time in a training step, value and gradient.

    Time counts evaluations of a layer, as `lp_jax.planning.training_step` does. Messages take no time. With a tolerance, the
    largest number of iterations is drawn.

    Args:
        solver: solver of the forward solve.
        num_layers: number of layers, on all workers.
        workers: number of workers that the layers are spread over.
        adjoint_solver: solver of the adjoint solve; None means the settings of ``solver``, as in `lp_jax.solve`.
        at_once: number of layers that a worker evaluates at once, in the time of one, for a solver with ``at_once="auto"``.

    Raises:
        ValueError: for fewer than one layer or worker.

    Example:
        >>> import lp_jax
        >>> from lp_jax import viz
        >>> solver = lp_jax.MGRIT(coarsening=8, iterations=2, coarse_step=lp_jax.Identity(), storage="all")
        >>> viz.schedule(solver, 64, workers=8).get_suptitle()
        'A training step in 40 layer evaluations on 8 workers, 192 serially'
    """
    for name, number in (("num_layers", num_layers), ("workers", workers)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1; got {number}.")
    adjoint_solver = solver.for_adjoint() if adjoint_solver is None else adjoint_solver
    pairs, serial = (solver, adjoint_solver), (Serial(), Serial())
    there, back = timelines(pairs, num_layers, workers, at_once=at_once)
    serially = sum(line.end for line in timelines(serial, num_layers, 1, at_once=at_once))
    total = there.end + back.end
    title = f"A training step in {total:g} layer evaluations on {numbered(workers, 'worker')}, {serially:g} serially"
    fig = figure(title, width=13, height=2.6 + min(6.5, 0.55 * (workers + 1)))
    ax = fig.subplots()
    _draw(ax, there, 0.0)
    _draw(ax, back, there.end)
    bracket(ax, 0.0, there.end, -0.75, "forward")
    bracket(ax, there.end, total, -0.75, "adjoint")
    ax.axvspan(there.end, total, 0.0, 1.0, color="#F2F2F2", zorder=0)
    shown = min(serially, _LONGEST * total)
    ax.set_xlim(0, 1.02 * max(total, shown))
    _serial_lane(ax, workers, serially, shown)
    ax.set_ylim(workers + 0.6, -1.6)
    names = _labels(num_layers, workers, solver.resolve(num_layers))
    ax.set_yticks([*names, workers], [*names.values(), "serial,\none worker"])
    dress(ax, x="time, in evaluations of a layer", y="")
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    phases = dict.fromkeys(block.phase for line in (there, back) for block in line.blocks)
    handles: list[Artist] = [Patch(color=COLOURS.get(phase, SKY), label=phase) for phase in phases]
    if there.messages or back.messages:
        handles += ax.plot([], [], color=INK, marker="v", linewidth=1.4, label="message")
    legend(ax, "above", handles=handles, ncols=4, columnspacing=1.4)
    note(fig, _note(pairs, at_once, "Newton iteration" in phases))
    return fig


def timelines(pair: tuple[Solver, Solver], layers: int, workers: int, *, at_once: float) -> tuple[Timeline, Timeline]:
    """Forward and adjoint solve, each from time 0."""
    kept = pair[0].resolve(layers).keeps_states

    def one(solver: Solver, *, adjoint: bool) -> Timeline:
        active = len(parts(solver.resolve(layers), layers, workers))
        work = count(solver, layers, workers=active, at_once=at_once, kept=kept, adjoint=adjoint)
        return timeline(work, active, adjoint=adjoint)

    return one(pair[0], adjoint=False), one(pair[1], adjoint=True)


def parts(solver: Solver, layers: int, workers: int) -> list[range]:
    """Return the layers of each worker that has some: whole intervals of the coarsest level."""
    unit = solver.unit(layers)
    size = math.ceil(math.ceil(layers / unit) / workers) * unit
    return [range(first, min(first + size, layers)) for first in range(0, layers, size)]


def timeline(described: Schedule, workers: int, *, adjoint: bool) -> Timeline:
    """Return the blocks and messages of all workers over time, from the events of a solve."""
    blocks: list[Block] = []
    messages: list[Message] = []
    now, way = 0.0, -1 if adjoint else 1
    order = range(workers)[::way]
    for in_turn, events in _groups(described.events):
        work = _lengths(events)
        if in_turn:
            for worker in order:
                for phase, length in work:
                    blocks.append(Block(worker, phase, now, now + length / workers))
                    now = blocks[-1].end
                if worker != order[-1]:
                    messages.append(Message(worker, worker + way, now))
        elif events[0].kind == "message":
            messages += [Message(worker, worker + way, now) for worker in order[:-1]]
        else:
            for phase, length in work:
                blocks += [Block(worker, phase, now, now + length) for worker in order]
                now += length
    return Timeline(blocks, messages, now)


def _lengths(events: Sequence[Event]) -> list[tuple[str, float]]:
    """Return phases and their lengths; a transpose and the evaluation that it belongs to are one block."""
    lengths: list[tuple[str, float]] = []
    last = ""  # kind
    for event in events:
        phase = "gradient" if event.kind == "gradient" else event.phase
        length = float(event.times)
        if lengths and last != event.kind and lengths[-1][0] == phase:
            length += lengths.pop()[1]
        lengths.append((phase, length))
        last = event.kind
    return lengths


def _groups(events: Sequence[Event]) -> Iterator[tuple[bool, list[Event]]]:
    """Events that belong together: a loop that goes from worker to worker, messages at one time, or a batch."""

    def key(event: Event) -> tuple[bool, bool, str]:
        return event.in_turn, event.kind == "message" and not event.in_turn, event.phase if event.in_turn else ""

    for (in_turn, _, _), group in itertools.groupby(events, key):
        kept = [event for event in group if not (in_turn and event.kind == "message")]
        if kept:
            yield in_turn, kept


def _draw(ax: Axes, line: Timeline, start: float) -> None:
    lanes: dict[tuple[int, str], list[tuple[float, float]]] = collections.defaultdict(list)
    for block in line.blocks:
        lanes[block.worker, block.phase].append((start + block.start, block.end - block.start))
    for (worker, phase), spans in lanes.items():
        place = (worker - _LANE / 2, _LANE)
        ax.broken_barh(spans, place, facecolor=COLOURS.get(phase, SKY), edgecolor="white", linewidth=1.0, zorder=2)
    for message in line.messages:
        way = message.to - message.worker
        ends = (message.worker + way * _LANE / 2, message.to - way * _LANE / 2)
        ax.plot([start + message.time] * 2, ends, color=INK, linewidth=1.4, zorder=3, label="_message")
    if line.messages:
        times = [start + message.time for message in line.messages]
        places = [message.to - way * (_LANE / 2 + 0.08) for message in line.messages]
        ax.scatter(times, places, marker="v" if way > 0 else "^", s=24, color=INK, zorder=3)


def _serial_lane(ax: Axes, lane: int, whole: float, shown: float) -> None:
    ax.broken_barh([(0, shown)], (lane - _LANE / 2, _LANE), facecolor="#DDDDDD", zorder=1)
    text = f"{whole:g} evaluations" + (", beyond the picture →" if shown < whole else "")
    inside = shown > ax.get_xlim()[1] / 2
    at, side = (0.99, "right") if inside else (1.02, "left")
    ax.text(at * shown, lane, text, ha=side, va="center", fontsize=NOTE, color=INK)


def _labels(layers: int, workers: int, solver: Solver) -> dict[int, str]:
    """Return the labels of the lanes; of some, if there are many."""
    own = parts(solver, layers, workers)
    every = math.ceil(workers / _MOST_LABELS)
    names = {}
    for worker in range(0, workers, every):
        mine = own[worker] if worker < len(own) else range(0)
        what = f"layers {mine[0]}-{mine[-1]}" if len(mine) > 1 else f"layer {mine[0]}" if mine else "no layers"
        names[worker] = f"worker {worker}: {what}"
    return names


def _note(pair: tuple[Solver, Solver], at_once: float, newton: bool) -> str:
    of = "A worker evaluates its layers one after another" if at_once == 1 else "A worker evaluates its layers at once"
    text = f"Forward: {summary(pair[0])}. Adjoint: {summary(pair[1])}. {of}; messages take no time here."
    if newton:
        text += " A Newton iteration is drawn as one evaluation, and takes more: its Jacobians."
    if not (pair[0].exact and pair[1].exact):
        text += " Serial propagation is exact; with few iterations the gradient is approximate."
    return text
