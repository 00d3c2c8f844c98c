"""The superblock: what never changes about a shard, and which manifest log rules.

Invariants
  - a superblock is one page with a checksum of its own; a damaged one is None, never wrong;
  - a format or feature that this build doesn't know is refused before anything else is believed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flashkv import limits
from flashkv.checksums import crc_right, with_crc
from flashkv.errors import FormatError
from flashkv.native import ffi, lib

SUPER_MAGIC: Final = b"FKVSUPER"


@dataclass(frozen=True)
class Superblock:
    """What never changes about a shard, and which manifest rules."""

    store_uuid: bytes
    segment_bytes: int
    capacity_bytes: int
    geometry_json: bytes
    created_ms: int
    generation: int = 0
    manifest_generation: int = 0

    def encode(self) -> bytes:
        """The page on flash."""
        row = ffi.new("fkv_superblock *")
        row.magic = SUPER_MAGIC
        row.version = lib.FKV_FORMAT_VERSION
        row.generation = self.generation
        row.store_uuid = self.store_uuid
        row.page_shift = lib.FKV_PAGE_SHIFT
        row.checksum_id = lib.FKV_CHECKSUM_CRC32C
        row.segment_bytes = self.segment_bytes
        row.manifest_generation = self.manifest_generation
        row.created_ms = self.created_ms
        row.capacity_bytes = self.capacity_bytes
        row.geometry_bytes = len(self.geometry_json)
        page = (bytes(ffi.buffer(row)) + self.geometry_json).ljust(limits.PAGE_BYTES, b"\0")
        return with_crc(page)

    @classmethod
    def decode(cls, page: bytes, name: str) -> Superblock | None:
        """None where the page is damaged. What a file holds behind its first page is no part of it:
        a page that is written there would not take it away.

        Raises FormatError for a format that this build doesn't know.
        """
        size = int(ffi.sizeof("fkv_superblock"))
        page = page[: limits.PAGE_BYTES]
        if len(page) != limits.PAGE_BYTES or page[:8] != SUPER_MAGIC or not crc_right(page):
            return None
        row = ffi.new("fkv_superblock *")
        ffi.memmove(row, page, size)
        if row.version != lib.FKV_FORMAT_VERSION:
            raise FormatError(
                f"{name} is of another format version",
                value=row.version,
                limit=f"version {lib.FKV_FORMAT_VERSION}",
                advice="use a new folder: version 0 is not kept between builds",
            )
        unknown = row.features_incompatible or row.features_read_only or row.reserved
        if (
            unknown
            or row.page_shift != lib.FKV_PAGE_SHIFT
            or row.checksum_id != lib.FKV_CHECKSUM_CRC32C
        ):
            raise FormatError(f"{name} uses a feature that this build lacks", value=f"{unknown:#x}")
        if size + row.geometry_bytes > limits.PAGE_BYTES:
            return None
        return cls(
            store_uuid=bytes(row.store_uuid),
            segment_bytes=int(row.segment_bytes),
            capacity_bytes=int(row.capacity_bytes),
            geometry_json=page[size : size + row.geometry_bytes],
            created_ms=int(row.created_ms),
            generation=int(row.generation),
            manifest_generation=int(row.manifest_generation),
        )
