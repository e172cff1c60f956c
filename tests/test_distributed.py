"""Layers over the devices of several processes, by ``jax.distributed``."""

import sys

import launch
import pytest

SCRIPT = launch.HERE / "processes_solve.py"


@pytest.mark.parametrize("devices", [1, 2])
def test_two_processes(devices):
    """The same numbers as on one device, and every process holds its own layers' gradients."""
    port = launch.free_port()
    commands = [[sys.executable, SCRIPT, i, 2, devices, port] for i in range(2)]
    for i, ended in enumerate(launch.together(commands, timeout=200)):
        assert ended.code == 0, ended.output
        assert f"passed in process {i}" in ended.output
