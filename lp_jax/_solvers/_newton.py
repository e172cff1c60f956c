"""Newton's method on all layers at once: linearise each at its state, and solve the linear chain by a scan."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._check import register
from lp_jax._arrays._types import CPoints, PyTree, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level, Residual, measure
from lp_jax._levels._sweep import each, sweep
from lp_jax._solvers import _affine
from lp_jax._solvers._affine import Maps
from lp_jax._solvers._jacobians import Blocks, Full, Jacobians, Shared
from lp_jax._solvers._solver import AllStates, Needs, Solver, Start, constant

JACOBIANS = ("full", "shared", "diagonal")


class Damping(abc.ABC):
    """Change the Jacobians of `Newton`, so that products of many of them stay small.

    Subclasses are frozen dataclasses and pytrees. With any damping, the first k states are exact after k iterations.

    Example:
        >>> import dataclasses, jax.numpy as jnp, lp_jax
        >>> @lp_jax.register()
        ... @dataclasses.dataclass(frozen=True)
        ... class Bounded(lp_jax.Damping):
        ...     def __call__(self, jacobian, matrix):
        ...         return jnp.clip(jacobian, -1, 1)
        >>> solver = lp_jax.Newton(jacobian="diagonal", damping=Bounded())
    """

    @abc.abstractmethod
    def __call__(self, jacobian: jax.Array, matrix: bool) -> jax.Array:
        """Return the damped Jacobian: ``(..., d, d)`` for a ``matrix``, otherwise its diagonal, ``(..., d)``."""


@register("by")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shrink(Damping):
    """Multiply all Jacobians by ``1 - by``, so that states far behind count for less.

    Args:
        by: between 0 (no damping) and 1 (no layer sees another).

    Example:
        >>> import lp_jax
        >>> lp_jax.Newton(damping=lp_jax.Shrink(by=0.2)).damping
        Shrink(by=0.2)

    Reference:
        Gonzalez et al., NeurIPS 2024, as in `Newton`: the member of its family without a trust region.
    """

    by: float | jax.Array = 0.1

    def __call__(self, jacobian: jax.Array, matrix: bool) -> jax.Array:
        return jacobian * (1 - jnp.asarray(self.by)).astype(jacobian.dtype)


@register("limit")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip(Damping):
    """Scale large Jacobians, so that the sum of magnitudes in each row is at most ``limit``.

    Args:
        limit: largest sum of magnitudes in a row; with 1, no product of Jacobians exceeds 1 in the maximum norm.

    Example:
        >>> import lp_jax
        >>> lp_jax.Newton(jacobian="diagonal", damping=lp_jax.Clip(limit=1.0)).damping
        Clip(limit=1.0)
    """

    limit: float | jax.Array = 1.0

    def __call__(self, jacobian: jax.Array, matrix: bool) -> jax.Array:
        sums = jnp.abs(jacobian)
        if matrix:
            # The largest sum of magnitudes in a row is the matrix norm that belongs to the maximum norm.
            sums = jnp.max(jnp.sum(sums, axis=-1), axis=-1)[..., None, None]
        limit = jnp.asarray(self.limit).astype(sums.dtype)
        # A Jacobian within the limit is multiplied by exactly 1.
        return jacobian * (limit / jnp.maximum(sums, limit)).astype(jacobian.dtype)


class Iterate(NamedTuple):
    """States that leave the layers, and the arrays that all iterations share; leaves ``(N, ...)``."""

    states: CPoints
    # operands of the layers, for Jacobians that are not those of the evaluated steps
    operands: PyTree = None
    jacobians: jax.Array | None = None  # of an adjoint system


@register("rtol", "atol", "damping")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Newton(AllStates):
    r"""Newton's method on the states of all layers at once.

    With :math:`A_n` the Jacobian of layer n at the state that enters it, an iteration solves
    :math:`\delta_{n+1} = A_n \delta_n + \Phi_n(y_n) - y_{n+1}`, :math:`\delta_0 = 0`, by an associative scan, of depth
    :math:`\log_2 N`, and adds :math:`\delta` to the states. It needs far fewer iterations than `Picard`, and each costs more:
    a full Jacobian for d numbers takes d evaluations, :math:`d^2` numbers per layer and example, and products of such
    matrices. It pays for small states and many layers: recurrent networks with up to some 64 units.

    The adjoint system is linear: with full Jacobians one iteration solves it, the default for the ``adjoint_solver``. With a
    tolerance, one more evaluation of the layers measures whether it did.

    Args:
        jacobian: "full"; "shared": one for all examples, at the mean of their states and inputs, with the memory and products of
            a single example, but more iterations, also in the adjoint, which then starts from zeros; or "diagonal": only
            couplings between equal positions, k x k at each position for k leaves of one shape. Parameters plus k - 1 trees of
            the same structure, such as the moments of an optimizer, count as k leaves. With "diagonal" layers that couple only
            equal positions, such as `nn.ParaGRU`, take k evaluations and converge as with "full"; others take as many as "full",
            with less memory.
        iterations: number of iterations; with a tolerance their maximum. N iterations are exact for N layers.
        relaxations: number of Jacobi sweeps before the first iteration, each one evaluation of all layers. They forget the guess
            as fast as the network forgets its initial state: a trained recurrent network gets near its states in some 16.
            Layers near the identity forget nothing: take 0.
        rtol, atol, fallback: as in `Picard`.
        damping: None, or a `Damping`, such as `Shrink` or `Clip`, where iterations overflow before they converge.
        batch_axes: number of leading axes of every leaf of the state along which a layer treats entries independently
            (examples). A step whose program combines examples is refused. Where the program does not show it, iterations take
            longer if it does, and an adjoint of one iteration needs a tolerance, so that it is measured. None is 1 with
            "shared"; else it is 0, and refused where a leaf has several axes.
        jacobian_of: another step, or body of a `scan`, of the same form, whose Jacobian replaces that of the step: one with a
            ``stop_gradient`` on a part that matters little, say. It changes the speed of convergence, not the result.
        storage, at_once: as in `Picard`.

    Raises:
        TypeError: for a ``jacobian_of`` that is not a function.
        ValueError: for values out of range, and for states that ``batch_axes`` does not fit.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(layer.params * y)
        >>> solution = lp_jax.solve(step, jnp.ones(8), jnp.ones(()), solver=lp_jax.Newton(iterations=3))
        >>> round(float(solution.y1), 4)
        1.8645

    References:
        Lim et al., "Parallelizing non-linear sequential models over the sequence length", ICLR 2024 (full Jacobians); Gonzalez
        et al., "Towards scalable and stable parallelization of nonlinear RNNs", NeurIPS 2024 (diagonal ones, damping); Song et
        al., "Accelerating feedforward computation via parallel nonlinear equation solving", ICML 2021 (relaxation sweeps only).
    """

    jacobian: str = "full"
    iterations: int = 5
    relaxations: int = 0
    rtol: float | jax.Array | None = None
    atol: float | jax.Array | None = None
    fallback: bool = False
    damping: Damping | None = None
    batch_axes: int | None = None
    jacobian_of: Callable[..., PyTree] | None = None
    storage: str = "all"
    at_once: int | float | str = "auto"
    recovers = True

    def __post_init__(self) -> None:
        _check.one_of("jacobian", self.jacobian, JACOBIANS)
        _check.integer("iterations", self.iterations, least=1)
        _check.integer("relaxations", self.relaxations, least=0)
        if self.batch_axes is not None:
            _check.integer("batch_axes", self.batch_axes, least=0)
        if self.jacobian_of is not None and not callable(self.jacobian_of):
            raise TypeError(
                f"jacobian_of must be a function of the form of the step; got {self.jacobian_of!r}."
            )
        self.check_settings()

    def for_adjoint(self) -> Solver:
        # The adjoint system is linear, so one iteration with its exact Jacobians solves it.
        return dataclasses.replace(self, iterations=1, relaxations=0) if self._is_exact else self

    @property
    def summary(self) -> str:
        kind = "" if self.jacobian == "full" else f" with {self.jacobian} Jacobians"
        start = ""
        if self.relaxations:
            start = f" after {_check.numbered(self.relaxations, 'relaxation')}"
        return f"{self.effort}{start}{kind}"

    @property
    def _is_exact(self) -> bool:
        """Whether one iteration solves a linear system."""
        return self.jacobian == "full" and self.damping is None and self.jacobian_of is None

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        # The affine solve needs all Jacobians anyway, so all layers are evaluated at once unless their cost is not known.
        everything = self.at_once == "auto" and chain.traced.footprint.counted
        level = chain.finest(1, at_once=chain.at_once(math.inf if everything else self.at_once))
        origin = None if self.jacobian_of is None else chain.step(self.jacobian_of)
        return (dataclasses.replace(level, origin=origin),)

    def needs(self, steps: int) -> Needs:
        return Needs(steps=() if self.jacobian_of is None else (self.jacobian_of,))

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        level, shared = levels[0], self.jacobian == "shared"
        # cotangents may fade away, and would be lost in the rounding of a larger guess
        if guess is None and level.reverse and (shared or self._is_exact):
            guess = _tree.zeros_like(_tree.repeat(level.y0, level.intervals))
        u = constant(level, guess)
        # A sweep more than there are layers would change nothing.
        if relaxations := min(self.relaxations, level.workers.total(level.span)):

            def relax(_: int, entering: CPoints) -> CPoints:
                return level.incoming(sweep(level, entering)[0])

            entering = level.incoming(u)
            unroll = level.workers.processor.loop_unroll(relaxations, relax, 0, entering)
            # The last sweep leaves the states after the layers, not those that enter them.
            u = sweep(level, _tree.fori_loop(1, relaxations, relax, entering, unroll=unroll))[0]
        u = Iterate(u)
        if shared or self.jacobian_of is not None:
            # An adjoint level has (operands, states, sources) of its layers as operands.
            operands = level.xs[0] if level.reverse else level.xs
            u = u._replace(operands=self._kind(level).operands(_forward(level), level.y0, operands))
        measured = self._measures(level)
        # The Jacobians of a linear system do not depend on its states, so all iterations share them.
        if level.reverse and (self.iterations > 1 or measured):
            stepped, jacobians = self._linearise(level, u)
            u = Iterate(u.states, jacobians=jacobians)
            if measured:
                u = Iterate(self._solve(level, u.states, stepped, jacobians)[0])
        return Start(u)

    def c_points(self, levels: Sequence[Level], state: Iterate) -> CPoints:
        return state.states

    def _measures(self, level: Level) -> bool:
        """Whether the system is solved at the start, so that the only iteration measures the solution."""
        return level.reverse and self.iterations == 1 and self._is_exact and self.has_tolerance

    def improve(self, levels: Sequence[Level], state: Iterate) -> tuple[Iterate, Residual]:
        level, u, old = levels[0], state, state.states
        if self._measures(level):
            # `init` has solved the system; this evaluation only measures the residuals of the solution.
            stepped = sweep(level, level.incoming(old))[0]
            return Iterate(stepped), measure(level, _tree.sub(stepped, old))
        if u.jacobians is not None:
            stepped, jacobians = sweep(level, level.incoming(old))[0], u.jacobians
        else:
            stepped, jacobians = self._linearise(level, u)
        new, finite = self._solve(level, old, stepped, jacobians)
        residual = measure(level, _tree.sub(stepped, old))
        # what was set back is no solution
        squares = jax.tree.map(lambda x: jnp.where(finite, x, jnp.inf), residual.squares)
        return u._replace(states=new), residual._replace(squares=squares)

    def _solve(
        self, level: Level, old: CPoints, stepped: CPoints, jacobians: jax.Array
    ) -> tuple[CPoints, jax.Array]:
        """The states of the linear chain, and whether all are finite. Numbers that are not finite stay as they were."""
        residuals = _tree.sub(stepped, old)
        kind = self._kind(level)
        # delta[n+1] = A[n] delta[n] + residual[n], in at least single precision.
        maps = Maps(*_tree.wide((jacobians, jax.vmap(kind.join)(residuals))))
        solved = _affine.solve(level.workers, maps, kind, reverse=level.reverse)
        change = jax.vmap(kind.part)(solved)
        new = _tree.add(old, change)
        finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(new)])
        # numbers that overflowed would never become finite, and the first k states would not be exact
        new = jax.tree.map(lambda x, before: jnp.where(jnp.isfinite(x), x, before), new, old)
        return new, jnp.all(finite)

    def _kind(self, level: Level) -> Jacobians:
        if self.jacobian == "shared":
            return Shared(level.y0, 1 if self.batch_axes is None else self.batch_axes)
        if self.jacobian == "diagonal":
            return Blocks(level.y0, self.batch_axes)
        # One iteration that nobody measures must be exact, so that a doubtful axis of examples is refused.
        unmeasured = level.reverse and self.iterations == 1 and not self.has_tolerance
        return Full(level.y0, self.batch_axes, refuses_unknown=unmeasured)

    def _linearise(self, level: Level, u: Iterate) -> tuple[CPoints, jax.Array]:
        """The state after each layer, and the layers' Jacobians."""
        entering, kind, step = level.incoming(u.states), self._kind(level), _forward(level)

        def linearise(
            step: Callable[[State], State], u: State, *, transposed: bool
        ) -> tuple[State, jax.Array]:
            u_next, jacobian = kind.linearise(step, u, transposed=transposed)
            if not transposed:  # an infinite derivative would spoil the states of all later layers
                jacobian = jnp.where(jnp.isfinite(jacobian), jacobian, 0)
                # An adjoint step multiplies by the transposed Jacobian of its layer.
                jacobian = jnp.swapaxes(jacobian, *kind.axes) if level.reverse else jacobian
            return u_next, jacobian if self.damping is None else kind.damp(jacobian, self.damping)

        def advance(u: State, x: PyTree, shared: PyTree) -> tuple[State, jax.Array]:
            return linearise(lambda v: level.step(v, x, shared), u, transposed=level.reverse)

        # The same evaluation gives the states after the layers and the Jacobians.
        if u.operands is None:
            return sweep(level, entering, advance=advance)
        # those of an adjoint are its layers', at the states of their linearisation
        at = level.xs[1] if level.reverse else entering
        jacobians = each(
            level, lambda u, x: linearise(lambda v: step(v, x), u, transposed=False)[1], at
        )(at, u.operands)
        return sweep(level, entering)[0], jacobians


def _forward(level: Level) -> Callable[[State, PyTree], State]:
    """The layers' own step, on an adjoint level too."""
    return lambda u, x: (level.origin or level.step)(u, x, level.shared)
