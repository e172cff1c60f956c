"""A controller of training: tolerances that follow the noise of the mini-batch gradient."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lp_jax import Serial, Solver
from lp_jax._arrays import _check, _tree
from lp_jax._arrays._types import PyTree
from lp_jax._levels._result import DONE
from lp_jax.train._ranks import Ranks, total
from lp_jax.train._types import Batch, LossFn


class Control(NamedTuple):
    """A decision of a `Controller`: the forward and the adjoint tolerance, ``(2,)``, and whether to train serially for now."""

    rtols: jax.Array
    serial: jax.Array


@dataclasses.dataclass(frozen=True)
class Controller:
    """Keep the gradient's error below a part of the mini-batch noise, with tolerances as loose as that allows.

    A solver error far below the noise of a mini-batch is wasted work; an error above it does harm. The controller measures both
    from time to time, and loosens or tightens the tolerances of the forward and the adjoint solve. If no tolerance keeps the
    bound, it trains by serial propagation until one does. Nothing is compiled again.

    A probe costs about four gradients: one with the tolerances, one with an exact adjoint, the exact one, and two of half a
    batch, whose difference estimates the noise. If the bound is broken, it is repeated at once with smaller tolerances.

    Args:
        loss_fn: the loss, as for `make_train_step`.
        bound: largest error of the gradient, relative to ``of``.
        of: "noise", the standard deviation of the mini-batch gradient; or "gradient", the norm of the exact one.
        probe_every: number of steps between two probes. Early probes come sooner: at steps 0, 8 and 64.
        least, most: smallest and largest tolerance. If the smallest does not keep the bound, training is serial.
        ranks: as for `make_train_step`.

    Example:
        >>> import jax.numpy as jnp, lp_jax, optax
        >>> from lp_jax import train
        >>> def loss_fn(params, batch, solver, adjoint_solver):
        ...     step = lambda u, layer: u + layer.dt * jnp.tanh(layer.params * u)
        ...     solution = lp_jax.solve(step, params, batch, solver=solver, adjoint_solver=adjoint_solver)
        ...     info = train.Info(jnp.int32(len(batch)), solution.stats, solution.result)
        ...     return jnp.mean((solution.y1 - 2) ** 2), info
        >>> optimizer = optax.sgd(0.1)
        >>> step_fn, state = train.make_train_step(loss_fn, optimizer), train.init_state(jnp.zeros(16), optimizer)
        >>> batches = lambda epoch: [jnp.linspace(0.5, 1.5, 8)] * 5
        >>> solver, controller = lp_jax.Picard(sweeps=16, rtol=1e-1), train.Controller(loss_fn, bound=0.1)
        >>> state, log = train.fit(
        ...     step_fn, state, batches, steps_per_epoch=5, epochs=4, solver=solver, controller=controller
        ... )
        >>> probe, control = log.of("control")[-1], state.control
        >>> probe["error"] < 0.1 * probe["noise"], bool(control.serial)
        (True, False)

    Reference:
        The noise from two half batches: McCandlish, Kaplan, Amodei et al., "An empirical model of large-batch training",
        arXiv:1812.06162 (2018), appendix A.
    """

    loss_fn: LossFn
    _: dataclasses.KW_ONLY
    bound: float = 0.1
    of: str = "noise"
    probe_every: int = 250
    least: float = 1e-6
    most: float = 0.5
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        _check.integer("probe_every", self.probe_every, least=1)
        _check.one_of("of", self.of, ("noise", "gradient"))
        if not self.bound > 0:
            raise ValueError(f"bound must be positive; got {self.bound!r}.")
        if not 0 < self.least < self.most < 1:
            raise ValueError(
                f"tolerances must have 0 < least < most < 1; got least={self.least!r}, "
                f"most={self.most!r}."
            )

    def begin(self, solver: Solver, adjoint_solver: Solver) -> Control:
        """Return the first decision: the tolerances that the solvers have. Raise ValueError if one has none."""
        for name, each in (("solver", solver), ("adjoint_solver", adjoint_solver)):
            if each.rtol is None:
                raise ValueError(
                    f"a controller sets {name}.rtol, and this {type(each).__name__} has none. Give "
                    "it one, and a cap on its iterations: Picard(sweeps=32, rtol=1e-2)."
                )
        return self._decision(self._within([solver.rtol, adjoint_solver.rtol]))

    def due(self, step: int) -> bool:
        """Return whether to probe before this step; the first step is 0."""
        return step in (0, 8, 64) or step % self.probe_every == 0

    def solvers(
        self, control: Control, solver: Solver, adjoint_solver: Solver
    ) -> tuple[Solver, Solver]:
        """Return the solvers of the steps that follow."""
        if control.serial:
            return Serial(), Serial()
        # These are no arrays, because a step takes the arrays of its state.
        rtol, adjoint_rtol = control.rtols.tolist()
        replace: Any = dataclasses.replace
        return replace(solver, rtol=rtol), replace(adjoint_solver, rtol=adjoint_rtol)

    def probe(
        self, control: Control, params: PyTree, batch: Batch, solver: Solver, adjoint_solver: Solver
    ) -> tuple[Control, dict[str, object]]:
        """Return the decision, and a row for the log, with the number of ``gradients`` that the probe took.

        Errors and ``noise`` are relative to the norm of the exact gradient.
        """
        rtols = self._within(control.rtols)
        for attempt in range(1, _ATTEMPTS + 1):
            pair = self.solvers(self._decision(rtols), solver, adjoint_solver)
            row: dict[str, Any] = {
                name: float(x)
                for name, x in _measure(self.loss_fn, self.ranks, params, batch, *pair).items()
            }
            allowed = self.bound * (row["noise"] if self.of == "noise" else 1.0)
            row["gradients"] = attempt * _GRADIENTS
            done = row.pop("result") == DONE
            within = done and row["error"] <= allowed
            last = rtols
            errors = np.array([row["forward_error"], row["adjoint_error"]])
            # Each tolerance is scaled so that its error comes to an equal part of the allowed one, in bounded steps.
            wanted = allowed / (2 * math.sqrt(2)) / np.maximum(errors, np.finfo(float).tiny)
            scaled = last * np.clip(wanted, 0.05, 4.0)
            rtols = self._within(np.where(np.isfinite(errors), scaled, self.least))
            # A further attempt helps only if it has other tolerances and the forward solve met the last ones.
            if within or not done or np.array_equal(last, rtols):
                break
        if not within:  # to be tried again at the next probe
            rtols = last
        rtol, adjoint_rtol = rtols.tolist()
        row |= {
            "allowed": allowed,
            "rtol": rtol,
            "adjoint_rtol": adjoint_rtol,
            "serial": not within,
        }
        return self._decision(rtols, serial=not within), row

    def _decision(self, rtols: np.ndarray, *, serial: bool = False) -> Control:
        return Control(jnp.asarray(rtols, jnp.float32), jnp.asarray(serial))

    def _within(self, rtols: Any) -> np.ndarray:
        """Return tolerances as NumPy numbers from ``least`` to ``most``."""
        return np.clip(np.asarray(rtols, float), self.least, self.most)


_ATTEMPTS, _GRADIENTS = 5, 4  # largest number of attempts of a probe; gradients of an attempt


@jax.jit(static_argnums=(0, 1))
def _measure(
    loss_fn: LossFn,
    ranks: Ranks | None,
    params: PyTree,
    batch: Batch,
    solver: Solver,
    adjoint_solver: Solver,
) -> dict[str, jax.Array]:
    """Return errors and noise of the gradient, relative to the norm of the exact one."""
    size = max((len(x) for x in jax.tree.leaves(batch) if jnp.ndim(x)), default=0)
    if size < 2:
        raise ValueError(
            f"a controller measures the noise of a gradient by two halves of a batch; got {size} "
            f"examples."
        )

    def part(begin: int, end: int) -> Batch:  # random keys stay
        return jax.tree.map(lambda x: x[begin:end] if jnp.ndim(x) else x, batch)

    gradient_of = jax.grad(loss_fn, has_aux=True)
    # The difference to the exact gradient has two parts: the error of the forward solve, which remains with an exact
    # adjoint, and the error of the adjoint solve.
    exact, _ = gradient_of(params, batch, Serial(), Serial())
    with_exact_adjoint, _ = gradient_of(params, batch, solver, Serial())
    gradient, info = gradient_of(params, batch, solver, adjoint_solver)
    halves = part(0, size // 2), part(size // 2, 2 * (size // 2))
    first, second = (gradient_of(params, half, solver, adjoint_solver)[0] for half in halves)

    def norm(tree: PyTree) -> jax.Array:
        return jnp.sqrt(total(ranks, _tree.leaf_squares(tree)))

    def distance(a: PyTree, b: PyTree) -> jax.Array:
        return norm(_tree.sub(a, b)) / norm(exact)

    return {
        "error": distance(gradient, exact),
        "forward_error": distance(with_exact_adjoint, exact),
        "adjoint_error": distance(gradient, with_exact_adjoint),
        # Each half has twice the variance of the batch, and their difference
        # four times: half the difference estimates the noise.
        "noise": distance(first, second) / 2,
        "result": info.result,
    }
