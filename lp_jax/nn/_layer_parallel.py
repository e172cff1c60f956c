"""A stack of layers as one module that is solved layer-parallel. Each layer has its own weights, or all share a spline."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lp_jax import Comm, Problem, Solution, Solver
from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import PyTree, State
from lp_jax.nn._solved import Solved
from lp_jax.nn._stack import MakeModule, TrunkStep, stacked_module, trunk_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spline:
    r"""Weights that are a spline of depth, :math:`\theta(t) = \sum_k c_k B_k(t)`.

    ``nn.LayerParallel(..., weights=nn.Spline(coefficients=K))`` trains K sets of parameters, the coefficients :math:`c_k`,
    drawn like layers. :math:`B_k` are the B-splines of the open uniform knots over [t0, t1], positive and of sum 1, so a
    layer's weights, the value at its midpoint, lie between the coefficients near it. Degree 0 gives piecewise constant weights;
    with N coefficients it is the network without a spline.

    Raises:
        ValueError: if the degree is negative, or there are fewer than degree + 1 coefficients.
        TypeError: if either is not an integer.

    References:
        de Boor, "A practical guide to splines", Springer (2001), chapter IX; Guenther, Pazner, Qi, "Spline
        parameterization of neural network controls for deep learning", arXiv:2103.00301 (2021).
    """

    coefficients: int
    degree: int = 3

    def __post_init__(self) -> None:
        least = _check.integer("degree", self.degree, least=0) + 1
        if _check.integer("coefficients", self.coefficients, least=1) < least:
            raise ValueError(
                f"coefficients must be at least degree + 1 = {least}, as many as a polynomial of "
                f"degree {self.degree} has; got {self.coefficients}."
            )

    def basis(self, layers: int | Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the values :math:`B_k` at the layers' midpoints, float64 ``(N, coefficients)``; each row sums to 1.

        ``layers`` is the number N of layers of equal length; or the N + 1 times at which they start and the last one ends.

        Example:
            >>> from lp_jax import nn
            >>> nn.Spline(coefficients=3, degree=1).basis(2)
            array([[0.5, 0.5, 0. ],
                   [0. , 0.5, 0.5]])
        """
        # imported here, because it takes a third of the time of importing lp_jax.nn
        from scipy.interpolate import BSpline

        if np.ndim(layers) == 0:
            number = _check.integer("layers", layers, least=1)
            # rounded once, so that midpoints on a knot are exactly on it
            t = (np.arange(number) + 0.5) / number
        else:
            times = np.asarray(layers, float)
            t = (midpoints(times) - times[0]) / (times[-1] - times[0])
        spans, degree = self.coefficients - self.degree, self.degree
        # The first and the last knot have multiplicity degree + 1 (de Boor,
        # chapter IX), so the splines sum to 1 up to both ends.
        knots = np.concatenate([np.zeros(degree), np.arange(spans + 1) / spans, np.ones(degree)])
        values: np.ndarray = BSpline.design_matrix(t, knots, degree).toarray()
        return values


def midpoints(times: np.ndarray) -> np.ndarray:
    """Return the middle of each layer, given the times between them."""
    return (times[:-1] + times[1:]) / 2


@jax.jit(static_argnames="comm")
def expand(rows: jax.Array, coefficients: PyTree, comm: Comm) -> PyTree:
    """Return the parameters of layers, leaves ``(N, ...)``, from their rows of the basis and the coefficients."""

    def leaf(c: jax.Array) -> jax.Array:
        # The sum over coefficients is made in single precision at least, and rounded to the dtype of the parameters once.
        wide = _tree.wide(c)
        product = jnp.tensordot(rows.astype(wide.dtype), wide, 1, precision="highest")
        return product.astype(c.dtype)

    return comm.spread(jax.tree.map(leaf, coefficients))


class LayerParallel(Solved):
    """N residual layers, used like a single layer: ``y1 = trunk(y)``.

    ``trunk.layers`` is the module that ``make_module`` builds, with stacked parameters: each `nnx.Param` has the layers
    as leading axis. Optimizers, `nnx.split`, checkpoints and ``trunk.eval()`` work as everywhere in NNX. All settings are
    static. To change a tolerance without compiling again, pass the solver to `solve` as an argument of the jitted function.
    ``t0``, ``t1`` and the solvers are those of `lp_jax.solve`.

    Args:
        make_module: ``make_module(rngs)`` builds one layer, ``__call__(y, t, dt) -> y_next``; see `stack`. It may also
            hold running statistics, like those of `BatchNorm`.
        weights: None if each layer has its own parameters; or a `Spline`, whose coefficients are the parameters. Each
            worker computes the weights of its layers from them. Not for layers with running statistics.
        comm: the workers of the layers; None is one device. With `MeshComm` the parameters are made on their devices. With
            `MPIComm` each rank holds the parameters of its own layers (`layer_slices`), or all coefficients.

    Errors are those of `stack`, and a TypeError if a solver is not a `Solver`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> trunk = nn.LayerParallel(
        ...     lambda rngs: nn.DenseResidual(8, rngs=rngs), 32, t1=2.0, solver=lp_jax.MGRIT(levels=3), rngs=nnx.Rngs(0)
        ... )
        >>> y = jnp.ones((4, 8), "float32")
        >>> trunk(y).shape, trunk.layers.inner.kernel.shape, len(nn.unstack(trunk))
        ((4, 8), (32, 8, 8), 32)
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
        # The times are Python numbers, because NNX takes arrays for state, which optimizers and checkpoints would see.
        self.t0 = float(t0)
        self.t1 = end_times(t1)
        super().__init__(solver, adjoint_solver, comm)
        self.weights = nnx.static(weights)
        self.num_layers = _check.integer("num_layers", num_layers, least=1)
        if weights is None:
            self.layers = stacked_module(
                make_module, num_layers, rngs, self.comm, self.placing_solvers()
            )
            return
        if not isinstance(weights, Spline):
            raise TypeError(
                f"weights must be None or a spline, like nn.Spline(coefficients=8); got "
                f"{weights!r}."
            )
        if weights.coefficients > num_layers:
            raise ValueError(
                f"weights={weights} has more coefficients than the network has layers, "
                f"num_layers={num_layers}. Take at most "
                "num_layers coefficients, or leave weights out."
            )
        self.layers = stacked_module(
            make_module, weights.coefficients, rngs, self.comm, None, holds=nnx.Param
        )

    def solve(self, *inputs: Any, **options: Any) -> Solution:
        """Propagate a state through the layers: ``solve(y, **inputs, **options) -> Solution``.

        The inputs are those of `problem`. The options are ``solver`` and ``adjoint_solver``, of this call instead of the
        module's, and ``guess`` and ``adjoint_guess``, all as for `lp_jax.solve`. Layers with running statistics (`BatchNorm`)
        update them once per call, from the final sweep; in ``eval()`` mode they do not.
        """
        solution = super().solve(*inputs, **options)
        # The aux of `TrunkStep` are the new running statistics, leaves (num_layers, ...). A solve cannot write them itself:
        # it evaluates a layer several times, and only the final sweep counts.
        if solution.aux is not None:
            nnx.update(self.layers, solution.aux)
        return solution

    def problem(
        self, y: State, *, shared: PyTree = None, data: PyTree = None, key: jax.Array | None = None
    ) -> Problem:
        """Return the problem that `solve` solves.

        Args:
            y: the state that enters the first layer, a pytree of floating-point arrays.
            shared: passed to all layers as ``shared``: a padding mask, a memory to attend to.
            data: per-layer inputs, leaves ``(num_layers, ...)``; each layer gets its slice as ``data``, or as ``key`` if it
                has no keyword ``data``.
            key: one random key for this call. Each layer gets ``jax.random.fold_in(key, index)`` as ``key``, on any
                number of workers.

        Raises:
            ValueError: if the data have another number of layers, or data and key would both be the layers' ``key``.
            TypeError: if data, key or shared is given and the layers have no such keyword.
        """
        step, params, stats = stacks(self)
        return Problem(
            step,
            params,
            y,
            shared=(shared, key),
            data=(data, stats),
            t0=self.t0,
            t1=np.asarray(self.t1),
            comm=self.comm,
            has_aux=step.updates,
        )


def stacks(trunk: LayerParallel) -> tuple[TrunkStep, PyTree, PyTree]:
    """Return the layers as a pure step, their parameters and running statistics, leaves ``(num_layers, ...)``."""
    step, params, stats = trunk_step(trunk.layers)
    if trunk.weights is not None:
        # A spline lives on the time of the network, so layers of unequal length see its values at unequal distances.
        has_times = np.shape(trunk.t1) == (trunk.num_layers + 1,)
        layers = np.asarray(trunk.t1) if has_times else trunk.num_layers
        rows = trunk.comm.share(trunk.weights.basis(layers), trunk.placing_solvers())
        params = expand(rows, trunk.comm.replicate(trunk.comm.adopt(params)), trunk.comm)
    return step, params, stats


def refuse_ranks(trunk: LayerParallel) -> None:
    """Refuse a trunk whose layers are spread over MPI ranks."""
    if trunk.comm.splits:
        raise ValueError(
            f"the trunk's layers are spread over {trunk.comm.size} ranks, and each has only its "
            "run. Gather them first (lp_jax.train.Ranks.gather), into a network on one rank."
        )


def end_times(t1: float | Sequence[float] | np.ndarray) -> float | tuple[float, ...]:
    """Return the end time, or the times between the layers, as hashable numbers."""
    times = np.asarray(t1, float)
    return tuple(times.tolist()) if times.ndim else float(times)
