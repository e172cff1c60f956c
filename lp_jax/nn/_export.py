"""Trained parameters outside the solver: layer by layer, and in a file."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx, traverse_util

from lp_jax._arrays._types import PyTree, StrPath
from lp_jax._programs import _inputs
from lp_jax.nn._layer_parallel import LayerParallel, refuse_ranks, stacks


def unstack(layers: PyTree) -> list[PyTree]:
    """Return the parameters layer by layer: N trees, leaves without the axis of layers.

    ``layers`` are stacked parameters, leaves ``(N, ...)``; a module that `stack` made of blocks; or a `LayerParallel`, whose
    spline is evaluated.

    Raises:
        ValueError: if the leaves differ in length, or the layers are spread over MPI ranks.
    """
    if isinstance(layers, LayerParallel):
        refuse_ranks(layers)
        _, layers, _ = stacks(layers)
    count = _inputs.number_of_layers(layers, None)
    graphdef, state = nnx.split(layers)  # which knows what a module uses twice
    return [nnx.merge(graphdef, jax.tree.map(lambda x, n=n: x[n], state)) for n in range(count)]


def save(path: StrPath, params: PyTree) -> None:
    """Write parameters to a file in the format of safetensors, which other programs read and which contains no code.

    ``params`` are nested dicts or lists of arrays; or a module or its state, whose parameters and running statistics are
    saved. An array's name is its path, for example "trunk.layers.inner.kernel". An existing file is replaced when everything
    is written.

    Raises:
        TypeError: if the format does not have the dtype of an array, like that of random keys.
        ValueError: if a key cannot be part of a name.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> from lp_jax import nn
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nn.save(f"{folder}/params.safetensors", {"w": jnp.ones(2)})
        ...     nn.load(f"{folder}/params.safetensors")
        {'w': Array([1., 1.], dtype=float32)}
    """
    path = Path(path)
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in _named(params)[0].items()}
    # The file is written under another name and then renamed, because a rename within a folder is atomic: a reader sees the
    # old file or the new one, also if the process is killed meanwhile.
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        safetensors.numpy.save_file(arrays, unfinished)
    except safetensors.SafetensorError as error:
        raise TypeError(f"{path} cannot be written: {error}") from error
    unfinished.replace(path)


def load(path: StrPath, like: PyTree = None) -> PyTree:
    """Read parameters, bit for bit, from a file that `save` or another program wrote in the format of safetensors.

    ``like`` is a tree of arrays or shapes, a module or its state. The file must have its names, shapes and dtypes, and the
    result its structure (that of `nnx.to_pure_dict`). None accepts any file, and returns nested dicts, with integer keys for
    numbers in names.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file has another format, is incomplete, or does not match ``like``; and if JAX would cut float64 to
            float32.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}.")
    try:
        arrays = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is not a file of safetensors, or is incomplete: {error}."
        ) from error
    for name, x in arrays.items():
        # Without jax_enable_x64, `jnp.asarray` makes float32 of float64, so that the result would not be the file bit for bit.
        if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            raise ValueError(
                f"{path}: {name} is {x.dtype}, which JAX would cut to half of its bits. Call "
                'jax.config.update("jax_enable_x64", True) first.'
            )
    arrays = jax.tree.map(jnp.asarray, arrays)
    if like is None:
        flat = {_keys(name): x for name, x in arrays.items()}
        for keys in flat:
            # A name such as "a.b" next to "a" would have to be both an array and a dict.
            if any(keys[:length] in flat for length in range(1, len(keys))):
                name = ".".join(map(str, keys))
                raise ValueError(f"{path}: a part of the name {name} is the name of another array.")
        return traverse_util.unflatten_dict(flat)
    wanted, structure = _named(like)
    if difference := first_difference(described(arrays), described(wanted)):
        raise ValueError(
            f"{path} and `like` differ: {difference}. Build the network as it was when it was "
            f"saved."
        )
    return jax.tree.unflatten(structure, [arrays[name] for name in wanted])


def _keys(name: str) -> tuple[str | int, ...]:
    """Return the keys whose name this is; numbers are integers."""
    return tuple(
        int(part) if part.isdecimal() and str(int(part)) == part else part
        for part in name.split(".")
    )


def _named(tree: PyTree) -> tuple[dict[str, jax.Array | np.ndarray], jax.tree_util.PyTreeDef]:
    """Return the arrays by their names, and the structure of the tree."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, (nnx.Param, nnx.BatchStat))
    # A pure dict has keys only, without the variables of NNX, whose names would otherwise be part of the paths.
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    leaves, structure = jax.tree.flatten_with_path(tree)
    named = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        keys = tuple(
            getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", None)))
            for entry in path
        )
        if _keys(name) != keys or "" in keys:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has no name, the keys joined by dots. Put "
                "arrays into dicts or lists, with keys that are integers, or non-empty strings "
                "that have no dots and are not numbers."
            )
        named[name] = leaf
    return named, structure


def first_difference(there: Mapping[str, object], here: Mapping[str, object]) -> str | None:
    """Return the first entry in which two dicts differ, in words; None if they are equal."""
    for name in {**here, **there}:
        theirs, ours = (side.get(name, "absent") for side in (there, here))
        if theirs != ours:
            return f"{name} is {theirs} there and {ours} here"
    return None


def described(tree: PyTree) -> dict[str, str]:
    """Return dtype and shape of each array, by its path."""
    described = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        x = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        described[name] = f"{x.dtype}{list(x.shape)}"
    return described
