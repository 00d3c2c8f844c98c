"""Coded records -> the tail of the open segment: places, index, kills.

Invariants
  - a record is in the index only once its bytes lie whole in a staging buffer that will be written
    (captured); if the write fails, its blocks leave the index for good, and flush() says so;
  - sequences grow; within a segment records lie in the order of their sequences;
  - a full segment is sealed (sealer.py) while the next one is filled;
  - a kill that a newer record caused becomes durable only after that record is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import directory, limits
from flashkv.blockio import BlockIO
from flashkv.codec import EncodeJob, Staging, StagingBuffer
from flashkv.errors import BlockStatus, OutOfMemoryError, block_statuses
from flashkv.flights import Flights
from flashkv.index import Index
from flashkv.manifest import Manifest
from flashkv.manifest_log import KILL
from flashkv.native import aligned_copy, lib, pointer
from flashkv.sealer import Sealer
from flashkv.segments import DIR_BLOCK, DIR_RECORD, Segment, Segments, SegmentState
from flashkv.space import Space

_OK: Final = int(BlockStatus.OK)
_COPIED: Final = (
    *("sequence", "pages", "header_pages", "block_count", "tokens", "codec", "fidelity", "flags"),
)
"""Fields of an encoded record that its directory row has too."""


@dataclass
class WriterCounters:
    """Bytes of records, headers included; blocks that a failure took."""

    record_bytes_written: int = 0
    lost_blocks: int = 0
    flushes: int = 0


@dataclass(eq=False)
class PutRows:
    """What the writer needs besides the job: digests of the stored blocks, the namespace."""

    digests: NDArray[np.uint8]
    namespace_digest: bytes
    namespace_json: bytes
    namespace_id: int


class SegmentWriter:
    """The one writer of a shard.

    Callers hold the store's writer lock, but for what they ask of `flights`.
    """

    def __init__(
        self,
        segments: Segments,
        space: Space,
        manifest: Manifest,
        index: Index,
        io: BlockIO,
        staging: Staging,
        *,
        next_sequence: int,
        bloom: bool,
    ) -> None:
        self.counters = WriterCounters()
        self.flights = Flights(io, staging, self._lose)
        self.next_sequence = next_sequence
        self._last_appended = next_sequence - 1
        self._segments = segments
        self._space = space
        self._manifest = manifest
        self._index = index
        self._io = io
        self._staging = staging
        self._bloom = bloom
        self.sealer = Sealer(
            segments,
            io,
            self.flights,
            self._lose,
            durable_sequence=next_sequence - 1,
            bloom=bloom,
        )
        space.before_freeing = self._supersede_durably
        self._open: Segment | None = next(iter(segments.in_state(SegmentState.OPEN)), None)
        self._looked: Segment | None = None  # the open segment, once its successor was seen to
        self._lost_since_flush = 0
        self._kills: list[tuple[int, NDArray[Any]]] = []  # (sequence that caused them, rows)
        self._ready: list[NDArray[Any]] = []  # rows of what failed or was deleted

    # ---- putting ----

    def put(self, job: EncodeJob, rows: PutRows) -> NDArray[np.uint8]:
        """Codes and places all records of the job; BlockStatus of each record: uint8[records]."""
        statuses = np.zeros(len(job.records), np.uint8)  # OK
        bounds = job.bounds()
        for first, end, length in job.slices(bounds, self._staging.buffer_bytes):
            records = job.records[first:end]
            try:
                buffer = self._buffer_with(length)
            except MemoryError:
                statuses[first:end] = BlockStatus.BUSY
                continue
            records["sequence"] = np.arange(
                self.next_sequence, self.next_sequence + len(records), dtype=np.uint64
            )
            self.next_sequence += len(records)
            job.encode(self._io.engine, records, bounds[first:end], buffer)
            statuses[first:end] = block_statuses(records["status"])
            self._place(records, job, rows, buffer, statuses[first:end])
            self.flights.launch(least=limits.WRITE_RUN_BYTES)
            self._look_ahead()
        return statuses

    def _look_ahead(self) -> None:
        """Begins what would hold up a later put, if there is anything."""
        self.sealer.advance()
        segment = self._open
        if segment is not None and segment is not self._looked and segment.half_full():
            self._looked = segment
            self._space.prepare()

    def _buffer_with(self, length: int) -> StagingBuffer:
        """The staging buffer that is being filled, if so many bytes fit, else another."""
        buffer = self.flights.filling
        if buffer is not None and buffer.length - buffer.used >= length:
            return buffer
        return self.flights.take_buffer(length)

    def _place(
        self,
        records: NDArray[Any],
        job: EncodeJob,
        rows: PutRows,
        buffer: StagingBuffer,
        statuses: NDArray[np.uint8],
    ) -> None:
        """Gives each coded record its place, segment by segment."""
        todo = (statuses == _OK).nonzero()[0]
        while len(todo):
            left = records if len(todo) == len(records) else records[todo]
            try:
                segment, count = self._segment_for(left, rows)
            except OutOfMemoryError:
                statuses[todo] = BlockStatus.BUSY
                return
            if segment is None:
                statuses[todo] = BlockStatus.NO_SPACE
                return
            if count == 0:  # larger than what an empty segment holds
                statuses[todo[0]] = BlockStatus.BLOCK_TOO_LARGE
                todo = todo[1:]
                continue
            if not self._append(segment, left[:count], job, rows, buffer):
                statuses[todo[:count]] = BlockStatus.BUSY
            todo = todo[count:]

    def _segment_for(self, records: NDArray[Any], rows: PutRows) -> tuple[Segment | None, int]:
        """(open segment, how many of the records fit it): a new one where none fits the old.

        The namespace is in it. None where there is no space; 0 where not even an empty one holds
        the first record.
        """
        segment = self._open
        if segment is not None and segment.state is not SegmentState.OPEN:
            segment = self._open = None  # given up
        if segment is not None and rows.namespace_digest in segment.namespaces:
            count = self._fitting(segment, records)
            if count or not segment.touched:
                return segment, count
        elif segment is not None and self._fitting(segment, records[:1], _namespace_pages(rows)):
            self._append_namespace(segment, rows)
            return segment, self._fitting(segment, records)
        self._retire_open()
        take = self._space.take
        segment = self._open = take(self.next_sequence, self.take_kills, self.sealer.finish)
        if segment is None:
            return None, 0
        self._append_namespace(segment, rows)
        return segment, self._fitting(segment, records)

    def _fitting(self, segment: Segment, records: NDArray[Any], before: int = 0) -> int:
        """How many of the records, in order, fit the segment together with their directory.

        before: pages that something else takes first.
        """
        room = segment.end_page - segment.next_page - before
        names = len(segment.namespaces) + 1
        pages = records["pages"].cumsum(dtype=np.int64)
        blocks = records["block_count"].cumsum(dtype=np.int64) + segment.block_count
        count = segment.record_count + len(records)
        all_rows = directory.pages_needed(count, int(blocks[-1]), names, bloom=self._bloom)
        if int(pages[-1]) + all_rows <= room:
            return len(records)
        counts = np.arange(segment.record_count + 1, count + 1)
        pages += directory.pages_needed(counts, blocks, names, bloom=self._bloom)
        return int(np.searchsorted(pages, room, "right"))

    def _append(
        self,
        segment: Segment,
        records: NDArray[Any],
        job: EncodeJob,
        rows: PutRows,
        buffer: StagingBuffer,
    ) -> bool:
        """Gives records their places at the tail; False where memory for the index ran out."""
        sizes = records["pages"].astype(np.int64)
        ends = sizes.cumsum() + segment.next_page
        pages = (ends - sizes).astype(np.uint32)
        # First of all: whatever cuts this call, no other record gets these places.
        segment.next_page = int(ends[-1])
        segment.touched = segment.unsynced = True
        starts = records["buffer_offset"].copy()
        lib.fkv_records_bind(
            buffer.base,
            pointer(starts, "uint64_t *"),
            pointer(pages, "uint32_t *"),
            len(records),
            segment.uuid,
            segment.epoch,
        )
        record_rows = np.zeros(len(records), DIR_RECORD)
        for name in _COPIED:
            record_rows[name] = records[name]
        record_rows["page"] = pages
        record_rows["group"] = job.geometry.group
        record_rows["namespace_ordinal"] = segment.namespaces.index(rows.namespace_digest)
        block_rows = _block_rows(records, job.blocks, rows.digests)
        ids = np.full(len(segment.namespaces), rows.namespace_id, np.uint32)
        sizes *= limits.PAGE_BYTES
        offsets = pages.astype(np.int64) * limits.PAGE_BYTES
        sequences = record_rows["sequence"].copy()
        with self.flights.lock:
            self.flights.add(segment, buffer, starts.view(np.int64), offsets, sizes, sequences)
            segment.add_rows(record_rows, block_rows)
            self._last_appended = int(sequences[-1])
            try:
                dropped = self._index.add(segment.number, record_rows, block_rows, ids)
            except OutOfMemoryError:
                self._lose(segment, sequences)
                return False
        self.counters.record_bytes_written += int(sizes.sum())
        self.queue_kills(dropped, self._last_appended)
        return True

    def _append_namespace(self, segment: Segment, rows: PutRows) -> None:
        """The identity's readable fields, before its first record: a segment describes itself."""
        room = _namespace_pages(rows) * limits.PAGE_BYTES
        page = aligned_copy(bytes(room))
        segment.namespaces.append(rows.namespace_digest)
        size = int(
            lib.fkv_encode_namespace(
                rows.namespace_digest,
                rows.namespace_json,
                len(rows.namespace_json),
                0,  # it has no place among the data records' sequences
                segment.created_ms,
                pointer(page, "uint8_t *"),
                room,
            )
        )
        data = page[:size]
        lib.fkv_record_bind(
            pointer(data, "uint8_t *"), segment.uuid, segment.epoch, segment.next_page
        )
        self._io.write(segment.fd, data, segment.next_page * limits.PAGE_BYTES)
        segment.next_page += size // limits.PAGE_BYTES

    # ---- losing ----

    def _lose(self, segment: Segment, sequences: NDArray[np.uint64]) -> None:
        """Records that failed leave the index and their segment's directory, for good.

        They may have reached the device all the same: what was reported lost must not come back.
        Under the flights' lock.
        """
        lost = self._index.drop_sequences(sequences)
        self.counters.lost_blocks += lost
        self._lost_since_flush += lost
        self._ready.append(_record_kills(segment, segment.drop_rows(sequences)))

    def queue_kills(self, dropped: NDArray[Any], sequence: int) -> None:
        """Blocks that the record `sequence` superseded; they must never come back."""
        if len(dropped):
            self._kills.append((sequence, kill_rows(dropped)))

    def note_damaged(self, dropped: NDArray[Any]) -> None:
        """Blocks that a read found damaged. From any thread; waits for no put."""
        with self.flights.lock:
            self._ready.append(kill_rows(dropped))

    def _supersede_durably(self, segments: Collection[int]) -> None:
        """Before these segments are freed: what superseded blocks of theirs is made durable, or a
        power cut could leave neither.
        """
        durable = self.sealer.durable_sequence
        pending = [rows["segment"] for cause, rows in self._kills if cause > durable]
        if pending and np.isin(np.concatenate(pending), list(segments)).any():
            self._make_durable()

    def take_kills(self) -> NDArray[Any]:
        """Queued kills whose cause is durable, or that have none; older versions come first."""
        durable = self.sealer.durable_sequence
        with self.flights.lock:
            ready = [rows for cause, rows in self._kills if cause <= durable] + self._ready
            kills = np.concatenate(ready) if ready else np.zeros(0, KILL)
            self._kills = [(cause, rows) for cause, rows in self._kills if cause > durable]
            self._ready = []
        return kills

    def kill(self, dropped: NDArray[Any]) -> None:
        """Logs deleted blocks, durably, and with them their older versions. Raises StoreError.

        Those are logged only once what superseded them is durable, so that it is now made so.
        """
        # Queued first: whatever cuts this call, the next flush logs them.
        if any(cause > self.sealer.durable_sequence for cause, _ in self._kills):
            self.queue_kills(dropped, self._last_appended)
            self._make_durable()
        else:
            with self.flights.lock:
                self._ready.append(kill_rows(dropped))
        self._log(ends=True)  # what was evicted may have been meant, and must not come back either

    def _log(self, *, ends: bool) -> None:
        """Makes kills durable that nothing keeps back. They stay queued till the log has them."""
        with self.flights.lock:
            more = sum(rows.nbytes for rows in self._ready)
        more += sum(rows.nbytes for _, rows in self._kills)
        if more:
            self._space.shrink(self.take_kills, more)
            self._manifest.kill(self.take_kills(), sync=True)
        self._manifest.settle(ends=ends)

    # ---- durability ----

    def flush(self) -> int:
        """Makes all captured records durable.

        Returns how many blocks were lost since the last flush. Raises StoreError where the log
        can't be written.
        """
        self.counters.flushes += 1
        self._make_durable()
        self._log(ends=False)
        lost, self._lost_since_flush = self._lost_since_flush, 0
        return lost

    def settle_tails(self, incomplete: Iterable[Segment]) -> None:
        """Makes durable what recovery found in segments without a directory. Raises StoreError.

        incomplete: what couldn't be read in these must not come back: a directory leaves it out.
        Where a sync fails the segment's contents go: nobody knows how much of them was durable.
        """
        for segment in incomplete:
            if self.sealer.failing([segment]) or not self.sealer.write_directory(segment):
                self._end(segment)
        for segment in self.sealer.failing(self.sealer.unsynced()):
            self._end(segment)
        # Full ones that were being sealed when the process ended: no later opening scans them.
        for segment in self._segments.in_state(SegmentState.CLOSED):
            if segment.record_count:
                with suppress(OutOfMemoryError):
                    self.sealer.write_directory(segment)

    def _end(self, segment: Segment) -> None:
        self._open = None if segment is self._open else self._open
        segment.clear_rows()
        self.counters.lost_blocks += self._space.end(segment)

    def _make_durable(self) -> None:
        self.sealer.finish()
        self.flights.wait_written()
        self.sealer.sync()
        self.sealer.durable_sequence = self._last_appended

    def seal(self) -> None:
        """Closes the open segment, if any, with its directory, once its records are durable."""
        self._retire_open()
        self.sealer.finish()

    def _retire_open(self) -> None:
        """The open segment is full, if there is one: it is sealed while the next one is filled."""
        segment = self._open
        if segment is not None and segment.state is SegmentState.OPEN:
            self.sealer.begin(segment, self._last_appended)
        self._open = None  # not before: a signal in between must not leave it to nobody

    def close(self) -> None:
        """Lands all writes and gives the buffer back."""
        self.flights.wait_written()
        self.flights.filling = None


def kill_rows(dropped: NDArray[Any]) -> NDArray[Any]:
    """Rows for the manifest of blocks that left the index (fkv_dropped)."""
    rows = np.zeros(len(dropped), KILL)
    for name in ("segment", "page", "epoch", "sequence", "ordinal"):
        rows[name] = dropped[name]
    return rows


def _record_kills(segment: Segment, records: NDArray[Any]) -> NDArray[Any]:
    """Rows for the manifest of whole records (directory rows) of a segment."""
    rows = np.zeros(len(records), KILL)
    rows["segment"], rows["epoch"] = segment.number, segment.epoch
    rows["page"], rows["sequence"] = records["page"], records["sequence"]
    rows["ordinal"] = lib.FKV_KILL_RECORD
    return rows


def _namespace_pages(rows: PutRows) -> int:
    """Pages of the record that tells the namespace's readable identity."""
    return -(-(len(rows.namespace_json) + 256) // limits.PAGE_BYTES)


def _block_rows(
    records: NDArray[Any], blocks: NDArray[Any], digests: NDArray[np.uint8]
) -> NDArray[Any]:
    """Directory rows of all blocks of the records, in order."""
    counts = records["block_count"].astype(np.int64)
    ends = np.cumsum(counts)
    ordinals = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    source = np.repeat(records["first_block"].astype(np.int64), counts) + ordinals
    rows = np.zeros(len(source), DIR_BLOCK)
    rows["digest"] = digests[source]
    rows["tokens"] = blocks["tokens"][source]
    rows["ordinal"] = ordinals
    return rows
