"""`Problem`: a network and the state that enters it, to be solved."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._gradient import without_gradient
from lp_jax._arrays._types import Arrays, CPoints, PyTree, State
from lp_jax._comms._comm import OneDevice
from lp_jax._programs._inputs import Network
from lp_jax._programs._program import Output, Program, seen_of
from lp_jax._programs._traced import prepare
from lp_jax._solution import Solution
from lp_jax._solvers._solver import Solver, Stats


class Gradients(NamedTuple):
    """Gradients of a loss, shaped like the arguments of `solve`; the pullback of `solve_vjp` returns them.

    Leaves that cannot be differentiated (integers, keys) hold ``float0`` zeros, as ``jax.vjp`` gives them.

    Attributes:
        params: gradient with respect to ``params``.
        y0: gradient with respect to ``y0``.
        shared: gradient with respect to ``shared``.
        data: gradient with respect to ``data``.
        adjoint_trajectory: gradients with respect to the states that enter the intervals of the adjoint solver, leaves
            ``(ceil(N / m), ...)``: an ``adjoint_guess`` for the next solve. None where JAX differentiates a scan (`Serial`
            on one device).

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
        >>> solution, pullback = problem.solve_vjp(solver=lp_jax.Serial())
        >>> gradients = pullback(jnp.ones(()))[0]
        >>> gradients.params.shape, gradients.y0.shape
        ((64,), ())
    """

    params: PyTree
    y0: State
    shared: PyTree
    data: PyTree
    adjoint_trajectory: CPoints | None = None


@_check.check_arguments
@dataclasses.dataclass(frozen=True, eq=False)
class Problem(Network):
    """A deep network and the state that enters it, as one value: ``solve(step, params, y0, ...)`` is ``problem.solve(...)``.

    `plan`, `calibrate` and `hierarchy` take a problem; `scanned` and ``nn.LayerParallel.problem`` return one. Its arguments are
    those of `solve` that say what is solved: ``step``, ``params``, ``y0``, ``shared``, ``data``, ``t0``, ``t1``, ``comm`` and
    ``has_aux``. Shapes (`jax.ShapeDtypeStruct`) are enough to plan with. The attribute ``comm`` is a `Comm`, one device for None.

    Raises:
        ValueError: for leaves of different lengths or none.
        TypeError: for an integer state, a step that is not a function, and a ``comm`` that is not a `Comm`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * layer.params * y
        >>> problem = lp_jax.Problem(step, jnp.ones(64), jnp.ones(()))
        >>> problem.layers
        64
        >>> round(float(problem.solve().y1), 2)
        2.7
        >>> problem.replace(y0=jnp.zeros(())).solve(solver=lp_jax.MGRIT()).y1
        Array(0., dtype=float32)
    """

    def replace(self, **changes: PyTree) -> "Problem":
        """Return this problem with some of its arguments changed.

        Example:
            >>> import jax.numpy as jnp, lp_jax
            >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
            >>> problem.replace(params=jnp.ones(16)).layers
            16
        """
        return dataclasses.replace(self, **changes)

    def solve(
        self,
        *,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        guess: str | CPoints = "constant",
        adjoint_guess: CPoints | None = None,
    ) -> Solution:
        """Return the `Solution`, as `lp_jax.solve` does; the arguments are the same.

        Example:
            >>> import jax.numpy as jnp, lp_jax
            >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
            >>> int(problem.solve(solver=lp_jax.MGRIT(iterations=3)).stats.iterations)
            3
        """
        program, arrays = prepare(self, solver, adjoint_solver, guess, adjoint_guess)
        specs = functools.partial(_partitions, program, arrays)
        arrays = program.refuse_forward_mode(arrays)
        y1, aux, (stats, trajectory) = self.comm.adapt(program.solve, arrays, specs)(arrays)
        return Solution(y1, jax.lax.stop_gradient(stats), without_gradient(trajectory, _RESTART), aux)

    def solve_vjp(
        self,
        *,
        solver: Solver | None = None,
        adjoint_solver: Solver | None = None,
        guess: str | CPoints = "constant",
        adjoint_guess: CPoints | None = None,
    ) -> tuple[Solution, Callable[..., tuple[Gradients, Stats]]]:
        """Return the `Solution` and its pullback, as `lp_jax.solve_vjp` does; the arguments are the same.

        Example:
            >>> import jax.numpy as jnp, lp_jax
            >>> problem = lp_jax.Problem(lambda y, layer: y + layer.dt * layer.params * y, jnp.ones(64), jnp.ones(()))
            >>> solution, pullback = problem.solve_vjp(solver=lp_jax.MGRIT(iterations=3))
            >>> gradients, adjoint_stats = pullback(jnp.ones(()))
            >>> gradients.params.shape
            (64,)
        """
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types and self.comm != OneDevice():
            raise ValueError(
                "solve_vjp does not work inside jax.set_mesh with explicit axes. Call it outside of it, on the same arrays; or "
                "take jax.vjp of lp_jax.solve."
            )
        program, arrays = prepare(self, solver, adjoint_solver, guess, adjoint_guess)
        (y1, aux, rest), pull = program.vjp(arrays)

        def pullback(y1_cotangent: State, aux_cotangent: PyTree = None) -> tuple[Gradients, Stats]:
            cotangents = _tree.varying((y1_cotangent, seen_of(aux, aux_cotangent)), y1)
            gradient, stats = pull(*cotangents)
            arguments = (self.params, self.y0, self.shared, self.data)
            cotangents = (gradient.slices.params, gradient.y0, gradient.shared[0], gradient.slices.data)
            cotangents = jax.tree.map(_or_float0, cotangents, arguments, is_leaf=lambda x: x is None)
            params, y0, shared, data = _tree.sum_like(cotangents, arguments)
            return Gradients(params, y0, shared, data, gradient.adjoint_guess), stats

        return Solution(y1, *rest, aux), pullback


def _partitions(program: Program, arrays: Arrays) -> Output:
    """Partitions of the outputs of a solve: those of ``y0`` for states, and for aux of the same shape."""

    def spec(x: jax.Array) -> PartitionSpec:
        sharding = jax.typeof(x).sharding
        return PartitionSpec() if sharding.mesh.empty else sharding.spec

    def one(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    like = {x.shape: spec(x) for x in jax.tree.leaves(arrays.y0)}
    first = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[0], one(x)), arrays.slices)
    layer = program.chain(*arrays[:3]).step(0, aux=True)
    _, aux = jax.eval_shape(layer, *jax.tree.map(one, (arrays.y0, first, arrays.shared)))
    nowhere: PyTree = PartitionSpec()
    return (
        jax.tree.map(spec, arrays.y0),
        jax.tree.map(lambda x: PartitionSpec(None, *like.get(x.shape, ())), aux),
        (Stats(nowhere, nowhere, nowhere), jax.tree.map(lambda x: PartitionSpec(None, *spec(x)), arrays.y0)),
    )


_RESTART = (
    "Solution.trajectory is a restart value and has no gradient; the loss depends on it. To differentiate states, let the "
    "step return them as aux: `return y, y` with has_aux=True, and read Solution.aux. To start another solve from it, pass "
    "jax.lax.stop_gradient(solution.trajectory)."
)


def _or_float0(cotangent: jax.Array | None, x: jax.Array | None) -> jax.Array | np.ndarray | None:
    return cotangent if x is None or cotangent is not None else np.zeros(jnp.shape(x), jax.dtypes.float0)
