"""Convolutions: every formulation against the sum written out."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lp_jax import nn
from lp_jax.nn import _convolution


def plain(x, kernel):
    """``y[p] = sum over taps i of x[p + i - half] kernel[i]``, zero outside, one point and tap at a time."""
    taps, space = kernel.shape[:-2], x.shape[1:-1]
    y = np.zeros((*x.shape[:-1], kernel.shape[-1]))
    for tap in itertools.product(*map(range, taps)):
        if not kernel[tap].any():
            continue
        for point in itertools.product(*map(range, space)):
            source = tuple(p + t - n // 2 for p, t, n in zip(point, tap, taps, strict=True))
            if all(0 <= s < n for s, n in zip(source, space, strict=True)):
                y[(slice(None), *point)] += x[(slice(None), *source)] @ kernel[tap]
    return y


@pytest.fixture(params=["xla", "products", "products, image by image"])
def formulation(request, monkeypatch):
    name, _, few = request.param.partition(",")
    if few:
        monkeypatch.setattr(_convolution, "_CACHE", 1)
    return name


@pytest.mark.parametrize(
    ("space", "taps"), [((7,), (3,)), ((4, 5), (3, 3)), ((5, 4), (5, 1)), ((3, 4, 2), (3, 3, 3))]
)
def test_values_and_gradients(space, taps, formulation):
    rng = np.random.default_rng(0)
    x, kernel, y_bar = (
        rng.normal(size=shape) for shape in ((6, *space, 3), (*taps, 3, 2), (6, *space, 2))
    )

    @jax.jit
    def value_and_cotangents(x, kernel, y_bar):
        y, pull = jax.vjp(
            lambda x, kernel: nn.convolve(x, kernel, formulation=formulation), x, kernel
        )
        return y, *pull(y_bar)

    got, x_bar, kernel_bar = value_and_cotangents(x, kernel, y_bar)
    np.testing.assert_allclose(got, plain(x, kernel), rtol=1e-12, atol=1e-12)
    for _ in range(3):  # the map is linear in each: its transpose by the dot test
        images, taps = rng.normal(size=x.shape), rng.normal(size=kernel.shape)
        np.testing.assert_allclose(
            np.sum(kernel_bar * taps), np.sum(plain(x, taps) * y_bar), rtol=1e-10
        )
        np.testing.assert_allclose(
            np.sum(x_bar * images), np.sum(plain(images, kernel) * y_bar), rtol=1e-10
        )


def test_images_that_fit_into_the_cache_are_taken_together():
    kernel = jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
    images = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in [(50, n, n, 8) for n in (8, 28, 200)] + [(0, 8, 8, 8)]
    )
    assert [_convolution._images_at_once(x, kernel) for x in images] == [50, 10, 1, 1]


def test_bad_input_is_refused():
    x = jnp.ones((2, 8, 8, 3))
    with pytest.raises(
        ValueError, match="formulation must be 'auto' or 'xla' or 'products'; got 'fft'"
    ):
        nn.convolve(x, jnp.ones((3, 3, 3, 4)), formulation="fft")
    with pytest.raises(
        ValueError, match=r"odd number of taps along each axis of space; got \(2, 2\)"
    ):
        nn.convolve(x, jnp.ones((2, 2, 3, 4)))
