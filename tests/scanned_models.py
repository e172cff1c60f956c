"""Small models with scanned layers, each written as its library's users write it.

The two lines that a user changes are a parameter here: `scan` is the library's own or that of lp_jax.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen, nnx

WIDTH, HIDDEN, LAYERS, BATCH, VOCABULARY = 6, 8, 10, 3, 11
TOKENS = jax.random.randint(jax.random.key(7), (BATCH, 5), 0, VOCABULARY)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, param_dtype=float, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, param_dtype=float, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        return x + 0.1 * self.down(nnx.gelu(self.up(self.norm(x))))


class NnxModel(nnx.Module):
    def __init__(self, scan, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return NnxBlock(rngs)

        self.scan = nnx.static(scan)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, param_dtype=float, rngs=rngs)
        self.blocks = create(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, param_dtype=float, rngs=rngs)

    def __call__(self, tokens):
        @self.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block, x):
            return block(x)

        return self.head(forward(self.blocks, self.embed(tokens)))


class LinenBlock(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x, scale):
        h = linen.Dense(HIDDEN)(linen.LayerNorm()(x))
        return x + 0.1 * scale * linen.Dense(self.width)(linen.gelu(h)), jnp.mean(x)


class LinenModel(linen.Module):
    scan: object

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, WIDTH)(tokens)
        blocks = self.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            in_axes=linen.broadcast,
        )
        x, means = blocks(WIDTH, name="blocks")(x, 0.9)
        return linen.Dense(VOCABULARY)(x) + jnp.mean(means)


class MaxTextLayer(nnx.Module):
    """Parameters with names for their axes, as for sharding by logical rules."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False)
        self.up = nnx.Linear(WIDTH, HIDDEN, param_dtype=float, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, param_dtype=float, rngs=rngs)

    def __call__(self, x, position):
        return x + 0.1 * self.down(nnx.relu(self.up(x)) * position)


def create_scanned_layers(make, *, length, param_scan_axis, metadata_axis_name, rngs):
    """Layers stacked along an axis that need not be the first, the axis named in each parameter's metadata."""

    @nnx.vmap(
        in_axes=0,
        out_axes=nnx.StateAxes({nnx.Param: param_scan_axis, ...: 0}),
        transform_metadata={nnx.PARTITION_NAME: metadata_axis_name},
    )
    def create(rngs):
        return make(rngs)

    return create(rngs.split(length))


def apply_scanned_layers(layers, carry, *, length, param_scan_axis, apply_fn, remat):
    """The same, applied by ``jax.lax.scan``."""
    graphdef, params, rest = nnx.split(layers, nnx.Param, ...)
    params = jax.tree.map(lambda x: jnp.moveaxis(x, param_scan_axis, 0), params)

    def body(carry, states):
        return apply_fn(nnx.merge(graphdef, *states), carry), None

    return jax.lax.scan(jax.checkpoint(body) if remat else body, carry, (params, rest), length=length)[0]


class MaxTextModel(nnx.Module):
    def __init__(self, apply, rngs):
        self.apply = nnx.static(apply)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, param_dtype=float, rngs=rngs)
        self.layers = create_scanned_layers(
            MaxTextLayer, length=LAYERS, param_scan_axis=1, metadata_axis_name="layers", rngs=rngs
        )

    def __call__(self, tokens):
        return self.apply(
            self.layers,
            self.embed(tokens),
            length=LAYERS,
            param_scan_axis=1,
            apply_fn=lambda layer, x: layer(x, 0.9),
            remat=True,
        ) @ jnp.ones((WIDTH, VOCABULARY))


def double(tree):
    """In double precision."""
    return jax.tree.map(lambda x: x.astype(float) if hasattr(x, "dtype") and x.dtype == "float32" else x, tree)


def nnx_loss(make):
    def loss_and_gradient(scan):
        model = make(scan, nnx.Rngs(0))
        return nnx.jit(nnx.value_and_grad(lambda model: jnp.mean(jnp.sin(model(TOKENS)))))(model)

    return loss_and_gradient


@functools.cache
def linen_variables():
    return double(jax.jit(LinenModel(linen.scan).init)(jax.random.key(0), TOKENS))


def linen_loss(scan):
    loss = lambda v: jnp.mean(jnp.sin(LinenModel(scan).apply(v, TOKENS)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(linen_variables())


def equinox_loss(scan):
    import equinox as eqx

    class Block(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __init__(self, key):
            first, second = jax.random.split(key)
            self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=first)
            self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=second)

        def __call__(self, x):
            return x + 0.1 * self.down(jax.nn.gelu(self.up(x)))

    class Model(eqx.Module):
        blocks: Block

        def __init__(self, key):
            self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, LAYERS))

        def __call__(self, x):
            arrays, static = eqx.partition(self.blocks, eqx.is_array)

            def body(x, arrays):
                return eqx.combine(arrays, static)(x), None

            return scan(body, x, arrays)[0]

    model = double(Model(jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    return eqx.filter_jit(eqx.filter_value_and_grad(lambda model, x: jnp.mean(jnp.sin(jax.vmap(model)(x)))))(model, x)


def haliax_loss(fold):
    import equinox as eqx
    import haliax as hax

    sizes = {"layers": LAYERS, "embed": WIDTH, "mlp": HIDDEN, "batch": BATCH}
    layers, embed, mlp, batch = (hax.Axis(*size) for size in sizes.items())

    class Block(eqx.Module):
        up: hax.NamedArray
        down: hax.NamedArray

        @staticmethod
        def init(*, key):
            first, second = jax.random.split(key)
            return Block(hax.random.normal(first, (embed, mlp)), hax.random.normal(second, (mlp, embed)))

        def __call__(self, x, scale):
            hidden = hax.tanh(hax.sum(x.broadcast_axis(mlp) * self.up, embed))
            return x + 0.1 * scale * hax.sum(hidden.broadcast_axis(embed) * self.down, mlp)

    stacked = hax.nn.Stacked.init(layers, Block, gradient_checkpointing=False)(
        key=jax.random.split(jax.random.key(0), LAYERS)
    )
    x = hax.random.normal(jax.random.key(1), (batch, embed))
    scales = hax.random.uniform(jax.random.key(2), (layers,))
    stacked, x, scales = double((stacked, x, scales))
    loss = eqx.filter_value_and_grad(lambda stacked, x: hax.mean(hax.sin(fold(stacked, x, scales))).array)
    return eqx.filter_jit(loss)(stacked, x)


LOSSES = {
    "nnx": nnx_loss(NnxModel),
    "Linen": linen_loss,
    "MaxText": nnx_loss(MaxTextModel),
    "Equinox": equinox_loss,
    "Haliax": haliax_loss,
}


def own(name):
    """The library's own call."""
    return {
        "nnx": nnx.scan,
        "Linen": linen.scan,
        "MaxText": apply_scanned_layers,
        "Equinox": jax.lax.scan,
        "Haliax": lambda stacked, *args: stacked.fold(*args),
    }[name]


def ours(name, **solving):
    """What it is replaced by."""
    import lp_jax

    return functools.partial(
        {
            "nnx": lp_jax.nn.scan,
            "Linen": lp_jax.nn.linen_scan,
            "MaxText": lp_jax.nn.apply_scanned_layers,
            "Equinox": lp_jax.scan,
            "Haliax": lp_jax.nn.haliax_fold,
        }[name],
        **solving,
    )
