"""How many layers are evaluated at once: the same numbers for any, refusals, the rule, and where a platform's name decides."""

import contextlib
import dataclasses
import functools
import math
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from networks import mesh
from problems import dense_params, dense_state, dense_step

import lp_jax
from lp_jax import planning
from lp_jax._arrays._at_once import chunk
from lp_jax._arrays._outer import has_few, with_few_terms
from lp_jax._choice import _cost, _processor
from lp_jax._choice._footprint import Footprint
from lp_jax._choice._processor import ACCELERATOR, CPU
from lp_jax._programs._traced import trace
from lp_jax._solvers._sweeps import Picard

LAYERS, BATCH, WIDTH = 14, 3, 2
PARAMS, Y0 = dense_params(LAYERS, WIDTH), dense_state(BATCH, WIDTH)


def solved(solver):
    """The last state, the residual norms, and the gradient, by fixed effort far from convergence."""

    def loss(params, y0):
        solution = lp_jax.solve(dense_step, params, y0, t1=3.0, solver=solver)
        return jnp.sum(solution.y1**3), (solution.y1, solution.stats.residual_norms)

    gradient, seen = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(PARAMS, Y0)
    return jax.tree.leaves((gradient, seen))


NUMBERS = {  # a solver, and numbers of layers at once: all, or a number that divides nothing
    "Picard": (lp_jax.Picard(sweeps=2), 4, math.inf),
    "Picard, states": (lp_jax.Picard(sweeps=2, storage="states"), 4),
    "Picard, windows": (lp_jax.Windowed(sweeps=2, windows=2), math.inf),
    "Newton": (lp_jax.Newton(iterations=2, batch_axes=1), 4),
    "Newton, shared": (lp_jax.Newton(iterations=2, jacobian="shared"), math.inf),
    "Newton, diagonal": (
        lp_jax.Newton(iterations=2, batch_axes=1, jacobian="diagonal", storage="states"),
        4,
    ),
    "MGRIT": (
        lp_jax.MGRIT(coarsening=4, iterations=2, coarse_step=lp_jax.Rediscretize()),
        math.inf,
    ),
    "MGRIT, sweeps": (
        lp_jax.MGRIT(coarsening=4, iterations=2, coarse_step=lp_jax.Picard(sweeps=2)),
        4,
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_do_not_depend_on_how_many_layers_are_evaluated_at_once(name):
    """Nor, for cycles, on whether all states are kept."""
    solver, *several = NUMBERS[name]
    wanted = solved(dataclasses.replace(solver, at_once=1))
    for at_once in several:
        kept = {"storage": "all"} if isinstance(solver, lp_jax.MGRIT) else {}
        found = solved(dataclasses.replace(solver, at_once=at_once, **kept))
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13, err_msg=str(at_once))


@pytest.mark.parametrize("kind", [lp_jax.Picard, lp_jax.Newton, lp_jax.MGRIT])
def test_what_is_no_number_of_layers_is_refused(kind):
    refused = {
        0: "at_once.*at least 1.*0",
        2.5: "at_once.*integer.*2.5",
        True: "at_once.*True",
        "all": "at_once.*number of layers.*'all'",
        "atuo": "at_once.*'auto'.*'atuo'",
        math.nan: "at_once.*nan",
    }
    for value, words in refused.items():
        with pytest.raises((ValueError, TypeError), match=words):
            kind(at_once=value)
    with pytest.raises(ValueError, match=r"at_once=15\).*14 layers.*math.inf"):
        lp_jax.solve(dense_step, PARAMS, Y0, solver=kind(at_once=15))


@pytest.mark.parametrize(
    "n, most, size", [(12, 12, 12), (12, 20, 12), (12, 5, 4), (13, 4, 4), (14, 5, 5), (7, 1, 1)]
)
def test_parts_are_equal_where_that_costs_little(n, most, size):
    assert chunk(n, most) == size


def of_few_terms(step, terms):
    """``step`` with a sum of outer products in the place of each short product."""

    def call(*arguments):
        home = jax.sharding.get_abstract_mesh()
        return with_few_terms(jax.make_jaxpr(step)(*arguments), terms, home)(*arguments)[0]

    return call


def test_a_weight_of_few_rows_has_sums_of_outer_products_for_its_gradient():
    rng = np.random.default_rng(1)
    y, lam, w, v = (
        jnp.asarray(rng.normal(size=shape))
        for shape in ((6, 3, 4), (6, 3, 5), (6, 4, 5), (6, 5, 5))
    )

    def layer(y, w, v):
        return jax.jit(lambda y: jnp.tanh(y @ w))(y) @ v.T

    def products(f, name, *arguments):
        return str(jax.make_jaxpr(f)(*arguments)).count(f"{name}[")

    def gradient(step):
        return lambda y, w, v, lam: jax.vjp(step, y, w, v)[1](lam)

    one = [x[0] for x in (y, w, v, lam)]
    layers = y, w, v, lam
    for terms, left in (
        (2, (6, 0)),
        (3, (2, 2)),
    ):  # forward, to the state and to the weight: two each
        few = of_few_terms(layer, terms)
        assert has_few(jax.make_jaxpr(layer)(*one[:3]).jaxpr, terms) == (terms == 3)
        for f, arguments in ((gradient(few), one), (jax.vmap(gradient(few)), layers)):
            assert (
                products(f, "dot_general", *arguments),
                products(f, "outer_terms", *arguments),
            ) == left

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(step, one, layers, examples):
        return {
            "one": gradient(step)(*one),
            "layers at once": jax.vmap(gradient(step))(*layers),
            "of each example": jax.vmap(gradient(step), in_axes=(0, None, None, 0))(*examples),
            "of all examples": gradient(jax.vmap(step, in_axes=(0, None, None)))(*examples),
            "jvp": jax.jvp(step, one[:3], one[:3]),
            "jacfwd": jax.jacfwd(gradient(step), argnums=(0, 1))(*one),
            "jacrev": jax.jacrev(gradient(step), argnums=(0, 1))(*one),
        }

    examples = y, w[0], v[0], lam
    found, wanted = (
        derivatives(step, one, layers, examples) for step in (of_few_terms(layer, 3), layer)
    )
    chex.assert_trees_all_close(found, wanted, rtol=1e-13, atol=1e-16)  # second derivatives cancel
    spread = functools.partial(
        jax.shard_map, mesh=mesh(2).mesh, in_specs=P("layers"), out_specs=P("layers")
    )
    assert products(spread(jax.vmap(gradient(of_few_terms(layer, 3)))), "outer_terms", *layers) == 2
    rows = functools.partial(
        spread, in_specs=(P("layers"), P(), P())
    )  # examples are spread, weights are everywhere
    given = (y[:, 0], w[0], v[0]), lam[:, 0]
    of_rows = (rows(of_few_terms(layer, 3)), layer)
    for a, b in zip(
        *(jax.jit(lambda x, lam, f=f: jax.vjp(f, *x)[1](lam))(*given) for f in of_rows), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-16)
    by_rows = jax.make_jaxpr(
        jax.vmap(gradient(of_few_terms(layer, 3)), in_axes=(0, None, None, 0))
    )(y, w[0], v[0], lam)
    assert "few_terms" not in str(by_rows)  # one product of all rows is better
    assert (
        products(
            gradient(of_few_terms(layer, 3)), "dot_general", *(x.astype(jnp.bfloat16) for x in one)
        )
        == 6
    )


def test_a_layer_is_told_by_its_program():
    one = trace(lp_jax.Problem(dense_step, PARAMS, Y0), (Picard(),))[0].traced.footprint
    assert one.operands == 8 * (WIDTH * WIDTH + WIDTH + 2) + 4  # weights, bias, t and dt, index
    assert one.flops == 2 * BATCH * WIDTH * WIDTH and one.counted
    assert 8 * BATCH * WIDTH <= one.working <= 3 * 8 * BATCH * WIDTH


def test_gradients_are_sums_of_outer_products_where_layers_have_weights_of_their_own():
    """In a scan with shared weights each turn would add such a sum to the gradient, which takes longer."""
    own = lp_jax.Problem(dense_step, PARAMS, Y0)
    shared = lp_jax.Problem(
        lambda y, layer: jnp.tanh(y @ layer.shared + layer.data),
        None,
        Y0,
        shared=PARAMS[0][0],
        data=jnp.ones(8),
    )
    assert [trace(each, (Picard(),))[0].traced.steps[0][1].terms for each in (own, shared)] == [
        CPU.outer_terms,
        0,
    ]


def test_what_cannot_be_counted_is_evaluated_one_by_one():
    def called(y, layer):
        return jax.pure_callback(lambda y: np.asarray(y), y, y, vmap_method="sequential")

    def unknown(y, layer):
        return jax.lax.while_loop(lambda y: jnp.sum(y) < 0, lambda y: y + 1, y)

    for body in (called, unknown):
        program, arrays = trace(lp_jax.Problem(body, PARAMS, Y0), (Picard(),))
        assert not program.traced.footprint.counted
        assert program.chain(*arrays[:3]).at_once("auto") == 1


@pytest.mark.parametrize(
    "layer, steps, wanted",
    [
        (Footprint(4_000, 1_000, 1e5), 1024, 1024),  # all of them fit
        (Footprint(250_000, 20_000, 1e6), 256, 28),  # as many as fit
        (
            Footprint(250_000, 3_000, 1.3e5),
            256,
            256,
        ),  # to copy the weights would take as long as to use them
        (Footprint(10_000_000, 1_000, 1e8), 16, 1),
    ],
)
def test_the_rule_goes_by_bytes(layer, steps, wanted):
    assert CPU.at_once(layer, steps) == wanted
    assert ACCELERATOR.at_once(layer, steps) == steps


def test_most_alive_of_a_program():
    def f(x):  # x, then x and two of its size, then one
        y = jnp.sin(x)
        return jnp.concatenate([y, y])[:1]

    assert _cost.most_alive(jax.make_jaxpr(f)(jnp.zeros(100)).jaxpr) == 8 * 300


def test_a_platforms_name_decides_where_that_was_measured_and_nowhere_else():
    """Comparisons with "cpu" or "gpu"; each stands with its measurement. The command counts devices and prints names."""
    root = Path(lp_jax.__file__).parent
    compared = re.compile(r"""([=!]=|\bin \() *["'](cpu|gpu|tpu)["']""")
    found = {
        path.relative_to(root) for path in root.rglob("*.py") if compared.search(path.read_text())
    }
    measured = {"_choice/_processor.py", "nn/_convolution.py", "planning/_measure.py"}
    assert {str(path) for path in found if "cli" not in path.parts} == measured
    assert _processor.processor("cpu") is CPU and _processor.processor("rocm") is ACCELERATOR


KINDS = {
    "TPU v4": "TPU v4",
    "TPU v5 lite": "TPU v5e",
    "v5e": "TPU v5e",
    "TPU v5": "TPU v5p",
    "tpu V5P": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU7x": "TPU 7x",
    "Tesla V100-SXM2-16GB": "V100",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "h200": "H200",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "AMD Instinct MI300X": "MI300X",
}
UNKNOWN = (
    *(
        "H10O",
        "TPU v9",
        "TPU v5 lite pod",
        "NVIDIA L40",
        "NVIDIA H20",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ),
    *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "gpu", ""),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_the_numbers_of_its_own_data_sheet(kind):
    """Names of devices and those that users say; flops a second of their data sheets, of one core of a TPU7x."""
    flops = dict(
        zip(
            ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU 7x"),
            (275, 197, 459, 918, 1153),
            strict=True,
        )
    )
    flops |= {
        "V100": 15.7,
        "A100": 156,
        "H100": 494,
        "H200": 494,
        "GH200": 494,
        "B200": 1100,
        "GB200": 1100,
        "L4": 60,
    }
    flops |= {"L40S": 183, "RTX 4090": 82.6, "RTX 5090": 104.8, "MI300X": 653.7}
    found = _processor.named(kind)
    assert found.flops == pytest.approx(1e12 * flops[KINDS[kind]], rel=0.02)
    assert found is _processor.processor("any", kind) is _processor.named(KINDS[kind])
    assert found.launches == ("TPU" not in KINDS[kind])


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_kind_is_refused_by_name_and_generic_at_hand(kind):
    with (
        pytest.raises(ValueError, match=r"device must be one of cpu, TPU v4, .*MI300X, or .*; got"),
        planning.assume(kind),
    ):
        pass
    platform = "tpu" if "TPU" in kind else "gpu"
    generic = _processor.TPU if platform == "tpu" else ACCELERATOR
    with (
        pytest.warns(UserWarning, match=f"{kind!r}.*planning.assume")
        if kind
        else contextlib.nullcontext()
    ):
        assert _processor.processor(platform, kind) is generic
    assert _processor.processor(platform, kind) is generic  # it is said once


@pytest.mark.parametrize("rows", [1, 24])
def test_a_relay_of_layers_of_unknown_cost_forms_gradients_apart(rows):
    """Their callbacks may take any time, which all devices then spend at once; small layers that are known take one loop."""

    def opaque(y, layer):
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return jax.pure_callback(np.asarray, shape, dense_step(y, layer))

    for step, apart in ((opaque, True), (dense_step, False)):
        problem = lp_jax.Problem(step, PARAMS, dense_state(rows, WIDTH))
        program, _ = trace(problem, (lp_jax.Serial(), lp_jax.Serial()))
        assert CPU.two_passes(program.traced.footprint) == apart
