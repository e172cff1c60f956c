"""Checkpoints of a run."""

import contextlib
import gc
import json
import logging
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from orbax.checkpoint import multihost, v1 as ocp

from lp_jax._arrays._types import PyTree, StrPath
from lp_jax.nn._export import described, first_difference
from lp_jax.train._ranks import Ranks
from lp_jax.train._step import replicate_rest
from lp_jax.train._types import TrainState

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message is one line."""


class Checkpoints:
    """The checkpoints of one run, in a folder. May be used as a context manager.

    A checkpoint is renamed when it is complete, so the earlier ones stay if the run is killed meanwhile. It holds a checksum of
    each array.

    Args:
        folder: the folder; it is made if it does not exist.
        config: settings of the run, JSON values: model, sizes, seed. They are stored with each checkpoint, and `restore`
            compares them, so leave out settings that may change when a run is resumed (its length, the solver).
        keep: number of checkpoints to keep, the newest ones.
        skip_damaged: whether `restore` goes on from the newest undamaged checkpoint, if there is one. Damaged ones are renamed.
        ranks: the MPI ranks of the run. All ranks call each method. Only rank 0 reads and writes the folder; its memory must
            hold the whole state. A run can be resumed with any number of ranks, on a mesh, or on one device.

    Attributes:
        latest: step of the newest complete checkpoint; None without checkpoints.

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

    latest: int | None

    def __init__(
        self,
        folder: StrPath,
        *,
        config: Mapping[str, object],
        keep: int = 2,
        skip_damaged: bool = False,
        ranks: Ranks | None = None,
    ):
        self.folder = Path(folder).resolve()
        self.config = dict(config)
        self.skip_damaged = skip_damaged
        self._ranks = ranks

        def begin() -> int | None:
            newest = ocp.training.preservation_policies.LatestN(keep)
            self._checkpointer = ocp.training.Checkpointer(self.folder, preservation_policy=newest)
            return max(self._steps(), default=None)

        self.latest = self._once(begin)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # closing raises the error of a failed checkpoint again, which would hide the error that is on its way
        with contextlib.suppress(*[] if error is None else [Exception]):
            if self._ranks is None or self._ranks.is_root:
                self._checkpointer.close()

    def _once(self, f: Callable[[], T]) -> T:
        """Call ``f()`` once: over MPI ranks, rank 0 calls it for all."""
        return f() if self._ranks is None else self._ranks.once(f)

    def save(self, state: TrainState) -> None:
        """Write ``state`` and return when it is complete; a step that is saved already is not written again.

        Raises:
            CheckpointError: if it cannot be written; earlier checkpoints stay.
        """
        step = int(state.step)
        if step == self.latest:
            return
        if self._ranks is not None and self._ranks.data.size > 1 and state.restart is not None:
            raise CheckpointError(
                f"a state that carries trajectories cannot be saved from {self._ranks.data.size} "
                f"copies of the network, each of "
                "which has those of its own examples. Train with one copy, Ranks.grid(data=1)."
            )
        # All ranks gather before rank 0 writes, because gathering is collective.
        whole = state if self._ranks is None else self._ranks.gather(state)

        def write() -> None:
            fields = _fields(whole)
            try:
                about = {
                    "config": self.config,
                    "arrays": described(whole),
                    "checksums": _checksums(fields),
                }
                self._checkpointer.save(
                    step, fields, force=True, custom_metadata={**about, "checksum": _crc(about)}
                )
            except Exception as error:
                kept = (
                    "none was saved before"
                    if self.latest is None
                    else f"that of step {self.latest} is kept"
                )
                raise CheckpointError(
                    f"the checkpoint {self.folder / str(step)} cannot be written "
                    f"({_reason(error)}); {kept}."
                ) from error

        self._once(write)
        self.latest = step

    def restore(self, template: TrainState) -> TrainState:
        """Return the newest state; ``template``, from `init_state`, has the structure, shapes, dtypes and devices of the result.

        Where some of its arrays are spread over a mesh, those on one device are replicated over that mesh.

        Raises:
            CheckpointError: if there is no checkpoint, it is damaged, or it is of another model.
        """
        wanted = replicate_rest(template) if self._ranks is None else self._ranks.whole(template)
        read = list[TrainState]()
        try:
            self._once(lambda: read.append(self._newest(wanted)))
        except CheckpointError:  # the newest may have been set aside
            self.latest = self._once(lambda: max(self._steps(), default=None))
            raise
        state = (
            read[0]
            if self._ranks is None
            else self._ranks.scatter(read[0] if read else None, template)
        )
        self.latest = int(state.step)
        return state

    def _steps(self) -> list[int]:
        return sorted(int(checkpoint.step) for checkpoint in self._checkpointer.checkpoints)

    def _newest(self, template: TrainState) -> TrainState:
        if not (steps := self._steps()):
            raise CheckpointError(
                f"no checkpoint in {self.folder}; start the run without resuming."
            )
        *earlier, step = steps
        path = self.folder / str(step)
        with _only_raised():
            try:
                return self._restored(step, template)
            except CheckpointError:
                raise
            except Exception as error:
                cause: BaseException = error
                while cause.__cause__ is not None:  # orbax wraps all, interruptions too
                    cause = cause.__cause__
                if not isinstance(cause, Exception) or isinstance(
                    cause, (MemoryError, jax.errors.JaxRuntimeError)
                ):
                    raise cause from None  # says nothing of the files
                reason = _reason(cause)
                # it holds reads that did not end, which report that when they are collected
                del cause
            gc.collect()
        if not earlier:
            raise CheckpointError(
                f"the checkpoint {path} is damaged ({reason}), and there is none before it."
            )
        if not self.skip_damaged:
            raise CheckpointError(
                f"the checkpoint {path} is damaged ({reason}); to go on from the one before, of "
                f"step {earlier[-1]}, set skip_damaged=True."
            )
        self._set_aside(path)
        return self._newest(template)

    def _restored(self, step: int, template: TrainState) -> TrainState:
        stored = dict(self._checkpointer.metadata(step).custom_metadata or {})
        if stored.pop("checksum", None) != _crc(stored):
            raise ValueError("its description has changed")
        fields = _fields(template)
        path = self.folder / str(step)
        # This error comes before the arrays are read, because a checkpoint of
        # another model is not damaged: no earlier one is tried.
        difference = first_difference(stored["config"], self.config)
        if difference := difference or first_difference(stored["arrays"], described(template)):
            raise CheckpointError(f"the checkpoint {path} is of another model: {difference}.")
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fields
        )
        # Orbax reads each array straight to the devices of its sharding, whatever the run that wrote it had.
        restored = self._checkpointer.load(step, wanted)
        for name, checksum in _checksums(restored).items():
            if checksum != stored["checksums"][name]:
                raise ValueError(f"the numbers of {name} have changed")
        return template._replace(**restored)

    def _set_aside(self, path: Path) -> None:
        """Rename a checkpoint, because the run will write another one of the same step."""
        # A process that renamed the folder while another one still reads it would
        # damage that one's read, so all meet before and after.
        meet = multihost.get_barrier_sync_fn()
        try:
            meet(key="lp-jax-damaged", timeout_ms=_PATIENCE)
        except RuntimeError:  # they wait in orbax, for this one
            raise CheckpointError(
                f"the checkpoint {path} is damaged for this process and not for all others; move "
                "it elsewhere to go on from the one before."
            ) from None
        if jax.process_index() == 0:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        meet(key="lp-jax-set-aside", timeout_ms=_PATIENCE)
        # Orbax keeps a list of checkpoints, which still has the one that was renamed.
        self._checkpointer.reload()


_PATIENCE = 300_000  # milliseconds that processes wait for each other


@contextlib.contextmanager
def _only_raised() -> Iterator[None]:
    """Keep orbax, asyncio and Python from also printing the errors that orbax raises."""

    def is_info(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    with contextlib.ExitStack() as stack:
        for logger in map(logging.getLogger, ("absl", "asyncio", "root")):
            logger.addFilter(is_info)
            stack.callback(logger.removeFilter, is_info)
        stack.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = lambda unraisable: None
        yield


def _crc(about: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _checksums(tree: PyTree) -> dict[str, int]:
    """Return a checksum of each array, by its path. It does not depend on devices or processes."""
    # one after another, because each may take as much memory again
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): int(_checksum(x))
        for path, x in jax.tree.leaves_with_path(tree)
    }


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    """Add up a hash of each word and its place (the last rounds of MurmurHash3), modulo 2**32; each device adds up its own."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    # `bitcast_convert_type` accepts neither random keys, complex numbers nor booleans, so these become plain numbers first.
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    x = x.astype(jnp.int8) if x.dtype == bool else x
    words = lax.bitcast_convert_type(x, f"uint{min(jax.dtypes.itemsize_bits(x.dtype), 32)}").astype(
        jnp.uint32
    )
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, length in enumerate(words.shape):
        place = place * jnp.uint32(length) + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    # Sums modulo 2**32 do not depend on their order, so neither does the checksum, on any number of devices.
    h = words ^ (place * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(h ^ (h >> jnp.uint32(16)), dtype=jnp.uint32)


def _fields(state: TrainState) -> dict[str, PyTree]:
    """Return the parts of a state that are not None."""
    return {name: value for name, value in state._asdict().items() if value is not None}


def _reason(error: Exception) -> str:
    """Return the system's message, or the error's first line."""
    text = str(error) or type(error).__name__
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code[1])) if code else text.splitlines()[0]
