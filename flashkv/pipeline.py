"""Load the next, compute this, store the last: an engine's work in steps, transfers beside it.

Invariants
  - steps are computed in their order, each once, by the caller's own thread;
  - no more blocks are on their way, into memory or out of it, than the bound; but the step at hand
    and the next one always may be, as nothing would overlap else;
  - a step is released once its memory is the caller's again, whatever became of it; run() returns
    or raises only then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flashkv import checks
from flashkv.errors import OptionsError
from flashkv.tickets import Ticket

if TYPE_CHECKING:
    from flashkv.namespace import Namespace
    from flashkv.store import Store

SHARE: Final = 0.05
"""Of the blocks of a run, that may be on their way at once."""
BLOCKS_MAX: Final = 1 << 40


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


@dataclass
class Outcome:
    """What became of a run's blocks: those that hit, and those that were stored or there before."""

    steps: int = 0
    loaded_blocks: int = 0
    missed_blocks: int = 0
    saved_blocks: int = 0
    unsaved_blocks: int = 0
    errors: list[BaseException] = field(default_factory=list)  # of transfers; none stops the run


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
        """blocks: of a whole run, of which `share` may be on their way at once.

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
        self._loading: deque[tuple[Step, Ticket | None]] = deque()
        self._saving: deque[tuple[Step, Ticket]] = deque()
        self._blocks = 0  # on their way
        self.most_blocks = 0
        """Most that were on their way at once, so far."""

    def run(
        self,
        steps: Iterable[Step],
        compute: Callable[[Step, Ticket | None], None],
        release: Callable[[Step], None] = lambda _: None,
    ) -> Outcome:
        """Each step: its blocks are loaded, it is computed, what it made is stored.

        steps are taken one by one as there is room, so they may allocate their memory then.
        compute(step, ticket): ticket is that of the load, done unless layerwise; its result says
        which blocks are there. It raises what compute, release and steps raise, once all memory is
        the caller's again.
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

    def _take(
        self,
        step: Step,
        compute: Callable[[Step, Ticket | None], None],
        release: Callable[[Step], None],
        outcome: Outcome,
    ) -> None:
        """Begins to load a step, once there is room."""
        try:
            while len(self._loading) > 1 and self._blocks + step.load_blocks > self.bound:
                self._advance(compute, release, outcome)
            self._make_room(step.load_blocks, release, outcome)
            self._begin(step)
        except BaseException:
            release(step)  # it never began
            raise

    def _count(self, blocks: int) -> None:
        self._blocks += blocks
        self.most_blocks = max(self.most_blocks, self._blocks)

    def _begin(self, step: Step) -> None:
        ticket = None
        if step.load is not None:
            ticket = self._client.submit_get(self._namespace, *step.load, **self._get_options)
        self._count(step.load_blocks)
        self._loading.append((step, ticket))

    def _advance(
        self,
        compute: Callable[[Step, Ticket | None], None],
        release: Callable[[Step], None],
        outcome: Outcome,
    ) -> None:
        """Computes the first step, and begins to store what it made."""
        step, ticket = self._loading[0]
        if ticket is not None and not self._layerwise:
            ticket.wait()
        compute(step, ticket)
        outcome.steps += 1
        self._loading.popleft()
        self._loaded(step, ticket, outcome)
        if step.save is None:
            release(step)
        else:
            self._make_room(step.save_blocks, release, outcome)
            saving = self._client.submit_put(self._namespace, *step.save, **self._put_options)
            self._count(step.save_blocks)
            self._saving.append((step, saving))
        while self._saving and self._saving[0][1].done:
            self._saved(release, outcome)

    def _make_room(self, blocks: int, release: Callable[[Step], None], outcome: Outcome) -> None:
        """Waits for what is being stored, while there is too much on its way."""
        while self._saving and self._blocks + blocks > self.bound:
            self._saved(release, outcome)

    def _loaded(self, step: Step, ticket: Ticket | None, outcome: Outcome) -> None:
        self._blocks -= step.load_blocks
        if ticket is None:
            return
        ticket.wait()
        self._client.drain()
        hits = 0 if ticket.error is not None else int(ticket.result.ok.sum())
        outcome.loaded_blocks += hits
        outcome.missed_blocks += step.load_blocks - hits
        if ticket.error is not None:
            outcome.errors.append(ticket.error)

    def _saved(self, release: Callable[[Step], None], outcome: Outcome) -> None:
        """The first of what is being stored is, or is not."""
        step, ticket = self._saving.popleft()
        ticket.wait()
        self._client.drain()
        self._blocks -= step.save_blocks
        there = 0 if ticket.error is not None else int(ticket.result.ok.sum())
        outcome.saved_blocks += there
        outcome.unsaved_blocks += step.save_blocks - there
        if ticket.error is not None:
            outcome.errors.append(ticket.error)
        release(step)

    def _give_back(self, release: Callable[[Step], None], outcome: Outcome) -> None:
        """All that is still on its way, after an error too."""
        raised: list[BaseException] = []

        def released(step: Step) -> None:
            try:
                release(step)
            except BaseException as error:  # noqa: BLE001  (the others' memory first)
                raised.append(error)

        while self._loading:
            step, ticket = self._loading.popleft()
            self._loaded(step, ticket, outcome)
            released(step)
        while self._saving:
            self._saved(released, outcome)
        if raised:
            raise raised[0]

    def close(self) -> None:
        """Gives the client back."""
        self._client.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["BLOCKS_MAX", "SHARE", "Outcome", "Pipeline", "Step"]
