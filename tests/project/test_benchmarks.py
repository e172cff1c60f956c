"""The benchmarks: arithmetic on fake clocks, and each suite end to end on a tiny problem. Nothing here asserts on time."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import (
    at_once,
    dense,
    gpu,
    harness,
    memory,
    model,
    networks,
    profile,
    ranks,
    single,
    training,
)
from benchmarks.command import run
from benchmarks.harness import Clock, Contender, measure, order, relative_error, spread, summary
from lp_jax import cli

ROOT = Path(__file__).resolve().parents[2]


def quick(capsys, suite, folder, *options):
    """A suite on small problems: what it prints and the results that it leaves."""
    assert run(suite, ["--quick", "--min-time", "0", "--out", str(folder), *options]) == 0
    return capsys.readouterr().out, json.loads((folder / f"{suite.name}.json").read_text())


@pytest.fixture(autouse=True)
def garbage_stays(monkeypatch):
    """It is collected before every round, which takes a second where many programs were compiled."""
    monkeypatch.setattr(harness.gc, "collect", lambda: 0)


@pytest.fixture
def one_thread(monkeypatch):
    """As a command sets it, for this process."""
    monkeypatch.setenv("NPROC", "1")


class Bench:
    """Contenders whose calls take the times that they are told to, one after another, on a clock that stands still else."""

    def __init__(self):
        self.now = self.worked = 0.0
        self.log = []
        self.clock = Clock(lambda: self.now, lambda: self.worked)

    def contender(self, name, seconds, *, cores=1.0):
        seconds = iter(seconds)

        def call():
            took = next(seconds)
            self.now += took
            self.worked += cores * took
            self.log.append(name)

        return Contender(name=name, call=call, before=lambda: self.log.append(f"before {name}"))

    def calls(self):
        return [entry for entry in self.log if not entry.startswith("before")]


def test_rounds_are_interleaved_after_the_warm_up():
    bench = Bench()
    names = ["a", "b", "c"]
    measure([bench.contender(n, [1.0] * 9) for n in names], rounds=7, warmup=2, clock=bench.clock)
    calls = bench.calls()
    assert calls[:6] == ["a", "a", "b", "b", "c", "c"]
    rounds = [calls[i : i + 3] for i in range(6, len(calls), 3)]
    assert len(rounds) == 7
    assert all(sorted(r) == names for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert rounds == [[names[i] for i in order(3, r)] for r in range(7)]


def test_before_runs_ahead_of_every_sample_and_off_the_clock():
    bench = Bench()
    contender = bench.contender("a", [1.0] * 3)

    def slow():
        bench.now += 100.0
        bench.log.append("before a")

    contender = Contender(name="a", call=contender.call, before=slow)
    (timing,) = measure([contender], rounds=2, clock=bench.clock)
    assert bench.log == ["before a", "a"] * 3
    assert timing.seconds == [1.0, 1.0]
    (timing,) = measure(
        [bench.contender("a", [0.25] * 100)], rounds=2, warmup=1, min_time=0.9, clock=bench.clock
    )
    assert timing.calls == 4 and timing.seconds == pytest.approx(
        [0.25, 0.25]
    )  # short calls are repeated in a sample


def test_ratios_are_formed_within_a_round():
    bench = Bench()
    disturbed = [1.0, 10.0, 1.0, 100.0, 1.0]  # the machine, round by round
    contenders = [
        bench.contender("base", [1.0, *disturbed]),
        bench.contender("twice", [2.0, *(2 * d for d in disturbed[:4]), 8.0]),
    ]
    base, twice = summary(contenders, measure(contenders, rounds=5, clock=bench.clock))
    assert base["ratio"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
    assert twice["ratio"]["median"] == pytest.approx(2.0)
    assert twice["seconds"]["median"] == pytest.approx(8.0)  # the ratio of medians would be 8
    assert twice["rounds"] == 5


def test_who_exceeds_the_budget_sits_out_but_not_the_baseline():
    bench = Bench()
    contenders = [bench.contender(name, [2.0] * 9) for name in ("base", "slow")]
    base, slow = measure(contenders, rounds=8, budget=7.0, clock=bench.clock)
    assert base.rounds == list(range(8))
    assert slow.rounds == [0, 1, 2, 3]
    base, slow = measure(
        [bench.contender(n, [2.0] * 9) for n in "ab"], rounds=8, budget=1.0, clock=bench.clock
    )
    assert slow.rounds == [0, 1, 2]  # never fewer than three


@pytest.mark.parametrize(
    ("suite", "arguments", "message"),
    [
        (dense, ["--rows", "4"], "two whole numbers"),
        (dense, ["--rows", "0,3"], "two whole numbers"),
        (dense, ["--rounds", "0"], "whole number above 0"),
        (dense, ["--budget", "soon"], "number of seconds"),
        (dense, ["--threads", "-1"], "whole number above 0"),
        (dense, ["--out", "/dev/null/folder"], "cannot write to"),
        *(
            (ranks, ["--rows", row], "a row is conv or dense or gru")
            for row in ("conv,4,32", "conv,4,0,8", "conv,a,32,8")
        ),
    ],
)
def test_bad_options_are_refused_with_what_is_wanted(suite, arguments, message, one_thread, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(suite.SUITE, arguments)
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("one_thread", "standard_promotion")
@pytest.mark.parametrize(
    ("suite", "options", "name"),
    [
        (
            single.SUITE,
            ["Picard 1, 2", "PyTorch, 1", "--rows", "conv,2,32,4"],
            "Picard 1, 2 levels, 2/1",
        ),
        (at_once.SUITE, ["auto"], "auto"),
        (dense.SUITE, ["m = 16, Picard 1, all"], "2 levels, m = 16, Picard 1, all at once"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_quick_suite_end_to_end(suite, options, name, tmp_path, capsys):
    said, result = quick(capsys, suite, tmp_path, "--only", *options)
    (row,) = result["rows"]
    contenders = {c["name"]: c for c in row["contenders"]}
    torch = {c for c in contenders if "PyTorch" in c} | {
        left["name"] for left in result["left_out"]
    }
    assert [c for c in contenders if "PyTorch" not in c] == ["lax.scan", name]
    assert len(torch) == (suite is single.SUITE)
    for contender in contenders.values():
        assert contender["rounds"] == 3
        assert contender["seconds"].keys() == contender["ratio"].keys() == {"median", "q1", "q3"}
        assert contender["threads"] >= 1
    baseline, iterated = contenders["lax.scan"], contenders[name]
    assert baseline["gradient_error"] == 0
    assert baseline["residual_norm"] is None
    assert 1e-7 < iterated["gradient_error"] < 0.1
    assert iterated["residual_norm"] > 0
    assert iterated["temporary_bytes"] > 0
    for looped in torch & contenders.keys():
        assert (
            contenders[looped]["gradient_error"] < 1e-2
        )  # float32, and rounding may switch a ReLU
    table = (tmp_path / f"{suite.name}.md").read_text()
    assert all(text in table and text in said for text in contenders)
    assert (tmp_path / f"{suite.name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_ranks_end_to_end(tmp_path, monkeypatch):
    """Processes of all kinds start, take turns and end; every worker's part of the gradient is compared."""
    monkeypatch.chdir(tmp_path)
    options = ["--quick", "--rows", "gru,4,12,3", "--only", "identity, 2/1", "Serial"]
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "ranks", *options, "--min-time", "0", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "ranks.json").read_text())
    (row,) = result["rows"]
    assert [row[name] for name in ranks.SUITE.sizes] == ["gru", 4, 12, 3]
    workers = (
        ["devices"]
        if any(left["name"] == "MPI ranks" for left in result["left_out"])
        else ["devices", "ranks"]
    )
    names = [f"identity, 2/1, 2 {kind}" for kind in workers]
    contenders = {c["name"]: c for c in row["contenders"]}
    assert list(contenders) == ["lax.scan, 1 thread", "Serial, 1 thread", *names]
    assert contenders["Serial, 1 thread"]["gradient_error"] < 1e-6
    errors = [contenders[name]["gradient_error"] for name in names]
    assert 1e-4 < errors[0] < 1.0
    np.testing.assert_allclose(errors, errors[0], rtol=1e-3)
    assert contenders[names[0]]["counted_ratio"] == pytest.approx(2 / 3)


def test_ratios_that_evaluations_allow():
    """On two workers, by hand: half of the layers each, forward in every sweep, the gradient once."""
    n, p = 256, 2
    found = {name: networks.counted_ratio(name, n, p) for name in networks.SETTINGS}
    assert found["identity, 2/1"] == pytest.approx((2 + 1 + 1) / p / 3)
    assert found["identity, 2/2"] == pytest.approx((2 + 2 + 1) / p / 3)
    assert found["Picard, 2/1"] == pytest.approx(
        (2 + 1 + 1 + 1) / p / 3
    )  # once more for what the adjoint finds


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_networks_are_the_same_by_a_scan_in_the_library_and_in_pytorch(name):
    network = networks.NETWORKS[name](4, 8, 2)
    exact = training.trainer(network).gradient
    assert (
        relative_error(training.trainer(network, networks.SERIAL, updates=False).gradient, exact)
        < 1e-5
    )
    if name in ("mlp", "voxels", "paragru", "paralstm"):
        return
    pytest.importorskip("torch", reason="PyTorch is in the extra bench: pip install -e '.[bench]'")
    from benchmarks.torch_loop import Loop

    assert relative_error(Loop(network, 1).gradient, exact) < (
        1e-2 if name == "conv" else 1e-5
    )  # ReLUs switch by rounding


def test_memory_is_that_of_the_compiled_gradient():
    """A scan of float32 keeps two or three states per layer, checkpoints fewer."""
    width, batch = 8, 16
    ways, network = memory.contenders(64), networks.dense(width, 64, batch)
    scanned, checkpointed = (
        memory.bytes_of(network, ways[name]) for name in ("lax.scan", "Serial, checkpoints")
    )
    states = 64 * width * batch * 4
    assert 2 * states <= scanned["temporary_bytes"] < 4 * states
    assert checkpointed["temporary_bytes"] < scanned["temporary_bytes"] / 2
    assert scanned["output_bytes"] >= 64 * (width**2 + width) * 4
    rows = [{"layers": n, "total": 1000 + 10 * n} for n in (8, 16, 32)]
    assert memory.longest(rows, 2000) == pytest.approx(100)


def test_memory_of_a_pipeline_follows_its_formula():
    """A device keeps as much more for more microbatches; with checkpoints an entering state."""
    network, state = networks.dense(16, 8, 64), 64 * 16 * 4
    few, many, again, more = (
        memory.temporaries(network, way, microbatches, 2)
        for way in memory.WAYS[2:]
        for microbatches in (2, 6)
    )
    wanted = memory.formula("pipeline", 8, 6, 2) - memory.formula("pipeline", 8, 2, 2)
    assert 0.7 * wanted < (many - few) / state < 2 * wanted
    assert 0 < more - again < (many - few) / 2


def test_the_kept_memory_of_a_pipeline_is_what_its_page_shows():
    folder = ROOT / "benchmarks" / "results" / "cpu"
    result = json.loads((folder / "memory_pipeline.json").read_text())
    assert (folder / "memory_pipeline.md").read_text() == memory.piped_table(result)


# --- profiles ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:builtin type:DeprecationWarning"
)  # of jaxlib; as an error it ends the process
def test_profile_end_to_end(capsys, monkeypatch):
    monkeypatch.setenv("NPROC", "2")  # set back afterwards
    assert profile.main(["--row", "dense,8,16,4", "--only", "lax.scan", "--calls", "2"]) == 0
    out = capsys.readouterr().out
    assert (
        "lax.scan: dense, width 8, 16 layers, batch 4" in out
        and "dot" in out
        and "all threads together" in out
    )
    with pytest.raises(SystemExit):
        profile.main(["--only", "nonsense"])
    assert "no contender has nonsense in its name" in capsys.readouterr().err


# --- one GPU --------------------------------------------------------------------------------------------------------


def test_gpu_end_to_end(tmp_path, capsys):
    """Tiny tasks anywhere; a second call goes on, and a task that does not fit the seconds left is not begun."""

    def call(*options):
        with (
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            assert gpu.main(["--out", str(tmp_path), *options]) == 0
        return capsys.readouterr().out, json.loads((tmp_path / "gpu.json").read_text())

    only = "--only", "training: dense", "sums", "processor"
    out, result = call("--quick", *only)
    rows = {
        name: [row for row in result["rows"] if row["task"] == name]
        for name in (*only[1:], "gradients")
    }
    assert [row["name"] for row in rows["training: dense"]] == ["lax.scan, unroll=8", "default"]
    for row in rows["training: dense"]:
        assert row["curve"][-1][0] == 2 and 0 <= row["accuracy"] <= 1 and row["update"] > 0
    assert [row["name"] for row in rows["processor"]] == ["kernel", "flops", "bandwidth"]
    assert len(rows["sums"]) == 5 and not rows["gradients"] and not result["left_out"]
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    heads = [cells(line) for line, rule in itertools.pairwise(lines) if rule.startswith("| -")]
    assert heads == [
        ["", "ms an update", "ratio", "predicted ms", "compile s", "updates", "accuracy"],
        ["", "ms", "IQR"],
        ["", "measured", "taken by the default"],
    ]
    assert "### dense, 8 wide, 8 layers" in lines and "\n".join(lines) in out
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")

    _, again = call("--quick", *only)
    assert [row | {"manifest": None} for row in again["rows"]] == [
        row | {"manifest": None} for row in result["rows"]
    ]
    assert all(row["manifest"] == result["manifest"] for row in again["rows"])

    out, short = call("--seconds", "1", "--only", "lengths", "encoder")
    assert [left["name"] for left in short["left_out"]] == ["training: encoder", "lengths"]
    assert short["rows"] == again["rows"] and "Left out: lengths (takes some 80 s; " in out


def test_gpu_tasks_that_fail_or_have_no_data_are_left_out(tmp_path, capsys, monkeypatch):
    def fails(context):
        yield {"title": "a", "name": "b", "seconds": spread([1.0])}
        raise ValueError("no memory")

    monkeypatch.setitem(gpu.TASKS, "sums", (1, fails))
    assert gpu.main(["--quick", "--out", str(tmp_path), "--only", "sums", "encoder"]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert [(left["name"], left["reason"]) for left in result["left_out"]] == [
        ("sums", "ValueError: no memory"),
        ("training: encoder", "needs --data FOLDER"),
    ]
    assert (
        len(result["rows"]) == 1 and "last" not in result["rows"][0]
    )  # the task begins anew in the next call
    assert not (tmp_path / "gpu.png").exists() and "Left out: sums" in capsys.readouterr().out


def test_the_kept_gpu_result_is_what_its_page_and_pictures_show():
    folder = ROOT / "benchmarks" / "results" / "gpu"
    result = json.loads((folder / "gpu.json").read_text())
    assert (folder / "gpu.md").read_text() == gpu.table(result)
    keys = [(row["title"], row["name"]) for row in result["rows"]]
    assert len(keys) == len(set(keys))
    trained = {row["title"] for row in result["rows"] if "curve" in row}
    assert {panel.get_title(loc="left") for panel in gpu.draw(result).axes} == trained
    assert (folder / "gpu.png").read_bytes() == (
        ROOT / "docs" / "images" / "gpu_trainings.png"
    ).read_bytes()


# --- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_model_end_to_end(tmp_path, capsys):
    """Layers are timed alone, a scan alone and on each worker, messages between them; what was calibrated is kept."""
    names = ["lax.scan, 1 thread", "identity, 2/1, 2 devices"]
    contenders = [{"name": name, "threads": 1, "ratio": {"median": 1.0}} for name in names]
    row = {"network": "dense", "width": 4, "layers": 8, "batch": 4, "contenders": contenders}
    (tmp_path / "ranks.json").write_text(json.dumps({"rows": [row]}))

    def run(*options):
        assert model.main(["--quick", "--out", str(tmp_path), *options]) == 0
        return capsys.readouterr().out

    said = run()
    assert "of 1 predictions are within 25%" in said
    machines = {
        name.split()[-1]: machine
        for name, machine in model.read(tmp_path / "machines.json").items()
    }
    assert set(machines) == {"alone", "devices"}
    slower = machines["devices"].forward[0] / machines["alone"].forward[0]
    assert machines["devices"].gradient[0] == pytest.approx(slower * machines["alone"].gradient[0])
    assert machines["devices"].latency > 0 and machines["alone"].latency == 0
    assert run("--kept") == said
    with pytest.raises(SystemExit):
        run("--suites", "none")
    assert "has a row that can be predicted" in capsys.readouterr().err


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]
