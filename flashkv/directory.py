"""A sealed segment's directory and footer: numpy rows <-> pages. No I/O.

Invariants
  - the footer lies in the segment's last page, bound to the segment's uuid and epoch: a footer of
    an earlier epoch is none;
  - every section has a checksum of its own and begins on a page; unknown section types are passed
    over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.checksums import crc32c
from flashkv.native import ffi, lib, pointer
from flashkv.segments import DIR_BLOCK, DIR_RECORD

FOOTER_MAGIC: Final = b"FKVFOOTR"
_ROWS: Final = {
    int(lib.FKV_SECTION_DIR_RECORDS): DIR_RECORD.itemsize,
    int(lib.FKV_SECTION_DIR_BLOCKS): DIR_BLOCK.itemsize,
    int(lib.FKV_SECTION_DIR_NAMESPACES): limits.NAMESPACE_BYTES,
}


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
    footer.crc = _footer_crc(footer, b"", uuid, epoch)
    return bytes(body), bytes(ffi.buffer(footer)).ljust(limits.PAGE_BYTES, b"\0")


@dataclass(frozen=True)
class Footer:
    """What a footer says: sections as (type, offset, length, crc)."""

    sections: tuple[tuple[int, int, int, int], ...]
    record_count: int
    block_count: int
    last_sequence: int

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
    size = int(ffi.sizeof("fkv_segment_footer"))
    if len(page) != limits.PAGE_BYTES or page[:8] != FOOTER_MAGIC:
        return None
    row = ffi.new("fkv_segment_footer *")
    ffi.memmove(row, page, size)
    if (
        row.crc != _footer_crc(row, page[size:], uuid, epoch)
        or row.version != lib.FKV_FORMAT_VERSION
    ):
        return None
    if bytes(row.segment_uuid) != uuid or row.epoch != epoch or any(row.reserved):
        return None
    if not 1 <= row.section_count <= lib.FKV_SECTIONS_MAX:
        return None
    sections = tuple(
        (int(s.type), int(s.offset_bytes), int(s.length_bytes), int(s.crc))
        for s in row.sections[0 : row.section_count]
    )
    for _, offset, length, _ in sections:
        if offset % limits.PAGE_BYTES or offset + length > segment_bytes - limits.PAGE_BYTES:
            return None
    return Footer(sections, int(row.record_count), int(row.block_count), int(row.last_sequence))


def decode(footer: Footer, data: bytes | memoryview, first_byte: int) -> Directory | None:
    """The rows of the sections in `data`, which begins at first_byte.

    None where a checksum is wrong.
    """
    parts: dict[int, memoryview] = {}
    view = memoryview(data)
    for kind, offset, length, crc in footer.sections:
        part = view[offset - first_byte : offset - first_byte + length]
        if len(part) != length or int(lib.fkv_crc32c(0, ffi.from_buffer(part), length)) != crc:
            return None
        parts[kind] = part
    raw = [parts.get(kind, memoryview(b"")) for kind in _ROWS]
    for part, size in zip(raw, _ROWS.values(), strict=True):
        if len(part) % size:
            return None
    records, blocks = np.frombuffer(raw[0], DIR_RECORD), np.frombuffer(raw[1], DIR_BLOCK)
    names = bytes(raw[2])
    namespaces = [names[at : at + 32] for at in range(0, len(names), 32)]
    if len(records) != footer.record_count or len(blocks) != footer.block_count:
        return None
    if int(records["block_count"].sum()) != len(blocks):
        return None
    if len(records) and int(records["namespace_ordinal"].max()) >= len(namespaces):
        return None
    return Directory(records, blocks, namespaces, footer.last_sequence)


def _bloom(blocks: NDArray[Any]) -> bytes:
    size = int(lib.fkv_bloom_bytes(len(blocks), limits.BLOOM_BITS_PER_KEY))
    filter_ = np.zeros(size, np.uint8)
    digests = np.ascontiguousarray(blocks["digest"])
    lib.fkv_bloom_add(
        pointer(filter_, "uint8_t *"), size, pointer(digests, "uint8_t *"), len(digests), 16
    )
    return filter_.tobytes()


def _footer_crc(footer: Any, rest: bytes, uuid: bytes, epoch: int) -> int:
    """Of the whole page with the crc field zero, seeded by segment uuid and epoch."""
    kept = int(footer.crc)
    footer.crc = 0
    page = bytes(ffi.buffer(footer)) + rest
    footer.crc = kept
    seed = crc32c(0, uuid + epoch.to_bytes(8, "little"))
    return crc32c(seed, page.ljust(limits.PAGE_BYTES, b"\0"))


def _pages(size: Any) -> Any:
    return -(-size // limits.PAGE_BYTES)
