"""Reads that go on after the call that began them, and the thread that ends them.

Invariants
  - whatever a native read points to is held here from before it begins until it is over, whoever
    lost interest, and whatever a signal handler cuts off;
  - each read is told to be over once, on that thread;
  - times are kept to whatever the device does: nothing here waits for it.
"""

from __future__ import annotations

import heapq
import logging
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

logger = logging.getLogger(__name__)
REAPED_AT_ONCE: Final = 64
"""Reads that one native call tells to be over."""
PRUNE_AT: Final = 1024
"""Times are looked through for those that nobody wants any more once there are so many."""
WAIT_MS_MAX: Final = 1e9
"""Of one native call."""


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
        self._times: list[tuple[float, int, Callable[[], Callable[[], None] | None]]] = []
        self._prune_at = PRUNE_AT
        self._next = 1
        self._thread: threading.Thread | None = None
        self._closing = False

    def begin(self, read: NativeRead) -> None:
        """Begins a read; where this raises it is given up, or never began. Raises ClosedError."""
        tag = 0
        try:
            with self._lock:
                self._check()
                tag, self._next = self._next, self._next + 1
                self._reads[tag] = read
            if not read.begin(self._io.engine, tag):
                self._end(tag)
        except BaseException:
            if read.known:
                read.give_up()
            elif not read.over:
                self._reads.pop(tag, None)
                read.ended()
            raise

    def at(self, when: float, call: Callable[[], Callable[[], None] | None]) -> None:
        """Makes call()() at a time of time.monotonic(), or soon after; None: it is no more wanted.

        It must wait for no device. What never comes isn't kept.
        """
        if when == math.inf:
            return
        with self._lock:
            self._check()
            if len(self._times) >= self._prune_at:
                self._times = [entry for entry in self._times if entry[2]() is not None]
                heapq.heapify(self._times)
                self._prune_at = max(PRUNE_AT, 2 * len(self._times))
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
            thread = threading.Thread(target=self._run, name=f"{THREAD_NAME}-reads", daemon=True)
            thread.start()
            self._thread = thread

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
            left_ms = min(max(1e3 * (when - time.monotonic()), 0.0), WAIT_MS_MAX)
            wait_ms = -1 if when == math.inf else math.ceil(left_ms)
            count = lib.fkv_read_reap(engine, native_tags, REAPED_AT_ONCE, wait_ms)
            for tag in tags[:count].tolist():
                self._end(tag)
            self._keep_times()

    def _end(self, tag: int) -> None:
        read = self._reads.get(tag)
        if read is not None:
            _told(read.ended)
            self._reads.pop(tag, None)

    def _keep_times(self) -> None:
        while True:
            with self._lock:
                if not self._times or self._times[0][0] > time.monotonic():
                    return
                call = heapq.heappop(self._times)[2]()
            if call is not None:
                _told(call)

    def close(self) -> None:
        """Waits for all reads to be over, those that were given up too, and ends the thread."""
        with self._lock:
            self._closing = True
            thread, self._times = self._thread, []
        interrupt: KeyboardInterrupt | None = None
        while thread is not None and thread.is_alive():  # it uses what is taken away afterwards
            try:
                lib.fkv_read_wake(self._io.engine)
                thread.join()
            except KeyboardInterrupt as caught:  # noqa: PERF203
                interrupt = caught
        if interrupt is not None:
            raise interrupt


def _told(call: Callable[[], None]) -> None:
    """What goes wrong in a call is told; the thread goes on, others wait for it."""
    try:
        call()
    except Exception:
        logger.exception("a read could not be ended as it should")
