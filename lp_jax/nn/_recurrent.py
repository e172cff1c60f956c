"""Recurrent networks: time steps are the layers; they share the weights and differ in the inputs."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from lp_jax import Comm, Layer, Problem, Serial, Solver
from lp_jax._arrays import _check
from lp_jax._arrays._types import State
from lp_jax.nn._solved import Solved

Gates = tuple[jax.Array, ...]
"""The terms of three gates, ``(..., hidden)`` each, or the factors of a state in them."""


def gates(x: jax.Array, weights: dict[str, jax.Array]) -> Gates:
    """Return the terms of three gates; the weights are a kernel ``(inputs, 3 hidden)`` and a bias ``(3 hidden,)``."""
    bias = weights["bias"].reshape(*[1] * (x.ndim - 1), -1)
    return tuple(jnp.split(x @ weights["kernel"] + bias, 3, axis=-1))


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
                # The first unit's part of the gates comes with the data, for all times at once. A later unit sees the new
                # state of the unit below it, which exists only within the step.
                inputs = gates(out[-1], between[number - 1])
            xr, xz, xn = inputs
            hr, hz, hn = gates(h, recurrent[number])
            new = _unit(h, xr + hr, xz + hz, xn, hn, layer.dt, self.implicit)
            # A sequence that has ended keeps its state, so y1 holds the last state of every sequence.
            out.append(new if active is None else jnp.where(active[:, None], new, h))
        return tuple(out)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=6)
def _unit(
    h: jax.Array,
    r: jax.Array,
    z: jax.Array,
    xn: jax.Array,
    hn: jax.Array,
    dt: jax.Array,
    implicit: bool,
) -> jax.Array:
    """Return a unit's new state. The gradient repeats this, which costs less than keeping its intermediate values."""
    n = jnp.tanh(xn + nnx.sigmoid(r) * hn)
    rate = dt * nnx.sigmoid(-z)  # dt (1 - z)
    # One step for h' = (1 - z)(n - h), with the gates taken at the old h: implicit in the h of the right-hand side, or Euler's.
    return (h + rate * n) / (1 + rate) if implicit else h + rate * (n - h)


class GRU(Solved):
    r"""Recurrent network of stacked units whose time steps are solved layer-parallel.

    With the gates of Cho et al. (the reset gate is applied after the product, as in cuDNN),

    .. math::
        r = \sigma(W_r x + b_r + U_r h + c_r), \quad z = \sigma(W_z x + b_z + U_z h + c_z), \quad
        n = \tanh(W_n x + b_n + r \odot (U_n h + c_n)),

    a unit is a step of the ODE :math:`h' = (1 - z) \odot (n - h)`. A trunk like `LayerParallel`, called with the sequences of
    `problem` instead of a state: ``gru(x)`` are the units' last states, a tuple of ``(batch, hidden)``.

    Args:
        features: size of the input at each time.
        hidden: size of the state of each unit.
        units: number of stacked units.
        implicit: True for :math:`h \leftarrow (h + \Delta t (1 - z) \odot n) / (1 + \Delta t (1 - z))`, which is stable for any
            step, as the coarse levels need; False for Euler's explicit step, which with a length of 1 is the usual unit.
        dt: time that one step spans.
        solver: a `Solver`. A unit's state changes much in a step, so no iteration is safe on all sequences: sweeps
            can overflow, also as coarse steps, and cycles with `Rediscretize` leave large errors. `Newton` with full Jacobians
            converges on more sequences, for small states. `lp_jax.plan` measures a given network.
        adjoint_solver: the same for the gradient. None means the settings of ``solver``.
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
        self.hidden = hidden
        self.implicit = implicit
        self.dt = float(dt)
        bound = hidden**-0.5

        def linear(inputs: int) -> nnx.Linear:
            uniform = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
            return nnx.Linear(
                inputs,
                3 * hidden,
                kernel_init=uniform,
                bias_init=uniform,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        self.inputs = nnx.List(
            [linear(features if number == 0 else hidden) for number in range(units)]
        )
        self.recurrent = nnx.List([linear(hidden) for _ in range(units)])

    def problem(self, x: jax.Array | tuple[jax.Array, jax.Array]) -> Problem:
        """Return the problem that `solve` solves.

        Args:
            x: the sequences, ``(batch, time, features)``; or ``(x, lengths)`` with ``(batch,)`` integers. A sequence ends after
                its number of steps, and its state stays the same from there.

        Raises:
            ValueError: if the sequences or the lengths have a wrong shape.
        """
        x, lengths = x if isinstance(x, tuple) else (x, None)
        parts = (nnx.to_pure_dict(nnx.state(part)) for part in (self.inputs, self.recurrent))
        (first, *between), recurrent = (list(part.values()) for part in parts)
        in_time = self.time_first(x, len(first["kernel"]))
        active = None
        if lengths is not None:
            if lengths.shape != x.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
                raise ValueError(
                    f"lengths must be {len(x)} integers, one for each sequence; got "
                    f"{lengths.dtype}{list(lengths.shape)}."
                )
            # The mask has shape (time, batch): the axis of time is the axis of layers, which the workers share.
            active = self.comm.share(
                jnp.arange(x.shape[1])[:, None] < lengths[None], self.placing_solvers()
            )
        zeros = jnp.zeros((len(x), self.hidden), x.dtype)
        return Problem(
            GRUStep(self.implicit),
            None,
            (zeros,) * len(recurrent),
            shared=(recurrent, between),
            data=(gates(in_time, self.comm.replicate(first)), active),  # one product for all times
            t1=np.asarray(x.shape[1] * self.dt),
            comm=self.comm,
        )


class _Cell(Solved):
    """Base of cells with diagonal recurrent matrices, from sequences to the hidden states of all times.

    One ``kernel``, ``(features, 3 hidden)``, makes the inputs' part of three gates; ``recurrent`` holds the diagonals.
    """

    diagonals: int
    arrays: int  # of a state; the last one is the output

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        _check.integer("features", features, least=1)
        _check.integer("hidden", hidden, least=1)
        super().__init__(**options)
        self.hidden = hidden

        def uniform(bound: float, *shape: int) -> nnx.Param:
            return nnx.Param(jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound))

        self.kernel = uniform(features**-0.5, features, 3 * hidden)
        self.bias = nnx.Param(jnp.zeros(3 * hidden, param_dtype))
        self.recurrent = uniform(1.0, self.diagonals, hidden)

    @staticmethod
    @abc.abstractmethod
    def step(state: State, gates: Gates, diagonals: Gates) -> State:
        """Make one time step. ``gates`` are those of the input, ``(batch, hidden)``, and ``diagonals`` are ``(1, hidden)``."""

    @classmethod
    def emit(cls, y: State, layer: Layer) -> tuple[State, jax.Array]:
        """Return the next state and the output, its last array: the step of the solve."""
        y = cls.step(y, layer.data, layer.shared)
        return y, cls.output(y)

    def start(self, batch: int, dtype: DTypeLike) -> State:
        """Return the state before the first time, zeros."""
        zeros = jnp.zeros((batch, self.hidden), dtype)
        return zeros if self.arrays == 1 else (zeros,) * self.arrays

    @staticmethod
    def output(state: State) -> jax.Array:
        """Return the hidden state, the last array of a state."""
        return jax.tree.leaves(state)[-1]

    def __call__(self, x: jax.Array, y0: State | None = None) -> jax.Array:
        """Return the hidden states of all times, ``(batch, time, hidden)``, for the inputs of `problem`."""
        # A solve stacks aux over the layers, which are the times, so that the axis of time leads.
        return jnp.swapaxes(self.solve(x, y0).aux, 0, 1)

    def problem(self, x: jax.Array, y0: State | None = None) -> Problem:
        """Return the problem that `solve` solves.

        ``x`` are the sequences, ``(batch, time, features)``, and ``y0`` is the state before the first time; None is zero. In its
        solution ``aux`` are the hidden states of all times, ``(time, batch, hidden)``, with `MPIComm` those of the rank's own
        times; ``y1`` is the last state.
        """
        in_time = self.time_first(x, self.kernel.shape[0])
        weights = self.comm.replicate({"kernel": self.kernel[...], "bias": self.bias[...]})
        data = gates(in_time, weights)  # one product for all times
        batch, steps, _ = x.shape
        return Problem(
            self.emit,
            None,
            self.start(batch, data[0].dtype) if y0 is None else y0,
            shared=tuple(self.recurrent[...][:, None]),
            data=data,
            t1=float(steps),
            comm=self.comm,
            has_aux=True,
        )


class ParaGRU(_Cell):
    r"""A gated recurrent unit with diagonal recurrent matrices, made for all time steps at once.

    .. math::
        z = \sigma(W_z x + b_z + a_z \odot h), \quad r = \sigma(W_r x + b_r + a_r \odot h), \quad
        n = \tanh(W_n x + b_n + a_n \odot r \odot h), \quad h \leftarrow (1 - z) \odot h + z \odot n

    The Jacobian of a step is a diagonal matrix: Newton evaluates it once in each iteration, and once for the gradient.
    Use it like any layer: ``cell(x)`` are the hidden states of all times; stack several with dense layers between. Errors, and
    what is not named here, are as for `GRU`; an MPI rank returns the states of its own run of times.

    Args:
        solver: a `Solver`. None is the fastest that is known for the device: one kernel on an H100 or H200, Newton's
            method on other accelerators, one step after another on a CPU. ``Newton(jacobian="diagonal", rtol=1e-3)`` names the
            second. A cell that forgets its inputs takes three to five iterations, a cell that remembers more, and one that flips
            its state at every other symbol nearly as many as steps (``cell.solve(x).stats.iterations``).
        adjoint_solver: the same for the gradient. None means the settings of ``solver``; of Newton's, one exact iteration.
        comm: the workers of the time steps; None is one device.
        rngs: source of the initial parameters: kernels uniform in :math:`\pm 1/\sqrt{features}`, diagonals in
            :math:`\pm 1`, biases zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> lower, upper = nn.ParaGRU(3, 16, rngs=nnx.Rngs(0)), nn.ParaLSTM(16, 8, rngs=nnx.Rngs(1))
        >>> upper(lower(jnp.ones((4, 512, 3), "float32"))).shape
        (4, 512, 8)

    Reference:
        Danieli, Rodriguez, Sarabia, Suau, Zappella, "ParaRNN: unlocking parallel training of nonlinear RNNs for large
        language models", ICLR 2026.
    """

    diagonals = 3
    arrays = 1

    @staticmethod
    def step(state: State, gates: Gates, diagonals: Gates) -> State:
        xz, xr, xn = gates
        az, ar, an = diagonals
        h = state
        z = nnx.sigmoid(xz + az * h)
        r = nnx.sigmoid(xr + ar * h)
        # This form of (1 - z) h + z n is a step of residual kind, and needs one product less.
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

    References:
        Danieli et al., as for `ParaGRU`; Gers, Schraudolph, Schmidhuber, "Learning precise timing with LSTM recurrent
        networks", JMLR 2002 (peepholes).
    """

    diagonals = 5
    arrays = 2

    @staticmethod
    def step(state: State, gates: Gates, diagonals: Gates) -> State:
        xf, xo, xn = gates
        af, ao, an, pf, po = diagonals
        c, h = state
        f = nnx.sigmoid(xf + af * h + pf * c)
        c = c + (1 - f) * (jnp.tanh(xn + an * h) - c)
        return c, nnx.sigmoid(xo + ao * h + po * c) * jnp.tanh(c)
