"""Steps, stored problems and machines that several tests share."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import lp_jax
from lp_jax import planning

INJECT = lp_jax.Rediscretize(params="inject")


def dense_step(y, layer):
    """``y + h tanh(y W + b)``, state ``(batch, width)``."""
    w, b = layer.params
    return y + layer.dt * jnp.tanh(y @ w + b[None])


def dense_params(n: int, width: int, *, seed: int = 0, scale: float = 1.0):
    """Random weights, independent from layer to layer."""
    rng = np.random.default_rng(seed)
    w = scale * rng.normal(size=(n, width, width)) / np.sqrt(width)
    return jnp.asarray(w), jnp.asarray(0.1 * rng.normal(size=(n, width)))


def dense_state(batch: int, width: int, *, seed: int = 1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, width)))


@functools.partial(jax.jit, static_argnames=("step", "loss", "has_aux"))
def serial_loss_and_gradient(
    step, params, y0, loss, *, t1=1.0, shared=None, data=None, has_aux=False
):
    """Loss, and its gradient for (params, y0, shared), by a hand-written scan and ``jax.grad``: no code of the library."""
    n = jax.tree.leaves((params, data))[0].shape[0]
    t, dt = jnp.arange(float(n)) * (t1 / n), jnp.full((n,), t1 / n)

    def value(params, y0, shared):
        def body(y, x):
            p, d, t, dt, i = x
            stepped = step(y, lp_jax.Layer(p, shared, d, t, dt, i, 0))
            return stepped if has_aux else (stepped, None)

        y1, aux = jax.lax.scan(body, y0, (params, data, t, dt, jnp.arange(n)))
        return loss(y1, aux) if has_aux else loss(y1)

    return jax.value_and_grad(value, argnums=(0, 1, 2))(params, y0, shared)


def solved_loss_and_gradient(step, params, y0, loss, **options):
    """Loss of what `solve` ends with, and its gradient for (params, y0)."""

    def value(params, y0):
        return loss(lp_jax.solve(step, params, y0, **options).y1)

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1)))(params, y0)


def assert_serial(step, params, y0, loss, solver, *, t1=1.0):
    """Loss and gradient of a solve are those of a hand-written scan."""
    wanted, (*exact, _) = serial_loss_and_gradient(step, params, y0, loss, t1=t1)
    got, gradient = solved_loss_and_gradient(step, params, y0, loss, solver=solver, t1=t1)
    assert abs(got - wanted) < 1e-12 * abs(wanted)
    assert relative_error(gradient, tuple(exact)) < 1e-12


def relative_error(a: Any, b: Any) -> float:
    """Relative 2-norm error of a pytree."""
    pairs = [
        tuple(map(np.asarray, pair))
        for pair in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]
    return float(
        np.sqrt(
            sum(np.sum(np.abs(x - y) ** 2) for x, y in pairs)
            / sum(np.sum(np.abs(y) ** 2) for _, y in pairs)
        )
    )


def machine(*seconds, at_once=(1,), **fields):
    """One on which every kind of evaluation takes the same."""
    kinds = dict.fromkeys(("forward", "adjoint", "gradient"), seconds or (1.0,))
    return planning.Machine(at_once=at_once, **(kinds | fields))


class Dense(NamedTuple):
    """The stored dense problem; see golden/README.md."""

    params: tuple[jax.Array, jax.Array]
    y0: jax.Array
    target: jax.Array
    guess: jax.Array
    serial: dict[float, jax.Array]  # by t1: all 65 states

    @classmethod
    def load(cls, folder: Path) -> "Dense":
        z = np.load(folder / "dense_problem.npz")
        params = jnp.asarray(z["smooth_W"].swapaxes(1, 2)), jnp.asarray(z["smooth_b"])
        serial = {t: jnp.asarray(z[f"smooth_T{t:.0f}_serial"]) for t in (1.0, 4.0)}
        return cls(
            params,
            jnp.asarray(z["smooth_y0"]),
            jnp.asarray(z["smooth_target"]),
            jnp.asarray(z["smooth_guess"]),
            serial,
        )


def shifts(height: int, width: int) -> np.ndarray:
    """``(9 points, points)``: takes an image to its nine shifts by up to one pixel, zeros from outside."""
    down, right = ([np.eye(n, k=k) for k in (-1, 0, 1)] for n in (height, width))
    return np.concatenate([np.kron(a, b) for a in down for b in right])


def conv_step(y, layer):
    """``y + dt relu(conv(relu(conv(y))))``, 3x3, NCHW as stored.

    By products, which compile in a tenth of the time. test_nn.py holds XLA's own convolutions to the same files.
    """
    w1, b1, w2, b2 = layer.params
    batch, channels, *space = y.shape

    def conv(x, w, b):
        shifted = jnp.einsum("bcq,pq->bcp", x, shifts(*space)).reshape(batch, channels, 9, -1)
        return jax.nn.relu(
            jnp.einsum("bckp,ock->bop", shifted, w.reshape(*w.shape[:2], 9)) + b[None, :, None]
        )

    return y + layer.dt * conv(conv(y.reshape(batch, channels, -1), w1, b1), w2, b2).reshape(
        y.shape
    )


def cases(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / name).read_text())["cases"]
