"""Splitting samples into those to train with and those held out."""

import numpy as np


def check_fraction(test_fraction: float) -> None:
    """Refuse a fraction that leaves nothing on one side."""
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(f"test_fraction must be between 0 and 1, both excluded; got {test_fraction}.")


def stratified(
    labels: np.ndarray, test_fraction: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions to train with and positions held out, the same fraction of every class, each in a random order."""
    check_fraction(test_fraction)
    train, test = [], []
    for label in np.unique(labels):
        (of_class,) = np.nonzero(labels == label)
        of_class = generator.permutation(of_class)
        held_out = round(test_fraction * len(of_class))
        if not 0 < held_out < len(of_class):
            raise ValueError(
                f"test_fraction {test_fraction} leaves class {label}, of {len(of_class)} samples, "
                f"{held_out} of them to test with; wanted at least one to train and one to test with."
            )
        test.append(of_class[:held_out])
        train.append(of_class[held_out:])
    return generator.permutation(np.concatenate(train)), generator.permutation(np.concatenate(test))
