"""SGLang's hierarchical cache on flash: a HiCacheStorage that keeps its pages in a flashkv store.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "flashkv",
        "module_path": "flashkv.connectors.sglang", "class_name": "FlashKVStorage",
        "interface_v1": 1, "path": "/nvme/kv", "capacity": "512GiB"}'

Invariants
  - keys are SGLang's own hash chain, in a namespace whose identity names model, weights, dtype,
    page and pool; the store never holds a page under a key of another meaning;
  - a page that is answered True has arrived whole and checked, or (set) is stored; everything else
    is False, and SGLang computes it;
  - every call may come from any thread: SGLang looks, reads and writes from three at once;
  - a store that can't be had is said once, and the engine goes on without it; only what the
    operator configured wrongly is an exception, when the engine starts.

Ranks that compute one request take the least of their answers. Each answers from the store as it is
at the call: equal stores give equal answers, and unequal ones cost pages, never correctness.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flashkv import checks
from flashkv.connectors.flusher import Flusher
from flashkv.connectors.follower import Follower
from flashkv.connectors.sglang_blocks import Pages, Transfers
from flashkv.connectors.sglang_hits import pool_hits
from flashkv.connectors.sglang_identity import (
    Engine,
    checkpoint_of,
    identity_of,
    part_of,
    rank_folder,
    replicated,
    weights_were_updated,
)
from flashkv.connectors.sglang_interface import (
    HiCacheStorage,
    LogicalHostPool,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageMetrics,
    torch,
)
from flashkv.connectors.sglang_pools import UnknownLayout, describe
from flashkv.connectors.shared_store import SharedStore, StoreSettings
from flashkv.errors import FlashKVError, OptionsError

log = logging.getLogger(__name__)

ENGINE: Final = "SGLang"
KV: Final = PoolName.KV.value
SGLANG_SETTINGS: Final = frozenset(
    """backend_name module_path class_name interface_v1 prefetch_threshold prefetch_timeout_base
    prefetch_timeout_per_ki_token hicache_storage_pass_prefix_keys tp_lcm_size
    file_storage_path""".split()
)
"""Keys of the extra configuration that SGLang reads, or sets."""
OWN_SETTINGS: Final = {
    "flush_ms": (500, 0, 3_600_000),
    "lease_ms": (5_000, 0, 60_000),
    "refresh_ms": (2_000, 0, 3_600_000),
}
"""Name -> (default, least, most).

flush_ms    pages are durable so long after they were stored: SGLang's processes end by a kill.
lease_ms    pages that a lookup found stay so long; 0: they may be evicted before they are read.
refresh_ms  of MLA models, how often ranks that don't write look for what was written, at most.
"""


class FlashKVStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is untyped here
    """Pages of SGLang's host pools in a flashkv store."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Raises OptionsError, IdentityError: what the operator must change."""
        given = dict(storage_config.extra_config or {})
        self._config = storage_config
        self._numbers = {
            name: checks.whole(OptionsError, name, given.pop(name, default), least, most)
            for name, (default, least, most) in OWN_SETTINGS.items()
        }
        others = SGLANG_SETTINGS | {"model", "revision"}
        self._settings = StoreSettings.parse(given, ENGINE, others=others)
        longest = self._settings.store_options().max_lease_ms
        if self._numbers["lease_ms"] > longest:
            raise OptionsError("lease_ms", value=self._numbers["lease_ms"], limit=longest)
        self._engine = Engine.running()
        self._stale = False
        self._anchor_only = False
        self._checkpoint = checkpoint_of(self._engine, storage_config.model_name, given)
        self._transfers = Transfers()
        self._pages: dict[str, Pages | None] = {}
        self._reasons: dict[str, str] = {}
        self._stores: dict[Path, tuple[SharedStore, Flusher | None]] = {}
        self._followers: dict[Path, tuple[SharedStore, Follower]] = {}
        self.registered_pools: dict[Any, Any] = {}
        atexit.register(self.close)

    # ---- pools ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of K and V, or of MLA's rows."""
        super().register_mem_pool_host(mem_pool_host)
        # Such a pool counts slots and holds nothing: other pools hold all of a page.
        self._anchor_only = isinstance(mem_pool_host, LogicalHostPool)
        self._bind(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool, as of a sliding window, a state or a draft model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        bound = self._pages.get(name)  # of K and V: it was registered already
        if bound is None or bound.memory.pool is not host_pool:
            self._bind(name, host_pool)

    def _bind(self, name: str, pool: Any) -> None:
        """Raises OptionsError, CapacityError, IdentityError."""
        self._pages[name] = None
        try:
            memory = describe(pool)
        except UnknownLayout as why:
            self._reasons[name] = str(why)
            log.warning("flashkv stores nothing of SGLang's pool %s: %s", name, why)
            return
        part = part_of(name, memory, self._config, self._checkpoint.config)
        extras = {**part.extras, **self._settings.extras()}
        identity = identity_of(name, memory, part.geometry, self._engine, self._checkpoint, extras)
        path = rank_folder(Path(self._settings.path), name, self._config)
        common = (memory, identity, part.shard, self._transfers)
        if replicated(name, self._config) and not self._config.is_storage_writer:
            notes, follower = self._follow(path)
            self._pages[name] = Pages(
                *common, notes.note, follower=follower, lease_ms=self._numbers["lease_ms"]
            )
        else:
            shared, flusher = self._open(path, memory.geometry)
            self._pages[name] = Pages(
                *common,
                shared.note,
                shared=shared,
                flusher=flusher,
                lease_ms=self._numbers["lease_ms"],
            )
        self._reasons[name] = memory.reason
        how = f"plain bytes: {memory.reason}" if memory.reason else "by layer, head and token"
        log.info("flashkv stores SGLang's pool %s (%s) %s", name, pool.layout, how)

    def _open(self, path: Path, geometry: Any) -> tuple[SharedStore, Flusher | None]:
        if path not in self._stores:
            shared = SharedStore.acquire(
                replace(self._settings, path=str(path)), geometry, engine=ENGINE
            )
            flusher = None
            if shared.store is not None:
                flusher = Flusher(shared.store, self._numbers["flush_ms"], shared.note)
            self._stores[path] = shared, flusher
        return self._stores[path]

    def _follow(self, path: Path) -> tuple[SharedStore, Follower]:
        """A follower, and a store that isn't there to keep its notes."""
        if path not in self._followers:
            notes = SharedStore(None, "written by another rank", ENGINE, path)
            follower = Follower(
                path,
                self._settings.store_options(),
                self._numbers["refresh_ms"],
                notes.note,
            )
            self._followers[path] = notes, follower
        return self._followers[path]

    def _of(self, name: Any) -> Pages | None:
        """A pool's pages; None: there is no store for them, or the identity is no longer true."""
        return self._pages.get(str(name)) if self._identity_holds() else None

    def _identity_holds(self) -> bool:
        """Whether SGLang still runs the weights that the identity names."""
        if not self._stale and weights_were_updated():
            self._stale = True
            log.error(
                "SGLang's weights were updated: flashkv stores and restores nothing more for it,"
                " until it is started with a checkpoint of the new ones"
            )
        return not self._stale

    # ---- zero-copy, one pool ----

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """How many leading pages are stored."""
        pages = self._of(KV)
        return pages.match(_packed(keys)) if pages is not None and keys else 0

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Any = None,  # noqa: ARG002
    ) -> list[bool]:
        """Reads pages into the host pool; which of them arrived."""
        pages = self._of(KV)
        if pages is None:
            return [self._anchor_only and self._identity_holds()] * len(keys)
        return pages.get(_packed(keys), host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Stores pages of the host pool; which of them are stored."""
        pages = self._of(KV)
        if pages is None:
            return [self._anchor_only and self._identity_holds()] * len(keys)
        return pages.put(_packed(keys), host_indices, _prefix(extra_info))

    # ---- zero-copy, several pools ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """How long a prefix can be restored from all pools, and which lengths can."""
        packed = _packed(keys)
        if self._anchor_only and pool_transfers:
            kv_pages = len(keys)  # the other pools alone decide
        else:
            kv_pages = self.batch_exists(keys, extra_info)
        found, lengths = pool_hits(packed, kv_pages, pool_transfers or (), self._of)
        return PoolTransferResult(lengths[-1] if lengths else 0, found, lengths)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: Any = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """Reads pages of several pools; which of each arrived."""
        return {one.name: self._transfer(one, None, write=False) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Stores pages of several pools; which of each are stored."""
        prefix = _prefix(extra_info)
        return {one.name: self._transfer(one, prefix, write=True) for one in transfers}

    def _transfer(
        self, transfer: PoolTransfer, prefix: list[bytes] | None, *, write: bool
    ) -> list[bool]:
        keys = _packed(transfer.keys or [])
        pages = self._of(transfer.name)
        if pages is None:
            return [False] * len(keys)
        if write:
            return pages.put(keys, transfer.host_indices, prefix)
        return pages.get(keys, transfer.host_indices)

    # ---- flat pages ----

    def get(
        self,
        key: str,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> torch.Tensor | None:
        """A flat page, in target_location where that is given; None: it isn't stored."""
        targets = None if target_location is None else [target_location]
        return self.batch_get([key], targets, target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> list[torch.Tensor | None]:
        """Flat pages, None for those that are not stored."""
        pages = self._of(KV)
        if pages is None:
            return [None] * len(keys)
        if target_locations is None:
            target_locations = [pages.memory.new_page() for _ in keys]
        arrived = pages.get_flat(_packed(keys), target_locations)
        return [
            page if there else None for page, there in zip(target_locations, arrived, strict=True)
        ]

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores a flat page; whether it is stored."""
        targets = None if target_location is None else [target_location]
        return self.batch_set([key], [value], targets, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Stores flat pages; whether all of them are stored."""
        pages = self._of(KV)
        if pages is None or values is None:
            return False
        return all(pages.put_flat(_packed(keys), values))

    def exists(self, key: str) -> bool:
        """Whether a page is stored."""
        return self.batch_exists([key]) == 1

    # ---- figures and the end ----

    def clear(self) -> bool:
        """Retires all that this engine's identity has stored, for weights that were replaced."""
        for pages in self._bound():
            pages.rotate()
        return True

    def get_stats(self) -> Any:
        """SGLang's storage metrics since it last asked; None where it doesn't collect them."""
        if not self._config.enable_storage_metrics:
            return None
        metrics = StorageMetrics()
        metrics.prefetch_pgs, metrics.prefetch_bandwidth = self._transfers.take("get")
        metrics.backup_pgs, metrics.backup_bandwidth = self._transfers.take("set")
        return metrics

    def stats(self) -> dict[str, Any]:
        """How each pool is stored and why, pages moved, and of each store what went wrong."""
        stores = {}
        for path, (shared, _) in self._stores.items():
            figures = None
            if shared.store is not None:
                with contextlib.suppress(FlashKVError):  # it may be closed
                    figures = shared.store.stats()
            stores[str(path)] = {
                "store": figures,
                "reason": shared.reason,
                "events": dict(shared.events),
            }
        for path, (notes, _) in self._followers.items():
            stores[str(path)] = {
                "store": None,
                "reason": notes.reason,
                "events": dict(notes.events),
            }
        pools = {
            name: {
                "stored": pages is not None,
                "native": pages is not None and not pages.memory.reason,
                "reason": self._reasons.get(name, ""),
            }
            for name, pages in self._pages.items()
        }
        return {"pools": pools, "pages": dict(self._transfers.totals), "stores": stores}

    def _bound(self) -> list[Pages]:
        return [pages for pages in self._pages.values() if pages is not None]

    def close(self) -> None:
        """Makes durable what was stored and gives the store back. May be called again."""
        atexit.unregister(self.close)
        self._pages = dict.fromkeys(self._pages)
        for shared, flusher in self._stores.values():
            if flusher is not None:
                flusher.close()
            shared.release()
        for _, follower in self._followers.values():
            follower.close()


def _packed(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _prefix(extra_info: Any) -> list[bytes] | None:
    """Keys before those of a call, where SGLang was told to pass them."""
    prefix = None if extra_info is None else extra_info.prefix_keys
    return None if prefix is None else _packed(prefix)
