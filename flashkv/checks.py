"""Checks of arguments: what a caller gave, as the type that the code behind it counts on.

Invariants
  - a check returns the argument in its plain form (int, tuple, bytes, array) or raises the given
    kind of error, which names the argument and the value;
  - True and False are no numbers, and nothing is rounded or parsed on the way.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashkv.errors import FlashKVError

Kind = type[FlashKVError]
LARGEST = sys.float_info.max


def shown(value: object) -> str:
    """A value for a message: its repr, shortened where it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no int of thousands of digits
        return f"a {type(value).__name__} too long to print"


def whole(error: Kind, name: str, value: object, low: int, high: int) -> int:
    """An int (Python's or numpy's) from low to high."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise error(f"{name} must be an int", value=shown(value), limit=f"{low} to {high}")
    if not low <= value <= high:
        raise error(f"{name} is out of range", value=shown(int(value)), limit=f"{low} to {high}")
    return int(value)


def positive(error: Kind, name: str, value: object) -> float:
    """A finite number (Python's or numpy's) above 0."""
    kinds = (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= LARGEST:
        raise error(f"{name} must be a number above 0", value=shown(value))
    return float(value)


def seconds(error: Kind, name: str, milliseconds: object) -> float:
    """Seconds of a number of milliseconds (Python's or numpy's), infinity among them."""
    kinds = (int, float, np.integer, np.floating)
    number = math.nan
    if isinstance(milliseconds, kinds) and not isinstance(milliseconds, bool):
        with suppress(OverflowError):
            number = float(milliseconds) / 1e3
    if math.isnan(number):
        raise error(f"{name} must be a number", value=shown(milliseconds))
    return number


def flag(error: Kind, name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False", value=shown(value))
    return value


def whole_numbers(error: Kind, name: str, values: object) -> tuple[int, ...]:
    """A sequence or array of ints, as a tuple."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, Sequence) and not isinstance(items, (str, bytes)):
        kinds = (int, np.integer)
        if all(isinstance(item, kinds) and not isinstance(item, bool) for item in items):
            return tuple(int(item) for item in items)
    raise error(f"{name} must be a sequence of ints", value=shown(values))


def pair(error: Kind, name: str, values: object) -> tuple[int, int]:
    """Two ints."""
    numbers = whole_numbers(error, name, values)
    if len(numbers) != 2:
        raise error(f"{name} must be a pair of ints", value=shown(values))
    return numbers[0], numbers[1]


def array(error: Kind, name: str, values: Any) -> NDArray[Any]:
    """A number, sequence or array as numpy's; nothing is said of its shape or dtype."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError):  # ragged, on a GPU, too large
        raise error(f"{name} are no array", value=shown(values)) from None


def instance(error: Kind, name: str, value: object, kind: type) -> None:
    """Refuses what isn't of the kind."""
    if not isinstance(value, kind):
        raise error(f"{name} must be a {kind.__name__}", value=shown(value))


def members(error: Kind, name: str, values: object, kind: type) -> tuple[Any, ...]:
    """A list or tuple of objects of one kind, as a tuple."""
    if not isinstance(values, (list, tuple)):
        raise error(f"{name} must be a sequence of {kind.__name__}", value=shown(values))
    for value in values:
        instance(error, f"each of {name}", value, kind)
    return tuple(values)


def raw(error: Kind, name: str, value: object) -> bytes:
    """Bytes."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise error(f"{name} must be bytes", value=shown(value))
    return bytes(value)
