"""Windows one after the other under a tolerance; their numbers are held against a loop in test_theory.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import mesh
from problems import dense_params, dense_state, dense_step
from problems import relative_error as distance

import lp_jax
from lp_jax._levels._result import DONE, FELL_BACK, NOT_CONVERGED


@pytest.mark.parametrize("comm", [None, mesh(4)], ids=["one device", "four"])
def test_the_last_sweep_tells_whether_the_tolerance_is_met(comm):
    """Forward and adjoint; the serial states where it is not met and ``fallback`` is set."""
    problem = lp_jax.Problem(dense_step, dense_params(52, 4, scale=3.0), dense_state(2, 4), t1=4.0, comm=comm)
    exact = problem.replace(comm=None).solve(solver=lp_jax.Serial()).y1

    @jax.jit
    def results(rtol, atol):
        solvers = (lp_jax.Windowed(sweeps=9, windows=4, rtol=rtol, atol=atol, fallback=kept) for kept in (False, True))
        (free, pull), (kept, _) = (problem.solve_vjp(solver=solver) for solver in solvers)
        return free, kept, pull(jnp.ones_like(free.y1))[1].result

    free, kept, adjoint = results(1e-4, 0.0)
    assert int(free.result) == int(kept.result) == int(adjoint) == DONE
    assert int(free.stats.iterations) == 9
    assert distance(free.y1, exact) < 1e-5
    free, kept, adjoint = results(0.0, 1e-30)
    assert (int(free.result), int(kept.result), int(adjoint)) == (NOT_CONVERGED, FELL_BACK, NOT_CONVERGED)
    np.testing.assert_allclose(kept.y1, exact, rtol=1e-13)
