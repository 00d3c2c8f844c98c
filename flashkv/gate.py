"""A gate in front of what close() takes away: calls that are inside end before it goes.

Invariants
  - once shut, nobody comes in; shut() returns when every other thread is out;
  - who is inside is noted by thread: a call that an exception from a signal handler cut off between
    two instructions is not waited for by its own thread, nor by anybody once that thread has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Gate:
    """Use as a context manager around a call; safe for all threads, and within one another."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        """refuse(): raises what a caller shall see who comes too late."""
        self._refuse = refuse
        self._lock = threading.Lock()
        self._inside: dict[int, int] = {}  # thread -> depth
        self._shut = False

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            shut = self._shut
            if not shut:
                self._inside[me] = self._inside.get(me, 0) + 1
        if shut:
            self._refuse()
            raise RuntimeError("the gate is shut")  # refuse() did not raise

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        with self._lock:
            depth = self._inside.get(me, 1) - 1
            if depth:
                self._inside[me] = depth
            else:
                self._inside.pop(me, None)

    def shut(self) -> bool:
        """Lets nobody in any more and waits for those inside; False if it was shut before."""
        with self._lock:
            first, self._shut = not self._shut, True
        while self._others():
            time.sleep(0.001)
        return first

    def _others(self) -> set[int]:
        """Live threads inside, but for this one."""
        alive = {thread.ident for thread in threading.enumerate() if thread.ident is not None}
        with self._lock:
            return (set(self._inside) & alive) - {threading.get_ident()}
