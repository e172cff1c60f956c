"""Checkpoints of a run."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import jax
from orbax.checkpoint import v1 as ocp

from lp_jax._arrays._types import PyTree
from lp_jax.train._types import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message is one line.

    Example:
        >>> import jax.numpy as jnp, optax, tempfile
        >>> from lp_jax import train
        >>> with train.Checkpoints(tempfile.mkdtemp(), config={}) as checkpoints:
        ...     try:
        ...         checkpoints.restore(train.init_state(jnp.ones(3), optax.sgd(0.1)))
        ...     except train.CheckpointError as error:
        ...         print(str(error).partition(" in ")[0])
        no checkpoint
    """


class Checkpoints:
    """The checkpoints of one run, in a folder. May be used as a context manager.

    A checkpoint is written under another name and renamed when it is complete. If the run is killed meanwhile, the earlier
    checkpoints stay.

    Args:
        folder: the folder; it is made if it does not exist.
        config: settings of the run, JSON values: model, sizes, seed. They are stored with each checkpoint, and `restore`
            compares them, so leave out settings that may change when a run is resumed (its length, the solver).
        keep: number of checkpoints to keep, the newest ones.

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

    def __init__(self, folder: str | os.PathLike[str], *, config: Mapping[str, object], keep: int = 2):
        self.folder = Path(folder).resolve()
        self.config = dict(config)
        newest = ocp.training.preservation_policies.LatestN(keep)
        self._checkpointer = ocp.training.Checkpointer(self.folder, preservation_policy=newest)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # closing raises the error of a failed checkpoint again, which would hide the error that is on its way
        with contextlib.suppress(*[] if error is None else [Exception]):
            self._checkpointer.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None without checkpoints."""
        newest = self._checkpointer.latest
        return None if newest is None else int(newest.step)

    def save(self, state: TrainState) -> None:
        """Write ``state`` and return when it is complete; a step that is saved already is not written again.

        Raises:
            CheckpointError: if it cannot be written; earlier checkpoints stay.
        """
        step, latest = int(state.step), self.latest
        if step == latest:
            return
        try:
            self._checkpointer.save(
                step, _fields(state), force=True, custom_metadata={"config": self.config, "step": step}
            )
        except Exception as error:
            kept = "none was saved before" if latest is None else f"that of step {latest} is kept"
            raise CheckpointError(
                f"the checkpoint {self.folder / str(step)} cannot be written ({_reason(error)}); {kept}."
            ) from error

    def restore(self, template: TrainState) -> TrainState:
        """Return the newest state; ``template``, from `init_state`, has the structure, shapes, dtypes and devices of the result.

        Raises:
            CheckpointError: if there is no checkpoint, it cannot be read, or it is of another model.
        """
        step = self.latest
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.folder}; start the run without resuming.")
        path = self.folder / str(step)
        try:
            metadata = self._checkpointer.metadata(step)
        except Exception as error:
            raise self._unreadable(path, error) from error
        if metadata.metadata is None:
            raise self._unreadable(path, ValueError("the list of its arrays is damaged"))
        stored = (metadata.custom_metadata or {}).get("config", {})
        difference = first_difference(stored, self.config) or first_difference(
            _describe(metadata.metadata), _describe(template), str, "absent"
        )
        if difference:
            raise CheckpointError(f"the checkpoint {path} is of another model: {difference}.")
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _fields(template))
        try:
            return template._replace(**self._checkpointer.load(step, wanted))
        except Exception as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: Path, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {path} cannot be read ({_reason(error)}); remove it to resume from the one before."
        )


def _fields(state: TrainState) -> dict[str, PyTree]:
    """Return the parts of a state that are not None."""
    return {name: value for name, value in state._asdict().items() if value is not None}


def _reason(error: Exception) -> str:
    """Return the system's message, or the error's first line."""
    text = str(error) or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code[1])) if code else text.splitlines()[0]


def first_difference(
    stored: Mapping[str, object],
    config: Mapping[str, object],
    say: Callable[[object], str] = repr,
    missing: object = None,
) -> str | None:
    """Return the first entry in which two configurations differ, in words; None if they are equal."""
    for name in {**config, **stored}:
        there, here = stored.get(name, missing), config.get(name, missing)
        if there != here:
            return f"{name} is {say(there)} there and {say(here)} here"
    return None


def _describe(tree: PyTree) -> dict[str, str]:
    """Return dtype and shape of each array."""
    paths = jax.tree.leaves_with_path(tree)
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, (_, leaf) in zip(names, paths, strict=True)}
