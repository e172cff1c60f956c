"""Predict what a training step costs before it is run."""

from lp_jax._solver import code as code
from lp_jax._work import Batch as Batch
from lp_jax._work import Schedule as Schedule
from lp_jax.planning._calibrate import calibrate as calibrate
from lp_jax.planning._candidates import RECOMMENDED as RECOMMENDED
from lp_jax.planning._cost import Memory as Memory
from lp_jax.planning._cost import Time as Time
from lp_jax.planning._cost import memory as memory
from lp_jax.planning._cost import pipeline as pipeline
from lp_jax.planning._cost import predict as predict
from lp_jax.planning._estimate import auto as auto
from lp_jax.planning._estimate import estimate as estimate
from lp_jax.planning._interconnect import Interconnect as Interconnect
from lp_jax.planning._interconnect import interconnect as interconnect
from lp_jax.planning._machine import Machine as Machine
from lp_jax.planning._plan import choose as choose
from lp_jax.planning._plan import plan as plan
from lp_jax.planning._result import Choice as Choice
from lp_jax.planning._result import Devices as Devices
from lp_jax.planning._result import Plan as Plan
from lp_jax.planning._result import Probed as Probed
from lp_jax.planning._result import reason as reason
from lp_jax.planning._schedule import count as count
from lp_jax.planning._schedule import training_step as training_step
