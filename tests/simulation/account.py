"""What must be readable: which versions of each key a crash at any position may leave.

Invariants, of which every crash image is asked
  - a flushed version is there, or was evicted; what was not flushed is there whole or absent;
  - a deleted, retired or superseded version never comes back, once that was acknowledged durable;
  - a key never holds bytes that were not put under it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

ABSENT: Final = None
Allowed = dict[bytes, frozenset[int | None]]


class Account:
    """Follows the calls on one store; positions are those of the device's recording."""

    def __init__(self) -> None:
        self.live: dict[bytes, int] = {}  # what the handle shows
        self.allowed: Allowed = {}  # what a crash may leave, now
        self._positions: list[int] = []
        self._history: list[Allowed] = []

    def of(self, key: bytes) -> frozenset[int | None]:
        """What a crash may leave of a key, now."""
        return self.allowed.get(key, frozenset((ABSENT,)))

    def at(self, position: int) -> Allowed:
        """What a crash before the event at `position` may leave; keys that aren't there: absent."""
        row = bisect_right(self._positions, position) - 1
        return self._history[row] if row >= 0 else {}

    def mark(self, position: int) -> None:
        """What is allowed now holds for crashes from here on."""
        if self._positions and self._positions[-1] == position:
            self._history[-1] = dict(self.allowed)
            return
        self._positions.append(position)
        self._history.append(dict(self.allowed))

    # ---- before a call, and after it ----

    def may_become(self, versions: dict[bytes, int | None], position: int) -> None:
        """A call began that gives these keys these versions, ABSENT for what it takes away."""
        for key, version in versions.items():
            self.allowed[key] = self.of(key) | {version}
        self.mark(position)

    def is_stored(self, versions: dict[bytes, int]) -> None:
        """The handle shows these."""
        self.live.update(versions)

    def is_gone(self, keys: Iterable[bytes], position: int) -> None:
        """A call ended that took these away for good."""
        for key in keys:
            self.live.pop(key, None)
            self.allowed[key] = frozenset((ABSENT,))
        self.mark(position)

    def is_durable(self, position: int) -> None:
        """A flush ended well: what the handle shows is what there is."""
        self.allowed = {
            key: frozenset((self.live.get(key, ABSENT),)) for key in self.allowed | self.live
        }
        self.mark(position)

    def evicted(
        self, shown: Iterable[bytes], lain: Iterable[tuple[bytes, int]], begun: int, position: int
    ) -> None:
        """A call that began at `begun` evicted segments in which these keys lay before it, and
        these versions of keys in all.

        From its beginning on those keys may be gone. Afterwards none of the versions comes back,
        and what came over one before the call is durable.
        """
        shown = set(shown)
        self.may_miss(shown, begun)
        gone: dict[bytes, set[int]] = {}
        for key, version in lain:
            gone.setdefault(key, set()).add(version)
        for key in gone.keys() | shown:
            if self.live.get(key) in gone.get(key, ()):
                del self.live[key]
                self.allowed[key] = frozenset((ABSENT,))
            else:
                absent = {ABSENT} if key in shown else set()
                self.allowed[key] = (self.of(key) - gone[key]) | absent
        self.mark(position)

    def may_miss(self, keys: Iterable[bytes] | None, begun: int) -> None:
        """From `begun` to now a crash could take these, or any key."""
        chosen = None if keys is None else dict.fromkeys(keys, frozenset((ABSENT,)))
        first = bisect_right(self._positions, begun) - 1
        for row in range(max(first, 0), len(self._history)):
            allowed = self._history[row]
            for key in allowed if chosen is None else chosen:
                allowed[key] = allowed.get(key, frozenset()) | {ABSENT}

    def may_be_gone(self, keys: Iterable[bytes], begun: int, position: int) -> None:
        """A call that began at `begun` took these away, or the next crash may."""
        gone = list(keys)
        self.may_miss(gone, begun)
        self.allowed.update({key: self.of(key) | {ABSENT} for key in gone})
        self.mark(position)

    def verdict(self, found: dict[bytes, int], position: int, *, may_miss: bool = False) -> str:
        """What is wrong with what was found after a crash at `position`, or an empty string.

        may_miss: anything may be absent.
        """
        allowed = self.at(position)
        for key in allowed | found:
            versions = allowed.get(key, frozenset((ABSENT,)))
            if may_miss:
                versions |= {ABSENT}
            version = found.get(key, ABSENT)
            if version not in versions:
                said = "nothing" if version is ABSENT else f"version {version}"
                may = sorted("nothing" if v is ABSENT else str(v) for v in versions)
                return f"{key!r} holds {said}; it may hold {' or '.join(may)}"
        return ""
