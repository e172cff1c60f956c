"""A stack of layers as one module, solved layer-parallel."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lp_jax._arrays._types import PyTree, State
from lp_jax._comms._comm import Comm
from lp_jax._problem import Problem
from lp_jax._solution import Solution
from lp_jax._solvers._solver import Solver
from lp_jax.nn._solved import Solved
from lp_jax.nn._spline import Spline, coefficients, expand
from lp_jax.nn._stack import MakeModule, PerCall, PerLayer, TrunkStep, stacked_module, trunk_step


class LayerParallel(Solved):
    """N residual layers, used like a single layer: ``y1 = trunk(y)``.

    ``trunk.layers`` is the module that ``make_module`` builds, with stacked parameters: each `nnx.Param` has the layers
    as leading axis. Optimizers, `nnx.split`, checkpoints and ``trunk.eval()`` work as everywhere in NNX. All settings are
    static: each compiles a program of its own. To change a tolerance without compiling again, pass the solver to `solve`
    as an argument of the jitted function.

    Args:
        make_module: ``make_module(rngs)`` builds one layer, ``__call__(y, t, dt) -> y_next``; see `stack`. It may also
            hold running statistics, like those of `BatchNorm`.
        num_layers: number of layers N.
        t0: time at which layer 0 starts, in units of your choice.
        t1: time at which the last layer ends, each layer spanning (t1 - t0) / N; or N + 1 increasing times.
        solver: `MGRIT`, `Picard`, `Newton` or `Serial`; None is the default of `lp_jax.solve`, which goes by the shapes of
            a call and the device.
        adjoint_solver: the same for the gradient; None means the settings of ``solver``.
        weights: None if each layer has its own parameters; or a `Spline`, whose coefficients are the parameters. Each
            worker computes the weights of its layers from them. Not for layers with running statistics.
        comm: the workers of the layers; None is one device. With `MeshComm` the parameters are made on their devices. With
            `MPIComm` each rank holds the parameters of its own layers (`layer_slices`), or all coefficients.
        rngs: source of the initial parameters.

    Raises:
        ValueError: as for `stack`.
        TypeError: as for `stack`, and if a solver is not a `Solver`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> trunk = nn.LayerParallel(
        ...     lambda rngs: nn.DenseResidual(8, rngs=rngs), 32, t1=2.0, solver=lp_jax.MGRIT(levels=3), rngs=nnx.Rngs(0)
        ... )
        >>> y = jnp.ones((4, 8), "float32")
        >>> trunk(y).shape, trunk.layers.inner.kernel.shape
        ((4, 8), (32, 8, 8))
        >>> exact = trunk.solve(y, solver=lp_jax.Serial()).y1
        >>> bool(0 < jnp.abs(trunk(y) - exact).max() < 1e-2)
        True
        >>> solution, pullback = trunk.solve_vjp(y, solver=lp_jax.Picard(sweeps=3))
        >>> y_cotangent, adjoint_stats = pullback(solution.y1)
        >>> int(adjoint_stats.iterations)
        3
    """

    def __init__(
        self,
        make_module: MakeModule,
        num_layers: int,
        *,
        t0: float = 0.0,
        t1: float | Sequence[float] | np.ndarray = 1.0,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        weights: Spline | None = None,
        comm: Comm | Mesh | None = None,
        rngs: nnx.Rngs,
    ):
        self.t0 = float(t0)
        self.t1 = end_times(t1)
        super().__init__(solver, adjoint_solver, comm)
        self.weights = nnx.static(weights)
        if weights is None:
            kinds = (nnx.Param, nnx.BatchStat)
            self.layers = stacked_module(make_module, num_layers, rngs, self.comm, self.placing_solvers(), holds=kinds)
        else:
            self.layers = coefficients(weights, make_module, num_layers, rngs, self.comm)
        self.num_layers = int(num_layers)

    def solve(self, *inputs: Any, **options: Any) -> Solution:
        """Propagate a state through the layers: ``solve(y, **inputs, **options) -> Solution``.

        The inputs are those of `problem`. The options are ``solver`` and ``adjoint_solver``, of this call instead of the
        module's, and ``guess`` and ``adjoint_guess`` as for `lp_jax.solve`. ``solver=lp_jax.Serial()`` is exact. Layers with
        running statistics (`BatchNorm`) update them once per call, from the final sweep; in ``eval()`` mode they do not.

        Raises:
            ValueError: as for `lp_jax.solve`, and if data and key would both be the layers' ``key``.
            TypeError: as for `lp_jax.solve`, and if data, key or shared is given and the layers have no such keyword.
        """
        solution = super().solve(*inputs, **options)
        if solution.aux is not None:
            nnx.update(self.layers, solution.aux)
        return solution

    def problem(self, y: State, *, shared: PyTree = None, data: PyTree = None, key: jax.Array | None = None) -> Problem:
        """Return the problem that `solve` solves, for `lp_jax.plan`, `lp_jax.calibrate` and `lp_jax.solve`.

        Args:
            y: the state that enters the first layer, a pytree of floating-point arrays.
            shared: passed to all layers as ``shared``: a padding mask, a memory to attend to. Differentiated, if inexact.
            data: per-layer inputs, leaves ``(num_layers, ...)``; each layer gets its slice as ``data``, or as ``key`` if it
                has no keyword ``data``.
            key: one random key for this call. Each layer gets ``jax.random.fold_in(key, index)`` as ``key``, on any
                number of workers.

        Raises:
            ValueError: if the data have another number of layers.
            TypeError: if the state is not floating point or complex.
        """
        step, params, stats = stacks(self)
        return Problem(
            step,
            params,
            y,
            shared=PerCall(shared, key),
            data=PerLayer(data, stats),
            t0=self.t0,
            t1=np.asarray(self.t1),
            comm=self.comm,
            has_aux=step.updates,
        )


def stacks(trunk: LayerParallel) -> tuple[TrunkStep, PyTree, PyTree]:
    """Return the layers as a pure step, their parameters and running statistics, leaves ``(num_layers, ...)``."""
    step, params, stats = trunk_step(trunk.layers)
    if trunk.weights is not None:
        times = np.asarray(trunk.t1)
        layers = times if times.shape == (trunk.num_layers + 1,) else trunk.num_layers
        params = expand(trunk.weights, params, layers, trunk.comm, trunk.placing_solvers())
    return step, params, stats


def refuse_ranks(trunk: LayerParallel) -> None:
    """Refuse a trunk whose layers are spread over MPI ranks."""
    if trunk.comm.splits:
        raise ValueError(
            f"the trunk's layers are spread over {trunk.comm.size} ranks, and each has only its run. Gather them first "
            "(lp_jax.train.Ranks.gather), into a network on one rank."
        )


def end_times(t1: float | Sequence[float] | np.ndarray) -> float | tuple[float, ...]:
    """Return the end time, or the times between the layers, as hashable numbers."""
    times = np.asarray(t1, float)
    return tuple(times.tolist()) if times.ndim else float(times)
