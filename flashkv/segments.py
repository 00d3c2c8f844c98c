"""Segments in memory: which there are, where each one's life stands, and the arrays that reads look
them up in.

Invariants
  - a segment number names one file for the life of the store; its epoch grows each time its space
    is used again;
  - the lookup arrays are replaced, never resized in place, so that a reader that holds them sees
    one state;
  - a segment without records of its present epoch is FREE and has no say in a lookup.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.blockio import BlockIO
from flashkv.checksums import crc32c
from flashkv.codec_choice import device_speed
from flashkv.errors import FormatError
from flashkv.folder import segment_path
from flashkv.native import dtype_of, ffi, lib

SEGMENT_MAGIC: Final = b"FKVSEGMT"
FIRST_PAGE: Final = 1  # records begin behind the segment's header
NO_UUID: Final = b"\0" * 16  # of a file without a header
DIR_RECORD: Final = dtype_of("fkv_directory_record")
DIR_BLOCK: Final = dtype_of("fkv_directory_block")


class SegmentState(Enum):
    """Where a segment's life stands."""

    FREE = "free"  # no records; its file may be there or not
    OPEN = "open"  # being filled
    SEALING = "sealing"  # full; its directory follows once its records are durable
    CLOSED = "closed"  # full or given up, no directory: recovery scans it
    SEALED = "sealed"  # full, with a directory


@dataclass(eq=False)
class Segment:
    """One segment file."""

    number: int
    epoch: int = 0
    uuid: bytes = NO_UUID
    state: SegmentState = SegmentState.FREE
    fd: int = -1
    first_sequence: int = 0
    next_page: int = FIRST_PAGE
    end_page: int = 0  # the page of the footer
    created_ms: int = 0
    unsynced: bool = False  # written since the last sync
    by_log: bool = False  # opened by what the log knows: its header page is damaged
    touched: bool = True  # a record was placed in it since it was begun, be it lost by now
    namespaces: list[bytes] = field(default_factory=list)
    record_count: int = 0  # directory rows while there is no directory
    block_count: int = 0
    _rows: list[tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=list)

    def has_file(self) -> bool:
        """Its file takes space on disk."""
        return self.fd >= 0

    def half_full(self) -> bool:
        """Less than half of its pages are free."""
        return 2 * self.next_page > self.end_page

    def add_rows(self, records: NDArray[Any], blocks: NDArray[Any]) -> None:
        """Directory rows of records that were appended, and of their blocks in order."""
        self.record_count += len(records)
        self.block_count += len(blocks)
        self._rows.append((records, blocks))

    def rows(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """All rows so far: DIR_RECORD[R], DIR_BLOCK[B]."""
        if len(self._rows) != 1:
            records = [np.zeros(0, DIR_RECORD), *(part for part, _ in self._rows)]
            blocks = [np.zeros(0, DIR_BLOCK), *(part for _, part in self._rows)]
            self._rows = [(np.concatenate(records), np.concatenate(blocks))]
        return self._rows[0]

    def drop_rows(self, sequences: NDArray[np.uint64]) -> NDArray[Any]:
        """Takes out the rows of records with these sequences; returns their record rows."""
        records, blocks = self.rows()
        gone = np.isin(records["sequence"], sequences)
        kept = blocks[np.repeat(~gone, records["block_count"])]
        self.clear_rows()
        self.add_rows(records[~gone], kept)
        dropped: NDArray[Any] = records[gone]
        return dropped

    def clear_rows(self) -> None:
        """Forgets all rows: the directory has them, or nobody needs them."""
        self._rows = []
        self.record_count = self.block_count = 0


class Segments:
    """All segments of a shard, by number."""

    def __init__(self, folder: Path, io: BlockIO, segment_bytes: int, store_uuid: bytes) -> None:
        self.folder = folder
        self.segment_bytes = segment_bytes
        self.pages = segment_bytes // limits.PAGE_BYTES
        self.store_uuid = store_uuid
        self._io = io
        self._all: dict[int, Segment] = {}
        self.fds = np.full(0, -1, np.int32)
        self.epochs = np.zeros(0, np.uint64)
        self.uuids = np.zeros((0, 16), np.uint8)

    def __iter__(self) -> Any:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Segment:
        return self._all[number]

    def get(self, number: int) -> Segment | None:
        """The segment of that number, if there is one."""
        return self._all.get(number)

    def add(self, number: int) -> Segment:
        """A segment that is new to this handle."""
        segment = Segment(number, end_page=self.pages - 1)
        self._all[number] = segment
        return segment

    def publish(self, segment: Segment) -> None:
        """Lets readers see the segment's file, epoch and uuid."""
        number = segment.number
        size = max(len(self.fds), number + 1)
        fds, epochs, uuids = (
            np.full(size, -1, np.int32),
            np.zeros(size, np.uint64),
            np.zeros((size, 16), np.uint8),
        )
        fds[: len(self.fds)] = self.fds
        epochs[: len(self.epochs)] = self.epochs
        uuids[: len(self.uuids)] = self.uuids
        fds[number] = segment.fd
        epochs[number] = segment.epoch
        uuids[number] = np.frombuffer(segment.uuid, np.uint8)
        self.fds, self.epochs, self.uuids = fds, epochs, uuids

    def open_file(self, segment: Segment, *, writable: bool) -> None:
        """Opens the segment's file. Raises OSError."""
        if segment.fd < 0:
            path = segment_path(self.folder, segment.number)
            segment.fd = self._io.open_file(path, create=False, writable=writable)

    def close_file(self, segment: Segment) -> None:
        """Closes the segment's file."""
        if segment.fd >= 0:
            self._io.close_file(segment.fd)
            segment.fd = -1

    def in_state(self, *states: SegmentState) -> list[Segment]:
        """Segments in one of the states, oldest contents first."""
        # A copy: codec="auto" looks at them while another thread's put adds one.
        found = [segment for segment in list(self._all.values()) if segment.state in states]
        return sorted(found, key=lambda segment: (segment.first_sequence, segment.number))

    def read_speed(self) -> float | None:
        """Bytes a second of reading a full segment; None where there is none yet."""
        sealed = [each.fd for each in self.in_state(SegmentState.SEALED) if each.has_file()]
        if not sealed:
            return None
        # What is read is not used: that the segment may be freed meanwhile doesn't matter.
        return device_speed(lambda array: self._io.read(sealed[-1], array, 0), self.segment_bytes)

    def count_files(self) -> int:
        """Segments whose files take space on disk."""
        return sum(segment.has_file() for segment in self._all.values())

    def close(self) -> None:
        """Closes all files."""
        for segment in self._all.values():
            self.close_file(segment)


# ---- the header page
# -------------------------------------------------------------------------------


def encode_header(segment: Segment, store_uuid: bytes, segment_bytes: int) -> bytes:
    """Page 0 of a segment."""
    row = ffi.new("fkv_segment_header *")
    row.magic = SEGMENT_MAGIC
    row.version = lib.FKV_FORMAT_VERSION
    row.store_uuid = store_uuid
    row.segment_uuid = segment.uuid
    row.segment = segment.number
    row.page_shift = lib.FKV_PAGE_SHIFT
    row.epoch = segment.epoch
    row.segment_bytes = segment_bytes
    row.first_sequence = segment.first_sequence
    row.created_ms = segment.created_ms
    page = bytes(ffi.buffer(row)).ljust(limits.PAGE_BYTES, b"\0")
    row.crc = crc32c(0, page)
    return bytes(ffi.buffer(row)).ljust(limits.PAGE_BYTES, b"\0")


@dataclass(frozen=True)
class SegmentHeader:
    """What page 0 says."""

    store_uuid: bytes
    segment_uuid: bytes
    segment: int
    epoch: int
    segment_bytes: int
    first_sequence: int
    created_ms: int


def decode_header(page: bytes) -> SegmentHeader | None:
    """None where the page is no segment header. Raises FormatError for another version."""
    size = int(ffi.sizeof("fkv_segment_header"))
    if len(page) != limits.PAGE_BYTES or page[:8] != SEGMENT_MAGIC:
        return None
    row = ffi.new("fkv_segment_header *")
    ffi.memmove(row, page, size)
    crc, row.crc = int(row.crc), 0
    if crc32c(0, bytes(ffi.buffer(row)) + page[size:]) != crc:
        return None
    if row.version != lib.FKV_FORMAT_VERSION:
        raise FormatError(
            "a segment is of another format version",
            value=int(row.version),
            limit=f"version {lib.FKV_FORMAT_VERSION}",
        )
    if row.page_shift != lib.FKV_PAGE_SHIFT or any(row.reserved):
        return None
    if max(row.epoch, row.first_sequence) >= lib.FKV_COUNT_END:
        return None
    return SegmentHeader(
        store_uuid=bytes(row.store_uuid),
        segment_uuid=bytes(row.segment_uuid),
        segment=int(row.segment),
        epoch=int(row.epoch),
        segment_bytes=int(row.segment_bytes),
        first_sequence=int(row.first_sequence),
        created_ms=int(row.created_ms),
    )
