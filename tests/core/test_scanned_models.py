"""Models of other libraries, as their users write them: `lp_jax.parallel` solves their scans, and the numbers are the same."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from networks import mesh
from problems import relative_error

import lp_jax
from lp_jax import nn

pytestmark = pytest.mark.usefixtures("free_promotion")

WIDTH, HIDDEN, LAYERS = 6, 8, 10
EXACT = lp_jax.Picard(sweeps=30)  # at least as many sweeps as layers
JAX = jax.jit, jax.value_and_grad, lp_jax.parallel
NNX = nnx.jit, nnx.value_and_grad, nn.parallel
EQUINOX = eqx.filter_jit, eqx.filter_value_and_grad, lp_jax.parallel


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


X, KEYS = normal(0, 3, WIDTH), {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def double(tree):
    """In double precision."""
    return jax.tree.map(
        lambda x: x.astype(float) if getattr(x, "dtype", None) == jnp.float32 else x, tree
    )


def total(tree):
    return sum(jnp.mean(jnp.sin(x)) for x in jax.tree.leaves(tree))


class Block(nnx.Module):
    """The axes of a kernel have names, as for sharding by logical rules."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False
        )
        self.norm = nnx.LayerNorm(WIDTH, param_dtype=float, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, param_dtype=float, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, param_dtype=float, rngs=rngs)

    def __call__(self, x, scale):
        return x + scale * self.down(nnx.gelu(self.up(self.norm(x))))


class Stack(nnx.Module):
    """Blocks that are stacked along an axis of their parameters, and computed again for the gradient."""

    def __init__(self, axis):
        self.options = nnx.static({"transform_metadata": {nnx.PARTITION_NAME: "layers"}})
        self.axes = nnx.static(nnx.StateAxes({nnx.Param: axis, ...: 0}))
        make = nnx.vmap(Block, in_axes=0, out_axes=self.axes, **self.options)
        self.blocks = nnx.split_rngs(splits=LAYERS)(make)(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(self.axes, nnx.Carry, None), out_axes=nnx.Carry, **self.options)
        @nnx.remat
        def forward(block, x, scale):
            return block(x, scale)

        return forward(self.blocks, x, 0.1)


def stack(axis):
    return lambda: (NNX, lambda model: total(model(X)), Stack(axis))


class Noisy(nnx.Module):
    """A layer with running statistics and dropout."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + 0.2 * self.dropout(nnx.tanh(self.norm(self.linear(x))))


class EncoderBlock(linen.Module):
    """Half of a vision transformer's block, as Big Vision scans it."""

    @linen.compact
    def __call__(self, x, deterministic):
        y = linen.LayerNorm()(x)
        y = linen.MultiHeadDotProductAttention(num_heads=2)(y, y, deterministic=deterministic)
        return x + linen.Dropout(0.1)(y, deterministic), None


class Encoder(linen.Module):
    """Names the parent in the call, as Gemma does."""

    @linen.compact
    def __call__(self, x, deterministic):
        return linen.scan(
            linen.remat(EncoderBlock, static_argnums=(2,), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=linen.broadcast,
            length=4,
        )(name="encoderblock", parent=self)(x, deterministic)[0]


def vision_transformer():
    x = normal(0, 2, 9, 8)
    params = double(jax.jit(Encoder().init, static_argnums=2)(KEYS, x, True))
    return JAX, lambda params: total(Encoder().apply(params, x, False, rngs=KEYS)), params


class EquinoxModel(eqx.Module):
    blocks: eqx.nn.MLP

    def __init__(self, key):
        make = eqx.filter_vmap(lambda key: eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, key=key))
        self.blocks = double(make(jax.random.split(key, LAYERS)))

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        return lax.scan(
            lambda x, layer: (x + 0.1 * eqx.combine(layer, static)(x), None), x, arrays
        )[0]


def equinox():
    return EQUINOX, lambda model: total(jax.vmap(model)(X)), EquinoxModel(jax.random.key(0))


MODELS = {
    "NNX": stack(0),
    "MaxText, layers along axis 1": stack(1),
    "Linen, vision transformer": vision_transformer,
    "Equinox": equinox,
}


@pytest.mark.parametrize("name", MODELS)
def test_value_and_gradient(name):
    """One after another, and by sweeps over devices; dropout has its masks."""
    (jit, value_and_grad, parallel), loss, model = MODELS[name]()
    wanted = jit(value_and_grad(loss))(model)
    (one,) = lp_jax.scans(loss, solver=EXACT)(model)
    assert one.takes == str(EXACT) and one.problem.layers == one.length >= 4
    for options in ({"solver": lp_jax.Serial()}, {"solver": EXACT, "comm": mesh(3)}):
        value, gradient = jit(value_and_grad(parallel(loss, **options)))(model)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-12)
        assert relative_error(gradient, wanted[1]) < 1e-12


def test_state_in_any_argument_goes_on():
    """Batch statistics and streams of modules in a tree, and a stream for itself."""

    def forward(tree, rngs, x):
        @nnx.scan(in_axes=(0, 0, nnx.Carry), out_axes=nnx.Carry)
        def step(tree, rngs, x):
            return tree["in"][0](x) + 0.1 * jax.random.normal(rngs(), x.shape, x.dtype)

        return step(tree, rngs, x)

    results = []
    for f in (forward, nn.parallel(forward, solver=EXACT)):
        tree, rngs = (
            {"in": [nnx.split_rngs(splits=LAYERS)(nnx.vmap(Noisy))(nnx.Rngs(0))]},
            nnx.Rngs(0),
        )
        nnx.split_rngs(rngs, splits=LAYERS)
        outputs = [f(tree, rngs, X.astype("float32")) for _ in range(2)]
        results.append((outputs, nnx.to_pure_dict(nnx.state(tree, nnx.BatchStat))))
    assert relative_error(*results) < 1e-5
    assert jnp.abs(outputs[0] - outputs[1]).max() > 1e-2  # other masks


def test_modules_that_come_out_are_those_that_went_in():
    def moved(module):
        module.norm.mean[...] += 1
        return module, [module.linear.kernel]

    for wrap in (nnx.jit, nn.parallel):
        module = Noisy(nnx.Rngs(0))
        out, (kernel,) = wrap(moved)(module)
        assert out is module and kernel is module.linear.kernel and module.norm.mean[0] == 1


def test_a_layer_without_time_is_shown_the_way():
    trunk = nn.LayerParallel(
        lambda rngs: nnx.Linear(4, 4, param_dtype=float, rngs=rngs), 8, rngs=nnx.Rngs(0)
    )
    with pytest.raises(
        TypeError, match=r"Linear.__call__\(.*A layer without time .*lp_jax.nn.parallel"
    ):
        trunk(jnp.ones((2, 4)))
