"""Scripts of notebooks/examples that are there to be copied: each runs as a program, at toy size, and says what is true."""

import re
import shutil

import jax
import matplotlib.image
import numpy as np
from examples import load, run

from conftest import jax_defaults


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]


def test_the_heat_equation(tmp_path):
    """Residuals fall in every cycle, faster with FCF; the states are those of one step after another; the picture is one."""
    settings = "--steps", 128, "--points", 15, "--cycles", 6, "--out", "heat.png"
    exact, *parts = run("heat_mgrit", *settings, folder=tmp_path).split("\n\n")
    assert 1e-3 < numbers(r"at most (\S+)", exact)[0] < 0.1  # of the method of first order
    fell = []
    for part in parts:
        factors, norms = numbers(r"e[-+]\d+ +(\d\.\d+)", part), numbers(r"\d +(\d\.\d+e\S+)", part)
        assert len(factors) == 5 and max(factors) < 0.9 and len(norms) == 6
        fell.append(norms[-1] / norms[0])
        # the factors are printed with few digits, and five of them are multiplied
        np.testing.assert_allclose(np.prod(factors), fell[-1], rtol=0.1)
        assert numbers(r"at most (\S+)", part)[0] < norms[-1]
    assert len(set(fell)) == 3 and max(fell[1:]) < 0.1 * fell[0] < 0.01
    pixels = matplotlib.image.imread(tmp_path / "heat.png")
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 100


def test_packed_sequences(tmp_path):
    settings = "--length", 48, "--hidden", 6, "--steps", 40, "--sequences", 20
    printed = run("packed_gru", *settings, folder=tmp_path)
    assert len(re.findall(r"steps,.* carry .*Newton", printed)) == 2
    assert numbers(r"error of the gradient: (\S+)", printed)[0] < 1e-2
    assert 0 < numbers(r"(\d+)% padding", printed)[0] < 40
    assert numbers(r"loss (\S+)", printed)[-1] < 1.38  # log 4 = 1.386, by guessing


def test_a_packed_sequence_sees_itself_only():
    """Its scores are those that it has alone in a row, whatever stands around it, and all places are found again."""
    packed_gru = load("packed_gru")
    with jax_defaults():
        x, y = packed_gru.sequences(9, np.random.default_rng(0), longest=10)
        params = packed_gru.init(jax.random.key(0), 5)
        symbols, labels, segments = packed_gru.pack(x, y, 24)
        scores = np.asarray(packed_gru.scores(params, symbols, segments))
        found = 0
        for row, number in sorted({*zip(*np.nonzero(segments), strict=True)}):
            at = segments[row] == segments[row, number]
            (which,) = [
                i
                for i, each in enumerate(x)
                if np.array_equal(each, symbols[row, at]) and np.array_equal(y[i], labels[row, at])
            ]
            alone = packed_gru.pack([x[which]], [y[which]], 16)
            expected = np.asarray(packed_gru.scores(params, alone[0], alone[2]))[0, : at.sum()]
            # in float32, by Newton's method to a tolerance
            np.testing.assert_allclose(scores[row, at], expected, rtol=1e-4, atol=1e-5)
            found += 1
        assert found == sum(map(len, x)) and len(symbols) < len(x)


def test_a_language_model_goes_on_where_it_stopped(tmp_path):
    """Over four devices: the same numbers as without a break, and each device holds the blocks of half of the layers."""
    settings = (
        *("--layers", 4, "--width", 8, "--heads", 2, "--length", 8, "--microbatches", 2),
        *("--examples", 8, "--out", tmp_path / "lm", "--save-every", 50, "--steps", 100),
    )
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),  # the second run compiles nothing
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    whole = run("lm_nnx", *settings, folder=tmp_path, **kept).splitlines()
    losses = numbers(r"step \d+: loss (\S+)", "\n".join(whole))
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.7
    assert "(2, 8, 32) of (4, 8, 32)" in whole[-2]
    shutil.rmtree(tmp_path / "lm" / "100")
    first, *rest = run("lm_nnx", *settings, folder=tmp_path, **kept).splitlines()
    assert first == "goes on after step 50" and rest == whole[5:]
