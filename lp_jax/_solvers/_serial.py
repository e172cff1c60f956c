"""Serial propagation: the oracle and the baseline."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._at_once import in_chunks
from lp_jax._arrays._check import register
from lp_jax._arrays._types import Advance, CPoints, PyTree, Stacked, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._result import if_finite
from lp_jax._levels._sweep import march_and_emit
from lp_jax._solvers._solver import Solver, Start, Stats


@register()
@dataclasses.dataclass(frozen=True, kw_only=True)
class Serial(Solver):
    """One layer after another. It is a ``lax.scan``, exact, and differentiated by JAX itself.

    For a recurrent network (all weights in ``shared``, the inputs in ``data``) on one accelerator, without checkpoints, the
    gradient of the weights is one contraction over all steps. Only reverse mode is defined there.

    Args:
        checkpoint_every: number of layers between two states that are kept; the gradient recomputes the others. None keeps
            the arrays that ``jax.grad`` of a scan keeps.

    Example:
        >>> import lp_jax
        >>> lp_jax.Serial(checkpoint_every=16)
        Serial(checkpoint_every=16)
    """

    checkpoint_every: int | None = None
    iterations = 0
    exact = in_turn = True
    summary = "serial"

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None:
            _check.integer("checkpoint_every", self.checkpoint_every, least=1)

    @property
    def keeps_states(self) -> bool:
        return self.checkpoint_every is None

    def stride(self, steps: int) -> int:
        return min(self.checkpoint_every or 1, steps)

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        return (chain.finest(self.stride(chain.total), at_once=1),)

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        return Start(None)

    def finish(
        self, levels: Sequence[Level], u: CPoints, advance: Advance | None
    ) -> tuple[CPoints, PyTree]:
        return march_and_emit(levels[0], advance)


def propagate(chain: Chain, checkpoint_every: int | None) -> tuple[State, tuple[Stacked, PyTree]]:
    """Scan over the layers, and return the last state, and the pair of the states after the layers and aux."""
    unroll, layer = (
        chain.workers.processor.serial_unroll(chain.traced.footprint),
        chain.step(0, aux=True, in_turn=True),
    )

    def body(u: State, x: PyTree) -> tuple[State, tuple[State, PyTree]]:
        u, aux = layer(u, x, chain.shared)
        return u, (u, aux)

    if checkpoint_every is None or checkpoint_every >= chain.steps:
        return _tree.scan(body, chain.y0, chain.slices, unroll=unroll)

    # A segment keeps the state that enters it, and computes its layers again for the gradient.
    @jax.checkpoint
    def segment(u: State, xs: PyTree) -> tuple[State, tuple[State, PyTree]]:
        return _tree.scan(body, u, xs, unroll=unroll)

    return in_chunks(segment, chain.y0, chain.slices, checkpoint_every)


def no_stats(y1: State, done: int) -> Stats:
    """The stats of a solve without iterations. Its code is ``done`` unless ``y1`` is not finite."""
    norms = jnp.zeros((0,), _tree.wide_dtype(y1))
    return Stats(jnp.int32(0), norms, if_finite(jnp.int32(done), y1))
