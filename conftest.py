"""Settings of every test: eight CPU devices, float64, strict promotion. Examples in docstrings run under JAX's defaults.

Warnings are errors; pyproject.toml says so.
"""

import contextlib
import gc
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

# Compiling is most of the suite's time: XLA's newer way to compile loops of numbers is a third of it, and cutting small
# programs into pieces that are compiled side by side costs more than it gains. jaxlib 0.11 and later have no other way.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
QUICK = QUICK if metadata.version("jaxlib").startswith("0.10.") else ""
# jax reads these once, so they come before its import. Processes that a test starts inherit them.
_flags = os.environ.get("XLA_FLAGS", "")
if "--xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8 {QUICK}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_DISABLE_MOST_OPTIMIZATIONS", "1"
)  # many small programs that run once each
os.environ.setdefault("MPLBACKEND", "Agg")
# mpi4jax warns about any jax newer than itself; whether the two work together is what the tests find out.
os.environ.setdefault("MPI4JAX_NO_WARN_JAX_VERSION", "1")

import jax  # noqa: E402

from lp_jax.planning import _measure  # noqa: E402

# What a trace leaves behind is seldom garbage, and to look through it all takes a tenth of the time.
gc.set_threshold(50_000, 20, 50)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Layers are timed briefly: no test asks for good numbers.
_measure._SAMPLES, _measure._SAMPLE = 1, 1e-3

# The programs that tests start are not collected: the search for examples would import them.
collect_ignore_glob = ["tests/helpers/*"]

_BESIDE = Path(__file__).resolve().parents[1] / "shared"


def _folder(name: str) -> tuple[str, Path]:
    """The variable that names a data folder, and where that folder is expected."""
    variable = f"LP_JAX_{name.upper()}"
    return variable, Path(os.environ.get(variable) or _BESIDE / name)


def _require(name: str) -> Path:
    variable, folder = _folder(name)
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; set {variable} to where the {name} files are")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of results that other codes computed on problems stored beside them."""
    return _require("golden")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of small data sets."""
    return _require("data")


@pytest.fixture
def optimised() -> Iterator[None]:
    """For tests of what XLA makes of a program, and for those that compute more than they compile."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Lets optax run: its Adam raises floats to an integer step count, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def free_promotion() -> Iterator[None]:
    """JAX's own rules for ranks and dtypes, which other libraries count on; numbers are in double precision."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@contextlib.contextmanager
def jax_defaults() -> Iterator[None]:
    """JAX's settings as users have them: single precision, too."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """`jax_defaults`, for a whole test."""
    with jax_defaults():
        yield


@pytest.fixture(autouse=True)
def users_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the examples in docstrings under JAX's own defaults."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    if any(name in request.node.dtest.docstring for name in ("MPIComm()", "Ranks.grid()")):
        pytest.skip("starts MPI; test_mpi.py runs it in MPI jobs")
    with jax_defaults():
        yield


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Compiled programs are dropped before they crash the process.

    Each piece of one is three memory maps, and Linux allows 65,530 to a process; XLA ends with a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


def pytest_collection_finish() -> None:
    """Keep imported objects out of later searches for garbage: they stay until the end."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    """Versions, and loudly whether the tests that need files outside the repository can run."""
    lines = [f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices"]
    for name in ("golden", "data"):
        variable, folder = _folder(name)
        found = (
            str(folder)
            if folder.is_dir()
            else f"MISSING, its tests will be skipped (set {variable})"
        )
        lines.append(f"{name}: {found}")
    return lines
