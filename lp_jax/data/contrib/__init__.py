"""Data sets of single problems, in rare formats: shapes."""

from lp_jax.data.contrib._modelnet import modelnet as modelnet
