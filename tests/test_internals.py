"""Statements of docs/internals.md on the code: its drawing of the calls, made from a traceback, and its tour.

``python tests/test_internals.py`` prints the drawing.
"""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import lp_jax

PACKAGE = Path(lp_jax.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "internals.md"
SOLVERS = {
    "serial": (lp_jax.Serial(), 1),
    "picard": (lp_jax.Picard(sweeps=2), 1),
    "default": (None, 1),
    "mgrit": (lp_jax.MGRIT(), 2),
    "mgrit, 3 levels": (lp_jax.MGRIT(levels=3, coarsening=2), 3),
    "newton": (lp_jax.Newton(batch_axes=1), 1),
}


def calls(solver, *, examples=20):
    """For each time that the step's code runs in a gradient: who called whom, as (function, file)."""
    found = []

    def step(y, layer):
        frame, stack = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                stack.append((frame.f_code.co_qualname, path.name))
            frame = frame.f_back
        found.append(stack[::-1])
        return y + layer.dt * jnp.tanh(y @ layer.params)

    def loss(params):
        return jnp.sum(lp_jax.solve(step, params, jnp.ones((examples, 4)), solver=solver).y1 ** 2)

    jax.jit(jax.value_and_grad(loss)).trace(jnp.ones((32, 4, 4)))
    return found


def drawn():
    """The calls of a forward solve, from `solve` on: the last time that the step's code runs."""
    stack = calls(lp_jax.Picard(sweeps=2))[-1]
    return stack[[name for name, _ in stack].index("solve") :]


@pytest.mark.parametrize("examples", (2, 20))
@pytest.mark.parametrize("name", SOLVERS)
def test_the_steps_code_runs_twice_per_level(name, examples):
    """Once to see what it returns, once for the program that all solves evaluate, adjoint ones too."""
    solver, levels = SOLVERS[name]
    assert len(calls(solver, examples=examples)) == 2 * levels


def test_the_drawing_is_the_traceback():
    page = PAGE.read_text()
    lines = re.findall(r"^ *\d+ +(\S+) +(_\w+\.py)", page, flags=re.MULTILINE)
    assert lines == [(name.replace("<locals>.", ""), file) for name, file in drawn()]
    (number,) = re.findall(r"(\d+) calls lie between", page)
    assert int(number) == len(lines)


def test_the_tour_is_of_ten_short_files():
    tour = PAGE.read_text().partition("## A tour of ten files")[2].partition("\n## ")[0]
    files = re.findall(r"^\| *\d+ *\| `([\w/]+\.py)`", tour, flags=re.MULTILINE)
    assert len(files) == len(set(files)) == 10
    assert all(len((PACKAGE / file).read_text().splitlines()) <= 300 for file in files)


if __name__ == "__main__":
    for number, (name, file) in enumerate(drawn(), 1):
        print(f"{number:2}  {name.replace('<locals>.', ''):28} {file}")
