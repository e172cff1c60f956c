"""Pictures of solvers and plans, as matplotlib figures: nothing is shown, nothing global is touched.

Needs the extra ``lp_jax[train]``. Save one with ``figure.savefig("plan.png")``; a notebook shows the one that a cell ends
with.
"""

try:
    import matplotlib as _matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lp_jax.viz needs {error.name}, of the extra lp_jax[train]: pip install 'lp_jax[train]'",
        name=error.name,
    ) from None

from lp_jax.viz._hierarchy import (
    Described as Described,
    describe as describe,
    hierarchy as hierarchy,
)
from lp_jax.viz._plan import plan as plan
from lp_jax.viz._schedule import schedule as schedule
