"""Trained layers without a solver: one by one, as a plain function, and in a file."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from lp_jax import _inputs, _tree
from lp_jax._mpi import MPIComm
from lp_jax._types import Layer, PyTree, State
from lp_jax.nn._layer_parallel import LayerParallel, stacks
from lp_jax.nn._stack import Beside, Context, TrunkStep


def unstack(layers: PyTree) -> list[PyTree]:
    """Parameters layer by layer.

    Args:
        layers: stacked parameters, leaves ``(N, ...)``, or a `LayerParallel`, whose layers' parameters are meant: those
            that a spline has there, where it has ``weights=nn.Spline(...)``.

    Returns:
        N trees of parameters, leaves without the axis of layers.

    Raises:
        ValueError: for leaves of different lengths, and for layers that are spread over MPI ranks.

    Example:
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 16, rngs=nnx.Rngs(0))
        >>> layers = nn.unstack(trunk)
        >>> len(layers), layers[3]["inner"]["kernel"].shape
        (16, (8, 8))
    """
    if isinstance(layers, LayerParallel):
        _, layers, _ = _whole(layers)
    count = _inputs.number_of_layers(layers, None)
    return [jax.tree.map(lambda x, n=n: x[n], layers) for n in range(count)]


def restack(layers: Sequence[PyTree]) -> PyTree:
    """Undo `unstack`.

    Args:
        layers: parameters layer by layer, trees of one structure, shapes and dtypes.

    Returns:
        Stacked parameters, leaves ``(N, ...)``; ``nnx.update(trunk.layers, params)`` puts them into a `LayerParallel`.

    Raises:
        ValueError: for no layers, and for layers that are not alike.

    Example:
        >>> import jax.numpy as jnp
        >>> from lp_jax import nn
        >>> nn.restack([{"w": jnp.ones(3)}, {"w": jnp.zeros(3)}])["w"].shape
        (2, 3)
    """
    if not layers:
        raise ValueError("layers is empty; restack needs the parameters of at least one layer.")
    wanted = _described(layers[0])
    for number, layer in enumerate(layers):
        found = _described(layer)
        for name in {**wanted, **found}:
            a, b = wanted.get(name, "absent"), found.get(name, "absent")
            if a != b:
                raise ValueError(f"layers must be alike; {name} is {a} in layer 0 and {b} in layer {number}.")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def sequential(trunk: LayerParallel) -> Callable[..., State]:
    """A trained trunk as a plain function, one layer after the other, without a solver.

    The function holds the parameters as they are now. Layers with running statistics should be in ``eval()`` mode;
    else they normalise by the batch.

    Args:
        trunk: the layers; on a mesh or one device.

    Returns:
        ``network(y, *, shared=None, data=None, key=None) -> y1``, with the arguments of `LayerParallel.solve`; a
        ``lax.scan`` over the layers.

    Raises:
        ValueError: for layers that are spread over MPI ranks.
        TypeError: for what is no `LayerParallel`.

    Example:
        >>> import jax, jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 16, rngs=nnx.Rngs(0))
        >>> network, y = jax.jit(nn.sequential(trunk)), jnp.ones((4, 8), "float32")
        >>> bool(jnp.allclose(network(y), trunk.solve(y, solver=lp_jax.Serial()).y1))
        True
    """
    if not isinstance(trunk, LayerParallel):
        raise TypeError(f"trunk must be a LayerParallel; got {type(trunk).__name__}. Pass the trunk that it holds.")
    step, params, stats = _whole(trunk)
    t0, t1, count = trunk.t0, np.asarray(trunk.t1), trunk.num_layers

    def network(y: State, *, shared: PyTree = None, data: PyTree = None, key: jax.Array | None = None) -> State:
        def body(y: State, x: tuple[Any, ...]) -> tuple[State, None]:
            params, beside, t, dt, index = x
            y = step(y, Layer(params, Context(shared, key), beside, t, dt, index, 0))
            return (y[0] if step.updates else y), None

        times = _inputs.times(t0, t1, count, _tree.real_dtype(y))
        return lax.scan(body, y, (params, Beside(data, stats), *times, jnp.arange(count, dtype=jnp.int32)))[0]

    return network


def save(path: str | os.PathLike[str], params: PyTree) -> None:
    """Write parameters into a file in the format of safetensors.

    An array's name is its path, "trunk.layers.inner.kernel" say; other programs read the file as well. Nothing in it is
    code. A file that is there is replaced, at once when all is written.

    Args:
        path: of the file; ``.safetensors`` is the usual ending.
        params: nested dicts (or lists) of arrays; or a module or its state, of which parameters and running statistics are
            meant.

    Raises:
        ImportError: without safetensors.
        TypeError: for arrays of a dtype that the format does not have, like random keys.
        ValueError: for keys that cannot be part of a name.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> from lp_jax import nn
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nn.save(f"{folder}/params.safetensors", {"inner": {"kernel": jnp.ones((2, 3), "bfloat16")}})
        ...     nn.load(f"{folder}/params.safetensors")["inner"]["kernel"].dtype
        dtype(bfloat16)
    """
    path = Path(path)
    safetensors, arrays = _safetensors(path), {}
    for name, leaf in _named(params)[0].items():
        if str(leaf.dtype) not in _DTYPES:
            hint = " Save jax.random.key_data of it." if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else ""
            raise TypeError(f"{name} has dtype {leaf.dtype}, which safetensors does not have.{hint}")
        arrays[name] = np.asarray(leaf, order="C")
    unfinished = path.with_name(f"{path.name}.unfinished")
    safetensors.numpy.save_file(arrays, unfinished, metadata={_VERSION_KEY: _VERSION})
    unfinished.replace(path)


def load(path: str | os.PathLike[str], like: PyTree = None) -> PyTree:
    """Read parameters from a file that `save` wrote, or any file of safetensors.

    Args:
        path: of the file.
        like: what the parameters must be like, in names, shapes and dtypes: a tree of arrays or shapes, a module, or
            its state. None is whatever there is.

    Returns:
        Parameters, bit for bit those that were saved: with ``like`` in its structure (that of `nnx.to_pure_dict` for a module
        or state), else nested dicts; what is a number in a name is an integer key, as for NNX's lists.
        ``nnx.update(model, nn.load(path, like=model))`` puts them into a module.

    Raises:
        ImportError: without safetensors.
        FileNotFoundError: where there is no file.
        ValueError: for a file of another format, or cut off, for one of a later version, and for parameters that are not
            like ``like``.

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
    arrays = _read(Path(path))
    if like is None:
        return _nested(path, arrays)
    wanted, structure = _named(like)
    missing, unknown = (", ".join(sorted(a.keys() - b.keys())[:5]) for a, b in ((wanted, arrays), (arrays, wanted)))
    if missing or unknown:
        parts = [
            f"{what} {names}" for what, names in (("lacks", missing), ("has, but like has not,", unknown)) if names
        ]
        raise ValueError(f"{path} does not hold the parameters of `like`: it {' and '.join(parts)}.")
    for name, leaf in wanted.items():
        if (a := _aval(arrays[name])) != (b := _aval(leaf)):
            raise ValueError(
                f"{path}: {name} is {a}, and {b} in `like`. Build the network as it was when it was saved."
            )
    return jax.tree.unflatten(structure, [arrays[name] for name in wanted])


_VERSION_KEY, _VERSION = "lp_jax.format", "1"

_DTYPES = ("bool", *(f"{u}int{bits}" for u in ("u", "") for bits in (8, 16, 32, 64)))
_DTYPES += ("float16", "bfloat16", "float32", "float64", "complex64")


def _safetensors(path: Path) -> ModuleType:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise ImportError(f'{path}: files of parameters need safetensors: pip install "lp_jax[nn]".') from error
    return safetensors


def _read(path: Path) -> dict[str, jax.Array]:
    safetensors = _safetensors(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}.")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            version = (file.metadata() or {}).get(_VERSION_KEY, _VERSION)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no file of safetensors, or not all of one: {error}.") from error
    if version != _VERSION:
        raise ValueError(f"{path} has format version {version}, this lp_jax reads version {_VERSION}: update it.")
    return {name: _as_jax(path, name, x) for name, x in arrays.items()}


def _as_jax(path: Path, name: str, x: np.ndarray) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise ValueError(
            f'{path}: {name} is {x.dtype}, which JAX would cut to half of its bits: jax.config.update("jax_enable_x64", True).'
        )
    return jnp.asarray(x)


def _nested(path: Any, arrays: dict[str, jax.Array]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for name, x in arrays.items():
        *outer, last = (int(part) if part.isdecimal() else part for part in name.split("."))
        branch = tree
        for part in outer:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                break
        if not isinstance(branch, dict) or last in branch:
            raise ValueError(f"{path}: {name} is both an array and a part of the name of others.")
        branch[last] = x
    return tree


def _named(tree: PyTree) -> tuple[dict[str, Any], Any]:
    """Arrays by their names, and the structure of the tree."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, (nnx.Param, nnx.BatchStat))
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for path, leaf in leaves}, structure


def _name(path: tuple[Any, ...]) -> str:
    keys = [getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", None))) for entry in path]
    for key in keys:
        if not (isinstance(key, int) or (isinstance(key, str) and key and "." not in key and not key.isdecimal())):
            raise ValueError(
                f"{key!r} in params{jax.tree_util.keystr(path)} cannot be part of an array's name, which is its keys with dots "
                "between them: take integers, or non-empty strings without dots that are no numbers."
            )
    if not keys:
        raise ValueError("params is a single array; put it into a dict, whose key becomes its name.")
    return ".".join(map(str, keys))


def _described(tree: PyTree) -> dict[str, str]:
    return {jax.tree_util.keystr(path): _aval(x) for path, x in jax.tree.leaves_with_path(tree)}


def _aval(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def _whole(trunk: LayerParallel) -> tuple[TrunkStep, PyTree, PyTree]:
    """`stacks` of a trunk that has all of its layers here."""
    if isinstance(trunk.comm, MPIComm) and trunk.comm.size > 1:
        raise ValueError(
            f"the trunk's layers are spread over {trunk.comm.size} ranks, each of which has its own alone. Gather them first "
            "(lp_jax.train.Ranks.gather), into a network on one rank."
        )
    return stacks(trunk)
