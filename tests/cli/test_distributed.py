"""Layers over the devices of several processes, by ``jax.distributed``."""

import sys

import launch

SCRIPT = launch.HERE / "processes_solve.py"


def test_two_processes():
    """Two devices each: the same numbers as on one, and every process holds its own layers' gradients."""
    port = launch.free_port()
    commands = [[sys.executable, SCRIPT, i, 2, 2, port] for i in range(2)]
    for i, ended in enumerate(launch.together(commands, timeout=200)):
        assert ended.code == 0, ended.output
        assert f"passed in process {i}" in ended.output
