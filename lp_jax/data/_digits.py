"""The handwritten digits of scikit-learn."""

import numpy as np

from lp_jax.data._dataset import Dataset, require, split


def digits(seed: int = 0, test_fraction: float = 0.2) -> Dataset:
    """Load the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; nothing to download.

    They are split at random by ``seed``; ``test_fraction`` of every class, in (0, 1), is held out.

    Returns:
        A `Dataset` of inputs ``(8, 8, 1)`` in 10 classes.

    Raises:
        ModuleNotFoundError: if scikit-learn is not installed.
        ValueError: if the fraction is outside (0, 1), or leaves a class without training or held-out samples.

    Example:
        >>> from lp_jax import data
        >>> data.digits().train_x.shape
        (1437, 8, 8, 1)

    Reference:
        Alpaydin, Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998.
    """
    bunch = require("sklearn.datasets").load_digits()
    # Pixels are whole numbers from 0 to 16. The new axis is that of the channel.
    x = (bunch.images[..., None] / 16.0).astype(np.float32)
    y = bunch.target.astype(np.int32)
    return Dataset(*split(x, y, test_fraction, seed), classes=10, shape=x.shape[1:])
