"""Execute the notebooks and write them, outputs and pictures inside, as .ipynb files.

python notebooks/execute.py FOLDER                 all of them, in order
python notebooks/execute.py FOLDER 02 06           those whose names start so

Needs jupytext, nbclient and ipykernel, of the extra lp_jax[test].
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

SOURCES = sorted(Path(__file__).resolve().parent.glob("[0-9]*.py"))


def execute(source: Path, folder: Path, *, cell_seconds: int = 300) -> Path:
    """Run one source from top to bottom in a kernel of this Python, and write it to ``folder``.

    The kernel runs on the CPU, with the package that this process would import. It ends with this call.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises; the message has the cell and the traceback.
        nbclient.exceptions.CellTimeoutError: if a cell takes longer than ``cell_seconds``.
    """
    notebook = jupytext.read(source)
    notebook.metadata.pop("jupytext", None)  # the result is a notebook of its own
    kept = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    with tempfile.TemporaryDirectory() as scratch:
        kernel = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(
                kernel_dirs=[]
            ),  # the kernel of this Python, no other
            connection_file=str(Path(scratch) / "kernel.json"),
            transport="tcp"
            if sys.platform == "win32"
            else "ipc",  # no port that others could connect to
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=cell_seconds,
            startup_timeout=120,
            shutdown_kernel="immediate",
            resources={"metadata": {"path": scratch}},
        )
        paths = os.pathsep.join([str(source.parents[1]), *filter(None, [kept.get("PYTHONPATH")])])
        client.execute(
            cleanup_kc=True,
            env=kept | {"JAX_PLATFORMS": "cpu", "IPYTHONDIR": scratch, "PYTHONPATH": paths},
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{source.stem}.ipynb"
    nbformat.write(notebook, written)
    return written


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Execute the notebooks and write them as .ipynb files."
    )
    parser.add_argument("folder", type=Path, help="where the executed notebooks are written")
    parser.add_argument(
        "names", nargs="*", help="the first letters of those to run, such as 02; all by default"
    )
    options = parser.parse_args()
    chosen = [path for path in SOURCES if path.name.startswith(tuple(options.names) or ("",))]
    if not chosen:
        sys.exit(
            f"No notebook starts with {' or '.join(options.names)}; there are {', '.join(p.stem for p in SOURCES)}."
        )
    for source in chosen:
        started = time.perf_counter()
        written = execute(source, options.folder)
        print(f"{written}  {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
