"""Convolutions, in the formulation that is fast where they run.

XLA's own convolution is fast on accelerators. On a CPU its gradient within a loop is many times slower than it need be
(measured: 6 to 17 times with 8 and 16 channels), and with few channels the convolution itself is slow too.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from lp_jax import _check

_FORMULATIONS = ("auto", "xla", "patches", "products")
_CHUNK = 10  # examples whose patches are formed at once; about what a core's cache holds of small images
_FEW = 8  # channels


def convolve(x: jax.Array, kernel: jax.Array, *, formulation: str = "auto") -> jax.Array:
    """Convolution that keeps the size of the image: stride 1, zeros around it.

    Args:
        x: images, ``(batch, *space, inputs)``, one, two or three axes of space.
        kernel: ``(*taps, inputs, outputs)``, an odd number of taps along each axis of space.
        formulation: "xla"; "patches", XLA's convolution, and a gradient of the kernel from a matrix product with the patches
            of the images; "products", one matrix product over the channels for all taps, whose results are shifted and
            added; or "auto": xla, but on a CPU products with fewer than 8 channels, and patches with more. All but xla are
            differentiable in reverse mode only.

    Returns:
        Images ``(batch, *space, outputs)``.

    Raises:
        ValueError: for an unknown formulation, and for an even number of taps.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import nn
        >>> nn.convolve(jnp.ones((2, 8, 8, 3), "float32"), jnp.ones((3, 3, 3, 4), "float32")).shape
        (2, 8, 8, 4)
    """
    _check.one_of("formulation", formulation, _FORMULATIONS)
    taps = kernel.shape[:-2]
    if any(size % 2 == 0 for size in taps):
        raise ValueError(f"a kernel must have an odd number of taps along each axis of space; got {taps}.")
    if formulation == "auto":
        few = min(kernel.shape[-2:]) < _FEW
        formulation = "xla" if jax.default_backend() != "cpu" else "products" if few else "patches"
    if formulation == "products":
        return jnp.moveaxis(_products(jnp.moveaxis(x, -1, 0), kernel), 0, -1)
    return (_xla if formulation == "xla" else _patches)(x, kernel)


class Conv(nnx.Conv):
    """`nnx.Conv` of stride 1 that keeps the size of the image, by `convolve`.

    Args:
        inputs: number of channels before.
        outputs: number of channels after.
        kernel: number of taps along each axis of space.
        formulation: as for `convolve`.
        param_dtype: dtype of the parameters; that of the images.
        rngs: source of the initial parameters.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, ...],
        *,
        formulation: str = "auto",
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(inputs, outputs, kernel, param_dtype=param_dtype, rngs=rngs)
        self.formulation = formulation

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        """The images, convolved, plus the bias of each channel."""
        y = convolve(x, self.kernel[...], formulation=self.formulation)
        assert self.bias is not None
        return y + self.bias[...].reshape(*[1] * (y.ndim - 1), -1)


def _xla(x: jax.Array, kernel: jax.Array) -> jax.Array:
    space = "DHW"[5 - x.ndim :]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    return lax.conv_general_dilated(x, kernel, (1,) * len(space), "SAME", dimension_numbers=numbers)


@jax.custom_vjp
def _patches(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _xla(x, kernel)


def _patches_bwd(saved: tuple[jax.Array, jax.Array], y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    taps, (inputs, outputs) = kernel.shape[:-2], kernel.shape[-2:]
    batch, *space = x.shape[:-1]
    size = math.gcd(batch, _CHUNK)

    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, y_bar = chunk
        padded = _pad(x, taps, lead=1, trail=1)
        patches = jnp.concatenate([_window(padded, offset, space, lead=1) for offset in _offsets(taps)], axis=-1)
        return total + patches.reshape(-1, math.prod(taps) * inputs).T @ y_bar.reshape(-1, outputs), None

    start = jnp.zeros((math.prod(taps) * inputs, outputs), x.dtype)
    total, _ = lax.scan(add, start, tuple(u.reshape(batch // size, size, *u.shape[1:]) for u in (x, y_bar)))
    return _xla(y_bar, _mirrored(kernel)), total.reshape(kernel.shape)


_patches.defvjp(lambda x, kernel: (_xla(x, kernel), (x, kernel)), _patches_bwd)


def _mirrored(kernel: jax.Array) -> jax.Array:
    """The kernel of the transposed convolution."""
    return jnp.flip(kernel, range(kernel.ndim - 2)).swapaxes(-2, -1)


@jax.custom_vjp
def _products(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Channels first, ``(inputs, batch, *space)``: one product for all taps, then shifts and sums."""
    taps, (inputs, outputs) = kernel.shape[:-2], kernel.shape[-2:]
    batch, *space = x.shape[1:]
    stacked = kernel.reshape(-1, inputs, outputs).swapaxes(1, 2).reshape(-1, inputs)
    padded = _pad((stacked @ x.reshape(inputs, -1)).reshape(-1, outputs, batch, *space), taps, lead=3)
    return functools.reduce(
        jnp.add, (_window(padded[number], offset, space, lead=2) for number, offset in enumerate(_offsets(taps)))
    )


def _products_fwd(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _products(x, kernel), (x, kernel)


def _products_bwd(saved: tuple[jax.Array, jax.Array], y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    return _products(y_bar, _mirrored(kernel)), _kernel_cotangent(x, y_bar, kernel.shape)


_products.defvjp(_products_fwd, _products_bwd)


def _kernel_cotangent(x: jax.Array, y_bar: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A product with the patches of ``x``, a few examples at a time."""
    taps, (inputs, outputs) = shape[:-2], shape[-2:]
    batch, *space = x.shape[1:]
    size = math.gcd(batch, _CHUNK)

    def chunks(images: jax.Array) -> jax.Array:
        return images.reshape(images.shape[0], batch // size, size, *space).swapaxes(0, 1)

    def add(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, y_bar = chunk
        padded = _pad(x, taps, lead=2)
        patches = jnp.stack([_window(padded, offset, space, lead=2) for offset in _offsets(taps)])
        return total + y_bar.reshape(outputs, -1) @ patches.reshape(math.prod(taps) * inputs, -1).T, None

    start = jnp.zeros((outputs, math.prod(taps) * inputs), x.dtype)
    total, _ = lax.scan(add, start, (chunks(x), chunks(y_bar)))
    return total.T.reshape(shape)


def _offsets(taps: tuple[int, ...]) -> itertools.product:
    return itertools.product(*map(range, taps))


def _pad(images: jax.Array, taps: tuple[int, ...], *, lead: int, trail: int = 0) -> jax.Array:
    return jnp.pad(images, [(0, 0)] * lead + [(size // 2, size // 2) for size in taps] + [(0, 0)] * trail)


def _window(padded: jax.Array, offset: tuple[int, ...], space: list[int], *, lead: int) -> jax.Array:
    """A view of the image's size, ``offset`` from the corner of the padded one."""
    return padded[(slice(None),) * lead + tuple(slice(o, o + n) for o, n in zip(offset, space, strict=True))]
