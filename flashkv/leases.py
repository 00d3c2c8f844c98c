"""Leases: what a match found stays until it is loaded, for a bounded time.

Invariants
  - a lease ends by release(), by its time or with the store, whichever comes first; each pin is
    given back once;
  - leases never hold more than half of the segments, nor are there more than LEASES_MAX: beyond
    that a match gets none;
  - finding blocks and leasing them is one step: reclaim comes before it or not at all.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.index import Index, Keys


@dataclass(eq=False)
class Lease:
    """Holds segments. Use as a context manager, or call release()."""

    segments: NDArray[np.uint32]
    ends_at: float  # of time.monotonic()
    _leases: Leases | None = field(default=None, repr=False)

    @property
    def held(self) -> bool:
        """False once its pins were given back."""
        return self._leases is not None

    @property
    def active(self) -> bool:
        """False once released or expired."""
        return self._leases is not None and time.monotonic() < self.ends_at

    def release(self) -> None:
        """Gives the pins back. May be called again."""
        if self._leases is not None:
            self._leases.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """The leases of a handle."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._lock = threading.RLock()
        self._held: Counter[int] = Counter()  # segment -> leases that hold it
        self._by_end: list[tuple[float, int, Lease]] = []  # a heap; released ones go in time
        self._next = 0
        self._active = 0
        self.refused = 0

    def __len__(self) -> int:
        return self._active

    def match(
        self, space: Any, keys: Keys, lease_ms: int, segments_max: int
    ) -> tuple[int, Lease | None]:
        """Index.match with a lease on what it found: (leading keys present, lease or None).

        What is found can't be reclaimed before the lease is there: see unless_held().
        """
        self.expire()
        with self._lock:
            count, segments = self._index.match(space, keys, pin=True)
            return count, self._take(segments.copy(), lease_ms, segments_max) if count else None

    def _take(self, segments: NDArray[np.uint32], lease_ms: int, most: int) -> Lease | None:
        """A lease on segments that hold one pin each; None, and the pins given back, at a limit."""
        numbers = segments.tolist()
        held = len(self._held) + sum(number not in self._held for number in numbers)
        if self._active >= limits.LEASES_MAX or held > max(1, most // 2):
            self.refused += 1
            self._index.unpin(segments)
            return None
        lease = Lease(segments, time.monotonic() + lease_ms / 1000, self)
        self._held.update(numbers)
        self._active += 1
        self._next += 1
        heapq.heappush(self._by_end, (lease.ends_at, self._next, lease))
        if len(self._by_end) > 2 * self._active + 1024:
            self._by_end = [entry for entry in self._by_end if entry[2].held]
            heapq.heapify(self._by_end)
        return lease

    def release(self, lease: Lease) -> None:
        """Ends the lease."""
        with self._lock:
            if not lease.held:
                return
            lease._leases = None
            self._active -= 1
            for number in lease.segments.tolist():
                self._held[number] -= 1
                if not self._held[number]:
                    del self._held[number]
        self._index.unpin(lease.segments)

    def expire(self) -> None:
        """Ends what is over its time."""
        now = time.monotonic()
        with self._lock:
            while self._by_end and self._by_end[0][0] <= now:
                self.release(heapq.heappop(self._by_end)[2])

    def unless_held(self, segment: int, drop: Callable[[], int]) -> int | None:
        """drop(), unless a lease holds the segment (None); no lease comes in between."""
        self.expire()
        with self._lock:
            return None if segment in self._held else drop()

    def close(self) -> None:
        """Ends all."""
        with self._lock:
            for _, _, lease in self._by_end:
                self.release(lease)
            self._by_end.clear()
