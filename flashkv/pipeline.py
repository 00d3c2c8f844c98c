"""Load the next, compute this, store the last: an engine's work in steps, transfers beside it.

Invariants
  - steps are computed in their order, each once, by the caller's own thread;
  - steps in hand, those taken and not released, have no more blocks than the bound; but three may
    always be in hand: the one that is computed, the one before it and the one behind;
  - a step is released once, when its memory is the caller's again, whatever became of it; run()
    returns or raises only then: it waits for the device as long as that takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flashkv import checks, limits
from flashkv.errors import OptionsError
from flashkv.tickets import Ticket

if TYPE_CHECKING:
    from flashkv.namespace import Namespace
    from flashkv.store import Store

SHARE: Final = 0.05
"""Of the blocks of a run, that may be on their way at once."""
BLOCKS_MAX: Final = 1 << 40
STEPS_MIN: Final = 3
"""In hand, whatever their blocks: fewer, and something would wait for something else."""
STEPS_MAX: Final = limits.TICKETS_MAX // 2
"""In hand, however few their blocks: a step may have a ticket on its way, and one to be drained."""


@dataclass(frozen=True)
class Step:
    """Blocks that must be in memory before something is computed, and blocks that this makes.

    load, save  (keys, memory) as Namespace.get() and put() take them, or None.
    tag         the caller's own.
    """

    load: tuple[Any, Any] | None = None
    save: tuple[Any, Any] | None = None
    tag: Any = None

    @property
    def load_blocks(self) -> int:
        """Blocks to load."""
        return 0 if self.load is None else len(self.load[0])

    @property
    def save_blocks(self) -> int:
        """Blocks to store."""
        return 0 if self.save is None else len(self.save[0])


@dataclass(eq=False)
class _InHand:
    """A step that was taken. ticket: of what is on its way, its load or its save."""

    step: Step
    blocks: int
    ticket: Ticket | None = None
    released: bool = False


@dataclass
class Outcome:
    """What became of a run's blocks: those that hit, and those that were stored or there before."""

    steps: int = 0
    loaded_blocks: int = 0
    missed_blocks: int = 0
    saved_blocks: int = 0
    unsaved_blocks: int = 0
    errors: list[BaseException] = field(default_factory=list)  # of transfers; none stops the run

    def note_load(self, step: Step, ticket: Ticket) -> None:
        """A load is over."""
        hits = self._good(ticket)
        self.loaded_blocks += hits
        self.missed_blocks += step.load_blocks - hits

    def note_save(self, step: Step, ticket: Ticket) -> None:
        """A put is over."""
        there = self._good(ticket)
        self.saved_blocks += there
        self.unsaved_blocks += step.save_blocks - there

    def _good(self, ticket: Ticket) -> int:
        if ticket.error is not None:
            self.errors.append(ticket.error)
            return 0
        return int(ticket.result.ok.sum())


Compute = Callable[[Step, "Ticket | None"], None]
Release = Callable[[Step], None]


class Pipeline:
    """Runs steps over one namespace, with a client of its own. Not for two threads at once."""

    def __init__(
        self,
        store: Store,
        namespace: Namespace,
        *,
        blocks: int,
        share: float = SHARE,
        layerwise: bool = False,
        get_options: dict[str, Any] | None = None,
        put_options: dict[str, Any] | None = None,
    ) -> None:
        """blocks: of a whole run, of which `share` may be in hand at once.

        layerwise: a step is computed while its blocks arrive, lower layers first: compute waits
        with Ticket.wait_layer(). get_options, put_options: as Namespace.get() and put() take them.
        Raises OptionsError, and what Store.client() raises.
        """
        blocks = checks.whole(OptionsError, "blocks", blocks, 1, BLOCKS_MAX)
        share = checks.positive(OptionsError, "share", share)
        if share > 1:
            raise OptionsError("share must be at most 1", value=share)
        self.bound = max(1, int(blocks * share))
        self._namespace = namespace
        self._get_options = {**(get_options or {}), "layerwise": layerwise}
        self._put_options = put_options or {}
        self._layerwise = layerwise
        self._client = store.client()
        self._loading: deque[_InHand] = deque()
        self._saving: deque[_InHand] = deque()
        self._steps = self._blocks = 0  # in hand
        self.most_blocks = 0
        """Most that were in hand at once, so far."""

    def run(
        self, steps: Iterable[Step], compute: Compute, release: Release = lambda _: None
    ) -> Outcome:
        """Each step: its blocks are loaded, it is computed, what it made is stored.

        steps are taken one by one as there is room, so they may allocate their memory then.
        compute(step, ticket): ticket is that of the load, done unless layerwise; its result says
        which blocks are there. release(step): its memory is the caller's again. Raises what
        compute, release and steps raise, and what a put or get refuses, once all memory is the
        caller's.
        """
        outcome = Outcome()
        try:
            for step in steps:
                self._take(step, compute, release, outcome)
            while self._loading:
                self._advance(compute, release, outcome)
        finally:
            self._give_back(release, outcome)
        return outcome

    def _take(self, step: Step, compute: Compute, release: Release, outcome: Outcome) -> None:
        """Begins to load a step, once there is room."""
        hand = _InHand(step, 0)
        try:
            blocks = step.load_blocks + step.save_blocks
            while not self._has_room(blocks):
                if self._loading:
                    self._advance(compute, release, outcome)
                else:
                    self._saved(release, outcome)
            hand.blocks = blocks
            self._steps, self._blocks = self._steps + 1, self._blocks + blocks
            self.most_blocks = max(self.most_blocks, self._blocks)
            self._loading.append(hand)
        except BaseException:
            if hand not in self._loading:
                release(step)  # it never began
            raise
        if step.load is not None:
            hand.ticket = self._client.submit_get(self._namespace, *step.load, **self._get_options)

    def _has_room(self, blocks: int) -> bool:
        if self._steps < STEPS_MIN:
            return True
        return self._steps < STEPS_MAX and self._blocks + blocks <= self.bound

    def _advance(self, compute: Compute, release: Release, outcome: Outcome) -> None:
        """Computes the first step that is being loaded, and begins to store what it made."""
        hand = self._loading[0]
        if hand.ticket is not None and not self._layerwise:
            hand.ticket.wait()
        compute(hand.step, hand.ticket)
        if hand.ticket is not None:
            hand.ticket.wait()
            outcome.note_load(hand.step, hand.ticket)
            hand.ticket = None
            self._client.drain()
        outcome.steps += 1
        if hand.step.save is None:
            self._loading.popleft()
            self._release(hand, release)
        else:
            hand.ticket = self._client.submit_put(
                self._namespace, *hand.step.save, **self._put_options
            )
            self._saving.append(hand)
            self._loading.popleft()
        while self._saving and self._saving[0].ticket is not None and self._saving[0].ticket.done:
            self._saved(release, outcome)

    def _saved(self, release: Release, outcome: Outcome) -> None:
        """The first of what is being stored is, or is not."""
        hand = self._saving[0]
        if hand.ticket is not None:
            hand.ticket.wait()
            outcome.note_save(hand.step, hand.ticket)
            hand.ticket = None
            self._client.drain()
        self._saving.popleft()
        self._release(hand, release)

    def _release(self, hand: _InHand, release: Release) -> None:
        if not hand.released:
            hand.released = True
            self._steps, self._blocks = self._steps - 1, self._blocks - hand.blocks
            release(hand.step)

    def _give_back(self, release: Release, outcome: Outcome) -> None:
        """All that is still in hand, after an error too: further ones wait for the end."""
        raised: list[BaseException] = []
        while self._loading or self._saving:
            try:
                self._finish_first(release, outcome)
            except BaseException as error:  # noqa: BLE001, PERF203  (the others' memory first)
                raised.append(error)
        self._client.drain()
        if raised:
            raise raised[0]

    def _finish_first(self, release: Release, outcome: Outcome) -> None:
        """Waits for one step's transfer, without computing it."""
        queue = self._loading or self._saving
        hand = queue[0]
        if hand.ticket is not None:
            hand.ticket.wait()
            note = outcome.note_save if hand in self._saving else outcome.note_load
            note(hand.step, hand.ticket)
            hand.ticket = None
        queue.popleft()
        self._release(hand, release)

    def close(self) -> None:
        """Gives the client back."""
        self._client.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["BLOCKS_MAX", "SHARE", "Outcome", "Pipeline", "Step"]
