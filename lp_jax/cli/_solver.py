"""Solvers on the command line: an option for every field, and back."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import click

from lp_jax import MGRIT, Clip, Damping, Newton, Picard, Rediscretize, Serial, Shrink, spatial
from lp_jax._solver import Solver
from lp_jax._spatial import Restriction
from lp_jax.cli._grouped import Option
from lp_jax.planning import RECOMMENDED
from lp_jax.planning._candidates import RELAXATIONS

# What `lp-jax train` uses if nothing else is said; the help texts show these.
#
# Sweeps until the residual has fallen so far: on dense ResNets of 64 layers with T = 2, 4, 5, 16, at their start and
# trained, the gradient's error was 3e-5 to 3e-3, after 5 to 14 sweeps. Two cycles with injection were wrong by 60 % and more.
SWEEPS = RECOMMENDED

# Recurrent units move farther in a step than sweeps over all of them bear. Width 64 trained on BasicMotions for 240 steps:
# this 5e-2, Picard(2) 4e-1, injection with 2/1 cycles 9e-1; `Newton(iterations=4, relaxations=16)` 3e-2 at half the depth
# and five times the work, for a device that has room.
CYCLES = MGRIT(levels=2, coarsening=4, iterations=1, coarse_step=Picard(sweeps=3))

_OF_MGRIT = tuple(field.name for field in dataclasses.fields(MGRIT))
KINDS: Mapping[str, tuple[str, ...]] = {
    "mgrit": _OF_MGRIT,
    "picard": ("sweeps", "windows", "rtol", "atol", "storage"),
    "newton": ("jacobian", "damping", "iterations", "relaxations", "rtol", "atol", "storage"),
    "serial": (),
    "auto": (),
}
"""What ``--solver`` may be, and which options each takes."""

FIELDS = (*_OF_MGRIT, "sweeps", "windows", "jacobian", "damping", "relaxations")
GROUPS = {"": "Solver", "adjoint_": "Solver of the adjoint system (what is not set follows the forward solver)"}


class Syntax(NamedTuple):
    """How a field is spelled."""

    metavar: str
    parse: Callable[[str], Any]


def _many(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """One value, or several between commas, one per level."""

    def parse_many(text: str) -> Any:
        values = tuple(parse(part.strip()) for part in text.split(","))
        return values[0] if len(values) == 1 else values

    return parse_many


def _component(text: str) -> Rediscretize | Solver:
    """A coarse step, or the coarsest level's solver: "inject", "mean", "serial", "picard:2:trajectory", "newton:2"."""
    if text in ("inject", "mean"):
        return Rediscretize(params=text)
    if text == "serial":
        return Serial()
    if match := re.fullmatch(r"picard:(\d+)(?::(start|trajectory))?", text):
        return Picard(sweeps=int(match[1]), around=match[2] or "start")
    if match := re.fullmatch(r"newton:(\d+)(?::(full|diagonal))?", text):
        return Newton(iterations=int(match[1]), jacobian=match[2] or "full", batch_axes=_BATCH_AXES)
    raise ValueError(f"got {text!r}")


_BATCH_AXES = 1  # the first axis of every state is that of the examples


def _damping(text: str) -> Damping:
    """Of ``shrink:0.1`` or ``clip:1``."""
    kind, _, number = text.partition(":")
    if kind == "shrink":
        return Shrink(by=float(number))
    if kind == "clip":
        return Clip(limit=float(number))
    raise ValueError(f"got {text!r}")


def _transfers(text: str) -> Any:
    """Of the number of axes that are coarsened; 0 is none."""
    return spatial(int(text)) if int(text) > 0 else None


SYNTAX: Mapping[str, Syntax] = {
    "levels": Syntax("N", int),
    "coarsening": Syntax("M[,M...]", _many(int)),
    "iterations": Syntax("N", int),
    "rtol": Syntax("X", float),
    "atol": Syntax("X", float),
    "relaxation": Syntax("F|FCF|...[,...]", _many(str)),
    "c_weight": Syntax("W", float),
    "cycle": Syntax("V|F|W", str),
    "min_coarse": Syntax("N", int),
    "coarse_step": Syntax("inject|mean|picard:N[:trajectory]|newton:N[:diagonal]|serial", _component),
    "coarsest": Syntax("serial|picard:N|newton:N[:diagonal]", _component),
    "spatial": Syntax("D[,D...]", _many(_transfers)),
    "storage": Syntax("c_points|all", str),
    "interval_map": Syntax("auto|vmap|loop", str),
    "sweeps": Syntax("N", int),
    "windows": Syntax("N", int),
    "jacobian": Syntax("full|diagonal|identity", str),
    "damping": Syntax("shrink:X|clip:X", _damping),
    "relaxations": Syntax("N", int),
}

_HELP: Mapping[str, str] = {
    "relaxation": "F, FCF, FCFCF, ..., or one per level, finest first (the last one repeats)",
    "cycle": "kind of cycle",
    "coarse_step": (
        "what stands in for the layers of an interval on the coarse levels: the layer itself with the interval's dt, "
        "at the first layer's parameters (inject) or at their mean (mean); N Picard sweeps over the interval's layers, "
        "around the state that enters or the last trajectory; N Newton iterations on them; or those layers one by one "
        "(serial: exact in one cycle)"
    ),
    "coarsest": "solver of the coarsest level",
    "spatial": (
        "number of axes of space, such as 2 for images: states have half the points along each on the next coarser level; "
        "0 keeps them, several values are one per level. Needs --relaxation FCF"
    ),
    "sweeps": (
        "of --solver picard: number of sweeps over all layers; with a tolerance their largest number. If left out, as "
        "many as --rtol 1e-3 and --adjoint-rtol 1e-2 take"
    ),
    "rtol": "stop when the residual norm is at most this times the first one",
    "windows": "of --solver picard: parts of the network that all sweeps but the last go over one after the other",
    "jacobian": "of --solver newton, for small states: Jacobians of the layers, their diagonals, or none",
    "damping": (
        "of --solver newton, where iterations overflow: Jacobians times 1 - X, or made smaller where a row has a sum of "
        "magnitudes above X"
    ),
    "relaxations": (
        "of --solver newton: sweeps before the first iteration, in which every layer takes the state that entered it before"
    ),
}


def spell(value: Any) -> str:
    """The spelling of a field's value; what `Syntax.parse` reads."""
    if value is None:
        return "0"
    if isinstance(value, tuple) and isinstance(value[0], Restriction):
        return str(value[0].dims)
    if isinstance(value, tuple):
        return ",".join(map(spell, value))
    if isinstance(value, Rediscretize):
        return str(value.params)
    if isinstance(value, Serial):
        return "serial"
    if isinstance(value, Picard):
        return f"picard:{value.sweeps}" + (":trajectory" if value.around == "trajectory" else "")
    if isinstance(value, Shrink):
        return f"shrink:{value.by}"
    if isinstance(value, Clip):
        return f"clip:{value.limit}"
    if isinstance(value, Newton):
        return f"newton:{value.iterations}" + ("" if value.jacobian == "full" else f":{value.jacobian}")
    return str(value)


def default_solvers(model: str) -> tuple[Solver, Solver]:
    """What a model is trained with if nothing else is said: forward, and for the adjoint system."""
    return (CYCLES, CYCLES) if model == "gru" else SWEEPS


def solver_options(model: str) -> Callable[[Callable], Callable]:
    """All options that say how the layers of a model are solved for."""
    return lambda command: _solver_options(command, default_solvers(model)[0])


def _solver_options(command: Callable, default: Solver) -> Callable:
    for prefix in reversed(GROUPS):
        for name in reversed(FIELDS):
            command = _option(prefix, name)(command)
        command = _kind_option(prefix, default)(command)
    serial = "the exact baseline: --solver serial"
    return click.option("--serial", is_flag=True, default=None, cls=Option, group=GROUPS[""], help=serial)(command)


def _kind_option(prefix: str, default: Solver) -> Callable[[Callable], Callable]:
    kinds = list(KINDS)
    text = "how the layers are solved for; auto: what lp-jax plan recommends; an option of one kind chooses it"
    text += f"  [default: {_kind(default)}]"
    if prefix:
        kinds.remove("auto")
        text = "the same kind as the forward solver's"
    return click.option(_flag(prefix + "solver"), type=click.Choice(kinds), cls=Option, group=GROUPS[prefix], help=text)


def _option(prefix: str, name: str) -> Callable[[Callable], Callable]:
    flag, defaults = _flag(prefix + name), _defaults(name)
    default = next(iter(defaults.values()))
    text = f"as {_flag(name)}" if prefix else _documentation(name)
    if isinstance(default, bool):
        both = f"{flag}/{_flag(f'{prefix}no_{name}')}"
        shown = "" if prefix else f"  [default: {'yes' if default else 'no'}]"
        return click.option(both, default=None, cls=Option, group=GROUPS[prefix], help=text + shown)
    if not prefix and any(value is not None for value in defaults.values()):
        others = [f", {kind} {spell(value)}" for kind, value in defaults.items() if value != default]
        text += f"  [default: {'none' if default is None else spell(default)}{''.join(others)}]"
    return click.option(flag, metavar=SYNTAX[name].metavar, cls=Option, group=GROUPS[prefix], help=text)


def _defaults(name: str) -> dict[str, Any]:
    """What a field is in each kind of solver if nothing is said, by the kind."""
    return {kind: getattr(_start(kind, {}, False), name) for kind, names in KINDS.items() if name in names}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _documentation(name: str) -> str:
    """What the solver's own docstring says of a field, where it speaks a language that fits here too."""
    if name in _HELP:
        return _HELP[name]
    found = re.search(rf"^ {{4}}{name}: (.*?)(?=^ {{4}}\S|^\S|\n\n)", inspect.getdoc(MGRIT) or "", re.M | re.S)
    text = " ".join(found[1].split()) if found else ""
    return text.replace("`", "").rstrip(".")


def build(options: Mapping[str, Any], defaults: tuple[Solver, Solver] = SWEEPS) -> tuple[Solver, Solver]:
    """The forward and the adjoint solver.

    Args:
        options: what the options of `solver_options` were given, by name; None where they were not.
        defaults: what they are where nothing is given.

    Returns:
        Both; with ``--solver auto`` the defaults, as long as nobody plans.

    Raises:
        click.UsageError: for a value that is none, and for an option of another solver.
    """
    if options.get("serial") and options.get("solver") not in (None, "serial"):
        raise click.UsageError(f"--serial and --solver {options['solver']} contradict each other; leave out one.")
    given = {prefix: _given(options, prefix) for prefix in GROUPS}
    kind = "serial" if options.get("serial") else options.get("solver") or _implied(given[""], _kind(defaults[0]))
    if kind == "auto":
        _refuse_foreign("", kind, given[""])
        if options.get("adjoint_solver") or given["adjoint_"]:
            raise click.UsageError("--solver auto chooses the adjoint solver, too; leave out --adjoint-... options.")
        return defaults
    adjoint_kind = options.get("adjoint_solver") or kind
    _refuse_foreign("", kind, given[""])
    _refuse_foreign("adjoint_", adjoint_kind, given["adjoint_"])
    followed = {name: value for name, value in given[""].items() if name in KINDS[adjoint_kind]}
    forward = _make("", kind, given[""])
    adjoint = _make("adjoint_", adjoint_kind, followed | given["adjoint_"], adjoint=not followed)
    return forward, adjoint if given["adjoint_"] else adjoint.for_adjoint()


def _kind(solver: Solver) -> str:
    return type(solver).__name__.lower()


def _implied(given: Mapping[str, Any], default: str) -> str:
    """The kind of solver that all given options are of: the default one, if these are of that, too."""
    return next((kind for kind in (default, *KINDS) if given.keys() <= set(KINDS[kind])), default)


def _given(options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    values = {}
    for name in FIELDS:
        text = options.get(prefix + name)
        if text is None:
            continue
        try:
            values[name] = text if isinstance(text, bool) else SYNTAX[name].parse(text)
        except ValueError:
            raise click.UsageError(f"{_flag(prefix + name)} takes {SYNTAX[name].metavar}; got {text!r}.") from None
    return values


def _refuse_foreign(prefix: str, kind: str, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in KINDS[kind]:
            owner = next(owner for owner, names in KINDS.items() if name in names)
            raise click.UsageError(
                f"{_flag(prefix + name)} is of --{prefix}solver {owner}, not {kind}.".replace("_", "-")
            )


def _make(prefix: str, kind: str, values: Mapping[str, Any], *, adjoint: bool = False) -> Solver:
    try:
        return dataclasses.replace(_start(kind, values, adjoint), **values)
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition(" ")
        text = f"{_flag(prefix + name)} {rest}" if name in FIELDS else str(error)
        raise click.UsageError(text) from None


def _start(kind: str, values: Mapping[str, Any], adjoint: bool) -> Any:
    """What the values are set in. A number of sweeps is one that is made, unless a tolerance is given, too."""
    if kind == "picard":
        return Picard() if values.keys() & {"sweeps", "windows"} else SWEEPS[adjoint]
    if kind == "newton":
        return Newton(relaxations=RELAXATIONS, batch_axes=_BATCH_AXES)
    return CYCLES if kind == "mgrit" else Serial()


def with_effort(solver: Solver, iterations: int, coarse_step: Any = None) -> Solver:
    """The solver with so many iterations and no tolerance; with another coarse step, too, where it has one."""
    if isinstance(solver, Picard):
        return dataclasses.replace(solver, sweeps=iterations, rtol=None, atol=None)
    if isinstance(solver, Newton):
        return dataclasses.replace(solver, iterations=iterations, rtol=None, atol=None)
    if isinstance(solver, MGRIT):
        coarse_step = solver.coarse_step if coarse_step is None else coarse_step
        return dataclasses.replace(solver, iterations=iterations, rtol=None, atol=None, coarse_step=coarse_step)
    return solver
