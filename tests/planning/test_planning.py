"""The cost model: its terms by hand, and the files of machines."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import mesh
from problems import machine, relative_error
from products import layer

import lp_jax
from lp_jax import planning
from lp_jax._choice import _processor
from lp_jax._choice._fastest import SERIAL
from lp_jax.planning import _calibrate, _measure, _plan
from lp_jax.planning._cost import pipeline
from lp_jax.planning._result import Probed

BENCHMARKS = Path(lp_jax.__file__).parents[1] / "benchmarks"

MACHINE = planning.Machine(
    at_once=(1, 8, 64),
    forward=(0.5, 2.0, 9.0),
    adjoint=(1.0, 4.0, 18.0),
    gradient=(1.5, 5.0, 20.0),
    latency=0.25,
    bandwidth=1000.0,
    state_bytes=500,
    layer_bytes=100,
    name="by hand",
)

ONE = dict.fromkeys(("at_once", "forward", "adjoint", "gradient"), (1,))


def test_sweeps_by_hand_on_one_worker_and_on_eight():
    """Three sweeps and a last evaluation, two adjoint sweeps and the gradient; each sweep sends a prefix sum of states."""
    serial = planning.predict(*SERIAL, 64, MACHINE)
    assert serial[:4] == (64 * 3.0, 0.0, 0.0, 0.0) and serial.seconds == 192.0
    checkpointed = lp_jax.Serial(checkpoint_every=8)  # one forward propagation more
    assert planning.predict(checkpointed, checkpointed, 64, MACHINE).evaluations == 64 * (3.0 + 0.5)
    solvers = lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2)
    assert planning.predict(*solvers, 64, MACHINE).evaluations == 4 * 9.0 + 2 * 18.0 + 20.0
    cost = planning.predict(*solvers, 64, MACHINE, workers=8)
    hops = 1 + 3  # to the neighbour, and over the seven before the last
    assert cost.evaluations == 4 * 2.0 + 2 * 4.0 + 5.0
    assert (cost.messages, cost.reductions) == ((5 * hops + 2) * 0.75, 2 * 2 * 3 * 0.75)


def test_relaxation_takes_a_part_of_a_sweep():
    """Layers of different intervals need no sum of their states; the gradient of the parameters has none in a sweep either."""
    solver = lp_jax.MGRIT(coarsening=8, iterations=1, coarse_step=lp_jax.Identity(), storage="all")
    faster, step = (
        dataclasses.replace(MACHINE, relaxation=0.5),
        planning.training_step(solver, solver, 64),
    )
    assert {layers for _, layers in step.batches} == {8}
    expected = (
        1.0 * step.depth("forward", "linearise")
        + 2.0 * step.depth("adjoint")
        + 5.0 * step.depth("gradient")
    )
    assert planning.predict(solver, solver, 64, faster).evaluations == expected
    for other in (lp_jax.Picard(sweeps=2), lp_jax.MGRIT(coarsening=8, at_once=1)):
        assert planning.predict(other, other, 64, faster) == planning.predict(
            other, other, 64, MACHINE
        )
    looped = planning.training_step(solver, solver, 64, at_once=1)
    assert planning.predict(solver, solver, 64, machine(1.0)).evaluations == looped.work()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"at_once": (8, 1, 64)}, "ascending"),
        ({"forward": (1.0, 2.0)}, "forward needs a time for each number in at_once"),
        ({"adjoint": (1.0, -2.0, 3.0)}, "adjoint must be positive"),
        ({"examples": 0}, "examples must be at least 1; got 0"),
        ({"overhead": 1.5}, "overhead must be a number from 0 to 1; got 1.5"),
        ({"newton": (1.0,)}, "newton needs a time for each number"),
        ({"latency": math.nan}, "latency must be a number from 0 to inf; got nan"),
        ({"bandwidth": 0.0}, "bandwidth must be a number from 0 to inf; got 0.0"),
    ],
)
def test_a_machine_refuses_impossible_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        machine(1.0, 2.0, 3.0, **({"at_once": (1, 8, 64)} | fields))


def test_machines_are_saved_and_read_and_other_files_are_refused_in_one_line(tmp_path):
    path = tmp_path / "machine.json"
    for saved in (MACHINE, machine()):
        saved.save(path)
        assert planning.Machine.load(path) == saved
    for text in (
        "",
        "[1, 2]",
        '{"at_once": [1]}',
        '{"layers": [1]}',
        '{"cores": 2}',
        '{"at_once": "all"}',
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no machine file") as caught:
            planning.Machine.load(path)
        assert "\n" not in str(caught.value)


def deep(layers, examples=2):
    params = jnp.asarray(np.random.default_rng(0).normal(size=(layers, 4, 4)))
    return lp_jax.Problem(layer, params, jnp.ones((examples, 4)))


def test_calibration_measures_the_network_that_it_is_given():
    def step(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params * layer.shared + layer.data[None])

    problem = lp_jax.Problem(
        step,
        jnp.zeros((16, 4, 4)),
        jnp.ones((8, 4)),
        shared=jnp.ones(()),
        data=jnp.zeros((16, 4)),
        t1=3.0,
    )
    machine = lp_jax.calibrate(problem, newton=True, name="small")
    assert machine.at_once == (1, 2, 16) and machine.name == "small" and machine.examples == 8
    assert (machine.state_bytes, machine.layer_bytes) == (8 * 4 * 8, 4 * 4 * 8)
    assert len(machine.newton) == 3 and 0 <= machine.overhead <= 1


@pytest.fixture
def measured(monkeypatch, clock):
    """The measurements that start, which take a second each, and the number of layers; the times that they return."""
    started = []
    times = {
        "serial": lambda problem: (1e-5, 2e-5),
        "sweep": lambda problem, at_once: [2e-4, 3e-4, 4e-4],
        "iteration": lambda problem, solver: 3e-4,
    }

    def watch(name):
        def measure(problem, *args):
            started.append((name, problem.layers))
            clock[0] += 1.0
            return times[name](problem, *args)

        return measure

    for name in times:
        monkeypatch.setattr(_measure, name, watch(name))
    return started, times


def test_newton_is_measured_while_an_iteration_is_faster_than_serial_propagation_through_all_layers(
    measured,
):
    """An iteration takes ten layers' time, whatever their number: slower than a layer, faster than all 64."""
    started, times = measured
    machine = lp_jax.calibrate(deep(64), newton=True)
    assert [n for what, n in started if what == "iteration"] == [2, 2, 8, 64]
    assert machine.newton == (1.5e-4, 3e-4, 3e-4, 3e-4)
    started.clear()
    times["iteration"] = lambda problem, solver: 1.0 * problem.layers
    assert lp_jax.calibrate(deep(64), newton=True).newton == (1.0, 2.0, 8.0, 64.0)
    assert [n for what, n in started if what == "iteration"] == [2]


@pytest.mark.parametrize(
    ("guess", "wanted"),
    [
        (machine(1e-6), [("serial", 64)]),
        (machine(1e-3), [("serial", 10)]),
        (machine(1.0), [("serial", 8)]),
        (
            machine(1e-5, 2e-5, 3e-5, at_once=(1, 2, 16)),
            [("serial", 64), ("sweep", 64), ("sweep", 8)],
        ),
    ],
    ids=["short layers in a loop", "layers in a loop", "long layers in a loop", "sixteen at once"],
)
def test_calibration_goes_by_an_estimate(measured, monkeypatch, guess, wanted):
    """Of layers one after another, as many are timed as take 30 ms, and eight at least. Others are timed in sweeps."""
    monkeypatch.setattr(_calibrate, "estimate", lambda problem: guess)
    found = lp_jax.calibrate(deep(64))
    assert found.at_once == guess.at_once and measured[0] == wanted
    assert found.per_layer == (1e-5, 2e-5) and found.adjoint[0] == found.gradient[0]


@pytest.mark.parametrize(
    ("seconds", "wanted", "left_out"),
    [
        (0.0, [], "serial propagation, sweeps, fewer examples, Newton's method"),
        (1.0, ["serial"], "sweeps, fewer examples, Newton's method"),
        (2.0, ["serial", "sweep"], "sweeps, fewer examples, Newton's method"),
        (6.0, ["serial", *["sweep"] * 3, "serial", "iteration"], "longer runs of Newton's method"),
        (math.inf, ["serial", *["sweep"] * 3, "serial", *["iteration"] * 4], ""),
    ],
)
def test_no_measurement_starts_when_time_is_over(measured, monkeypatch, seconds, wanted, left_out):
    """Calibration has half of the time. What is left out is named, and estimated relative to serial propagation."""
    started, _ = measured
    monkeypatch.setattr(_plan, "_probe", lambda *args: lambda *pair: probed(0.5))
    problem = deep(64, examples=8)
    found = lp_jax.plan(problem, seconds=2 * seconds)
    assert [name for name, _ in started] == wanted
    assert found.note == (
        f"Left out for lack of time: {left_out}." if left_out else ""
    ) and found.note in str(found)
    guess, times = planning.estimate(problem), found.machine
    if not wanted:
        assert times.per_layer == guess.per_layer
    if "sweep" not in wanted:
        assert times.forward == pytest.approx(
            [x * times.forward[0] / guess.forward[0] for x in guess.forward]
        )
        assert times.adjoint == pytest.approx(
            [x * times.adjoint[0] / guess.forward[0] for x in guess.forward]
        )


def test_a_plan_says_its_time_first_and_probes_although_calibration_took_all_of_it(
    measured, monkeypatch, clock, capsys
):
    """Otherwise no error of a gradient would be known."""

    def probe(*pair):
        clock[0] += 1.0
        return probed(0.5)

    monkeypatch.setattr(_plan, "_probe", lambda *args: probe)
    found = lp_jax.plan(deep(64), seconds=1.0)
    assert capsys.readouterr().err.startswith("plan: at most 1 s;")
    assert any(choice.probed for choice in found.choices) and "?" not in str(found)
    with pytest.raises(ValueError, match="error must be"):
        lp_jax.plan(deep(64), error=0.0)
    assert len(measured[0]) == 1 and not capsys.readouterr().err


def test_a_measurement_starts_only_if_the_longest_one_would_fit(clock):
    deadline = _measure.Deadline(10.0)
    for spent, allowed in ((4.0, True), (2.0, True), (0.0, True), (0.0, True)):
        assert deadline.allows("short") == allowed
        clock[0] += spent
    clock[0] += 0.5  # 3.5 seconds are left, and the longest measurement took 4
    assert not deadline.allows("long") and deadline.left_out == ["long"]


def test_long_calls_have_few_samples(monkeypatch):
    """Fifteen samples, or those that start in two seconds; a given number is always taken."""
    monkeypatch.setattr(_measure, "_SAMPLES", 15)
    for spent, options, wanted in (
        (1.5, {}, 2),
        (1e-3, {}, 15),
        (5.0, {"samples": 3, "repeats": 1}, 3),
    ):
        now, calls = [0.0], []
        monkeypatch.setattr(_measure, "time", SimpleNamespace(perf_counter=lambda now=now: now[0]))
        monkeypatch.setattr(_measure, "_SAMPLE", 1e-9)

        def call(now=now, calls=calls, spent=spent):
            calls.append(1)
            now[0] += spent

        assert _measure.seconds([call], **options) == [pytest.approx(spent)]
        assert (
            len(calls) - (1 if "repeats" in options else 2) == wanted
        )  # compiled, and timed for the repeats


# --- examples, memory, pipelines ------------------------------------------------------------------------------------


def test_half_of_the_examples_take_the_time_of_half_of_the_layers():
    """Times of a batch are interpolated between the sizes measured."""
    assert [MACHINE.seconds("forward", size) for size in (1, 8, 36, 64, 128)] == [
        0.5,
        2.0,
        5.5,
        9.0,
        18.0,
    ]
    machine = dataclasses.replace(MACHINE, examples=50, overhead=0.5, kept_bytes=40)
    half = machine.divided(2)
    assert [half.seconds("forward", n) for n in (16, 128)] == [
        2.0,
        9.0,
    ]  # as 8 and 64 of whole ones
    assert half.per_layer == (0.375, 1.875)  # half of a single layer shrinks
    assert (half.examples, half.state_bytes, half.kept_bytes, half.layer_bytes) == (
        25,
        250,
        20,
        100,
    )
    quarter, again = machine.divided(4), half.divided(2)
    assert again.seconds("forward", 1) == pytest.approx(quarter.seconds("forward", 1)) == 0.3125
    assert machine.divided(1) is machine
    looped = (planning.Machine(**ONE, overhead=part).divided(4) for part in (0.0, 1.0))
    assert [one.seconds("adjoint", 1) for one in looped] == [0.25, 1.0]
    batch = planning.Machine(**ONE | {"at_once": (8,)}, examples=8).divided(
        2
    )  # only a batch is known
    assert [batch.seconds("forward", n) for n in (16, 32)] == [1.0, 2.0]


def test_gradients_are_summed_over_workers_with_other_examples():
    """Up and down a tree of four, half of the layers."""
    machine = dataclasses.replace(MACHINE, examples=8)
    cost = planning.predict(*SERIAL, 64, machine, workers=2, data_workers=4)
    assert cost.gradients == 2 * 2 * 0.25 + 2 * 3 / 4 * 32 * 100 / 1000
    assert planning.predict(*SERIAL, 64, machine).gradients == 0
    with pytest.raises(ValueError, match="data_workers=9 is more than the 8 examples"):
        planning.predict(*SERIAL, 64, machine, data_workers=9)
    half = planning.predict(
        *SERIAL, 64, dataclasses.replace(machine, kept_bytes=40), data_workers=2
    )
    assert (half.parameters, half.kept) == (2 * 64 * 100, 64 * (250 + 20))
    for solver in (
        lp_jax.Serial(),
        lp_jax.Picard(),
        lp_jax.MGRIT(storage="all"),
        lp_jax.MGRIT(at_once=math.inf),
    ):
        alone, eighth = (
            planning.predict(solver, solver, 64, machine, workers=p)[4:] for p in (1, 8)
        )
        assert eighth == tuple(x / 8 for x in alone)


def test_newton_takes_what_was_measured_of_it():
    solver = lp_jax.Newton(iterations=3, batch_axes=1)
    machine = dataclasses.replace(MACHINE, newton=(10.0, 20.0, 90.0), examples=10)
    cost = planning.predict(solver, solver.for_adjoint(), 64, machine)
    assert cost.evaluations == 4 * 90.0 + 9.0 + 20.0
    assert machine.divided(2).seconds("newton", 128) == 90.0
    with pytest.raises(
        NotImplementedError,
        match=r"by hand has no times of Newton's method: calibrate\(newton=True\)",
    ):
        planning.predict(solver, solver.for_adjoint(), 64, MACHINE)
    size = 500 / 10 * 500 / 10 / 4  # bytes of a Jacobian
    assert cost.working == 6 * 64 * 500 + 3 * 64 * 10 * size


def test_a_pipeline_by_hand():
    """Four microbatches through two workers: five turns of 32 layers, each a quarter of the examples, and two messages.

    Then the gradients, a third of the work. With one microbatch it is the relay.
    """
    machine = dataclasses.replace(MACHINE, examples=8)
    f, a, g = MACHINE.forward[0], MACHINE.adjoint[0], MACHINE.gradient[0]
    assert pipeline(64, machine, 2, 4).seconds == pytest.approx(
        5 * (32 * (f + a) / 4 + 2 * (0.25 + 125 / 1000)) + 4 * 32 * g / 4
    )
    for workers in (1, 4):
        relay = planning.predict(*SERIAL, 64, machine, workers=workers)
        one = pipeline(64, machine, workers, 1)
        assert one.evaluations == relay.evaluations and one.kept == relay.kept


@pytest.mark.parametrize("layers", [256, 16384])
def test_memory_is_what_the_compiler_says(layers):
    """Of the committed results of suite memory: within 5 % in all, within 30 % of what is neither argument nor result."""
    results = json.loads((BENCHMARKS / "results" / "cpu" / "memory.json").read_text())
    state = 32 * 64 * 4
    looped = machine(state_bytes=state, kept_bytes=2 * state, layer_bytes=65 * 64 * 4)
    rows = [row for row in results["rows"] if row["layers"] == layers]
    assert len(rows) == 11
    named = {"lax.scan": lp_jax.Serial(), "global Picard, 3/2": lp_jax.Picard(sweeps=3)}
    named["Serial, checkpoints"] = lp_jax.Serial(checkpoint_every=math.isqrt(layers))
    for row in rows:
        storage = "all" if "all states" in row["name"] else "c_points"
        cycles = lp_jax.MGRIT(
            coarsening=16, storage=storage, at_once=1 if "looped" in row["name"] else math.inf
        )
        solver = named.get(row["name"], cycles)
        found = planning.predict(solver, solver, layers, looped)
        assert found.bytes == pytest.approx(row["total"], rel=0.05), row["name"]
        assert found.kept + found.working == pytest.approx(row["temporary_bytes"], rel=0.3), row[
            "name"
        ]


# --- plans ----------------------------------------------------------------------------------------------------------

UNFILLED = machine(
    1e-5,
    1e-5,
    at_once=(1, 1024),
    examples=32,
    overhead=1.0,
    name="a device that a layer does not fill",
)
LOOPED = machine(1e-5, examples=32)


def probed(error, iterations=3):
    return Probed(error, iterations, iterations)


def probe_with(errors):
    """A probe with known errors by solver, and the solvers that it was asked for."""
    asked = []

    def probe(solver, adjoint_solver):
        asked.append(solver)
        return Probed(errors(solver), solver.iterations, adjoint_solver.iterations)

    return probe, asked


@pytest.fixture
def clock(monkeypatch):
    """A clock of the planner that stands still: ``clock[0]`` is the time."""
    now = [100.0]
    monkeypatch.setattr(_measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_the_fastest_solver_that_is_exact_enough_is_chosen():
    probe, asked = probe_with(lambda solver: 1e-3 if isinstance(solver, lp_jax.MGRIT) else 0.5)
    found = planning.choose(1024, UNFILLED, probe=probe, seconds=1e9)
    assert isinstance(found.solver, lp_jax.MGRIT) and found.unprobed == 0
    assert all(c.error > 1e-2 for c in found.choices if c.cost.seconds < found.best.cost.seconds)
    assert asked[-1] == found.solver  # slower ones are not probed
    assert found.speedup == found.serial.cost.seconds / found.best.cost.seconds > 1
    assert found.reason.endswith("times as fast as serial propagation on one worker.")


@pytest.mark.parametrize("secant", [1e-3, math.nan])
def test_secant_sweeps_are_probed_where_plain_sweeps_diverge(secant):
    probe, asked = probe_with(
        lambda solver: secant if isinstance(solver, lp_jax.Secant) else math.nan
    )
    found = planning.choose(1024, UNFILLED, probe=probe, seconds=1e9)
    loosest = [
        type(solver) for solver in asked if isinstance(solver, lp_jax.Picard | lp_jax.Secant)
    ]
    assert loosest[:2] == [lp_jax.Picard, lp_jax.Secant]
    if secant < 1:
        assert isinstance(found.solver, lp_jax.Secant)
    else:
        assert isinstance(found.solver, lp_jax.Serial) and len(loosest) == 2
        assert re.match(
            r"\d+ solvers predicted faster .*none with a gradient error of at most 1e-02\.",
            found.reason,
        )


def test_solvers_left_out_for_lack_of_time_are_counted():
    probe, asked = probe_with(lambda solver: 1.0)
    found = planning.choose(
        1024, UNFILLED, probe=probe, seconds=0.0, solvers=[lp_jax.Picard(sweeps=3)]
    )
    assert found.unprobed > 2 and not asked
    assert found.reason == f"Left out for lack of time: {found.unprobed} faster solvers."
    one = dataclasses.replace(
        planning.choose(1024, UNFILLED, probe=lambda *pair: probed(1e-3)), unprobed=1
    )
    assert one.reason.endswith("on one worker. Left out for lack of time: 1 faster solver.")


def test_solvers_of_the_user_are_probed_first_and_a_compiled_program_runs_to_its_end(clock):
    def errors(solver):
        clock[0] += 0.2
        return 0.5 if len(asked) < 4 else 1e-3

    probe, asked = probe_with(errors)
    own = lp_jax.Picard(sweeps=3)
    found = planning.choose(1024, UNFILLED, probe=probe, seconds=0.3, solvers=[own])
    assert asked[0] == own and len(asked) == 4  # time is over after two; the fourth is exact enough
    assert found.best.error == 1e-3 and found.unprobed == 0


def network_of_shapes(examples, data):
    """Eight layers, whose inputs have examples or are one number; nothing to run."""

    def step(y, at):
        inputs = at.shared[None] + (at.data if data else 0)
        return y + at.dt * jnp.tanh(y @ at.params + inputs)

    weights, state, shared = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16, 16), (examples, 16), (16,))
    )
    inputs = jax.ShapeDtypeStruct((8, *data), jnp.float32) if data else None
    return lp_jax.Problem(step, weights, state, data=inputs, shared=shared)


def test_ways_to_spread_a_network_are_compiled_and_compared():
    """Each of four devices has a quarter of what is spread: of the weights, or of the examples."""
    mesh = jax.make_mesh((4,), ("any",), devices=jax.devices()[:4])
    found = lp_jax.plan(
        network_of_shapes(8, ()), topology=mesh, solvers=[lp_jax.Picard(sweeps=1)], error=1e-3
    )
    weights, state, shared = 8 * 16 * 16 * 4, 8 * 16 * 4, 16 * 4
    by_layer = weights // 4 + state + shared
    assert {way: one.memory["arguments"] for way, one in found.spread.items()} == {
        "one device": weights + state + shared,
        "examples": weights + state // 4 + shared,
        "weights": (weights + state) // 4 + shared,
        "layers: pipeline": by_layer,
        "layers and examples: pipeline": (weights + state) // 2 + shared,
        "layers: Fastest()": by_layer,
        "layers: Serial()": by_layer,
        "layers: Picard(sweeps=1)": by_layer,
    }
    assert not found.spread["one device"].messages and found.spread["examples"].messages
    assert found.workers == 4 and found.solver == lp_jax.Serial()  # no error is known
    lines = str(found).split("A loss and its gradient, compiled\n")[1].splitlines()
    assert len(lines) == 1 + len(found.spread) and lines[0].split()[:2] == ["GiB", "a"]
    assert lines[1].split()[1] == "fits" and lines[1].endswith("  one device")


def test_without_examples_for_every_device_only_layers_are_spread():
    """Nor are there pipelines where layers have data, which may be of single examples, too."""
    mesh = jax.make_mesh((2,), ("any",), devices=jax.devices()[:2])
    divided = lp_jax.plan(network_of_shapes(2, (2, 16)), topology=mesh).spread
    inputs = 8 * 2 * 16 * 4
    assert divided["one device"].memory["arguments"] == 2 * (
        divided["weights"].memory["arguments"] - 16 * 4 // 2
    )
    assert divided["layers: Serial()"].memory["arguments"] >= inputs // 2
    assert not [way for way in divided if "pipeline" in way]
    three = jax.make_mesh((3,), ("any",), devices=jax.devices()[:3])
    odd = lp_jax.plan(network_of_shapes(3, ()), topology=three).spread
    assert [way for way in odd if "pipeline" in way] == ["layers: pipeline"]
    found = lp_jax.plan(network_of_shapes(3, ()), topology=mesh)
    assert list(found.spread) == ["one device", "layers: Fastest()", "layers: Serial()"]
    full = planning.Compiled("a chip", 1, {"all": 2**31}, 2**30, 1.0)
    lines = str(dataclasses.replace(found, spread={"one device": full})).splitlines()
    assert lines[-1].split()[:4] == ["2", "OUT", "OF", "MEMORY"]


@pytest.mark.parametrize(
    ("machine", "probe", "reason"),
    [
        (
            UNFILLED,
            None,
            r"\d+ solvers predicted faster than serial .*Their gradient errors were not measured",
        ),
        (
            machine(1e-5, 1.0, at_once=(1, 64)),
            None,
            "No parallel solver is predicted 1.15 .*a layer fills the device",
        ),
        (LOOPED, lambda *pair: probed(0.0), "No parallel solver.*layers run one after another"),
    ],
    ids=["not measured", "a layer fills the device", "one after another"],
)
def test_the_reason_for_serial_propagation_is_said(machine, probe, reason):
    found = planning.choose(64, machine, probe=probe)
    assert isinstance(found.solver, lp_jax.Serial) and re.match(reason, found.reason)


def test_nonsense_is_refused():
    for fields, message in (
        ({"layers": 0}, "layers must be at least 1; got 0"),
        ({"workers": 65}, "workers must be from 1 to the number of layers, 64"),
        ({"error": 0.0}, "error must be a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            planning.choose(**({"layers": 64, "machine": LOOPED} | fields))


def test_errors_are_those_of_the_gradient(monkeypatch):
    """Against jax.grad through a scan, on the same loss."""
    rng = np.random.default_rng(0)
    params, y0 = jnp.asarray(rng.normal(size=(32, 6, 6)) / 3), jnp.asarray(rng.normal(size=(5, 6)))

    def loss(params, solver, adjoint_solver):
        y1 = lp_jax.solve(
            layer, params, y0, t1=2.0, solver=solver, adjoint_solver=adjoint_solver
        ).y1
        return 0.5 * jnp.sum(y1**2)

    def exact(params):
        y1, _ = jax.lax.scan(lambda y, w: (y + 2.0 / 32 * jnp.tanh(y @ w), None), y0, params)
        return 0.5 * jnp.sum(y1**2)

    problem, cycles = lp_jax.Problem(layer, params, y0, t1=2.0), _plan.cycles
    monkeypatch.setattr(_plan, "cycles", lambda *args: cycles(*args)[:1])  # each is a program
    found = lp_jax.plan(problem, machine=UNFILLED, error=1e-12, seconds=1e9)
    e = np.asarray(jax.jit(jax.grad(exact))(params))
    looked_at = {type(c.solver): c for c in found.choices if c.probed is not None}
    assert looked_at.keys() == {lp_jax.Picard, lp_jax.Secant, lp_jax.MGRIT}
    for choice in looked_at.values():
        g = jax.jit(jax.grad(loss))(params, choice.solver, choice.adjoint_solver)
        assert relative_error(g, e) == pytest.approx(choice.error, rel=0.1)
    chosen = lp_jax.plan(problem, machine=UNFILLED, error=1e-2)
    assert isinstance(chosen.solver, lp_jax.Picard) and chosen.best.error <= 1e-2
    assert eval(f"dict({chosen.code})") == {
        "solver": chosen.solver,
        "adjoint_solver": chosen.adjoint_solver,
    }
    assert chosen.best.probed.iterations < 32  # and so many are counted
    sweeps = (chosen.best.probed.iterations, chosen.best.probed.adjoint_iterations)
    taken = planning.predict(*(lp_jax.Picard(sweeps=n) for n in sweeps), 32, UNFILLED)
    assert chosen.best.cost.seconds == taken.seconds


def test_a_scan_over_integers_is_planned_by_the_gradient_of_its_start(monkeypatch):
    def body(y, number):
        return y + 0.01 * jnp.tanh(y) * number.astype(y.dtype), None

    problem = lp_jax.scanned(body, jnp.ones((2, 3)), jnp.arange(8))
    monkeypatch.setattr(_plan, "cycles", lambda *args: [])  # each is a program
    found = lp_jax.plan(problem, machine=UNFILLED, seconds=1e9)
    assert any(c.error is not None and 0 < c.error < 1 for c in found.choices)


def test_more_devices():
    probe, _ = probe_with(lambda solver: 1e-3)
    found = planning.choose(64, UNFILLED, probe=probe)
    one, *more = found.scaling((1, 2, 64, 4096))
    assert (
        one.data == found.serial.cost.seconds
        and one.layers == found.best.cost.seconds
        and one.split == (1, 1)
    )
    assert more[0].pipeline is not None and one.pipeline is None
    assert [d.layers is None for d in more] == [False, False, True]
    assert more[-1].both is None and more[-1].data is None  # 64 layers by 32 examples are 2048
    for row in (one, *more[:2]):
        assert row.both <= min(x for x in (row.layers, row.data) if x is not None)
    text = str(found)
    assert found.code in text and "message times unknown, taken as zero" in text
    assert "2048" in text and "4096" not in text
    # layers in a loop: four forward and four adjoint sweeps of N / P layers, a last one and the gradient, against 3 N
    found = planning.choose(64, LOOPED, probe=lambda solver, adjoint_solver: probed(1e-3, 4))
    assert isinstance(found.solver, lp_jax.Serial)
    rows = {row.devices: row.layers for row in found.scaling((2, 16))}
    assert rows[16] == pytest.approx((5 + 4 + 1) * 64 / 16 * 1e-5)
    assert rows[2] == pytest.approx((64 + 64 + 32) * 1e-5)  # two intervals, two cycles: exact


# --- estimates -----------------------------------------------------------------------------------------------------


def test_an_estimate_counts_operations():
    params, y0 = jnp.zeros((256, 512, 512), "float32"), jnp.zeros((256, 512), "float32")
    machine = planning.estimate(lp_jax.Problem(layer, params, y0), device="V100")
    assert machine.at_once == (1, 4, 32, 256)
    slope = (machine.seconds("forward", 256) - machine.seconds("forward", 1)) / 255
    product = 2 * 256 * 512 * 512 / 1.57e13
    assert product <= slope < 1.5 * product
    assert (machine.state_bytes, machine.layer_bytes) == (256 * 512 * 4, 512 * 512 * 4)


def test_messages_are_measured_between_the_devices_that_there_are():
    found = _calibrate.interconnect(mesh(2), sizes=(1 << 8, 1 << 16))
    assert set(found) == {"latency", "bandwidth"} and min(found.values()) > 0


def test_latency_and_bandwidth_are_those_of_a_made_up_wire(monkeypatch):
    """Sweeps over four workers send two states, two of a prefix sum, and the norm over two hops."""

    def sweep(problem, solver, **sampling):
        return 0.5 + (
            4 * (3e-6 + problem.y0.nbytes / 1e9) + 2 * 3e-6 if problem.comm.size > 1 else 0
        )

    monkeypatch.setattr(_measure, "iteration", sweep)
    found = _calibrate.interconnect(mesh(4), sizes=(0, 1 << 20))
    assert found == pytest.approx({"latency": 3e-6, "bandwidth": 1e9})


def test_a_switch_costs_all_of_its_branches_where_layers_are_evaluated_at_once():
    """With one layer at a time it costs one of them."""
    params, y0 = jnp.zeros((64, 2, 256, 256), jnp.float32), jnp.zeros((256, 256), jnp.float32)

    def one(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params[0])

    def either(y, layer):
        first, second = ((lambda y, w=w: y + layer.dt * jnp.tanh(y @ w)) for w in layer.params)
        return jax.lax.cond(layer.index % 2 == 0, first, second, y)

    device = dataclasses.replace(
        _processor.processor("gpu", "H100"), kernel=0.0, launch=0.0
    )  # no kernels more
    with planning.assume(device):
        plain, switch = (
            planning.estimate(lp_jax.Problem(step, params, y0)) for step in (one, either)
        )
    alone, together = (
        s / p for s, p in zip(switch.gradient[::3], plain.gradient[::3], strict=True)
    )  # no sums
    assert (
        0.95 < alone < 1.3 and 2 <= together / alone < 2.1
    )  # both, and the choice between their results

    def lowered(at_once):
        solve = jax.jit(
            lambda w: (
                lp_jax.solve(either, w, y0, solver=lp_jax.Picard(sweeps=2, at_once=at_once)).y1
            )
        )
        return solve.lower(params).as_text()

    assert "stablehlo.case" in lowered(1) and "stablehlo.case" not in lowered(64)


def test_shapes_are_enough_for_an_estimate():
    params, y0 = jnp.zeros((256, 64, 64), "float32"), jnp.zeros((32, 64), "float32")
    shapes = jax.eval_shape(lambda: (params, y0))
    machine = planning.estimate(lp_jax.Problem(layer, params, y0), device="H100")
    assert planning.estimate(lp_jax.Problem(layer, *shapes), device="H100") == machine
    traced = jax.jit(
        lambda *arrays: planning.estimate(lp_jax.Problem(layer, *arrays), device="H100").state_bytes
    )
    assert traced(params, y0) == machine.state_bytes
    assert machine.examples == 32 and 0.9 < machine.overhead < 1 and 0.3 < machine.relaxation < 0.5
    assert machine.kept_bytes in (
        32 * 64 * 4,
        2 * 32 * 64 * 4,
    )  # of a tanh JAX 0.10 keeps two arrays, 0.12 one
    machine = planning.estimate(
        lp_jax.Problem(lambda y, layer: y, jnp.zeros(8), jnp.zeros(3)), device="H100"
    )
    assert (
        machine.seconds("forward", 1) > 0 and machine.newton is None
    )  # a state of one axis has no examples


def test_a_plan_for_workers_at_hand_measures_their_messages(monkeypatch, clock):
    """And one for workers that are not at hand says that message times are unknown. Messages take no time from probes."""
    seen = []

    def measured(comm):
        seen.append(comm.size)
        clock[0] += 60.0
        return {"latency": 1e-3, "bandwidth": 1e9}

    monkeypatch.setattr(_plan, "interconnect", measured)
    mesh = jax.make_mesh((2,), ("layers",), devices=jax.devices()[:2])
    problem = lp_jax.Problem(layer, jnp.ones((64, 4, 4)) / 8, jnp.ones((2, 4)))
    slow = machine(1e-5, 1e-5, at_once=(1, 64), state_bytes=64)
    found = lp_jax.plan(problem, comm=mesh, machine=slow, seconds=0.0)
    assert seen == [2] and found.workers == 2 and found.machine.latency == 1e-3
    assert "message times unknown" not in str(found)
    of_problem = lp_jax.plan(dataclasses.replace(problem, comm=mesh), machine=slow, seconds=0.0)
    assert seen == [2, 2] and of_problem.solver == found.solver
    monkeypatch.setattr(_plan, "cycles", lambda *args: [])  # each is a program
    in_time = lp_jax.plan(problem, comm=mesh, machine=slow, seconds=10.0)
    assert any(choice.probed for choice in in_time.choices) and not in_time.unprobed
    seen.pop()
    apart = lp_jax.plan(
        problem, workers=2, machine=dataclasses.replace(UNFILLED, examples=2), seconds=1e9
    )
    assert (
        seen == [2, 2] and "message times unknown, taken as zero: plan(comm=mesh)" in apart.reason
    )
    with pytest.raises(ValueError, match=r"workers=4 and a comm of 2"):
        lp_jax.plan(problem, comm=mesh, workers=4, machine=slow, seconds=0.0)


def test_a_plan_says_once_that_a_layer_cannot_be_counted():
    @jax.custom_vjp
    def foreign(y):
        return jax.pure_callback(lambda y: np.asarray(y), y, y, vmap_method="sequential")

    foreign.defvjp(lambda y: (foreign(y), None), lambda _, y_bar: (y_bar,))

    for f, times in ((foreign, 1), (jnp.sin, 0)):
        step = lambda y, layer, f=f: y + layer.params * f(y)  # noqa: E731
        problem = lp_jax.Problem(step, jnp.ones(8) / 8, jnp.ones((2, 4)))
        found = lp_jax.plan(problem, machine=machine(1e-5), seconds=0.1)
        assert str(found).count("one at a time") == times
