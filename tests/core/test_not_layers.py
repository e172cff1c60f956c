"""Scans that are not layers of a network: iterations that theory or measurement allows, states and gradients of the scan."""

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

pytestmark = pytest.mark.usefixtures("standard_promotion", "free_ranks")


@pytest.fixture
def free_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.partial(jax.jit, static_argnums=(0, 1))
def states(make, solver, *values):
    """The solution, and all states by the scan: what is made of some values is made in the same program."""
    return scans.solved(make(*values), solver)


def solved(make, solver, *values):
    """Iterations, the result's code, and the largest error of any state against the scan."""
    solution, exact = states(make, solver, *values)
    return int(solution.stats.iterations), int(solution.result), scans.largest_error(solution.aux, exact)


def sampler(eta):
    return scan_problems.diffusion(512, eta=eta, samples=4)


@pytest.mark.parametrize(("eta", "sweeps"), [(0.0, 9), (1.0, 28)])
def test_a_sampler_of_many_steps_takes_few_sweeps(eta, sweeps):
    taken, code, error = solved(sampler, lp_jax.Picard(sweeps=40, rtol=1e-3), eta)
    assert taken <= sweeps and code == 0 and error < 1e-2


def advantages():
    return scan_problems.advantages(200)


def test_the_gradient_of_advantages_is_exact_after_one_iteration():
    """A linear recurrence whose Jacobian is a diagonal. The command below solves it."""
    solver = lp_jax.Newton(jacobian="diagonal", iterations=1)

    @jax.jit
    def both():
        """Of a sum over all states, by the first carry and what is scanned over: through the solver, and through the scan."""
        made = advantages()

        def gradient(scan):
            def loss(init, xs):
                return jnp.sum(jnp.sin(scan(made.body, init, xs, reverse=made.reverse)[1]))

            return jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(made.init, made.xs))

        return gradient(functools.partial(lp_jax.scan, solver=solver)), gradient(jax.lax.scan)

    for found, exact in zip(*both(), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-12 * np.abs(exact).max())


def kalman():
    return scan_problems.kalman(128, axes=1)


def test_a_kalman_filter_takes_few_iterations():
    solver = lp_jax.Newton(iterations=30, rtol=1e-6, batch_axes=0)
    taken, code, error = solved(kalman, solver)
    assert taken <= 9 and code == 0 and error < 1e-8


NEWTON = lp_jax.Newton(iterations=128, rtol=1e-8, batch_axes=0)


def test_a_chain_on_a_log_concave_target_takes_few_iterations():
    log_density, mode = scan_problems.logistic(2)
    assert float(jnp.abs(jax.jit(jax.grad(log_density))(mode)).max()) < 1e-3
    solution, exact = states(lambda: scan_problems.mala(128, log_density, mode, size=0.02), NEWTON)
    moved = np.any(np.diff(exact, axis=0) != 0, axis=1)
    assert 0.5 < moved.mean() < 1  # some proposals are refused
    assert solution.stats.iterations <= 12 and solution.result == 0
    assert scans.largest_error(solution.aux, exact) < 1e-8


def two_modes(path):
    """By HMC, with paths of so many steps."""
    density = functools.partial(scan_problems.two_modes, half=1.5)
    return scan_problems.hmc(128, density, jnp.ones(2), size=0.2, path=path)


def test_short_paths_of_hmc_take_few_iterations_and_long_ones_gain_nothing():
    """States are right after as many iterations as steps, but a large part of them is needed."""
    taken, code, error = solved(two_modes, NEWTON, 2)
    assert taken <= 12 and code == 0 and error < 1e-8
    taken, _, error = solved(two_modes, NEWTON, 40)
    assert 64 <= taken <= 128 and error < 1e-8


def test_adam_takes_more_iterations_the_larger_its_rate():
    """Three numbers at each place; the gradient is no part of the Jacobian, and all of what is solved."""
    solver = lp_jax.Newton(jacobian="diagonal", iterations=24, rtol=1e-3, batch_axes=0)

    def make(rate):
        return scan_problems.training(24, optax.adam(rate, eps_root=1e-10), batch=8, units=8)

    taken = []
    for rate in (3e-4, 1e-2):
        count, code, error = solved(make, solver, rate)
        assert code == 0 and error < 1e-3
        taken.append(count)
    assert taken[0] < taken[1] and taken[0] <= 9


def factor(solution):
    norms = [norm for norm in solution.stats.residual_norms.tolist() if norm >= 0]
    return (norms[-1] / norms[0]) ** (1 / (len(norms) - 1))


def heat():
    return scan_problems.heat(256, points=31)


@pytest.mark.parametrize(("relaxation", "bound"), [("F", 0.3), ("FCF", 0.12)])
def test_cycles_on_the_heat_equation_converge_as_theory_says(relaxation, bound):
    """Two levels, implicit Euler on both: factors of 0.3 with F- and about 0.1 with FCF-relaxation.

    Dobrev, Kolev, Petersson, Schroder, "Two-level convergence theory for multigrid reduction in time", SIAM J. Sci. Comput. 39
    (2017).
    """
    solution, exact = states(heat, scans.cycles(levels=2, relaxation=relaxation))
    assert factor(solution) < bound
    assert int(solution.result) == 0 and scans.largest_error(solution.aux, exact) < 1e-6


def test_the_table_that_is_kept_is_that_of_the_suite():
    rows = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "scans.json").read_text())["rows"]
    assert [(row["problem"], row["steps"]) for row in rows] == [(case.name, case.steps) for case in scans.cases()]
    assert scans.table(rows) in (ROOT / "benchmarks" / "results" / "cpu" / "scans.md").read_text()
    for row in rows:
        converged = not row["verdict"].startswith("fails")
        assert row["verdict"] == scans.verdict(converged, row["in_a_row"], row["steps"])


def test_the_command_runs(tmp_path, capsys):
    scans.main(["--quick", "--only", "advantages", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "scans.json").read_text())["rows"]
    assert row["iterations"] == 1 and row["error"] < 1e-13 and "works" in row["verdict"]
    assert scans.table([row]) in capsys.readouterr().out
    assert scans.table([row]) in (tmp_path / "scans.md").read_text()
