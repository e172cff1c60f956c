import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lp_jax._types import PyTree, State, Step


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    step: Step
    params: PyTree
    y0: State
    _: dataclasses.KW_ONLY
    shared: PyTree = None
    data: PyTree = None
    t0: Any = 0.0
    t1: Any = 1.0
    comm: Any = None
    has_aux: bool = False

    def __post_init__(self) -> None:
        for name in ("params", "y0", "shared", "data"):
            object.__setattr__(self, name, jax.tree.map(_array, getattr(self, name)))

    @property
    def layers(self) -> int:
        return int(jax.tree.leaves((self.params, self.data))[0].shape[0])


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)
