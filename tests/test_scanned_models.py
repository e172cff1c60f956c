"""Models with scanned layers, of five libraries: one call is changed, and the numbers are the same."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scanned_models
from flax import nnx
from problems import relative_error

import lp_jax
from lp_jax import nn

NEEDS = {"Equinox": "equinox", "Haliax": "haliax"}


pytestmark = pytest.mark.filterwarnings("ignore:.*static_field")  # haliax


@pytest.fixture(params=scanned_models.LOSSES)
def library(request):
    if needed := NEEDS.get(request.param):
        try:
            importlib.import_module(needed)
        except ImportError as error:  # haliax 1.3 wants what jax 0.10 no longer has
            pytest.skip(f"{needed} cannot be imported: {error}")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield request.param


def test_one_call_is_changed(library):
    """By sweeps over devices and, where test_clients has no such model, by the default."""
    run = scanned_models.LOSSES[library]
    exact, exact_gradient = run(scanned_models.own(library))
    workers = 3 if library in ("nnx", "Equinox") else 8
    mesh = jax.make_mesh((workers,), ("layers",), devices=jax.devices()[:workers])
    sweeps = {"solver": lp_jax.Picard(sweeps=scanned_models.LAYERS), "comm": mesh}
    for options, tolerance in ((sweeps, 1e-12), ({}, 1e-2))[: 2 if library in ("MaxText", "Haliax") else 1]:
        loss, gradient = run(scanned_models.ours(library, **options))
        np.testing.assert_allclose(loss, exact, rtol=tolerance)
        assert relative_error(jax.tree.leaves(gradient), jax.tree.leaves(exact_gradient)) < tolerance


class Noisy(nnx.Module):
    """A layer with running statistics and a stream of random numbers."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + 0.2 * self.dropout(nnx.tanh(self.norm(self.linear(x))))


@nnx.jit
def noisy_layers():
    create = nnx.split_rngs(splits=6)(nnx.vmap(Noisy, in_axes=0, out_axes=0))
    return create(nnx.Rngs(0, dropout=1))


def test_statistics_and_random_streams_go_on_as_under_nnx_scan(standard_promotion):
    results = []
    for scan in (nnx.scan, nn.scan):

        @scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer, x):
            return layer(x)

        layers = noisy_layers()
        x = jax.random.normal(jax.random.key(2), (8, 4), "float32")
        with jax.numpy_rank_promotion("allow"):
            outputs = [forward(layers, x), forward(layers, x)]
        results.append((outputs, nnx.to_pure_dict(nnx.state(layers, nnx.BatchStat))))
    (wanted, statistics), (got, got_statistics) = results
    assert jnp.abs(got[0] - wanted[0]).max() < 1e-3
    assert jnp.abs(wanted[0] - wanted[1]).max() > 1e-2  # another mask
    assert jnp.abs(got[1] - wanted[1]).max() < 1e-3
    assert relative_error(jax.tree.leaves(got_statistics), jax.tree.leaves(statistics)) < 1e-3


def test_trees_that_hold_modules_are_updated_as_under_nnx_scan(standard_promotion):
    results = []
    for scan in (nnx.scan, functools.partial(nn.scan, solver=lp_jax.Serial())):

        @scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(given, x):
            return given["in"][0](x)

        layers = noisy_layers()
        given, x = (
            {"in": [layers, jnp.ones((6, 4), "float32")]},
            jax.random.normal(jax.random.key(2), (8, 4), "float32"),
        )
        with jax.numpy_rank_promotion("allow"):
            outputs = [forward(given, x), forward(given, x)]
        results.append((*outputs, *jax.tree.leaves(nnx.to_pure_dict(nnx.state(layers, nnx.BatchStat)))))
    for wanted, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert jnp.abs(results[0][0] - results[0][1]).max() > 1e-2  # another mask


def test_random_streams_alone_go_on(standard_promotion):
    draws = []
    for scan in (nnx.scan, functools.partial(nn.scan, solver=lp_jax.Serial())):

        @scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(rngs, x):
            return x + jax.random.normal(rngs(), x.shape, x.dtype)

        rngs = nnx.Rngs(0)
        nnx.split_rngs(rngs, splits=6)
        draws.append([forward(rngs, jnp.zeros(3)) for _ in range(2)])
    for wanted, got in zip(*draws, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    assert jnp.abs(draws[1][0] - draws[1][1]).max() > 1e-2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_axes": (5, nnx.Carry)}, "axis of the layers, 5, is out of range"),
        ({"in_axes": (0, 0)}, "one nnx.Carry"),
        ({"in_axes": (0,)}, "1 entries for 2 arguments"),
        ({"in_axes": ({"kernel": 0}, nnx.Carry)}, "give each argument one axis"),
        ({"out_axes": (nnx.Carry, 0)}, "an entry for every output"),
    ],
)
def test_axes_that_do_not_fit_are_refused(options, message):
    layers = nnx.vmap(lambda key: nnx.Linear(4, 4, param_dtype=float, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 4)
    )
    given = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry} | options
    with pytest.raises(ValueError, match=message):
        nn.scan(lambda layer, x: layer(x), **given)(layers, jnp.ones((2, 4)))


def test_a_layer_without_time_is_told_how():
    trunk = nn.LayerParallel(lambda rngs: nnx.Linear(4, 4, param_dtype=float, rngs=rngs), 8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"Linear.__call__\(.*A layer without time .*lp_jax.nn.scan"):
        trunk(jnp.ones((2, 4)))
