"""Errors of gradients of any function with solves inside. The function stays as it is."""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from lp_jax._arrays import _tree
from lp_jax._arrays._types import PyTree
from lp_jax._choice._fastest import Pair
from lp_jax._levels._result import RESULTS, SERIAL, ranked
from lp_jax._programs._asked import Report, asked
from lp_jax._solvers._serial import Serial
from lp_jax._solvers._solver import Solver, Stats
from lp_jax.planning._measure import as_pair, seconds
from lp_jax.planning._words import code, numbered


def inner_products(g: jax.Array, e: jax.Array) -> jax.Array:
    """Return ``|g - e|^2, |g|^2, |e|^2`` and ``(g, e)`` of two arrays. Those of further arrays, or ranks, are added to them."""
    g, e = _tree.wide((g, e))
    return jnp.stack(
        [jnp.sum(jnp.real(jnp.conj(a) * b)) for a, b in ((g - e, g - e), (g, g), (e, e), (g, e))]
    )


def relative_error(products: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return ``|g - e| / |e|`` and the cosine of the angle between g and e from `inner_products`; 0 if both are zero."""
    apart, gg, ee, ge = jnp.asarray(products)

    def ratio(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where((a == 0) & (b == 0), 0, a / b)

    return ratio(jnp.sqrt(apart), jnp.sqrt(ee)), ratio(ge, jnp.sqrt(gg) * jnp.sqrt(ee))


class Solved(NamedTuple):
    """Iterations, residual and result of the solves of one kind, the worst of each."""

    direction: str  # "forward" or "adjoint"
    iteration: str  # its name, "Picard sweep"
    layers: int
    solves: int  # number of them
    iterations: int  # the most that one took
    # the largest last norm, relative to the first; NaN where fewer than two norms were measured
    residual: float
    result: int  # the worst code, one of `lp_jax.RESULTS`


class GradientErrors(NamedTuple):
    """Distance of a gradient g from the exact one, e, as `gradient_error` returns it; print it for a table."""

    relative: float  # ``|g - e| / |e|``, in the 2-norm
    cosine: float  # of the angle between g and e
    leaves: dict[str, float]  # relative error of each leaf, by its path
    solves: tuple[
        Solved, ...
    ]  # the solves inside, one row for each direction, solver and number of layers
    seconds: float  # of a value and gradient, the median of several
    exact_seconds: float  # of one with serial propagation, measured in turn with the other

    def __str__(self) -> str:
        own, exact = (
            f"{t * 1e3:.3g} ms" if t < 1 else f"{t:.3g} s"
            for t in (self.seconds, self.exact_seconds)
        )
        lines = [
            f"gradient error {self.relative:.1e}, cosine {self.cosine:.6f}; {own}, exactly {exact}"
        ]
        for name, error in sorted(self.leaves.items(), key=lambda item: -item[1])[:_SHOWN]:
            lines.append(f"  {name or 'the argument'}: {error:.1e}")
        if len(self.leaves) > _SHOWN:
            lines.append(f"  and {len(self.leaves) - _SHOWN} leaves with smaller errors")
        for s in self.solves:
            times = f"{s.solves} solves, " if s.solves > 1 else ""
            residual = "" if math.isnan(s.residual) else f", residual {s.residual:.1e} of the first"
            taken = (
                "" if s.result == SERIAL else f"{numbered(s.iterations, s.iteration)}{residual}; "
            )
            lines.append(
                f"  {s.direction}, {s.layers} layers: "
                f"{times}{taken}{RESULTS[s.result].partition('.')[0]}"
            )
        if not self.solves:
            lines.append("  no iterative solve of lp_jax inside: this gradient is exact")
        return "\n".join(lines)


_SHOWN = 8  # leaves
_SAMPLES = 5  # of each timed call


def gradient_error(
    loss: Callable[..., PyTree], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., GradientErrors]:
    """Measure the error of ``jax.grad(loss)``, and report the solves inside.

    ``loss`` stays as it is: it may call `solve`, `scan` or modules of `lp_jax.nn` anywhere, under jit, vmap, shard_map or in
    a scan. The exact gradient is that of the same function with every solver replaced by `Serial`. The arguments are those of
    ``jax.grad``. It returns a function of ``loss``'s arguments, which compiles three programs.

    Returns:
        What that function returns prints as a table. Its fields, for the gradient g and the exact one e: ``relative``, ``|g - e|
        / |e|`` in the 2-norm; ``cosine`` of their angle; ``leaves``, relative errors by the path of each leaf; ``solves``, a row
        for each direction, solver and number of layers; ``seconds`` and ``exact_seconds`` of a value and gradient.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> def loss(weights, y):
        ...     step = lambda y, layer: y + layer.dt * jnp.tanh(layer.params * y)
        ...     return lp_jax.solve(step, weights, y, solver=lp_jax.Picard(sweeps=2)).y1
        >>> errors = lp_jax.gradient_error(loss)(jnp.ones(16), jnp.ones(()))
        >>> errors.relative < 0.2, errors.solves[0].iterations
        (True, 2)
    """
    table = compare(loss, {"": None}, argnums, has_aux)
    return lambda *args: table(*args)[""]


def compare(
    loss: Callable[..., PyTree],
    solvers: Mapping[str, Solver | Pair | None] | Sequence[Solver | Pair],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., dict[str, GradientErrors]]:
    """Measure `gradient_error` for several solvers, each replacing all solvers inside ``loss``.

    ``solvers`` is a list, or a dict by name, of solvers or pairs ``(solver, adjoint_solver)``. None in a dict means the solvers
    that ``loss`` has. The function that it returns gives those errors by name; for a list, by the solvers as code.

    Raises:
        TypeError: if ``loss`` is not a function, or a solver not a `Solver`.

    Example:
        >>> import jax.numpy as jnp, lp_jax
        >>> def loss(weights, y):
        ...     step = lambda y, layer: y + layer.dt * jnp.tanh(layer.params * y)
        ...     return lp_jax.solve(step, weights, y).y1
        >>> table = lp_jax.compare(loss, [lp_jax.Picard(sweeps=2), lp_jax.Picard(sweeps=5)])(jnp.ones(16), jnp.ones(()))
        >>> rough, fine = table.values()
        >>> rough.relative > fine.relative
        True
    """
    if not callable(loss):
        raise TypeError(f"loss must be a function, as for jax.grad; got {loss!r}.")
    named = (
        solvers if isinstance(solvers, Mapping) else {code(solver): solver for solver in solvers}
    )
    pairs = {name: None if pair is None else as_pair(pair) for name, pair in named.items()}

    def compiled(solvers: Pair | None, report: Report | None = None) -> Callable[..., PyTree]:
        gradient = jax.jit(jax.grad(loss, argnums, has_aux))

        def call(*args: PyTree) -> PyTree:
            with asked(asked.value._replace(solvers=solvers, report=report)):
                out = gradient(*args)
            return out[0] if has_aux else out

        return call

    def measure(*args: PyTree) -> dict[str, GradientErrors]:
        exact = compiled((Serial(), Serial()))
        wanted = jax.device_get(exact(*args))
        errors = {}
        for name, pair in pairs.items():
            gradient = compiled(pair)
            reports = list[tuple[str, Solver, int, Stats]]()
            got = jax.device_get(gradient(*args))
            # A second program reports the stats by callbacks, which would disturb the times of the first one.
            listening = compiled(
                pair, lambda *solve, to=reports: lambda stats: to.append((*solve, stats))
            )
            jax.block_until_ready(listening(*args))
            # Callbacks may run after the results are there; the barrier waits for them.
            jax.effects_barrier()
            # Both programs are timed in turn, so that a slow phase of the machine meets both.
            calls = [functools.partial(program, *args) for program in (gradient, exact)]
            spent = seconds(calls, samples=_SAMPLES, repeats=1)
            leaves = {
                jax.tree_util.keystr(path): np.asarray(inner_products(g, e), float)
                for (path, g), e in zip(
                    jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True
                )
                if _tree.inexact(g)
            }
            relative, cosine = map(float, relative_error(sum(leaves.values(), np.zeros(4))))
            each = {name: float(relative_error(products)[0]) for name, products in leaves.items()}
            errors[name] = GradientErrors(relative, cosine, each, _worst(reports), *spent)
        return errors

    return measure


def _worst(reports: Sequence[tuple[str, Solver, int, Stats]]) -> tuple[Solved, ...]:
    """Return one row for all solves of a kind; forward solves first."""
    kinds = collections.defaultdict(list)
    for direction, solver, layers, stats in reports:
        norms = np.asarray(stats.residual_norms, float)
        norms = norms[norms >= 0] if np.isfinite(norms).all() else norms
        residual = float(norms[-1] / norms[0]) if len(norms) > 1 and norms[0] else math.nan
        name = f"{type(solver).__name__} {solver.iteration_name}"
        kind = direction == "adjoint", direction, name, layers
        kinds[kind].append((int(stats.iterations), residual, int(stats.result)))
    rows = []
    for (_, direction, name, layers), solves in sorted(kinds.items()):
        iterations, residuals, results = zip(*solves, strict=True)
        residual = float(np.max(residuals))
        # Result codes are not in order of severity; `ranked` puts them in that order.
        result = max(results, key=ranked)
        rows.append(Solved(direction, name, layers, len(solves), max(iterations), residual, result))
    return tuple(rows)
