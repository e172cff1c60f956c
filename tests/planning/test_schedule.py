"""What a solver is said to do, against the programs themselves: products counted, and messages."""

import collections
import dataclasses
import math

import jax.numpy as jnp
import pytest
from problems import INJECT
from products import training_step as counted
from relaxation import Relaxation

import lp_jax
from lp_jax import viz
from lp_jax.planning import training_step
from lp_jax.planning._schedule import count
from lp_jax.planning._solvers import busiest
from lp_jax.planning._words import code

N = 64
PICARD = {s: lp_jax.Picard(sweeps=s) for s in (1, 2)}
IDENTITY = lp_jax.Identity()
SERIAL = lp_jax.Serial()
FIELDS = "levels", "coarse_step", "cycle", "relaxation", "start", "storage", "at_once"
CYCLES = [
    (2, INJECT, "V", "FCF", "guess", "all", 1),
    (2, INJECT, "V", "F", "cascade", "c_points", math.inf),
    (3, INJECT, "V", "FCF", "guess", "c_points", 1),
    (3, INJECT, "F", "F", "cascade", "all", math.inf),
    (3, INJECT, "W", "FCF", "guess", "all", 1),
    (2, PICARD[1], "V", "F", "cascade", "c_points", math.inf),
    (2, PICARD[1], "V", "FCF", "guess", "c_points", 1),
    (3, PICARD[2], "V", "F", "cascade", "all", math.inf),
    (3, PICARD[2], "F", "FCF", "guess", "all", 1),
    (3, PICARD[2], "W", "F", "cascade", "c_points", math.inf),
    (2, IDENTITY, "V", "F", "cascade", "c_points", 1),
    (2, IDENTITY, "V", "FCF", "guess", "all", math.inf),
    (2, SERIAL, "V", "F", "cascade", "all", 1),
    (2, SERIAL, "V", "FCF", "guess", "c_points", math.inf),
]
SOLVERS = [
    SERIAL,
    lp_jax.Picard(sweeps=3),
    lp_jax.Windowed(sweeps=3, windows=4),
    lp_jax.Windowed(sweeps=3, windows=5, storage="states"),
    lp_jax.Picard(sweeps=3, storage="states"),
    *(lp_jax.MGRIT(**dict(zip(FIELDS, row, strict=True))) for row in CYCLES),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=code)
def test_the_code_of_a_solver_makes_it(solver):
    assert eval(code(solver), {**vars(lp_jax), "inf": math.inf}) == solver


@pytest.mark.parametrize("solver", SOLVERS, ids=code)
def test_work_is_that_of_the_program(solver):
    said, found = training_step(solver, solver, N, at_once=1), counted(N, solver, solver)
    assert said.work() == found.work


def test_depth_is_that_of_the_program_where_nothing_is_evaluated_again():
    """Batches in a row; the gradient, which nothing waits for, and the linearisation of coarse steps aside.

    Of the evaluations for a coarse right-hand side, and of the first coarse step, the program's longest chain contains
    nothing: they need not wait for the sweep before, and are done after it all the same.
    """
    for relaxation, skip in (("F", True), ("FCF", False)):
        fields = {
            "coarsening": 8,
            "iterations": 3,
            "coarse_step": INJECT,
            "storage": "all",
            "at_once": math.inf,
        }
        solver = lp_jax.MGRIT(relaxation=relaxation, start="cascade" if skip else "guess", **fields)
        said, found = training_step(solver, solver, N), counted(N, solver, solver)
        corrections = 2 * (3 - skip)
        assert 0 <= said.depth("forward", "adjoint") - found.depth <= 2 * corrections


def test_work_is_divided_and_messages_are_those_of_the_design():
    """Sweeps go over a worker's part; the coarsest level is everybody's. As the messages of a V-cycle are counted on a mesh."""
    workers = 4
    solver = lp_jax.MGRIT(levels=3, iterations=5, start="guess", coarse_step=INJECT)
    alone, shared = count(solver, N), count(solver, N, workers=workers)
    coarsest = 5 * 4
    assert shared.work() - coarsest == (alone.work() - coarsest) / workers
    assert shared.states == 5 * (1 + 2 + 1) + 1 + 5 * (workers - 1)
    assert (alone.states, alone.reductions, shared.reductions) == (0, 0, 2)


def test_one_interval_per_worker():
    """N / P evaluations per cycle, forward and adjoint: the speedup of the design, 3 P / (k_f + 2 k_b)."""
    workers = 4
    forward, adjoint = (
        lp_jax.MGRIT(
            coarsening=N // workers,
            iterations=k,
            coarse_step=IDENTITY,
            start="guess",
            storage="all",
        )
        for k in (2, 1)
    )
    said = training_step(forward, adjoint, N, workers=workers, at_once=1)
    assert (
        said.depth("forward") == 3 * N / workers
    )  # with the final sweep, which keeps what the adjoint needs
    assert said.depth("adjoint") == 2 * N / workers
    skipped = (
        dataclasses.replace(forward, start="cascade"),
        dataclasses.replace(adjoint, start="cascade"),
    )
    said = training_step(*skipped, N, workers=workers, at_once=1)
    assert (said.depth("forward"), said.depth("adjoint")) == (2 * N / workers, N / workers)


def test_newton_by_hand():
    """Iterations on the layers of a worker; a last evaluation for what is kept, one iteration of the linear adjoint."""
    forward = lp_jax.Newton(iterations=3)
    step = training_step(forward, forward.for_adjoint(), 64, workers=4)
    assert step.batches == {("newton", 16): 4, ("forward", 16): 1, ("gradient", 16): 1}
    one_by_one = dataclasses.replace(forward, at_once=1)
    looped = training_step(one_by_one, one_by_one.for_adjoint(), 64)
    assert looped.batches == {("newton", 1): 4 * 64, ("forward", 1): 64, ("gradient", 1): 64}
    relaxed = dataclasses.replace(forward, relaxations=5)
    more = training_step(relaxed, relaxed.for_adjoint(), 64, workers=4)
    assert more.batches == step.batches + collections.Counter({("forward", 16): 5})
    assert (more.states, more.reductions) == (step.states + 5, step.reductions)
    for jacobian in ("full", "diagonal", "shared"):  # k iterations take 2k + 1 evaluations each way
        pair = (lp_jax.Newton(iterations=n, jacobian=jacobian) for n in (3, 2))
        step = training_step(*pair, N)
        assert step.depth() == (2 * 3 + 1) + 2 * 2 + 1 and step.work() == N * step.depth()


def test_newton_within_multigrid_is_read_from_the_program():
    solver = lp_jax.MGRIT(
        coarsest=lp_jax.Newton(iterations=2), coarse_step=INJECT, c_weight=jnp.ones(())
    )
    assert training_step(solver, solver, 16).work("gradient") == 16


@pytest.mark.parametrize("kind", [lp_jax.MGRIT, lp_jax.Picard, lp_jax.Newton, lp_jax.Serial])
def test_a_fixed_effort_replaces_a_tolerance(kind):
    solver = kind() if kind is lp_jax.Serial else kind(rtol=1e-3, atol=1e-6)
    fixed = solver.with_effort(7)
    assert type(fixed) is kind and not fixed.has_tolerance
    assert fixed.iterations == (0 if fixed.exact else 7) and fixed.exact == (kind is lp_jax.Serial)


def test_summaries():
    said = {
        solver.summary for solver in (PICARD[2], PICARD[1], lp_jax.Serial(), INJECT, lp_jax.MGRIT())
    }
    assert said == {
        "2 Picard sweeps over the layers",
        "1 Picard sweep over the layers",
        "serial",
        "the layer with the interval's dt, parameters by inject",
        "2 MGRIT cycles",
    }
    newton = lp_jax.Newton(iterations=1, relaxations=3, jacobian="diagonal")
    assert newton.summary == "1 Newton iteration after 3 relaxations with diagonal Jacobians"


@pytest.mark.parametrize(("keep", "workers"), [(False, 1), (True, 4)])
def test_a_solver_from_outside_is_counted_by_its_program(keep, workers):
    """Its program is read: three sweeps and a last one, two adjoint ones and a last one, which gives the gradient.

    A sweep is one batch, as Picard's, and takes a message, where Picard's takes a prefix sum's besides.
    """
    solver, adjoint_solver, mine = (
        Relaxation(iterations=3, keep=keep),
        Relaxation(iterations=2),
        N // workers,
    )
    said = training_step(solver, adjoint_solver, N, workers=workers)
    again = {} if keep else {("linearise", mine): 2 + 1}
    assert (
        said.batches
        == {("forward", mine): 3 + 1, ("adjoint", mine): 2 + 1, ("gradient", mine): 1} | again
    )
    assert (said.states, said.reductions) == ((0, 0) if workers == 1 else (4 + 3, 4))
    sweeps = training_step(lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2), N, workers=workers)
    assert said.work("forward", "gradient") == sweeps.work("forward", "gradient")
    looped = training_step(solver, adjoint_solver, N, workers=workers, at_once=1)
    assert looped.work() == said.work() and {layers for _, layers in looped.batches} == {1}


def test_plain_functions_are_counted_by_the_program():
    """A coarse step that is the identity as a function, and a relaxation that is "FCF" as one."""

    def nothing(step, y, layers):
        return y

    def twice(level, u):
        return lp_jax.multigrid.c_relax(level, u)

    fields = {"levels": 2, "coarsening": 4, "iterations": 2, "start": "guess", "storage": "all"}
    identity = count(lp_jax.MGRIT(coarse_step=IDENTITY, **fields), N)
    assert count(lp_jax.MGRIT(coarse_step=nothing, **fields), N).work() == identity.work()
    relaxed = count(lp_jax.MGRIT(coarse_step=IDENTITY, relaxation="FCF", **fields), N)
    assert (
        count(lp_jax.MGRIT(coarse_step=IDENTITY, relaxation=twice, **fields), N).work()
        == relaxed.work()
    )
    figure = viz.hierarchy(lp_jax.MGRIT(coarse_step=nothing, relaxation=twice), N)
    shown = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert "twice" in shown and "the function nothing" in figure.get_supxlabel()


@pytest.mark.parametrize("layers", [30, 48, 64])
@pytest.mark.parametrize("levels, coarsening", [(2, 4), (3, 4), (3, (4, 2)), (4, (2, 2, 3))])
def test_the_busiest_worker_holds_what_is_cut_for_it(layers, levels, coarsening):
    """Runs of layers cut no interval of any level, so that some workers may hold none."""
    solver = lp_jax.MGRIT(levels=levels, coarsening=coarsening)
    grid = solver.grid(layers)
    for workers in range(1, 9):
        held = max(run.stop - run.start for run in lp_jax.layer_slices(layers, workers, solver))
        span = 1
        for level, (_, factor) in enumerate(grid[:-1]):
            span *= factor
            assert busiest(grid, level, workers) == -(-held // span)
