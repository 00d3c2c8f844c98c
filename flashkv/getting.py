"""Getting: from checked arguments of a get to the caller's memory.

Invariants
  - what is looked up is pinned until the reader has given it back: its segment isn't reclaimed;
  - a place that can't be read into this memory becomes absent, or the call raises and has read
    nothing;
  - the index is never believed against a record: what it says too much is damage, and a miss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashkv.errors import BatchResult, BlockStatus, MemoryViewError
from flashkv.estimate import flash_bytes
from flashkv.index import NONE, Keys
from flashkv.layout import packed_view
from flashkv.memory import DEFAULT_VIEW, BlockMemory
from flashkv.progress import LayerProgress
from flashkv.segment_reader import ReadRequest

if TYPE_CHECKING:
    from flashkv.namespace import Namespace
    from flashkv.store import Store


@dataclass(frozen=True)
class Wanted:
    """What of each block a get wants.

    lengths: uint16[N], tokens that they must have; worst: the least exact FKV_FIDELITY_*.
    """

    group: int
    first_token: int
    token_count: int  # 0: to the block's end
    lengths: NDArray[np.uint16] | None
    worst: int | None
    whole: bool  # all of each block


class Getter:
    """Reads blocks of one namespace."""

    def __init__(self, store: Store, namespace: Namespace, space: bytes) -> None:
        self._store = store
        self._digest = namespace.digest
        self._geometry = namespace.geometry
        self._shard = namespace.shard.encode()
        self._space = space

    def read(
        self,
        keys: Keys,
        memory: BlockMemory,
        wanted: Wanted,
        progress: LayerProgress | None,
    ) -> BatchResult:
        """BlockStatus of each block. Raises MemoryViewError."""
        store = self._store
        if not len(keys):
            return BatchResult(
                np.zeros(0, np.uint8), None if progress is None else np.zeros(0, np.int32)
            )
        first, count = wanted.first_token, wanted.token_count
        if count > memory.block_tokens:
            raise MemoryViewError(
                "the destination has no room for the token_range",
                value=f"{memory.block_tokens} tokens a block",
                limit=f"at least {count}",
            )
        digests = keys.digests(self._space)
        with store.gate:
            places = store.index.lookup(digests, pin=True)
            if wanted.worst is not None:
                self._drop_places(places, places["fidelity"] > wanted.worst)
            if wanted.lengths is not None:
                self._drop_places(places, places["tokens"] != wanted.lengths)
            self._refuse(places, keys, digests, memory.block_tokens, wanted)
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
                progress=progress if memory.in_place else None,
            )
            began = time.perf_counter()
            statuses = store.reader.read(request, digests)
        ok = statuses == BlockStatus.OK
        memory.finish(ok)
        taken = time.perf_counter() - began
        tokens = np.full(int(ok.sum()), count) if count else places["tokens"][ok]
        store.counters.note_get(statuses, tokens, memory.view.group.token_bytes)
        if wanted.whole and ok.all():
            store.load_model.note(float(flash_bytes(places).sum()), taken)
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
            if not self._has_last_token(row, keys, digests, group):
                continue
            self._store.index.unpin(np.ascontiguousarray(places["segment"]))
            raise MemoryViewError(
                f"block {row} of the batch doesn't fit the destination",
                value=f"{int(taken[row])} tokens",
                limit=f"{room} tokens a block",
                advice="give memory for the block's tokens, or a token_range",
            )
        self._drop_places(places, other | small)

    def _has_last_token(self, row: int, keys: Keys, digests: NDArray[np.uint8], group: int) -> bool:
        """Whether a block's record bears out how long the index says it is.

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
        statuses = self._store.reader.read(request, digests[row : row + 1])
        return bool(statuses[0] != BlockStatus.MISS)

    def _drop_places(self, places: NDArray[Any], rows: NDArray[np.bool_]) -> None:
        """Makes these rows absent, and gives back their pins."""
        if rows.any():
            self._store.index.unpin(np.ascontiguousarray(places["segment"][rows]))
            places["record"][rows] = NONE
            places["segment"][rows] = NONE
