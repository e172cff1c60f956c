"""What a training step takes, told before it is run."""

from lp_jax.planning._calibrate import calibrate as calibrate
from lp_jax.planning._cost import Time as Time
from lp_jax.planning._cost import time as time
from lp_jax.planning._machine import Machine as Machine
from lp_jax.planning._schedule import Batch as Batch
from lp_jax.planning._schedule import Schedule as Schedule
from lp_jax.planning._schedule import solve as solve
from lp_jax.planning._schedule import training_step as training_step
