"""Small data sets to try things on, your own arrays, and batches.

Everything is NumPy; nothing here downloads or unpickles. docs/data.md says what a file of your own holds, and which script
reads the data sets of the papers.
"""

from lp_jax.data._arrays import arrays as arrays
from lp_jax.data._batches import batches as batches
from lp_jax.data._dataset import DataError as DataError, Dataset as Dataset
from lp_jax.data._digits import digits as digits
from lp_jax.data._peaks import peaks as peaks
