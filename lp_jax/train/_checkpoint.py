"""Checkpoints of a run, in a folder of their own."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from lp_jax.train._step import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, said in one line."""


class Checkpoints:
    """The checkpoints of one run. A context manager; also usable without.

    Each is written beside the others and renamed when complete, so a run that is killed meanwhile leaves the earlier
    ones as they are and its own unfinished one unseen.

    Args:
        folder: where they lie; made if it is not there.
        config: what the run is made of, JSON values: model, sizes, seed. Stored with each checkpoint, and what
            `restore` compares, so leave out what may change when a run goes on (its length, the solver).
        keep: number of checkpoints that stay, the newest ones.

    Example:
        >>> import jax.numpy as jnp, optax, tempfile
        >>> from lp_jax import train
        >>> state = train.init_state({"w": jnp.ones(3)}, optax.adam(1e-3))
        >>> with train.Checkpoints(tempfile.mkdtemp(), config={"layers": 8}) as checkpoints:
        ...     checkpoints.save(state)
        ...     restored = checkpoints.restore(state)
        >>> restored.params["w"]
        Array([1., 1., 1.], dtype=float32)
    """

    def __init__(self, folder: str | os.PathLike[str], *, config: Mapping[str, Any], keep: int = 2):
        self.folder = Path(folder).resolve()
        self.config = dict(config)
        newest = ocp.training.preservation_policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(self.folder, preservation_policy=newest)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._checkpointer.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None if there is none."""
        newest = self._checkpointer.latest
        return None if newest is None else int(newest.step)

    def save(self, state: TrainState) -> None:
        """Write ``state`` and return when it is safe; nothing if its step is there already."""
        step = int(state.step)
        if step != self.latest:
            self._checkpointer.save(step, state, force=True, custom_metadata={"config": self.config, "step": step})

    def restore(self, template: TrainState) -> TrainState:
        """The newest state.

        Args:
            template: a state of the same model, as `init_state` gives it; says structure, shapes, dtypes and devices.

        Raises:
            CheckpointError: if there is none, it cannot be read, or it is of another model, naming what differs.
        """
        step = self.latest
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.folder}; leave out resuming to start afresh.")
        path = self.folder / str(step)
        try:
            metadata = self._checkpointer.metadata(step)
        except Exception as error:
            raise self._unreadable(path, error) from error
        if metadata.metadata is None:
            raise self._unreadable(path, ValueError("its list of arrays is damaged"))
        stored = (metadata.custom_metadata or {}).get("config", {})
        if difference := first_difference(stored, self.config) or _first_leaf(metadata.metadata, template):
            raise CheckpointError(f"the checkpoint {path} is of another model: {difference}.")
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), template)
        try:
            return self._checkpointer.load(step, wanted)
        except Exception as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: Path, error: Exception) -> CheckpointError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return CheckpointError(
            f"the checkpoint {path} cannot be read ({reason}); remove it to go on from the one before."
        )


def first_difference(stored: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The first entry in which two configurations differ, said in words; None if there is none."""
    for name in [*config, *(name for name in stored if name not in config)]:
        if stored.get(name) != config.get(name):
            return f"{name} is {stored.get(name)!r} there and {config.get(name)!r} here"
    return None


def _first_leaf(stored: Any, template: TrainState) -> str | None:
    """The first array of ``template`` that the checkpoint holds not at all or in another shape or dtype."""
    there = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(stored)}
    here = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(template)}
    for name in [*here, *(name for name in there if name not in here)]:
        a, b = (_describe(tree.get(name)) for tree in (there, here))
        if a != b:
            return f"{name} is {a} there and {b} here"
    return None


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _describe(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
