"""Old public names of this release's packages work, with a warning that says the new one."""

import importlib

import jax
import optax
import pytest

from lp_jax import train

MOVED = {
    "lp_jax.train.Doubling": "lp_jax.train.contrib.Doubling",
    "lp_jax.train.bfloat16": "lp_jax.train.contrib.bfloat16",
    "lp_jax.train.eight_bits": "lp_jax.train.contrib.eight_bits",
    "lp_jax.train.mgopt": "lp_jax.train.contrib.mgopt",
    "lp_jax.train.top_k": "lp_jax.train.contrib.top_k",
}


def looked_up(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@pytest.mark.parametrize("old", MOVED)
def test_a_name_that_moved(old):
    with pytest.warns(DeprecationWarning, match=f"{old} is called {MOVED[old]} now"):
        found = looked_up(old)
    assert found is looked_up(MOVED[old])


def test_a_name_that_never_was():
    with pytest.raises(AttributeError, match=r"module 'lp_jax\.train' has no attribute 'sgd'"):
        train.sgd  # noqa: B018


def test_average_gradients_with_a_codec():
    with pytest.warns(DeprecationWarning, match="contrib.average_compressed"):
        link = train.average_gradients("data", lambda x, axis: (x, x))
    assert isinstance(link, optax.GradientTransformation)
    mean, state = link.update(1.0, link.init(jax.numpy.ones(())))
    assert (float(mean), float(state.unsent)) == (1.0, 0.0)
