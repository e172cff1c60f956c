"""Programs for accelerators that are not here: every method compiles for rows of TPUs, and what is said to fit fits.

XLA compiles in processes of their own, as libtpu holds a lock until a process ends. They need the extras ``tpu-program`` and
``gpu-program``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import PAGES, blocks

ROOT = Path(__file__).resolve().parents[2]
HELPER = ROOT / "tests" / "helpers" / "absent.py"
SENTENCE = "Another process uses libtpu. Waiting until it ends; if there is none, remove /tmp/libtpu_lockfile."
ON_TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="compiling for a TPU needs libtpu; pip install 'lp_jax[tpu-program]'",
)
ON_GPU = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None,
    reason="compiling for a GPU needs its plugin; pip install 'lp_jax[gpu-program]'",
)


def command(*arguments):
    """A process as users start it, with the flags of the suite left out."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    }
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"}
    return {
        "args": [sys.executable, *map(str, arguments)],
        "env": environment | {"JAX_PLATFORMS": "cpu"},
        "text": True,
    }


def run(*arguments, timeout=600):
    done = subprocess.run(**command(*arguments), capture_output=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v4:2x2x2"])
@ON_TPU
def test_every_method_compiles_for_a_row_of_eight(topology):
    """With its gradient. The layers lie on eight chips, and states travel from chip to chip."""
    found = json.loads(run(HELPER, "methods", topology).stdout)[""]
    microbatches, chips = 4, 8
    assert set(found) == {"default", "MGRIT", "Newton", "sweeps", "relay", "pipeline"}
    for name, one in found.items():
        assert one["fits"] and one["devices"] == chips and one["cycles"] > 0, name
        # two of 16 layers on each chip, each 8 x 8, for which a TPU keeps 8 x 128 numbers, and all examples
        assert 2 * 8 * 128 * 4 <= one["memory"]["arguments"] < 4 * 8 * 128 * 4, name
    sent = {name: one["messages"]["collective-permute"][0] for name, one in found.items()}
    assert sent["relay"] >= 2 * (chips - 1) and sent["sweeps"] > 0
    assert sent["pipeline"] >= 2 * (microbatches + chips - 2)
    assert not [
        name for name in ("sweeps", "relay", "pipeline") if "all-gather" in found[name]["messages"]
    ]


@pytest.mark.slow
@ON_TPU
def test_a_tpu_says_itself_what_fits():
    """Of sixteen gigabytes of a v5e programs may take 15.75 GiB, 16.9 GB: what is 4 % below fits, what is 4 % above does not."""
    found = json.loads(run(HELPER, "sized", "v5e:2x4", 16.2, 17.6).stdout)
    for number, fits in (("16.2", True), ("17.6", False)):
        for name, one in found[number].items():
            assert one["fits"] == fits == ("OUT OF MEMORY" not in one["text"]), one["text"]
            assert sum(one["memory"].values()) == pytest.approx(float(number) * 1e9, rel=0.05), name
            assert fits or one["limit"] == pytest.approx(15.75 * 2**30, rel=1e-3)


@pytest.mark.slow
@ON_GPU
def test_a_program_for_a_gpu_is_compared_with_its_memory():
    """An H100 has 79.1 GiB, of which JAX gives a program three quarters: 63.7 GB."""
    found = json.loads(run(HELPER, "sized", "h100:1", 61, 66).stdout)
    for number, fits in (("61", True), ("66", False)):
        for name, one in found[number].items():
            assert one["fits"] == fits == ("OUT OF MEMORY" not in one["text"]), one["text"]
            assert sum(one["memory"].values()) == pytest.approx(float(number) * 1e9, rel=0.03), name


@ON_TPU
def test_who_finds_libtpu_taken_waits_and_says_so():
    holder = subprocess.Popen(
        **command(HELPER, "hold", "v5e:2x4"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == "held\n"
    other = subprocess.Popen(
        **command(HELPER, "hold", "v5e:2x4"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    line = next(line for line in other.stderr if "libtpu" in line)
    holder.communicate("", timeout=60)
    out, rest = other.communicate(timeout=600)  # tests beside this one may be next
    assert line.strip() == SENTENCE and SENTENCE not in rest
    assert out == "held\n" and other.returncode == 0


def test_what_is_missing_is_named():
    """A name that no compiler knows, or a compiler that is not installed."""
    text = "from lp_jax import planning; planning.topology('v99:2x4')"
    done = subprocess.run(**command("-c", text), capture_output=True, timeout=120)
    assert done.returncode == 1
    assert "ValueError: XLA cannot compile for 'v99:2x4' here" in done.stderr
    assert "lp_jax[tpu-program]" in done.stderr and "h200:8" in done.stderr


@pytest.mark.slow
@ON_TPU
def test_the_page_and_the_script_to_copy_run():
    page = "\n".join(
        text for language, text in blocks("docs/accelerators.md") if language == "python"
    )
    assert "planning.compiled" in page and "docs/accelerators.md" in PAGES
    assert "messages" in run("-c", page).stdout
    done = run(ROOT / "notebooks" / "examples" / "what_fits.py")
    lines = done.stdout.split("A loss and its gradient, compiled\n")[1].splitlines()
    fits = {line.rsplit("  ", 1)[1]: "fits" in line for line in lines[1:]}
    assert fits == {
        "one device": False,
        "examples": False,
        "weights": True,
        "layers: pipeline": True,
        "layers and examples: pipeline": True,
        "layers: Fastest()": True,
        "layers: Serial()": True,
    }
