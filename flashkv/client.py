"""Asynchronous use: a client with one completion queue and one eventfd, out of which tickets come.

Invariants
  - submitting looks into no batch, codes nothing and waits for nothing: it queues and returns;
  - every ticket comes out of drain() exactly once, whether it went well, failed, was given up or
    was cut off by close();
  - keys and memory are held until the operation is over; of one that was given up until the device
    is through with them, and then the ticket comes out of drain_released();
  - operations of one lane start in the order of their submission (lanes.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from flashkv import checks, limits
from flashkv.asking import Asked, GetOptions, deadline
from flashkv.errors import BusyError, ClosedError, OptionsError
from flashkv.lanes import Lane, Lanes
from flashkv.memory import memory_bytes
from flashkv.operations import AGAIN, Operation, OperationHooks, Work
from flashkv.progress import LayerProgress
from flashkv.tickets import Milestone, Ticket

if TYPE_CHECKING:
    from flashkv.namespace import Namespace


@dataclass(frozen=True)
class ClientHooks:
    """What a client needs of its store.

    check_open()      raises where the store's handle is dead.
    reach(milestone)  returns once everything captured so far has come that far.
    forget(client)    it was closed.
    at(when, call)    makes call()() at a time of time.monotonic(); None: it isn't wanted any more.
    """

    check_open: Callable[[], None]
    reach: Callable[[Milestone], None]
    forget: Callable[[Client], None]
    at: Callable[[float, Callable[[], Callable[[], None] | None]], None]


class Client:
    """Submits operations and collects their tickets. Safe for all threads."""

    def __init__(self, lanes: Lanes, hooks: ClientHooks, max_tickets: int) -> None:
        self._lanes = lanes
        self._hooks = hooks
        self._max_tickets = max_tickets
        self._lock = threading.Lock()
        self._finished: deque[Ticket] = deque()
        self._released: deque[Ticket] = deque()
        self._open = 0  # submitted and not drained
        self._running = 0
        self._idle = threading.Condition(self._lock)
        self._next_id = 1
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._accepts = True
        self._closed = False
        self._told = OperationHooks(self._over, self._free, self._later)

    # ---- submitting ----

    def submit_put(
        self,
        namespace: Namespace,
        keys: Any,
        data: Any,
        *,
        notify: Milestone = Milestone.CAPTURED,
        deadline_ms: float | None = None,
        **options: Any,
    ) -> Ticket:
        """As Namespace.put.

        The ticket finishes at `notify`. deadline_ms: a put that hasn't begun by then never will;
        its blocks are TIMED_OUT. Raises BusyError at the limits on tickets and on bytes in flight,
        OptionsError.
        """
        checks.instance(OptionsError, "notify", notify, Milestone)

        def work(ticket: Ticket) -> None:
            ticket.result = namespace.put(keys, data, **options)
            ticket.reach(Milestone.CAPTURED)
            for milestone in (Milestone.WRITTEN, Milestone.DURABLE):
                if notify >= milestone:
                    self._hooks.reach(milestone)
                    ticket.reach(milestone)

        return self._submit(
            "put", work, Lane.WRITE, notify=notify, keys=keys, data=data, end=deadline(deadline_ms)
        )

    def submit_get(
        self,
        namespace: Namespace,
        keys: Any,
        out: Any,
        *,
        layerwise: bool = False,
        deadline_ms: float | None = None,
        **options: Any,
    ) -> Ticket:
        """As Namespace.get. layerwise: lower layers come first, and Ticket.wait_layer() tells when.

        deadline_ms: from now on, whatever the get waits for. Raises BusyError at the limits on
        tickets and on bytes in flight, OptionsError, TypeError for an unknown option; with
        layerwise GeometryError for an unknown group.
        """
        if layerwise:
            number = namespace.geometry.group_index(options.get("group", 0))
            options["progress"] = LayerProgress.of_group(namespace.geometry, number)
        asked_for = GetOptions(**options)
        lane = Lane.BACKGROUND if asked_for.background else Lane.READ

        asked: Asked | None = None

        def work(_: Ticket) -> Any:
            nonlocal asked
            wait_ms = 0
            if asked is None:
                wait_ms = limits.WRITE_WAIT_MS
                asked = namespace.ask(keys, out, asked_for)
                if asked.progress is not None:
                    asked.progress.begin()
            pending = namespace.begin(asked, wait_ms)
            return AGAIN if pending is None else pending

        return self._submit(
            "get",
            work,
            lane,
            progress=asked_for.progress,
            keys=keys,
            data=out,
            end=deadline(deadline_ms),
        )

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
            ticket.reach(Milestone.CAPTURED)

        return self._submit(kind, work, Lane.WRITE if write else Lane.READ)

    def _submit(
        self,
        kind: str,
        work: Work,
        lane: Lane,
        *,
        notify: Milestone = Milestone.CAPTURED,
        progress: LayerProgress | None = None,
        keys: Any = None,
        data: Any = None,
        end: float | None = None,
    ) -> Ticket:
        """keys, data: of a get or put. end: its deadline, a time of time.monotonic()."""
        self._hooks.check_open()
        blocks = len(keys) if hasattr(keys, "__len__") else None
        size = 0 if blocks is None else memory_bytes(data, blocks)
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
            self._lanes.take(size, store=lane is Lane.WRITE)
            ticket = Ticket(self._next_id, kind, notify, progress)
            self._next_id += 1
            self._open += 1
            self._running += 1
        operation = Operation(ticket, work, lane, self._lanes, blocks, size, self._told)
        try:
            if end is not None:
                # Not held by its deadline: it may be over long before.
                self._hooks.at(end, WeakMethod(operation.time_out))
            self._lanes.submit(operation.run, lane)
        except BaseException as error:
            operation.fail(error)
            if not isinstance(error, Exception):
                raise
        return ticket

    def _later(self, call: Callable[[], None]) -> None:
        self._hooks.at(time.monotonic() + limits.WRITE_LOOK_MS / 1e3, lambda: call)

    def _over(self, ticket: Ticket, error: BaseException | None) -> None:
        with self._lock:
            # Who waited for the ticket finds it in drain().
            self._finished.append(ticket)
            ticket.finish(error)
            self._running -= 1
            self._idle.notify_all()
            self._signal()

    def _free(self, ticket: Ticket) -> None:
        """The memory of a ticket that was given up is the caller's again."""
        with self._lock:
            self._released.append(ticket)
            assert ticket.released is not None
            ticket.released.set()
            self._signal()

    def _signal(self) -> None:
        if not self._closed:
            os.eventfd_write(self._event_fd, 1)

    # ---- collecting ----

    def fileno(self) -> int:
        """The eventfd: readable while tickets wait for drain() or drain_released()."""
        return self._event_fd

    def drain(self) -> list[Ticket]:
        """Finished tickets, each once, in the order in which they finished. Never waits."""
        with self._lock:
            self._heard()
            finished = list(self._finished)
            self._finished.clear()
            self._open -= len(finished)
        return finished

    def drain_released(self) -> list[Ticket]:
        """Tickets that were done and `held`, and aren't held any more, each once. Never waits."""
        with self._lock:
            self._heard()
            released = list(self._released)
            self._released.clear()
        return released

    def _heard(self) -> None:
        if not self._closed:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)

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
        self._hooks.forget(self)

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
    hooks = ClientHooks(
        lambda: None, lambda _: None, lambda _: lanes.close(), lambda _when, _call: None
    )
    return Client(lanes, hooks, max_tickets)
