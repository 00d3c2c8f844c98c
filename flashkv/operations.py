"""A ticket's operation on its way: queued, starting, going on by itself, ended.

Invariants
  - it ends once: by its lane's thread, when its read is over, or by who gave it up; whoever comes
    later finds it ended;
  - no lock is held while anybody's code runs or a ticket is told, but its own while a read is given
    up: that waits for decoding under way, never for the device.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from flashkv.errors import (
    BatchResult,
    BlockStatus,
    CancelledError,
    FlashKVError,
    TimedOutError,
)
from flashkv.getting import PendingGet
from flashkv.lanes import Lane, Lanes
from flashkv.tickets import Milestone, Release, Ticket

AGAIN: Final = object()
"""What work returns that can't begin yet, and gives way to others meanwhile."""

Work = Callable[[Ticket], Any]
"""Carries a ticket out and returns None, or AGAIN, or a PendingGet that goes on by itself."""


class _State(Enum):
    QUEUED = 0
    STARTING = 1
    GOING = 2
    ENDED = 3


@dataclass(frozen=True)
class OperationHooks:
    """What an operation tells its client.

    over(ticket, error)  the ticket is done.
    free(ticket)         it was done and held, and isn't held any more.
    later(call)          makes a quick call in some milliseconds.
    """

    over: Callable[[Ticket, BaseException | None], None]
    free: Callable[[Ticket], None]
    later: Callable[[Callable[[], None]], None]


class Operation:
    """Carries out one ticket."""

    def __init__(
        self,
        ticket: Ticket,
        work: Work,
        lane: Lane,
        lanes: Lanes,
        blocks: int | None,
        size: int,
        hooks: OperationHooks,
    ) -> None:
        """blocks: of a get or put. size: bytes of its memory, as lanes counts them."""
        self._ticket = ticket
        self._work: Work | None = work
        self._lane = lane
        self._lanes = lanes
        self._blocks = blocks
        self._size = size
        self._hooks = hooks
        self._lock = threading.Lock()
        self._state = _State.QUEUED
        self._given_up: BlockStatus | None = None  # while it was starting
        self._pending: PendingGet | None = None
        ticket.give_up = self.give_up

    def run(self) -> None:
        """Of the lane's thread."""
        with self._lock:
            if self._state is not _State.QUEUED:
                return
            self._state, work = _State.STARTING, self._work
        assert work is not None
        try:
            outcome = work(self._ticket)
        except BaseException as caught:  # noqa: BLE001  (the ticket carries it to its owner)
            self._end(_without_frames(caught), failed=True)
            return
        if outcome is None:
            self._end(None)
            return
        with self._lock:
            self._state = _State.QUEUED if outcome is AGAIN else _State.GOING
            self._pending = None if outcome is AGAIN else outcome
            given_up = self._given_up
        if given_up is not None:
            self.give_up(given_up)
        elif outcome is AGAIN:
            self._hooks.later(self._queue_again)
        if outcome is not AGAIN:
            outcome.when_over(self._read_over)

    def _queue_again(self) -> None:
        try:
            self._lanes.submit(self.run, self._lane)
        except RuntimeError as error:  # the interpreter ends
            self.fail(error)

    def _read_over(self) -> None:
        """Its read is over, and the memory the caller's."""
        with self._lock:
            going = self._state is _State.GOING
            if going:
                self._state = _State.ENDED
            pending, ticket = self._pending, self._ticket
        if not going:
            if ticket.released is not None:
                self._lanes.give(self._size, store=False)
                ticket.wait()  # who gave it up is about to say so
                self._hooks.free(ticket)
            return
        assert pending is not None
        error = None
        try:
            ticket.result = pending.end()
            ticket.reach(Milestone.CAPTURED)
        except BaseException as caught:  # noqa: BLE001  (the ticket carries it to its owner)
            error = _without_frames(caught)
        self._end(error)

    def fail(self, error: BaseException) -> None:
        """It can't be begun."""
        with self._lock:
            if self._state is not _State.QUEUED:
                return
            self._state = _State.ENDED
        self._end(_without_frames(error), failed=True)

    def time_out(self) -> None:
        """Its deadline has come."""
        with self._lock:
            over = self._state is _State.ENDED
        if not over:
            self.give_up(BlockStatus.TIMED_OUT)

    def give_up(self, status: BlockStatus) -> Release:
        """Ends it, its blocks having this status; see Ticket.cancel()."""
        with self._lock:
            state = self._state
            if state is _State.STARTING:
                self._given_up = status
                return Release.STILL_HELD
            error = None
            try:
                if state is _State.QUEUED:
                    error = self._never_begun(status)
                elif state is _State.GOING:
                    self._cut_off(status)
            except BaseException as caught:  # noqa: BLE001  (the ticket carries it to its owner)
                error = _without_frames(caught)
            self._state = _State.ENDED
        if state is _State.ENDED:
            self._ticket.wait()  # whoever ends it copies to a GPU, at most
        else:
            self._end(error)
            if error is not None and not isinstance(error, Exception):
                raise error  # Ctrl-C is the caller's too
        return Release.STILL_HELD if self._ticket.held else Release.RELEASED

    def _cut_off(self, status: BlockStatus) -> None:
        """Gives its read up."""
        assert self._pending is not None
        if not self._pending.give_up():
            self._ticket.released = threading.Event()
        self._ticket.result = self._pending.end().given_up(status, self._ticket.released)

    def _end_layers(self) -> None:
        """Of a get that brings none."""
        if self._ticket.progress is not None:
            self._ticket.progress.fail()
            self._ticket.progress.end()

    def _never_begun(self, status: BlockStatus) -> BaseException | None:
        """What the ticket says: of a batch each block's status, else the error."""
        self._end_layers()
        if self._blocks is None:
            kind = TimedOutError if status is BlockStatus.TIMED_OUT else CancelledError
            return kind(f"the {self._ticket.kind} was given up before it began")
        statuses = np.full(self._blocks, status, np.uint8)
        failed = None if self._ticket.progress is None else np.zeros(self._blocks, np.int32)
        self._ticket.result = BatchResult(statuses, failed)
        return None

    def _end(self, error: BaseException | None, *, failed: bool = False) -> None:
        with self._lock:
            self._state = _State.ENDED
            self._work = self._pending = None
        if failed:  # the get may not have come so far as to say so
            self._end_layers()
        if self._ticket.released is None:
            self._lanes.give(self._size, store=self._lane is Lane.WRITE)
        self._lanes.finished()
        self._hooks.over(self._ticket, error)


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
