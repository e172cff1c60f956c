"""Data sets of single problems, in rare formats: shapes, spectra, photographs."""

from lp_jax.data.contrib._indian_pines import indian_pines as indian_pines
from lp_jax.data.contrib._modelnet import modelnet as modelnet
from lp_jax.data.contrib._tiny_imagenet import tiny_imagenet as tiny_imagenet
