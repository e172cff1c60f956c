"""A gate on counts: evaluations, depth, messages and temporary memory of reference solves, held in counts.json.

A number that changes is a line in the CHANGELOG. ``python tests/core/test_counts.py`` measures all anew and writes the file.
"""

import collections
import functools
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # as the tests run
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "helpers")]
    import conftest  # noqa: F401

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from compiled import collectives, compiled
from problems import INJECT
from products import cost, layer

import lp_jax

HELD = Path(__file__).with_suffix("").with_name("counts.json")
LAYERS, WIDTH, WORKERS = 32, 4, 4
IDENTITY = lp_jax.Identity()
SOLVERS = {
    "serial": lp_jax.Serial(),
    "picard": lp_jax.Picard(sweeps=3),
    "picard, states only": lp_jax.Picard(sweeps=3, storage="states"),
    "picard, windows": lp_jax.Windowed(sweeps=3, windows=4),
    "mgrit, 2 levels": lp_jax.MGRIT(),
    "mgrit, 3 levels": lp_jax.MGRIT(levels=3, coarsening=2),
    "mgrit, F-cycle": lp_jax.MGRIT(levels=3, coarsening=2, cycle="F", start="guess", coarse_step=INJECT),
    "mgrit, FCF, injection": lp_jax.MGRIT(relaxation="FCF", coarse_step=INJECT),
    "mgrit, identity": lp_jax.MGRIT(coarsening=8, coarse_step=IDENTITY, start="guess"),
    "mgrit, storage all": lp_jax.MGRIT(coarse_step=INJECT, storage="all"),
    "newton": lp_jax.Newton(iterations=2, batch_axes=1),
    "newton, diagonal": lp_jax.Newton(iterations=2, jacobian="diagonal", batch_axes=1),
}


def measured(solver):
    """Counts of the forward solve and of value and gradient, for layers of one product each and one example.

    Evaluations and depth are those of one device; messages are for four. Bytes: of value and gradient on one device,
    and of each of the four.
    """
    params = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    y0 = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)

    def loss(params, y0, comm=None):
        return jnp.sum(lp_jax.solve(layer, params, y0, solver=solver, comm=comm).y1 ** 2)

    comm = lp_jax.MeshComm(jax.make_mesh((WORKERS,), ("layers",), devices=jax.devices()[:WORKERS]))
    found = {}
    for name, function in (("forward", loss), ("gradient", jax.value_and_grad(loss))):
        work, depth = cost(function, params, y0, unit=2 * WIDTH**2)
        comms = (None, comm) if name == "gradient" else (comm,)
        programs = [compiled(jax.jit(functools.partial(function, comm=c)).lower(params, y0)) for c in comms]
        messages = collections.Counter()
        for (kind, _), times in collectives(programs[-1]).items():
            messages[kind] += times
        nbytes = [program.memory_analysis().temp_size_in_bytes for program in programs]
        found[name] = {"evaluations": work, "depth": depth, "messages": dict(sorted(messages.items())), "bytes": nbytes}
    return found


def held():
    return json.loads(HELD.read_text())


@pytest.mark.parametrize("name", SOLVERS)
def test_counts_are_those_held(name):
    """Bytes are XLA's choice, and compared where the version is that of the file."""
    stored, found = held(), measured(SOLVERS[name])
    wanted = stored["solves"][name]
    if stored["jaxlib"] != jaxlib.__version__:
        for solve in ("forward", "gradient"):
            del wanted[solve]["bytes"], found[solve]["bytes"]
    assert found == wanted, f"counts have changed; if that is meant, run python {os.path.relpath(__file__)}"


def test_the_file_holds_each_solver():
    assert list(held()["solves"]) == list(SOLVERS)


if __name__ == "__main__":
    solves = {name: measured(solver) for name, solver in SOLVERS.items()}
    HELD.write_text(json.dumps({"jaxlib": jaxlib.__version__, "solves": solves}, indent=1) + "\n")
