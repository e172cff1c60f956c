"""The tunnel: layers that sleep. Errors and evaluations are asserted, times never."""

import json
from pathlib import Path

import pytest

import lp_jax
from benchmarks import emulation, report, tunnel, tunnel_training
from benchmarks.emulation import DATA, KINDS, RELAY, SCAN, Place, pipelined
from benchmarks.group import why_no_mpi
from benchmarks.harness import relative_error
from lp_jax import MGRIT, Picard, Serial, planning, train

ROOT = Path(__file__).resolve().parents[2]
FAST = emulation.machine([1e-5, 1e-5, 1e-5])
LAYERS = 8


def evaluated(name, workers=2):
    """Error of the gradient, and evaluations of a layer, of its transpose for the state and of that for its weights."""
    exact = emulation.build(SCAN, Place("devices", 1), LAYERS, FAST).gradient
    program = emulation.build(name, Place("devices", workers), LAYERS, FAST)
    counts = [program.facts["evaluations"][kind] / LAYERS for kind in KINDS]
    return relative_error(program.gradient, exact), counts


EXACT = [RELAY, emulation.DEFAULT, DATA]
EXACT += [pipelined(m) for m in emulation.MICROBATCHES[:2] if hasattr(lp_jax, "pipeline")]


@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_evaluate_each_layer_once(name):
    """A part of the examples counts as that part of a layer."""
    error, counts = evaluated(name)
    assert error < 1e-6 and counts == pytest.approx([1, 1, 1])


def test_iterations_evaluate_as_often_as_the_planner_counts():
    """Layers at once count one by one, and so do those of all devices."""
    error, counts = evaluated("sweeps, 2/1")
    assert counts == pytest.approx([3, 1, 1]) and 1e-4 < error < 0.5
    error, counts = evaluated(emulation.INTERVALS)
    assert counts == pytest.approx([2, 2, 1]) and error < 1e-6
    schedule = planning.training_step(Picard(sweeps=2), Picard(sweeps=1), LAYERS, workers=2)
    assert schedule.work() == (3 + 1 + 1) * LAYERS / 2


def test_the_wind_blows_for_layers_and_parts_of_them():
    wind = emulation.Wind(emulation.machine([1e-4, 2e-4, 3e-4]))
    wind.blows = False
    for kind, layers in (("forward", 2.0), ("forward", 0.25), ("gradient", 1.0)):
        wind.spend(kind, layers)
    assert wind.counted() == {"forward": 2.25, "adjoint": 0, "gradient": 1}
    assert not any(wind.counted().values())


def test_a_machine_is_scaled_and_keeps_its_ratio():
    scaled = emulation.accelerator("H200", 0.02)
    times = [scaled.seconds(kind, 1) for kind in KINDS]
    assert sum(times) == pytest.approx(3 * 0.02) and scaled.seconds("forward", 4) == 4 * times[0]
    filled = planning.estimate(emulation.wide(64), device="H200")
    assert times[0] / times[1] == pytest.approx(filled.forward[0] / filled.adjoint[0])


def test_ideal_speedups_of_relay_and_pipeline():
    """By hand: forward and back take M + P - 1 turns of 1 / (M P) each, the weights' gradients 1 / P."""
    found = {
        name: [
            emulation.ideal(SCAN, 64, FAST, 1) / emulation.ideal(name, 64, FAST, p)
            for p in (2, 4, 8)
        ]
        for name in (RELAY, pipelined(4), pipelined(8), DATA)
    }
    assert found[RELAY] == pytest.approx([1.2, 4 / 3, 24 / 17])
    assert found[pipelined(4)] == pytest.approx([1.714, 2.667, 3.692], abs=1e-3)
    assert found[pipelined(8)] == pytest.approx([1.846, 3.2, 5.053], abs=1e-3)
    assert found[DATA] == pytest.approx([2, 4, 8])
    assert emulation.ideal("sweeps, 2/1", 64, FAST, 2) is None


def test_speedups_are_over_the_emulated_device():
    contender = {"name": "a", "seconds": {"median": 2.0}, "predicted_seconds": 1.5}
    found = tunnel.judged({**contender, "ideal_seconds": None}, awake=0.5, alone=3.0)
    assert (found["speedup"], found["net_speedup"], found["predicted_speedup"]) == (1.5, 2.0, 2.0)
    assert found["ideal_speedup"] is None and found["net_over_predicted"] == 1.0
    assert tunnel.judged({**contender, "ideal_seconds": 1.0}, 2.5, 3.0)["net_speedup"] is None


def test_tunnel_end_to_end(tmp_path, capsys):
    options = ["--quick", "--devices", "1", "2", "--tau", "0.1,0.1,0.1", "--rounds", "1"]
    only = ["--only", "relay", "sweeps, 2/1", "lax.scan"]
    assert tunnel.main([*options, *only, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "tunnel.json").read_text())
    one, two = result["rows"]
    assert [c["name"] for c in one["contenders"]] == [SCAN]
    relay, sweeps = two["contenders"]
    assert relay["name"] == RELAY and relay["gradient_error"] < 1e-6
    assert list(relay["evaluations"].values()) == pytest.approx([1, 1, 1])
    assert sweeps["gradient_error"] > 1e-4 and sweeps["predicted_speedup"] == pytest.approx(1.2)
    assert sweeps["ideal_speedup"] is None and relay["ideal_speedup"] == pytest.approx(1.2)
    assert tunnel.table(two) in (tmp_path / "tunnel.md").read_text() and tunnel.table(two) in said
    assert (tmp_path / "tunnel.png").read_bytes().startswith(b"\x89PNG")
    assert "sweeps, 2/1" in tunnel.short(result) and "rounding" in tunnel.short(result)


def test_pages_show_the_layers_that_were_measured_in_most_places():
    """Of layers that were measured in as many places, the longest."""
    rows = [{"milliseconds": time} for time in (10, 20, 20, 40)]
    assert tunnel.longest({"rows": rows}) == rows[1:3]
    assert tunnel.longest({"rows": rows[1:] + rows[3:]}) == [rows[3]] * 2


@pytest.mark.slow
@pytest.mark.skipif(why_no_mpi() is not None, reason=f"MPI ranks: {why_no_mpi()}")
def test_ranks_of_the_tunnel_share_the_layers(tmp_path):
    """Gradients are put together, and evaluations of all ranks are added up."""
    options = ["--quick", "--devices", "--ranks", "2", "--tau", "0.1", "--rounds", "1"]
    only = ["--only", "relay", "sweeps, 2/1"]
    assert tunnel.main([*options, *only, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "tunnel.json").read_text())["rows"]
    relay, sweeps = row["contenders"]
    assert relay["gradient_error"] < 1e-6 and 1e-4 < sweeps["gradient_error"] < 0.5
    assert list(relay["evaluations"].values()) == pytest.approx([1, 1, 1])
    assert list(sweeps["evaluations"].values()) == pytest.approx([3, 1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "3"], "take powers of two"),
        (["--tau", "1,2"], "one number above 0, such as 20, or three"),
        (["--devices", "--ranks"], "both empty"),
        (["--pages", "/nowhere"], "holds no tunnel.json"),
    ],
)
def test_bad_options_are_refused_with_what_is_wanted(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        tunnel.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_pages_are_written_by_their_first_words(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\nExact on eight: 2\nand more.\n\n| a b | c |\n| - | - |\n\nThe end\n"
    )
    report.write_pages({"page.md": ["Exact on eight: 3.", "| a b | d |\n| - | - |"]}, tmp_path)
    assert (
        page.read_text() == "# A page\n\nExact on eight: 3.\n\n| a b | d |\n| - | - |\n\nThe end\n"
    )
    with pytest.raises(ValueError, match="no paragraph that begins"):
        report.write_pages({"page.md": ["Nothing like it."]}, tmp_path)


@pytest.mark.parametrize("suite", [tunnel, tunnel_training], ids=lambda suite: suite.__name__)
def test_pages_say_what_is_kept(suite):
    name = suite.__name__.rpartition(".")[2]
    folder = ROOT / "benchmarks" / "results" / "cpu"
    result = report.kept(folder, name)
    assert (folder / f"{name}.md").read_text() == suite.text(result)
    for page, paragraphs in suite.texts(result).items():
        assert all(text in (ROOT / page).read_text() for text in paragraphs), page


# --- trainings ------------------------------------------------------------------------------------------------------


def logged(*rows):
    log = train.Log()
    for kind, step, columns in rows:
        log.write(kind=kind, step=step, **columns)
    return log


def test_emulated_seconds_count_cycles_that_were_taken_and_probes():
    """Two cycles in the first step, none (it was serial) in the second; the adjoint took three when it was looked at."""
    solver = MGRIT(iterations=4, rtol=1e-1)
    log = logged(
        ("control", 1, {"gradients": 8}),
        ("train", 1, {"forward_residual_1": 1.0, "forward_residual_2": 0.1}),
        ("adjoint", 1, {f"adjoint_residual_{n}": 1.0 for n in (1, 2, 3)}),
        ("test", 1, {"accuracy": 0.2}),
        ("train", 2, {}),
        ("test", 2, {"accuracy": 0.8}),
    )
    asked = []

    def seconds(forward, adjoint):
        asked.append((forward, adjoint))
        return 1.0 if forward.exact else 10.0 * forward.iterations + adjoint.iterations

    training = tunnel_training.Training(log, (solver, solver))
    assert list(training.seconds(seconds, probe=0.5)) == [(1, 27.0, 0.2), (2, 28.0, 0.8)]
    assert not any(each.has_tolerance for pair in asked for each in pair)
    assert training.cycles == 1.0 and asked[1] == (Serial(), Serial())
    fixed = tunnel_training.Training(log, (Serial(), Serial()))
    assert [test[1] for test in fixed.seconds(seconds, probe=0.5)] == [5.0, 6.0]


def test_every_method_of_a_training_is_a_row():
    """Each by a program of its own; their first losses are compared with exact ones."""
    logs = [logged(("train", 1, {"loss": x}), ("test", 1, {"accuracy": 0.95})) for x in (1.0, 1.5)]
    made = []

    def run(method):
        made.append(method)
        return tunnel_training.Training(logs[method.pair[0] != Serial()], method.pair)

    task = tunnel_training.TASKS[0]
    rows = list(tunnel_training.rows_of(task, FAST, [1, 2, 4], run, lambda name: True))
    assert [method.name for method in made] == [row["method"] for row in rows]
    assert len(rows) == 1 + 2 * 4 and [row["workers"] for row in rows[1::4]] == [2, 4]
    relay, pipeline, few, _ = rows[5:]
    assert relay["speedup"] == pytest.approx(4 / 3) and pipeline["speedup"] > relay["speedup"]
    assert (
        pipeline["method"] == pipelined(8)
        and made[6].microbatches == 8
        and not made[5].microbatches
    )
    assert (relay["difference"], few["difference"]) == (0, 0.5)
    result = {"rows": rows}
    assert tunnel_training.FIELD[0] in tunnel_training.headline(result)
    assert tunnel_training.FIELD[0] in tunnel_training.short(result)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_tunnel_training_end_to_end(tmp_path, capsys):
    """Programs of two devices have the numbers of the scan; so have two cycles over two intervals."""
    only = ["--only", "dense", "--methods", "relay", "pipeline", "2/1", "--devices", "1", "2"]
    assert tunnel_training.main(["--quick", *only, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "tunnel_training.json").read_text())
    scan, relay, pipeline, few = result["rows"]
    assert [row["method"] for row in (scan, relay, few)] == [SCAN, RELAY, tunnel_training.FEW]
    assert relay["steps"] == pipeline["steps"] == scan["steps"] and scan["accuracy"] >= 0.2
    assert max(row["difference"] for row in (relay, pipeline, few)) < 1e-5
    assert few["cycles"] == 2 and 1 < relay["speedup"] < pipeline["speedup"]
    table = tunnel_training.table(result["rows"])
    assert table in (tmp_path / "tunnel_training.md").read_text()
    assert table in capsys.readouterr().out
