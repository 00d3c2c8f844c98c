"""Asynchronous use: a client with one completion queue and one eventfd, and the tickets that come
out of it.

Invariants
  - submitting looks into no batch, codes nothing and waits for nothing: it queues and returns;
  - every ticket comes out of drain() exactly once, whether it went well, failed or was cut off by
    close();
  - a ticket holds references to keys and memory until its operation is over: the source of a put is
    the caller's again at `captured`, the destination of a get when the ticket is done;
  - operations of one lane (puts and deletes; gets and lookups) start in the order of their
    submission.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from flashkv import checks, limits
from flashkv.errors import BatchResult, BusyError, ClosedError, FlashKVError, OptionsError
from flashkv.progress import LayerProgress

if TYPE_CHECKING:
    from flashkv.namespace import Namespace


class Milestone(IntEnum):
    """How far a put has come. A get, a lookup or a delete is over at CAPTURED."""

    QUEUED = 0
    CAPTURED = 1  # the source is free; visible in this process
    WRITTEN = 2  # on the device; visible to others
    DURABLE = 3  # survives a power cut


class Ticket:
    """One submitted operation. Attributes are final once `done`."""

    def __init__(
        self,
        ticket_id: int,
        kind: str,
        notify: Milestone,
        progress: LayerProgress | None = None,
    ) -> None:
        self.progress = progress
        self.id = ticket_id
        self.kind = kind
        self.notify = notify
        self.milestone = Milestone.QUEUED
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self._changed = threading.Condition()

    def _reach(self, milestone: Milestone) -> None:
        with self._changed:
            self.milestone = milestone
            self._changed.notify_all()

    def _finish(self, error: BaseException | None) -> None:
        with self._changed:
            self.error = error
            self.done = True
            self._changed.notify_all()

    def wait(self, timeout_ms: float | None = None, milestone: Milestone | None = None) -> bool:
        """Waits until the ticket is done, or has reached `milestone`.

        False where the time ran out first.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self.done or (milestone is not None and self.milestone >= milestone),
                None if timeout_ms is None else timeout_ms / 1000,
            )

    def wait_layer(self, layer: int, timeout_ms: float | None = None) -> bool:
        """Of a get with layerwise=True: waits until all layers up to `layer` are in place.

        layer: as the namespace's geometry counts. False where the time ran out, or some block lacks
        one of them: see failed_layer, and once the ticket is done result.failed_layers. Raises
        OptionsError.
        """
        if self.progress is None:
            raise OptionsError(
                f"{self} has no layers to wait for", advice="submit_get(..., layerwise=True)"
            )
        return self.progress.wait(layer, timeout_ms)

    @property
    def failed_layer(self) -> int | None:
        """Of a get with layerwise=True: the first layer that some block is known to lack."""
        return None if self.progress is None else self.progress.failed_layer

    def __repr__(self) -> str:
        state = f"error {self.error!r}" if self.error else self.milestone.name.lower()
        return f"Ticket({self.id}, {self.kind}, {state}{', done' if self.done else ''})"


class Lanes:
    """The threads that carry out tickets: one for writes, two for reads. Started at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._write: ThreadPoolExecutor | None = None
        self._read: ThreadPoolExecutor | None = None
        self.inflight = 0

    def submit(self, work: Callable[[], None], *, write: bool) -> None:
        """Queues work for its lane."""
        with self._lock:
            if write:
                self._write = self._write or ThreadPoolExecutor(1, "flashkv-write")
                pool = self._write
            else:
                self._read = self._read or ThreadPoolExecutor(2, "flashkv-read")
                pool = self._read
            self.inflight += 1
        pool.submit(work)

    def finished(self) -> None:
        """One work item is over."""
        with self._lock:
            self.inflight -= 1

    def close(self) -> None:
        """Carries out what is queued, then ends the threads."""
        for pool in (self._write, self._read):
            if pool is not None:
                pool.shutdown(wait=True)
        self._write = self._read = None


def _without_frames(error: BaseException) -> BaseException:
    """The error without the frames that it passed: they hold keys and memory, and its own ticket.

    Where something unforeseen came from is told in a note (Python 3.11 and newer).
    """
    if not isinstance(error, FlashKVError) and hasattr(error, "add_note"):
        error.add_note("In a thread of the store:\n" + "".join(traceback.format_exception(error)))
    links: list[BaseException] = [error]
    for link in links:
        more = (link.__cause__, link.__context__)
        links += [one for one in more if one is not None and one not in links]
        link.__traceback__ = None
    return error


class Client:
    """Submits operations and collects their tickets. Safe for all threads."""

    def __init__(
        self,
        lanes: Lanes,
        check_open: Callable[[], None],
        reach: Callable[[Milestone], None],
        forget: Callable[[Client], None],
        max_tickets: int,
    ) -> None:
        """check_open(): raises where the store's handle is dead. reach(milestone): returns once
        everything captured so far has come that far."""
        self._lanes = lanes
        self._check_open = check_open
        self._reach = reach
        self._forget = forget
        self._max_tickets = max_tickets
        self._lock = threading.Lock()
        self._finished: deque[Ticket] = deque()
        self._open = 0  # submitted and not drained
        self._running = 0
        self._idle = threading.Condition(self._lock)
        self._next_id = 1
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._accepts = True
        self._closed = False

    # ---- submitting ----

    def submit_put(
        self,
        namespace: Namespace,
        keys: Any,
        data: Any,
        *,
        notify: Milestone = Milestone.CAPTURED,
        **options: Any,
    ) -> Ticket:
        """As Namespace.put.

        The ticket finishes at `notify`. Raises BusyError at the ticket limit, OptionsError.
        """
        checks.instance(OptionsError, "notify", notify, Milestone)

        def work(ticket: Ticket) -> None:
            ticket.result = namespace.put(keys, data, **options)
            ticket._reach(Milestone.CAPTURED)
            for milestone in (Milestone.WRITTEN, Milestone.DURABLE):
                if notify >= milestone:
                    self._reach(milestone)
                    ticket._reach(milestone)

        return self._submit("put", work, notify, write=True)

    def submit_get(
        self, namespace: Namespace, keys: Any, out: Any, *, layerwise: bool = False, **options: Any
    ) -> Ticket:
        """As Namespace.get. layerwise: lower layers come first, and Ticket.wait_layer() tells when.

        Raises BusyError at the ticket limit; with layerwise GeometryError for an unknown group.
        """
        progress = None
        if layerwise:
            number = namespace.geometry.group_index(options.get("group", 0))
            progress = LayerProgress.of_group(namespace.geometry, number)
            options["progress"] = progress

        def work(ticket: Ticket) -> None:
            try:
                ticket.result = namespace.get(keys, out, **options)
            except BaseException:
                if progress is not None:  # get() may not have come so far as to say so
                    progress.fail()
                    progress.end()
                raise
            ticket._reach(Milestone.CAPTURED)

        return self._submit("get", work, Milestone.CAPTURED, write=False, progress=progress)

    def submit_contains(self, namespace: Namespace, keys: Any) -> Ticket:
        """As Namespace.contains. Raises BusyError at the ticket limit."""
        return self.submit("contains", lambda: namespace.contains(keys), write=False)

    def submit_delete(self, namespace: Namespace, keys: Any) -> Ticket:
        """As Namespace.delete. Raises BusyError at the ticket limit."""
        return self.submit("delete", lambda: namespace.delete(keys), write=True)

    def submit(self, kind: str, call: Callable[[], Any], *, write: bool) -> Ticket:
        """Any call on a lane, as one ticket: several batches that belong together, say.

        Ticket.result is what it returns. Raises BusyError at the ticket limit.
        """

        def work(ticket: Ticket) -> None:
            ticket.result = call()
            ticket._reach(Milestone.CAPTURED)

        return self._submit(kind, work, Milestone.CAPTURED, write=write)

    def _submit(
        self,
        kind: str,
        work: Callable[[Ticket], None],
        notify: Milestone,
        *,
        write: bool,
        progress: LayerProgress | None = None,
    ) -> Ticket:
        self._check_open()
        with self._lock:
            if not self._accepts:
                raise ClosedError("the client is closed")
            if self._open >= self._max_tickets:
                raise BusyError(
                    "too many tickets are open",
                    value=self._open,
                    limit=self._max_tickets,
                    advice="drain() finished tickets first",
                )
            ticket = Ticket(self._next_id, kind, notify, progress)
            self._next_id += 1
            self._open += 1
            self._running += 1
        self._lanes.submit(lambda: self._run(ticket, work), write=write)
        return ticket

    def _run(self, ticket: Ticket, work: Callable[[Ticket], None]) -> None:
        error: BaseException | None = None
        try:
            work(ticket)
        except BaseException as caught:  # noqa: BLE001  (the ticket carries it to its owner)
            error = _without_frames(caught)
        self._lanes.finished()
        with self._lock:
            # Who waited for the ticket finds it in drain().
            self._finished.append(ticket)
            ticket._finish(error)
            self._running -= 1
            self._idle.notify_all()
            if not self._closed:
                os.eventfd_write(self._event_fd, 1)

    # ---- collecting ----

    def fileno(self) -> int:
        """The eventfd: readable while finished tickets wait for drain()."""
        return self._event_fd

    def drain(self) -> list[Ticket]:
        """Finished tickets, each once, in the order in which they finished. Never waits."""
        with self._lock:
            if not self._closed:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._event_fd)
            finished = list(self._finished)
            self._finished.clear()
            self._open -= len(finished)
        return finished

    @property
    def open_tickets(self) -> int:
        """Tickets that were submitted and not drained."""
        return self._open

    def close(self) -> None:
        """Waits for what was submitted, then closes the eventfd.

        Finished tickets can still be drained.
        """
        with self._lock:
            self._accepts = False
            self._idle.wait_for(lambda: self._running == 0)
            first, self._closed = not self._closed, True
            if first:
                os.close(self._event_fd)
        self._forget(self)

    def after_fork(self) -> None:
        """In the child: the lanes' threads are the parent's, and locks may be held for ever."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running = 0
        if not self._closed:
            self._accepts, self._closed = False, True
            os.close(self._event_fd)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def detached_client(max_tickets: int = limits.TICKETS_MAX) -> Client:
    """A client of no store, with lanes of its own: for who must answer where there is none."""
    lanes = Lanes()
    return Client(lanes, lambda: None, lambda _: None, lambda _: lanes.close(), max_tickets)


__all__ = ["BatchResult", "Client", "Lanes", "Milestone", "Ticket", "detached_client"]
