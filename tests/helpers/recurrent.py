"""A small recurrent network with every gate written out, to compare with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from networks import assert_close

from lp_jax import nn

BATCH, STEPS, FEATURES, HIDDEN, UNITS = 3, 12, 4, 5, 2
X = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, STEPS, FEATURES)))
TARGET = jnp.asarray(np.random.default_rng(1).normal(size=(UNITS, BATCH, HIDDEN)))
LENGTHS = jnp.asarray([12, 5, 1])


def make(implicit, **options):
    settings = {
        "units": UNITS,
        "dt": 0.7,
        "param_dtype": jnp.float64,
        "rngs": nnx.Rngs(0),
    } | options
    return nn.GRU(FEATURES, HIDDEN, implicit=implicit, **settings)


def weights(gru):
    """Per unit: input kernel and bias, recurrent kernel and bias."""
    params = nnx.to_pure_dict(nnx.state(gru) if isinstance(gru, nn.GRU) else gru)
    parts = zip(params["inputs"].values(), params["recurrent"].values(), strict=True)
    return [tuple(part[name] for part in pair for name in ("kernel", "bias")) for pair in parts]


def loop(weights, x, implicit, lengths, dt=0.7):
    """The loss of the tests, by a plain scan."""

    def body(hs, now):
        (t, u), new = now, []
        for h, (wx, bx, wh, bh) in zip(hs, weights, strict=True):
            (wxr, wxz, wxn), (whr, whz, whn) = (jnp.split(w, 3, axis=1) for w in (wx, wh))
            (bxr, bxz, bxn), (bhr, bhz, bhn) = (
                [b[None] for b in jnp.split(b, 3)] for b in (bx, bh)
            )
            r = 1 / (1 + jnp.exp(-(u @ wxr + bxr + h @ whr + bhr)))
            z = 1 / (1 + jnp.exp(-(u @ wxz + bxz + h @ whz + bhz)))
            n = jnp.tanh(u @ wxn + bxn + r * (h @ whn + bhn))
            u = (
                (h + dt * (1 - z) * n) / (1 + dt * (1 - z))
                if implicit
                else h + dt * (1 - z) * (n - h)
            )
            if lengths is not None:
                u = jnp.where((t < lengths)[:, None], u, h)
            new.append(u)
        return new, None

    begin = [jnp.zeros((BATCH, HIDDEN)) for _ in weights]
    hs, _ = jax.lax.scan(body, begin, (jnp.arange(STEPS), jnp.swapaxes(x, 0, 1)))
    return sum(jnp.sum(h * target) for h, target in zip(hs, TARGET, strict=True))


assert_close = functools.partial(assert_close, rtol=1e-10)
