"""A stack of layers as one module, solved layer-parallel."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lp_jax import _inputs, planning
from lp_jax._mgrit import MGRIT
from lp_jax._problem import Problem
from lp_jax._serial import Serial
from lp_jax._solution import Solution
from lp_jax._solve import solve, solve_vjp
from lp_jax._solver import Solver, Stats
from lp_jax._types import PyTree, State
from lp_jax.nn._spline import Spline, coefficients, expand
from lp_jax.nn._stack import Beside, Context, MakeModule, TrunkStep, stacked_module, trunk_step


class LayerParallel(nnx.Module):
    """N residual layers, used like any one layer: ``y1 = trunk(y)``.

    ``trunk.layers`` is the module that ``make_module`` builds, its parameters stacked: each an `nnx.Param` with the
    layers as leading axis. So optimizers, `nnx.split`, checkpoints, ``trunk.eval()`` and the like work as everywhere in
    NNX. All settings are static: a program is compiled once for each. To change a tolerance without compiling again,
    pass the solver to `solve` as an argument of the jitted function.

    Args:
        make_module: ``make_module(rngs)`` builds one layer, ``__call__(y, t, dt) -> y_next``; see `stack`. It may hold
            running statistics, like those of `nnx.BatchNorm`, too.
        num_layers: number of layers N.
        t0: time at which layer 0 starts, in units of your choice.
        t1: time at which the last layer ends, each layer spanning (t1 - t0) / N; or N + 1 increasing times.
        solver: `MGRIT`, `Picard`, `Newton` or `Serial`; or "auto": sweeps to a tolerance, or `Serial` with a warning where
            these cannot be faster, by the shapes of a call and the devices at hand (`planning.auto`). To measure, and know
            the gradient's error: ``lp_jax.plan(trunk.problem(y))``.
        adjoint_solver: the same for the gradient; None means the settings of ``solver``.
        weights: None for parameters of each layer's own; or a `Spline`, whose coefficients then are the parameters. Every
            worker makes of them the weights of its own layers. Not for layers with running statistics.
        comm: where the layers live: None is one device. With `MeshComm` the parameters are made on their devices, with
            `MPIComm` every rank has those of its own run (`layer_slices`), or all coefficients.
        rngs: source of the initial parameters.

    Raises:
        ValueError: as for `stack`.
        TypeError: as for `stack`, and for a solver that is none.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> trunk = nn.LayerParallel(
        ...     lambda rngs: nn.DenseResidual(8, rngs=rngs), 32, t1=2.0, solver=lp_jax.MGRIT(levels=3), rngs=nnx.Rngs(0)
        ... )
        >>> trunk(jnp.ones((4, 8), "float32")).shape
        (4, 8)
        >>> trunk.layers.inner.kernel.shape
        (32, 8, 8)
    """

    def __init__(
        self,
        make_module: MakeModule,
        num_layers: int,
        *,
        t0: float = 0.0,
        t1: float | Sequence[float] | np.ndarray = 1.0,
        solver: Solver | str = MGRIT(),
        adjoint_solver: Solver | None = None,
        weights: Spline | None = None,
        comm: Any = None,
        rngs: nnx.Rngs,
    ):
        self.t0 = float(t0)
        self.t1 = _hashable(np.asarray(t1, float).tolist())
        self.solver = solver if isinstance(solver, str) and solver == AUTO else static_solver("solver", solver)
        self.adjoint_solver = None if adjoint_solver is None else static_solver("adjoint_solver", adjoint_solver)
        _inputs.comm(comm)
        self.comm = nnx.static(comm)
        solvers = _of_layers(self)
        self.weights = nnx.static(weights)
        if weights is None:
            self.layers = stacked_module(make_module, num_layers, rngs, comm, solvers, holds=(nnx.Param, nnx.BatchStat))
        else:
            self.layers = coefficients(weights, make_module, num_layers, rngs, comm)
        self.num_layers = int(num_layers)

    def __call__(self, y: State, *, shared: PyTree = None, data: PyTree = None, key: jax.Array | None = None) -> State:
        """The state after the last layer; ``y1`` of what `solve` returns."""
        return self.solve(y, shared=shared, data=data, key=key).y1

    def solve(
        self,
        y: State,
        *,
        shared: PyTree = None,
        data: PyTree = None,
        key: jax.Array | None = None,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        guess: str | State = "constant",
    ) -> Solution:
        """Propagate ``y`` through the layers and tell how the solve went.

        Layers that keep running statistics (`nnx.BatchNorm`), unless in ``eval()`` mode, update them: from the states of
        the final sweep alone, once per layer and call.

        Args:
            y: the state that enters, a pytree of floating-point arrays, like the layers' ``y``.
            shared: what all layers get as ``shared``: a padding mask, a memory to attend to. Differentiated, where inexact.
            data: per-layer inputs, leaves ``(num_layers, ...)``: what the layers get as ``key``.
            key: one random key for this call, in place of ``data``: each layer gets as ``key`` what
                `jax.random.fold_in` makes of it and the layer's number, on any number of workers.
            solver: for this call instead of the module's own, forward and adjoint: ``solve(y, solver=lp_jax.Serial())``
                gives the exact states and the exact gradient.
            adjoint_solver: for this call, for the adjoint alone.
            guess: as for `lp_jax.solve`.

        Returns:
            The `Solution`.

        Raises:
            ValueError: as for `lp_jax.solve`, and for both data and key.
            TypeError: as for `lp_jax.solve`, and for data, key or shared that the layers do not take.

        Example:
            >>> import jax.numpy as jnp, lp_jax
            >>> from flax import nnx
            >>> from lp_jax import nn
            >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 32, rngs=nnx.Rngs(0))
            >>> y = jnp.ones((4, 8), "float32")
            >>> error = trunk(y) - trunk.solve(y, solver=lp_jax.Serial()).y1
            >>> bool(jnp.abs(error).max() < 1e-3)
            True
        """
        problem = self.problem(y, shared=shared, data=data, key=key)
        solution = solve(**vars(problem), **solvers_of(self, solver, adjoint_solver, problem), guess=guess)
        if solution.aux is not None:
            nnx.update(self.layers, solution.aux)
        return solution

    def solve_vjp(
        self,
        y: State,
        *,
        shared: PyTree = None,
        data: PyTree = None,
        key: jax.Array | None = None,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
    ) -> tuple[Solution, Callable[[State], tuple[State, Stats]]]:
        """`solve`, and the pullback of the last state that also tells how the adjoint solve converged.

        Args:
            y: as for `solve`, like all other arguments.
            shared: as for `solve`.
            data: as for `solve`.
            key: as for `solve`.
            solver: as for `solve`.
            adjoint_solver: as for `solve`.

        Returns:
            The solution, and ``pullback(y1_cotangent) -> (y_cotangent, adjoint_stats)``.

        Example:
            >>> import jax.numpy as jnp, lp_jax
            >>> from flax import nnx
            >>> from lp_jax import nn
            >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 32, rngs=nnx.Rngs(0))
            >>> solution, pullback = trunk.solve_vjp(jnp.ones((4, 8), "float32"))
            >>> y_cotangent, adjoint_stats = pullback(solution.y1)
            >>> int(adjoint_stats.iterations)
            2
        """
        problem = self.problem(y, shared=shared, data=data, key=key)
        solution, pullback = solve_vjp(**vars(problem), **solvers_of(self, solver, adjoint_solver, problem))

        def pull(cotangent: State) -> tuple[State, Stats]:
            gradients, stats = pullback(cotangent)
            return gradients.y0, stats

        return solution, pull

    def problem(self, y: State, *, shared: PyTree = None, data: PyTree = None, key: jax.Array | None = None) -> Problem:
        """What `solve` hands to `lp_jax.solve`, solvers aside: for `lp_jax.plan`, `lp_jax.calibrate` and solves of your own.

        Args:
            y: as for `solve`, like all other arguments.
            shared: as for `solve`.
            data: as for `solve`.
            key: as for `solve`.

        Returns:
            The `lp_jax.Problem`.

        Raises:
            ValueError: for both data and key.

        Example:
            >>> import jax.numpy as jnp, lp_jax
            >>> from flax import nnx
            >>> from lp_jax import nn
            >>> trunk = nn.LayerParallel(lambda rngs: nn.DenseResidual(8, rngs=rngs), 32, rngs=nnx.Rngs(0))
            >>> problem = trunk.problem(jnp.ones((4, 8), "float32"))
            >>> bool((lp_jax.solve(**vars(problem)).y1 == trunk(problem.y0)).all())
            True
        """
        if data is not None and key is not None:
            raise ValueError("data and key were both given, and layers take one of them as `key`. Leave one out.")
        step, params, stats = stacks(self)
        return Problem(
            step,
            params,
            y,
            shared=Context(shared, key),
            data=Beside(data, stats),
            t0=self.t0,
            t1=np.asarray(self.t1),
            comm=self.comm,
            has_aux=step.updates,
        )


def stacks(trunk: LayerParallel) -> tuple[TrunkStep, PyTree, PyTree]:
    """The layers as a pure step, their parameters and their running statistics, leaves ``(num_layers, ...)``."""
    step, params, stats = trunk_step(trunk.layers)
    if trunk.weights is not None:
        times = np.asarray(trunk.t1)
        layers = times if times.shape == (trunk.num_layers + 1,) else trunk.num_layers
        params = expand(trunk.weights, params, layers, trunk.comm, _of_layers(trunk))
    return step, params, stats


def _hashable(times: float | list[float]) -> float | tuple[float, ...]:
    return tuple(times) if isinstance(times, list) else times


def static_solver(name: str, solver: Any) -> Any:
    """A solver as NNX metadata: its tolerances as Python floats, lest they count as state of the model."""
    _inputs.solver(name, solver)
    return nnx.static(jax.tree.map(float, solver))


def solvers_of(trunk: Any, solver: Solver | None, adjoint_solver: Solver | None, problem: Problem) -> dict[str, Any]:
    """The solvers of a call: those given, or the trunk's own, which may be left to the problem's shapes."""
    if solver is None:
        solver = trunk.solver
        adjoint_solver = trunk.adjoint_solver if adjoint_solver is None else adjoint_solver
    if solver == AUTO:
        solver, adjoint = planning.auto(problem)
        adjoint_solver = adjoint if adjoint_solver is None else adjoint_solver
    return {"solver": solver, "adjoint_solver": adjoint_solver}


AUTO = "auto"


def _of_layers(trunk: LayerParallel) -> tuple[Solver, Solver]:
    """Forward and adjoint, as far as they decide which layers live where."""
    solver: Any = Serial() if trunk.solver == AUTO else trunk.solver  # sweeps leave that open, too
    return solver, trunk.adjoint_solver or solver
