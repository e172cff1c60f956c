"""Channels of mean 0 and deviation 1, by the statistics of what is trained with."""

import numpy as np


class Scale:
    """Takes the means of some values to 0 and their standard deviations to 1; channels that never change stay at 0.

    Args:
        values: ``(values, channels)``.
    """

    def __init__(self, values: np.ndarray):
        self._mean = values.mean(axis=0, dtype=np.float64)
        deviation = values.std(axis=0, dtype=np.float64)
        # of a constant, rounding leaves more than nothing
        constant = deviation <= 1e-7 * np.abs(self._mean)
        self._deviation = np.where(constant, 1.0, deviation)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The same of other values, ``(..., channels)``, in float32."""
        return ((values - self._mean) / self._deviation).astype(np.float32)
