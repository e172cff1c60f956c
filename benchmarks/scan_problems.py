"""Sequential scans that are no layers of a network: samplers, filters, returns, chains, optimizers, differential equations.

Each function makes one scan. Random numbers are drawn before it and scanned over, so that a scan is a function of its start.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.scipy.special import logsumexp
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

import lp_jax
from lp_jax import data


class Scan(NamedTuple):
    """Arguments of `jax.lax.scan`; every body emits its carry."""

    body: Callable[[Any, Any], tuple[Any, Any]]
    init: Any
    xs: Any
    reverse: bool = False
    jacobian_of: Callable[[Any, Any], tuple[Any, Any]] | None = None  # for `lp_jax.Newton`
    guess: Any = "constant"


# --- samplers of diffusion models -----------------------------------------------------------------------------------


def noise_levels(steps: int) -> tuple[jax.Array, jax.Array]:
    """Products of alphas, before and after each step of a sampler: the linear schedule of 1,000 betas, from noise to data."""
    products = jnp.concatenate([jnp.ones(1), jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))])
    chosen = products[jnp.linspace(1000, 0, steps + 1).round().astype(int)]
    return chosen[:-1], chosen[1:]


def noise_in(x: jax.Array, product: jax.Array) -> jax.Array:
    """The exact noise prediction for data that are a mixture of four Gaussians: of a ``(dimensions,)`` point."""
    centres = 2.0 * jnp.eye(4, len(x)) - 0.5
    variance = product * 0.2**2 + 1 - product

    def log_density(x: jax.Array) -> jax.Array:
        distances = jnp.sum((x[None] - jnp.sqrt(product) * centres) ** 2, axis=1)
        return logsumexp(-distances / (2 * variance))

    return -jnp.sqrt(1 - product) * jax.grad(log_density)(x)


def diffusion(steps: int, *, eta: float, samples: int = 32, dimensions: int = 4) -> Scan:
    """DDIM for ``eta`` 0, DDPM for 1, of many samples at the same time."""

    def body(x: jax.Array, inputs: Any) -> Any:
        before, after, normal = inputs
        noise = jax.vmap(noise_in, (0, None))(x, before)
        clean = (x - jnp.sqrt(1 - before) * noise) / jnp.sqrt(before)
        spread = eta * jnp.sqrt((1 - after) / (1 - before) * (1 - before / after))
        x = jnp.sqrt(after) * clean + jnp.sqrt(1 - after - spread**2) * noise + spread * normal
        return x, x

    start, normals = jax.random.split(jax.random.key(0))
    normals = jax.random.normal(normals, (steps, samples, dimensions))
    return Scan(
        body, jax.random.normal(start, (samples, dimensions)), (*noise_levels(steps), normals)
    )


# --- linear recurrences and filters ---------------------------------------------------------------------------------


def advantages(
    steps: int, *, environments: int = 8, discount: float = 0.99, trace: float = 0.95
) -> Scan:
    """Generalised advantage estimates, from the last step to the first, with episodes that end."""

    def body(advantage: jax.Array, inputs: Any) -> Any:
        error, goes_on = inputs
        advantage = error + discount * trace * goes_on * advantage
        return advantage, advantage

    keys = jax.random.split(jax.random.key(1), 3)
    rewards = jax.random.normal(keys[0], (steps, environments))
    values = jax.random.normal(keys[1], (steps + 1, environments))
    goes_on = jax.random.bernoulli(keys[2], 0.99, (steps, environments)).astype(rewards.dtype)
    errors = rewards + discount * goes_on * values[1:] - values[:-1]
    return Scan(body, jnp.zeros(environments), (errors, goes_on), reverse=True)


def kalman(steps: int, *, axes: int = 2) -> Scan:
    """The mean and covariance of a Kalman filter that follows a body of nearly constant velocity by its positions."""
    step, eye = 0.1, jnp.eye(axes)
    moves = jnp.kron(jnp.array([[1.0, step], [0.0, 1.0]]), eye)
    sees = jnp.kron(jnp.array([[1.0, 0.0]]), eye)
    drift = jnp.kron(0.5 * jnp.array([[step**3 / 3, step**2 / 2], [step**2 / 2, step]]), eye)

    def body(carry: Any, seen: jax.Array) -> Any:
        mean, covariance = carry
        mean, covariance = moves @ mean, moves @ covariance @ moves.T + drift
        gain = jnp.linalg.solve(sees @ covariance @ sees.T + 0.3 * eye, sees @ covariance).T
        mean = mean + gain @ (seen - sees @ mean)
        covariance = covariance - gain @ sees @ covariance
        return (mean, covariance), (mean, covariance)

    keys = jax.random.split(jax.random.key(2))
    kicks = jax.random.normal(keys[0], (steps, 2 * axes)) @ jnp.linalg.cholesky(drift).T
    _, path = lax.scan(lambda y, kick: (moves @ y + kick,) * 2, jnp.zeros(2 * axes), kicks)
    seen = path @ sees.T + jnp.sqrt(0.3) * jax.random.normal(keys[1], (steps, axes))
    return Scan(body, (jnp.zeros(2 * axes), 10 * jnp.eye(2 * axes)), seen)


# --- Markov chains --------------------------------------------------------------------------------------------------

LogDensity = Callable[[jax.Array], jax.Array]


def logistic(dimensions: int = 5) -> tuple[LogDensity, jax.Array]:
    """The posterior of a logistic regression, and its mode: breast cancer, in principal components, with a normal prior."""
    x, y = load_breast_cancer(return_X_y=True)
    parts = PCA(dimensions, whiten=True, random_state=0).fit_transform(
        StandardScaler().fit_transform(x)
    )
    x, signs = jnp.asarray(parts), jnp.asarray(2.0 * y - 1)

    def log_density(w: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.log_sigmoid(signs * (x @ w))) - jnp.sum(w**2) / 2

    downhill = jax.jit(jax.value_and_grad(lambda w: -log_density(w)))
    return log_density, jnp.asarray(minimize(downhill, jnp.zeros(dimensions), jac=True).x)


def banana(x: jax.Array) -> jax.Array:
    """Rosenbrock's function, as the density of two numbers."""
    return -((1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2) / 20


def two_modes(x: jax.Array, *, half: float = 2.0) -> jax.Array:
    """Two normal densities, at ``half`` and at minus ``half`` in every number."""
    return jnp.logaddexp(-jnp.sum((x - half) ** 2) / 2, -jnp.sum((x + half) ** 2) / 2)


def mala(steps: int, log_density: LogDensity, start: jax.Array, *, size: float) -> Scan:
    """The Metropolis-adjusted Langevin algorithm; ``size`` is the variance of its noise."""
    gradient = jax.grad(log_density)

    def log_proposal(to: jax.Array, at: jax.Array) -> jax.Array:
        return -jnp.sum((to - at - size / 2 * gradient(at)) ** 2) / (2 * size)

    def body(x: jax.Array, inputs: Any) -> Any:
        normal, uniform = inputs
        new = x + size / 2 * gradient(x) + jnp.sqrt(size) * normal
        ratio = log_density(new) - log_density(x) + log_proposal(x, new) - log_proposal(new, x)
        x = jnp.where(jnp.log(uniform) < ratio, new, x)
        return x, x

    return Scan(body, start, _draws(steps, start))


def hmc(steps: int, log_density: LogDensity, start: jax.Array, *, size: float, path: int) -> Scan:
    """Hamiltonian Monte Carlo with ``path`` leapfrog steps to each proposal."""
    gradient = jax.grad(log_density)

    def leapfrog(_: Any, state: Any) -> Any:
        x, p = state
        p = p + size / 2 * gradient(x)
        x = x + size * p
        return x, p + size / 2 * gradient(x)

    def body(x: jax.Array, inputs: Any) -> Any:
        p, uniform = inputs
        new, q = lax.fori_loop(0, path, leapfrog, (x, p))
        ratio = log_density(new) - log_density(x) + (jnp.sum(p**2) - jnp.sum(q**2)) / 2
        x = jnp.where(jnp.log(uniform) < ratio, new, x)
        return x, x

    return Scan(body, start, _draws(steps, start))


def _draws(steps: int, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    normals, uniforms = jax.random.split(jax.random.key(3))
    return jax.random.normal(normals, (steps, *start.shape)), jax.random.uniform(uniforms, (steps,))


# --- optimizers -----------------------------------------------------------------------------------------------------


def training(
    steps: int, optimizer: optax.GradientTransformation, *, batch: int = 64, units: int = 32
) -> Scan:
    """Training steps of a network on digits. The other body holds the gradient to be no function of the weights."""
    digits = data.digits(seed=0)
    order = jax.random.choice(jax.random.key(4), len(digits.train_x), (steps, batch))
    x = jnp.asarray(digits.train_x).reshape(len(digits.train_x), -1)[order]
    batches = x.astype(jnp.result_type(float)), jnp.asarray(digits.train_y)[order]
    keys = jax.random.split(jax.random.key(5))
    weights = {
        "inner": jax.random.normal(keys[0], (x.shape[-1], units)) / 8,
        "outer": jax.random.normal(keys[1], (units, 10)) / 6,
    }

    def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        scores = jnp.tanh(x @ weights["inner"]) @ weights["outer"]
        return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(scores, y))

    def body(carry: Any, batch: Any, held: Callable[[Any], Any] = lambda gradient: gradient) -> Any:
        weights, slots = carry
        updates, slots = optimizer.update(held(jax.grad(loss)(weights, *batch)), slots)
        weights = optax.apply_updates(weights, updates)
        return (weights, slots), weights

    other = functools.partial(body, held=lax.stop_gradient)
    return Scan(body, (weights, optimizer.init(weights)), batches, jacobian_of=other)


# --- differential equations -----------------------------------------------------------------------------------------


def heat(steps: int, *, points: int = 63, time: float = 1.0) -> lp_jax.Problem:
    """Implicit Euler for the heat equation on a line, with a source that comes and goes. Its step is told its dt."""
    at = jnp.linspace(0.0, 1.0, points + 2)[1:-1]
    rate = (points + 1.0) ** 2

    def step(y: jax.Array, layer: lp_jax.Layer) -> Any:
        side = jnp.full(points, -layer.dt * rate)
        right = y + layer.dt * layer.params * jnp.exp(-50 * (at - 0.3) ** 2)
        lower, upper = side.at[0].set(0), side.at[-1].set(0)
        y = lax.linalg.tridiagonal_solve(
            lower, 1 + 2 * layer.dt * rate * jnp.ones(points), upper, right[:, None]
        )[:, 0]
        return y, y

    source = jnp.sin(8 * jnp.linspace(0.0, time, steps + 1)[1:]) ** 2
    start = jnp.where(jnp.abs(at - 0.6) < 0.2, 1.0, 0.0)
    return lp_jax.Problem(step, 20 * source, start, t1=time, has_aux=True)


def lorenz(steps: int, *, time: float, coarse: int = 0) -> Scan:
    """Lorenz' equations by Runge and Kutta's method; ``coarse`` steps make the guess, if any."""

    def slope(y: jax.Array) -> jax.Array:
        return jnp.stack(
            [10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]]
        )

    def body(y: jax.Array, h: jax.Array) -> Any:
        a = slope(y)
        b = slope(y + h / 2 * a)
        c = slope(y + h / 2 * b)
        y = y + h / 6 * (a + 2 * b + 2 * c + slope(y + h * c))
        return y, y

    start, scan = jnp.array([-7.0, -8.0, 25.0]), functools.partial(lax.scan, body)
    xs = jnp.full(steps, time / steps)
    if not coarse:
        return Scan(body, start, xs)
    _, path = scan(start, jnp.full(coarse, time / coarse))
    known, wanted = jnp.arange(coarse + 1.0) / coarse, jnp.arange(1.0, steps + 1) / steps
    path = jnp.concatenate([start[None], path])
    guess = jax.vmap(lambda y: jnp.interp(wanted, known, y), 1, 1)(path)
    return Scan(body, start, xs, guess=guess)
