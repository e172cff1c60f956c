"""Transformers: against a plain implementation with every head written out, layer-parallel against serial."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import F64, assert_close, normal
from problems import relative_error

import lp_jax
from lp_jax import nn
from lp_jax.nn._network import _combined_stats

pytestmark = pytest.mark.usefixtures("free_promotion")

BATCH, LENGTH, OTHER, WIDTH, HEADS, LAYERS = 2, 5, 4, 6, 2, 4
MASK = jnp.asarray([[True] * 5, [True] * 3 + [False] * 2])
OTHER_MASK = jnp.asarray([[True] * 3 + [False], [True] * 4])
INJECT = lp_jax.Rediscretize(params="inject")
EXACT = lp_jax.MGRIT(
    coarsening=2, iterations=2, coarse_step=INJECT
)  # two intervals: exact after two cycles
BATCHED = dataclasses.replace(EXACT, at_once=math.inf, storage="all")
SWEEPS = lp_jax.Picard(sweeps=LAYERS)


Y, MEMORY = normal((BATCH, LENGTH, WIDTH)), normal((BATCH, OTHER, WIDTH), 2)
assert_close = functools.partial(assert_close, rtol=1e-10)


def plain_norm(p, x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p[
        "bias"
    ]


def plain_linear(p, x):
    return x @ p["kernel"] + p["bias"]


def plain_attention(p, y, memory=None, mask=None, causal=False):
    x = plain_norm(p["norm"], y)
    if memory is None:
        q, k, v = jnp.split(plain_linear(p["query_key_value"], x), 3, axis=-1)
    else:
        q = plain_linear(p["query"], x)
        k, v = jnp.split(
            plain_linear(p["key_value"], plain_norm(p["norm_memory"], memory)), 2, axis=-1
        )
    size, out = WIDTH // HEADS, []
    for head in range(HEADS):
        part = slice(head * size, (head + 1) * size)
        scores = q[..., part] @ jnp.swapaxes(k[..., part], 1, 2) / np.sqrt(size)
        if mask is not None:
            scores = jnp.where(mask[:, None, :], scores, -jnp.inf)
        if causal:
            scores = jnp.where(np.tri(*scores.shape[1:], dtype=bool), scores, -jnp.inf)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        out.append(weights / weights.sum(-1, keepdims=True) @ v[..., part])
    return plain_linear(p["out"], jnp.concatenate(out, -1))


def plain_feed_forward(p, y):
    x = plain_linear(p["inner"], plain_norm(p["norm"], y))
    gelu = 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return plain_linear(p["outer"], gelu)


def plain_encoder(p, y, h, mask=None):
    attended = plain_attention(p["attention"], y, mask=mask)
    return y + h * (attended + plain_feed_forward(p["feed_forward"], y + attended))


def plain_decoder(p, y, h, memory, memory_mask=None, mask=None):
    attended = plain_attention(p["attention"], y, mask=mask, causal=True)
    u = y + attended
    remembered = plain_attention(p["cross_attention"], u, memory, memory_mask)
    return y + h * (attended + remembered + plain_feed_forward(p["feed_forward"], u + remembered))


def encoder(rngs, **options):
    return nn.EncoderLayer(WIDTH, HEADS, hidden=7, param_dtype=F64, rngs=rngs, **options)


def decoder(rngs, **options):
    return nn.DecoderLayer(WIDTH, HEADS, hidden=7, param_dtype=F64, rngs=rngs, **options)


def encoder_decoder(rngs, **options):
    return nn.EncoderDecoderLayer(
        WIDTH, HEADS, hidden=7, encoder_layers=2, param_dtype=F64, rngs=rngs, **options
    )


def looped(step):
    def network(params, y, shared, t1):
        body = lambda y, layer: (step(layer[0], y, t1 / LAYERS, shared, layer[1]), None)  # noqa: E731
        return jax.lax.scan(body, y, (params, jnp.arange(LAYERS)))[0]

    return network


def plain_encoder_decoder(p, state, h, shared, n):
    (x, y), (x_mask, y_mask) = state, shared
    encoded = lambda: (plain_encoder(p, x, h, x_mask), y)  # noqa: E731
    return jax.lax.cond(n < 2, encoded, lambda: (x, plain_decoder(p, y, h, x, x_mask, y_mask)))


NETWORKS = {
    "encoder": (encoder, Y, MASK, lambda p, y, h, mask, n: plain_encoder(p, y, h, mask)),
    "decoder": (
        decoder,
        Y,
        (MEMORY, OTHER_MASK, MASK),
        lambda p, y, h, shared, n: plain_decoder(p, y, h, *shared),
    ),
    "encoder-decoder": (encoder_decoder, (MEMORY, Y), (OTHER_MASK, MASK), plain_encoder_decoder),
}


def loss_of(run):
    """A loss, and its gradient with respect to parameters, state and what is shared, masks apart."""

    def loss(params, y, shared, t1):
        y1 = run(params, y, shared, t1)
        return sum(jnp.sum(leaf * normal(leaf.shape, 9)) for leaf in jax.tree.leaves(y1))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), allow_int=True), static_argnums=3)


def without_masks(gradients):
    return [x for x in jax.tree.leaves(gradients) if x.dtype != jax.dtypes.float0]


@pytest.mark.parametrize(
    ("name", "t1", "solver"),
    [("encoder", 3.0, BATCHED), ("decoder", 1.0, SWEEPS), ("encoder-decoder", LAYERS, SWEEPS)],
)
def test_layer_parallel_is_the_plain_network(name, t1, solver):
    make, y, shared, layer = NETWORKS[name]
    step, params = nn.stack(make, LAYERS, rngs=nnx.Rngs(0))
    wanted, wanted_gradients = loss_of(looped(layer))(params, y, shared, t1)
    run = lambda params, y, shared, t1: (  # noqa: E731
        lp_jax.solve(step, params, y, shared=shared, t1=t1, solver=solver).y1
    )
    got, gradients = loss_of(run)(params, y, shared, t1)
    np.testing.assert_allclose(got, wanted, rtol=1e-11)
    assert_close(without_masks(gradients), without_masks(wanted_gradients))


def test_single_precision_is_the_same_network():
    """Where `jax.nn.dot_product_attention` attends, which has a fused kernel on accelerators."""
    for causal, mask in ((False, MASK), (True, None), (True, MASK)):
        double, single = (
            nn.EncoderLayer(WIDTH, HEADS, causal=causal, param_dtype=d, rngs=nnx.Rngs(0))
            for d in (F64, jnp.float32)
        )
        nnx.update(double, jax.tree.map(lambda x: x.astype(F64), nnx.state(single)))
        y, h = Y.astype(jnp.float32), jnp.float32(1)
        run = nnx.jit(lambda layer, y, h, mask=mask: layer(y, 0, h, shared=mask))
        np.testing.assert_allclose(
            run(single, y, h), run(double, y.astype(F64), 1.0), rtol=1e-4, atol=1e-5
        )


def test_dropout():
    """The masks are those of key and layer, on every visit; what is dropped is what a layer adds."""
    make, y, shared, _ = NETWORKS["encoder"]
    trunk = nn.LayerParallel(lambda rngs: make(rngs, dropout=0.5), LAYERS, rngs=nnx.Rngs(0))
    run = nnx.jit(
        lambda trunk, key, solver: trunk.solve(y, shared=shared, key=key, solver=solver).y1
    )
    serial, parallel, again = (
        run(trunk, jax.random.key(3), s) for s in (lp_jax.Serial(), EXACT, EXACT)
    )
    assert_close(parallel, serial)
    jax.tree.map(np.testing.assert_array_equal, parallel, again)
    other = run(trunk, jax.random.key(4), EXACT)
    assert relative_error(other, parallel) > 1e-3
    trunk.eval()
    plain, unused = nn.LayerParallel(make, LAYERS, rngs=nnx.Rngs(0)), jax.random.key(5)
    assert_close(
        *(run(layers, key, lp_jax.Serial()) for layers, key in ((trunk, unused), (plain, None))),
        rtol=1e-14,
    )


def test_depth_makes_projections_start_smaller():
    deep, shallow = (encoder(nnx.Rngs(0), depth=depth) for depth in (50, None))
    for part, name in (("attention", "out"), ("feed_forward", "outer")):
        a, b = (getattr(getattr(layer, part), name).kernel[...] for layer in (deep, shallow))
        assert_close(10 * a, b)
    assert_close(
        deep.attention.query_key_value.kernel[...], shallow.attention.query_key_value.kernel[...]
    )


def test_buffers_stay_serial_and_a_network_is_the_sum_of_its_parts():
    rngs = nnx.Rngs(0)

    def block(layers, t1, solver):
        make = lambda rngs: nn.DenseResidual(WIDTH, param_dtype=F64, rngs=rngs)  # noqa: E731
        return nn.LayerParallel(make, layers, t1=t1, solver=solver, rngs=rngs)

    rough = lp_jax.MGRIT(coarsening=2, iterations=1, coarse_step=INJECT)
    parts = [
        block(2, 2.0, lp_jax.Serial()),
        block(LAYERS, 1.0, rough),
        block(1, 1.0, lp_jax.Serial()),
    ]
    network = nn.Network(parts[0], lambda y: 2 * y, *parts[1:])

    @jax.jit
    def everything(y):
        middle = parts[1].solve(2 * parts[0](y))
        exact, pull = jax.vjp(lambda y: network(y, solver=lp_jax.Serial()), y)
        solution, pullback = network.solve_vjp(y, solver=lp_jax.Serial(), adjoint_solver=EXACT)
        solved = network.solve(y), network(y, solver=EXACT)
        return (
            parts[2](middle.y1),
            middle.stats,
            solved,
            exact,
            pull(exact)[0],
            pullback(solution.y1),
        )

    y1, stats, (got, parallel), exact, wanted, (cotangent, of_adjoint) = everything(Y)
    assert_close((got.y1, got.stats.residual_norms), (y1, stats.residual_norms), rtol=1e-14)
    assert float(np.abs(exact - np.asarray(got.y1)).max()) > 1e-6
    assert_close(parallel, exact)
    assert of_adjoint.residual_norms.shape == (EXACT.iterations,)
    assert_close(cotangent, wanted)


def test_residual_norms_of_several_blocks_hide_nothing():
    """Two blocks with three cycles, the first skipped, one of them diverging in the last; a serial one; one of two cycles."""
    no = -1.0  # not measured

    def stats(iterations, *norms):
        return lp_jax.Stats(jnp.int32(iterations), jnp.asarray(norms, F64), jnp.int32(0))

    got = _combined_stats(
        [stats(3, no, 3.0, no), stats(3, no, 4.0, 1.0), stats(0), stats(2, no, 12.0)]
    )
    assert int(got.iterations) == 3
    np.testing.assert_allclose(got.residual_norms, [no, 13.0, no])
    np.testing.assert_allclose(
        _combined_stats([stats(3, no, 3.0, 1.0), stats(0)]).residual_norms, [no, 3.0, 1.0]
    )


def test_a_mask_and_tokens_reach_the_layers_of_a_classifier():
    rngs, tokens = nnx.Rngs(0), jnp.asarray([[3, 4, 2, 1, 5], [2, 1, 6, 0, 0]])
    trunk = nn.LayerParallel(encoder, LAYERS, solver=EXACT, rngs=rngs)
    model = nn.Classifier(
        nn.TokenOpening(7, WIDTH, max_length=8, param_dtype=F64, rngs=rngs),
        trunk,
        nn.TokenClosing(WIDTH, 3, param_dtype=F64, rngs=rngs),
        context=lambda tokens: tokens > 0,
    )

    y1 = trunk(model.opening(tokens), shared=MASK)
    closing = nnx.to_pure_dict(nnx.state(model.closing))
    wanted = plain_linear(closing["linear"], plain_norm(closing["norm"], y1))
    assert_close(nnx.jit(lambda model: model(tokens))(model), wanted)


def test_tokens_in_columns():
    opening = nn.TokenOpening((7, 3), WIDTH, max_length=8, param_dtype=F64, rngs=nnx.Rngs(0))
    tokens = jnp.asarray([[[3, 0], [4, 2], [2, 1]]])
    first, second = (part.embedding[...] for part in opening.tokens)
    wanted = first[tokens[..., 0]] + second[tokens[..., 1]] + opening.positions.embedding[...][:3]
    assert_close(opening(tokens), wanted, rtol=1e-14)


TOO_LONG = "sequences of at most 4 positions; got 5. Cut them, or build it with max_length=5"


def opened(sizes, tokens):
    return nn.TokenOpening(sizes, 6, max_length=4, rngs=nnx.Rngs(0))(tokens)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: nn.EncoderLayer(6, 4, rngs=nnx.Rngs(0)),
            ValueError,
            "heads must divide the width, 6; got 4",
        ),
        (
            lambda: nn.EncoderLayer(6, 0, rngs=nnx.Rngs(0)),
            ValueError,
            "heads must be at least 1; got 0",
        ),
        (lambda: opened(7, jnp.zeros((2, 5), int)), ValueError, TOO_LONG),
        (
            lambda: opened((7, 3), jnp.zeros((2, 4), int)),
            ValueError,
            r"shape \(batch, length, 2\); got \(2, 4\)",
        ),
        (lambda: opened(7, jnp.zeros((2, 4))), TypeError, "tokens must be integers; got float64"),
    ],
)
def test_bad_input_is_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()
