# SPDX-License-Identifier: Apache-2.0
"""Numbers inside a page: byte planes, compressed, as text.

The bytes of a row of numbers are put next to each other by their place in the number,
which compresses far better, then deflated and written in base64. The page does the
reverse; see `rowReader` in `assets/page.js`.
"""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_KEPT_BITS = 11
"""How many bits of a mantissa are kept where space is short: an error of 2**-12."""


def encode_arrays(arrays: Sequence[Array]) -> str:
    """Return rows of numbers, one after another, as text."""
    planes = [shuffle(array) for array in arrays]
    return base64.b64encode(zlib.compress(b"".join(planes), 9)).decode("ascii")


def shuffle(array: Array) -> bytes:
    """Return the bytes of a row of numbers by their place, little-endian."""
    rows = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    planes: Array = rows.view(np.uint8).reshape(rows.size, rows.itemsize).T
    return planes.tobytes()


def shorten(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return numbers rounded to the bits that are kept where space is short."""
    dropped = 23 - _KEPT_BITS
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + (1 << (dropped - 1))) >> dropped << dropped
    found = rounded.astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values) & np.isfinite(found), found, values)
