"""Layers one by one, and files of parameters."""

import builtins
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import F64, BatchNormed, normal

import lp_jax
from lp_jax import nn

pytest.importorskip("safetensors", reason="the extra lp_jax[nn] is not installed")

LAYERS, WIDTH = 6, 5
GRID = (0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.1)


def dense(rngs):
    return nn.DenseResidual(WIDTH, hidden=7, param_dtype=F64, rngs=rngs)


def make_trunk(make=dense, **options):
    return nn.LayerParallel(make, LAYERS, **({"t1": 2.0, "rngs": nnx.Rngs(0)} | options))


def make_model(rngs=None):
    rngs = rngs or nnx.Rngs(1)
    return nn.Classifier(
        nn.DenseOpening((4,), WIDTH, param_dtype=F64, rngs=rngs),
        make_trunk(rngs=rngs),
        nn.DenseClosing((WIDTH,), 3, hidden=6, param_dtype=F64, rngs=rngs),
    )


def assert_same(got, wanted):
    """Bit for bit, and in structure and dtype."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --------------------------------------------------------------------------------------------------------------- layer by layer


def test_exported_layers_run_in_numpy():
    trunk = make_trunk(t0=0.5)
    trunk.layers.inner.bias[...] = normal((LAYERS, 7), 3)
    y = u = np.asarray(normal((3, WIDTH)))
    for layer in jax.tree.map(np.asarray, nn.unstack(trunk)):
        hidden = np.tanh(u @ layer["inner"]["kernel"] + layer["inner"]["bias"])
        u = u + 1.5 / LAYERS * (hidden @ layer["outer"]["kernel"] + layer["outer"]["bias"])
    np.testing.assert_allclose(trunk.solve(jnp.asarray(y), solver=lp_jax.Serial()).y1, u, rtol=1e-14)


# ------------------------------------------------------------------------------------------------------------------------ files


@pytest.fixture
def file(tmp_path):
    return tmp_path / "params.safetensors"


def header(file):
    data = file.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_a_model_comes_back_bit_for_bit(file):
    model, other, x = make_model(), make_model(nnx.Rngs(7)), normal((3, 4))
    nn.save(file, model)
    layers = ("opening.linear", "trunk.layers.inner", "trunk.layers.outer", "closing.layers.0", "closing.layers.1")
    assert set(header(file)) == {f"{layer}.{kind}" for layer in layers for kind in ("bias", "kernel")}
    params = nnx.to_pure_dict(nnx.state(model))
    for like in (None, params, model, nnx.state(other), jax.eval_shape(lambda: params)):
        assert_same(nn.load(file, like=like), params)
    nnx.update(other, nn.load(file, like=other))
    np.testing.assert_array_equal(other(x), model(x))
    nn.save(file, {"w": jnp.ones(2)})  # replaces the file
    assert_same(nn.load(file), {"w": jnp.ones(2)})
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_running_statistics_are_saved_too(file):
    trunk = make_trunk(BatchNormed)
    trunk.layers.norm.mean[...] = normal((LAYERS, WIDTH))
    nn.save(file, trunk)
    other = make_trunk(BatchNormed, rngs=nnx.Rngs(9))
    nnx.update(other, nn.load(file, like=other))
    assert_same(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(trunk)))


DTYPES = ["bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64", "complex64"]


def test_all_dtypes_and_shapes(file):
    bits = np.random.default_rng(0).integers(0, 255, 24 * 8, np.uint8).tobytes()
    params = {name: jnp.asarray(np.frombuffer(bits, name, 24).reshape(2, 3, 4)) for name in DTYPES if name != "bool"}
    params |= {"bool": jnp.asarray([True, False]), "scalar": jnp.asarray(2.5), "empty": jnp.zeros((0, 3))}
    params |= {"nested": {3: jnp.ones(1)}, "transposed": np.arange(6.0).reshape(2, 3).T}  # which is not contiguous
    nn.save(file, params)
    assert_same(nn.load(file), params)
    assert_same(nn.load(file, like=params), params)


def test_lists_and_tuples_have_numbers_for_names(file):
    params = {"layers": [(jnp.ones(2), jnp.zeros(3)), (jnp.ones(1), jnp.zeros(1))]}
    nn.save(file, params)
    assert set(header(file)) == {f"layers.{i}.{j}" for i in (0, 1) for j in (0, 1)}
    assert_same(nn.load(file, like=params), params)
    assert_same(nn.load(file)["layers"][1], {0: jnp.ones(1), 1: jnp.zeros(1)})


def test_files_of_other_programs_are_read(file):
    from safetensors.numpy import load_file, save_file

    save_file({"encoder.0.weight": np.ones((2, 3), np.float32)}, file, metadata={"format": "pt"})
    assert_same(nn.load(file), {"encoder": {0: {"weight": jnp.ones((2, 3), jnp.float32)}}})
    nn.save(file, {"a": {"b": jnp.ones(3)}})
    np.testing.assert_array_equal(load_file(file)["a.b"], np.ones(3))


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
    ("like", "message"),
    [
        (
            {"inner": PARAMS["inner"] | {"scale": jnp.ones(3)}},
            r"inner.scale is absent in the file and float64\[3\] in `like`",
        ),
        ({"inner": {"kernel": jnp.ones((2, 3))}}, r"inner.bias is float64\[3\] in the file and absent in `like`"),
        (
            {"inner": {"kernel": jnp.ones((2, 4)), "bias": jnp.ones(3)}},
            r"inner.kernel is float64\[2, 3\] in the file and float64\[2, 4\] in",
        ),
        (
            jax.tree.map(lambda x: x.astype("float32"), PARAMS),
            r"inner.bias is float64\[3\] in the file and float32\[3\] in `like`",
        ),
    ],
)
def test_parameters_of_another_network_are_refused(file, like, message):
    nn.save(file, PARAMS)
    with pytest.raises(ValueError, match=message):
        nn.load(file, like=like)


def test_bad_files_are_refused(file):
    from safetensors.numpy import save

    with pytest.raises(FileNotFoundError, match=r"no file .*params.safetensors"):
        nn.load(file)
    nn.save(file, PARAMS)
    whole = file.read_bytes()
    for data in (b"", b"not a file of parameters", whole[:50], whole[:-1], whole + b"more"):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"params\.safetensors is not a file of safetensors, or is incomplete: "):
            nn.load(file)
    file.write_bytes(save({"w": np.ones(2), "w.b": np.ones(2)}))
    with pytest.raises(ValueError, match=r"a part of the name w\.b is the name of another array"):
        nn.load(file)


def test_float64_is_not_cut(file):
    nn.save(file, PARAMS)
    wanted = r'float64.*jax.config.update\("jax_enable_x64", True\)'
    with jax.enable_x64(False), pytest.raises(ValueError, match=wanted):
        nn.load(file)


def test_without_safetensors_the_extra_is_named(file, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def absent(name, *arguments, **options):
        if name.split(".")[0] == "safetensors":
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    for call in (lambda: nn.save(file, PARAMS), lambda: nn.load(file)):
        with pytest.raises(ImportError, match=r'pip install "lp_jax\[nn\]"'):
            call()
