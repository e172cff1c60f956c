"""A 3 x 3 convolution, formulated in several ways: which is fast depends on the backend."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_CHUNK = 10  # images whose patches are formed at once; about what a core's cache holds


class Convolution(NamedTuple):
    """A formulation.

    Attributes:
        axes: how its images are laid out, as a permutation of (batch, channels, height, width).
        apply: ``apply(x, w, b)``, images in its layout, zero-padded, weights (out, in, 3, 3), biases (out,).
    """

    axes: tuple[int, int, int, int]
    apply: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

    def lay_out(self, images: jax.Array) -> jax.Array:
        """From (batch, channels, height, width) into its layout."""
        return images.transpose(self.axes)

    def restore(self, images: jax.Array) -> jax.Array:
        """The way back."""
        return images.transpose([self.axes.index(i) for i in range(4)])


def _nchw(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return y + b[None, :, None, None]


def _nhwc(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    w = w.transpose(2, 3, 1, 0)
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + b[None, None, None]


def _products(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """Images (channels, batch, height, width): matrix products over the channels, no convolution primitive."""
    return _convolve(x, w) + b[:, None, None, None]


@jax.custom_vjp
def _convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    """One product for all nine taps; then the nine images are shifted and added."""
    out, channels = w.shape[:2]
    batch, height, width = x.shape[1:]
    taps = w.transpose(2, 3, 0, 1).reshape(9 * out, channels) @ x.reshape(channels, -1)
    padded = _pad(taps.reshape(9 * out, batch, height, width)).reshape(3, 3, out, batch, height + 2, width + 2)
    return sum(
        (padded[i, j, :, :, i : i + height, j : j + width] for i in range(3) for j in range(3)),
        start=jnp.zeros((), x.dtype),
    )


def _convolve_fwd(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(x, w), (x, w)


def _convolve_bwd(saved: tuple[jax.Array, jax.Array], y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return _convolve(y_bar, jnp.flip(w, (2, 3)).swapaxes(0, 1)), _weight_cotangent(x, y_bar)


_convolve.defvjp(_convolve_fwd, _convolve_bwd)


def _weight_cotangent(x: jax.Array, y_bar: jax.Array) -> jax.Array:
    """A product with the patches of ``x``, a chunk of images at a time."""
    channels, batch, height, width = x.shape
    out = y_bar.shape[0]
    size = math.gcd(batch, _CHUNK)

    def chunks(images: jax.Array) -> jax.Array:
        return images.reshape(images.shape[0], batch // size, size, height, width).swapaxes(0, 1)

    def add(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x, y_bar = chunk
        padded = _pad(x)
        patches = jnp.stack([padded[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)])
        return total + y_bar.reshape(out, -1) @ patches.reshape(9 * channels, -1).T, None

    total, _ = lax.scan(add, jnp.zeros((out, 9 * channels), x.dtype), (chunks(x), chunks(y_bar)))
    return total.reshape(out, 3, 3, channels).transpose(0, 3, 1, 2)


def _pad(images: jax.Array) -> jax.Array:
    return jnp.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))


CONVOLUTIONS = {
    "products": Convolution((1, 0, 2, 3), _products),
    "nchw": Convolution((0, 1, 2, 3), _nchw),
    "nhwc": Convolution((0, 2, 3, 1), _nhwc),
}
