"""Makes what an engine stored durable soon, for engines that are killed rather than closed.

Invariant: a block that was put is durable at most about an interval and one flush later; an engine
waits for none of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from flashkv.errors import ClosedError, StoreError
from flashkv.store import Store

Note = Callable[[str, str], None]


class Flusher:
    """Flushes a store `interval_ms` after the first put that isn't durable yet.

    note: is told of what could not be made durable.
    """

    def __init__(self, store: Store, interval_ms: int, note: Note) -> None:
        self._store = store
        self._interval_s = interval_ms / 1000
        self._note = note
        self._due = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def soon(self) -> None:
        """Something was put."""
        self._due.set()
        with self._lock:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="flashkv-flusher", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Flushes what is due and ends. May be called again."""
        with self._lock:
            self._ended.set()
            thread, self._thread = self._thread, None
        self._due.set()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._due.wait()
            self._ended.wait(self._interval_s)
            self._due.clear()
            try:
                self._store.flush()
            except ClosedError:
                return
            except (StoreError, OSError) as error:
                self._note("flush", str(error))
