"""vLLM's workers as processes of their own: whose store is whose, and how the scheduler looks into
them.

A store has one writer. With the `uni` executor scheduler and worker are one process and share its
handle. With `mp` each worker writes a store of its own, a folder for each rank where there are
several, and the scheduler sees what was in them when the engine started, and since then what the
workers tell.

Invariants
  - a key is found only where all ranks have it;
  - what the scheduler knows may be out of date, since workers reclaim space: a load that fails is
    computed, and its keys are not found again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import flashkv
from flashkv.connectors.shared_store import StoreSettings
from flashkv.connectors.vllm_model import PagedLayout, UnsupportedSetupError
from flashkv.connectors.vllm_plan import Heard
from flashkv.errors import FlashKVError, OptionsError
from flashkv.identity import Identity, Shard
from flashkv.leases import Lease
from flashkv.namespace import Namespace
from flashkv.store import Store

log = logging.getLogger(__name__)

TOLD_KEYS_MAX: Final = 1 << 18
"""Keys told by workers that are remembered, newest first: 16 million tokens, some 50 MB."""


@dataclass(frozen=True)
class Ranks:
    """How vLLM's processes divide the work.

    apart  workers are processes of their own.
    size   tensor-parallel ranks; engine: number of this engine among data-parallel ones, or None.
    """

    apart: bool
    size: int
    engine: int | None

    @classmethod
    def of(cls, vllm_config: Any) -> Ranks:
        """Raises OptionsError where the store can't be shared out."""
        parallel = vllm_config.parallel_config
        executor = parallel.distributed_executor_backend
        if executor not in ("uni", "mp") or parallel.nnodes > 1:
            raise OptionsError(
                "vLLM's workers may lie on other machines, where the scheduler can't look into"
                " their stores",
                value=f"{executor}, {parallel.nnodes} nodes",
                limit='distributed_executor_backend "uni" or "mp" on one node',
            )
        several = parallel.data_parallel_size > 1
        engine = int(parallel.data_parallel_rank) if several else None
        return cls(executor == "mp", int(parallel.tensor_parallel_size), engine)

    def settings(self, settings: StoreSettings, rank: int) -> StoreSettings:
        """The store of one rank."""
        path = Path(settings.path)
        if self.engine is not None:
            path = path / f"engine-{self.engine}"
        if self.size > 1:
            path = path / f"rank-{rank}-of-{self.size}"
        return replace(settings, path=str(path))

    def shard(self, layout: PagedLayout, rank: int) -> Shard | None:
        """What of the model a rank holds. Raises UnsupportedSetupError."""
        plane = layout.geometry.groups[0].planes[0]
        if self.size == 1 or plane.heads == 1:
            return None
        if layout.heads * self.size != plane.heads:
            raise UnsupportedSetupError(
                "tensor parallelism doesn't divide the KV heads evenly",
                value=f"{plane.heads} KV heads",
                limit=f"a multiple of {self.size} ranks",
            )
        return Shard(heads=(rank * layout.heads, (rank + 1) * layout.heads))


class SnapshotLookup:
    """Lookup in stores that other processes write. See the module."""

    def __init__(self, digest: bytes, ranks: int) -> None:
        self.digest = digest
        self._ranks = ranks
        self._all = (1 << ranks) - 1
        self._stores: list[Store] = []
        self._snapshots: list[Namespace] = []
        self._told: OrderedDict[bytes, int] = OrderedDict()  # key -> bits of ranks
        self._lost: OrderedDict[bytes, None] = OrderedDict()
        self.usable = False

    def open(
        self, settings: StoreSettings, ranks: Ranks, layout: PagedLayout, identity: Identity
    ) -> None:
        """Takes in what the ranks' stores hold now; what can't be read counts as empty."""
        self.usable = True
        for rank in range(self._ranks):
            path = Path(ranks.settings(settings, rank).path)
            try:
                store = flashkv.open(path, read_only=True)
                self._stores.append(store)
                shard = ranks.shard(layout, rank)
                self._snapshots.append(store.namespace(identity, shard=shard))
            except (FlashKVError, OSError) as error:
                log.warning("vLLM's scheduler can't look into %s yet: %s", path, error)

    def match(self, keys: NDArray[np.uint8]) -> tuple[int, Lease | None]:
        """How many leading keys all ranks have; nothing holds them in the workers' stores."""
        if not self.usable:
            return 0, None
        found = np.zeros(len(keys), np.bool_)
        if len(self._snapshots) == self._ranks:
            found[:] = True
            for snapshot in self._snapshots:
                found &= snapshot.contains(keys)
        for row in range(len(keys)):
            key = keys[row].tobytes()
            told = self._told.get(key) == self._all
            if not (found[row] or told) or key in self._lost:
                return row, None
        return len(keys), None

    def hear(self, heard: Heard) -> None:
        for key, ranks in heard.stored.items():
            self._told[key] = self._told.get(key, 0) | ranks
            self._told.move_to_end(key)
            self._lost.pop(key, None)
        for key in heard.lost:
            self._told.pop(key, None)
            self._lost[key] = None
        for memory in (self._told, self._lost):
            while len(memory) > TOLD_KEYS_MAX:
                memory.popitem(last=False)

    def forget(self) -> bool:
        self._close_stores()
        self._told.clear()
        return False

    def _close_stores(self) -> None:
        for store in self._stores:
            store.close()
        self._stores, self._snapshots = [], []

    def close(self) -> None:
        self._close_stores()
        self.usable = False
