"""The pieces of a cycle: composed by hand on one device and under ``shard_map``, and as the cycle of a solver."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from problems import dense_params, dense_state, dense_step, relative_error

import lp_jax
from lp_jax import multigrid as mg, planning, viz

RNG = np.random.default_rng(0)
N = 32
PARAMS, Y0 = dense_params(N, 3), dense_state(2, 3)
MESH = jax.make_mesh((4,), ("layers",), axis_types=(AxisType.Auto,))
COMM = lp_jax.MeshComm(MESH)
SETTINGS = {"coarsening": 4, "iterations": 3, "coarse_step": lp_jax.Rediscretize("mean")}
TWO = lp_jax.MGRIT(relaxation="F", **SETTINGS)


def problem(params=PARAMS, comm=None):
    return lp_jax.Problem(dense_step, params, Y0, t1=2.0, comm=comm)


def two_grid(levels, u):
    fine, coarse = levels
    r, v = mg.residual(fine, u), mg.restrict(fine, u)
    coarse = coarse.with_rhs(mg.coarse_rhs(coarse, v, mg.restrict(fine, r)))
    return mg.correct(fine, u, mg.march(coarse), v), mg.measure(fine, r)


def solved(solver, comm=None, batch=False):
    """Last state, norms and gradient."""

    def loss(params, y0):
        solution = problem(params, comm).replace(y0=y0).solve(solver=solver)
        return jnp.sum(jnp.sin(solution.y1)), (solution.y1, solution.stats.residual_norms)

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return (
        jax.jit(jax.vmap(both, (None, 0)))(PARAMS, jnp.stack([Y0, 2 * Y0]))
        if batch
        else jax.jit(both)(PARAMS, Y0)
    )


@pytest.mark.parametrize(
    ("start", "comm", "batch"),
    [("cascade", None, True), ("cascade", COMM, False), ("guess", COMM, False)],
)
def test_the_two_grid_method_by_hand_is_the_solver_s(start, comm, batch):
    """Forward and adjoint, batched, and with layers over devices."""
    own, built_in = (
        lp_jax.MGRIT(start=start, **kind, **SETTINGS)
        for kind in ({"cycle": two_grid}, {"relaxation": "F"})
    )
    assert relative_error(solved(own, comm, batch), solved(built_in, None, batch)) < 1e-13


@pytest.mark.parametrize(
    ("kind", "cycle"), [("V", mg.v_cycle), ("F", mg.f_cycle), ("W", mg.w_cycle)]
)
def test_the_built_in_cycles_are_such_functions(kind, cycle):
    deep = {
        "levels": 3,
        "coarsening": 2,
        "iterations": 2,
        "start": "guess",
        "coarse_step": lp_jax.Rediscretize(),
    }
    options = {"relaxation": ("FCF", "F"), "c_weight": 0.9}
    named = lp_jax.MGRIT(cycle=kind, **options, **deep)
    made = lp_jax.MGRIT(cycle=functools.partial(cycle, **options), c_weight=0.9, **deep)
    assert relative_error(solved(made), solved(named)) < 1e-13
    levels, cascade = mg.hierarchy(problem(), named), dataclasses.replace(named, start="cascade")
    assert (
        relative_error(mg.cascade(levels, kind, **options), cascade.init(levels, None).state) == 0
    )


def test_cycles_by_hand_under_shard_map():
    """Value and gradients, taken outside of the ``shard_map``, whose check is off, are those of one device."""
    u = jnp.broadcast_to(Y0, (N // 4, *Y0.shape))

    def cycles(params, u, y0, comm):
        levels = mg.hierarchy(problem(params, comm).replace(y0=y0), TWO)
        for _ in range(2):
            u, residual = two_grid(levels, u)
        return mg.f_relax(levels[0], u), levels[0].norm(residual)

    def gradient(sequential):
        run = functools.partial(cycles, comm=None)
        if sequential is not None:
            comm, specs = (
                lp_jax.MeshComm(MESH, sequential=sequential),
                (P("layers"), P("layers"), P()),
            )
            run = functools.partial(cycles, comm=comm)
            run = jax.shard_map(
                run, mesh=MESH, in_specs=specs, out_specs=(P("layers"), P()), check_vma=False
            )

        def loss(*given):
            out, norm = run(*given)
            return jnp.sum(jnp.sin(out)) + norm

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(PARAMS, u, Y0)

    assert relative_error(gradient("gather"), gradient(None)) < 1e-13
    with pytest.raises(ValueError, match="once to a cycle by hand, with a level"):
        gradient("relay")


@pytest.mark.parametrize("layers", [N, 30])
@pytest.mark.parametrize(
    "params", ["inject", "mean", lambda each: jax.tree.map(lambda x: x[-1], each)]
)
def test_rediscretization_makes_the_coarse_levels_of_a_solver(layers, params):
    """Also from a coarse level, and where the last interval is short."""
    whole = problem(jax.tree.map(lambda x: x[:layers], PARAMS))
    solver = lp_jax.MGRIT(levels=3, coarsening=(4, 2), coarse_step=lp_jax.Rediscretize(params))
    fine, middle, coarsest = mg.hierarchy(whole, solver)
    made = mg.rediscretize(fine, params, factor=2)
    for a, b in ((made, middle), (mg.rediscretize(made, params), coarsest)):
        assert (a.steps, a.factor, a.number, a.span) == (b.steps, b.factor, b.number, b.span)
        assert relative_error((a.xs, a.y0), (b.xs, b.y0)) == 0
    assert relative_error(mg.march(made), mg.march(middle)) == 0
    swept = mg.rediscretize(fine, lp_jax.Picard(sweeps=4))
    assert (
        relative_error(mg.march(swept), mg.march(fine)) < 1e-14
    )  # as many sweeps as layers: exact


def test_a_cycle_of_one_s_own_is_planned_and_drawn():
    solver = lp_jax.MGRIT(cycle=two_grid, **SETTINGS)
    ours, theirs = (planning.training_step(each, each, N, workers=4) for each in (solver, TWO))
    assert (ours.work(), ours.states) == pytest.approx((theirs.work(), theirs.states), rel=0.2)
    assert "two_grid" in "".join(
        text.get_text()
        for text in viz.hierarchy(solver, N).findobj(lambda x: hasattr(x, "get_text"))
    )


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"jax\.shard_map over 'layers' around the pieces"):
        mg.hierarchy(problem(comm=COMM), TWO)
    share = functools.partial(jax.shard_map, mesh=MESH, in_specs=P("layers"), out_specs=P())
    with pytest.raises(
        ValueError, match="must hold whole intervals of all levels, 16 layers; got 8"
    ):
        share(
            lambda w: mg.hierarchy(problem(w, COMM), lp_jax.MGRIT(coarsening=16))[0].y0,
            check_vma=False,
        )(PARAMS)
    with pytest.raises(ValueError, match="check_vma=False"):
        share(lambda w: mg.hierarchy(problem(w, COMM), TWO)[0].y0)(PARAMS)
    with pytest.raises(ValueError, match=r"""cycle must be .* or a function f\(levels, u\)"""):
        lp_jax.MGRIT(cycle="X")

    def looks(levels, u):
        mg.rediscretize(levels[0])
        return mg.v_cycle(levels, u)

    with pytest.raises(ValueError, match="rediscretize got an adjoint level"):
        solved(lp_jax.MGRIT(cycle=looks, **SETTINGS))
