"""Getting: from checked arguments of a get to the caller's memory.

Invariants
  - what is looked up is pinned until the reader has given it back: its segment isn't reclaimed;
  - a place that can't be read into this memory becomes absent, or the call raises and has read
    nothing;
  - the index is never believed against a record: what it says too much is damage, and a miss.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv.asking import Asked, Wanted
from flashkv.errors import BatchResult, BlockStatus, MemoryViewError
from flashkv.estimate import flash_bytes
from flashkv.index import NONE, Keys
from flashkv.layout import packed_view
from flashkv.memory import DEFAULT_VIEW
from flashkv.segment_reader import BegunRead, ReadRequest, SegmentReader

if TYPE_CHECKING:
    from flashkv.namespace import Namespace
    from flashkv.store import Store


PROBE_MS: Final = 100
"""Whoever must not wait for the device waits so long for proof that a block is as long as the index
says; without one it is a miss."""


def nothing_got(asked: Asked, status: BlockStatus = BlockStatus.MISS) -> BatchResult:
    """The result of a get that read nothing."""
    if asked.progress is not None and len(asked.keys):
        asked.progress.fail()
    failed = None if asked.progress is None else np.zeros(len(asked.keys), np.int32)
    return BatchResult(np.full(len(asked.keys), status, np.uint8), failed)


class PendingGet:
    """A get that was begun, and goes on by itself. Ended once, by whoever comes first."""

    def __init__(self, getter: Getter, begun: BegunRead | None, asked: Asked) -> None:
        self._getter = getter
        self._begun = begun
        self._asked = asked
        self._began = time.perf_counter()

    def when_over(self, call: Callable[[], None]) -> None:
        """Makes the call once the caller's memory is its own again, whoever ended the get."""
        if self._begun is None or self._begun.native is None:
            call()
        else:
            self._begun.native.when_over(call)

    def give_up(self) -> bool:
        """Statuses are final from now on; whether the caller's memory is its own again."""
        native = None if self._begun is None else self._begun.native
        return native is None or native.give_up()

    def end(self) -> BatchResult:
        """The result, of what is over or was given up."""
        progress = self._asked.progress
        try:
            if self._begun is None:
                return nothing_got(self._asked)
            statuses = self._getter.reader.finish(self._begun)
            taken = time.perf_counter() - self._began
            return self._getter.result(self._asked, self._begun.request, statuses, taken)
        except BaseException:
            if progress is not None:
                progress.fail()
            raise
        finally:
            if progress is not None:
                progress.end()


class Getter:
    """Reads blocks of one namespace."""

    def __init__(self, store: Store, namespace: Namespace, space: bytes) -> None:
        self._store = store
        self._digest = namespace.digest
        self._geometry = namespace.geometry
        self._shard = namespace.shard.encode()
        self._space = space

    @property
    def reader(self) -> SegmentReader:
        """Of the store."""
        return self._store.reader

    def read(self, asked: Asked) -> BatchResult:
        """BlockStatus of each block. Raises MemoryViewError."""
        if not len(asked.keys):
            return nothing_got(asked)
        with self._store.gate:
            request, digests = self._look_up(asked)
            began = time.perf_counter()
            statuses = self.reader.read(request, digests)
        return self.result(asked, request, statuses, time.perf_counter() - began)

    def read_until(self, asked: Asked, end: float) -> BatchResult:
        """As read(); what isn't in place at that time of time.monotonic() is TIMED_OUT."""
        with self._store.gate:
            pending, free = None, threading.Event()
            try:
                pending = self.begin(asked, 1e3 * max(end - time.monotonic(), 0.0))
                if pending is None:
                    return nothing_got(asked, BlockStatus.TIMED_OUT)
                pending.when_over(free.set)
                over = free.wait(min(max(end - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
            except BaseException:
                if pending is not None:
                    pending.give_up()
                raise
            held = not over and not pending.give_up()
            return pending.end().given_up(BlockStatus.TIMED_OUT, free if held else None)

    def begin(self, asked: Asked, wait_ms: float) -> PendingGet | None:
        """Begins to read; None where blocks are still being written after wait_ms: ask again.

        Raises MemoryViewError.
        """
        if not len(asked.keys):
            return PendingGet(self, None, asked)
        with self._store.gate:
            request, digests = self._look_up(asked, PROBE_MS)
            begun = self.reader.begin(request, digests, wait_ms)
        return None if begun is None else PendingGet(self, begun, asked)

    def _look_up(
        self, asked: Asked, probe_ms: float = math.inf
    ) -> tuple[ReadRequest, NDArray[np.uint8]]:
        """(what is to be read, places pinned, digests). Raises MemoryViewError."""
        memory, wanted, keys = asked.memory, asked.wanted, asked.keys
        first, count = wanted.first_token, wanted.token_count
        if count > memory.block_tokens:
            raise MemoryViewError(
                "the destination has no room for the token_range",
                value=f"{memory.block_tokens} tokens a block",
                limit=f"at least {count}",
            )
        digests = keys.digests(self._space)
        places = self._store.index.lookup(digests, pin=True)
        if wanted.worst is not None:
            self._drop_places(places, places["fidelity"] > wanted.worst)
        if wanted.lengths is not None:
            self._drop_places(places, places["tokens"] != wanted.lengths)
        self._refuse(places, keys, digests, memory.block_tokens, wanted, probe_ms)
        request = ReadRequest(
            geometry=self._geometry.native(wanted.group),
            view=memory.view.pointer,
            namespace_digest=self._digest,
            shard=self._shard,
            keys=keys,
            places=places,
            pointers=memory.pointers,
            first_token=first,
            token_count=count,
            progress=asked.progress if memory.in_place else None,
            background=asked.background,
            bounce=asked.bounce,
            keep=(memory, self._geometry),
        )
        return request, digests

    def result(
        self, asked: Asked, request: ReadRequest, statuses: NDArray[np.uint8], taken_s: float
    ) -> BatchResult:
        """The statuses as a result, once memory that finish() spreads is filled; counted."""
        memory, wanted, progress = asked.memory, asked.wanted, asked.progress
        places, store, count = request.places, self._store, asked.wanted.token_count
        ok = statuses == BlockStatus.OK
        memory.finish(ok)
        tokens = np.full(int(ok.sum()), count) if count else places["tokens"][ok]
        store.counters.note_get(statuses, tokens, memory.view.group.token_bytes)
        if wanted.whole and ok.all() and not asked.background:
            store.load_model.note(float(flash_bytes(places).sum()), taken_s)
        if progress is None:
            return BatchResult(statuses)
        # Of what failed, a copy that finish() spreads has nothing.
        failed = request.failed_layers
        if failed is None:
            failed = np.zeros(len(ok), np.int32)
        if not ok.all():
            progress.fail(int(failed[~ok].min()))
        return BatchResult(statuses, np.where(ok, -1, failed).astype(np.int32))

    def _refuse(
        self,
        places: NDArray[Any],
        keys: Keys,
        digests: NDArray[np.uint8],
        room: int,
        wanted: Wanted,
        probe_ms: float,
    ) -> None:
        """Places that can't be read into this memory become absent, or are an error of the
        caller's.
        """
        group, first, count = wanted.group, wanted.first_token, wanted.token_count
        found = places["record"] != NONE
        tokens = places["tokens"].astype(np.int64)
        taken = np.full(len(places), count) if count else tokens - first
        other = found & ((places["group"] != group) | (taken < 1) | (first + taken > tokens))
        small = found & ~other & (taken > room)
        for row in np.flatnonzero(small).tolist():
            if not self._has_last_token(row, keys, digests, group, probe_ms):
                continue
            self._store.index.unpin(np.ascontiguousarray(places["segment"]))
            raise MemoryViewError(
                f"block {row} of the batch doesn't fit the destination",
                value=f"{int(taken[row])} tokens",
                limit=f"{room} tokens a block",
                advice="give memory for the block's tokens, or a token_range",
            )
        self._drop_places(places, other | small)

    def _has_last_token(
        self, row: int, keys: Keys, digests: NDArray[np.uint8], group: int, probe_ms: float
    ) -> bool:
        """Whether a block's record bears out how long the index says it is, within that time.

        A directory that says too much is damage, not an error of the caller's: the reader counts
        and drops it.
        """
        view = packed_view(self._geometry, group, DEFAULT_VIEW, 1)
        memory = np.empty(int(view.region_bytes[0]), np.uint8)
        place = self._store.index.lookup(digests[row : row + 1], pin=True)
        request = ReadRequest(
            geometry=self._geometry.native(group),
            view=view.pointer,
            namespace_digest=self._digest,
            shard=self._shard,
            keys=Keys.pack([keys[row]]),
            places=place,
            pointers=np.array([[memory.ctypes.data]], np.uint64),
            first_token=max(int(place["tokens"][0]) - 1, 0),
            token_count=1,
        )
        if probe_ms == math.inf:
            statuses = self.reader.read(request, digests[row : row + 1])
            return bool(statuses[0] != BlockStatus.MISS)
        request.keep = memory
        begun = self.reader.begin(request, digests[row : row + 1], probe_ms)
        if begun is None or begun.native is None:
            return False
        over = threading.Event()
        begun.native.when_over(over.set)
        if not over.wait(probe_ms / 1e3):
            begun.native.give_up()
        statuses = self.reader.finish(begun)
        return bool(statuses[0] not in (BlockStatus.MISS, BlockStatus.CANCELLED))

    def _drop_places(self, places: NDArray[Any], rows: NDArray[np.bool_]) -> None:
        """Makes these rows absent, and gives back their pins."""
        if rows.any():
            self._store.index.unpin(np.ascontiguousarray(places["segment"][rows]))
            places["record"][rows] = NONE
            places["segment"][rows] = NONE
