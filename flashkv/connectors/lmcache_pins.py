"""Pins by key, as LMCache counts them, over leases, as the store gives them.

Invariants
  - one lookup is one lease, released when the last of its keys is unpinned;
  - keys whose lease has ended are forgotten: what nobody unpins takes no memory for longer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flashkv.leases import Lease

SWEEP_KEYS: Final = 65536
"""Pinned keys at which those of ended leases are looked for."""


@dataclass(eq=False)
class _Hold:
    lease: Lease
    keys: int  # not unpinned yet


class Pins:
    """Safe for all threads."""

    def __init__(self, lease_ms: int) -> None:
        self.lease_ms = lease_ms
        self._lock = threading.Lock()
        self._holds: dict[bytes, list[_Hold]] = {}
        self._sweep_at = SWEEP_KEYS

    def add(self, names: Sequence[bytes], lease: Lease | None) -> None:
        """Notes that a lease holds these keys; None: it was refused, nothing is held."""
        if lease is None or not names:
            return
        hold = _Hold(lease, len(names))
        with self._lock:
            for name in names:
                self._holds.setdefault(name, []).append(hold)
            if len(self._holds) > self._sweep_at:
                self._sweep()

    def release(self, name: bytes) -> None:
        """Gives one pin of the key back, the oldest."""
        with self._lock:
            holds = self._holds.get(name)
            if not holds:
                return
            hold = holds.pop(0)
            if not holds:
                del self._holds[name]
            hold.keys -= 1
            last = hold.keys == 0
        if last:
            hold.lease.release()

    def held(self, name: bytes) -> bool:
        """Whether a lease that has not ended holds the key."""
        with self._lock:
            return any(hold.lease.active for hold in self._holds.get(name, ()))

    def clear(self) -> None:
        """Ends all."""
        with self._lock:
            holds = {hold for some in self._holds.values() for hold in some}
            self._holds.clear()
        for hold in holds:
            hold.lease.release()

    def _sweep(self) -> None:
        for name, holds in list(self._holds.items()):
            left = [hold for hold in holds if hold.lease.active]
            if left:
                self._holds[name] = left
            else:
                del self._holds[name]
        self._sweep_at = max(SWEEP_KEYS, 2 * len(self._holds))
