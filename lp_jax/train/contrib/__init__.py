"""A training method that works but did not win in our measurements: MG/Opt. Tested like everything else."""

from lp_jax.train.contrib._mgopt import mgopt as mgopt
