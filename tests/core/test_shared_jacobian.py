"""`Newton(jacobian="shared")`: one Jacobian for the batch, against its recursions written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent
from problems import relative_error

import lp_jax

N, BATCH, WIDTH = 13, 4, 4  # as many examples as units: weights have the shape of a state


def weights():
    rng = np.random.default_rng(0)
    return rng.normal(size=(WIDTH, WIDTH)) * 0.7, rng.normal(size=WIDTH)


def inputs():
    return np.random.default_rng(1).normal(size=(N, BATCH, WIDTH))


def step(y, layer):
    w, b = layer.shared
    return jnp.tanh(y @ w + layer.data + b[None])


def knows_the_batch(y, layer):
    """The same for batches of this size only."""
    return step(y.reshape(BATCH, WIDTH), layer)


def shared(iterations, **fields):
    return lp_jax.Newton(jacobian="shared", iterations=iterations, **fields)


def mean_jacobians(entries):
    """Of every layer, at the mean of what enters it and of its inputs: ``d out_i / d in_j``."""
    (w, b), x = weights(), inputs()
    slopes = 1 - np.tanh(entries.mean(axis=1) @ w + x.mean(axis=1) + b) ** 2
    return slopes[:, :, None] * w.T


@pytest.mark.parametrize(("body", "iterations"), [(step, 3), (knows_the_batch, 2)])
def test_iterates(body, iterations):
    (w, b), x, y0 = weights(), inputs(), np.random.default_rng(2).normal(size=(BATCH, WIDTH))
    u = np.repeat(y0[None], N, axis=0)
    for _ in range(iterations):
        entries = np.concatenate([y0[None], u[:-1]])
        residuals, delta = np.tanh(entries @ w + x + b) - u, np.zeros_like(y0)
        for n, jacobian in enumerate(mean_jacobians(entries)):
            delta = delta @ jacobian.T + residuals[n]
            u[n] = u[n] + delta
    got = lp_jax.solve(body, None, y0, shared=(w, b), data=x, solver=shared(iterations)).trajectory
    np.testing.assert_allclose(got, u, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("storage", "iterations"), [("all", 3), ("states", 2)])
def test_adjoint_iterates(storage, iterations):
    """From zeros, with the transposed mean; the states are exact, so that all Jacobians are what they were."""
    (w, b), x, y0 = weights(), inputs(), np.random.default_rng(2).normal(size=(BATCH, WIDTH))
    cotangent, states = np.random.default_rng(3).normal(size=(BATCH, WIDTH)), [y0]
    for n in range(N):
        states.append(np.tanh(states[-1] @ w + x[n] + b))
    entries = np.stack(states[:-1])
    slopes = 1 - np.stack(states[1:]) ** 2
    lam = np.zeros((N, BATCH, WIDTH))  # of the states that enter the layers
    for _ in range(iterations):
        leaving = np.concatenate([lam[1:], cotangent[None]])
        residuals, delta = (leaving * slopes) @ w.T - lam, np.zeros_like(y0)
        for n in reversed(range(N)):
            delta = delta @ mean_jacobians(entries)[n] + residuals[n]
            lam[n] = lam[n] + delta
    solvers = {
        "solver": lp_jax.Picard(sweeps=N, storage=storage),
        "adjoint_solver": shared(iterations),
    }
    _, pullback = lp_jax.solve_vjp(step, None, y0, shared=(w, b), data=x, **solvers)
    gradients, _ = pullback(cotangent)
    np.testing.assert_allclose(gradients.adjoint_trajectory, lam, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(gradients.y0, lam[0], rtol=1e-11, atol=1e-12)


def test_a_recurrent_network_needs_fewer_iterations_than_layers():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 200, recurrent.FEATURES)))
    exact, got = (
        jax.jit(recurrent.make(False, solver=s))(x) for s in (lp_jax.Serial(), shared(14))
    )
    assert relative_error(got, exact) < 1e-6


def test_a_jacobian_that_overflows_is_left_out():
    """The mean of what the examples hold is where the step has no derivative: iterations are sweeps there."""

    def body(y, layer):
        return y + layer.dt * jnp.sqrt(jnp.abs(y)) * layer.params

    y0, params = jnp.array([[1.0], [-1.0]]), jnp.ones(6)
    got = lp_jax.solve(body, params, y0, solver=shared(6)).y1
    np.testing.assert_allclose(
        got, lp_jax.solve(body, params, y0, solver=lp_jax.Serial()).y1, rtol=1e-14
    )


def test_leaves_must_agree_in_their_examples():
    with pytest.raises(
        ValueError, match=r"batch_axes=1\) needs leaves that agree in their first 1 axes"
    ):
        lp_jax.solve(
            lambda y, layer: y, jnp.ones(6), (jnp.ones(()), jnp.ones((3, 2))), solver=shared(2)
        )


# --- the Jacobian of another step ------------------------------------------------------------------------------------


@jax.jit
def both_trajectories(solver):
    y0, guess = jnp.ones((BATCH, WIDTH)), jnp.ones((N, BATCH, WIDTH))
    given = {"shared": weights(), "data": inputs(), "solver": solver, "adjoint_solver": solver}
    solution, pullback = lp_jax.solve_vjp(step, None, y0, adjoint_guess=guess, **given)
    return solution.trajectory, pullback(y0)[0].adjoint_trajectory


@pytest.mark.parametrize(
    ("jacobian", "other", "same"),
    [
        ("diagonal", step, lp_jax.Newton(iterations=3, batch_axes=1, jacobian="diagonal")),
        ("diagonal", lambda y, layer: y, lp_jax.Picard(sweeps=3)),
        ("shared", step, shared(3)),
    ],
)
def test_iterates_are_those_of_that_jacobian(jacobian, other, same):
    """Of the step itself they are the usual ones; of one that changes nothing, those of sweeps."""
    solver = lp_jax.Newton(iterations=3, batch_axes=1, jacobian=jacobian, jacobian_of=other)
    for got, wanted in zip(both_trajectories(solver), both_trajectories(same), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("jacobian", ["full", "shared", "diagonal"])
def test_another_body_of_a_scan(jacobian):
    """A stop_gradient in the body changes the gradient in silence; as ``jacobian_of`` it does not.

    By what is scanned over and by what both bodies close over; as many iterations as layers.
    """

    def body(weights, stop):
        w, b = weights

        def cell(carry, x):
            count, h = carry
            h = jnp.tanh(stop(h @ w) + x + b[None])
            return (count + 1, h), h

        return cell

    def gradient(stop, jacobian_of=None):
        def loss(xs, weights):
            solver = lp_jax.Serial()
            if jacobian_of is not None:
                other = body(weights, jacobian_of)
                solver = lp_jax.Newton(
                    jacobian=jacobian, iterations=N, batch_axes=1, jacobian_of=other
                )
            init = jnp.int32(0), jnp.ones((BATCH, WIDTH))
            return jnp.sum(lp_jax.scan(body(weights, stop), init, xs, solver=solver)[1] ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(
            jnp.asarray(inputs()), tuple(map(jnp.asarray, weights()))
        )

    exact = gradient(lambda x: x)
    assert relative_error(gradient(lambda x: x, jax.lax.stop_gradient), exact) < 1e-12
    assert relative_error(gradient(jax.lax.stop_gradient), exact) > 1e-2


def test_another_step_that_is_none_is_refused():
    y0 = jnp.ones((BATCH, WIDTH))
    with pytest.raises(TypeError, match="step must return a state of the same shapes"):
        other = lp_jax.Newton(batch_axes=1, jacobian_of=lambda y, layer: y[0])
        lp_jax.solve(step, None, y0, shared=weights(), data=inputs(), solver=other)
    problem = lp_jax.scanned(lambda h, x: (0.5 * jnp.tanh(h + x), None), y0, jnp.asarray(inputs()))
    with pytest.raises(TypeError, match=r"a scan's body belongs to lp_jax\.scan"):
        problem.solve(solver=lp_jax.Newton(batch_axes=1, jacobian_of=lambda h, x: (h + x, None)))


def test_a_batch_of_one_example():
    """The gradient of a layer's own weights contracts the axis of the examples, here of length 1."""
    problem = lp_jax.Problem(
        lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params),
        jnp.ones((6, 1, 1)),
        jnp.ones((1, 1)),
    )
    solver = lp_jax.Newton(jacobian="shared", iterations=6)
    got, wanted = (problem.solve(solver=s).y1 for s in (solver, lp_jax.Serial()))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
