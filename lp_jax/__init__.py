"""Layer-parallel training of deep networks in JAX.

The layers of a network are solved for all at once, iteratively, by multigrid-reduction-in-time (MGRIT), Picard
sweeps or Newton's method, forward and adjoint, to the result of evaluating them one after another.
"""

import importlib as _importlib
from importlib.metadata import version as _version
from types import ModuleType as _ModuleType

from lp_jax import multigrid as multigrid
from lp_jax._arrays._check import register as register
from lp_jax._arrays._types import Layer as Layer
from lp_jax._choice._fastest import Fastest as Fastest
from lp_jax._comms._comm import Comm as Comm
from lp_jax._comms._mesh import MeshComm as MeshComm
from lp_jax._comms._mpi import MPIComm as MPIComm, layer_slices as layer_slices
from lp_jax._comms._workers import Workers as Workers
from lp_jax._levels._result import RESULTS as RESULTS
from lp_jax._parallel import parallel as parallel, scans as scans
from lp_jax._pipeline import pipeline as pipeline
from lp_jax._problem import Problem as Problem, solve as solve, solve_vjp as solve_vjp
from lp_jax._programs._results import value_and_grad as value_and_grad
from lp_jax._scan import scan as scan, scanned as scanned
from lp_jax._solution import (
    Solution as Solution,
    SolveError as SolveError,
    interpolate as interpolate,
)
from lp_jax._solvers._coarse_step import (
    Coarse as Coarse,
    CoarseStep as CoarseStep,
    Identity as Identity,
    Rediscretize as Rediscretize,
)
from lp_jax._solvers._mgrit import MGRIT as MGRIT
from lp_jax._solvers._newton import (
    Clip as Clip,
    Damping as Damping,
    Newton as Newton,
    Shrink as Shrink,
)
from lp_jax._solvers._serial import Serial as Serial
from lp_jax._solvers._solver import Needs as Needs, Solver as Solver, Start as Start, Stats as Stats
from lp_jax._solvers._sweeps import Picard as Picard, Secant as Secant, Windowed as Windowed
from lp_jax.planning._calibrate import calibrate as calibrate
from lp_jax.planning._gradient_error import compare as compare, gradient_error as gradient_error
from lp_jax.planning._plan import plan as plan

__version__ = _version("lp_jax")


def __getattr__(name: str) -> _ModuleType:
    """Import a subpackage when it is first used: `nn` needs Flax, `train` and `viz` need the extra "train"."""
    if name in ("data", "nn", "train", "viz"):
        return _importlib.import_module(f"lp_jax.{name}")
    raise AttributeError(f"module 'lp_jax' has no attribute {name!r}")
