"""Leases: what a match found stays until it is loaded, for a bounded time.

Invariants
  - a lease ends by release(), by its time or with the store, whichever comes first; each pin is
    given back once;
  - leases never hold more than half of the segments, nor are there more than LEASES_MAX: beyond
    that a match gets none.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.index import Index


@dataclass(eq=False)
class Lease:
    """Holds segments. Use as a context manager, or call release()."""

    segments: NDArray[np.uint32]
    ends_at: float  # of time.monotonic()
    _leases: Leases | None = field(default=None, repr=False)

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
        self._lock = threading.Lock()
        self._active: list[Lease] = []
        self.refused = 0

    def __len__(self) -> int:
        return len(self._active)

    def take(self, segments: NDArray[np.uint32], lease_ms: int, segments_max: int) -> Lease | None:
        """A lease on segments that hold one pin each already.

        None, and the pins given back, at a limit.
        """
        self.expire()
        with self._lock:
            held = {int(s) for lease in self._active for s in lease.segments}
            held.update(segments.tolist())
            if len(self._active) < limits.LEASES_MAX and len(held) <= max(1, segments_max // 2):
                lease = Lease(segments, time.monotonic() + lease_ms / 1000, self)
                self._active.append(lease)
                return lease
            self.refused += 1
        self._index.unpin(segments)
        return None

    def release(self, lease: Lease) -> None:
        """Ends the lease."""
        with self._lock:
            if lease._leases is None:
                return
            lease._leases = None
            self._active.remove(lease)
        self._index.unpin(lease.segments)

    def expire(self) -> None:
        """Ends what is over its time."""
        now = time.monotonic()
        for lease in [lease for lease in self._active if lease.ends_at <= now]:
            self.release(lease)

    def segments(self) -> set[int]:
        """Numbers of the segments that active leases hold."""
        self.expire()
        with self._lock:
            return {int(segment) for lease in self._active for segment in lease.segments}

    def close(self) -> None:
        """Ends all."""
        for lease in list(self._active):
            self.release(lease)
