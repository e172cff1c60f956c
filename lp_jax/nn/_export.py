"""Trained parameters outside the solver: layer by layer, and in a file."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from lp_jax._arrays._types import PyTree
from lp_jax._programs import _inputs
from lp_jax.nn._layer_parallel import LayerParallel, refuse_ranks, stacks


def unstack(layers: PyTree) -> list[PyTree]:
    """Return the parameters layer by layer: N trees, leaves without the axis of layers.

    ``layers`` are stacked parameters, leaves ``(N, ...)``; or a `LayerParallel`. With ``weights=nn.Spline(...)`` a layer's
    parameters are the spline's values.

    Raises:
        ValueError: if the leaves differ in length, or the layers are spread over MPI ranks.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 16, rngs=nnx.Rngs(0))
        >>> layers = nn.unstack(trunk)
        >>> len(layers), layers[3]["inner"]["kernel"].shape
        (16, (8, 8))
        >>> together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)  # for nnx.update(trunk.layers, together)
        >>> together["inner"]["kernel"].shape
        (16, 8, 8)
    """
    if isinstance(layers, LayerParallel):
        refuse_ranks(layers)
        _, layers, _ = stacks(layers)
    count = _inputs.number_of_layers(layers, None)
    return [jax.tree.map(lambda x, n=n: x[n], layers) for n in range(count)]


def save(path: str | os.PathLike[str], params: PyTree) -> None:
    """Write parameters to a file in the format of safetensors, usually named ``*.safetensors``.

    An array's name is its path in the tree, for example "trunk.layers.inner.kernel". Other programs can read the file, and
    it contains no code. An existing file is replaced when everything is written.

    Args:
        path: path of the file.
        params: nested dicts or lists of arrays; or a module or its state, whose parameters and running statistics are
            saved.

    Raises:
        ImportError: if safetensors is not installed.
        TypeError: if the format does not have the dtype of an array, like that of random keys.
        ValueError: if a key cannot be part of a name.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> make = lambda seed: nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 16, rngs=nnx.Rngs(seed))
        >>> trained, other = make(0), make(1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nn.save(f"{folder}/trunk.safetensors", trained)
        ...     nnx.update(other, nn.load(f"{folder}/trunk.safetensors", like=other))
        >>> bool((other.layers.inner.kernel[...] == trained.layers.inner.kernel[...]).all())
        True
    """
    path = Path(path)
    safetensors = _safetensors(path)
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in _named(params)[0].items()}
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        safetensors.numpy.save_file(arrays, unfinished)
    except safetensors.SafetensorError as error:
        raise TypeError(f"{path} cannot be written: {error}") from error
    unfinished.replace(path)


def load(path: str | os.PathLike[str], like: PyTree = None) -> PyTree:
    """Read parameters from a file that `save` or another program wrote in the format of safetensors.

    Args:
        path: path of the file.
        like: tree of arrays or shapes, module, or state of a module, whose names, shapes and dtypes the parameters must
            have. None accepts any.

    Returns:
        The parameters, bit for bit as saved, with the structure of ``like`` (of `nnx.to_pure_dict` for a module or state);
        otherwise nested dicts, with integer keys for numbers in names, as for NNX's lists.

    Raises:
        ImportError: if safetensors is not installed.
        FileNotFoundError: if there is no such file.
        ValueError: if the file has another format, is incomplete, or does not match ``like``; and if JAX would cut float64 to
            float32.
    """
    path = Path(path)
    safetensors = _safetensors(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}.")
    try:
        arrays = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a file of safetensors, or is incomplete: {error}.") from error
    for name, x in arrays.items():
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            raise ValueError(
                f"{path}: {name} is {x.dtype}, which JAX would cut to half of its bits. Call "
                'jax.config.update("jax_enable_x64", True) first.'
            )
    arrays = jax.tree.map(jnp.asarray, arrays)
    if like is None:
        flat = {_keys(name): x for name, x in arrays.items()}
        for name, keys in zip(arrays, flat, strict=True):
            if any(keys[:length] in flat for length in range(1, len(keys))):
                raise ValueError(f"{path}: a part of the name {name} is the name of another array.")
        return traverse_util.unflatten_dict(flat)
    wanted, structure = _named(like)
    if difference := first_difference(described(arrays), described(wanted), "in the file", "in `like`", str, "absent"):
        raise ValueError(f"{path}: {difference}. Build the network as it was when it was saved.")
    return jax.tree.unflatten(structure, [arrays[name] for name in wanted])


def _safetensors(path: Path) -> ModuleType:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ImportError(f'{path}: files of parameters need safetensors: pip install "lp_jax[nn]".') from error
    return safetensors


def _keys(name: str) -> tuple[str | int, ...]:
    """Return the keys whose name this is; numbers are integers."""
    return tuple(int(part) if part.isdecimal() and str(int(part)) == part else part for part in name.split("."))


def _named(tree: PyTree) -> tuple[dict[str, jax.Array | np.ndarray], jax.tree_util.PyTreeDef]:
    """Return the arrays by their names, and the structure of the tree."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, (nnx.Param, nnx.BatchStat))
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    leaves, structure = jax.tree.flatten_with_path(tree)
    named = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        keys = tuple(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", None))) for entry in path)
        if _keys(name) != keys or "" in keys:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has no name, the keys joined by dots. Put arrays into dicts or lists, with "
                "keys that are integers, or non-empty strings that have no dots and are not numbers."
            )
        named[name] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return named, structure


def first_difference(
    a: Mapping[str, object],
    b: Mapping[str, object],
    in_a: str = "there",
    in_b: str = "here",
    say: Callable[[object], str] = repr,
    missing: object = None,
) -> str | None:
    """Return the first entry in which two dicts differ, in words; None if they are equal."""
    for name in {**b, **a}:
        first, second = a.get(name, missing), b.get(name, missing)
        if first != second:
            return f"{name} is {say(first)} {in_a} and {say(second)} {in_b}"
    return None


def described(tree: PyTree) -> dict[str, str]:
    """Return dtype and shape of each array, by its path."""
    arrays = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        x = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        arrays[jax.tree_util.keystr(path, simple=True, separator="/")] = f"{x.dtype}{list(x.shape)}"
    return arrays
