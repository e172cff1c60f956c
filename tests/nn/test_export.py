"""Layers one by one, and files of parameters."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from networks import F64, BatchNormed, normal

import lp_jax
from lp_jax import nn

LAYERS, WIDTH = 6, 5


def dense(rngs):
    return nn.DenseResidual(WIDTH, hidden=7, param_dtype=F64, rngs=rngs)


def make_model(seed):
    rngs = nnx.Rngs(seed)
    closing = nn.DenseClosing((WIDTH,), 3, hidden=6, param_dtype=F64, rngs=rngs)
    return nn.Classifier(lambda x: x, nn.LayerParallel(BatchNormed, LAYERS, rngs=rngs), closing)


def assert_same(got, wanted):
    """Bit for bit, and in structure and dtype."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_exported_layers_run_in_numpy():
    trunk = nn.LayerParallel(dense, LAYERS, t0=0.5, t1=2.0, rngs=nnx.Rngs(0))
    trunk.layers.inner.bias[...] = normal((LAYERS, 7), 3)
    y = u = np.asarray(normal((3, WIDTH)))
    for layer in jax.tree.map(np.asarray, nn.unstack(trunk)):
        hidden = np.tanh(u @ layer["inner"]["kernel"] + layer["inner"]["bias"])
        u = u + 1.5 / LAYERS * (hidden @ layer["outer"]["kernel"] + layer["outer"]["bias"])
    np.testing.assert_allclose(
        trunk.solve(jnp.asarray(y), solver=lp_jax.Serial()).y1, u, rtol=1e-14
    )


@pytest.fixture
def file(tmp_path):
    return tmp_path / "params.safetensors"


def header(file):
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_a_model_comes_back_bit_for_bit(file):
    model, other = make_model(1), make_model(7)
    model.trunk.layers.norm.mean[...] = normal((LAYERS, WIDTH))
    nn.save(file, model)
    layers = ("trunk.layers.linear", "closing.layers.0", "closing.layers.1")
    names = {f"{layer}.{kind}" for layer in layers for kind in ("bias", "kernel")}
    assert set(header(file)) == names | {
        f"trunk.layers.norm.{kind}" for kind in ("bias", "scale", "mean", "var")
    }
    params = nnx.to_pure_dict(nnx.state(model))
    for like in (None, params, model, nnx.state(other), jax.eval_shape(lambda: params)):
        assert_same(nn.load(file, like=like), params)
    nnx.update(other, nn.load(file, like=other))
    assert_same(nnx.to_pure_dict(nnx.state(other)), params)
    nn.save(file, {"w": jnp.ones(2)})  # replaces the file
    assert_same(nn.load(file), {"w": jnp.ones(2)})
    assert [path.name for path in file.parent.iterdir()] == [file.name]


DTYPES = [
    "int8",
    "uint16",
    "int32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
]


def test_all_dtypes_and_shapes(file):
    bits = np.random.default_rng(0).integers(0, 255, 24 * 8, np.uint8).tobytes()
    params = {name: jnp.asarray(np.frombuffer(bits, name, 24).reshape(2, 3, 4)) for name in DTYPES}
    params |= {
        "bool": jnp.asarray([True, False]),
        "scalar": jnp.asarray(2.5),
        "empty": jnp.zeros((0, 3)),
    }
    params |= {
        "nested": {3: jnp.ones(1)},
        "transposed": np.arange(6.0).reshape(2, 3).T,
    }  # which is not contiguous
    nn.save(file, params)
    assert_same(nn.load(file), params)
    assert_same(nn.load(file, like=params), params)


def test_lists_and_tuples_have_numbers_for_names(file):
    params = {"layers": [(jnp.ones(2), jnp.zeros(3)), (jnp.ones(1), jnp.zeros(1))]}
    nn.save(file, params)
    assert set(header(file)) == {f"layers.{i}.{j}" for i in (0, 1) for j in (0, 1)}
    assert_same(nn.load(file, like=params), params)
    assert_same(nn.load(file)["layers"][1], {0: jnp.ones(1), 1: jnp.zeros(1)})
    safetensors.numpy.save_file(
        {"encoder.0.weight": np.ones((2, 3))}, file, metadata={"format": "pt"}
    )
    assert_same(nn.load(file), {"encoder": {0: {"weight": jnp.ones((2, 3))}}})


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"a.b": 1.0}, ValueError, r"params\['a.b'\] has no name, the keys joined by dots"),
        ({"a": {"7": 1.0}}, ValueError, r"params\['a'\]\['7'\] has no name"),
        ({"": 1.0}, ValueError, r"params\[''\] has no name"),
        (jnp.ones(3), ValueError, "params has no name.* Put arrays into dicts"),
        ({"k": jax.random.key(0)}, TypeError, "Use jax.random.key_data"),
        ({"z": jnp.ones(2, complex)}, TypeError, "cannot be written: .*complex128"),
    ],
)
def test_what_cannot_be_saved_is_refused(file, params, error, message):
    with pytest.raises(error, match=message):
        nn.save(file, params)
    assert not list(file.parent.iterdir())


PARAMS = {"inner": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"scale": jnp.ones(3)}, r"inner.scale is absent there and float64\[3\] here"),
        (
            {"kernel": jnp.ones((2, 4))},
            r"inner.kernel is float64\[2, 3\] there and float64\[2, 4\] here",
        ),
        (
            {"bias": jnp.ones(3, "float32")},
            r"inner.bias is float64\[3\] there and float32\[3\] here",
        ),
    ],
)
def test_parameters_of_another_network_are_refused(file, inner, message):
    nn.save(file, PARAMS)
    with pytest.raises(ValueError, match=message):
        nn.load(file, like={"inner": PARAMS["inner"] | inner})
    with pytest.raises(ValueError, match=r"inner.bias is float64\[3\] there and absent here"):
        nn.load(file, like={"inner": {"kernel": PARAMS["inner"]["kernel"]}})


def test_bad_files_are_refused(file):
    with pytest.raises(FileNotFoundError, match=r"no file .*params.safetensors"):
        nn.load(file)
    nn.save(file, PARAMS)
    whole = file.read_bytes()
    for data in (b"", b"not a file of parameters", whole[:50], whole[:-1], whole + b"more"):
        file.write_bytes(data)
        with pytest.raises(
            ValueError,
            match=r"params\.safetensors is not a file of safetensors, or is incomplete: ",
        ):
            nn.load(file)
    file.write_bytes(safetensors.numpy.save({"w": np.ones(2), "w.b": np.ones(2)}))
    with pytest.raises(ValueError, match=r"a part of the name w\.b is the name of another array"):
        nn.load(file)
    nn.save(file, PARAMS)
    wanted = r'float64.*jax.config.update\("jax_enable_x64", True\)'
    with jax.enable_x64(False), pytest.raises(ValueError, match=wanted):
        nn.load(file)
