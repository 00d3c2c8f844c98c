"""A store that another process writes, as this one reads it.

    follower = Follower(path, options, refresh_ms=2000, note=note)
    blocks = follower.namespace(identity, shard)     # None as long as there is nothing to read
    follower.soon()                                  # something was missing: look whether it came

Invariants
  - nothing is locked or written; what is found was on disk when the store was opened here, and
    what the writer has overwritten since is a miss;
  - it is opened anew only where its files changed, not more often than the interval, and so that
    openings take at most a tenth of the time; nobody but the thread that opens it waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import flashkv
from flashkv.errors import FlashKVError, NotAStoreError
from flashkv.folder import SEGMENTS, SHARD
from flashkv.identity import Identity, Shard
from flashkv.namespace import Namespace
from flashkv.options import Options
from flashkv.store import Store

Files = tuple[tuple[str, int, int], ...]
REST: Final = 10
"""Between two openings, so many times the time that one took."""


class Follower:
    """A read-only handle that follows a writer. Safe for all threads.

    note: is told why the store can't be read.
    """

    def __init__(
        self, path: Path, options: Options, refresh_ms: int, note: Callable[[str, str], None]
    ) -> None:
        self.path = path
        self._options = options
        self._interval_s = refresh_ms / 1000
        self._note = note
        self._lock = threading.Lock()  # of the fields below; held for moments
        self._opening = threading.Lock()  # held while the store is opened
        self._store: Store | None = None
        self._files: Files | None = None
        self._next_at = float("-inf")
        self._thread: threading.Thread | None = None
        self._closed = False
        self.refresh()

    def namespace(self, identity: Identity, shard: Shard) -> Namespace | None:
        """The blocks of an identity as they were when the store was opened.

        Raises ClosedError where the store was opened anew at this moment: ask again.
        """
        with self._lock:
            store = self._store
        return None if store is None else store.namespace(identity, shard=shard)

    def soon(self) -> None:
        """Refreshes in the background, unless that was done within the interval."""
        with self._lock:
            if self._closed or self._thread is not None or time.monotonic() < self._next_at:
                return
            self._thread = threading.Thread(target=self._run, name="flashkv-follower", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self.refresh()
        finally:
            with self._lock:
                self._thread = None

    def refresh(self) -> bool:
        """Opens the store anew if it may say more now and the interval is over; whether it did.

        A namespace of before raises ClosedError from then on.
        """
        with self._opening:
            begun = time.monotonic()
            with self._lock:
                if self._closed or begun < self._next_at:
                    return False
                self._next_at = begun + self._interval_s
            files = self._state()
            if files == self._files or not files:
                return False
            store = self._open()
            if store is None:
                return False
            now = time.monotonic()
            with self._lock:
                self._files = files
                self._next_at = max(self._next_at, now + REST * (now - begun))
        before = self._exchange(store)
        if before is not None:
            before.close()
        return True

    def _exchange(self, store: Store) -> Store | None:
        """Takes the store in; returns the one to be closed: that before, or, closed, this one."""
        with self._lock:
            if self._closed:
                return store
            before, self._store = self._store, store
        return before

    def _open(self) -> Store | None:
        try:
            return flashkv.open(self.path, options=self._options, read_only=True)
        except NotAStoreError:
            return None
        except (FlashKVError, OSError) as error:
            self._note("follow", str(error))
            return None

    def _state(self) -> Files:
        """Names, times and sizes of the segments: what changes as the writer writes."""
        try:
            entries = list((self.path / SHARD / SEGMENTS).iterdir())
            found = [(entry.name, entry.stat()) for entry in entries]
        except OSError:
            return ()
        return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in found))

    def close(self) -> None:
        """May be called again."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()
