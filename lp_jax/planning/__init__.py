"""What a training step takes, told before it is run."""

from lp_jax.planning._schedule import Batch as Batch
from lp_jax.planning._schedule import Schedule as Schedule
from lp_jax.planning._schedule import solve as solve
from lp_jax.planning._schedule import training_step as training_step
