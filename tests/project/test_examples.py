"""The scripts to copy run at a toy size, as a user starts them, and leave what they say."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import launch
import numpy as np
import pytest

from conftest import QUICK

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks" / "examples"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "MPLBACKEND": "Agg",
    "XLA_FLAGS": QUICK,
}


def started(name, *options, folder):
    """What a script prints; it runs in its own process and folder, under JAX's defaults."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    command = sys.executable, FOLDER / f"{name}.py", *options
    return launch.output(*command, cwd=folder, env=kept | ENVIRONMENT)


# A script, its options, what it prints, and the picture that it draws.
SCRIPTS = {
    "digits": (
        "--layers 8 --width 8 --batch 200 --epochs 2",
        r"14 steps, test accuracy \d\d.*gradient error \d",
        "digits.png",
    ),
    "one_shot": (
        "--layers 8 --width 4 --steps 6",
        r"exact: loss .*one-shot: loss .*layers one after another",
        "one_shot.png",
    ),
    "several_devices": (
        "--layers 16 --width 8 --batch 16",
        r"one device .* exact\nrelay .* (exact|e-0[78])\npipeline.* error \de-0[678]\n.* 1 cycle .* error \de-0[123]\n",
        "several_devices.png",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_draws_its_picture(name, tmp_path):
    options, printed, picture = SCRIPTS[name]
    said = started(name, *options.split(), folder=tmp_path)
    assert re.search(printed, said, re.S), said
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def losses(folder):
    """The loss of each step; of a step that came twice, the last one."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    return {row["step"]: row["loss"] for row in rows}


def saved(folder):
    """The step of the last checkpoint; 0 before the first one."""
    names = [each.name for each in (folder / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def interrupted(folder, number):
    """Train on two ranks until two more checkpoints are there, send a signal to one of them, and return what they printed."""
    begin = saved(folder)
    job = launch.start_ranks(2, FOLDER / "ranks.py", "--folder", folder, "--epochs", "2000", *SIZES)
    try:
        end = time.monotonic() + 120
        while saved(folder) < begin + 14:
            assert job.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        *_, rank = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(rank), number)
    finally:
        ended = launch.end(job, timeout=60)
    assert ended.code != 0, ended.output
    return ended.output


SIZES = ["--layers", "8", "--width", "4", "--batch", "200"]  # seven steps in an epoch


@pytest.mark.slow
def test_ranks_end_together_and_go_on_to_the_same_numbers(tmp_path):
    """SIGTERM at one of two ranks ends both after the same step, which is saved; of a killed one the last checkpoint counts."""
    folder, whole = tmp_path / "ranks", tmp_path / "whole"
    said = interrupted(folder, signal.SIGTERM)
    step = saved(folder)
    assert f"SIGTERM: stopped after step {step}; saved to" in said
    assert list(losses(folder)) == list(range(1, step + 1))

    assert f"going on after step {step}" in interrupted(folder, signal.SIGKILL)
    step = saved(folder)
    epochs = ["--epochs", str(step // 7 + 2)]
    said = started("ranks", "--folder", folder, *epochs, *SIZES, folder=tmp_path)
    assert f"going on after step {step}" in said and "8 layers on 1 rank" in said

    said = started("ranks", "--folder", whole, *epochs, *SIZES, folder=tmp_path)
    assert "going on" not in said
    found, wanted = losses(folder), losses(whole)
    assert list(found) == list(wanted) == list(range(1, 7 * (step // 7 + 2) + 1))
    # in float32; sums over two ranks and over one round differently, and training makes that grow
    np.testing.assert_allclose(
        list(found.values()), list(wanted.values()), rtol=1e-3
    )  # single precision
