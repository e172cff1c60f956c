"""Predict the time and memory of a training step before it is run."""

from lp_jax.planning._compiled import (
    Compiled as Compiled,
    compiled as compiled,
    topology as topology,
)
from lp_jax.planning._cost import predict as predict
from lp_jax.planning._diagnose import diagnose as diagnose
from lp_jax.planning._estimate import assume as assume, default as default, estimate as estimate
from lp_jax.planning._machine import Machine as Machine
from lp_jax.planning._plan import choose as choose
from lp_jax.planning._result import Plan as Plan
from lp_jax.planning._schedule import training_step as training_step
from lp_jax.planning._solvers import held as held
