"""The command line: menus, help, and one line for everything that can go wrong."""

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from command import one_line, run

import lp_jax
from lp_jax.cli import _errors


@pytest.fixture
def cli(capsys):
    return functools.partial(run, capsys)


@pytest.mark.parametrize("args", [[], ["--help"], ["plan"], ["bench"]])
def test_help_without_a_command(cli, args):
    code, out, _ = cli(*args)
    wanted = {"bench": ("single ", "ranks ")}.get("".join(args), ("lp-jax plan digits", "machine"))
    wanted = wanted if args and args != ["--help"] else ("lp-jax demo", "bench ")
    assert code == 0 and all(text in out for text in wanted)
    assert not re.search("^ +worker ", out, re.MULTILINE)


@pytest.mark.parametrize("command", ["demo", "plan digits", "plan machine", "info"])
def test_help_shows_an_example_and_every_option(cli, command):
    code, out, _ = cli(*command.split(), "--help")
    assert code == 0 and f"\nexamples:\n  lp-jax {command}" in out
    assert "--out FOLDER" in out or command == "info"


MEANT = {"dmeo": "demo", "plan digit": "digits", "bench rank": "ranks"}


@pytest.mark.parametrize("line", MEANT)
def test_a_menu_guesses_what_was_meant(cli, line):
    code, out, err = cli(*line.split())
    assert code == 2 and out == "" and f"did you mean {MEANT[line]}?" in one_line(err)


WRONG = {
    "train digits": "'train' is none of demo, plan, bench, info",
    "demo --layers 0": "argument --layers: a whole number above 0 is wanted; got '0'",
    "demo --layers many": "got 'many'",
    "demo --layers 100": "--layers must be a multiple of 64; got 100",
    "demo --sweeps 3": "unrecognized arguments: --sweeps 3",
    "plan digits --workers 65 --layers 64": "--workers must be from 1 to the 64 layers; got 65",
    "plan machine file.json": "the following arguments are required: --layers",
    "plan gum": "'gum' is none of digits, machine",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_options_are_refused_in_one_line(cli, monkeypatch, tmp_path, line):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*line.split())
    assert code == 2 and out == "" and WRONG[line] in one_line(err)
    assert err.endswith("--help)\n") and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_ends_the_demo_before_it_trains(cli, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, out, err = cli("demo", "--out", tmp_path / "file")
    assert code == 1 and out == "" and "file: File exists" in one_line(err)


ERRORS = {
    "a signal": (KeyboardInterrupt("SIGTERM"), "lp-jax: SIGTERM: stopped", 128 + signal.SIGTERM),
    "Ctrl-C": (KeyboardInterrupt(), "lp-jax: SIGINT: stopped", 128 + signal.SIGINT),
    "wrong use": (
        _errors.UsageError("no", "lp-jax demo"),
        "lp-jax: no (see lp-jax demo --help)",
        2,
    ),
    "a file": (FileNotFoundError(2, "No such file", "a.json"), "lp-jax: a.json: No such file", 1),
    "several lines": (ValueError("one\ntwo"), "lp-jax: one two", 1),
    "no message": (ValueError(), "lp-jax: ValueError", 1),
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_one_line_with_an_exit_code(name):
    error, line, code = ERRORS[name]
    assert _errors.describe(error) == (line, code)


def program(*args, stdout=subprocess.PIPE, **variables):
    """Exit code and both outputs of a Python program."""
    options = {
        "cwd": Path(lp_jax.__file__).parents[1],
        "env": os.environ | variables,
        "timeout": 60,
    }
    ended = subprocess.run(
        [sys.executable, *args], stdout=stdout, stderr=subprocess.PIPE, text=True, **options
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_output_that_cannot_be_written_ends_the_command():
    """A reader that has left, as of ``| head -1``, is no error to tell; a full disk is."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    narrow = {"COLUMNS": "20", "LC_ALL": "C", "TERM": "dumb", "PYTHONUNBUFFERED": ""}
    assert program("-m", "lp_jax", "--help", stdout=writer, **narrow) == (
        128 + signal.SIGPIPE,
        None,
        "",
    )
    code, _, err = program("-m", "lp_jax", "--help", stdout=full, PYTHONUNBUFFERED="")
    assert code == 1 and "cannot write: No space left on device" in one_line(err)
    os.close(writer)
    os.close(full)


def test_ctrl_c_counts_before_anything_is_imported():
    """The program sets the system's own way to stop first; the same words follow from the moment the command begins."""
    code = "import sys, lp_jax_command, signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_DFL, 'jax' in sys.modules)"
    _, out, _ = program("-c", code)
    assert out.split() == ["True", "False"]


def test_info_tells_versions_devices_and_mpi(cli):
    code, out, _ = cli("info")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and lines["jax"] == jax.__version__ and lines["python"].startswith("3.")
    assert lines["devices"].startswith(f"{jax.device_count()} of platform cpu")
    assert {"lp_jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "mpi4jax", "MPI"} <= set(lines)


def test_missing_extras_are_named_and_import_is_light():
    script = """
        import sys
        import lp_jax.cli
        heavy = {"rich", "flax", "optax", "orbax", "matplotlib", "sklearn"} & set(sys.modules)
        assert not heavy, heavy
        sys.modules["optax"] = None
        lp_jax.cli.main(["demo"])
    """
    code, _, err = program("-c", "\n".join(line.strip() for line in script.splitlines()))
    assert code == 1
    wanted = "lp-jax: optax is missing; pip install 'lp_jax[train]' installs it\n"
    assert one_line(err) == wanted
