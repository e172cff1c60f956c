"""Data sets, from files that are already here or from scikit-learn: images, words, series, shapes, points; and batches.

All of it is NumPy; nothing here downloads or unpickles. docs/data.md says which files each loader expects.
"""

from lp_jax.data._batches import batches as batches
from lp_jax.data._dataset import DataError as DataError
from lp_jax.data._dataset import Dataset as Dataset
from lp_jax.data._digits import digits as digits
from lp_jax.data._idx import read_idx as read_idx
from lp_jax.data._mnist import mnist as mnist
