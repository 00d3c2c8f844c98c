"""CRC-32C of Python's own pages and entries; the data plane checks records by itself.

Invariant: a page's checksum lies at byte 8 and is computed with that field zero.
"""

from __future__ import annotations

import struct
from typing import Final

from flashkv.native import lib

CRC_FIELD: Final = struct.Struct("<I")


def crc32c(crc: int, data: bytes) -> int:
    """CRC-32C of the data before (crc) and `data`."""
    return int(lib.fkv_crc32c(crc, data, len(data)))


def with_crc(page: bytes) -> bytes:
    """The page with the CRC-32C of itself, that field being zero, at byte 8."""
    return page[:8] + CRC_FIELD.pack(crc32c(0, page[:8] + b"\0\0\0\0" + page[12:])) + page[12:]


def crc_right(page: bytes) -> bool:
    return with_crc(page) == page
