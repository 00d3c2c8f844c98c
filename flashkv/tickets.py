"""Tickets: what a client submitted, as who submitted it sees it.

Invariants
  - a ticket is done once, and what it says is final then;
  - the source of a put is the caller's again at `captured`, the destination of a get when the
    ticket is done and not `held`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any

from flashkv.errors import BlockStatus, OptionsError
from flashkv.progress import LayerProgress


class Milestone(IntEnum):
    """How far a put has come. A get, a lookup or a delete is over at CAPTURED."""

    QUEUED = 0
    CAPTURED = 1  # the source is free; visible in this process
    WRITTEN = 2  # on the device; visible to others
    DURABLE = 3  # survives a power cut


class Release(Enum):
    """What becomes of the memory of an operation that is cancelled."""

    RELEASED = "the memory is the caller's"
    STILL_HELD = "something may still read or write it: see Ticket.wait_released()"


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
        self.released: threading.Event | None = None  # of what was given up; see held
        self.give_up: Callable[[BlockStatus], Release] | None = None  # while it isn't done
        self._changed = threading.Condition()

    def reach(self, milestone: Milestone) -> None:
        """Of who carries it out: it has come so far."""
        with self._changed:
            self.milestone = milestone
            self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        """Of who carries it out: it is over."""
        with self._changed:
            self.error = error
            self.done = True
            self.give_up = None
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

    def cancel(self) -> Release:
        """Gives the operation up; says whether its memory is the caller's now. Waits for no device.

        What has not begun never will: its blocks are CANCELLED, and the ticket is done. A get that
        has begun ends now; blocks that aren't whole in place are CANCELLED. A put that has begun
        goes on to its end.
        """
        give_up = self.give_up
        if give_up is not None:
            return give_up(BlockStatus.CANCELLED)
        return Release.STILL_HELD if self.held else Release.RELEASED

    @property
    def held(self) -> bool:
        """Whether the device may still write to the memory of this get, which was given up."""
        return self.released is not None and not self.released.is_set()

    def wait_released(self, timeout_ms: float | None = None) -> bool:
        """Waits until the ticket is done and its memory the caller's; False: the time ran out."""
        end = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        if not self.wait(timeout_ms):
            return False
        left = None if end is None else min(max(end - time.monotonic(), 0), threading.TIMEOUT_MAX)
        return self.released is None or self.released.wait(left)

    def __repr__(self) -> str:
        state = f"error {self.error!r}" if self.error else self.milestone.name.lower()
        return f"Ticket({self.id}, {self.kind}, {state}{', done' if self.done else ''})"
