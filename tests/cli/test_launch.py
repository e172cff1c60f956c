"""Training from the command line on several processes: MPI ranks, and processes of ``jax.distributed``."""

import concurrent.futures
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import launch
import numpy as np
import pytest
from command import run

from conftest import QUICK
from lp_jax.cli import _errors, _launch
from lp_jax.train._log import read_rows

pytestmark = pytest.mark.usefixtures("standard_promotion")

SCRIPT = launch.HERE / "command.py"
SMALL = [
    "--layers",
    8,
    "--width",
    4,
    "--batch-size",
    8,
    "--log-every",
    3,
    "--no-compare",
    "--no-pictures",
]
SMALL += [
    "--solver",
    "MGRIT",
    "--solver.iterations",
    1,
    "--solver.coarse_step",
    "Rediscretize",
]  # compiles quickly
UNPROBED = ["--probe-every", 100_000]
STEPS = 48 // 8


@pytest.fixture
def train(tmp_path):
    """Training on a file of 60 samples, of which a fifth is held out: the digits import scikit-learn in every process."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(tmp_path / "mine.npz", x=x, y=(x.sum(1) > 0).astype(int))
    return ["train", "arrays", "--data", tmp_path / "mine.npz"]


def processes(count, folder, train, *arguments, devices=1, timeout=200):
    """The command as processes of ``jax.distributed``, one argument list for each or one for all."""
    address = f"127.0.0.1:{launch.free_port()}"
    lists = arguments if isinstance(arguments[0], list) else [list(arguments)] * count
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false {QUICK}"
    return launch.together(
        [
            [sys.executable, SCRIPT, folder, i, *train, "--distributed", "--coordinator", address,
             "--process", f"{i}/{count}", *mine]
            for i, mine in enumerate(lists)
        ],
        timeout=timeout,
        XLA_FLAGS=flags.strip(),
    )  # fmt: skip


def test_two_processes_solve():
    """Two devices each: the same numbers as on one, and every process holds its own layers' gradients."""
    port = launch.free_port()
    commands = [
        [sys.executable, launch.HERE / "processes_solve.py", i, 2, 2, port] for i in range(2)
    ]
    for i, ended in enumerate(launch.together(commands, timeout=200)):
        assert ended.code == 0 and f"passed in process {i}" in ended.output, ended.output


def losses(folder):
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_several_processes_that_do_not_know_of_each_other_are_refused(
    tmp_path, monkeypatch, capsys, variable
):
    monkeypatch.setenv(variable, "3")
    code, _, err = run(capsys, "train", "digits", "--out", tmp_path / "run")
    assert code == 2 and "one of 3 processes" in err and not (tmp_path / "run").exists()


def test_the_coordinator_listens_where_it_was_told(monkeypatch, tmp_path, capsys):
    initialize = mock.Mock(side_effect=RuntimeError("nobody came"))
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(_launch, "_meet", lambda *address: None)
    arguments = [
        "--distributed",
        "--coordinator",
        "127.0.0.1:1234",
        "--process",
        "0/2",
        "--out",
        str(tmp_path / "run"),
    ]
    assert "nobody came" in run(capsys, "train", "digits", *arguments)[2]
    (address, *_), asked = initialize.call_args
    assert asked["coordinator_bind_address"] == address == "127.0.0.1:1234"


def test_processes_meet_and_a_second_one_of_a_number_is_refused():
    """jax would end all of them with a trace of its C++."""
    address = f"127.0.0.1:{launch.free_port()}"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = [pool.submit(_launch._meet, address, 1, 3) for _ in range(2)]
        concurrent.futures.wait(first, timeout=0.5)
        last = [pool.submit(_launch._meet, address, number, 3) for number in (0,)]
        concurrent.futures.wait(first, timeout=60, return_when="FIRST_COMPLETED")
        last.append(pool.submit(_launch._meet, address, 2, 3))
        errors = [future.exception() for future in first + last]
    assert sorted(map(bool, errors)) == [False, False, False, True] and any(errors[:2])
    assert "1/3 is there already" in str(next(filter(None, errors)))


@pytest.mark.parametrize(
    "number, missing", [(0, "1/2 did not come"), (1, "process 0 did not come")]
)
def test_a_process_whose_partner_never_comes_says_so(monkeypatch, number, missing):
    monkeypatch.setattr(_launch, "_MEETING", 0.5)
    with pytest.raises(_errors.CommandError, match=missing):
        _launch._meet(f"127.0.0.1:{launch.free_port()}", number, 2)


@pytest.mark.parametrize(
    "address, why", [("127.0.0.1:{port}", "in use"), ("nowhere.invalid:1234", "")]
)
def test_a_coordinator_that_cannot_listen_is_refused(address, why):
    """A second process of number 0, or a host without an address."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(_errors.CommandError, match=f"cannot be used: .*{why}"),
    ):
        _launch._meet(address.format(port=server.getsockname()[1]), 0, 2)


@pytest.mark.parametrize(
    "error", [None, _errors.CommandError("disk full"), _errors.UsageError("no such option")]
)
def test_processes_pass_values_and_errors_as_json(error):
    value, raised = _launch._broadcast(({"layers": 4, "out": "run"}, error))
    assert value == {"layers": 4, "out": "run"} and (type(raised), str(raised)) == (
        type(error),
        str(error),
    )


def test_a_process_that_was_started_otherwise_is_refused(tmp_path, train):
    one, other = (
        [*SMALL, "--out", tmp_path / "run"],
        [*SMALL, "--layers", 16, "--out", tmp_path / "run"],
    )
    ended = processes(2, tmp_path, train, one, other, timeout=100)
    assert all(process.code != 0 for process in ended)
    wanted = "process 1: lp-jax: this process was started otherwise than the first: layers is 8 there and 16 here"
    assert wanted in ended[1].output


def stopped(number, folder, scratch, *arguments, when):
    """A run of two ranks that got a signal, on one of them, at some time."""
    process = launch.start_ranks(
        2, SCRIPT, scratch, "OMPI_COMM_WORLD_RANK", *arguments, "--mpi", "--out", folder
    )
    try:
        when(process)
        os.kill(int((scratch / "pid-1").read_text()), number)
    finally:
        ended = launch.end(process, timeout=60)
    assert ended.code != 0
    return ended


def await_that(found, process, *, timeout=120):
    end = time.monotonic() + timeout
    while not found():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"nothing came of {process.args} in {timeout} s"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_moves_from_engine_to_engine(tmp_path, train, capsys):
    """Two ranks for examples; from a checkpoint of theirs two processes with two devices each for layers and examples,
    then one device, have the same losses. A rank that is asked to end stops all: they finish the same step and save it.

    Layers over ranks are in the test below, and both over four ranks in ranks_solve.py.
    """
    folder, moved, begin = tmp_path / "run", tmp_path / "moved", 4 * STEPS

    def copied(process):
        await_that((folder / "checkpoints" / str(begin)).exists, process)
        shutil.copytree(folder, moved, ignore=shutil.ignore_patterns("run.lock", "*tmp*"))
        await_that(lambda: len(losses(folder)) >= begin + 2 * STEPS, process)

    options = [*SMALL, *UNPROBED, "--mesh", "data=2", "--epochs", 2000, "--checkpoint-every", begin]
    ended = stopped(signal.SIGTERM, folder, tmp_path, *train, *options, when=copied)
    assert "MPI ranks: layers 1, data 2" in ended.output
    assert ended.output.count(f"step {STEPS}  ") == 1, ended.output  # lines come once
    said = re.findall(r"SIGTERM: stopped after step (\d+); saved to (\S+);", ended.output)
    assert len(said) == 1 and said[0][1] == str(folder / "checkpoints" / said[0][0]), ended.output
    assert int(said[0][0]) == len(losses(folder)) and Path(said[0][1]).is_dir()

    resume = [
        "--mesh",
        "layers=2,data=2",
        "--epochs",
        5,
        "--probe-every",
        STEPS,
        "--resume",
        "--out",
        moved,
    ]
    first, second = processes(2, tmp_path, train, *resume, devices=2)
    assert first.code == second.code == 0, first.output + second.output
    assert "devices: layers 2, data 2, in 2 processes" in first.output
    assert f"going on after step {begin}" in first.output
    # the table, too, comes once
    assert (
        first.output.count("test accuracy") == first.output.count(f"step {begin + STEPS}  ") + 1
    ), first.output
    assert not re.search("loss|accuracy|step", second.output), second.output
    assert (
        run(capsys, *train, *UNPROBED, "--epochs", 6, "--resume", "--out", moved)[0] == 0
    )  # in this process
    assert jax.device_count() > 1 and len(losses(moved)) == 6 * STEPS
    np.testing.assert_allclose(
        losses(moved), losses(folder)[: 6 * STEPS], rtol=2e-4
    )  # single precision
    config = json.loads((moved / "config.json").read_text())
    assert config["options"]["mesh"] is None and config["options"]["layers"] == 8


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job_and_a_one_shot_run_goes_on_to_the_same_numbers(
    tmp_path, train, capsys
):
    """The checkpoint holds where each rank's solves ended. Killed when the run has gone past it, those steps come again."""
    folder = tmp_path / "run"
    checkpoints = folder / "checkpoints"

    def saved():
        return sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal())

    inexact = ["--solver.coarsening", 2]  # else it is no matter where solves begin
    options = [
        *SMALL,
        *inexact,
        *UNPROBED,
        "--method",
        "one-shot",
        "--log-every",
        1,
        "--checkpoint-every",
        3,
    ]
    stopped(signal.SIGKILL, folder, tmp_path, *train, *options, "--epochs", 2000,
            when=lambda process: await_that(lambda: len(saved()) > 1, process))  # fmt: skip
    before, (begin, newest) = losses(folder), saved()[-2:]
    assert len(before) >= newest > begin
    shutil.rmtree(checkpoints / str(newest))  # as if the run had been killed before
    assert run(capsys, *train, "--resume", "--epochs", len(before) + 2, "--out", folder)[0] == 0
    again = losses(folder)
    assert len(again) == len(before) + 2
    np.testing.assert_allclose(
        again[: len(before)], before, rtol=2e-4, atol=1e-6
    )  # single precision
