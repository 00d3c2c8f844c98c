"""Coded records -> the tail of the open segment: places, writes, index, directory, sync.

Invariants
  - a record is in the index only once its bytes lie whole in a staging buffer that is being written
    (captured); if the write fails, its blocks leave the index, and flush() says so;
  - sequences grow; within a segment records lie in the order of their sequences;
  - a segment's directory is written only after all its records are durable;
  - a failed sync is never repeated: the segment is closed at its last durable point and what came
    since is dropped;
  - a kill that a newer record caused becomes durable only after that record is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import directory, limits
from flashkv.blockio import WRITE_DTYPE, BlockIO
from flashkv.codec import EncodeJob, Staging, StagingBuffer
from flashkv.errors import BlockStatus, block_statuses
from flashkv.index import Index
from flashkv.manifest import KILL, Manifest
from flashkv.native import aligned_copy, lib, pointer
from flashkv.segments import DIR_BLOCK, DIR_RECORD, Segment, Segments, SegmentState
from flashkv.space import Space

NO_SEQUENCE: Final = (1 << 64) - 1


@dataclass(eq=False)
class _Flight:
    """A write on its way."""

    buffer: StagingBuffer
    segment: int
    first_sequence: int
    sequences: NDArray[np.uint64]
    blocks: int


@dataclass
class WriterCounters:
    """Bytes of records, headers included; blocks that a failure took."""

    record_bytes_written: int = 0
    segment_bytes_written: int = 0
    lost_blocks: int = 0
    failed_writes: int = 0
    failed_syncs: int = 0
    sealed_segments: int = 0
    flushes: int = 0


@dataclass(eq=False)
class PutRows:
    """What the writer needs of a put besides the job.

    Per stored block its digest, and the namespace.
    """

    digests: NDArray[np.uint8]
    namespace_digest: bytes
    namespace_json: bytes
    namespace_id: int


class SegmentWriter:
    """The one writer of a shard.

    Callers hold the store's writer lock, but for reap() and wait_written().
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
        self.next_sequence = next_sequence
        self.durable_sequence = next_sequence - 1
        self._last_appended = next_sequence - 1
        self._segments = segments
        self._space = space
        self._manifest = manifest
        self._index = index
        self._io = io
        self._staging = staging
        self._bloom = bloom
        self._open: Segment | None = next(iter(segments.in_state(SegmentState.OPEN)), None)
        self._flights: dict[int, _Flight] = {}
        self._next_tag = 1
        self._reap_lock = threading.Lock()
        self._lost_since_flush = 0
        self._kills: list[tuple[int, NDArray[Any]]] = []  # (sequence that caused them, rows)
        self._failed: list[NDArray[Any]] = []  # kill rows of records whose write or sync failed

    # ---- putting ----

    def put(self, job: EncodeJob, rows: PutRows) -> NDArray[np.uint8]:
        """Codes and places all records of the job; BlockStatus of each record: uint8[records]."""
        statuses = np.full(len(job.records), BlockStatus.OK, np.uint8)
        bounds = job.bounds()
        for first, end, length in job.slices(bounds, self._staging.buffer_bytes):
            records = job.records[first:end]
            buffer = self._take_buffer(length)
            records["sequence"] = np.arange(
                self.next_sequence, self.next_sequence + len(records), dtype=np.uint64
            )
            self.next_sequence += len(records)
            buffer.users += 1  # this call, until all its writes are on their way
            try:
                job.encode(self._io.engine, records, bounds[first:end], buffer)
                statuses[first:end] = block_statuses(records["status"])
                self._place(records, job, rows, buffer, statuses[first:end])
            finally:
                self._release(buffer)
        return statuses

    def _take_buffer(self, length: int) -> StagingBuffer:
        while (buffer := self._staging.take(length)) is None:
            self.reap(wait=True)
        return buffer

    def _release(self, buffer: StagingBuffer) -> None:
        with self._reap_lock:
            buffer.users -= 1
            done = buffer.users == 0
        if done:
            self._staging.give(buffer)

    def _place(
        self,
        records: NDArray[Any],
        job: EncodeJob,
        rows: PutRows,
        buffer: StagingBuffer,
        statuses: NDArray[np.uint8],
    ) -> None:
        """Gives each coded record its place, segment by segment."""
        todo = np.flatnonzero(statuses == BlockStatus.OK)
        while len(todo):
            segment = self._segment_for(records[todo[:1]], rows)
            if segment is None:
                statuses[todo] = BlockStatus.NO_SPACE
                return
            count = self._fitting(segment, records[todo])
            if count == 0:  # larger than what an empty segment holds
                statuses[todo[0]] = BlockStatus.BLOCK_TOO_LARGE
                todo = todo[1:]
                continue
            self._append(segment, records[todo[:count]], job, rows, buffer)
            todo = todo[count:]

    def _segment_for(self, record: NDArray[Any], rows: PutRows) -> Segment | None:
        """The open segment if the record (one row) fits, else a new one; the namespace is in it."""
        segment = self._open
        pages = _namespace_pages(rows)
        if segment is not None and rows.namespace_digest in segment.namespaces:
            pages = 0
        if segment is None or self._fitting(segment, record, pages) == 0:
            if segment is not None and not any(len(part) for part in segment.records):
                return segment  # empty, and still it doesn't fit
            if segment is not None:
                self.seal()
            segment = self._open = self._space.take(self.next_sequence, self.take_kills)
            if segment is None:
                return None
        if rows.namespace_digest not in segment.namespaces:
            self._append_namespace(segment, rows)
        return segment

    def _fitting(self, segment: Segment, records: NDArray[Any], before: int = 0) -> int:
        """How many of the records, in order, fit the segment together with their directory.

        before: pages that something else takes first.
        """
        have_records = sum(len(part) for part in segment.records)
        have_blocks = sum(len(part) for part in segment.blocks)
        pages = np.cumsum(records["pages"], dtype=np.int64)
        blocks = have_blocks + np.cumsum(records["block_count"], dtype=np.int64)
        counts = have_records + np.arange(1, len(records) + 1)
        names = len(segment.namespaces) + 1
        page = limits.PAGE_BYTES
        rows = -(-counts * DIR_RECORD.itemsize // page) + -(-blocks * DIR_BLOCK.itemsize // page)
        rows += -(-names * 32 // page)
        if self._bloom:
            rows += -(-(blocks * limits.BLOOM_BITS_PER_KEY // 8 + 32) // page)
        room = segment.end_page - segment.next_page - before
        return int(np.searchsorted(pages + rows, room, "right"))

    def _append(
        self,
        segment: Segment,
        records: NDArray[Any],
        job: EncodeJob,
        rows: PutRows,
        buffer: StagingBuffer,
    ) -> None:
        ends = segment.next_page + np.cumsum(records["pages"], dtype=np.int64)
        pages = (ends - records["pages"]).astype(np.uint32)
        offsets = np.ascontiguousarray(records["buffer_offset"])
        lib.fkv_records_bind(
            buffer.base,
            pointer(offsets, "uint64_t *"),
            pointer(pages, "uint32_t *"),
            len(records),
            segment.uuid,
            segment.epoch,
        )
        directory_rows = np.zeros(len(records), DIR_RECORD)
        for name in (
            "sequence",
            "pages",
            "header_pages",
            "block_count",
            "tokens",
            "codec",
            "flags",
        ):
            directory_rows[name] = records[name]
        directory_rows["page"] = pages
        directory_rows["group"] = job.geometry.group
        directory_rows["namespace_ordinal"] = segment.namespaces.index(rows.namespace_digest)
        block_rows = _block_rows(records, job.blocks, rows.digests)
        segment.next_page = int(ends[-1])
        segment.unsynced = True
        with self._reap_lock:  # a failed write may be taking rows out meanwhile
            segment.records.append(directory_rows)
            segment.blocks.append(block_rows)
        # Known as in flight before it is visible, visible before it can fail: no reader and no
        # failure comes between.
        writes = self._take_off(segment, records, pages, buffer)
        ids = np.full(len(segment.namespaces), rows.namespace_id, np.uint32)
        dropped = self._index.add(segment.number, directory_rows, block_rows, ids)
        self._last_appended = int(directory_rows["sequence"][-1])
        self.queue_kills(dropped, self._last_appended)
        self._io.write_submit(writes)

    def _append_namespace(self, segment: Segment, rows: PutRows) -> None:
        """Makes the segment describe itself.

        The identity's readable fields, before its first record.
        """
        room = _namespace_pages(rows) * limits.PAGE_BYTES
        segment.namespaces.append(rows.namespace_digest)
        page = aligned_copy(bytes(room))
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        size = int(
            lib.fkv_encode_namespace(
                rows.namespace_digest,
                rows.namespace_json,
                len(rows.namespace_json),
                sequence,
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
        self.counters.segment_bytes_written += size

    # ---- writes in flight ----

    def _take_off(
        self,
        segment: Segment,
        records: NDArray[Any],
        pages: NDArray[np.uint32],
        buffer: StagingBuffer,
    ) -> NDArray[Any]:
        """Rows of WRITE_DTYPE, noted as in flight.

        About a megabyte each, records that touch in one.
        """
        sizes = records["pages"].astype(np.int64) * limits.PAGE_BYTES
        starts = records["buffer_offset"].astype(np.int64)
        apart = starts[1:] != starts[:-1] + sizes[:-1]
        run = np.cumsum(sizes) // limits.WRITE_RUN_BYTES
        cuts = np.flatnonzero(apart | (run[1:] != run[:-1])) + 1
        first = np.concatenate(([0], cuts))
        end = np.append(cuts, len(records))
        writes = np.zeros(len(first), WRITE_DTYPE)
        writes["tag"] = np.arange(self._next_tag, self._next_tag + len(first))
        writes["offset"] = pages[first].astype(np.uint64) * limits.PAGE_BYTES
        writes["length"] = starts[end - 1] + sizes[end - 1] - starts[first]
        writes["data"] = buffer.address + starts[first]
        writes["fd"] = segment.fd
        sequences = np.ascontiguousarray(records["sequence"])
        block_ends = np.cumsum(records["block_count"], dtype=np.int64)
        with self._reap_lock:
            for tag, low, high in zip(
                writes["tag"].tolist(), first.tolist(), end.tolist(), strict=True
            ):
                blocks = int(block_ends[high - 1] - (block_ends[low - 1] if low else 0))
                part = sequences[low:high]
                self._flights[tag] = _Flight(buffer, segment.number, int(part[0]), part, blocks)
            buffer.users += len(first)
        self._next_tag += len(first)
        self.counters.record_bytes_written += int(sizes.sum())
        return writes

    def reap(self, *, wait: bool) -> None:
        """Takes notice of finished writes; wait: of at least one, if any is in flight."""
        given: list[StagingBuffer] = []
        with self._reap_lock:
            finished = self._io.write_reap(64, 1000 if wait else 0)
            for tag, result in zip(
                finished["tag"].tolist(), finished["result"].tolist(), strict=True
            ):
                flight = self._flights.pop(tag)
                flight.buffer.users -= 1
                if flight.buffer.users == 0:
                    given.append(flight.buffer)
                if result != 0:
                    self.counters.failed_writes += 1
                    self._drop(flight.segment, flight.sequences)
        for buffer in given:
            self._staging.give(buffer)

    def _drop(self, segment: int, sequences: NDArray[np.uint64]) -> None:
        """Records that failed leave the index and their segment's directory, for good.

        They may have reached the device all the same: what was reported lost must not come back.
        """
        lost = self._index.drop_sequences(sequences)
        self.counters.lost_blocks += lost
        self._lost_since_flush += lost
        mine = self._segments[segment]
        kept_records, kept_blocks = [], []
        for records, blocks in zip(mine.records, mine.blocks, strict=True):
            keep = ~np.isin(records["sequence"], sequences)
            self._failed.append(_record_kills(mine, records[~keep]))
            kept_records.append(records[keep])
            kept_blocks.append(blocks[np.repeat(keep, records["block_count"])])
        mine.records, mine.blocks = kept_records, kept_blocks

    def first_unwritten(self) -> int:
        """Records with this sequence or a later one may not be on the device yet."""
        with self._reap_lock:
            return next((flight.first_sequence for flight in self._flights.values()), NO_SEQUENCE)

    def wait_written(self, sequence: int = NO_SEQUENCE - 1) -> None:
        """Returns once every write of records up to `sequence` has ended, well or not."""
        while self.first_unwritten() <= sequence:
            self.reap(wait=True)

    # ---- durability ----

    def queue_kills(self, dropped: NDArray[Any], sequence: int) -> None:
        """Blocks that the record `sequence` superseded; they must never come back."""
        if len(dropped):
            self._kills.append((sequence, kill_rows(dropped)))

    def take_kills(self) -> NDArray[Any]:
        """Queued kills whose cause is durable, and those of records that failed."""
        with self._reap_lock:
            ready, self._failed = self._failed, []
        ready += [rows for cause, rows in self._kills if cause <= self.durable_sequence]
        self._kills = [
            (cause, rows) for cause, rows in self._kills if cause > self.durable_sequence
        ]
        return np.concatenate(ready) if ready else np.zeros(0, KILL)

    def kill(self, dropped: NDArray[Any]) -> None:
        """Logs deleted blocks, durably, and with them their older versions. Raises StoreError.

        Those are logged only once what superseded them is durable, so that it is now made so.
        """
        if any(cause > self.durable_sequence for cause, _ in self._kills):
            self._make_durable()
        self._manifest.kill(np.concatenate([self.take_kills(), kill_rows(dropped)]), sync=True)

    def flush(self) -> int:
        """Makes all captured records durable.

        Returns how many blocks were lost since the last flush. Raises StoreError where the log
        can't be written.
        """
        self.counters.flushes += 1
        self._make_durable()
        lost, self._lost_since_flush = self._lost_since_flush, 0
        self._manifest.kill(self.take_kills(), sync=True)
        return lost

    def _make_durable(self) -> None:
        self.wait_written()
        self._sync([segment for segment in self._segments if segment.unsynced])
        self.durable_sequence = self._last_appended

    def _sync(self, segments: Iterable[Segment]) -> bool:
        dirty = list(segments)
        if not dirty:
            return True
        results = self._io.sync([segment.fd for segment in dirty])
        for segment, result in zip(dirty, results.tolist(), strict=True):
            segment.unsynced = False
            if result != 0:
                self.counters.failed_syncs += 1
                self._give_up(segment)
        return not results.any()

    def _give_up(self, segment: Segment) -> None:
        """A sync failed.

        Nothing since the last durable point may be believed, nothing more is appended.
        """
        for records in segment.records:
            late = records["sequence"][records["sequence"] > self.durable_sequence]
            if len(late):
                self._drop(segment.number, np.ascontiguousarray(late))
        segment.state = SegmentState.CLOSED
        if segment is self._open:
            self._open = None

    def seal(self) -> None:
        """Closes the open segment with its directory, once its records are durable."""
        segment, self._open = self._open, None
        if segment is None:
            return
        self.wait_written()
        segment.state = SegmentState.CLOSED
        if not self._sync([segment]):
            return
        self.durable_sequence = self._last_appended
        rows = directory.Directory(
            _joined(segment.records, DIR_RECORD),
            _joined(segment.blocks, DIR_BLOCK),
            segment.namespaces,
            self.durable_sequence,
        )
        body, footer = directory.encode(
            rows, segment.uuid, segment.epoch, segment.next_page, bloom=self._bloom
        )
        at = segment.next_page * limits.PAGE_BYTES
        segment.records, segment.blocks = [], []
        if self._io.write(segment.fd, aligned_copy(body), at) != 0:
            return  # recovery scans it
        if (
            self._io.write(segment.fd, aligned_copy(footer), segment.end_page * limits.PAGE_BYTES)
            == 0
        ):
            segment.state = SegmentState.SEALED
            self.counters.sealed_segments += 1
        self.counters.segment_bytes_written += len(body) + len(footer)
        segment.unsynced = True


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


def _joined(parts: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
