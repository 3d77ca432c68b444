"""The handwritten digits of scikit-learn, for workloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

SEED = 0
CLASSES = 10
PIXELS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Images and what they show.

    Attributes:
        pixels: [n, 64] float32, from 0 to 1.
        labels: [n] int64, the digits.
    """

    pixels: NDArray[np.float32]
    labels: NDArray[np.int64]


def load() -> tuple[Images, Images]:
    """Loads the digits, always split in the same way, into images to train on and images to test with."""
    from sklearn.datasets import load_digits  # only here: every actor imports this module
    from sklearn.utils import Bunch

    digits = cast(Bunch, load_digits())
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    tests = len(order) // 5
    pixels = (digits.data / 16.0).astype(np.float32)
    train, test = (Images(pixels=pixels[of], labels=digits.target[of]) for of in (order[tests:], order[:tests]))
    return train, test
