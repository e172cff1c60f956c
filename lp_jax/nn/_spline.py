"""Weights as functions of depth: B-splines in time."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lp_jax._arrays import _check
from lp_jax._arrays._types import PyTree
from lp_jax._comms._comm import Comm
from lp_jax._solvers._solver import Solver
from lp_jax.nn._stack import MakeModule, stacked_module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spline:
    r"""Weights that are a spline of depth, :math:`\theta(t) = \sum_k c_k B_k(t)`.

    ``nn.LayerParallel(..., weights=nn.Spline(coefficients=K))`` trains K sets of parameters, the coefficients :math:`c_k`,
    drawn like layers. :math:`B_k` are the B-splines of the open uniform knots over [t0, t1], positive and of sum 1, so a
    layer's weights, the value at its midpoint, lie between the coefficients near it. Degree 0 gives piecewise constant weights;
    with N coefficients it is the network without a spline.

    Args:
        coefficients: number of coefficients K, at least degree + 1.
        degree: degree of the polynomials between knots; the spline has degree - 1 continuous derivatives.

    Raises:
        ValueError: if the degree is negative, or there are too few coefficients.
        TypeError: if either is not an integer.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from lp_jax import nn
        >>> make = lambda rngs: nn.DenseResidual(8, rngs=rngs)
        >>> trunk = nn.LayerParallel(make, 32, weights=nn.Spline(coefficients=6, degree=2), rngs=nnx.Rngs(0))
        >>> trunk.layers.inner.kernel.shape, trunk(jnp.ones((4, 8), "float32")).shape
        ((6, 8, 8), (4, 8))

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
                f"coefficients must be at least degree + 1 = {least}, as many as a polynomial of degree {self.degree} has; "
                f"got {self.coefficients}."
            )

    def basis(self, layers: int | Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the values :math:`B_k` at the layers' midpoints; a layer's weights are its row times the coefficients.

        Args:
            layers: number N of layers of equal length; or the N + 1 times at which they start and the last one ends.

        Returns:
            Shape ``(N, coefficients)``, float64; each row sums to 1.

        Example:
            >>> from lp_jax import nn
            >>> nn.Spline(coefficients=3, degree=1).basis(4)
            array([[0.75, 0.25, 0.  ],
                   [0.25, 0.75, 0.  ],
                   [0.  , 0.75, 0.25],
                   [0.  , 0.25, 0.75]])
        """
        from scipy.interpolate import BSpline  # here: it takes a third of the time of importing lp_jax.nn

        if np.ndim(layers) == 0:
            number = _check.integer("layers", layers, least=1)
            t = (np.arange(number) + 0.5) / number  # rounded once, so that midpoints on a knot are exactly on it
        else:
            times = np.asarray(layers, float)
            t = (midpoints(times) - times[0]) / (times[-1] - times[0])
        spans, degree = self.coefficients - self.degree, self.degree
        knots = np.concatenate([np.zeros(degree), np.arange(spans + 1) / spans, np.ones(degree)])
        values: np.ndarray = BSpline.design_matrix(t, knots, degree).toarray()
        return values


def midpoints(times: np.ndarray) -> np.ndarray:
    """Return the middle of each layer, given the times between them."""
    return (times[:-1] + times[1:]) / 2


def coefficients(spline: Spline, make_module: MakeModule, num_layers: int, rngs: nnx.Rngs, comm: Comm) -> nnx.Module:
    """Return the coefficients as one module, initialised like layers: all on each rank, or spread over a mesh."""
    if not isinstance(spline, Spline):
        raise TypeError(f"weights must be None or a spline, like nn.Spline(coefficients=8); got {spline!r}.")
    if spline.coefficients > _check.integer("num_layers", num_layers, least=1):
        raise ValueError(
            f"weights={spline} has more coefficients than the network has layers, num_layers={num_layers}, so the layers do "
            "not determine them. Take at most num_layers coefficients, or leave weights out."
        )
    kinds = (nnx.Param, nnx.BatchStat)
    module = stacked_module(make_module, spline.coefficients, rngs, comm, None, holds=kinds)
    if jax.tree.leaves(nnx.state(module, nnx.BatchStat)):
        raise ValueError(
            f"weights={spline} is not for layers with running statistics, which belong to a layer and not to a coefficient. Use "
            "a norm without them, like nnx.LayerNorm, or leave weights out."
        )
    return module


def expand(
    spline: Spline, coefficients: PyTree, layers: int | np.ndarray, comm: Comm, solvers: Sequence[Solver]
) -> PyTree:
    """Return the parameters of the layers, leaves ``(N, ...)``, from coefficients, leaves ``(K, ...)``.

    Each worker computes the parameters of its own layers; all workers have the coefficients.
    """
    rows = comm.share(spline.basis(layers), solvers)
    return _products(rows, comm.replicate(comm.adopt(coefficients)), comm)


@functools.partial(jax.jit, static_argnames="comm")
def _products(rows: jax.Array, coefficients: PyTree, comm: Comm) -> PyTree:
    def leaf(c: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            wide = jnp.promote_types(c.dtype, jnp.float32)
        product = jnp.tensordot(rows.astype(wide), c.astype(wide), 1, precision="highest")
        return product.astype(c.dtype)

    return comm.spread(jax.tree.map(leaf, coefficients))
