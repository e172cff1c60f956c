"""A gate on counts: evaluations, depth, messages and temporary memory of reference solves, held in counts.json.

A number that changes is a line in the CHANGELOG. ``python tests/core/test_counts.py`` measures all anew and writes the file.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # as the tests run
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "helpers")]
    import conftest  # noqa: F401

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from compiled import collectives, compiled
from problems import INJECT
from products import cost, layer, training_step

import lp_jax

HELD = Path(__file__).with_suffix("").with_name("counts.json")
LAYERS, WIDTH, WORKERS = 32, 4, 4
IDENTITY = lp_jax.Identity()
SOLVERS = {
    "serial": lp_jax.Serial(),
    "picard": lp_jax.Picard(sweeps=3),
    "picard, states only": lp_jax.Picard(sweeps=3, storage="states"),
    "picard, windows": lp_jax.Windowed(sweeps=3, windows=4),
    "mgrit, 2 levels": lp_jax.MGRIT(),
    "mgrit, 3 levels": lp_jax.MGRIT(levels=3, coarsening=2),
    "mgrit, F-cycle": lp_jax.MGRIT(
        levels=3, coarsening=2, cycle="F", start="guess", coarse_step=INJECT
    ),
    "mgrit, FCF, injection": lp_jax.MGRIT(relaxation="FCF", coarse_step=INJECT),
    "mgrit, identity": lp_jax.MGRIT(coarsening=8, coarse_step=IDENTITY, start="guess"),
    "mgrit, storage all": lp_jax.MGRIT(coarse_step=INJECT, storage="all"),
    "newton": lp_jax.Newton(iterations=2, batch_axes=1),
    "newton, diagonal": lp_jax.Newton(iterations=2, jacobian="diagonal", batch_axes=1),
}


def measured(solver):
    """Counts of value and gradient, for layers of one product each and one example.

    Evaluations and depth are those of one device; messages are for four. Bytes: on one device, and on each of the four.
    """
    params = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    y0 = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)
    comm = lp_jax.MeshComm(jax.make_mesh((WORKERS,), ("layers",), devices=jax.devices()[:WORKERS]))

    @jax.value_and_grad
    def function(params, y0, comm=None):
        return jnp.sum(lp_jax.solve(layer, params, y0, solver=solver, comm=comm).y1 ** 2)

    work, depth = cost(function, params, y0, unit=2 * WIDTH**2)
    programs = [
        compiled(jax.jit(functools.partial(function, comm=c)).lower(params, y0))
        for c in (None, comm)
    ]
    messages = collections.Counter()
    for (kind, _), times in collectives(programs[-1]).items():
        messages[kind] += times
    nbytes = [program.memory_analysis().temp_size_in_bytes for program in programs]
    return {
        "evaluations": work,
        "depth": depth,
        "messages": dict(sorted(messages.items())),
        "bytes": nbytes,
    }


@pytest.mark.parametrize("name", SOLVERS)
def test_counts_are_those_held(name):
    """Bytes are XLA's choice, and compared where the version is that of the file."""
    stored, found = json.loads(HELD.read_text()), measured(SOLVERS[name])
    assert list(stored["solves"]) == list(SOLVERS)
    wanted = stored["solves"][name]
    if stored["jaxlib"] != jaxlib.__version__:
        del wanted["bytes"], found["bytes"]
    assert found == wanted, (
        f"counts have changed; if that is meant, run python {os.path.relpath(__file__)}"
    )


# --- products in programs: on loops whose counts are plain, and on solvers whose counts are formulas --------------------

W, X = jnp.eye(4), jnp.ones(4)
UNIT = 2 * 4 * 4


def of(f):
    return cost(f, W, X, unit=UNIT)


def looped(f):
    """Six turns of a loop."""
    return lambda w, x: jax.lax.scan(lambda carry, _: f(w, carry), x, None, length=6)[0]


two_chains = lambda w, x: looped(lambda w, c: ((w @ (w @ c[0]), w @ c[1]), None))(w, (x, x))  # noqa: E731
COUNTED = {
    "in a row": (lambda w, x: w @ (w @ (w @ x)), 3, 3),
    "side by side": (lambda w, x: w @ x + w.T @ x, 2, 1),
    "a batch": (lambda w, x: jnp.sum(jax.vmap(lambda v: w @ v)(jnp.stack([x] * 5))), 5, 1),
    "none": (lambda w, x: x, 0, 0),
    "fori_loop": (lambda w, x: jax.lax.fori_loop(0, 9, lambda i, y: w @ y, x), 9, 9),
    "map": (lambda w, x: jax.lax.map(lambda v: w @ v, jnp.stack([x] * 7)), 7, 1),
    "scan": (
        lambda w, x: jax.lax.scan(lambda y, v: (w @ (y + w @ v), None), x, jnp.stack([x] * 7))[0],
        14,
        8,
    ),
    "loops in a loop": (
        looped(lambda w, y: (jax.lax.fori_loop(0, 5, lambda j, y: w @ y, y), None)),
        30,
        30,
    ),
    "two chains": (two_chains, 18, 12),
    "the short one": (lambda w, x: two_chains(w, x)[1], 6, 6),
    "outputs that nobody reads": (looped(lambda w, y: (w @ y, w @ (w @ y))), 6, 6),
    "branches": (
        lambda w, x: jax.lax.cond(x[0] > 0, lambda v: w @ (w @ v), lambda v: w @ v, x),
        2,
        2,
    ),
    "jit": (jax.jit(lambda w, x: (w @ x, w @ (w @ x))), 3, 2),
}
"""A function of a matrix and a vector, its products, and those that wait for each other."""


@pytest.mark.parametrize("name", COUNTED)
def test_products_are_counted_as_by_hand(name):
    f, work, depth = COUNTED[name]
    assert of(f) == (work, depth)


def test_loops_of_unknown_length_are_refused():
    with pytest.raises(ValueError, match="leave tolerances out"):
        of(lambda w, x: jax.lax.while_loop(lambda y: y[0] < 10, lambda y: w @ y + 1, x))


@pytest.mark.parametrize(
    ("solver", "work", "depth"),
    [
        # a product forward, and two backward, one of which nothing waits for
        (lp_jax.Serial(), 3, 2 * 64),
        # forward and adjoint sweeps, one batch each; between them layers are evaluated again; after them, the gradient
        (lp_jax.Picard(sweeps=3), 3 + 1 + 3 + 1, 2 * (3 + 1)),
        # without what is kept, they are evaluated again for every adjoint sweep
        (lp_jax.Picard(sweeps=3, storage="states"), 3 + 4 + 3 + 1, 2 * (3 + 1)),
    ],
)
def test_a_training_step(solver, work, depth):
    assert training_step(64, solver) == (work * 64, depth)


def cycle_cost(sizes, nu, cycles, skip):
    """Evaluations per level of ``cycles`` V-cycles and the final sweep.

    Per interval and cycle: m per CF-relaxation, m - 1 for F-relaxation, 1 for the residual, 1 for the coarse right-hand
    side (evaluated on the coarser level), and m - 1 to interpolate. On the finest level the interpolation is the next
    cycle's F-relaxation (or the final sweep's), and is done once. A skipped down-cycle costs m - 1 per interval, which on
    the finest level is again the next F-relaxation.
    """
    last = len(sizes) - 1
    cost = dict.fromkeys(range(len(sizes)), 0)
    cost[0] += sizes[0]  # the final sweep
    for cycle in range(cycles):
        cascade = skip and cycle == 0
        cost[last] += sizes[last]  # the coarsest solve
        for level in range(last):
            if level > 0:
                cost[level] += sizes[level] - sizes[level + 1]
            if not cascade:
                cost[level] += (nu[level] + 1) * sizes[level]
                cost[level + 1] += sizes[level + 1]
    return cost


@pytest.mark.parametrize(
    ("relaxation", "skip", "at_once"),  # every pair of the last two
    [("F", True, math.inf), ("F", False, 1), (("F", "FCF"), True, 1), ("FCF", False, math.inf)],
)
def test_a_training_step_of_cycles(relaxation, skip, at_once):
    """Each transposed evaluation linearises its layer; F-points are recomputed once, or in every sweep over the finest level.

    After that, the gradient of every layer.
    """
    n, m, forward, adjoint = 64, 4, 3, 2
    fields = {
        "relaxation": relaxation,
        "start": "cascade" if skip else "guess",
        "coarse_step": INJECT,
    }
    solvers = (
        lp_jax.MGRIT(levels=3, coarsening=m, iterations=k, at_once=at_once, **fields)
        for k in (forward, adjoint)
    )
    rules = relaxation if isinstance(relaxation, tuple) else [relaxation] * 2
    nu = [rule.count("C") for rule in (*rules, rules[-1])]
    forward_work, adjoint_work = (
        sum(cycle_cost([64, 16, 4], nu, k, skip).values()) for k in (forward, adjoint)
    )
    sweeps = 1 if at_once == math.inf else 1 + (adjoint - skip) * (nu[0] + 1)
    assert (
        training_step(n, *solvers).work
        == forward_work + 2 * adjoint_work + sweeps * (n - n // m) + n
    )


def test_depth_of_two_levels():
    """The coarsest level, and m - 1 fine layers, in a first cycle without down-cycle; the final sweep is m."""
    n, m = 64, 4
    solver = lp_jax.MGRIT(coarsening=m, iterations=1, coarse_step=INJECT)
    found = cost(
        lambda w, x: lp_jax.solve(layer, w, x, solver=solver).y1, jnp.stack([W] * n), X, unit=UNIT
    )
    assert found == (n / m + n, n / m + m)


NEWTON = lp_jax.Newton(iterations=4, batch_axes=1)


@pytest.mark.parametrize(
    ("forward", "adjoint"),
    [
        (NEWTON, NEWTON.for_adjoint()),
        (dataclasses.replace(NEWTON, jacobian="diagonal"), lp_jax.Picard(sweeps=2)),
    ],
)
def test_a_layer_of_one_example_costs_a_product(forward, adjoint):
    """Whether its axis of examples is named or not."""
    assert training_step(64, forward, adjoint) == training_step(
        64, dataclasses.replace(forward, batch_axes=0), adjoint
    )


if __name__ == "__main__":
    solves = {name: measured(solver) for name, solver in SOLVERS.items()}
    HELD.write_text(json.dumps({"jaxlib": jaxlib.__version__, "solves": solves}, indent=1) + "\n")
