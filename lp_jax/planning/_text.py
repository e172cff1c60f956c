"""A plan as text, for people."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from lp_jax._solver import Solver

if TYPE_CHECKING:
    from lp_jax.planning._plan import Choice, Plan

_MAIN = ("levels", "coarsening", "iterations", "coarse_step", "sweeps")
_MOST = 8  # lines of a table
WORTH = 1.15  # times as fast as serial propagation a solver must be to be recommended: predictions are no better


def code(solver: Any) -> str:
    """The solver as code, without the fields that are as they are by themselves, main ones apart."""
    shown = [
        f"{field.name}={code(value) if isinstance(value, Solver) else repr(value)}"
        for field in dataclasses.fields(solver)
        if (value := getattr(solver, field.name)) != field.default or field.name in _MAIN
    ]
    return f"{type(solver).__name__}({', '.join(shown)})"


def table(plan: "Plan") -> str:
    """The recommendation, the fastest candidates, and what other devices would give."""
    machine = plan.machine
    title = f"{plan.layers} layers on {plan.workers} worker{'s' * (plan.workers > 1)}"
    lines = [f"{title}{f' of {machine.name}' if machine.name else ''}, gradient error at most {plan.error:.0e}", ""]
    rows: list[tuple[str, ...]] = [("ms", "speedup", "gradient error", "MB", "solver")]
    rows += [_row(plan, choice) for choice in _shown(plan)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines += ["  ".join([*(x.rjust(w) for x, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    lines += ["", f"Use {plan.code}", f"  {reason(plan)}"]
    many = [row for row in plan.scaling() if row.both is not None]
    numbers = [(f"{d.devices}", *(_ms(x) for x in (d.layers, d.data, d.pipeline, d.both)), _split(d)) for d in many]
    head = ("devices", "layers", "examples", "pipeline", "both", "as")
    widths = [max(len(row[i]) for row in (head, *numbers)) for i in range(6)]
    wires = "" if machine.latency else "; what messages take is not known, and counted as nothing"
    lines += ["", f"ms of a training step on more devices, spread along{wires}"]
    lines += ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in (head, *numbers)]
    layers = [(d.layers, d.devices) for d in many if d.layers is not None]
    crossing = next((devices for seconds, devices in layers if seconds < 0.99 * plan.alone), None)
    if crossing is None:
        lines.append(
            "Along the layers alone: with what was looked at, no number of devices is faster than one with serial propagation."
        )
    else:
        seconds, devices = min(layers)
        lines.append(
            f"Along the layers alone: faster than serial propagation from {crossing} device{'s' * (crossing > 1)} on, "
            f"at most {_times(plan.alone / seconds)} times, at {devices}."
        )
    return "\n".join(lines)


def reason(plan: "Plan") -> str:
    """Why this one."""
    if not plan.solver.exact:
        text = f"predicted {_times(plan.speedup)} times as fast as serial propagation on one worker"
        if plan.speedup < 1:
            text += ", which is the better place for all layers"
        return text + (f"; {plan.unprobed} faster ones were not looked at" if plan.unprobed else "") + "."
    faster = [c for c in plan.choices if c.time.seconds * WORTH <= plan.serial.time.seconds]
    looked_at = sum(c.error is not None for c in faster)
    if looked_at:
        left = f", and {plan.unprobed} were not looked at" if plan.unprobed else ""
        many = "s are" if looked_at > 1 else " is"
        text = f"{looked_at} solver{many} clearly faster, none with a gradient error of at most {plan.error:.0e}"
        return f"{text}{left}. {_instead(plan)}"
    if faster:
        return "faster solvers are listed; what their gradients are worth on your network, nobody looked at yet."
    why = (
        "layers run one after another there"
        if plan.machine.looped
        else "a layer fills the device, or there are few of them"
    )
    return f"nothing that does more work is clearly faster, as {why}. {_instead(plan)}"


def _instead(plan: "Plan") -> str:
    """What else makes use of devices."""
    many = max(2, plan.workers)
    there = plan.scaling((many,))[0]
    known = {"along the examples": there.data, "in a pipeline": there.pipeline, "along the layers": there.layers}
    found = {name: seconds for name, seconds in known.items() if seconds is not None}
    name, seconds = min(found.items(), key=lambda item: item[1])
    gain = plan.alone / seconds
    if gain < 1.01:
        return f"On {many} devices nothing helps either."
    return f"On {many} devices: {name}, {_times(gain)} times as fast as on one."


def _shown(plan: "Plan") -> list["Choice"]:
    """The fastest of those that matter: looked at or, if none was, all; with the best and serial propagation."""
    probed = [c for c in plan.choices if c.probed is not None]
    shown = (probed or list(plan.choices))[:_MOST]
    return sorted({id(c): c for c in (*shown, plan.best, plan.serial)}.values(), key=lambda c: c.time.seconds)


def _row(plan: "Plan", choice: "Choice") -> tuple[str, ...]:
    error = "?" if choice.error is None else "exact" if choice.error == 0 else f"{choice.error:.1e}"
    error = error if choice.error is None or math.isfinite(choice.error) else "diverges"
    times = f"{plan.alone / choice.time.seconds:.2f}"
    return _ms(choice.time.seconds), times, error, f"{choice.memory.bytes / 1e6:.3g}", _both(*choice[:2])


def _both(solver: Solver, adjoint_solver: Solver) -> str:
    """The forward solver, and what is different in the adjoint one."""
    if type(solver) is not type(adjoint_solver):
        return f"{code(solver)}, adjoint {code(adjoint_solver)}"
    pairs = {f.name: getattr(adjoint_solver, f.name) for f in dataclasses.fields(solver)}  # type: ignore[arg-type]
    others = [f"{name}={value!r}" for name, value in pairs.items() if value != getattr(solver, name)]
    return code(solver) + (f", adjoint {', '.join(others)}" if others else "")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g}"


def _times(gain: float) -> str:
    return f"{gain:.0f}" if gain >= 10 else f"{gain:.2g}"


def _split(devices: Any) -> str:
    return "-" if devices.both is None else "{} x {}".format(*devices.split)
