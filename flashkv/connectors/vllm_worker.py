"""The worker's half of the vLLM connector: moves granules between the store and vLLM's paged cache.

Loads of a step's own requests run layer by layer: one ticket a group of layers, in the order in
which the model asks for them, and each attention layer waits for its group alone. Loads between
steps take one ticket a request, and vLLM hears of them when they are over.

Saves begin when the last layer of the step is computed: a record holds all layers of a block, and
to capture layers one by one would mean a copy of each before it is coded. They then run behind
the steps that follow; their sources stay as they are until vLLM takes the blocks back, and before
it writes into blocks that were taken back it waits here until they are captured.

Invariants
  - a granule that did not arrive whole is reported with vLLM's blocks that it lies in, so that they
    are computed again; nothing that was computed on such blocks is stored;
  - no error of the store reaches vLLM: it is counted, said once, and means a load that failed or a
    block that is not stored.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv.client import Client
from flashkv.connectors.flusher import Flusher
from flashkv.connectors.shared_store import SharedStore
from flashkv.connectors.vllm_model import PagedLayout
from flashkv.connectors.vllm_pages import PagedMemory
from flashkv.connectors.vllm_plan import Heard, Load, Plan, Save
from flashkv.connectors.vllm_scheduler import retire
from flashkv.errors import FlashKVError
from flashkv.namespace import Namespace
from flashkv.tickets import Milestone, Ticket

LAYER_GROUP_BYTES: Final = 8 << 20
"""Aim of what one ticket reads of a step's loads: below, its fixed cost shows."""
LAYER_GROUPS_MAX: Final = 8
"""Most tickets that a step's loads are split into: more overlap little more with computing."""
DURABLE_AFTER_MS: Final = 2_000
"""So long after a save it is made durable, whatever else happens: workers are often killed."""
IDLE_WAIT_MS: Final = 2.0
"""How long a step without tokens waits for a load between steps: vLLM asks again at once."""


@dataclass
class Reading:
    """Granules that are read together: those whose tokens begin at the same offset.

    places   see PagedMemory.
    arrived  bool[N]: what is whole so far.
    """

    keys: NDArray[np.uint8]
    places: NDArray[np.int64]
    offset: int
    arrived: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.arrived = np.ones(len(self.keys), np.bool_)


Begun = list[tuple[Ticket, Reading]]


class WorkerSide:
    """See the module. Called by vLLM's worker thread alone."""

    def __init__(
        self,
        shared: SharedStore,
        namespace: Namespace | None,
        layout: PagedLayout,
        *,
        layer_groups: int = 0,
        tells_as: int | None = None,
    ) -> None:
        """layer_groups: tickets that a step's loads are split into; 0: by their size.

        tells_as: this rank, where a scheduler in another process must be told what is stored.
        """
        self.counts: Counter[str] = Counter()
        self._shared = shared
        self._namespace = namespace
        self._layout = layout
        self._layer_groups = layer_groups
        self._tells_as = tells_as
        self._memory: PagedMemory | None = None
        self._client: Client | None = None
        self._groups: list[tuple[tuple[int, ...], Begun]] = []  # of layers, of this step's loads
        self._readings: list[Reading] = []  # of this step's loads
        self._between: dict[str, tuple[Begun, list[Reading]]] = {}
        self._saving: dict[str, list[tuple[Ticket, Save]]] = defaultdict(list)
        self._failed: set[int] = set()
        self._heard = Heard()
        self._flusher: Flusher | None = None
        self._told: Counter[str] = Counter()

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM's caches, by layer. Raises MemoryViewError where they aren't as expected."""
        self._memory = PagedMemory(self._layout, kv_caches)
        if self._namespace is not None and self._shared.store is not None:
            store = self._shared.store
            self._client = store.client()
            self._flusher = Flusher(store, DURABLE_AFTER_MS, self._shared.note)

    # ---- loading ----

    def begin(self, plan: Plan) -> None:
        """Begins the loads of a step."""
        if plan.forget and self._shared.store is not None and self._namespace is not None:
            try:
                retire(self._shared.store, self._namespace)
            except FlashKVError as error:
                self._shared.note("retire", str(error))
                self._client = None  # what is stored is of other weights: nothing is loaded again
        if not plan.loads:
            return
        assert self._memory is not None
        self._memory.hand_over()
        now = [load for load in plan.loads if not load.between]
        if now:
            self._readings = list(self._together(now))
            granules = sum(len(reading.keys) for reading in self._readings)
            for layers in self._layer_groups_of(granules):
                self._groups.append((layers, self._read(self._readings, layers)))
        every = tuple(range(len(self._layout.layers)))
        for load in plan.loads:
            if load.between:
                readings = list(self._together([load]))
                self._between[load.request_id] = (self._read(readings, every), readings)

    def _together(self, loads: Iterable[Load]) -> Iterable[Reading]:
        """The loads' granules; a first one that begins within stands apart, by its offset."""
        assert self._memory is not None
        parts: dict[int, list[tuple[NDArray[np.uint8], NDArray[np.int64]]]] = defaultdict(list)
        for load in loads:
            places = self._memory.places(load.start_token, len(load.keys), load.blocks)
            offset = load.first_token - load.start_token
            if offset:
                parts[offset].append((load.keys[:1], places[:1]))
            rest = 1 if offset else 0
            if len(load.keys) > rest:
                parts[0].append((load.keys[rest:], places[rest:]))
        for offset, pieces in sorted(parts.items()):
            keys, places = (np.concatenate(column) for column in zip(*pieces, strict=True))
            yield Reading(keys, places, offset)

    def _layer_groups_of(self, granules: int) -> list[tuple[int, ...]]:
        """Groups of layers, each to be read by one ticket."""
        layers = len(self._layout.layers)
        size = granules * self._layout.geometry.token_bytes(0) * self._layout.granule
        count = self._layer_groups or min(LAYER_GROUPS_MAX, 1 + size // LAYER_GROUP_BYTES)
        parts = np.array_split(np.arange(layers), min(count, layers))
        return [tuple(part.tolist()) for part in parts]

    def _read(self, readings: list[Reading], layers: tuple[int, ...]) -> Begun:
        """Tickets of the readings, of some layers; what can't be begun has failed."""
        assert self._memory is not None
        begun: Begun = []
        for reading in readings:
            if self._client is None or self._namespace is None:
                reading.arrived[:] = False
                continue
            regions, view = self._memory.regions(reading.places, layers, reading.offset)
            whole = len(layers) == len(self._layout.layers)
            offset, granule = reading.offset, self._layout.granule
            try:
                ticket = self._client.submit_get(
                    self._namespace,
                    reading.keys,
                    regions,
                    view=view,
                    layers=None if whole else layers,
                    token_range=(offset, granule) if offset else None,
                )
            except FlashKVError as error:
                self._shared.note("get", str(error))
                reading.arrived[:] = False
            else:
                begun.append((ticket, reading))
        return begun

    def wait_for_layer(self, name: str) -> None:
        """Returns once the loads of this step have arrived in a layer, or failed."""
        if not self._groups:
            return
        assert self._memory is not None
        layer = self._memory.layer_number(name)
        for layers, begun in self._groups:
            if layer is None or layer in layers:
                self._arrive(begun)

    def _arrive(self, begun: Begun) -> None:
        """Waits for tickets and takes their results into their readings."""
        if not begun:
            return
        for ticket, reading in begun:
            ticket.wait()
            if ticket.error is not None:
                self._shared.note("get", str(ticket.error))
                reading.arrived[:] = False
            else:
                self._shared.note_statuses("get", ticket.result)
                reading.arrived &= ticket.result.ok
        begun.clear()
        assert self._memory is not None
        self._memory.take_back()

    def _finish_loads(self) -> set[int]:
        """Waits for what is left of this step's own loads; vLLM's blocks of what failed."""
        for _, begun in self._groups:
            self._arrive(begun)
        failed = self._settle(self._readings)
        self._groups, self._readings = [], []
        return failed

    def _settle(self, readings: list[Reading]) -> set[int]:
        """Counts what arrived; vLLM's blocks of what didn't."""
        assert self._memory is not None
        failed: set[int] = set()
        for reading in readings:
            tokens = self._layout.granule - reading.offset
            self.counts["loaded_tokens"] += tokens * int(reading.arrived.sum())
            for row in np.flatnonzero(~reading.arrived).tolist():
                self.counts["failed_tokens"] += tokens
                failed.update(self._memory.blocks_of(reading.places[row], reading.offset))
                if self._tells_as is not None:
                    self._heard.lost.add(reading.keys[row].tobytes())
        self._failed |= failed
        return failed

    def finished(self, *, idle: bool) -> set[str]:
        """Requests whose loads between steps are over since the last time.

        idle: nothing else is to be done meanwhile.
        """
        if idle and self._between:
            begun, _ = next(iter(self._between.values()))
            if begun:
                begun[-1][0].wait(timeout_ms=IDLE_WAIT_MS)
        over = set()
        for request_id, (begun, readings) in list(self._between.items()):
            if all(ticket.done for ticket, _ in begun):
                self._arrive(begun)
                self._settle(readings)
                del self._between[request_id]
                over.add(request_id)
        self._drain()
        return over

    def failed_blocks(self) -> set[int]:
        """vLLM's blocks that were to be loaded and weren't, each told once."""
        if self._groups:
            self._finish_loads()
        failed, self._failed = self._failed, set()
        return failed

    # ---- saving ----

    def save(self, plan: Plan) -> None:
        """Begins the saves of a step whose layers are all computed."""
        failed = self._failed | (self._finish_loads() if self._groups else set())
        if not plan.saves or self._client is None:
            return
        assert self._memory is not None
        self._memory.hand_over()
        for save in plan.saves:
            spoilt = save.rests_on is not None and not failed.isdisjoint(save.rests_on.tolist())
            if spoilt:
                self.counts["spoilt_tokens"] += self._layout.granule * len(save.keys)
            else:
                self._put(save)

    def _put(self, save: Save) -> None:
        assert self._memory is not None
        assert self._client is not None
        assert self._namespace is not None
        count = len(save.keys)
        places = self._memory.places(save.start_token, count, save.blocks)
        regions, view = self._memory.regions(places, tuple(range(len(self._layout.layers))))
        opaque = self._layout.form == "opaque"
        try:
            ticket = self._client.submit_put(
                self._namespace,
                save.keys,
                regions,
                view=view,
                parents=[save.parent, *(key.tobytes() for key in save.keys[:-1])],
                position=save.start_token // self._layout.granule if opaque else save.start_token,
            )
        except FlashKVError as error:
            self._shared.note("put", str(error))
            self.counts["unsaved_tokens"] += self._layout.granule * count
        else:
            self._saving[save.request_id].append((ticket, save))
            if self._flusher is not None:
                self._flusher.soon()

    def release(self, request_ids: Iterable[str]) -> None:
        """Returns once nothing is read any more from blocks that these requests gave back."""
        for request_id in request_ids:
            for ticket, _ in self._saving.get(request_id, ()):
                ticket.wait(milestone=Milestone.CAPTURED)
        self._drain()

    def _drain(self) -> None:
        """Counts what came of saves that are over."""
        if self._client is None:
            return
        self._client.drain()
        for request_id, begun in list(self._saving.items()):
            left = []
            for ticket, save in begun:
                if ticket.done:
                    self._count_saved(ticket, save)
                else:
                    left.append((ticket, save))
            if left:
                self._saving[request_id] = left
            else:
                del self._saving[request_id]

    def _count_saved(self, ticket: Ticket, save: Save) -> None:
        granule = self._layout.granule
        if ticket.error is not None:
            self._shared.note("put", str(ticket.error))
        if ticket.result is None:
            self.counts["unsaved_tokens"] += granule * len(save.keys)
            return
        self._shared.note_statuses("put", ticket.result)
        kept = ticket.result.ok
        present = ticket.result.counts().get("PRESENT", 0)
        self.counts["saved_tokens"] += granule * (int(kept.sum()) - present)
        self.counts["present_tokens"] += granule * present
        self.counts["unsaved_tokens"] += granule * int((~kept).sum())
        if self._tells_as is not None:
            for key in save.keys[kept]:
                self._heard.stored[key.tobytes()] = 1 << self._tells_as

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last time."""
        taken = {
            name: count - self._told[name]
            for name, count in self.counts.items()
            if count != self._told[name]
        }
        self._told = Counter(self.counts)
        return taken

    def heard(self) -> Heard | None:
        """What a scheduler in another process has to know, each told once."""
        heard, self._heard = self._heard, Heard()
        return heard or None

    def close(self) -> None:
        """Waits for what was begun; what it stored becomes durable when the store is closed."""
        if self._flusher is not None:
            self._flusher.close()
        with suppress(FlashKVError):
            if self._client is not None:
                self._client.close()
        for begun, _ in self._between.values():
            begun.clear()
        self._between.clear()
        self._drain()
        self._client = None
