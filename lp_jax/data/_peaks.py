"""Points in the plane and the level sets of MATLAB's ``peaks``."""

import numpy as np

from lp_jax._arrays import _check
from lp_jax.data._dataset import Dataset, split

_HALF = 3.0  # half of the square's side


def peaks(
    samples: int = 5000, test_fraction: float = 0.2, seed: int = 0, classes: int = 5
) -> Dataset:
    """Draw points of a square. Their classes are the level sets of ``peaks`` that they lie in.

    The function is MATLAB's,

    .. math::

        f(a, b) = 3 (1 - a)^2 e^{-a^2 - (b + 1)^2} - 10 (a / 5 - a^3 - b^5) e^{-a^2 - b^2} - e^{-(a + 1)^2 - b^2} / 3

    on [-3, 3]². Its range is cut into intervals of equal width, one for each class, lowest first. Equally many points are drawn
    from each level set, uniformly within it. So the classes are balanced, and the class of a point does not depend on the
    other points.

    Args:
        samples: number of points. If the classes do not divide it, the first classes have one point more.
        test_fraction: fraction of the points of every class that is held out, in (0, 1).
        seed: seed of points and split.
        classes: number of level sets.

    Returns:
        A `Dataset` of inputs ``(2,)``, float32 in [-1, 1]: (a, b) / 3.

    Raises:
        ValueError: if the fraction is outside (0, 1) or leaves a class without training or held-out samples, or there are fewer
            than two classes.
        TypeError: if a number is not an integer.

    Example:
        >>> from lp_jax import data
        >>> points = data.peaks(samples=500)
        >>> points.train_x.shape, points.test_x.shape
        ((400, 2), (100, 2))

    Reference:
        Haber, Ruthotto, "Stable architectures for deep neural networks", Inverse Problems 34 (2018), section 6.1, and
        its code (Meganet, ``setupPeaks``).
    """
    _check.integer("classes", classes, least=2)
    _check.integer("samples", samples, least=1)
    _check.integer("seed", seed, least=0)
    generator = np.random.default_rng(seed)
    # The range is that of the values on a fine grid, so that it does not depend on the seed.
    grid = np.linspace(-_HALF, _HALF, 601)
    values = _function(grid[:, None], grid[None, :])
    inner = np.linspace(values.min(), values.max(), classes + 1)[1:-1]  # bounds between two classes
    missing = np.bincount(np.arange(samples) % classes, minlength=classes)
    points = []
    labels = []
    # Points are drawn over the whole square and kept while their class lacks some. So they are uniform within a level set.
    while missing.any():
        block = generator.uniform(-_HALF, _HALF, (20_000, 2))
        label = np.digitize(_function(block[:, 0], block[:, 1]), inner)
        for wanted in range(classes):
            new = block[label == wanted][: missing[wanted]]
            points.append(new)
            labels.append(np.full(len(new), wanted, np.int32))
            missing[wanted] -= len(new)
    x = (np.concatenate(points) / _HALF).astype(np.float32)
    y = np.concatenate(labels)
    return Dataset(*split(x, y, test_fraction, seed), classes=classes, shape=(2,))


def _function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    first = 3 * (1 - a) ** 2 * np.exp(-(a**2) - (b + 1) ** 2)
    second = 10 * (a / 5 - a**3 - b**5) * np.exp(-(a**2) - b**2)
    return first - second - np.exp(-((a + 1) ** 2) - b**2) / 3
