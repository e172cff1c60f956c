"""Data sets, from local files or from scikit-learn: images, words, series, points; and batches.

Everything is NumPy; nothing here downloads or unpickles. docs/data.md lists the files that each loader expects.
`lp_jax.data.contrib` has data sets of single problems.
"""

from lp_jax.data._arrays import arrays as arrays
from lp_jax.data._batches import Sequences as Sequences, batches as batches, bucketed as bucketed
from lp_jax.data._characters import characters as characters
from lp_jax.data._dataset import DataError as DataError, Dataset as Dataset
from lp_jax.data._gum import gum as gum
from lp_jax.data._mnist import digits as digits, mnist as mnist
from lp_jax.data._peaks import peaks as peaks
from lp_jax.data._timeseries import timeseries as timeseries
