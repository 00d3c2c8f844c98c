"""Opening: what the segment files hold -> segments and index.

Invariants
  - nothing is believed that its checksums don't bear out: a sealed segment's directory, else every
    page of every record;
  - of two versions of a block the higher sequence wins, kills hide what they name, and nothing else
    decides: free space, usage and index are derived, never stored;
  - before a writer reads a segment, what a killed one left on its way there has arrived: nothing
    lands later on what was taken for free;
  - damage costs what it hit: a bad directory is replaced by a scan, a bad record by none;
  - what the device can't read while a writer opens never comes back, be it healed later: else it
    would come over what was deleted or stored meanwhile;
  - no segment is filled on that may have a footer: one that comes back would rule over what was
    stored behind it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashkv import directory, limits
from flashkv.blockio import BlockIO, aligned_array
from flashkv.errors import StoreError, check_native
from flashkv.filesystem import DISK, FileSystem
from flashkv.folder import SEGMENTS
from flashkv.index import Index
from flashkv.manifest_log import KILL, ManifestState
from flashkv.native import dtype_of, ffi, lib
from flashkv.openfiles import open_files_max
from flashkv.segments import (
    DIR_BLOCK,
    DIR_RECORD,
    FIRST_PAGE,
    Segment,
    SegmentHeader,
    Segments,
    SegmentState,
    decode_header,
)

SCAN_RECORD: Final = dtype_of("fkv_scan_record")
_Found = TypeVar("_Found")
_NAME: Final = re.compile(r"(\d{8})\.seg")
_NOT_THE_DEVICE: Final = (-errno.ENOMEM, -errno.EAGAIN, -errno.EINTR)


@dataclass
class RecoveryReport:
    """What an open found."""

    sealed_segments: int = 0
    scanned_segments: int = 0
    scanned_bytes: int = 0
    damaged_records: int = 0
    damaged_directories: int = 0
    damaged_headers: int = 0  # of segments that the log could tell
    damaged_log_entries: int = 0  # of the manifest, good ones behind them
    unreadable_pages: int = 0
    blocks: int = 0
    last_sequence: int = 0
    manifest_rebuilt: bool = False
    dropped: list[NDArray[Any]] = field(default_factory=list)  # superseded blocks: fkv_dropped rows
    incomplete: list[Segment] = field(default_factory=list)  # parts couldn't be read; no directory
    taken: dict[int, tuple[int, NDArray[Any]]] = field(
        default_factory=dict
    )  # live segments whose directory may not be durable: epoch, sequences of their records
    sure: list[int] = field(default_factory=list)  # the other live ones
    bare: list[Segment] = field(default_factory=list)  # live ones without a directory


@dataclass(frozen=True, eq=False)
class Contents:
    """Rows of a segment, however they were found."""

    records: NDArray[Any]
    blocks: NDArray[Any]
    namespaces: list[bytes]
    next_page: int


class Recovery:
    """One pass over a shard's segment files; fills segments and index."""

    def __init__(
        self,
        segments: Segments,
        index: Index,
        io: BlockIO,
        state: ManifestState,
        namespace_ids: dict[bytes, int],
        files: FileSystem = DISK,
        *,
        writable: bool,
        digest_bytes: int = limits.DIGEST_BYTES,
    ) -> None:
        """namespace_ids: digest -> in-memory number; grows as namespaces are met."""
        self.report = RecoveryReport()
        self._segments = segments
        self._index = index
        self._io = io
        self._state = state
        self._namespace_ids = namespace_ids
        self._files = files
        self._writable = writable
        self._digest_bytes = digest_bytes
        self._taken: dict[int, tuple[int, NDArray[Any]]] = {}  # as report.taken, of all
        self._headless: set[int] = set()  # segments whose header the device couldn't read
        self._unsure: set[int] = set()  # ... or another part; or with a footer, and no directory

    def run(self) -> RecoveryReport:
        """Opens every segment file. Raises StoreError where one can't be opened at all."""
        unsealed: list[Segment] = []
        files = segment_files(self._segments.folder, self._files)
        open_files_max(len(files))
        for number, path in files:
            segment = self._segments.add(number)
            try:
                self._segments.open_file(segment, writable=self._writable)
                if self._writable:
                    self._files.settle(segment.fd)
            except OSError as error:
                if error.errno == errno.ENOENT and not self._writable:
                    continue  # the writer beside this handle removed it since it was listed
                advice = "raise the limit on open files (ulimit -n)" * (error.errno == errno.EMFILE)
                raise StoreError(f"can't open {path}: {error}", advice=advice) from error
            header = self._header(segment)
            if header is None or header.epoch < self._state.epochs.get(number, 0):
                # Damaged, or of an earlier epoch, as a lost write leaves it.
                header = self._header_by_log(segment) or header
            if header is None or not self._live(segment, header):
                if header is None and number in self._headless | self._unsure:
                    self._end(segment)
                self._segments.publish(segment)
            elif self._load(segment):
                unsealed.append(segment)
        if self._writable:
            self._choose_open([each for each in unsealed if not self._settled(each)])
        self.report.blocks = int(self._index.totals().blocks)
        return self.report

    # ---- one segment ----

    def _header(self, segment: Segment) -> SegmentHeader | None:
        header, readable = self._look(segment, 0, lambda page: decode_header(bytes(page)))
        if not readable:
            self._headless.add(segment.number)
        if header is None or header.segment != segment.number:
            return None
        if header.store_uuid != self._segments.store_uuid:
            return None
        segment.uuid = header.segment_uuid
        return header

    def _look(
        self,
        segment: Segment,
        offset: int,
        decode: Callable[[memoryview], _Found | None],
        length: int = limits.PAGE_BYTES,
    ) -> tuple[_Found | None, bool]:
        """(what is decoded from there, whether the device could read it).

        Two looks: damage on the way to memory, or a passing error, isn't there a second time.
        Raises OutOfMemoryError, BusyError.
        """
        data = aligned_array(length)
        readable = False
        for _ in range(2):
            result = self._io.read(segment.fd, data, offset)
            if result in _NOT_THE_DEVICE:
                check_native(result, f"segment {segment.number} can't be read")
            readable = result == 0
            found = decode(data.data) if readable else None
            if found is not None:
                return found, True
        return None, readable

    def _end(self, segment: Segment) -> None:
        """Of a segment that can't be read nothing counts any more."""
        epoch = self._state.epochs.get(segment.number)
        if epoch is not None and self._writable:
            self._state.free(segment.number, epoch)

    def _settled(self, segment: Segment) -> bool:
        """Whether it is not to be filled on: it gets a directory of what was found, or ends."""
        if segment.number not in self._unsure:
            return False
        if segment.record_count:
            self.report.incomplete.append(segment)
        else:
            self._end(segment)
            segment.state = SegmentState.FREE
            segment.clear_rows()
        return True

    def _header_by_log(self, segment: Segment) -> SegmentHeader | None:
        """What the log knows of a segment with a damaged header, if its contents bear it out."""
        state, number = self._state, segment.number
        if number in state.freed or number not in state.uuids:
            return None
        segment.uuid, segment.epoch = state.uuids[number], state.epochs[number]
        found = self._sealed(segment, count=False) or self._scanned(segment, count=False)
        if not len(found.records):
            return None  # it was being made, or all of it is gone
        self.report.damaged_headers += 1
        segment.by_log = True
        return SegmentHeader(
            store_uuid=self._segments.store_uuid,
            segment_uuid=segment.uuid,
            segment=number,
            epoch=segment.epoch,
            segment_bytes=self._segments.segment_bytes,
            first_sequence=int(found.records["sequence"].min()),
            created_ms=0,
        )

    def _live(self, segment: Segment, header: SegmentHeader) -> bool:
        """Whether the contents count.

        The log may say that this epoch ended, or that another began.
        """
        known = self._state.epochs.get(segment.number, 0)
        segment.epoch = max(known, header.epoch)
        segment.first_sequence = header.first_sequence
        segment.created_ms = header.created_ms
        freed = segment.number in self._state.freed and known == header.epoch
        if header.epoch < known or freed:
            return False
        self.report.last_sequence = max(self.report.last_sequence, header.first_sequence - 1)
        if header.epoch > known:  # the log was lost, not the segment
            self._state.opened(segment.number, header.epoch, header.segment_uuid)
        if not any(self._state.uuids.get(segment.number, b"")):
            self._state.uuids[segment.number] = header.segment_uuid
        return True

    def _load(self, segment: Segment) -> bool:
        """Fills the index from one live segment.

        True if it has no directory and may be filled on.
        """
        found = self._sealed(segment)
        sealed = found is not None
        if found is None:
            found = self._scanned(segment)
        found = without_void(found, self._state.voids_of(segment.number))
        self._taken[segment.number] = segment.epoch, found.records["sequence"].copy()
        found = without_retired(found, self._state.retired)
        self._index.begin_segment(segment.number, segment.epoch)
        kills = matching_kills(self._state.kills_of(segment.number), found.records)
        ids = np.array([self._namespace_id(digest) for digest in found.namespaces], np.uint32)
        dropped = self._index.add(segment.number, found.records, found.blocks, ids, kills)
        if len(dropped):
            self.report.dropped.append(dropped)
        if len(found.records):
            self.report.last_sequence = max(
                self.report.last_sequence, int(found.records["sequence"].max())
            )
        if len(kills):
            self.report.last_sequence = max(self.report.last_sequence, int(kills["sequence"].max()))
        segment.next_page = found.next_page
        segment.state = SegmentState.SEALED if sealed else SegmentState.CLOSED
        self._segments.publish(segment)
        if not sealed:
            segment.add_rows(found.records, found.blocks)
            segment.namespaces = list(found.namespaces)
        return not sealed

    def _sealed(self, segment: Segment, *, count: bool = True) -> Contents | None:
        size = self._segments.segment_bytes
        if self._files.length_bytes(segment.fd) < size:
            return None  # it ends before its last page: no footer is there, nor can one come back

        def decode_footer(page: memoryview) -> directory.Footer | None:
            return directory.decode_footer(bytes(page), segment.uuid, segment.epoch, size)

        footer, readable = self._look(segment, size - limits.PAGE_BYTES, decode_footer)
        if footer is None:
            if not readable:
                self._unsure.add(segment.number)
            return None
        first, end = footer.span()
        decode = partial(directory.decode, footer, first_byte=first)
        rows, _ = self._look(segment, first, decode, max(end - first, limits.PAGE_BYTES))
        if rows is None:
            self._unsure.add(segment.number)
            self.report.damaged_directories += count
            return None
        self.report.sealed_segments += count
        self.report.last_sequence = max(self.report.last_sequence, footer.last_sequence)
        return Contents(rows.records, rows.blocks, rows.namespaces, first // limits.PAGE_BYTES)

    def _scanned(self, segment: Segment, *, count: bool = True) -> Contents:
        length = self._files.length_bytes(segment.fd)
        end_page = min(segment.end_page, length // limits.PAGE_BYTES)
        end_page = max(end_page, FIRST_PAGE)
        contents, damaged, unreadable = scan(self._io, segment, FIRST_PAGE, end_page, verify=True)
        if damaged or unreadable:  # damage on the way to memory isn't there a second time
            again = scan(self._io, segment, FIRST_PAGE, end_page, verify=True)
            if again[1] + again[2] < damaged + unreadable:
                contents, damaged, unreadable = again
        if unreadable:
            self._unsure.add(segment.number)
        contents.blocks["digest"][:, self._digest_bytes :] = 0  # as the writer's, see Store
        if not count:
            return contents
        self.report.scanned_segments += 1
        self.report.scanned_bytes += (contents.next_page - FIRST_PAGE) * limits.PAGE_BYTES
        self.report.damaged_records += damaged
        self.report.unreadable_pages += unreadable
        return contents

    def _namespace_id(self, digest: bytes) -> int:
        return self._namespace_ids.setdefault(digest, len(self._namespace_ids))

    def _choose_open(self, unsealed: list[Segment]) -> None:
        """The newest segment is filled on if it has no directory; others get theirs."""
        for segment in unsealed:
            segment.unsynced = True  # what was found there need not be durable yet
        self.report.bare = unsealed
        sealed = self._segments.in_state(SegmentState.SEALED)
        unsure = [*unsealed, *sealed[-limits.UNSURE_DIRECTORIES :]]
        self.report.taken = {each.number: self._taken[each.number] for each in unsure}
        self.report.sure = [each.number for each in sealed[: -limits.UNSURE_DIRECTORIES]]
        live = (each for each in self._segments if each.state is not SegmentState.FREE)
        newest = max(live, key=lambda segment: segment.first_sequence, default=None)
        if newest in unsealed:
            newest.state = SegmentState.OPEN


def scan(
    io: BlockIO, segment: Segment, first_page: int, end_page: int, *, verify: bool
) -> tuple[Contents, int, int]:
    """Data records that the pages really hold: (contents, damaged records, unreadable pages)."""
    found, damaged, unreadable = scan_records(io, segment, first_page, end_page, verify=verify)
    handle_records, blocks, namespaces, next_page = found
    data = handle_records["kind"] == lib.FKV_KIND_DATA
    records = np.ascontiguousarray(handle_records["row"][data])
    return Contents(records, blocks, namespaces, next_page), damaged, unreadable


def scan_records(
    io: BlockIO, segment: Segment, first_page: int, end_page: int, *, verify: bool
) -> tuple[tuple[NDArray[Any], NDArray[Any], list[bytes], int], int, int]:
    """As scan(), with every record as fkv_scan_record, those of namespaces too."""
    status = ffi.new("int32_t *")
    uuid = ffi.from_buffer("uint8_t[]", segment.uuid)
    flags = lib.FKV_SCAN_VERIFY_PAGES if verify else 0
    handle = lib.fkv_scan_segment(
        io.engine, segment.fd, uuid, segment.epoch, first_page, end_page, flags, status
    )
    if handle == ffi.NULL:
        check_native(status[0], f"segment {segment.number} can't be scanned")
    try:
        records = _copy(
            lib.fkv_scan_records(handle), lib.fkv_scan_record_count(handle), SCAN_RECORD
        )
        blocks = _copy(lib.fkv_scan_blocks(handle), lib.fkv_scan_block_count(handle), DIR_BLOCK)
        count = int(lib.fkv_scan_namespace_count(handle))
        names = bytes(ffi.buffer(lib.fkv_scan_namespaces(handle), 32 * count)) if count else b""
        damaged, unreadable = lib.fkv_scan_damaged(handle), lib.fkv_scan_unreadable(handle)
        next_page = int(lib.fkv_scan_end_page(handle))
    finally:
        lib.fkv_scan_free(handle)
    namespaces = [names[at : at + 32] for at in range(0, len(names), 32)]
    return (records, blocks, namespaces, next_page), int(damaged), int(unreadable)


def segment_files(folder: Path, files: FileSystem = DISK) -> list[tuple[int, Path]]:
    """(number, path) of every segment file, by number."""
    found = []
    place = folder / SEGMENTS
    for name in files.names(place):
        match = _NAME.fullmatch(name)
        if not match or int(match.group(1)) >= limits.SEGMENT_COUNT_MAX:
            continue
        path = place / name
        if files.is_file(path) and not path.is_symlink():
            found.append((int(match.group(1)), path))
    return found


def without_retired(found: Contents, retired: dict[bytes, int]) -> Contents:
    """The rows whose namespace was not retired after they were written."""
    ends = np.array([retired.get(digest, 0) for digest in found.namespaces] + [0], np.uint64)
    dead = found.records["sequence"] <= ends[found.records["namespace_ordinal"]]
    if not dead.any():
        return found
    return _kept(found, ~dead)


def without_void(found: Contents, voids: NDArray[Any]) -> Contents:
    """What is left without records of sequences that were void when a handle went on here."""
    if not len(voids):
        return found
    sequences = found.records["sequence"]
    # Rows may overlap where a log was damaged.
    firsts = np.sort(voids["first_sequence"])
    lasts = np.maximum.accumulate(voids["last_sequence"][np.argsort(voids["first_sequence"])])
    at = np.searchsorted(firsts, sequences, "right")
    alive = (at == 0) | (sequences > lasts[np.maximum(at, 1) - 1])
    return found if alive.all() else _kept(found, alive)


def _kept(found: Contents, alive: NDArray[np.bool_]) -> Contents:
    blocks = found.blocks[np.repeat(alive, found.records["block_count"])]
    return Contents(found.records[alive], blocks, found.namespaces, found.next_page)


def matching_kills(kills: NDArray[Any], records: NDArray[Any]) -> NDArray[Any]:
    """Kills whose record lies where they say. After a crash its place may hold another record."""
    if not len(kills) or not len(records):
        return np.zeros(0, KILL)
    order = np.argsort(records["page"], kind="stable")
    pages = records["page"][order]
    at = np.minimum(np.searchsorted(pages, kills["page"]), len(pages) - 1)
    row = order[at]
    same = (records["page"][row] == kills["page"]) & (records["sequence"][row] == kills["sequence"])
    kept = kills[same]
    in_order: NDArray[Any] = kept[np.lexsort((kept["ordinal"], kept["page"]))]
    return in_order


def _copy(data: Any, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not count:
        return np.zeros(0, dtype)
    size = int(count) * dtype.itemsize
    rows: NDArray[Any] = np.frombuffer(bytearray(ffi.buffer(data, size)), dtype)
    return rows


__all__ = [
    "DIR_RECORD",
    "Contents",
    "Recovery",
    "RecoveryReport",
    "scan",
    "scan_records",
    "segment_files",
]
