"""Convolutions, in the formulation that is fast on the device.

On a CPU, the gradient of XLA's convolution inside a loop takes many times as long as matrix products for 8 and 16 channels.
Such products are fast if their inner and outer dimensions are similar and not very small. So patches are formed along the
last axis of space only. With taps i, j along the two axes of an image,

    y[h, w] = sum_i z[h + i, w, i],    z[h, w, i] = sum_j x[h, w + j] k[i, j].

The sum over j and the channels is a matrix product, the sum over i adds its parts, shifted. A few images are done at a
time, so that they stay in the processor's cache. Patches of all taps, or of none, would move three times as much memory.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from lp_jax._arrays import _check, _tree
from lp_jax._comms._comm import default_platform

_CACHE = 2**21  # bytes of patches and products that are computed at once


def convolve(x: jax.Array, kernel: jax.Array, *, formulation: str = "auto") -> jax.Array:
    """Convolve images and keep their size, stride 1, zeros around: ``(batch, *space, inputs)`` to ``(batch, *space, outputs)``.

    Args:
        x: images with one, two or three axes of space.
        kernel: ``(*taps, inputs, outputs)``, an odd number of taps along each axis of space.
        formulation: "xla" for XLA's convolution; "products" for matrix products, which are differentiable in reverse mode only;
            "auto" for products on a CPU and XLA elsewhere.

    Raises:
        ValueError: if the formulation is unknown, or the number of taps is even.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import nn
        >>> nn.convolve(jnp.ones((2, 8, 8, 3), "float32"), jnp.ones((3, 3, 3, 4), "float32")).shape
        (2, 8, 8, 4)
    """
    _check.one_of("formulation", formulation, ("auto", "xla", "products"))
    taps = kernel.shape[:-2]
    if any(size % 2 == 0 for size in taps):
        raise ValueError(
            f"a kernel must have an odd number of taps along each axis of space; got {taps}."
        )
    if formulation == "auto":
        # on two cores XLA takes 4 to 30 times as long for a scan's gradient (jax 0.10), 4 and 11 for images of 8 x 8 (jax 0.12)
        formulation = "products" if default_platform() == "cpu" else "xla"
    if formulation == "products":
        return _products(x, kernel)
    # JAX names each axis by a letter; an image with fewer than three axes of space has the last ones of "DHW" only.
    space = "DHW"[5 - x.ndim :]
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    return lax.conv_general_dilated(x, kernel, (1,) * len(space), "SAME", dimension_numbers=numbers)


def same_conv(inputs: int, outputs: int, kernel: Sequence[int], **options: Any) -> nnx.Conv:
    """Return an `nnx.Conv` of stride 1 that keeps the size of the image, by `convolve`."""
    return nnx.Conv(inputs, outputs, tuple(kernel), conv_general_dilated=_as_general, **options)


def _as_general(x: jax.Array, kernel: jax.Array, *_: object, **__: object) -> jax.Array:
    """`convolve` with the signature of `lax.conv_general_dilated`, as `nnx.Conv` calls it."""
    return convolve(x, kernel)


@jax.custom_vjp
def _products(x: jax.Array, kernel: jax.Array) -> jax.Array:
    # `lax.map` goes through the groups one after another, because patches of all images at once would leave the cache.
    groups = _tree.split(x, _images_at_once(x, kernel))
    return _tree.merge(lax.map(lambda images: _convolve_few(images, kernel), groups))


def _products_bwd(
    saved: tuple[jax.Array, jax.Array], y_bar: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # JAX's own derivative of the products would pad where this shifts, and take half as long again
    x, kernel = saved
    # the kernel of the transposed convolution
    mirrored = jnp.flip(kernel, range(kernel.ndim - 2)).swapaxes(-2, -1)
    size = _images_at_once(x, kernel)
    *outer, last, inputs, outputs = kernel.shape

    def add(total: jax.Array, images: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Add the kernel's cotangent of these images, a product of their patches with the shifted cotangents of y."""
        x, y_bar = images
        # This is the transpose of the sum over i in the head of this module: the cotangent of z at row h and tap i is the
        # cotangent of y at row h - i, which is the shift by the mirrored tap.
        z_bar = jnp.concatenate(_shifted(y_bar, outer)[::-1], axis=-1)
        patches = _patches(x, last).reshape(-1, last * inputs)
        folded = _product(patches.T, z_bar.reshape(len(patches), -1))
        folded = folded.reshape(last, inputs, *outer, outputs)
        return total + jnp.moveaxis(folded, (0, 1), (-3, -2)), _convolve_few(y_bar, mirrored)

    kernel_bar, x_bar = _tree.scan(
        add, _tree.wide(jnp.zeros_like(kernel)), _tree.split((x, y_bar), size)
    )
    return _tree.merge(x_bar), kernel_bar.astype(kernel.dtype)


_products.defvjp(lambda x, kernel: (_products(x, kernel), (x, kernel)), _products_bwd)


def _images_at_once(x: jax.Array, kernel: jax.Array) -> int:
    """Return the number of images whose patches and products fit into the cache; it divides the batch."""
    *outer, last, inputs, outputs = kernel.shape
    numbers = math.prod(x.shape[1:-1]) * (last * inputs + math.prod(outer) * outputs)
    return _tree.divisor(len(x), max(1, _CACHE // max(1, numbers * x.dtype.itemsize)))


def _convolve_few(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return the convolution of some images by one matrix product, as the head of this module says."""
    *outer, last, inputs, outputs = kernel.shape
    # A row of the matrix is a tap along the last axis and an input, a column the other taps and an output.
    folded = jnp.moveaxis(kernel, len(outer), 0)  # (last, *outer, inputs, outputs)
    folded = jnp.moveaxis(folded, -2, 1).reshape(last * inputs, -1)
    z = _product(_patches(x, last), folded).reshape(*x.shape[:-1], math.prod(outer), outputs)
    parts = (part[..., i, :] for i, part in enumerate(_shifted(z, outer)))
    return functools.reduce(jnp.add, parts).astype(x.dtype)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product of two matrices, summed up in single precision at least."""
    return jnp.matmul(a, b, preferred_element_type=_tree.real_dtype(a, at_least=jnp.float32))


def _patches(x: jax.Array, taps: int) -> jax.Array:
    """Return the neighbours along the last axis of space side by side, ``(batch, *space, taps * inputs)``."""
    return jnp.concatenate(_shifted(x, [1] * (x.ndim - 3) + [taps]), axis=-1)


def _shifted(images: jax.Array, taps: Sequence[int]) -> list[jax.Array]:
    """Return for each tap, along the first axes of space, the images shifted by it, with zeros around them."""
    sizes = [1, *taps, *[1] * (images.ndim - 1 - len(taps))]  # along all axes of the images
    padded = jnp.pad(images, [(size // 2, size // 2) for size in sizes])
    return [
        lax.slice(padded, start, np.add(start, images.shape).tolist())
        for start in np.ndindex(*sizes)
    ]
