"""Channels of mean 0 and deviation 1, by the statistics of the training part."""

from collections.abc import Callable

import numpy as np


def scaler(values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that takes the channels of ``values``, the last axis, to mean 0 and standard deviation 1.

    It returns float32. Channels that never change stay at 0.
    """
    axes = tuple(range(values.ndim - 1))
    mean, deviation = (statistic(values, axis=axes, dtype=np.float64) for statistic in (np.mean, np.std))
    # of a constant, rounding leaves more than nothing
    deviation = np.where(deviation <= 1e-7 * np.abs(mean), 1.0, deviation)
    return lambda other: ((other - mean) / deviation).astype(np.float32)
