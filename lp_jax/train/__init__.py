"""Training: an optax step, a loop with checkpoints and metrics, and training methods.

Pure functions and NamedTuples; the loop is a Python loop. Needs the extra ``lp_jax[train]``.
"""

try:
    import optax as _optax  # noqa: F401
    import orbax.checkpoint as _orbax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lp_jax.train needs {error.name}, of the extra lp_jax[train]: pip install 'lp_jax[train]'",
        name=error.name,
    ) from None

from lp_jax.train._checkpoint import CheckpointError as CheckpointError, Checkpoints as Checkpoints
from lp_jax.train._controller import Controller as Controller
from lp_jax.train._divergence import DivergenceError as DivergenceError
from lp_jax.train._lbfgs import Backtracking as Backtracking, scale_by_lbfgs as scale_by_lbfgs
from lp_jax.train._log import Log as Log
from lp_jax.train._loop import Every as Every, Interrupted as Interrupted, fit as fit
from lp_jax.train._nested import Depth as Depth, deepen as deepen, nested as nested
from lp_jax.train._one_shot import one_shot as one_shot
from lp_jax.train._penalty import depth_penalty as depth_penalty
from lp_jax.train._ranks import Ranks as Ranks
from lp_jax.train._step import init_state as init_state, make_train_step as make_train_step
from lp_jax.train._supervised import (
    classification as classification,
    cross_entropy as cross_entropy,
    evaluate as evaluate,
    mean_squared_error as mean_squared_error,
    plan as plan,
    predict as predict,
    regression as regression,
    residuals as residuals,
)
from lp_jax.train._types import Info as Info, TrainState as TrainState
