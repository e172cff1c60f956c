"""Scans that are not layers of a network: iterations that theory or measurement allows, states of the scan."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lp_jax
from benchmarks import scan_problems, scans

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("free_promotion")


@functools.partial(jax.jit, static_argnums=(0, 1))
def states(make, solver):
    """The solution, and all states by the scan."""
    return scans.solved(make(), solver)


def two_modes(path):
    """By HMC, with paths of ``path`` steps."""
    density = functools.partial(scan_problems.two_modes, half=1.5)
    return scan_problems.hmc(128, density, jnp.ones(2), size=0.2, path=path)


def adam(rate):
    """Three numbers at each place; the gradient is no part of the Jacobian, and all of what is solved."""
    return scan_problems.training(24, optax.adam(rate, eps_root=1e-10), batch=8, units=8)


SWEEPS = lp_jax.Picard(sweeps=40, rtol=1e-3)
NEWTON = lp_jax.Newton(iterations=128, rtol=1e-8, batch_axes=0)
DIAGONAL = lp_jax.Newton(jacobian="diagonal", iterations=24, rtol=1e-3, batch_axes=0)
PROBLEMS = {  # the fewest and the most iterations, and the largest error of any state against the scan
    "a sampler": (
        functools.partial(scan_problems.diffusion, 512, eta=0.0, samples=4),
        SWEEPS,
        1,
        9,
        1e-2,
    ),
    "a sampler with noise": (
        functools.partial(scan_problems.diffusion, 512, eta=1.0, samples=4),
        SWEEPS,
        1,
        28,
        1e-2,
    ),
    "a Kalman filter": (functools.partial(scan_problems.kalman, 128, axes=1), NEWTON, 1, 10, 1e-8),
    "short paths of HMC": (functools.partial(two_modes, 2), NEWTON, 1, 12, 1e-8),
    "long paths of HMC, which gain nothing": (
        functools.partial(two_modes, 40),
        NEWTON,
        64,
        128,
        1e-8,
    ),
    "Adam": (functools.partial(adam, 3e-4), DIAGONAL, 1, 9, 1e-3),
    "Adam at a large rate": (functools.partial(adam, 1e-2), DIAGONAL, 10, 24, 1e-3),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_iterations_and_errors(name):
    make, solver, fewest, most, error = PROBLEMS[name]
    solution, exact = states(make, solver)
    assert fewest <= solution.stats.iterations <= most and solution.result == 0
    assert scans.largest_error(solution.aux, exact) < error


def test_a_chain_on_a_log_concave_target_takes_few_iterations():
    log_density, mode = scan_problems.logistic(2)
    assert float(jnp.abs(jax.jit(jax.grad(log_density))(mode)).max()) < 1e-3
    solution, exact = states(lambda: scan_problems.mala(128, log_density, mode, size=0.02), NEWTON)
    moved = np.any(np.diff(exact, axis=0) != 0, axis=1)
    assert 0.5 < moved.mean() < 1  # some proposals are refused
    assert solution.stats.iterations <= 12 and solution.result == 0
    assert scans.largest_error(solution.aux, exact) < 1e-8


@pytest.mark.parametrize(("relaxation", "bound"), [("F", 0.3), ("FCF", 0.12)])
def test_cycles_on_the_heat_equation_converge_as_theory_says(relaxation, bound):
    """Two levels, implicit Euler on both: factors of 0.3 with F- and about 0.1 with FCF-relaxation.

    Dobrev, Kolev, Petersson, Schroder, "Two-level convergence theory for multigrid reduction in time", SIAM J. Sci. Comput. 39
    (2017).
    """
    cycles = scans.cycles(levels=2, relaxation=relaxation)
    solution, exact = states(functools.partial(scan_problems.heat, 256, points=31), cycles)
    norms = [norm for norm in solution.stats.residual_norms.tolist() if norm >= 0]
    assert (norms[-1] / norms[0]) ** (1 / (len(norms) - 1)) < bound
    assert int(solution.result) == 0 and scans.largest_error(solution.aux, exact) < 1e-6


def test_the_table_that_is_kept_is_that_of_the_suite():
    rows = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "scans.json").read_text())["rows"]
    assert [(row["problem"], row["steps"]) for row in rows] == [
        (case.name, case.steps) for case in scans.cases()
    ]
    assert scans.table(rows) in (ROOT / "benchmarks" / "results" / "cpu" / "scans.md").read_text()
    for row in rows:
        converged = not row["verdict"].startswith("fails")
        assert row["verdict"] == scans.verdict(converged, row["in_a_row"], row["steps"])


def test_the_command_runs(tmp_path, capsys):
    """Advantages: a linear recurrence whose Jacobian is a diagonal is exact after one iteration."""
    scans.main(["--quick", "--only", "advantages", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "scans.json").read_text())["rows"]
    assert row["iterations"] == 1 and row["error"] < 1e-13 and "works" in row["verdict"]
    assert scans.table([row]) in capsys.readouterr().out
    assert scans.table([row]) in (tmp_path / "scans.md").read_text()
