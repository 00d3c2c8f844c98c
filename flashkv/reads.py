"""Reads that go on after the call that began them, and the thread that ends them.

Invariants
  - whatever a native read points to is held here from before it begins until it is over, whoever
    lost interest, and whatever a signal handler cuts off;
  - each read is told to be over once, on that thread;
  - times are kept to whatever the device does: nothing here waits for it.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv.background import THREAD_NAME
from flashkv.blockio import BlockIO
from flashkv.errors import ClosedError, begun
from flashkv.native import ffi, lib, pointer

REAPED_AT_ONCE: Final = 64
"""Reads that one native call tells to be over."""


class NativeRead:
    """A batch of native reads. wants: rows that tell how each block fared, once it is over."""

    def __init__(self, batch: Any, wants: NDArray[Any], keep: object) -> None:
        """keep: all that the batch points to, and what owns the caller's memory."""
        self.batch = batch
        self.wants = wants
        self.over = False
        self._keep = keep
        self._job = ffi.new("fkv_read_job **")
        self._lock = threading.Lock()
        self._on_over: list[Callable[[], None]] = []

    def begin(self, engine: Any, tag: int) -> bool:
        """Hands it to the device. False where memory ran out: it is over then."""
        return begun(lib.fkv_read_start(engine, self.batch, tag, self._job))

    @property
    def known(self) -> bool:
        """Whether the data plane has it: its tag will be reaped."""
        return bool(self._job[0] != ffi.NULL)

    def give_up(self) -> bool:
        """Nobody wants it any more; whether the caller's memory is free. Statuses are final.

        Never waits for the device, only for decoding that is under way.
        """
        with self._lock:
            return not self.known or bool(lib.fkv_read_cancel(self._job[0]))

    def when_over(self, call: Callable[[], None]) -> None:
        """Makes the call once it is over: at once, or on the thread of Reads."""
        with self._lock:
            if not self.over:
                self._on_over.append(call)
                return
        call()

    def ended(self) -> None:
        """Its tag was reaped, or it never began."""
        with self._lock:
            self.over = True
            if self.known:
                lib.fkv_read_free(self._job[0])
                self._job[0] = ffi.NULL
            calls, self._on_over = self._on_over, []
            self._keep = self.batch = None
        for call in calls:
            call()


class Reads:
    """Reads on their way, and times at which something is to be looked at. Safe for all threads."""

    def __init__(self, io: BlockIO) -> None:
        self._io = io
        self._lock = threading.Lock()
        self._reads: dict[int, NativeRead] = {}
        self._times: list[tuple[float, int, Callable[[], None]]] = []
        self._next = 1
        self._thread: threading.Thread | None = None
        self._closing = False

    def begin(self, read: NativeRead) -> None:
        """Begins a read; where this raises it is over. Raises ClosedError."""
        tag = 0
        try:
            with self._lock:
                self._check()
                tag, self._next = self._next, self._next + 1
                self._reads[tag] = read
            if not read.begin(self._io.engine, tag):
                self._end(tag)
        except BaseException:
            if not read.known:
                self._reads.pop(tag, None)
                read.ended()
            raise

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Makes a call at a time of time.monotonic(), or soon after. It must be quick."""
        with self._lock:
            self._check()
            self._next += 1
            heapq.heappush(self._times, (when, self._next, call))
            first = self._times[0][0] == when
        if first:
            lib.fkv_read_wake(self._io.engine)

    def _check(self) -> None:
        """There is a thread. Under the lock."""
        if self._closing:
            raise ClosedError("the store is closed")
        if self._thread is None:
            # Not for the interpreter to wait for: a store that was not closed may have reads.
            self._thread = threading.Thread(
                target=self._run, name=f"{THREAD_NAME}-reads", daemon=True
            )
            self._thread.start()

    def __len__(self) -> int:
        """Reads that the device, or a worker, has."""
        return len(self._reads)

    # ---- the thread ----

    def _run(self) -> None:
        tags = np.zeros(REAPED_AT_ONCE, np.uint64)
        native_tags, engine = pointer(tags, "uint64_t *"), self._io.engine
        while True:
            with self._lock:
                if self._closing and not self._reads:
                    return
                when = self._times[0][0] if self._times else math.inf
            left_ms = 1e3 * (when - time.monotonic())
            wait_ms = -1 if when == math.inf else max(math.ceil(left_ms), 0)
            count = lib.fkv_read_reap(engine, native_tags, REAPED_AT_ONCE, wait_ms)
            for tag in tags[:count].tolist():
                self._end(tag)
            for call in self._due():
                call()

    def _end(self, tag: int) -> None:
        self._reads[tag].ended()
        del self._reads[tag]

    def _due(self) -> list[Callable[[], None]]:
        calls = []
        with self._lock:
            now = time.monotonic()
            while self._times and self._times[0][0] <= now:
                calls.append(heapq.heappop(self._times)[2])
        return calls

    def close(self) -> None:
        """Waits for all reads to be over, those that were given up too, and ends the thread."""
        with self._lock:
            self._closing = True
            thread, self._times = self._thread, []
        if thread is not None:
            lib.fkv_read_wake(self._io.engine)
            thread.join()
