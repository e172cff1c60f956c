"""Checkpoints of a run."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import jax
from orbax.checkpoint import v1 as ocp

from lp_jax._arrays._types import PyTree
from lp_jax.nn._export import differing_array, first_difference
from lp_jax.train._types import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message is one line."""


class Checkpoints:
    """The checkpoints of one run, in a folder. May be used as a context manager.

    A checkpoint is renamed when it is complete. If the run is killed meanwhile, the earlier ones stay.

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
        ...     try:
        ...         checkpoints.restore(state)
        ...     except train.CheckpointError as error:
        ...         print(str(error).partition(" in ")[0])
        ...     checkpoints.save(state)
        ...     restored = checkpoints.restore(state)
        no checkpoint
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
        if difference := first_difference(stored, self.config) or differing_array(metadata.metadata, template):
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
