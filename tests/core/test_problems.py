"""Every problem of the command line, from its files to a table, on small files made here."""

import json
import re

import numpy as np
import pytest
from command import run
from data_files import treebank, write
from flax import nnx

import lp_jax
from lp_jax import data
from lp_jax.cli._menu import PROBLEMS as HELP
from lp_jax.cli._problems import PROBLEMS, model_and_training, tagged, written

pytestmark = pytest.mark.usefixtures("as_users_run_it")


def sentences(folder):
    words = [
        ("The", "DET"),
        ("dog", "NOUN"),
        ("sees", "VERB"),
        ("a", "DET"),
        ("cat", "NOUN"),
        (".", "PUNCT"),
    ]
    return treebank(
        folder, *([words[: 3 + number % 4] for number in range(count)] for count in (12, 2, 3))
    )


def series(folder):
    rng = np.random.default_rng(0)
    for split, count in (("TRAIN", 12), ("TEST", 6)):
        head = "@problemName Tiny\n@univariate false\n@dimensions 2\n@equalLength false\n@classLabel true a b\n@data\n"
        rows = []
        for number in range(count):
            channels = [
                ",".join(f"{v:.3f}" for v in rng.normal(number % 2, 1, 6 + number % 3))
                for _ in range(2)
            ]
            rows.append(":".join([*channels, "ab"[number % 2]]))
        write(folder / f"Tiny_{split}.ts", head + "\n".join(rows) + "\n")
    return folder


def book(folder):
    return write(folder / "book.txt", "the quick brown fox jumps over the lazy dog. " * 60)


def shapes(folder):
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        voxels = np.packbits(rng.random((count, 32, 32, 32)) < 0.3, axis=-1)
        labels = np.arange(count, dtype=np.uint8) % 2
        np.savez(
            folder / f"voxels_{split}.npz",
            voxels=voxels,
            labels=labels,
            classes=np.array(["chair", "monitor"]),
        )
    return folder


# Exact, but for the network with dropout and a mask, and for states that are coarse in space, too: each solver compiles five
# programs more.
RUNS = {
    "peaks": (None, "--layers 8 --width 6 --batch-size 2000 --serial"),
    "gum": (
        sentences,
        "--layers 2 --width 4 --heads 1 --dropout 0.1 --solver Picard --solver.sweeps 1 --no-compare",
    ),
    "timeseries": (series, "--name Tiny --width 4 --units 2 --serial"),
    "text": (book, "--layers 2 --width 4 --heads 1 --serial"),
    "modelnet": (
        shapes,
        "--layers 4 --width 1 --no-compare --solver MGRIT --solver.iterations 1 --solver.coarse_step Rediscretize"
        " --solver.coarsening 2 --solver.relaxation FCF",
    ),
}


# sentences of five words and more come with a tag for each word; the prompt is the beginning of what is held out
SAMPLES = {
    "gum": r"The/[A-Z]+\S* dog/\S+ sees/\S+ a/\S+ cat/\S+\n",
    "text": r"temperature 0.7\):\n\n.{32}\|.{200}\n",
}


@pytest.mark.parametrize("problem", RUNS)
def test_from_files_to_a_table(problem, tmp_path, capsys):
    make, options = RUNS[problem]
    folder = tmp_path / "data"
    folder.mkdir()
    files = [] if make is None else ["--data", str(make(folder))]
    size = [] if "--batch-size" in options else ["--batch-size", "4"]
    out = tmp_path / "run"
    chosen = [*size, *options.split(), "--no-pictures"]
    code, said, err = run(capsys, "train", problem, *files, "--epochs", 1, *chosen, "--out", out)
    assert code == 0 and "test accuracy" in said, err
    results = json.loads((out / "summary.json").read_text())["results"]
    assert list(results) == ["serial" if "--serial" in options else "layer-parallel"]
    assert all(np.isfinite(run["test_loss"]) and run["steps"] > 0 for run in results.values())
    if problem in SAMPLES:
        text = (out / "samples.txt").read_text(encoding="utf-8")
        assert re.search(SAMPLES[problem], text, re.S) and text in said


def test_a_tagged_word_says_what_is_wrong():
    tags = ("NOUN", "VERB")
    said = [tagged(tags, "flies", *pair) for pair in ((1, 1), (0, 1), (0, -1))]
    assert said == ["flies/VERB", "flies/NOUN[VERB]", "flies/NOUN[?]"]


def test_a_text_goes_on_with_what_is_likely():
    """A model that only knows the next letter of the alphabet; padding, which it likes better, is never written."""
    names = ("<padding>", "<unknown>", *"abcdefghijklmnopqrstuvwxyz")
    x = np.arange(2, 18, dtype=np.int32)[None]
    dataset = data.Dataset(x, x, x, x, classes=len(names), shape=(16,), names=names)

    def predict(window):
        logits = 200.0 * (np.arange(len(names)) == np.where(window == 27, 2, window + 1)[..., None])
        logits[..., 0] = 1000.0
        return logits

    before, _, after = written(dataset, 0, predict).partition("|")
    assert (
        before.endswith("\nabcdefghijklmnop")
        and after == ("abcdefghijklmnopqrstuvwxyz" * 10)[16:216]
    )


@pytest.mark.parametrize("problem", [name for name in PROBLEMS if PROBLEMS[name].sources])
def test_files_that_are_not_named_are_asked_for(problem, capsys):
    code, _, err = run(capsys, "train", problem)
    wanted = PROBLEMS[problem].sources["data"]
    assert code == 2 and f"Missing option --data: {wanted[0].lower()}{wanted[1:]}" in err


def test_settings_that_are_not_given_are_those_of_problem_and_model():
    dense, conv = (
        model_and_training(PROBLEMS["mnist"], {"model": model})[0] for model in (None, "conv")
    )
    assert (type(dense).__name__, dense.layers, dense.width) == ("Dense", 64, 64)
    assert (conv.layers, conv.t1) == (32, 1.0)
    model, training = model_and_training(PROBLEMS["mnist"], {"layers": 7, "epochs": 2, "seed": 3})
    assert (model.layers, training.epochs, training.seed, training.batch_size) == (7, 2, 3, 50)


def test_buffers_are_serial_layers_around_the_others(tmp_path):
    settings = {"layers": 2, "width": 4, "heads": 1, "buffers": 3, "batch_size": 4}
    model, training = model_and_training(PROBLEMS["text"], settings)
    task, sweeps = PROBLEMS["text"].load(training, book(tmp_path)), lp_jax.Picard()
    network = nnx.eval_shape(lambda: model.build(task, 2, nnx.Rngs(0), t1=2.0, solver=sweeps))
    found = [(part.num_layers, part.solver) for part in network.trunk.parts]
    assert found == [(3, lp_jax.Serial()), (2, sweeps), (3, lp_jax.Serial())]


def test_every_problem_is_in_the_menu():
    assert set(RUNS) | {"arrays", "digits", "mnist"} == set(PROBLEMS) == set(HELP)
