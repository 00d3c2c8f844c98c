"""A sealed segment's directory and footer: numpy rows <-> pages. No I/O.

Invariants
  - the footer lies in the segment's last page, bound to the segment's uuid and epoch: a footer of
    an earlier epoch is none;
  - every section has a checksum of its own and begins on a page; unknown section types are passed
    over;
  - what is right and what isn't, row by row, the data plane says (directory.c): here its verdict
    becomes arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.checksums import crc32c
from flashkv.errors import native_ok
from flashkv.native import ffi, lib, pointer
from flashkv.segments import DIR_BLOCK, DIR_RECORD

FOOTER_MAGIC: Final = b"FKVFOOTR"


@dataclass(frozen=True, eq=False)
class Directory:
    """Rows of a segment. blocks are in the order of records; namespaces: digests, 32 bytes each."""

    records: NDArray[Any]
    blocks: NDArray[Any]
    namespaces: list[bytes]
    last_sequence: int = 0

    @property
    def next_page(self) -> int:
        """First page behind the last record."""
        ends = self.records["page"].astype(np.int64) + self.records["pages"]
        return int(ends.max()) if len(ends) else 1


def pages_needed(records: Any, blocks: Any, namespaces: int, *, bloom: bool) -> Any:
    """Pages of the sections of so many rows, without the footer. Counts may be arrays."""
    pages = _pages(records * DIR_RECORD.itemsize) + _pages(blocks * DIR_BLOCK.itemsize)
    pages = pages + _pages(namespaces * limits.NAMESPACE_BYTES)
    if bloom:  # rounded up as fkv_bloom_bytes does
        pages = pages + _pages(blocks * limits.BLOOM_BITS_PER_KEY // 8 + 64)
    return pages


def encode(
    directory: Directory, uuid: bytes, epoch: int, first_page: int, *, bloom: bool
) -> tuple[bytes, bytes]:
    """(section pages that begin at first_page, footer page)."""
    sections = [
        (lib.FKV_SECTION_DIR_RECORDS, directory.records.tobytes()),
        (lib.FKV_SECTION_DIR_BLOCKS, directory.blocks.tobytes()),
        (lib.FKV_SECTION_DIR_NAMESPACES, b"".join(directory.namespaces)),
    ]
    if bloom:
        sections.append((lib.FKV_SECTION_BLOOM, _bloom(directory.blocks)))
    footer = ffi.new("fkv_segment_footer *")
    footer.magic = FOOTER_MAGIC
    footer.version = lib.FKV_FORMAT_VERSION
    footer.segment_uuid = uuid
    footer.epoch = epoch
    footer.record_count = len(directory.records)
    footer.block_count = len(directory.blocks)
    footer.last_sequence = directory.last_sequence
    footer.section_count = len(sections)
    body = bytearray()
    for row, (kind, data) in zip(footer.sections, sections, strict=False):
        row.type = kind
        row.version = 0
        row.crc = crc32c(0, data)
        row.offset_bytes = first_page * limits.PAGE_BYTES + len(body)
        row.length_bytes = len(data)
        body += data.ljust(_pages(len(data)) * limits.PAGE_BYTES, b"\0")
    return bytes(body), footer_page(footer, uuid, epoch)


def footer_page(footer: Any, uuid: bytes, epoch: int) -> bytes:
    """The page of an fkv_segment_footer, whose checksum is set."""
    page = bytes(ffi.buffer(footer)).ljust(limits.PAGE_BYTES, b"\0")
    footer.crc = lib.fkv_footer_crc(page, uuid, epoch)
    return bytes(ffi.buffer(footer)).ljust(limits.PAGE_BYTES, b"\0")


@dataclass(frozen=True)
class Footer:
    """What a footer says: sections as (type, offset, length, crc)."""

    sections: tuple[tuple[int, int, int, int], ...]
    record_count: int
    block_count: int
    last_sequence: int
    page: bytes
    segment_bytes: int

    def span(self) -> tuple[int, int]:
        """Bytes [from, to) that hold all sections."""
        return (
            min(offset for _, offset, _, _ in self.sections),
            max(
                offset + _pages(length) * limits.PAGE_BYTES
                for _, offset, length, _ in self.sections
            ),
        )


def decode_footer(page: bytes, uuid: bytes, epoch: int, segment_bytes: int) -> Footer | None:
    """None where the page is no footer of this segment and epoch."""
    if len(page) != limits.PAGE_BYTES or len(uuid) != lib.FKV_UUID_BYTES:
        return None
    if not native_ok(lib.fkv_footer_check(page, uuid, epoch, segment_bytes)):
        return None
    row = ffi.from_buffer("fkv_segment_footer *", page)
    sections = tuple(
        (int(s.type), int(s.offset_bytes), int(s.length_bytes), int(s.crc))
        for s in row.sections[0 : row.section_count]
    )
    return Footer(
        sections,
        int(row.record_count),
        int(row.block_count),
        int(row.last_sequence),
        page,
        segment_bytes,
    )


def decode(footer: Footer, data: bytes | memoryview, first_byte: int) -> Directory | None:
    """The rows of the sections in `data`, which begins at first_byte.

    None where a checksum is wrong or the rows contradict one another.
    """
    found = ffi.new("fkv_directory_rows *")
    view = ffi.from_buffer("uint8_t[]", data)
    verdict = lib.fkv_directory_check(
        footer.page, footer.segment_bytes, view, len(view), first_byte, found
    )
    if not native_ok(verdict):
        return None
    records = np.frombuffer(data, DIR_RECORD, found.record_count, found.records_offset)
    blocks = np.frombuffer(data, DIR_BLOCK, found.block_count, found.blocks_offset)
    end = found.namespaces_offset + found.namespace_count * limits.NAMESPACE_BYTES
    names = bytes(memoryview(data)[found.namespaces_offset : end])
    namespaces = [names[at : at + 32] for at in range(0, len(names), 32)]
    return Directory(records, blocks, namespaces, footer.last_sequence)


def _bloom(blocks: NDArray[Any]) -> bytes:
    size = int(lib.fkv_bloom_bytes(len(blocks), limits.BLOOM_BITS_PER_KEY))
    filter_ = np.zeros(size, np.uint8)
    digests = np.ascontiguousarray(blocks["digest"])
    lib.fkv_bloom_add(
        pointer(filter_, "uint8_t *"), size, pointer(digests, "uint8_t *"), len(digests), 16
    )
    return filter_.tobytes()


def _pages(size: Any) -> Any:
    return -(-size // limits.PAGE_BYTES)
