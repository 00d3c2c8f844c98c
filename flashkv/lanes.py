"""The threads that begin and carry out tickets, and the bound on what waits for them.

Invariants
  - work of a lane starts in the order of its submission, but for gets of blocks that are still
    being written: they give way;
  - memory in flight, the callers' own as far as memory_bytes() can tell, is bounded: stores are
    refused before loads are, and a single operation of a kind is never refused for its size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Final

from flashkv import limits
from flashkv.errors import BusyError


class Lane(Enum):
    """Value: (name, threads)."""

    WRITE = ("write", 1)  # puts and deletes
    READ = ("read", 2)  # gets and lookups
    BACKGROUND = ("background-read", 1)  # gets that nobody waits for


STORES_SHARE: Final = 0.5
"""Most of the bytes in flight that stores may have."""
STORES_UNTIL: Final = 0.75
"""... and only while all together have no more than this."""


@dataclass
class Refused:
    """Submissions that were answered by BusyError."""

    puts: int = 0
    gets: int = 0


class Lanes:
    """The lanes of a store. Their threads start at first use."""

    def __init__(self, inflight_bytes: int = limits.INFLIGHT_BYTES) -> None:
        self._limit = inflight_bytes
        self._lock = threading.Lock()
        self._pools: dict[Lane, ThreadPoolExecutor] = {}
        self._bytes = {True: 0, False: 0}  # of stores, of loads
        self.inflight = 0
        self.refused = Refused()

    def take(self, size: int, *, store: bool) -> None:
        """Counts an operation and its bytes. Raises BusyError."""
        with self._lock:
            mine, all_bytes = self._bytes[store], sum(self._bytes.values())
            most = self._limit * (STORES_UNTIL if store else 1.0)
            full = all_bytes + size > most or (store and mine + size > STORES_SHARE * self._limit)
            if full and mine:
                if store:
                    self.refused.puts += 1
                else:
                    self.refused.gets += 1
                raise BusyError(
                    f"too many bytes of {'puts' if store else 'gets'} are in flight",
                    value=f"{all_bytes} and {size} more",
                    limit=f"{self._limit} (Options.inflight_bytes)",
                    advice="wait for tickets, or do without",
                )
            self._bytes[store] += size
            self.inflight += 1

    def give(self, size: int, *, store: bool) -> None:
        """The memory of an operation is its caller's again."""
        with self._lock:
            self._bytes[store] -= size

    def finished(self) -> None:
        """An operation is over."""
        with self._lock:
            self.inflight -= 1

    @property
    def inflight_bytes(self) -> int:
        """Callers' memory in flight."""
        return sum(self._bytes.values())

    def submit(self, work: Callable[[], None], lane: Lane) -> None:
        """Queues work."""
        with self._lock:
            pool = self._pools.get(lane)
            if pool is None:
                name, threads = lane.value
                pool = self._pools[lane] = ThreadPoolExecutor(threads, f"flashkv-{name}")
        pool.submit(work)

    def close(self) -> None:
        """Carries out what is queued, then ends the threads."""
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        self._pools = {}
