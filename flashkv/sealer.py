"""Full segments -> sealed ones: a sync in the background, then the directory; and every other sync
of segments.

Invariants
  - a segment's directory is written only after all its records are durable;
  - segments are sealed in the order in which they were filled, so that durable_sequence stands for
    all records up to it;
  - a failed sync is never repeated: the segment is closed at its last durable point and what came
    since is dropped;
  - full segments wait for each other, so that one sync serves several of them: a device's flush
    holds up what is written meanwhile. No more than SEALING_MAX wait: an opening after a power cut
    has to scan them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import directory, limits
from flashkv.background import Later
from flashkv.blockio import BlockIO
from flashkv.errors import OutOfMemoryError
from flashkv.flights import Flights
from flashkv.native import aligned_copy
from flashkv.segments import Segment, Segments, SegmentState

_AT_REST: Final = (SegmentState.SEALED, SegmentState.CLOSED)


@dataclass
class SealCounters:
    """Syncs that failed; segments that got their directory."""

    failed_syncs: int = 0
    sealed_segments: int = 0


@dataclass(eq=False)
class _Full:
    """A segment that is filled. last_sequence: of its records."""

    segment: Segment
    last_sequence: int
    epoch: int


class Sealer:
    """Syncs segments and gives full ones their directory. Calls are made under the store's writer
    lock.
    """

    def __init__(
        self,
        segments: Segments,
        io: BlockIO,
        flights: Flights,
        lose: Callable[[Segment, NDArray[np.uint64]], None],
        *,
        durable_sequence: int,
        bloom: bool,
    ) -> None:
        """lose(segment, sequences): under the flights' lock, for records that were not durable."""
        self.counters = SealCounters()
        self.durable_sequence = durable_sequence
        self.together = limits.SEALING_SYNC  # full segments that one sync serves
        self._segments = segments
        self._io = io
        self._flights = flights
        self._lose = lose
        self._bloom = bloom
        self._waiting: deque[_Full] = deque()
        self._sync: Later[NDArray[np.int32]] | None = None
        self._syncing: list[Segment] = []
        self._sealing: list[_Full] = []  # of those that wait: what the sync makes durable

    # ---- full segments ----

    def begin(self, segment: Segment, last_sequence: int) -> None:
        """Takes a full segment; others may be filled meanwhile. last_sequence: of all records."""
        full = _Full(segment, last_sequence, segment.epoch)
        segment.state = SegmentState.SEALING  # no signal comes between this and the next line
        self._waiting.append(full)
        self._flights.launch()
        if len(self._waiting) > limits.SEALING_MAX:
            self.finish()

    def advance(self) -> None:
        """Begins the sync that is due, or seals what was synced; without waiting."""
        count = len(self._waiting)
        due = count >= self.together or count * self._segments.segment_bytes >= limits.GIB
        if self._sync is None and count and due:
            self._flights.reap(wait=False)
            if self._flights.first_unwritten() > self._waiting[-1].last_sequence:
                self._begin_sync()
        if self._sync is not None and self._sync.done():
            self._end_sync()

    def finish(self) -> bool:
        """Returns once no segment waits any more; whether one did."""
        waited = bool(self._waiting)
        while self._waiting:
            if self._sync is None:
                self._flights.wait_written(self._waiting[-1].last_sequence)
                self._begin_sync()
            self._end_sync()
        return waited

    def _begin_sync(self) -> None:
        """Starts the sync of all that wait, whose records are written."""
        # With them directories of those before: a power cut finds few unfinished.
        rest = [segment for segment in self.unsynced() if segment.state in _AT_REST]
        synced = [*(full.segment for full in self._waiting), *rest]
        files = [segment.fd for segment in synced]  # now: one at rest may go meanwhile
        self._syncing, self._sealing = synced, list(self._waiting)
        self._sync = self._io.later(lambda: self._io.sync(files))
        for segment in synced:
            segment.unsynced = False

    def _end_sync(self) -> None:
        """Waits for the sync, and gives the segments that it made durable their directories."""
        assert self._sync is not None
        failed = self._failed(self._syncing, self._sync.result())
        for segment in failed:
            if segment.state is not SegmentState.FREE:  # reclaimed since the sync began
                self.give_up(segment)
        # The segment alone doesn't tell: one that was at rest may have been filled anew since.
        while self._waiting and self._waiting[0] in self._sealing:
            full = self._waiting[0]
            if full.segment.epoch != full.epoch:  # a signal came below, and it was filled anew
                self._waiting.popleft()
                continue
            whole = full.segment not in failed
            if whole:
                self.durable_sequence = max(self.durable_sequence, full.last_sequence)
            full.segment.state = SegmentState.CLOSED
            self._waiting.popleft()  # a signal before finds it here again, one after it closed
            if whole:
                with suppress(OutOfMemoryError):  # recovery scans it
                    self.write_directory(full.segment)
        self._sync, self._syncing, self._sealing = None, [], []

    def write_directory(self, segment: Segment) -> bool:
        """Seals a segment whose records are durable; False where that fails.

        Raises OutOfMemoryError.
        """
        records, blocks = segment.rows()
        rows = directory.Directory(records, blocks, segment.namespaces, self.durable_sequence)
        # A handle before may have kept no room for a filter.
        counts = (len(records), len(blocks), len(segment.namespaces))
        room = segment.end_page - segment.next_page
        bloom = self._bloom and directory.pages_needed(*counts, bloom=True) <= room
        if not bloom and directory.pages_needed(*counts, bloom=False) > room:
            return False
        body, footer = directory.encode(
            rows, segment.uuid, segment.epoch, segment.next_page, bloom=bloom
        )
        at = segment.next_page * limits.PAGE_BYTES
        segment.clear_rows()
        pages = aligned_copy(body), aligned_copy(footer)
        segment.unsynced = True
        if self._io.write(segment.fd, pages[0], at) != 0:
            return False
        if self._io.write(segment.fd, pages[1], segment.end_page * limits.PAGE_BYTES) != 0:
            return False
        segment.state = SegmentState.SEALED
        self.counters.sealed_segments += 1
        return True

    # ---- syncs ----

    def sync(self) -> None:
        """Makes durable what was written to any segment; gives up those whose sync fails."""
        for segment in self.failing(self.unsynced()):
            self.give_up(segment)

    def failing(self, segments: Iterable[Segment]) -> list[Segment]:
        """Syncs segments, each once; returns those whose sync failed."""
        dirty = list({segment.number: segment for segment in segments}.values())
        if not dirty:
            return []
        results = self._io.sync([segment.fd for segment in dirty])
        for segment in dirty:
            segment.unsynced = False
        return self._failed(dirty, results)

    def unsynced(self) -> list[Segment]:
        """Segments that were written since their last sync."""
        return [segment for segment in self._segments if segment.unsynced]

    def give_up(self, segment: Segment) -> None:
        """A sync failed.

        Nothing since the last durable point may be believed, nothing more is appended.
        """
        with self._flights.lock:
            sequences = segment.rows()[0]["sequence"]
            late = sequences[sequences > self.durable_sequence].copy()
            if len(late):
                self._lose(segment, late)
        segment.state = SegmentState.CLOSED

    def _failed(self, segments: Sequence[Segment], results: NDArray[Any]) -> list[Segment]:
        failed = [segments[row] for row in results.nonzero()[0].tolist()]
        self.counters.failed_syncs += len(failed)
        return failed
