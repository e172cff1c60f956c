"""`nn.linen_scan` beside ``flax.linen.scan``: the same parameters, outputs, gradients and masks."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from networks import F64

import lp_jax
from lp_jax import nn

WIDTH, LAYERS = 4, 6
SERIAL = functools.partial(nn.linen_scan, solver=lp_jax.Serial())
AXES = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


class Cell(linen.Module):
    """Takes a tree and an array, and returns a tree beside its carry."""

    width: int = WIDTH

    @linen.compact
    def __call__(self, h, x, scale):
        h = h + 0.3 * jnp.tanh(linen.Dense(self.width, param_dtype=F64)(h) + x["a"] + scale * x["b"])
        return h, {"state": h, "sums": h.sum(-1)}


class Scanned(linen.Module):
    scan: object
    target: object = Cell

    @linen.compact
    def __call__(self, h, *xs):
        return self.scan(self.target, **AXES)(name="cell")(h, *xs)


def both(options, target, *inputs, rngs=None):
    """Output and gradient of both, from the same parameters."""
    plain, solved = (Scanned(functools.partial(scan, **options), target) for scan in (linen.scan, SERIAL))
    variables, same = (jax.jit(model.init)(jax.random.key(0), *inputs) for model in (plain, solved))
    chex.assert_trees_all_equal(variables, same)

    def run(model):
        def loss(variables):
            out = model.apply(variables, *inputs, rngs=rngs)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

        return jax.jit(jax.grad(loss, has_aux=True))(variables)

    return run(plain), run(solved)


def stacked(axis, *shape):
    return jnp.asarray(np.moveaxis(np.random.default_rng(len(shape)).normal(size=(LAYERS, *shape)), 0, axis))


@pytest.mark.parametrize(
    ("in_axes", "out_axes", "reverse"),
    [
        (({"a": 1, "b": 0}, linen.broadcast), {"state": 2, "sums": 0}, True),
        ((-1, 0), {"state": -2, "sums": 1}, False),
    ],
    ids=["trees, reverse", "negative"],
)
def test_axes_are_those_of_linen(in_axes, out_axes, reverse):
    of_x, of_scale = in_axes
    a, b = (of_x["a"], of_x["b"]) if isinstance(of_x, dict) else (of_x, of_x)
    x = {"a": stacked(a, 2, WIDTH), "b": stacked(b, 2, WIDTH)}
    scale = jnp.ones((2, 1)) if of_scale is linen.broadcast else stacked(of_scale, 2, 1)
    options = {"in_axes": in_axes, "out_axes": out_axes, "reverse": reverse}
    wanted, got = both(options, Cell, jnp.zeros((2, WIDTH)), x, scale)
    chex.assert_trees_all_close(got, wanted, rtol=1e-13, atol=1e-14)


def test_one_axis_for_all_inputs():
    x = {"a": stacked(1, 2, WIDTH), "b": stacked(1, 2, WIDTH)}
    wanted, got = both({"in_axes": 1, "length": LAYERS}, Cell, jnp.zeros((2, WIDTH)), x, stacked(1, 2, 1))
    chex.assert_trees_all_close(got, wanted, rtol=1e-13, atol=1e-14)


class Dropping(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        drop = linen.Dropout(0.5, deterministic=False)
        x = x + 0.1 * drop(jnp.tanh(linen.Dense(WIDTH, param_dtype=F64)(x)))
        return x + 0.1 * drop(x) * jax.random.bernoulli(self.make_rng("noise"), 0.5, x.shape).astype(x.dtype), None


def test_masks_are_those_of_linen():
    """Of layers that share a mask, too."""
    options, shared = (
        {
            "variable_axes": {"params": 0},
            "split_rngs": {"params": True, "dropout": split, "noise": True},
            "length": LAYERS,
            "reverse": split,
        }
        for split in (True, False)
    )

    class Model(linen.Module):
        scan: object

        @linen.compact
        def __call__(self, x):
            x = linen.Dropout(0.5, deterministic=False)(x)
            x, _ = self.scan(Dropping, **options)(name="first")(x, None)
            second = self.scan(Dropping, **shared)(name="second")
            return second(second(x, None)[0], None)[0]  # other masks in the second call

    x, keys = (
        jnp.ones((3, WIDTH)),
        {"params": jax.random.key(0), "dropout": jax.random.key(1), "noise": jax.random.key(2)},
    )
    variables = jax.jit(Model(linen.scan).init)(keys, x)
    sweeps = functools.partial(nn.linen_scan, solver=lp_jax.Picard(sweeps=LAYERS))  # each with the masks of its layers
    wanted, got = (jax.jit(Model(scan).apply)(variables, x, rngs=keys) for scan in (linen.scan, sweeps))
    np.testing.assert_allclose(got, wanted, rtol=1e-13)
    assert 0 < np.sum(wanted == 0) < wanted.size or np.abs(wanted - 1).max() > 0.05


def test_a_parent_may_be_named_in_the_call():
    """The way of Gemma's blocks."""

    class Model(linen.Module):
        scan: object

        def setup(self):
            layers = self.scan(Dropless, **AXES, length=LAYERS, in_axes=linen.broadcast)
            self.blocks = layers(parent=self, name="blocks")

        def __call__(self, x):
            return self.blocks(x, 0.5)[0]

    x = jnp.ones((2, WIDTH))
    variables = jax.jit(Model(linen.scan).init)(jax.random.key(0), x)
    wanted, got = (jax.jit(Model(scan).apply)(variables, x) for scan in (linen.scan, SERIAL))
    np.testing.assert_allclose(got, wanted, rtol=1e-13)


class Dropless(linen.Module):
    @linen.compact
    def __call__(self, x, scale):
        return x + scale * jnp.tanh(linen.Dense(WIDTH, param_dtype=F64)(x)), None


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"variable_carry": "counts"}, ValueError, ["variable_carry='counts' is not supported", "carry"]),
        ({"data_transform": lambda *args: args}, ValueError, ["data_transform=", "not supported"]),
        ({"methods": {"f": {}}}, ValueError, ["methods=", "not supported"]),
        ({"out_axes": linen.broadcast}, ValueError, ["out_axes=", "must be axes"]),
        ({"in_axes": 3}, ValueError, ["axis of the layers, 3, is out of range", "(6, 2, 4)"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_not_supported_is_refused_by_name(options, error, words):
    x = {"a": stacked(0, 2, WIDTH), "b": stacked(0, 2, WIDTH)}
    inputs = jnp.zeros((2, WIDTH)), x, stacked(0, 2, 1)
    variables = Scanned(linen.scan).init(jax.random.key(0), *inputs)
    with pytest.raises(error, match=".*".join(map(re.escape, words))):
        Scanned(functools.partial(SERIAL, **options)).apply(variables, *inputs)


def test_a_function_is_no_target():
    with pytest.raises(TypeError, match=r"takes the class of a layer.*got <function"):
        nn.linen_scan(lambda self, x, _: (x, None), **AXES)
