"""Training methods that work but did not win in our measurements; tested like everything else.

MG/Opt, the published rule for inexact solves, and gradients in fewer bytes.
"""

from lp_jax.train.contrib._codecs import average_compressed as average_compressed
from lp_jax.train.contrib._codecs import bfloat16 as bfloat16
from lp_jax.train.contrib._codecs import eight_bits as eight_bits
from lp_jax.train.contrib._codecs import top_k as top_k
from lp_jax.train.contrib._doubling import Doubling as Doubling
from lp_jax.train.contrib._mgopt import mgopt as mgopt
