"""A client without a store: what an engine's batch interface gets where the store can't be had.

Invariant: it answers as flashkv.tickets.Client does, each ticket once and with an event; the work,
which has no store to wait for, is done at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flashkv.errors import ClosedError
from flashkv.tickets import Milestone, Ticket


class StorelessClient:
    """Stands in for Store.client(). Safe for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: deque[Ticket] = deque()
        self._next_id = 1
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def submit(self, kind: str, call: Callable[[], Any], *, write: bool) -> Ticket:
        """As Client.submit; `write` makes no difference."""
        del write
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            ticket = Ticket(self._next_id, kind, Milestone.CAPTURED)
            self._next_id += 1
        error: BaseException | None = None
        try:
            ticket.result = call()
        except Exception as caught:  # noqa: BLE001  (the ticket carries it to its owner)
            error = caught
        ticket._finish(error)
        with self._lock:
            self._finished.append(ticket)
            if not self._closed:
                os.eventfd_write(self._event_fd, 1)
        return ticket

    def fileno(self) -> int:
        """The eventfd: readable while finished tickets wait for drain()."""
        return self._event_fd

    def drain(self) -> list[Ticket]:
        """Finished tickets, each once."""
        with self._lock:
            if not self._closed:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._event_fd)
            finished = list(self._finished)
            self._finished.clear()
        return finished

    def close(self) -> None:
        """Closes the eventfd. May be called again."""
        with self._lock:
            first, self._closed = not self._closed, True
            if first:
                os.close(self._event_fd)
