"""A network and the state that enters it: the fields of a `Problem`, as the modules below it read them."""

import dataclasses

import jax

from lp_jax._arrays._types import PyTree, Stacked, State, Step, Times
from lp_jax._comms._comm import Comm, OneDevice
from lp_jax._programs import _inputs


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """The fields of a `Problem`, which says what they are, and their checks."""

    step: Step
    params: Stacked
    y0: State
    _: dataclasses.KW_ONLY
    shared: PyTree = None
    data: Stacked = None
    t0: Times = 0.0
    t1: Times = 1.0
    comm: Comm = None  # type: ignore[assignment]
    has_aux: bool = False

    def __post_init__(self) -> None:
        if not callable(self.step):
            raise TypeError(f"step must be a function step(y, layer) -> y_next; got {self.step!r}.")
        object.__setattr__(self, "y0", _inputs.state(self.y0))
        object.__setattr__(self, "comm", _inputs.comm(self.comm))
        for name in ("params", "shared", "data"):
            object.__setattr__(self, name, _inputs.arrays(getattr(self, name), name))
        _inputs.number_of_layers(self.params, self.data, one_worker=self.comm == OneDevice())

    @property
    def layers(self) -> int:
        """Number of layers that were passed: all layers; with `MPIComm`, those of this rank."""
        return int(jax.tree.leaves((self.params, self.data))[0].shape[0])
