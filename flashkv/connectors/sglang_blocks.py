"""The stored pages of one host pool of SGLang: batches in, one answer a page out.

Invariants
  - no call raises for what a store or its device does: a page is there, whole, or it isn't;
  - answers are those of the store at the time of the call and of nothing else, so that ranks that
    see the same store give the same answer;
  - a rank that doesn't write says that its pages are stored: the rank that does writes them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashkv.connectors.flusher import Flusher
from flashkv.connectors.follower import Follower
from flashkv.connectors.sglang_pools import PoolMemory
from flashkv.connectors.shared_store import SharedStore
from flashkv.errors import BatchResult, BlockStatus, ClosedError, FlashKVError
from flashkv.geometry import MemoryView
from flashkv.identity import Identity, Shard
from flashkv.namespace import Namespace

Answer = TypeVar("Answer")
NO_PARENT: Final = b""


class Transfers:
    """Pages moved, and how fast: what SGLang's metrics ask for. Safe for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.totals: Counter[str] = Counter()
        self._since: dict[str, list[tuple[int, float]]] = {"get": [], "set": []}

    def note(self, call: str, asked: int, done: int, page_bytes: int, seconds: float) -> None:
        """call: "get" or "set"."""
        with self._lock:
            self.totals[f"{call}_pages"] += done
            self.totals[f"{call}_pages_failed"] += asked - done
            if done:
                gigabytes = done * page_bytes / 1e9
                self._since[call].append((done, gigabytes / max(seconds, 1e-9)))
                del self._since[call][:-1000]  # of an engine that never asks

    def take(self, call: str) -> tuple[list[int], list[float]]:
        """(pages, GB/s) of each batch since it was last asked."""
        with self._lock:
            batches, self._since[call] = self._since[call], []
        return [pages for pages, _ in batches], [speed for _, speed in batches]


class Pages:
    """Stored pages of a pool.

    shared    the process' store; None for a rank that only follows.
    follower  of the store that another rank writes; else None.
    """

    def __init__(
        self,
        memory: PoolMemory,
        identity: Identity,
        shard: Shard,
        transfers: Transfers,
        note: Callable[[str, str], None],
        *,
        shared: SharedStore | None = None,
        flusher: Flusher | None = None,
        follower: Follower | None = None,
        lease_ms: int = 0,
    ) -> None:
        self.memory = memory
        self.identity = identity
        self.shard = shard
        self.follower = follower
        self.page_bytes = memory.geometry.block_bytes(0, memory.tokens)
        self._transfers = transfers
        self._note = note
        self._shared = shared
        self._flusher = flusher
        self._lease_ms = lease_ms or None
        self._own = shared.namespace(identity, shard) if shared is not None else None

    def blocks(self) -> Namespace | None:
        """Where pages lie; None where there is no store."""
        if self.follower is not None:
            return self.follower.namespace(self.identity, self.shard)
        return self._own

    # ---- looking ----

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are stored; they stay for lease_ms."""

        def look(blocks: Namespace) -> int:
            return blocks.match(keys, lease_ms=self._lease_ms).count

        found = self._guarded(look, 0)
        if found < len(keys) and self.follower is not None:
            self.follower.soon()
        return found

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which pages are stored."""
        return self._guarded(lambda blocks: blocks.contains(keys), np.zeros(len(keys), np.bool_))

    # ---- moving pages of the pool ----

    def get(self, keys: Sequence[bytes], host_indices: Any) -> list[bool]:
        """Reads pages to where host_indices say."""
        starts = self._starts(keys, host_indices)
        if starts is None:
            return [False] * len(keys)

        def move(blocks: Namespace) -> BatchResult:
            memory, finish = self.memory.destination(starts)
            result = self._read(blocks, keys, memory)
            finish(result.ok)
            return result

        return self._moved("get", keys, move)

    def put(
        self, keys: Sequence[bytes], host_indices: Any, prefix: Sequence[bytes] | None = None
    ) -> list[bool]:
        """Stores pages from where host_indices say. prefix: keys before these, where known."""
        if self.follower is not None:
            return [True] * len(keys)
        starts = self._starts(keys, host_indices)
        if starts is None:
            return [False] * len(keys)
        return self._moved(
            "set",
            keys,
            lambda blocks: self._write(blocks, keys, self.memory.source(starts), prefix),
        )

    def _starts(self, keys: Sequence[bytes], host_indices: Any) -> NDArray[np.int64] | None:
        starts = self.memory.starts(host_indices, len(keys))
        if starts is None:
            self._note("indices", f"host indices don't fit {len(keys)} pages")
        return starts

    # ---- moving flat pages ----

    def get_flat(self, keys: Sequence[bytes], pages: Sequence[Any]) -> list[bool]:
        """Reads flat pages of SGLang's generic interface."""
        return self._moved(
            "get",
            keys,
            lambda blocks: self._read(blocks, keys, [self.memory.as_block(p) for p in pages]),
        )

    def put_flat(self, keys: Sequence[bytes], pages: Sequence[Any]) -> list[bool]:
        """Stores flat pages of SGLang's generic interface."""
        if self.follower is not None:
            return [True] * len(keys)
        return self._moved(
            "set",
            keys,
            lambda blocks: self._write(
                blocks, keys, [self.memory.as_block(p) for p in pages], None
            ),
        )

    # ---- ending ----

    def rotate(self) -> None:
        """Retires all pages that were stored under this identity."""
        if self.follower is None:
            self._guarded(lambda blocks: blocks.rotate(), 0)

    # ---- the common way ----

    @property
    def _view(self) -> MemoryView:
        return self.memory.view

    def _read(self, blocks: Namespace, keys: Sequence[bytes], memory: Any) -> BatchResult:
        return blocks.get(keys, memory, view=self._view, tokens=self.memory.tokens)

    def _write(
        self,
        blocks: Namespace,
        keys: Sequence[bytes],
        memory: Any,
        prefix: Sequence[bytes] | None,
    ) -> BatchResult:
        before = prefix[-1] if prefix else NO_PARENT
        result = blocks.put(
            keys,
            memory,
            view=self._view,
            tokens=self.memory.tokens,
            parents=[before, *keys[:-1]],
            position=None if prefix is None else len(prefix) * self.memory.tokens,
        )
        if self._flusher is not None and (result.statuses == BlockStatus.OK).any():
            self._flusher.soon()
        return result

    def _moved(
        self, call: str, keys: Sequence[bytes], move: Callable[[Namespace], BatchResult]
    ) -> list[bool]:
        """What became of each page; a key that came before in the batch shares its fate."""
        if not keys:
            return []
        begun = time.monotonic()
        result = self._guarded(move, None)
        if result is None:
            done = np.zeros(len(keys), np.bool_)
        else:
            done = result.ok
            for row in np.flatnonzero(result.statuses == BlockStatus.DUPLICATE).tolist():
                done[row] = done[keys.index(keys[row])]
            if self._shared is not None:
                self._shared.note_statuses(call, result)
        seconds = time.monotonic() - begun
        self._transfers.note(call, len(keys), int(done.sum()), self.page_bytes, seconds)
        answer: list[bool] = done.tolist()
        return answer

    def _guarded(self, work: Callable[[Namespace], Answer], instead: Answer) -> Answer:
        """work(blocks); `instead` where there is no store, or it failed (noted)."""
        try:
            return self._attempt(work, instead)
        except ClosedError as error:
            if self.follower is None:
                self._note("closed", str(error))
                return instead
        with contextlib.suppress(ClosedError):  # a follower opened its store anew: once more
            return self._attempt(work, instead)
        return instead

    def _attempt(self, work: Callable[[Namespace], Answer], instead: Answer) -> Answer:
        try:
            blocks = self.blocks()
            return instead if blocks is None else work(blocks)
        except ClosedError:
            raise
        except (FlashKVError, OSError) as error:
            self._note(type(error).__name__, str(error))
            return instead
