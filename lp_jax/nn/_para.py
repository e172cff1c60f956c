r"""Recurrent cells with diagonal recurrent matrices: one kernel runs them, or a few of Newton's iterations.

The matrices that multiply the state are diagonal, :math:`a \odot h`. So the Jacobian of a step is diagonal (GRU), or has a
2 x 2 block for each entry of the two states (LSTM), and a few iterations over all steps solve a long chain. Layers above
and below the cell mix the entries of a state.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from lp_jax._arrays import _check
from lp_jax._arrays._types import Layer, State
from lp_jax._comms._comm import Comm
from lp_jax._problem import Problem
from lp_jax._solvers._solver import Solver
from lp_jax.nn._solved import Solved

Gate = tuple[jax.Array, ...]


class _Cell(Solved):
    """A cell from sequences to the states of all times: one ``kernel`` for three gates, and their ``recurrent`` diagonals."""

    diagonals: int
    arrays: int  # of a state; the last one is the output

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        comm: Comm | Mesh | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        for name, value in (("features", features), ("hidden", hidden)):
            _check.integer(name, value, least=1)
        super().__init__(solver, adjoint_solver, comm)
        self.hidden = hidden

        def uniform(bound: float, *shape: int) -> nnx.Param:
            return nnx.Param(jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound))

        self.kernel = uniform(features**-0.5, features, 3 * hidden)
        self.bias = nnx.Param(jnp.zeros(3 * hidden, param_dtype))
        self.recurrent = uniform(1.0, self.diagonals, hidden)

    @staticmethod
    @abc.abstractmethod
    def step(state: State, gates: Gate, diagonals: Gate) -> State:
        """One time step. ``gates`` are the input's parts of the gates, ``(batch, hidden)``; ``diagonals`` ``(1, hidden)``."""

    def start(self, batch: int, dtype: DTypeLike) -> State:
        """Return the state before the first time: zeros."""
        zeros = jnp.zeros((batch, self.hidden), dtype)
        return zeros if self.arrays == 1 else (zeros,) * self.arrays

    @staticmethod
    def output(state: State) -> jax.Array:
        """Return the output of a state to the layer above, ``(batch, hidden)``."""
        return jax.tree.leaves(state)[-1]

    def __call__(self, x: jax.Array, y0: State | None = None) -> jax.Array:
        """Return the hidden states of all times, ``(batch, time, hidden)``, for the inputs of `problem`."""
        return jnp.swapaxes(self.solve(x, y0).aux, 0, 1)

    def problem(self, x: jax.Array, y0: State | None = None) -> Problem:
        """Return the problem that `solve` solves.

        The ``aux`` of its solution are the hidden states of all times, ``(time, batch, hidden)``, with `MPIComm` those of the
        rank's own times; ``y1`` is the last state.

        Args:
            x: the sequences, ``(batch, time, features)``.
            y0: the state before the first time, as ``solve(...).y1`` returns one; None is zero.

        Raises:
            ValueError: if the sequences have a wrong shape.
        """
        in_time = self.time_first(x, self.kernel.shape[0])
        kernel, bias = self.comm.replicate((self.kernel[...], self.bias[...]))
        gates = jnp.split(in_time @ kernel + bias[None, None], 3, axis=-1)  # one product for all times
        diagonals = tuple(self.recurrent[...][:, None])
        batch, steps, _ = x.shape
        return Problem(
            CellStep(type(self)),
            None,
            self.start(batch, gates[0].dtype) if y0 is None else y0,
            shared=diagonals,
            data=tuple(gates),
            t1=float(steps),
            comm=self.comm,
            has_aux=True,
        )


@dataclasses.dataclass(frozen=True)
class CellStep:
    """A cell as ``step(y, layer)`` that emits its output. Equal for equal cells, so that programs are reused."""

    cell: type[_Cell]

    def __call__(self, y: State, layer: Layer) -> tuple[State, jax.Array]:
        y = self.cell.step(y, layer.data, layer.shared)
        return y, self.cell.output(y)


class ParaGRU(_Cell):
    r"""A gated recurrent unit with diagonal recurrent matrices, made for all time steps at once.

    .. math::
        z = \sigma(W_z x + b_z + a_z \odot h), \quad r = \sigma(W_r x + b_r + a_r \odot h), \quad
        n = \tanh(W_n x + b_n + a_n \odot r \odot h), \quad h \leftarrow (1 - z) \odot h + z \odot n

    The Jacobian of a step is a diagonal matrix: Newton evaluates it once in each iteration, and once for the gradient.
    Use it like any layer: ``cell(x)`` are the hidden states of all times; stack several with dense layers between.

    Args:
        features: size of the input at each time.
        hidden: size of the state.
        solver: a `Solver`. None is the fastest that is known for the device: one kernel on an H100 or H200, Newton's method on
            other accelerators, one step after another on a CPU. ``Newton(jacobian="diagonal", rtol=1e-3)`` names the second. A
            cell that forgets its inputs takes three to five iterations, a cell that remembers more, and one that flips its
            state at every other symbol nearly as many as steps (``cell.solve(x).stats.iterations``).
        adjoint_solver: the same for the gradient. None means the settings of ``solver``; of Newton's, one exact iteration.
        comm: the workers of the time steps; None is one device. Each worker has all weights. With `MPIComm` each rank gets the
            sequences of all times, and returns the states of its own run of times.
        param_dtype: dtype of the parameters and of the input.
        rngs: source of the initial parameters: kernels uniform in :math:`\pm 1/\sqrt{features}`, diagonals in
            :math:`\pm 1`, biases zero.

    Raises:
        ValueError: if a size is below 1.
        TypeError: if a size is not an integer, or a solver is not a `Solver`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> cell = nn.ParaGRU(3, 16, rngs=nnx.Rngs(0))
        >>> cell(jnp.ones((4, 512, 3), "float32")).shape
        (4, 512, 16)

    Reference:
        Danieli, Rodriguez, Sarabia, Suau, Zappella, "ParaRNN: unlocking parallel training of nonlinear RNNs for large
        language models", ICLR 2026.
    """

    diagonals, arrays = 3, 1

    @staticmethod
    def step(state: State, gates: Gate, diagonals: Gate) -> State:
        (xz, xr, xn), (az, ar, an), h = gates, diagonals, state
        z, r = nnx.sigmoid(xz + az * h), nnx.sigmoid(xr + ar * h)
        return h + z * (jnp.tanh(xn + an * (r * h)) - h)


class ParaLSTM(_Cell):
    r"""A long short-term memory with diagonal recurrent matrices, made for all time steps at once.

    Input and forget gate are coupled, and the gates see the cell's state ("peepholes"):

    .. math::
        f = \sigma(W_f x + b_f + a_f \odot h + p_f \odot c), \quad
        c \leftarrow f \odot c + (1 - f) \odot \tanh(W_n x + b_n + a_n \odot h), \\
        o = \sigma(W_o x + b_o + a_o \odot h + p_o \odot c), \quad h \leftarrow o \odot \tanh(c)

    with the new :math:`c` in the second line. The state is ``(c, h)``. The Jacobian of a step has a 2 x 2 block for each
    entry: two evaluations for each iteration. Arguments and errors are those of `ParaGRU`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> cell = nn.ParaLSTM(3, 16, rngs=nnx.Rngs(0))
        >>> cell(jnp.ones((4, 512, 3), "float32")).shape
        (4, 512, 16)

    References:
        Danieli et al., as for `ParaGRU`; Gers, Schraudolph, Schmidhuber, "Learning precise timing with LSTM recurrent
        networks", JMLR 2002 (peepholes).
    """

    diagonals, arrays = 5, 2

    @staticmethod
    def step(state: State, gates: Gate, diagonals: Gate) -> State:
        (xf, xo, xn), (af, ao, an, pf, po), (c, h) = gates, diagonals, state
        f = nnx.sigmoid(xf + af * h + pf * c)
        c = c + (1 - f) * (jnp.tanh(xn + an * h) - c)
        return c, nnx.sigmoid(xo + ao * h + po * c) * jnp.tanh(c)
