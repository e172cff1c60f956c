"""The digits of scikit-learn."""

import numpy as np

from lp_jax.data._dataset import Dataset, check_fraction
from lp_jax.data._read import needed


def digits(seed: int = 0, test_fraction: float = 0.2) -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; nothing to download.

    They are split at random by ``seed``; ``test_fraction`` of every class, in (0, 1), is held out.

    Returns:
        A `Dataset` of inputs ``(8, 8, 1)`` in 10 classes.

    Raises:
        ModuleNotFoundError: without scikit-learn.
        ValueError: for a fraction outside (0, 1), or one that leaves a class without samples on either side.

    Example:
        >>> from lp_jax import data
        >>> data.digits().train_x.shape
        (1437, 8, 8, 1)

    Reference:
        Alpaydin, Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998.
    """
    check_fraction(test_fraction)
    bunch = needed("sklearn.datasets").load_digits()
    x = (bunch.images[..., None] / 16.0).astype(np.float32)
    y = bunch.target.astype(np.int32)
    split = needed("sklearn.model_selection").train_test_split
    train_x, test_x, train_y, test_y = split(x, y, test_size=test_fraction, random_state=seed, stratify=y)
    return Dataset(train_x, train_y, test_x, test_y, classes=10, shape=x.shape[1:])
