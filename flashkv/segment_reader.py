"""Places of blocks -> the caller's memory: one native call reads, checks, decodes and scatters a
batch.

Invariants
  - the places that come in hold pins on their segments; they are given back here, whatever happens;
  - a block whose write is still on its way is read once that write has ended;
  - a block that can't be loaded leaves the index, so that the next lookup is a plain miss; one that
    proves damaged is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.blockio import BlockIO
from flashkv.errors import BlockStatus, block_statuses, damaged_mask, missed_statuses
from flashkv.index import NONE, Index, Keys
from flashkv.native import address, dtype_of, ffi, lib, pointer
from flashkv.progress import LayerProgress
from flashkv.reads import NativeRead, Reads
from flashkv.segments import Segments

READ_RECORD: Final = dtype_of("fkv_read_record")
READ_WANT: Final = dtype_of("fkv_read_want")
_COPIED: Final = tuple(
    name for name in dtype_of("fkv_place").names or () if name in (READ_RECORD.names or ())
)
"""Fields of a record that its place has too."""


@dataclass(eq=False)
class ReadRequest:
    """What a get wants.

    places    rows of fkv_place, one a block, their segments pinned.
    pointers  uint64[N, regions]: row i is block i's memory.
    """

    geometry: Any
    view: Any
    namespace_digest: bytes
    shard: bytes
    keys: Keys
    places: NDArray[Any]
    pointers: NDArray[np.uint64]
    first_token: int = 0
    token_count: int = 0  # 0: to the block's end
    progress: LayerProgress | None = None  # layers are read in their order
    background: bool = False
    bounce: bool = False  # the device never writes to the caller's memory itself
    keep: object = None  # what owns the caller's memory
    failed_layers: NDArray[np.int32] | None = None  # out, with progress: int32[N], -1: none


@dataclass(eq=False)
class BegunRead:
    """A read under way, of which finish() tells the end.

    native: None where there was nothing to read. order: of its wants, rows of the batch.
    """

    request: ReadRequest
    digests: NDArray[np.uint8]
    order: NDArray[np.int64]
    native: NativeRead | None


@dataclass
class ReaderCounters:
    """Blocks and records that reads met."""

    damaged_blocks: int = 0
    stale_blocks: int = 0
    records_read: int = 0


class SegmentReader:
    """Reads for all threads of a handle; has no state but its counters."""

    def __init__(
        self,
        segments: Segments,
        index: Index,
        io: BlockIO,
        *,
        gap_bytes: int,
        amplification: float,
        reads: Reads,
        is_unwritten: Callable[[NDArray[Any]], bool],
        wait_written: Callable[..., bool],
        on_damage: Callable[[NDArray[Any]], None],
        is_stale: Callable[[int, int], bool],
    ) -> None:
        """is_unwritten(sequences): whether the write of one of these records isn't over.
        wait_written(sequences, wait_ms): returns once they are, or after that time; whether there
        was cause to wait.
        on_damage(dropped): takes the rows of blocks that left the index.
        is_stale(segment, epoch): whether the segment has another epoch by now (read-only handles).
        """
        self.counters = ReaderCounters()
        self._segments = segments
        self._index = index
        self._io = io
        self._gap_pages = gap_bytes // limits.PAGE_BYTES
        self._amplification_percent = int(amplification * 100)
        self.reads = reads
        self._is_unwritten = is_unwritten
        self._wait_written = wait_written
        self._on_damage = on_damage
        self._is_stale = is_stale

    def read(self, request: ReadRequest, digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """BlockStatus of each block: uint8[N]. Blocks without a place are MISS."""
        pinned = request.places["segment"].copy()
        native = missed_statuses(len(request.places))
        try:
            sequences = request.places["sequence"][request.places["record"] != NONE]
            if self._wait_written(sequences):
                self._look_again(request, digests)
            order, starts = self._to_read(request)
            if len(order):
                batch, wants, keep = self._batch(request, order, starts)
                lib.fkv_read(self._io.engine, batch)
                del keep
                native[order] = self._told(request, order, wants)
        finally:
            self._index.unpin(pinned)
        return self._statuses(request, digests, native)

    def begin(
        self, request: ReadRequest, digests: NDArray[np.uint8], wait_ms: float
    ) -> BegunRead | None:
        """The same, going on after the call; None where a write of some block isn't over within
        wait_ms. Pins are given back once the read is over, or where there is none.
        """
        pinned = request.places["segment"].copy()
        sequences = request.places["sequence"][request.places["record"] != NONE]
        try:
            unwritten = False
            if self._wait_written(sequences, wait_ms):
                self._look_again(request, digests)
                unwritten = self._is_unwritten(sequences)
        except BaseException:
            self._index.unpin(pinned)
            raise
        if unwritten:
            self._index.unpin(pinned)
            return None
        order, starts = self._to_read(request)
        begun = BegunRead(request, digests, order, None)
        if not len(order):
            self._index.unpin(pinned)
            return begun
        batch, wants, keep = self._batch(request, order, starts)
        begun.native = NativeRead(batch, wants, keep)
        begun.native.when_over(lambda: self._index.unpin(pinned))
        self.reads.begin(begun.native)
        return begun

    def finish(self, begun: BegunRead) -> NDArray[np.uint8]:
        """BlockStatus of each block of a read that is over, or was given up (CANCELLED)."""
        native = missed_statuses(len(begun.request.places))
        if begun.native is not None:
            native[begun.order] = self._told(begun.request, begun.order, begun.native.wants)
        return self._statuses(begun.request, begun.digests, native)

    def _look_again(self, request: ReadRequest, digests: NDArray[np.uint8]) -> None:
        """What failed to be written has left the index meanwhile."""
        rows = np.flatnonzero(request.places["record"] != NONE)
        gone = self._index.lookup(digests[rows])["record"] == NONE
        request.places["record"][rows[gone]] = NONE

    def _to_read(self, request: ReadRequest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(rows of the batch in the order of their places, where each record begins in it)."""
        rows = np.flatnonzero(request.places["record"] != NONE)
        if request.progress is not None:
            request.failed_layers = np.zeros(len(request.places), np.int32)
            if len(rows) < len(request.places):
                request.progress.fail()
        return _by_record(request.places, rows)

    def _statuses(
        self, request: ReadRequest, digests: NDArray[np.uint8], native: NDArray[np.uint32]
    ) -> NDArray[np.uint8]:
        """What native statuses mean; what was damaged or failed leaves the index."""
        if not native.any():
            return np.zeros(len(native), np.uint8)
        places = request.places
        damaged = damaged_mask(native)
        if damaged.any():
            self._damage(places, digests, np.flatnonzero(damaged))
        statuses = block_statuses(native)
        self._forget(places, digests, np.flatnonzero(statuses == BlockStatus.IO_ERROR))
        return statuses

    def _batch(
        self, request: ReadRequest, order: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[Any, NDArray[Any], object]:
        """(fkv_read_batch, its wants, all that it points to)."""
        places = request.places[order]
        fds, epochs, uuids = self._segments.fds, self._segments.epochs, self._segments.uuids
        wants = np.zeros(len(order), READ_WANT)
        key_starts, key_bytes = request.keys.starts_lengths()
        wants["key_offset"] = key_starts[order]
        wants["key_bytes"] = key_bytes[order]
        wants["target"] = order
        wants["ordinal"] = places["ordinal"]
        wants["first_token"] = request.first_token
        wants["token_count"] = request.token_count
        first = places[starts]
        segments = first["segment"]
        records = np.zeros(len(starts), READ_RECORD)
        for name in _COPIED:
            records[name] = first[name]
        records["epoch"] = epochs[segments]
        records["fd"] = fds[segments]
        records["segment_uuid"] = address(uuids) + 16 * segments.astype(np.uint64)
        records["first_want"] = starts
        records["want_count"][:-1] = starts[1:] - starts[:-1]
        records["want_count"][-1] = len(order) - starts[-1]
        batch = ffi.new("fkv_read_batch *")
        digest, shard = request.namespace_digest, request.shard
        held = (ffi.from_buffer("uint8_t[]", digest), ffi.from_buffer("uint8_t[]", shard), uuids)
        batch.geometry, batch.view = request.geometry, request.view
        batch.namespace_digest, batch.shard = held[0], held[1]
        batch.keys = pointer(request.keys.blob, "uint8_t *")
        batch.pointers = pointer(request.pointers, "uint64_t *")
        batch.records = pointer(records, "fkv_read_record *")
        batch.record_count = len(records)
        batch.wants = pointer(wants, "fkv_read_want *")
        batch.want_count = len(wants)
        batch.gap_pages = self._gap_pages
        batch.amplification_percent = self._amplification_percent
        if request.progress is not None:
            batch.progress = request.progress.native
        if request.background:
            batch.flags |= lib.FKV_READ_BACKGROUND
        if request.bounce:
            batch.flags |= lib.FKV_READ_BOUNCE
        self.counters.records_read += len(records)
        return batch, wants, (batch, request, records, wants, held)

    def _told(
        self, request: ReadRequest, order: NDArray[np.int64], wants: NDArray[Any]
    ) -> NDArray[np.uint32]:
        """Native status of each want."""
        if request.failed_layers is not None:
            request.failed_layers[order] = wants["failed_layer"].view(np.int32)  # FKV_NONE: -1
        statuses: NDArray[np.uint32] = wants["status"].copy()
        return statuses

    def _damage(
        self, places: NDArray[Any], digests: NDArray[np.uint8], rows: NDArray[np.int64]
    ) -> None:
        """Drops what was wrong.

        Under a read-only handle the writer may have used the space again.
        """
        bad = places[rows]
        stale = {
            segment
            for segment in np.unique(bad["segment"]).tolist()
            if self._is_stale(segment, int(self._segments.epochs[segment]))
        }
        for segment in stale:
            self._index.drop_segment(segment)
        is_stale = np.isin(bad["segment"], list(stale))
        self.counters.stale_blocks += int(is_stale.sum())
        self.counters.damaged_blocks += int((~is_stale).sum())
        self._forget(places, digests, rows[~is_stale])

    def _forget(
        self, places: NDArray[Any], digests: NDArray[np.uint8], rows: NDArray[np.int64]
    ) -> None:
        """Takes blocks whose load failed out of the index: the next lookup is a plain miss."""
        if len(rows):
            sequences = np.ascontiguousarray(places["sequence"][rows])
            self._on_damage(self._index.remove(np.ascontiguousarray(digests[rows]), sequences))


def _by_record(
    places: NDArray[Any], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows in the order of their records' places, where each record begins in it).

    A block that is wanted twice begins a record of its own: a record's wants are distinct.
    """
    if len(rows) <= 1:
        return rows, np.zeros(len(rows), np.int64)
    some = places[rows]
    order = np.lexsort((some["ordinal"], some["page"], some["segment"]))
    sorted_places = some[order]
    segment, page, ordinal = (sorted_places[name] for name in ("segment", "page", "ordinal"))
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (segment[1:] != segment[:-1]) | (page[1:] != page[:-1])
    begins[1:] |= ordinal[1:] == ordinal[:-1]  # of one record, or it begins anyway
    return rows[order], np.flatnonzero(begins)
