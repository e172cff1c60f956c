"""Newton's method on all layers at once: linearise each where its state is, and solve the linear chain by a scan."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lp_jax._arrays import _check, _tree
from lp_jax._arrays._at_once import check as check_at_once
from lp_jax._arrays._pytree import register
from lp_jax._arrays._types import Advance, CPoints, PyTree, Scalar, Stacked, State
from lp_jax._levels._chain import Chain
from lp_jax._levels._level import Level
from lp_jax._levels._sweep import each, sweep
from lp_jax._solvers import _affine
from lp_jax._solvers._affine import Maps
from lp_jax._solvers._jacobians import Blocks, Full, Jacobians, OwnJacobians, Shared
from lp_jax._solvers._solver import WITHOUT_TOLERANCE, Needs, Solver, Start, constant

JACOBIANS = ("full", "shared", "diagonal", "identity")


class Damping(abc.ABC):
    """Change the Jacobians that `Newton` works with, so that products of many of them stay small.

    Subclasses are frozen dataclasses and pytrees. Whatever they do, k iterations leave the first k states exact.
    """

    @abc.abstractmethod
    def __call__(self, jacobian: jax.Array, matrix: bool) -> jax.Array:
        """The damped Jacobian: of ``(..., d, d)`` where it is a matrix, of ``(..., d)`` where that is its diagonal."""


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
        Gonzalez, Warrington, Smith, Linderman, "Towards scalable and stable parallelization of nonlinear RNNs", NeurIPS
        2024: the member of its family without a trust region.
    """

    by: float | jax.Array = 0.1

    def __call__(self, jacobian: jax.Array, matrix: bool) -> jax.Array:
        return jacobian * (1 - jnp.asarray(self.by)).astype(jacobian.dtype)


@register("limit")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip(Damping):
    """Scale Jacobians that are too large, until no row has a larger sum of magnitudes than ``limit``.

    Args:
        limit: of the sum of magnitudes in a row; with 1, no product of Jacobians exceeds 1 in the maximum norm.

    Example:
        >>> import lp_jax
        >>> lp_jax.Newton(jacobian="diagonal", damping=lp_jax.Clip(limit=1.0)).damping
        Clip(limit=1.0)
    """

    limit: float | jax.Array = 1.0

    def __call__(self, jacobian: jax.Array, matrix: bool) -> jax.Array:
        sums = jnp.abs(jacobian)
        if matrix:
            sums = jnp.max(jnp.sum(sums, axis=-1), axis=-1)[..., None, None]
        limit = jnp.asarray(self.limit).astype(sums.dtype)
        return jacobian * (limit / jnp.maximum(sums, limit)).astype(jacobian.dtype)


class Iterate(NamedTuple):
    """States that leave the layers, and what is the same in every iteration; leaves ``(N, ...)``.

    Attributes:
        states: the states.
        operands: those that a shared Jacobian is taken at.
        jacobians: those of an adjoint system.
    """

    states: CPoints
    operands: PyTree = None
    jacobians: jax.Array | None = None


@register("rtol", "atol", "damping")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Newton(Solver):
    r"""Newton's method on the states of all layers at once.

    With :math:`A_n` the Jacobian of layer n at the state that enters it, an iteration solves
    :math:`\delta_{n+1} = A_n \delta_n + \Phi_n(y_n) - y_{n+1}`, :math:`\delta_0 = 0`, by an associative scan, of depth
    :math:`\log_2 N`, and adds :math:`\delta` to the states. Far fewer iterations than `Picard` needs, each of which costs more:
    a full Jacobian of d numbers takes d evaluations, :math:`d^2` numbers per layer and example, and products of such
    matrices. Worth it for small states and many layers: recurrent networks with up to some 64 units. With
    ``jacobian="shared"`` a batch of examples shares its matrices.

    The adjoint system is linear: with full Jacobians one iteration solves it, and one is what it gets where no
    ``adjoint_solver`` is named.

    Args:
        jacobian: "full"; "shared", one for all examples, taken at the mean of their states and inputs: memory and products of a
            single example, for more iterations, in the adjoint too, which then starts from zeros; "diagonal", what numbers at
            the same place of k leaves of one shape make of each other, k x k at each place (of one leaf the diagonal); or
            "identity", no evaluations, which is `Picard`. Parameters of several shapes with k - 1 trees like theirs, such as
            the moments of an optimizer, count as k leaves. Layers in which a number acts on nothing else, such as `nn.ParaGRU`
            and `nn.ParaLSTM`, take k evaluations with "diagonal", and converge as with "full"; other layers take as many as
            with "full", for less memory and smaller products.
        iterations: number of iterations; with a tolerance their largest number. As many as there are layers are exact.
        relaxations: sweeps before the first iteration, in which every layer takes the state that entered it before: one
            evaluation of all layers each, where an iteration takes many. They forget the guess as fast as the network forgets
            what entered it, so that a trained recurrent network starts near its states (16, say) where the constant guess
            leads iterations astray. Layers near the identity forget nothing: 0.
        rtol: stop when the residual norm is at most this times the first one.
        atol: stop when the residual norm is at most this.
        fallback: propagate the layers serially, in the end, where the tolerance is not met. An iteration that diverges (its
            residual norm has grown by ten) or that gets no further is given up at once.
        damping: None, or a `Damping`, such as `Shrink` or `Clip`, where iterations overflow before they converge.
        batch_axes: number of leading axes of every leaf of the state along which a layer treats entries independently
            (examples); their Jacobians are taken one by one, and a step whose program combines them is refused. None is 1
            with "shared"; else it is 0, and refused where a leaf has several axes.
        jacobian_of: another step, or body of a `scan`, of the same form, whose Jacobian is taken in the place of the solved
            one's: one that is cheaper to differentiate, with a ``stop_gradient`` on a part that matters little. It decides how
            fast iterations converge, not to what. The adjoint then takes several iterations, too. None is the step itself.
        storage: what the adjoint finds: "all" (what a scan's gradient keeps; no layer is evaluated again), or "states"
            (no more than these; each layer is linearised again in every iteration).
        at_once: number of layers that a worker evaluates at once where they do not depend on each other, `math.inf` for all,
            or "auto": by what a layer holds. Numbers change by rounding only.

    Raises:
        TypeError: for a ``jacobian_of`` that is no function.
        ValueError: for values out of range, and for states that ``batch_axes`` does not fit.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> step = lambda y, layer: y + layer.dt * jnp.tanh(layer.params * y)
        >>> solution = lp_jax.solve(step, jnp.ones(8), jnp.ones(()), solver=lp_jax.Newton(iterations=3))
        >>> round(float(solution.y1), 4)
        1.8645

    References:
        Lim, Zhu, Selfridge, Kasim, "Parallelizing non-linear sequential models over the sequence length", ICLR 2024
        (full Jacobians); Gonzalez, Warrington, Smith, Linderman, "Towards scalable and stable parallelization of
        nonlinear RNNs", NeurIPS 2024 (diagonal ones, damping); Song, Meng, Liao, Ermon, "Accelerating feedforward
        computation via parallel nonlinear equation solving", ICML 2021 (sweeps of relaxation alone).
    """

    jacobian: str = "full"
    iterations: int = 5
    relaxations: int = 0
    rtol: float | jax.Array | None = None
    atol: float | jax.Array | None = None
    fallback: bool = False
    damping: Damping | None = None
    batch_axes: int | None = None
    jacobian_of: Callable[..., Any] | None = None
    storage: str = "all"
    at_once: int | float | str = "auto"

    def __post_init__(self) -> None:
        _check.one_of("jacobian", self.jacobian, JACOBIANS)
        _check.integer("iterations", self.iterations, least=1)
        _check.integer("relaxations", self.relaxations, least=0)
        if self.batch_axes is not None:
            _check.integer("batch_axes", self.batch_axes, least=0)
        if self.jacobian_of is not None and not callable(self.jacobian_of):
            raise TypeError(f"jacobian_of must be a function of the form of the step; got {self.jacobian_of!r}.")
        if self.jacobian_of is not None and self.jacobian == "identity":
            raise ValueError('jacobian="identity" takes no Jacobian, of no step. Leave jacobian_of out.')
        _check.one_of("storage", self.storage, ("states", "all"))
        check_at_once("at_once", self.at_once)
        _check.tolerance(self.rtol, self.fallback, has_tolerance=self.has_tolerance)

    @property
    def keeps_states(self) -> bool:
        return self.storage == "all"

    def for_adjoint(self) -> Solver:
        if self.jacobian != "full" or self.damping is not None or self.jacobian_of is not None:
            return self
        return dataclasses.replace(self, iterations=1, relaxations=0, **WITHOUT_TOLERANCE)

    def discretize(self, chain: Chain) -> tuple[Level, ...]:
        everything = self.at_once == "auto" and chain.footprint.counted
        level = chain.finest(1, at_once=chain.at_once(math.inf if everything else self.at_once))
        origin = None if self.jacobian_of is None else chain.step(self.jacobian_of)
        return (dataclasses.replace(level, origin=origin),)

    def needs(self, steps: int) -> Needs:
        return Needs(steps=() if self.jacobian_of is None else (self.jacobian_of,), averaged_axes=self._averaged_axes)

    def init(self, levels: Sequence[Level], guess: CPoints | None) -> Start:
        level = levels[0]
        shared = self.jacobian == "shared"
        if guess is None and level.reverse and shared:  # it is for cotangents that fade away
            guess = _tree.zeros_like(_tree.repeat(level.y0, level.intervals))
        u = Iterate(self._relaxed(level, constant(level, guess)))
        if shared:
            operands = level.xs[0] if level.reverse else level.xs
            u = u._replace(operands=self._shared(level).operands(_forward(level), level.y0, operands))
        if level.reverse and self.iterations > 1 and self.jacobian != "identity":
            u = Iterate(u.states, jacobians=self._linearised(level, u)[1])
        return Start(u, recovers=True)

    def c_points(self, levels: Sequence[Level], state: Iterate) -> CPoints:
        return state.states

    def _relaxed(self, level: Level, u: CPoints) -> CPoints:
        relaxations = min(self.relaxations, level.workers.total(level.span))
        if not relaxations:
            return u

        def relaxed(_: int, entering: CPoints) -> CPoints:
            return level.incoming(sweep(level, entering)[0])

        entering = level.incoming(u)
        unroll = level.workers.processor.loop_unroll(relaxations, relaxed, 0, entering)
        entering = lax.fori_loop(1, relaxations, relaxed, entering, unroll=unroll)
        return sweep(level, entering)[0]

    def improve(self, levels: Sequence[Level], state: Iterate) -> tuple[Iterate, Scalar]:
        level, u, before = levels[0], state, state.states
        if self.jacobian == "identity" or u.jacobians is not None:
            stepped, jacobians = sweep(level, level.incoming(before))[0], u.jacobians
        else:
            stepped, jacobians = self._linearised(level, u)
        residuals = _tree.sub(stepped, before)
        if jacobians is None:
            change = level.cumsum(residuals, _tree.zeros_like(level.y0))
        else:
            kind = self._kind(level)
            maps = Maps(*_tree.wide((jacobians, jax.vmap(kind.join)(residuals))))
            change = jax.vmap(kind.part)(_affine.solve(level.workers, maps, kind, reverse=level.reverse))
        after = jax.tree.map(_finite_or_before, _tree.add(before, change), before)
        return u._replace(states=after), _tree.sum_of_squares(residuals)

    def finish(self, levels: Sequence[Level], u: CPoints, advance: Advance | None) -> tuple[CPoints, Any]:
        return u, None if advance is None else sweep(levels[0], levels[0].incoming(u), advance=advance)[1]

    @property
    def _averaged_axes(self) -> int:
        if self.jacobian != "shared":
            return 0
        return 1 if self.batch_axes is None else self.batch_axes

    def _kind(self, level: Level) -> Jacobians:
        if self.jacobian == "shared":
            return self._shared(level)
        return self._own(level)

    def _own(self, level: Level) -> OwnJacobians:
        return (Full if self.jacobian == "full" else Blocks)(level.y0, self.batch_axes)

    def _shared(self, level: Level) -> Shared:
        return Shared(level.y0, self._averaged_axes, single=level.single_example)

    def _linearised(self, level: Level, u: Iterate) -> tuple[CPoints, jax.Array]:
        """The states after all layers, and the layers' Jacobians."""
        entering = level.incoming(u.states)
        if self.jacobian == "shared":
            return sweep(level, entering)[0], self._at_mean(level, entering, u.operands)
        kind = self._own(level)

        def advance(u: State, x: PyTree, shared: PyTree) -> tuple[State, jax.Array]:
            if self.jacobian_of is None:
                u_next, jacobian = kind.linearise(lambda v: level.step(v, x, shared), u, transposed=level.reverse)
            else:
                u_next = level.step(u, x, shared)
                jacobian = kind.linearise(lambda v: other(v, x, shared), u, transposed=level.reverse)[1]
            if not level.reverse:  # an infinite derivative would spoil the states of all later layers
                jacobian = jnp.where(jnp.isfinite(jacobian), jacobian, 0)
            return u_next, jacobian if self.damping is None else kind.damped(jacobian, self.damping)

        origin = level.origin or level.step

        def other(u: State, x: PyTree, shared: PyTree) -> State:
            if not level.reverse:
                return origin(u, x, shared)
            operand, state = x[:2]
            pulled: State = jax.vjp(lambda state: origin(state, operand, shared), state)[1](u)[0]
            return pulled

        return sweep(level, entering, advance=advance)

    def _at_mean(self, level: Level, entering: Stacked, operands: PyTree) -> jax.Array:
        """One Jacobian for all examples; those of an adjoint are of the layers at the states that these were linearised at."""
        kind, step = self._shared(level), _forward(level)

        def one(u: State, x: PyTree) -> jax.Array:
            jacobian = kind.at_mean(lambda u: step(u, x), u)
            jacobian = jacobian.T if level.reverse else jacobian
            return jacobian if self.damping is None else kind.damped(jacobian, self.damping)

        return each(level, one, level.xs[1] if level.reverse else entering, operands)


def _finite_or_before(after: jax.Array, before: jax.Array) -> jax.Array:
    """Numbers that overflowed are set back: they would stay, and k iterations leave the first k states exact."""
    return jnp.where(jnp.isfinite(after), after, before)


def _forward(level: Level) -> Callable[[State, PyTree], State]:
    """The layers' own step, of an adjoint level too."""
    step = level.origin or level.step
    return lambda u, x: step(u, x, level.shared)
