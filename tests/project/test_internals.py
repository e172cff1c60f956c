"""Statements of docs/internals.md on the code: its drawing of the calls, made from a traceback, and its tour.

``python tests/project/test_internals.py`` prints the drawing.
"""

import re
import sys
from pathlib import Path
from unittest import mock

import house
import jax
import jax.numpy as jnp
import pytest

import lp_jax
from lp_jax._choice._fastest import SWEEPS
from lp_jax._levels._layer import LayerStep

PACKAGE = Path(lp_jax.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "internals.md"
SOLVERS = {
    "serial": (lp_jax.Serial(), 1),
    "picard": (lp_jax.Picard(sweeps=2), 1),
    "sweeps": (SWEEPS[0], 1),
    "mgrit": (lp_jax.MGRIT(), 2),
    "mgrit, 3 levels": (lp_jax.MGRIT(levels=3, coarsening=2), 3),
    "newton": (lp_jax.Newton(batch_axes=1), 1),
}


def callers(frame):
    """Who called whom, from the outermost call of ours on, as (function, file)."""
    stack = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            stack.append((frame.f_code.co_qualname, path.name))
        frame = frame.f_back
    return stack[::-1]


def trace(solver, step, *, examples=20):
    """Trace a gradient."""

    def loss(params):
        return jnp.sum(lp_jax.solve(step, params, jnp.ones((examples, 4)), solver=solver).y1 ** 2)

    jax.jit(jax.value_and_grad(loss)).trace(jnp.ones((32, 4, 4)))


def calls(solver, **options):
    """The `callers` of the step's code, each time that it runs in a gradient."""
    stacks = []

    def step(y, layer):
        stacks.append(callers(sys._getframe(1)))
        return y + layer.dt * jnp.tanh(y @ layer.params)

    trace(solver, step, **options)
    return stacks


def evaluations(solver):
    """The `callers` of the step's program, each time that an iteration in a gradient evaluates it."""
    stacks, evaluate = [], LayerStep.evaluate

    def watch(self, *arguments, **options):
        stacks.append(
            [
                name
                for name, _ in callers(sys._getframe(1))
                if not name.startswith("check_arguments")
            ]
        )
        return evaluate(self, *arguments, **options)

    with mock.patch.object(LayerStep, "evaluate", watch):
        trace(solver, lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params))
    return [s for s in stacks if any(name.endswith(".improve") for name in s)]


def drawn():
    """The calls of a forward solve, from `solve` on: the last time that the step's code runs."""
    stack = calls(lp_jax.Picard(sweeps=2))[-1]
    return stack[[name for name, _ in stack].index("solve") :]


# with few examples, gradients of weights are sums of outer products
@pytest.mark.parametrize(
    ("name", "examples"), [*((name, 20) for name in SOLVERS), ("picard", 2), ("mgrit", 2)]
)
def test_the_steps_code_runs_twice_per_level(name, examples):
    """Once to see what it returns, once for the program that all solves evaluate, adjoint ones too."""
    solver, levels = SOLVERS[name]
    assert len(calls(solver, examples=examples)) == 2 * levels


def test_the_drawing_is_the_traceback():
    page = PAGE.read_text()
    lines = re.findall(r"^ *\d+ +(\S+) +(_\w+\.py)", page, flags=re.MULTILINE)
    assert lines == [(name.replace("<locals>.", ""), file) for name, file in drawn()]
    (number,) = re.findall(r"(\d+) calls lead from", page)
    assert int(number) == len(lines)


@pytest.mark.parametrize(
    ("row", "solver", "coarse"),
    [
        ("`Picard` to a tolerance", SWEEPS[0], False),
        ("`MGRIT`, relaxation", lp_jax.MGRIT(), False),
        ("`MGRIT`, solve on the coarsest level", lp_jax.MGRIT(), True),
    ],
)
def test_calls_in_an_iteration(row, solver, coarse):
    """The longest way to the step's program in an iteration, and the call that runs its code where it runs."""
    (written,) = re.findall(
        rf"^\| {re.escape(row)} \| (\d+) \| (\d+) \|$", PAGE.read_text(), flags=re.MULTILINE
    )
    stacks = [stack for stack in evaluations(solver) if ("coarse_solve" in stack) == coarse]
    relaxations = [s for s in stacks if coarse or solver is SWEEPS[0] or "relaxed" in s]
    lengths = [
        max(len(s) + 2 for s in relaxations if s[0] == verb)
        for verb in ("solve", "Program.__call__.<locals>.bwd")
    ]
    assert lengths == list(map(int, written))


def test_the_tour_is_of_ten_short_files():
    tour = PAGE.read_text().partition("## A tour of ten files")[2].partition("\n## ")[0]
    files = re.findall(r"^\| *\d+ *\| `([\w/]+\.py)`", tour, flags=re.MULTILINE)
    assert len(files) == len(set(files)) == 10
    assert all(house.tokens_of((PACKAGE / file).read_text()) <= 3_100 for file in files)


if __name__ == "__main__":
    for number, (name, file) in enumerate(drawn(), 1):
        print(f"{number:2}  {name.replace('<locals>.', ''):28} {file}")
