"""bfloat16 without torch: its bits in uint16, its values in float32.

Invariant: to_bits(to_float(bits)) is bits for every value that is not a NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_float(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    wide = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.asarray((wide + np.uint32(0x7FFF) + (wide >> 16 & 1)) >> 16, np.uint16)
