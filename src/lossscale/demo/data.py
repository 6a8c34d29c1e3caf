# SPDX-License-Identifier: Apache-2.0
"""Load the handwritten digits that ship with this package.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0.
These are the 1,797 images of its test part, 8 by 8 pixels of 0 to 16, in ten classes,
as scikit-learn ships them; only their order changed. See `DIGITS-LICENCE.txt`.

The split is fixed: 1,437 images to train on, 360 to test on, drawn at random, so one
writer can be in both. Reading unpickles nothing and touches no network.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASSES = 10
PIXELS = 64
_DARKEST = 16


class Digits(NamedTuple):
    """Images as rows of 64 float32 values from 0 to 1, labels as integers 0 to 9."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def load_digits() -> Digits:
    """Read the shipped file.

    Returns:
        The fixed split into 1,437 training and 360 test images.
    """
    resource = files(__package__ or __name__) / "digits.npz"
    with resource.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        return Digits(
            train_images=_unit_range(arrays["train_images"]),
            train_labels=arrays["train_labels"].astype(np.int64),
            test_images=_unit_range(arrays["test_images"]),
            test_labels=arrays["test_labels"].astype(np.int64),
        )


def _unit_range(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.divide(images, _DARKEST, dtype=np.float32)
