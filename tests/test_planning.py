"""The cost model: its terms by hand, and the files of machines."""

import json
import math

import jax.numpy as jnp
import pytest

import lp_jax
from lp_jax import planning

MACHINE = planning.Machine(
    layers=(1, 8, 64),
    forward=(1.0, 2.0, 9.0),
    linearise=(1.5, 3.0, 12.0),
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
    time = planning.time(lp_jax.Serial(), lp_jax.Serial(), 64, MACHINE)
    assert time == (64 * 3.0, 0.0, 0.0, 7.0)
    assert time.seconds == 199.0


def test_sweeps_by_hand_on_one_worker_and_on_eight():
    """Three sweeps and a last evaluation, two adjoint sweeps and the gradient; each sweep sends one state and a prefix sum."""
    solvers = lp_jax.Picard(sweeps=3), lp_jax.Picard(sweeps=2)
    assert planning.time(*solvers, 64, MACHINE).evaluations == 4 * 9.0 + 2 * 18.0 + 20.0
    time = planning.time(*solvers, 64, MACHINE, workers=8)
    hops = 1 + (1 + 3)  # of a sweep: neighbour, prefix sum over seven
    assert time.evaluations == 4 * 2.0 + 2 * 4.0 + 5.0
    assert time.messages == (5 * hops + 2) * 0.75
    assert time.reductions == 2 * 2 * 3 * 0.75
    assert time.fixed == 7.0


def test_intervals_one_after_another_take_their_number():
    looped = planning.Machine(
        layers=(1,), forward=(1.0,), linearise=(1.0,), adjoint=(1.0,), gradient=(1.0,), looped=True
    )
    solvers = lp_jax.MGRIT(iterations=2, storage="all"), lp_jax.MGRIT(iterations=1, storage="all")
    time = planning.time(*solvers, 64, looped)
    assert time.evaluations == planning.training_step(*solvers, 64, looped=True).work()


WRONG = {
    "layers": ({"layers": (8, 1, 64)}, "ascending"),
    "forward": ({"forward": (1.0, 2.0)}, "forward must have a time for each of the 3"),
    "adjoint": ({"adjoint": (1.0, -2.0, 3.0)}, "adjoint must be positive"),
    "serial": ({"serial": (0.0, 1.0)}, "serial must be positive"),
    "latency": ({"latency": math.nan}, "latency must be a number of at least 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_that_are_none_are_refused(name):
    fields, text = WRONG[name]
    known = {field: getattr(MACHINE, field) for field in ("layers", "forward", "linearise", "adjoint", "gradient")}
    with pytest.raises(ValueError, match=text):
        planning.Machine(**(known | fields))


def test_machines_are_saved_and_read(tmp_path):
    for machine in (
        MACHINE,
        planning.Machine(**dict.fromkeys(("layers", "forward", "linearise", "adjoint", "gradient"), (1,))),
    ):
        machine.save(tmp_path / "machine.json")
        assert planning.Machine.load(tmp_path / "machine.json") == machine


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"layers": [1]}', '{"cores": 2}', '{"layers": "all"}'])
def test_files_that_are_none_are_refused_in_one_line(tmp_path, text):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no machine file") as caught:
        planning.Machine.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("quick_compilation")
def test_calibration_measures_the_network_that_it_is_given(tmp_path):
    def step(y, layer):
        return y + layer.dt * jnp.tanh(y @ layer.params * layer.shared + layer.data[None])

    options = {"shared": jnp.ones(()), "data": jnp.zeros((12, 4)), "t1": 3.0}
    machine = planning.calibrate(step, jnp.zeros((12, 4, 4)), jnp.ones((2, 4)), name="small", **options)
    assert machine.looped and machine.layers == (1,) and machine.name == "small"
    assert (machine.state_bytes, machine.layer_bytes) == (2 * 4 * 8, 4 * 4 * 8)
    machine.save(tmp_path / "machine.json")
    assert json.loads((tmp_path / "machine.json").read_text())["forward"] == list(machine.forward)
