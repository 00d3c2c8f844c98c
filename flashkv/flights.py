"""Writes on their way: coded records from staging buffers to their places in segments.

Invariants
  - records that touch, in the staging buffer and in the segment, are written together, about a
    megabyte at a time: small puts gather until a run is full or someone waits for them;
  - a record is noted here before it is visible in the index, and both happen under the lock: a
    reader that finds it knows that it may not be on the device, a failure finds it in the index;
  - which staging buffers are in use is derived from the runs, never counted;
  - an exception from a signal handler (Ctrl-C) may cut any call here: what became of a write that
    nobody can tell any more counts as failed, and nobody waits for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.blockio import WRITE_DTYPE, BlockIO
from flashkv.codec import Staging, StagingBuffer
from flashkv.segments import Segment

NO_SEQUENCE: Final = (1 << 64) - 1
REAP_MS: Final = 20
"""Longest wait in one native call: another thread may take notice of what this one waits for."""


@dataclass(eq=False)
class _Run:
    """One write. sequences: of its records, in parts."""

    buffer: StagingBuffer
    segment: Segment
    data: int  # address
    offset: int  # in the segment
    length: int
    sequences: list[NDArray[np.uint64]]

    def touches(self, segment: Segment, buffer: StagingBuffer, data: int, offset: int) -> bool:
        """Whether what lies there goes on where this run ends, and the run has room."""
        return (
            self.segment is segment
            and self.buffer is buffer
            and self.data + self.length == data
            and self.offset + self.length == offset
            and self.length < limits.WRITE_RUN_BYTES
        )


class Flights:
    """Pending and submitted writes of one writer. Safe for all threads."""

    def __init__(
        self,
        io: BlockIO,
        staging: Staging,
        on_failure: Callable[[Segment, NDArray[np.uint64]], None],
    ) -> None:
        """on_failure(segment, sequences): under the lock, for records that were not written."""
        self.lock = threading.RLock()
        self.failed_writes = 0
        self.filling: StagingBuffer | None = None  # what the writer adds to
        self._reaping: set[int] = set()  # threads that may hold results not taken notice of
        self._io = io
        self._staging = staging
        self._on_failure = on_failure
        self._pending: list[_Run] = []
        self._pending_bytes = 0
        self._flying: dict[int, _Run] = {}
        self._next_tag = 1

    # ---- taking off ----

    def add(
        self,
        segment: Segment,
        buffer: StagingBuffer,
        starts: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        sequences: NDArray[np.uint64],
    ) -> None:
        """Notes records as on their way. starts: in the buffer; offsets: in the segment, in bytes.

        The caller holds the lock, and makes the records visible before it gives the lock back.
        """
        if len(starts) == 1:
            self._gather(segment, buffer, int(starts[0]), int(offsets[0]), int(sizes[0]), sequences)
            return
        apart = starts[1:] != starts[:-1] + sizes[:-1]
        apart |= offsets[1:] != offsets[:-1] + sizes[:-1]
        runs = sizes.cumsum() // limits.WRITE_RUN_BYTES
        cuts = ((apart | (runs[1:] != runs[:-1])).nonzero()[0] + 1).tolist()
        for low, high in zip([0, *cuts], [*cuts, len(starts)], strict=True):
            length = int(starts[high - 1] + sizes[high - 1] - starts[low])
            self._gather(
                segment, buffer, int(starts[low]), int(offsets[low]), length, sequences[low:high]
            )

    def _gather(
        self,
        segment: Segment,
        buffer: StagingBuffer,
        start: int,
        offset: int,
        length: int,
        sequences: NDArray[np.uint64],
    ) -> None:
        """Lets the last pending run grow, or begins another."""
        data = buffer.address + start
        run = self._pending[-1] if self._pending else None
        if run is not None and run.touches(segment, buffer, data, offset):
            run.length += length
            run.sequences.append(sequences)
        else:
            self._pending.append(_Run(buffer, segment, data, offset, length, [sequences]))
        self._pending_bytes += length

    def launch(self, *, least: int = 0) -> None:
        """Submits what is pending, if it is at least so many bytes."""
        with self.lock:
            if not self._pending or self._pending_bytes < least:
                return
            runs = self._pending
            tags = range(self._next_tag, self._next_tag + len(runs))
            self._next_tag += len(runs)
            writes = np.zeros(len(runs), WRITE_DTYPE)
            writes["tag"] = tags
            writes["offset"] = [run.offset for run in runs]
            writes["length"] = [run.length for run in runs]
            writes["data"] = [run.data for run in runs]
            writes["fd"] = [run.segment.fd for run in runs]
            # Never in neither: what is cut off between these lines is still known to be on its way.
            self._flying.update(zip(tags, runs, strict=True))
            self._pending, self._pending_bytes = [], 0
            try:
                self._io.write_submit(writes)
            except MemoryError:
                for tag in tags:
                    self._land(tag, failed=True)

    # ---- landing ----

    def _land(self, tag: int, *, failed: bool) -> None:
        run = self._flying.get(tag)
        if run is not None and failed:
            self.failed_writes += 1
            self._on_failure(run.segment, np.concatenate(run.sequences))
        self._flying.pop(tag, None)

    def reap(self, *, wait: bool) -> None:
        """Takes notice of finished writes; wait: of at least one, if any is on its way."""
        self.launch()
        me = threading.get_ident()
        self._reaping.add(me)
        with self.lock:
            landed = self._take(self._io.write_reap(64, 0))
            if landed or not wait or not self._flying:
                self._reaping.discard(me)
                return
        # Without the lock: others may put and look up meanwhile.
        finished = self._io.write_reap(64, REAP_MS)
        with self.lock:
            if not self._take(finished):
                self._give_up(me)
            self._reaping.discard(me)

    def _take(self, finished: NDArray[Any]) -> int:
        for tag, result in zip(finished["tag"].tolist(), finished["result"].tolist(), strict=True):
            self._land(tag, failed=result != 0)
        self._staging.keep(self.buffers() | ({self.filling} if self.filling is not None else set()))
        return len(finished)

    def _give_up(self, me: int) -> None:
        """Writes that the device is through with and whose results an exception cut off."""
        if not self._flying or self._io.writes_inflight():
            return
        others = {thread.ident for thread in threading.enumerate()} - {me}
        if not self._reaping & others:
            for tag in list(self._flying):
                self._land(tag, failed=True)

    def take_buffer(self, length: int) -> StagingBuffer:
        """A staging buffer for the writer to fill, at least so long; waits for a write to land.

        Raises MemoryError.
        """
        while True:
            with self.lock:
                self.filling = None
                self._take(self._io.write_reap(64, 0))
                self.filling = self._staging.take(length)
                if self.filling is not None:
                    return self.filling
            self.reap(wait=True)

    def buffers(self) -> set[StagingBuffer]:
        """Staging buffers that writes read."""
        with self.lock:
            return {run.buffer for run in (*self._pending, *self._flying.values())}

    def first_unwritten(self) -> int:
        """Records with this sequence or a later one may not be on the device yet."""
        with self.lock:
            run = next(iter(self._flying.values()), None) or next(iter(self._pending), None)
            return int(run.sequences[0][0]) if run is not None else NO_SEQUENCE

    def wait_written(self, sequence: int = NO_SEQUENCE - 1) -> None:
        """Returns once every write of records up to `sequence` has ended, well or not."""
        while self.first_unwritten() <= sequence:
            self.reap(wait=True)

    def holds(self, sequences: NDArray[Any]) -> bool:
        """Whether the write of one of these records isn't over."""
        with self.lock:
            runs = (*self._flying.values(), *self._pending)
            spans = [(int(run.sequences[0][0]), int(run.sequences[-1][-1])) for run in runs]
        if not spans or not len(sequences) or int(sequences.max()) < spans[0][0]:
            return False  # sequences grow
        return any(
            bool(((sequences >= first) & (sequences <= last)).any()) for first, last in spans
        )

    def wait_for(self, sequences: NDArray[Any], wait_ms: float = math.inf) -> bool:
        """Returns once the writes of these records have ended, well or not, or the time is over.

        Whether there was anything to wait for.
        """
        if not self.holds(sequences):
            return False
        end = time.monotonic() + wait_ms / 1e3
        self.reap(wait=False)
        while self.holds(sequences) and time.monotonic() < end:
            self.reap(wait=True)
        return True
