"""Solves and training over the devices of several processes of ``jax.distributed``."""

import sys

import launch
import numpy as np
import pytest
import training
from networks import assert_close


@pytest.mark.usefixtures("standard_promotion")
def test_two_processes_solve_and_train(tmp_path):
    """Two devices each: the same numbers as on one, and every process holds its own layers' gradients.

    From the checkpoint of all processes, one device goes on to the numbers of a training that was on one device throughout.
    """
    port = launch.free_port()
    folder = tmp_path / "processes"
    commands = [
        [sys.executable, launch.HERE / "processes_solve.py", i, 2, 2, port, folder]
        for i in range(2)
    ]
    for i, ended in enumerate(launch.together(commands, timeout=200)):
        assert ended.code == 0 and f"passed in process {i}" in ended.output, ended.output
    state, losses = training.run(folder, epochs=2)
    whole, all_losses = training.run(tmp_path / "whole", epochs=2)
    assert int(state.step) == 4 and len(losses) == 2 and len(all_losses) == 4
    np.testing.assert_allclose(losses, all_losses[2:], rtol=1e-9)
    assert_close(state.params, whole.params, 1e-9)
