"""Convolutions, in the formulation that is fast on the device.

On a CPU, the gradient of XLA's convolution inside a loop takes 6 to 17 times as long as matrix products for 8 and 16
channels. Such products are fast if their inner and outer dimensions are similar and not very small. So patches are formed
along the last axis of space only. With taps i, j along the two axes of an image,

    y[h, w] = sum_i z[h + i, w, i],    z[h, w, i] = sum_j x[h, w + j] k[i, j].

The sum over j and the channels is a matrix product, the sum over i adds its parts, shifted. A few images are done at a
time, so that they stay in the processor's cache. Patches of all taps, or of none, would move three times as much memory.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from lp_jax._arrays import _check
from lp_jax._comms._comm import default_platform

_FORMULATIONS = ("auto", "xla", "products")
_CACHE = 2**21  # bytes of patches and products that are computed at once


def convolve(x: jax.Array, kernel: jax.Array, *, formulation: str = "auto") -> jax.Array:
    """Convolve images and keep their size: stride 1, zeros around the image.

    Args:
        x: images, ``(batch, *space, inputs)``, one, two or three axes of space.
        kernel: ``(*taps, inputs, outputs)``, an odd number of taps along each axis of space.
        formulation: "xla" for XLA's convolution; "products" for matrix products of patches along the last axis of space,
            whose results are shifted along the other axes and added; "auto" for products on a CPU and XLA elsewhere.
            Products are differentiable in reverse mode only.

    Returns:
        Images ``(batch, *space, outputs)``.

    Raises:
        ValueError: if the formulation is unknown, or the number of taps is even.

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
        # on two cores a scan's gradient by XLA's convolution takes 4 (4 channels of 28 x 28) to 25 (32 of 16 x 16) times as long
        formulation = "products" if default_platform() == "cpu" else "xla"
    return (_xla if formulation == "xla" else _products)(x, kernel)


@functools.cache  # one function for each formulation, so that modules with the same one are equal and share programs
def _as_general(formulation: str) -> Callable[..., jax.Array]:
    """Return `convolve` with the signature of `lax.conv_general_dilated`, as `nnx.Conv` calls it."""

    def conv_general_dilated(x: jax.Array, kernel: jax.Array, *_: object, **__: object) -> jax.Array:
        return convolve(x, kernel, formulation=formulation)

    return conv_general_dilated


class Conv(nnx.Conv):
    """`nnx.Conv` of stride 1 that keeps the size of the image, by `convolve`.

    ``kernel`` is an odd number of taps for each axis of space; ``formulation`` is as for `convolve`. With ``dtype`` None the
    computation has the dtype of images and parameters.

    Raises:
        ValueError: if the formulation is unknown; when called, if the number of taps is even.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> nn.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 3), "float32")).shape
        (2, 8, 8, 4)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, ...],
        *,
        formulation: str = "auto",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _check.one_of("formulation", formulation, _FORMULATIONS)
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(inputs, outputs, kernel, conv_general_dilated=_as_general(formulation), **options)


def _xla(x: jax.Array, kernel: jax.Array) -> jax.Array:
    space = "DHW"[5 - x.ndim :]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    return lax.conv_general_dilated(x, kernel, (1,) * len(space), "SAME", dimension_numbers=numbers)


@jax.custom_vjp
def _products(x: jax.Array, kernel: jax.Array) -> jax.Array:
    size = _images_at_once(x, kernel)
    if size == len(x):
        return _convolve_few(x, kernel)
    return _merge(lax.map(lambda images: _convolve_few(images, kernel), _split(x, size)))


def _products_bwd(saved: tuple[jax.Array, jax.Array], y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    mirrored = jnp.flip(kernel, range(kernel.ndim - 2)).swapaxes(-2, -1)  # the kernel of the transposed convolution
    size = _images_at_once(x, kernel)

    def cotangents(x: jax.Array, y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _convolve_few(y_bar, mirrored), _kernel_cotangent(x, y_bar, kernel.shape[:-2])

    def add(total: jax.Array, images: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_bar, kernel_bar = cotangents(*images)
        return total + kernel_bar, x_bar

    if size == len(x):
        x_bar, kernel_bar = cotangents(x, y_bar)
        return x_bar, kernel_bar.astype(kernel.dtype)
    zeros = jnp.zeros(kernel.shape, _sum_dtype(kernel))
    kernel_bar, x_bar = lax.scan(add, zeros, (_split(x, size), _split(y_bar, size)))
    return _merge(x_bar), kernel_bar.astype(kernel.dtype)


_products.defvjp(lambda x, kernel: (_products(x, kernel), (x, kernel)), _products_bwd)


def _convolve_few(x: jax.Array, kernel: jax.Array) -> jax.Array:
    *outer, last, inputs, outputs = kernel.shape
    folded = jnp.moveaxis(kernel, len(outer), 0)  # (last, *outer, inputs, outputs)
    folded = jnp.moveaxis(folded, -2, 1).reshape(last * inputs, -1)
    z = _product(_patches(x, last), folded).reshape(*x.shape[:-1], math.prod(outer), outputs)
    padded = _pad(z, outer, trail=3)
    shifted = (_window(padded, offset, x.shape)[..., i, :] for i, offset in enumerate(_offsets(outer)))
    return functools.reduce(jnp.add, shifted).astype(x.dtype)


def _kernel_cotangent(x: jax.Array, y_bar: jax.Array, taps: tuple[int, ...]) -> jax.Array:
    """Return the kernel's cotangent: one product of all patches with the shifted cotangents of y."""
    *outer, last = taps
    inputs, outputs = x.shape[-1], y_bar.shape[-1]
    padded = _pad(y_bar, outer, trail=2)
    z_bar = jnp.concatenate([_window(padded, offset, x.shape) for offset in reversed(_offsets(outer))], axis=-1)
    patches = _patches(x, last).reshape(-1, last * inputs)
    folded = _product(patches.T, z_bar.reshape(len(patches), -1)).reshape(last, inputs, *outer, outputs)
    return jnp.moveaxis(folded, (0, 1), (-3, -2))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=_sum_dtype(a))


def _sum_dtype(x: jax.Array) -> DTypeLike:
    """Return the dtype of sums: at least single precision."""
    return jnp.float32 if x.dtype.itemsize < 4 else x.dtype


def _patches(x: jax.Array, taps: int) -> jax.Array:
    """Return the neighbours along the last axis of space side by side, ``(batch, *space, taps * inputs)``."""
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(taps // 2, taps // 2), (0, 0)])
    return jnp.concatenate([lax.slice_in_dim(padded, i, i + x.shape[-2], axis=-2) for i in range(taps)], axis=-1)


def _images_at_once(x: jax.Array, kernel: jax.Array) -> int:
    """Return the number of images whose patches and products fit into the cache; it divides the batch."""
    *outer, last, inputs, outputs = kernel.shape
    numbers = math.prod(x.shape[1:-1]) * (last * inputs + math.prod(outer) * outputs)
    most = max(1, _CACHE // max(1, numbers * x.dtype.itemsize))
    return max((size for size in range(1, min(most, len(x)) + 1) if len(x) % size == 0), default=len(x))


def _split(images: jax.Array, size: int) -> jax.Array:
    return images.reshape(-1, size, *images.shape[1:])


def _merge(groups: jax.Array) -> jax.Array:
    return groups.reshape(-1, *groups.shape[2:])


def _offsets(taps: Sequence[int]) -> list[tuple[int, ...]]:
    return list(np.ndindex(*taps))


def _pad(images: jax.Array, taps: Sequence[int], *, trail: int) -> jax.Array:
    return jnp.pad(images, [(0, 0), *((size // 2, size // 2) for size in taps), *[(0, 0)] * trail])


def _window(padded: jax.Array, offset: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """Return the part of the padded images that begins at ``offset`` and has the size of the image."""
    return padded[(slice(None), *(slice(o, o + n) for o, n in zip(offset, shape[1:], strict=False)))]
