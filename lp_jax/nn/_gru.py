r"""Gated recurrent units: time steps are the layers; they share the weights and differ in the inputs.

With the gates of Cho et al. (the reset gate is applied after the product, as in cuDNN),

.. math::
    r = \sigma(W_r x + b_r + U_r h + c_r), \quad z = \sigma(W_z x + b_z + U_z h + c_z), \quad
    n = \tanh(W_n x + b_n + r \odot (U_n h + c_n)),

a unit is a step of the ODE :math:`h' = (1 - z) \odot (n - h)`. Explicit Euler with a step of 1 is the usual unit. Implicit
Euler for the stiff part is stable for any step, as the coarse levels need.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from lp_jax._arrays import _check
from lp_jax._arrays._types import Layer
from lp_jax._comms._comm import Comm
from lp_jax._problem import Problem
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver
from lp_jax.nn._solved import Solved

Sequences: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]
"""Sequences ``(batch, time, features)``, or these with their lengths ``(batch,)``."""


class Gates(NamedTuple):
    """The linear map to the three gates r, z, n, side by side: kernel ``(inputs, 3 hidden)``, bias ``(3 hidden,)``."""

    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> Sequence[jax.Array]:
        """Return the parts of r, z and n, ``(..., hidden)``."""
        return jnp.split(x @ self.kernel + self.bias.reshape(*[1] * (x.ndim - 1), -1), 3, axis=-1)


@dataclasses.dataclass(frozen=True)
class GRUStep:
    """One time step of stacked units, as ``step(y, layer)``.

    ``y`` has one state ``(batch, hidden)`` per unit. ``layer.data`` has the inputs' part of the first unit's gates, and
    the mask of the examples that have not ended. ``layer.shared`` has the weights.
    """

    implicit: bool

    def __call__(self, y: tuple[jax.Array, ...], layer: Layer) -> tuple[jax.Array, ...]:
        inputs, active = layer.data
        recurrent, between = layer.shared
        out: list[jax.Array] = []
        for number, h in enumerate(y):
            if number > 0:
                inputs = between[number - 1](out[-1])
            (xr, xz, xn), (hr, hz, hn) = inputs, recurrent[number](h)
            new = _unit(h, xr + hr, xz + hz, xn, hn, layer.dt, self.implicit)
            out.append(new if active is None else jnp.where(active[:, None], new, h))
        return tuple(out)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=6)
def _unit(
    h: jax.Array, r: jax.Array, z: jax.Array, xn: jax.Array, hn: jax.Array, dt: jax.Array, implicit: bool
) -> jax.Array:
    """Return a unit's new state. The gradient repeats this, which costs less than keeping its intermediate values."""
    n = jnp.tanh(xn + nnx.sigmoid(r) * hn)
    rate = dt * nnx.sigmoid(-z)  # dt (1 - z)
    return (h + rate * n) / (1 + rate) if implicit else h + rate * (n - h)


class GRU(Solved):
    r"""Recurrent network of stacked units whose time steps are solved layer-parallel.

    A trunk like `LayerParallel`, called with the sequences instead of a state: ``gru(x)`` are the units' last states, a tuple
    of ``(batch, hidden)``; see `problem` for x.

    Args:
        features: size of the input at each time.
        hidden: size of the state of each unit.
        units: number of stacked units; one state of the solve holds all of them.
        implicit: True for :math:`h \leftarrow (h + \Delta t (1 - z) \odot n) / (1 + \Delta t (1 - z))`, False for
            :math:`h \leftarrow h + \Delta t (1 - z) \odot (n - h)`, which with a step of 1 is the usual unit.
        dt: time that one step spans.
        solver: a `Solver`. A unit's state changes much in a step, so no iteration is safe on all sequences: sweeps can overflow,
            also as coarse steps, and cycles with `Rediscretize` leave large errors. `Newton` with full Jacobians converges on
            more sequences, for small states. `lp_jax.plan` measures a given network.
        adjoint_solver: the same for the gradient; None means the settings of ``solver``.
        comm: the workers of the time steps; None is one device. Each worker has all weights. With `MPIComm` each rank gets the
            sequences of all times, and uses its own run of times.
        param_dtype: dtype of the parameters and of the input.
        rngs: source of the initial parameters: uniform in :math:`\pm 1/\sqrt{hidden}`.

    Raises:
        ValueError: if a size is below 1.
        TypeError: if a size is not an integer, or a solver is not a `Solver`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> gru = nn.GRU(9, 16, units=2, solver=lp_jax.MGRIT(levels=3), rngs=nnx.Rngs(0))
        >>> [h.shape for h in gru(jnp.ones((4, 128, 9), "float32"))]
        [(4, 16), (4, 16)]

    References:
        Moon, Cyr, "Parallel training of GRU networks with a multi-grid solver for long sequences", ICLR 2022; Cho et
        al., "Learning phrase representations using RNN encoder-decoder", EMNLP 2014.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        units: int = 1,
        implicit: bool = True,
        dt: float = 1.0,
        solver: Solver | None = Serial(),
        adjoint_solver: Solver | None = None,
        comm: Comm | Mesh | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        for name, value in (("features", features), ("hidden", hidden), ("units", units)):
            _check.integer(name, value, least=1)
        super().__init__(solver, adjoint_solver, comm)
        self.hidden, self.implicit, self.dt = hidden, implicit, float(dt)
        bound = hidden**-0.5

        def gates(inputs: int) -> nnx.Dict:
            def uniform(*shape: int) -> nnx.Param:
                return nnx.Param(jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound))

            return nnx.Dict(kernel=uniform(inputs, 3 * hidden), bias=uniform(3 * hidden))

        self.inputs = nnx.List([gates(features if number == 0 else hidden) for number in range(units)])
        self.recurrent = nnx.List([gates(hidden) for _ in range(units)])

    def problem(self, x: Sequences) -> Problem:
        """Return the problem that `solve` solves: its data are the gates of the first unit's inputs, shared the others.

        Args:
            x: the sequences, ``(batch, time, features)``; or ``(x, lengths)`` with ``(batch,)`` integers. A sequence ends after
                its number of steps, and its state stays the same from there.

        Raises:
            ValueError: if the sequences or the lengths have a wrong shape.
        """
        x, lengths = x if isinstance(x, tuple) else (x, None)
        first, *between = (_gates(part) for part in self.inputs)
        in_time = self.time_first(x, len(first.kernel))
        active = None if lengths is None else self.comm.share(_active(x, lengths), self.placing_solvers())
        zeros = jnp.zeros((len(x), self.hidden), x.dtype)
        return Problem(
            GRUStep(self.implicit),
            None,
            (zeros,) * len(self.recurrent),
            shared=([_gates(part) for part in self.recurrent], between),
            data=(tuple(self.comm.replicate(first)(in_time)), active),  # one product for all times
            t1=np.asarray(x.shape[1] * self.dt),
            comm=self.comm,
        )


def _active(x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the examples that have not ended at each time, ``(time, batch)``."""
    if lengths.shape != x.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        got = f"{lengths.dtype}{list(lengths.shape)}"
        raise ValueError(f"lengths must be {len(x)} integers, one for each sequence; got {got}.")
    return jnp.arange(x.shape[1])[:, None] < lengths[None]


def _gates(part: nnx.Dict) -> Gates:
    return Gates(part.kernel[...], part.bias[...])
