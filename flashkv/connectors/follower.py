"""A store that another process writes, as this one reads it.

    follower = Follower(path, options, refresh_ms=2000, note=note)
    blocks = follower.namespace(identity, shard)     # None as long as there is nothing to read
    if something was missing and follower.refresh(): # ask again

Invariants
  - nothing is locked or written; what is found was on disk when the store was opened here, and
    what the writer has overwritten since is a miss;
  - it is opened anew only where its files changed, and not more often than the interval.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import flashkv
from flashkv.errors import FlashKVError, NotAStoreError
from flashkv.folder import SEGMENTS, SHARD
from flashkv.identity import Identity, Shard
from flashkv.namespace import Namespace
from flashkv.options import Options
from flashkv.store import Store

Files = tuple[tuple[str, int, int], ...]


class Follower:
    """A read-only handle that follows a writer. Safe for all threads.

    note: is told, once a reason, why the store can't be read.
    """

    def __init__(
        self, path: Path, options: Options, refresh_ms: int, note: Callable[[str, str], None]
    ) -> None:
        self.path = path
        self._options = options
        self._interval_s = refresh_ms / 1000
        self._note = note
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._files: Files | None = None
        self._opened_at = float("-inf")
        self._closed = False
        self.refresh()

    def namespace(self, identity: Identity, shard: Shard) -> Namespace | None:
        """The blocks of an identity as they were when the store was opened."""
        with self._lock:
            if self._store is None:
                return None
            return self._store.namespace(identity, shard=shard)

    def refresh(self) -> bool:
        """Opens the store anew where it may say more now; whether it did.

        A namespace of before raises ClosedError from then on.
        """
        with self._lock:
            now = time.monotonic()
            if self._closed or now - self._opened_at < self._interval_s:
                return False
            self._opened_at = now
            files = self._state()
            if files == self._files or not files:
                return False
            try:
                store = flashkv.open(self.path, options=self._options, read_only=True)
            except NotAStoreError:
                return False
            except (FlashKVError, OSError) as error:
                self._note("follow", str(error))
                return False
            before, self._store, self._files = self._store, store, files
        if before is not None:
            before.close()
        return True

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
