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

import lp_jax
from lp_jax import planning
from lp_jax.planning import _calibrate, _candidates, _deadline, _interconnect, _measure, _plan, _work
from lp_jax.planning._cost import Time, pipeline

BENCHMARKS = Path(lp_jax.__file__).parents[1] / "benchmarks"

MACHINE = planning.Machine(
    at_once=(1, 8, 64),
    forward=(1.0, 2.0, 9.0),
    adjoint=(2.0, 4.0, 18.0),
    gradient=(3.0, 5.0, 20.0),
    serial=(0.5, 2.5),
    fixed=7.0,
    latency=0.25,
    bandwidth=1000.0,
    state_bytes=500,
    layer_bytes=100,
    name="by hand",
)


def test_a_batch_takes_what_was_measured_and_lies_between():
    assert [MACHINE.seconds("forward", n) for n in (1, 8, 64)] == [1.0, 2.0, 9.0]
    assert MACHINE.seconds("adjoint", 36) == 11.0
    assert MACHINE.seconds("gradient", 128) == 40.0
    assert MACHINE.message(500) == 0.75


def test_serial_propagation_takes_its_own_time_per_layer():
    time = planning.predict(lp_jax.Serial(), lp_jax.Serial(), 64, MACHINE)
    assert time == (64 * 3.0, 0.0, 0.0, 0.0, 7.0)
    assert time.seconds == 199.0


def test_sweeps_by_hand_on_one_worker_and_on_eight():
    """Three sweeps and a last evaluation, two adjoint sweeps and the gradient; each sweep sends a prefix sum of states."""
    solvers = lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2)
    assert planning.predict(*solvers, 64, MACHINE).evaluations == 4 * 9.0 + 2 * 18.0 + 20.0
    time = planning.predict(*solvers, 64, MACHINE, workers=8)
    hops = 1 + 3  # to the neighbour, and over the seven before the last
    assert time.evaluations == 4 * 2.0 + 2 * 4.0 + 5.0
    assert time.messages == (5 * hops + 2) * 0.75
    assert time.reductions == 2 * 2 * 3 * 0.75
    assert time.fixed == 7.0
    updating = dataclasses.replace(MACHINE, update=0.5)
    assert planning.predict(*solvers, 64, updating, workers=8).fixed == 7.0 + 8 * 0.5  # each its own layers'


def test_intervals_one_after_another_take_their_number():
    solvers = lp_jax.MGRIT(iterations=2, storage="all"), lp_jax.MGRIT(iterations=1, storage="all")
    time = planning.predict(*solvers, 64, machine(auto=1))
    assert time.evaluations == planning.training_step(*solvers, 64, at_once=1).work()


def test_checkpoints_take_one_forward_propagation_more():
    solver = lp_jax.Serial(checkpoint_every=8)
    assert planning.predict(solver, solver, 64, MACHINE).evaluations == 64 * (3.0 + 0.5)


def test_layers_of_an_interval_take_what_they_take_in_relaxation():
    """Sweeps over all layers move all states through memory; an interval on a processor does not."""
    looped = machine(2.0, adjoint=(4.0,), gradient=(12.0,), serial=(1.0, 8.0), auto=1)
    kinds = ("forward", "adjoint", "gradient")
    assert [looped.in_a_row(kind) for kind in kinds] == [1.0, 2.0, 6.0]
    measured = dataclasses.replace(looped, relaxation=(1.5, 3.0, 7.0))
    assert [measured.in_a_row(kind) for kind in kinds] == [1.5, 3.0, 7.0]
    solver = lp_jax.MGRIT(levels=2, coarsening=8, iterations=1, coarse_step=lp_jax.Identity(), storage="all")
    step = planning.training_step(solver, solver, 64, at_once=1)
    expected = 1.5 * step.work("forward", "linearise") + 3.0 * step.work("adjoint") + 7.0 * 64
    assert planning.predict(solver, solver, 64, measured).evaluations == expected
    picard = lp_jax.Picard(sweeps=2)
    assert planning.predict(picard, picard, 64, measured).evaluations == 64 * (3 * 2.0 + 2 * 4.0 + 12.0)
    rows = dataclasses.replace(measured, interval=(0.25, 0.5, 1.0))  # each of 8 intervals is swept over once
    assert planning.predict(solver, solver, 64, rows).evaluations == expected + 8 * (0.25 + 0.5 + 1.0)
    assert rows.divided(2).relaxation == (0.75, 1.5, 3.5) and rows.divided(2).interval == (0.125, 0.25, 0.5)


def test_a_batch_that_is_told_not_to_be_a_loop_takes_what_it_takes():
    rows = machine(1.0, 2.0, at_once=(1, 16), auto=1, relaxation=(1.0,) * 3, interval=(5.0,) * 3)
    hierarchy = {"levels": 2, "coarsening": 4, "iterations": 1, "coarse_step": lp_jax.Identity()}
    solver = lp_jax.MGRIT(**hierarchy, storage="all", at_once=math.inf)
    step = planning.training_step(solver, solver, 64, at_once=1)
    assert planning.predict(solver, solver, 64, rows).evaluations == 2.0 * step.depth()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"at_once": (8, 1, 64)}, "ascending"),
        ({"forward": (1.0, 2.0)}, "forward must have a time for each of the 3 numbers in at_once"),
        ({"adjoint": (1.0, -2.0, 3.0)}, "adjoint must be positive"),
        ({"serial": (0.0, 1.0)}, "serial must be positive"),
        ({"examples": 0}, "examples must be an integer of at least 1"),
        ({"overhead": 1.5}, "overhead must be a part, from 0 to 1"),
        ({"newton": (1.0,)}, "newton must have a time for each of the 3"),
        ({"latency": math.nan}, "latency must be numbers of at least 0; got nan"),
        ({"sum_bandwidth": 0.0}, "sum_bandwidth must be positive numbers"),
    ],
)
def test_numbers_that_are_none_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        machine(1.0, 2.0, 3.0, **({"at_once": (1, 8, 64)} | fields))


def test_machines_are_saved_and_read(tmp_path):
    for saved in (MACHINE, machine()):
        saved.save(tmp_path / "machine.json")
        assert planning.Machine.load(tmp_path / "machine.json") == saved


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", '{"at_once": [1]}', '{"layers": [1]}', '{"cores": 2}', '{"at_once": "all"}']
)
def test_files_that_are_none_are_refused_in_one_line(tmp_path, text):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no machine file") as caught:
        planning.Machine.load(path)
    assert "\n" not in str(caught.value)


def deep(layers):
    params = jnp.asarray(np.random.default_rng(0).normal(size=(layers, 4, 4)))
    return lp_jax.Problem(lambda y, at: y + at.dt * jnp.tanh(y @ at.params), params, jnp.ones((2, 4)))


@pytest.fixture
def few_samples(monkeypatch):
    """Times are positive after one short sample, too."""
    monkeypatch.setattr(_measure, "_SAMPLES", 1)
    monkeypatch.setattr(_measure, "_SAMPLE", 1e-3)


@pytest.mark.usefixtures("few_samples")
def test_calibration_measures_the_network_that_it_is_given(tmp_path):
    def step(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params * layer.shared + layer.data[None])

    problem = lp_jax.Problem(
        step, jnp.zeros((16, 4, 4)), jnp.ones((2, 4)), shared=jnp.ones(()), data=jnp.zeros((16, 4)), t1=3.0
    )
    machine = planning.calibrate(problem, name="small")
    assert machine.auto is None and machine.at_once == (1, 2, 16) and machine.name == "small"
    assert (machine.state_bytes, machine.layer_bytes) == (2 * 4 * 8, 4 * 4 * 8)
    assert machine.newton is None and machine.relaxation is None and min(machine.across) > 0
    assert machine.adding > 0 and machine.update == 0
    machine.save(tmp_path / "machine.json")
    assert json.loads((tmp_path / "machine.json").read_text())["forward"] == list(machine.forward)
    counted = planning.calibrate(problem, newton=True)
    assert counted.newton is not None and len(counted.newton) == 3 and counted.newton[0] > 0


@pytest.mark.parametrize("layers, span", [(8, 4), (16, 4), (128, 32)])
def test_cycles_that_are_timed_are_two_and_one(monkeypatch, layers, span):
    """However few intervals there are: none is exact before the second cycle, which would be left out."""
    seen = []

    def count(calls):
        seen.extend((int(a.iterations), int(b.iterations)) for _, a, b in (call() for call in calls))
        return [1.0, 1.0, 1.0]

    monkeypatch.setattr(_measure, "seconds", count)
    _measure.relaxation(deep(layers), span)
    assert seen == [(1, 1), (2, 1), (1, 2)]


@pytest.mark.usefixtures("few_samples", "unmeasured")
def test_newton_is_not_measured_further_where_it_is_hopeless(monkeypatch):
    """A second for a few layers, where serial propagation through all takes milliseconds."""
    measured = []

    def newton(problem):
        measured.append(problem.layers)
        return 1.0 * problem.layers

    monkeypatch.setattr(planning._measure, "newton", newton)
    machine = planning.calibrate(deep(64), newton=True)
    assert measured == [2, 2] and machine.at_once == (1, 2, 8, 64)
    assert machine.newton == (1.0, 2.0, 8.0, 64.0)


@pytest.mark.usefixtures("few_samples", "unmeasured")
def test_newton_is_measured_while_an_iteration_is_faster_than_serial_propagation_through_all_layers(monkeypatch):
    """An iteration takes ten layers' time, whatever their number: slower than a layer, faster than all 64."""
    monkeypatch.setattr(_measure, "serial", lambda problem: (1e-5, 2e-5))
    measured = []
    monkeypatch.setattr(_measure, "newton", lambda problem: measured.append(problem.layers) or 3e-4)
    machine = planning.calibrate(deep(64), newton=True)
    assert measured == [2, 2, 8, 64] and machine.newton == (1.5e-4, 3e-4, 3e-4, 3e-4)


@pytest.fixture
def unmeasured(monkeypatch):
    """Iterations are not run: each solver is a program."""
    monkeypatch.setattr(_measure, "_iterations", lambda problem, solver: (1e-6, 2e-6, 4e-6))


@pytest.mark.usefixtures("few_samples", "unmeasured")
def test_calibration_goes_by_the_layers_at_once(monkeypatch):
    monkeypatch.setattr(_calibrate, "_ENOUGH", 1e3)  # all layers are timed, however long they take
    together = planning.calibrate(deep(128))
    assert together.at_once == (1, 2, 16, 128) and together.auto is None and together.relaxation is None
    monkeypatch.setattr(_calibrate, "layers_at_once", lambda problem: 16)
    some = planning.calibrate(deep(128))
    assert (some.at_once, some.auto) == ((1, 2, 16), 16)
    monkeypatch.setattr(_calibrate, "layers_at_once", lambda problem: 1)
    assert planning.calibrate(deep(128)).at_once == (1,)
    assert planning.calibrate(deep(128), batched=True).at_once == (1, 4, 16, 32)


@pytest.mark.usefixtures("few_samples")
def test_calibration_tells_what_an_interval_takes_beside_its_layers(monkeypatch):
    monkeypatch.setattr(_calibrate, "_ENOUGH", 1e3)
    monkeypatch.setattr(_calibrate, "layers_at_once", lambda problem: 1)
    machine = planning.calibrate(deep(16), batched=True)
    assert machine.at_once == (1, 4) and min(machine.relaxation) > 0 and machine.interval is not None
    assert len(machine.gradient) == 2


def test_a_layer_and_its_interval_are_told_apart_by_two_lengths(monkeypatch):
    """Layers of a, b and c, and what their intervals take beside them."""
    layer, interval = np.array([1.0, 2.0, 3.0]), np.array([4.0, 0.0, 8.0])
    monkeypatch.setattr(_measure, "relaxation", lambda problem, span: layer + interval / span)
    long, short = (lp_jax.Problem(lambda y, at: y, np.zeros(n), np.zeros(2)) for n in (64, 32))
    for found, wanted in zip(_calibrate._intervals(long, (0.0, 0.0)), (layer, interval), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-14)
    serial = 1.5, 5.0  # of few layers: one interval of all 32, its gradient in the parts of a short one, 2 to 5
    parts = np.array([1.5, 5.0 * 2 / 7, 5.0 * 5 / 7])
    beside = (np.array([2.0, 2.0, 5.0]) - parts) / (1 / 4 - 1 / 32)
    for found, wanted in zip(_calibrate._intervals(short, serial), (parts - beside / 32, beside), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-14)
    slower = 3.0, 8.0  # than in short intervals: these take nothing beside their layers
    np.testing.assert_array_equal(_calibrate._intervals(short, slower), ([2.0, 2.0, 5.0], [0.0, 0.0, 0.0]))


# --- examples, memory, pipelines ------------------------------------------------------------------------------------


def test_a_part_of_the_examples_takes_what_so_many_layers_fewer_take():
    machine = dataclasses.replace(MACHINE, examples=50, overhead=0.5, kept_bytes=40)
    half = machine.divided(2)
    assert [half.seconds("forward", n) for n in (16, 128)] == [2.0, 9.0]  # as 8 and 64 of whole ones
    assert half.seconds("forward", 1) == 0.75  # half of it shrinks
    assert half.per_layer == (0.375, 1.875)
    assert (half.examples, half.state_bytes, half.kept_bytes, half.layer_bytes) == (25, 250, 20, 100)
    quarter, again = machine.divided(4), half.divided(2)
    assert again.seconds("forward", 1) == pytest.approx(quarter.seconds("forward", 1)) == 0.625
    assert machine.divided(1) is machine


def test_layers_in_a_loop_shrink_with_their_examples():
    looped = machine(auto=1)
    assert looped.divided(4).seconds("adjoint", 1) == 0.25
    assert dataclasses.replace(looped, overhead=1.0).divided(4).seconds("adjoint", 1) == 1.0


def test_gradients_are_summed_over_workers_with_other_examples():
    machine = dataclasses.replace(MACHINE, examples=8)
    serial = lp_jax.Serial(), lp_jax.Serial()
    time = planning.predict(*serial, 64, machine, workers=2, data_workers=4)
    assert (
        time.gradients == 2 * 2 * 0.25 + 2 * 3 / 4 * 32 * 100 / 1000
    )  # up and down a tree of four; half of the layers
    assert planning.predict(*serial, 64, machine).gradients == 0
    slow = dataclasses.replace(machine, sum_bandwidth=100.0)  # of sums, which add, too
    assert planning.predict(*serial, 64, slow, workers=2, data_workers=4).gradients == 1.0 + 2 * 3 / 4 * 32 * 100 / 100
    with pytest.raises(ValueError, match="data_workers=9 is more than the 8 examples"):
        planning.predict(*serial, 64, machine, data_workers=9)


def test_newton_takes_what_was_measured_of_it():
    solver = lp_jax.Newton(iterations=3, batch_axes=1)
    machine = dataclasses.replace(MACHINE, newton=(10.0, 20.0, 90.0), examples=10)
    time = planning.predict(solver, solver.for_adjoint(), 64, machine)
    assert time.evaluations == 4 * 90.0 + 9.0 + 20.0
    assert machine.divided(2).seconds("newton", 128) == 90.0
    with pytest.raises(NotImplementedError, match=r"by hand has no times of Newton's method: calibrate\(newton=True\)"):
        planning.predict(solver, solver.for_adjoint(), 64, MACHINE)
    size = 500 / 10 * 500 / 10 / 4  # bytes of a Jacobian
    assert planning.memory(solver, 64, machine).working == 6 * 64 * 500 + 3 * 64 * 10 * size


def test_a_pipeline_by_hand():
    """Four microbatches through two workers: five turns of 32 layers, each a quarter of the examples, and two messages."""
    machine = dataclasses.replace(MACHINE, examples=8)
    turn = 32 * (0.5 + 2.5) / 4 + 2 * (0.25 + 125 / 1000)
    assert pipeline(64, machine, 2, 4) == pytest.approx(5 * turn + 7.0)
    beside = dataclasses.replace(machine, adding=0.125, update=0.5)  # five turns' gradients are added up four times
    assert pipeline(64, beside, 2, 4) == pytest.approx(5 * turn + 4 * 32 * 0.125 + 32 * 0.5 + 7.0)
    assert pipeline(64, machine, 1, 1) == planning.predict(lp_jax.Serial(), lp_jax.Serial(), 64, machine).seconds


@pytest.mark.parametrize("layers", [256, 16384])
def test_memory_is_what_the_compiler_says(layers):
    """Of the committed results of suite memory: within 5 % in all, within 30 % of what is neither argument nor result."""
    results = json.loads((BENCHMARKS / "results" / "cpu" / "memory.json").read_text())
    state = 32 * 64 * 4
    looped = machine(auto=1, state_bytes=state, kept_bytes=2 * state, layer_bytes=65 * 64 * 4)
    rows = [row for row in results["rows"] if row["layers"] == layers]
    assert len(rows) == 11
    for row in rows:
        found = planning.memory(_of_row(row["name"], layers), layers, looped)
        assert found.bytes == pytest.approx(row["total"], rel=0.05), row["name"]
        assert found.kept + found.working == pytest.approx(row["temporary_bytes"], rel=0.3), row["name"]


def _of_row(name, layers):
    if name == "lax.scan":
        return lp_jax.Serial()
    if name == "Serial, checkpoints":
        return lp_jax.Serial(checkpoint_every=math.isqrt(layers))
    if name == "global Picard, 3/2":
        return lp_jax.Picard(sweeps=3)
    return lp_jax.MGRIT(
        coarsening=16,
        storage="all" if "all states" in name else "c_points",
        at_once=1 if "looped" in name else math.inf,
    )


def test_memory_is_divided_among_workers():
    machine = dataclasses.replace(MACHINE, kept_bytes=40, examples=8)
    for solver in (lp_jax.Serial(), lp_jax.Picard(), lp_jax.MGRIT(storage="all"), lp_jax.MGRIT(at_once=math.inf)):
        alone, eighth = (planning.memory(solver, 64, machine, workers=p) for p in (1, 8))
        assert eighth == tuple(x / 8 for x in alone)
    half = planning.memory(lp_jax.Serial(), 64, machine, data_workers=2)
    assert (half.parameters, half.kept) == (2 * 64 * 100, 64 * (250 + 20))


# --- plans ----------------------------------------------------------------------------------------------------------

IDLE = "a device that a layer does not fill"
UNFILLED = machine(1e-5, 1e-5, at_once=(1, 1024), examples=32, overhead=1.0, name=IDLE)
LOOPED = machine(1e-5, auto=1, examples=32)


def told(errors):
    """A probe with known errors by the kind of solver, and what it was asked."""
    asked = []

    def probe(solver, adjoint_solver):
        asked.append(solver)
        return planning.Probed(errors(solver), solver.iterations, adjoint_solver.iterations)

    return probe, asked


def test_the_fastest_that_is_exact_enough_is_chosen():
    probe, asked = told(lambda solver: 1e-3 if isinstance(solver, lp_jax.MGRIT) else 0.5)
    found = planning.choose(1024, UNFILLED, probe=probe, seconds=1e9)
    assert isinstance(found.solver, lp_jax.MGRIT)
    assert all(c.error > 1e-2 for c in found.choices if c.time.seconds < found.best.time.seconds)
    assert found.unprobed == 0
    assert asked[-1] == found.solver  # nobody looks at what would be slower
    assert found.speedup == found.serial.time.seconds / found.best.time.seconds > 1


def test_secant_sweeps_are_probed_where_plain_sweeps_are_not_exact_enough():
    for plain, wanted in ((0.5, True), (1e-3, False)):
        probe, asked = told(lambda solver, plain=plain: 1e-3 if isinstance(solver, lp_jax.Secant) else plain)
        found = planning.choose(1024, UNFILLED, probe=probe, seconds=1e9)
        secant = [isinstance(solver, lp_jax.Secant) for solver in (*asked, found.solver)]
        assert any(secant) == secant[-1] == wanted


def test_what_diverges_is_never_chosen():
    probe, _ = told(lambda solver: math.nan)
    found = planning.choose(1024, UNFILLED, probe=probe, seconds=1e9)
    assert isinstance(found.solver, lp_jax.Serial)
    assert re.match(r"\d+ solvers are predicted faster, none with a gradient error of at most 1e-02\. On", found.reason)
    assert all(
        c.probed is not None for c in found.choices if isinstance(c.solver, lp_jax.Picard)
    )  # the tightest are left out


def test_the_plan_counts_the_solvers_left_out_for_lack_of_time():
    probe, asked = told(lambda solver: 1.0)
    found = planning.choose(1024, UNFILLED, probe=probe, seconds=0.0, solvers=[lp_jax.Picard(sweeps=3)])
    assert found.unprobed > 2 and not asked
    assert found.reason.startswith(
        f"{found.unprobed} solvers predicted faster were left out for lack of time. On 2 devices"
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock of the planner that stands still: ``clock[0]`` is the time."""
    now = [100.0]
    monkeypatch.setattr(_deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_solvers_of_the_user_are_probed_first_and_a_compiled_program_runs_for_a_tenth_longer(clock):
    asked = []

    def probe(solver, adjoint_solver):
        asked.append(solver)
        clock[0] += 0.2 if len(asked) < 3 else 0.05
        return planning.Probed(0.5, 3, 3)

    own = lp_jax.Picard(sweeps=3)
    found = planning.choose(1024, UNFILLED, probe=probe, seconds=0.3, solvers=[own])
    assert asked[0] == own and len(asked) == 3  # sweeps to a tolerance end at 0.4, and may run until 0.43
    late = f"{found.unprobed} solvers predicted faster were left out for lack of time. "
    assert found.reason.startswith(
        f"3 solvers are predicted faster, none with a gradient error of at most 1e-02. {late}"
    )
    chosen = planning.choose(1024, UNFILLED, probe=lambda *pair: planning.Probed(1e-3, 3, 3), seconds=1.0)
    assert chosen.unprobed == 0 and chosen.reason.endswith("times as fast as serial propagation on one worker.")
    text = dataclasses.replace(chosen, unprobed=1).reason
    assert text.endswith("on one worker; 1 solver predicted faster was left out for lack of time.")


def test_the_reason_says_whether_errors_were_measured_and_what_is_nearly_faster():
    plan = planning.choose(64, UNFILLED)
    faster = [c for c in plan.choices if c.time.seconds * 1.15 <= plan.serial.time.seconds]
    assert plan.reason == f"{len(faster)} solvers are predicted faster. Their gradient errors were not measured."
    none = planning.choose(64, LOOPED, probe=lambda *pair: planning.Probed(0.0, 3, 3))
    assert none.reason.startswith("No parallel solver is predicted faster than serial propagation, because layers run")
    nearly = none.choices[-1]._replace(time=Time(0.9 * none.serial.time.seconds, 0.0, 0.0, 0.0, 0.0))
    text = dataclasses.replace(none, choices=(nearly, *none.choices)).reason
    assert text.startswith("No parallel solver is predicted 1.15 times as fast as serial propagation, because")


def test_a_plan_with_newton_names_the_accelerator():
    machine = dataclasses.replace(UNFILLED, newton=(1e-6, 1e-6))
    errors, _ = told(lambda solver: 0.0 if isinstance(solver, lp_jax.Newton) else 1.0)
    found = planning.choose(1024, machine, probe=errors, seconds=1e9)
    assert isinstance(found.solver, lp_jax.Newton)
    assert found.reason.endswith("serial propagation on one worker (pays on an accelerator).")


@pytest.fixture
def started(monkeypatch, clock):
    """The measurements that `plan` starts. Each takes a second."""
    names = []

    def measured(name, value):
        def measure(*args, **options):
            names.append(name)
            clock[0] += 1.0
            return value

        return measure

    times = {
        "serial": (1e-5, 2e-5),
        "sweep": [2e-4, 3e-4, 4e-4],
        "newton": 1e-4,
        "adding": 1e-6,
        "relaxation": np.full(3, 1e-5),
    }
    for name, value in times.items():
        monkeypatch.setattr(_measure, name, measured(name, value))
    monkeypatch.setattr(_plan, "_probe", lambda *args: measured("probe", planning.Probed(0.5, 3, 3)))
    diagnosis = planning.Diagnosis(layers=64, examples=2, lipschitz=1.0, lyapunov=0.0, rehearsals=())
    monkeypatch.setattr(_plan, "diagnose", measured("diagnose", diagnosis))
    return names


@pytest.mark.parametrize(
    ("seconds", "wanted", "left_out"),
    [
        (
            0.0,
            [],
            "serial propagation (estimated), sweeps (estimated), intervals, Newton's method, sums of gradients, behaviour",
        ),
        (
            2.0,
            ["serial", "probe", "probe"],
            "sweeps (estimated), intervals, Newton's method, sums of gradients, behaviour",
        ),
        (
            4.0,
            ["serial", "sweep", "probe", "probe"],
            "shorter sweeps, intervals, Newton's method, sums of gradients, behaviour",
        ),
        (
            12.0,
            ["serial", "sweep", "sweep", "sweep", "relaxation", "newton", *["probe"] * 6],
            "longer runs of Newton's method",
        ),
    ],
)
def test_no_measurement_starts_when_time_is_over(started, monkeypatch, seconds, wanted, left_out):
    monkeypatch.setattr(_calibrate, "layers_at_once", lambda problem: 64)
    found = lp_jax.plan(deep(64), seconds=seconds)
    assert started == wanted
    assert found.note.startswith(f"Left out for lack of time: {left_out}") and found.note in str(found)
    assert found.diagnosis is None and isinstance(found.solver, lp_jax.Serial)


def test_nothing_is_left_out_with_time_enough(started):
    found = lp_jax.plan(deep(64), seconds=math.inf)
    assert started[-1] == "diagnose" and found.diagnosis is not None and found.note == ""
    assert {"serial", "sweep", "newton", "adding", "probe"} <= set(started)


def test_layers_one_after_another_are_planned_without_time(started, monkeypatch):
    """As many layers are measured as time allows; sweeps then take as long as serial propagation."""
    monkeypatch.setattr(_calibrate, "layers_at_once", lambda problem: 1)
    deadline = _deadline.Deadline(0.5)
    machine = _calibrate.measure(deep(64), False, True, deadline=deadline)
    assert started == ["serial"] and (machine.at_once, machine.forward) == ((1,), (1e-5,))
    assert machine.serial == (1e-5, 2e-5) and machine.relaxation is None
    assert deadline.left_out == [
        "longer serial propagation",
        "sweeps (estimated)",
        "intervals",
        "batches",
        "sums of gradients",
    ]


def test_sweeps_left_out_are_estimated_relative_to_serial_propagation(started):
    machine = _calibrate.measure(deep(64), False, deadline=_deadline.Deadline(0.5))
    guess = planning.estimate(deep(64))
    assert machine.at_once == guess.at_once and machine.serial == (1e-5, 2e-5)
    for times in (machine.forward, machine.adjoint, machine.gradient):
        assert times == pytest.approx([1e-5, *(1e-5 * x / guess.per_layer[0] for x in guess.forward[1:])])
    unmeasured = _calibrate.measure(deep(64), False, deadline=_deadline.Deadline(0.0))
    assert unmeasured.serial == guess.per_layer and len(started) == 1


def test_long_calls_have_few_samples(monkeypatch):
    """Fifteen samples, or those that start in two seconds; a given number is always taken."""
    monkeypatch.setattr(_measure, "_SAMPLES", 15)
    for spent, options, wanted in ((1.5, {}, 2), (1e-3, {}, 15), (5.0, {"samples": 3, "repeats": 1}, 3)):
        now, calls = [0.0], []
        monkeypatch.setattr(_measure, "time", SimpleNamespace(perf_counter=lambda now=now: now[0]))
        monkeypatch.setattr(_measure, "_SAMPLE", 1e-9)

        def call(now=now, calls=calls, spent=spent):
            calls.append(1)
            now[0] += spent

        assert _measure.seconds([call], **options) == [pytest.approx(spent)]
        assert len(calls) - (1 if "repeats" in options else 2) == wanted  # compiled, and timed for the repeats


def test_where_nothing_can_win_no_hierarchy_is_compiled_and_the_alternative_is_named():
    probe, asked = told(lambda solver: 0.0)
    found = planning.choose(64, LOOPED, probe=probe)
    assert isinstance(found.solver, lp_jax.Serial)
    assert all(isinstance(solver, lp_jax.Picard) for solver in asked)  # for the sake of more devices
    assert "No parallel solver is predicted faster than serial propagation" in found.reason
    assert "layers run one after another" in found.reason
    assert "On 2 devices: along the examples, 2 times as fast" in found.reason


def test_errors_are_those_of_the_gradient(monkeypatch):
    """Against jax.grad through a scan, on the same loss."""
    rng = np.random.default_rng(0)
    params, y0 = jnp.asarray(rng.normal(size=(32, 6, 6)) / 3), jnp.asarray(rng.normal(size=(5, 6)))

    def step(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params)

    def loss(params, solver, adjoint_solver):
        y1 = lp_jax.solve(step, params, y0, t1=2.0, solver=solver, adjoint_solver=adjoint_solver).y1
        return 0.5 * jnp.sum(y1**2)

    def exact(params):
        y1, _ = jax.lax.scan(lambda y, w: (y + 2.0 / 32 * jnp.tanh(y @ w), None), y0, params)
        return 0.5 * jnp.sum(y1**2)

    problem = lp_jax.Problem(step, params, y0, t1=2.0)
    monkeypatch.setattr(_plan, "cycles", lambda *args: _candidates.cycles(*args)[:1])  # each is a program
    found = lp_jax.plan(problem, machine=UNFILLED, error=1e-12, seconds=1e9)
    e = np.asarray(jax.jit(jax.grad(exact))(params))
    looked_at = {type(c.solver): c for c in found.choices if c.probed is not None}
    assert len(looked_at) == 2  # sweeps and cycles
    for choice in looked_at.values():
        g = jax.jit(jax.grad(loss))(params, choice.solver, choice.adjoint_solver)
        assert relative_error(g, e) == pytest.approx(choice.error, rel=0.1)
    chosen = lp_jax.plan(problem, machine=UNFILLED, error=1e-2)
    assert isinstance(chosen.solver, lp_jax.Picard) and chosen.best.error <= 1e-2
    assert eval(f"dict({chosen.code})") == {"solver": chosen.solver, "adjoint_solver": chosen.adjoint_solver}
    assert chosen.best.probed.iterations < 32  # and so many are counted
    sweeps = (chosen.best.probed.iterations, chosen.best.probed.adjoint_iterations)
    taken = planning.predict(*(lp_jax.Picard(sweeps=n) for n in sweeps), 32, UNFILLED)
    assert chosen.best.time == taken


def test_a_scan_over_integers_is_planned_by_the_gradient_of_its_start(monkeypatch):
    def body(y, number):
        return y + 0.01 * jnp.tanh(y) * number.astype(y.dtype), None

    problem = lp_jax.scanned(body, jnp.ones((2, 3)), jnp.arange(8))
    monkeypatch.setattr(_plan, "cycles", lambda *args: [])  # each is a program
    found = lp_jax.plan(problem, machine=UNFILLED, seconds=1e9)
    assert any(c.error is not None and 0 < c.error < 1 for c in found.choices)


def test_more_devices():
    probe, _ = told(lambda solver: 1e-3)
    found = planning.choose(64, UNFILLED, probe=probe)
    one, *more = found.scaling((1, 2, 64, 4096))
    assert one.data == found.serial.time.seconds and one.layers == found.best.time.seconds and one.split == (1, 1)
    assert more[0].pipeline is not None and one.pipeline is None
    assert [d.layers is None for d in more] == [False, False, True]
    assert more[-1].both is None and more[-1].data is None  # 64 layers by 32 examples are 2048
    for row in (one, *more[:2]):
        assert row.both <= min(x for x in (row.layers, row.data) if x is not None)
    text = str(found)
    assert (
        found.code in text and "2048" in text and "4096" not in text and "message times unknown, taken as zero" in text
    )


@pytest.mark.parametrize("workers", [3, 8])
def test_as_many_cycles_as_intervals_are_exact(workers):
    """Finite termination: what `Plan.scaling` takes for granted, against a scan."""
    rng = np.random.default_rng(0)  # rough, and far from an ODE
    params, y0 = jnp.asarray(rng.normal(size=(16, 4, 4))), jnp.asarray(rng.normal(size=(3, 4)))
    ((solver, adjoint_solver),) = _candidates.exact_cycles(16, workers)

    def step(y, layer):
        return y + jnp.tanh(y @ layer.params)

    def loss(params):
        y1 = lp_jax.solve(step, params, y0, solver=solver, adjoint_solver=adjoint_solver).y1
        return 0.5 * jnp.sum(y1**2)

    def exact(params):
        return 0.5 * jnp.sum(jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), y0, params)[0] ** 2)

    got, wanted = jax.jit(lambda p: (jax.grad(loss)(p), jax.grad(exact)(p)))(params)
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)


def test_the_crossover_is_told_where_one_device_has_nothing_to_gain():
    """Four forward and four adjoint sweeps of N / P layers, a last one and the gradient, against 3 N: from four devices on."""
    found = planning.choose(64, LOOPED, probe=lambda solver, adjoint_solver: planning.Probed(1e-3, 4, 4))
    assert isinstance(found.solver, lp_jax.Serial)
    rows = {row.devices: row.layers for row in found.scaling((2, 4, 16))}
    assert rows[16] == pytest.approx((5 + 4 + 1) * 64 / 16 * 1e-5)
    assert rows[2] == pytest.approx((64 + 64 + 32) * 1e-5)  # two intervals, two cycles: exact
    assert "faster than serial propagation from 2 devices on" in str(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers must be at least 1; got 0"),
        ({"workers": 65}, "workers must be from 1 to the number of layers, 64"),
        ({"error": 0.0}, "error must be a positive number"),
    ],
)
def test_nonsense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        planning.choose(**({"layers": 64, "machine": LOOPED} | fields))


# --- estimates -----------------------------------------------------------------------------------------------------


def dense(width, layers=256):
    return (lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)), jnp.zeros((layers, width, width), "float32")


def test_an_estimate_counts_operations():
    step, params = dense(512)
    machine = planning.estimate(lp_jax.Problem(step, params, jnp.zeros((256, 512), "float32")), device="V100")
    slope = (machine.seconds("forward", 256) - machine.seconds("forward", 1)) / 255
    product = 2 * 256 * 512 * 512 / 1.57e13
    assert product <= slope < 1.5 * product
    assert (machine.state_bytes, machine.layer_bytes) == (256 * 512 * 4, 512 * 512 * 4)
    reached = 9.0e11 * 2 / 3
    assert machine.adding == pytest.approx(3 * machine.layer_bytes / reached)


def test_wires_are_measured_between_the_devices_that_there_are():
    found = planning.interconnect(mesh(2), sizes=(1 << 8, 1 << 16))
    assert min(found.values()) > 0
    with pytest.raises(ValueError, match="one worker"):
        planning.interconnect(mesh(1))
    step, params = dense(4, layers=8)
    problem = lp_jax.Problem(step, params, jnp.ones((2, 4), "float32"))
    plan = lp_jax.plan(problem, machine=dataclasses.replace(UNFILLED, **found), workers=2)
    assert plan.machine.latency == found["latency"]


def test_latency_and_bandwidth_are_told_apart(monkeypatch):
    """Sweeps over four workers: two states and a prefix sum's, the norm over two hops; by a made-up wire."""

    def sweep(comm, size):
        return 0.5 + (0 if comm is None else 4 * (3e-6 + size / 1e9) + 2 * 3e-6)

    def total(comm, size):  # three quarters of all, to the next and back
        return 5e-5 + 2 * 3 / 4 * size / 5e8

    monkeypatch.setattr(_interconnect, "_sweep", sweep)
    monkeypatch.setattr(_interconnect, "_sum", total)
    assert _work.prefix_messages(4) == 3
    found = planning.interconnect(mesh(4), sizes=(0, 1 << 20))
    assert found == pytest.approx({"latency": 3e-6, "bandwidth": 1e9, "sum_bandwidth": 5e8})


def test_the_part_that_does_not_shrink_is_read_off_the_curve():
    assert _calibrate._overhead([2, 8, 64], (1e-5, 1e-5, 1e-5, 1e-5)) == 1.0  # flat: nothing but overhead
    assert _calibrate._overhead([2, 8, 64], (1.0, 2.0, 8.0, 64.0)) == 0.0
    assert _calibrate._overhead([2, 8, 64], (1.0, 1.5, 4.5, 32.5)) == pytest.approx(0.5)


def test_a_switch_costs_all_of_its_branches_where_layers_are_evaluated_at_once():
    """With one layer at a time it costs one of them."""
    params, y0 = jnp.zeros((64, 2, 256, 256), jnp.float32), jnp.zeros((256, 256), jnp.float32)

    def one(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params[0])

    def either(y, layer):
        first, second = ((lambda y, w=w: y + layer.dt * jnp.tanh(y @ w)) for w in layer.params)
        return jax.lax.cond(layer.index % 2 == 0, first, second, y)

    device = dataclasses.replace(planning.processor("gpu", "H100"), launch=0.0)  # branches are no kernels more
    with planning.assume(device):
        plain, switch = (planning.estimate(lp_jax.Problem(step, params, y0)) for step in (one, either))
    alone, together = (s / p for s, p in zip(switch.forward[::2], plain.forward[::2], strict=True))
    assert 0.95 < alone < 1.3 and 2 <= together / alone < 2.1  # both, and the choice between their results

    def lowered(at_once):
        solve = jax.jit(lambda w: lp_jax.solve(either, w, y0, solver=lp_jax.Picard(sweeps=2, at_once=at_once)).y1)
        return solve.lower(params).as_text()

    assert "stablehlo.case" in lowered(1) and "stablehlo.case" not in lowered(64)


def test_layers_of_different_intervals_take_a_part_of_a_sweep():
    """Relaxation sums nothing up; a sweep over as many layers does."""
    flat = dict.fromkeys(("forward", "adjoint", "gradient"), (1e-05, 1e-05))
    plain = planning.Machine(at_once=(1, 64), **flat)
    machine = planning.Machine(at_once=(1, 64), across=(0.5, 0.25, 2.0), **flat)
    assert [machine.seconds_across(kind, 16) for kind in flat] == [5e-6, 2.5e-6, 2e-5]
    assert machine.seconds_across("forward", 1) == plain.seconds_across("forward", 16) == 1e-5
    cycles, sweeps = lp_jax.MGRIT(coarsening=8), lp_jax.Picard(sweeps=3)
    took, alone = (planning.predict(cycles, cycles, 64, m).evaluations for m in (machine, plain))
    assert 0.25 * alone < took < alone
    took, alone = (planning.predict(sweeps, sweeps, 64, m).evaluations for m in (machine, plain))
    assert took == alone
    with pytest.raises(ValueError, match="across"):
        planning.Machine(at_once=(1,), across=(0.5, -1.0, 0.5), **dict.fromkeys(flat, (1e-05,)))


def test_a_step_without_a_product_has_an_estimate():
    machine = planning.estimate(lp_jax.Problem(lambda y, layer: y, jnp.zeros(8), jnp.zeros(3)), device="H100")
    assert machine.seconds("forward", 1) > 0 and machine.newton is None  # a state of one axis has no examples


def test_shapes_are_enough_for_an_estimate():
    step, params = dense(64)
    y0 = jnp.zeros((32, 64), "float32")
    shapes = jax.eval_shape(lambda: (params, y0))
    machine = planning.estimate(lp_jax.Problem(step, params, y0), device="H100")
    assert planning.estimate(lp_jax.Problem(step, *shapes), device="H100") == machine
    traced = jax.jit(lambda *arrays: planning.estimate(lp_jax.Problem(step, *arrays), device="H100").state_bytes)
    assert traced(params, y0) == machine.state_bytes
    assert machine.examples == 32 and 0.9 < machine.overhead < 1
    assert machine.kept_bytes in (32 * 64 * 4, 2 * 32 * 64 * 4)  # of a tanh JAX 0.10 keeps two arrays, 0.12 one


def test_a_plan_for_workers_at_hand_measures_their_messages(monkeypatch):
    """And one for workers that are not at hand says that message times are unknown."""
    from lp_jax.planning import _plan

    measured = {"latency": 1e-3, "bandwidth": 1e9, "sum_bandwidth": 1e9}
    seen = []
    monkeypatch.setattr(_plan, "interconnect", lambda comm: seen.append(comm.size) or measured)
    mesh = jax.make_mesh((2,), ("layers",), devices=jax.devices()[:2])
    step = lambda y, layer: y + layer.dt * jnp.tanh(y @ layer.params)  # noqa: E731
    problem = lp_jax.Problem(step, jnp.ones((64, 4, 4)) / 8, jnp.ones((2, 4)))
    slow = machine(1e-5, 1e-5, at_once=(1, 64), state_bytes=64)
    found = lp_jax.plan(problem, comm=mesh, machine=slow, seconds=0.0)
    assert seen == [2] and found.workers == 2 and found.machine.latency == 1e-3
    assert "message times unknown" not in str(found)
    of_problem = lp_jax.plan(dataclasses.replace(problem, comm=mesh), machine=slow, seconds=0.0)
    assert seen == [2, 2] and of_problem.solver == found.solver
    monkeypatch.setattr(_plan, "cycles", lambda *args: [])  # each is a program
    apart = lp_jax.plan(problem, workers=2, machine=dataclasses.replace(UNFILLED, examples=2), seconds=1e9)
    assert seen == [2, 2] and "message times unknown, taken as zero: plan(comm=mesh)" in apart.reason
    with pytest.raises(ValueError, match=r"workers=4 and a comm of 2"):
        lp_jax.plan(problem, comm=mesh, workers=4, machine=slow, seconds=0.0)


def test_a_plan_says_once_that_a_layer_cannot_be_counted():
    @jax.custom_vjp
    def foreign(y):
        return jax.pure_callback(lambda y: np.asarray(y), y, y, vmap_method="sequential")

    foreign.defvjp(lambda y: (foreign(y), None), lambda _, y_bar: (y_bar,))

    def called(y, layer):
        return y + layer.params * foreign(y)

    def plain(y, layer):
        return y + layer.params * y

    for body, times in ((called, 1), (plain, 0)):
        problem = lp_jax.Problem(body, jnp.ones(8) / 8, jnp.ones((2, 4)))
        found = lp_jax.plan(problem, machine=machine(1e-5, auto=1), seconds=0.1)
        assert str(found).count("one at a time") == times
