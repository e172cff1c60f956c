"""Data sets that need no hub: scikit-learn's digits, MNIST from its files; and shuffled mini-batches of them.

All of it is NumPy; nothing here downloads or unpickles.
"""

from lp_jax.data._batches import batches as batches
from lp_jax.data._dataset import DataError as DataError
from lp_jax.data._dataset import Dataset as Dataset
from lp_jax.data._digits import digits as digits
from lp_jax.data._idx import read_idx as read_idx
from lp_jax.data._mnist import mnist as mnist
