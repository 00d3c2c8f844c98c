"""Blocks of bytes whose inside the engine doesn't tell, of sizes that vary from call to call.

A geometry has one size a token; here a block of n bytes is a run of `tokens` units, the unit being
the largest power of two that divides n. Each unit is a group of one geometry, so that all sizes
share one keyspace.

Invariants
  - (group, tokens) names exactly one size, so a get with another size than was stored is a miss;
  - the table of units never changes: it is part of the identity.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from flashkv import limits
from flashkv.geometry import DType, Group, GroupKind, KVGeometry, Plane, Role

UNITS: Final = tuple(1 << power for power in range(4, 27))
"""16 bytes to 64 MiB: as many as the superblock has room for."""


def _group(unit: int) -> Group:
    plane = Plane(Role.OPAQUE, 1, 1, unit, DType.OPAQUE)
    return Group(f"x{unit}", GroupKind.FULL, (plane,))


OPAQUE_GEOMETRY: Final = KVGeometry(tuple(_group(unit) for unit in UNITS))


@lru_cache(maxsize=4096)
def split(size: int) -> tuple[int, int] | None:
    """(group, tokens) of a block of so many bytes; None where no unit fits it.

    Sizes that fit are multiples of 16 bytes whose odd part is at most 1,023: those of whole chunks
    are, since layers, heads and dimensions multiply to few odd factors.
    """
    if size <= 0:
        return None
    unit = min(size & -size, UNITS[-1])
    tokens = size // unit
    if unit < UNITS[0] or tokens > limits.BLOCK_TOKENS_MAX:
        return None
    return UNITS.index(unit), tokens
