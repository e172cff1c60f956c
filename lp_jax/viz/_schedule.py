"""The space-time picture of a training step: the work of each worker over time."""

import collections
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lp_jax import Solver, layer_slices
from lp_jax._arrays import _check
from lp_jax.planning._schedule import count
from lp_jax.planning._words import numbered
from lp_jax.planning._work import Event
from lp_jax.viz._style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    bracket,
    figure,
    legend_above,
    note,
    styled,
)

COLOURS = collections.defaultdict(
    lambda: SKY,  # of coarse relaxation, and of phases of a solver from outside
    {
        "propagation": BLUE,
        "sweep": BLUE,
        "relaxation": BLUE,
        "correction": PURPLE,
        "Newton iteration": PURPLE,
        "coarse right-hand side": ORANGE,
        "coarse solve": RED,
        "final sweep": GREEN,
        "states again": "#BBBBBB",
        "gradient": "#444444",
    },
)
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


@styled
def schedule(
    solver: Solver, num_layers: int, *, workers: int = 8, adjoint_solver: Solver | None = None
) -> Figure:
    """Draw the work of each worker over time in a training step, value and gradient.

    Time counts evaluations of a layer, as `lp_jax.planning.training_step` does: of one after another if the solver's
    ``at_once`` is "auto". Messages take no time. With a tolerance, the largest number of iterations is drawn. The layers are
    spread over the workers; solvers are those of `lp_jax.solve`. ValueError for fewer than one layer or worker.

    Example:
        >>> import lp_jax
        >>> from lp_jax import viz
        >>> solver = lp_jax.MGRIT(coarsening=8, iterations=2, coarse_step=lp_jax.Identity(), storage="all")
        >>> viz.schedule(solver, 64, workers=8).get_suptitle()
        'A training step in 40 layer evaluations on 8 workers, 192 serially'
    """
    _check.integer("num_layers", num_layers, least=1)
    _check.integer("workers", workers, least=1)
    adjoint_solver = adjoint_solver or solver.for_adjoint()
    there, back = timelines((solver, adjoint_solver), num_layers, workers)
    serially = 3 * num_layers  # forward, adjoint and gradient of each layer
    total = there.end + back.end
    on = numbered(workers, "worker")
    title = f"A training step in {total:g} layer evaluations on {on}, {serially:g} serially"
    fig = figure(title, width=13, height=2.6 + min(6.5, 0.55 * (workers + 1)))
    ax = fig.subplots()
    for name, line, start in (("forward", there, 0.0), ("adjoint", back, there.end)):
        _draw(ax, line, start)
        bracket(ax, start, start + line.end, -0.75, name)
    # The background of the adjoint solve is shaded, because both solves use the same colours.
    ax.axvspan(there.end, total, 0.0, 1.0, color="#F2F2F2", zorder=0)
    shown = min(serially, _LONGEST * total)
    end = 1.02 * max(total, shown)
    ax.broken_barh([(0, shown)], (workers - _LANE / 2, _LANE), facecolor="#DDDDDD", zorder=1)
    text = f"{serially:g} evaluations" + (", beyond the picture →" if shown < serially else "")
    at, side = (0.99, "right") if shown > end / 2 else (1.02, "left")
    ax.text(at * shown, workers, text, ha=side, va="center")
    ax.set(xlim=(0, end), ylim=(workers + 0.6, -1.6), xlabel="time, in evaluations of a layer")
    runs = layer_slices(num_layers, workers, solver, adjoint_solver)
    named = range(0, workers, math.ceil(workers / _MOST_LABELS))  # some, if there are many
    names = [f"worker {worker}: {_layers(runs[worker])}" for worker in named]
    ax.set_yticks([*named, workers], [*names, "serial,\none worker"])
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    # A dict keeps the order of first appearance, which a set would not.
    phases = dict.fromkeys(block.phase for line in (there, back) for block in line.blocks)
    handles: list[Artist] = [Patch(color=COLOURS[phase], label=phase) for phase in phases]
    if there.messages or back.messages:
        # An empty line gives the legend an entry without drawing anything.
        handles += ax.plot([], [], color=INK, marker="v", linewidth=1.4, label="message")
    legend_above(ax, handles=handles, ncols=4, columnspacing=1.4)
    turns = "one after another" if solver.at_once in ("auto", 1) else "at once"
    text = f"Forward: {solver.summary}. Adjoint: {adjoint_solver.summary}. "
    text += f"A worker evaluates its layers {turns}; messages take no time here."
    if "Newton iteration" in phases:
        text += " A Newton iteration is drawn as one evaluation, and takes more: its Jacobians."
    if not (solver.exact and adjoint_solver.exact):
        text += " Serial propagation is exact; with few iterations the gradient is approximate."
    note(fig, text)
    return fig


def _layers(run: slice) -> str:
    """Return the layers of a worker in words, such as "layers 0-7"."""
    if run.stop - run.start > 1:
        return f"layers {run.start}-{run.stop - 1}"
    return f"layer {run.start}" if run.stop > run.start else "no layers"


def timelines(pair: tuple[Solver, Solver], layers: int, workers: int) -> tuple[Timeline, Timeline]:
    """Return the forward and the adjoint solve, each of which begins at time 0."""
    kept = pair[0].resolve(layers).keeps_states
    forward = _timeline(pair[0], layers, workers, kept=kept, adjoint=False)
    return forward, _timeline(pair[1], layers, workers, kept=kept, adjoint=True)


def _timeline(solver: Solver, layers: int, workers: int, *, kept: bool, adjoint: bool) -> Timeline:
    """Return the blocks and messages of all workers over time, from the events of a solve.

    Events that belong together are a loop that goes from worker to worker, messages at one time, or a batch.
    """
    runs = layer_slices(layers, workers, solver)
    workers = sum(run.stop > run.start for run in runs)  # those with layers
    events = count(solver, layers, workers=workers, at_once=1, kept=kept, adjoint=adjoint).events
    blocks = []
    messages = []
    now = 0.0
    # The adjoint solve goes from the last layer to the first, so its messages go to the previous worker.
    way = -1 if adjoint else 1
    order = range(workers)[::way]

    def key(event: Event) -> tuple[bool, bool, str]:
        return (
            event.in_turn,
            event.kind == "message" and not event.in_turn,
            event.phase if event.in_turn else "",
        )

    # Consecutive events with one key happen together; `groupby` merges neighbours only, so the order of events stays.
    for (in_turn, sent, _), group in itertools.groupby(events, key):
        work = _lengths(event for event in group if event.kind != "message")
        # In a relay one worker is active after another, and each has its share of the time. Otherwise all are active at once.
        turns = [[worker] for worker in order] if in_turn else [list(order)]
        for active in turns:
            for phase, length in work:
                end = now + length / len(turns)
                blocks += [Block(worker, phase, now, end) for worker in active]
                now = end
            if sent or (in_turn and work):
                messages += [
                    Message(worker, worker + way, now) for worker in active if worker != order[-1]
                ]
    return Timeline(blocks, messages, now)


def _lengths(events: Iterable[Event]) -> list[tuple[str, float]]:
    """Return the phases and their lengths, where a transpose and the evaluation that it belongs to are one block."""
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


def _draw(ax: Axes, line: Timeline, start: float) -> None:
    """Draw a solve that begins at ``start``: a lane for each worker, and the messages between lanes."""
    lanes = collections.defaultdict(list)
    for block in line.blocks:
        lanes[block.worker, block.phase].append((start + block.start, block.end - block.start))
    for (worker, phase), spans in lanes.items():
        place = (worker - _LANE / 2, _LANE)
        ax.broken_barh(
            spans, place, facecolor=COLOURS[phase], edgecolor="white", linewidth=1.0, zorder=2
        )
    if line.messages:
        worker, to, sent = np.array(line.messages).T
        way = to[0] - worker[0]  # the same for all messages of a solve
        times = start + sent
        ends = [worker + way * _LANE / 2, to - way * _LANE / 2]
        ax.plot([times, times], ends, color=INK, linewidth=1.4, zorder=3)
        # The marker stands a little off the lane, so that it does not cover the block that receives.
        tips = to - way * (_LANE / 2 + 0.08)
        ax.scatter(times, tips, marker="v" if way > 0 else "^", s=24, color=INK, zorder=3)
