"""LMCache in-process: the storage plugin.

    storage_plugins: ["flashkv"]
    extra_config:
      storage_plugin.flashkv.module_path: flashkv.connectors.lmcache
      storage_plugin.flashkv.class_name: FlashKVBackend
      flashkv.path: /nvme/kv

Invariants
  - a put holds its memory objects until they are captured, and not longer, however it ends;
  - what isn't loaded whole is None, and its memory goes back to the allocator;
  - a pin is a lease: it ends by unpin, by its time, or with the store.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from flashkv import limits
from flashkv.connectors.checkpoint import Checkpoint
from flashkv.connectors.lmcache_common import ENGINE, store_settings, stored_key
from flashkv.connectors.lmcache_forms import Form, form_of
from flashkv.connectors.lmcache_pins import Pins
from flashkv.connectors.shared_store import SharedStore, StoreSettings
from flashkv.errors import BatchResult, FlashKVError, IdentityError, OptionsError
from flashkv.geometry import KVGeometry
from flashkv.identity import Extra, Identity
from flashkv.memory import Pointers

PREFIX: Final = "flashkv."
OWN_SETTINGS: Final = frozenset({"model", "revision"})


class FlashKVBackend(StoragePluginInterface):  # type: ignore[misc]
    """flashkv behind LMCache's StorageManager. Safe for all threads."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(
            dst_device=dst_device,
            config=config,
            metadata=metadata,
            local_cpu_backend=local_cpu_backend,
            loop=loop,
        )
        if config is None or metadata is None:
            raise OptionsError("flashkv's storage plugin needs LMCache's config and metadata")
        self.form: Form = form_of(config, metadata)
        settings, own = _settings(config, metadata)
        identity, self.weights_reason = _identity(
            config, metadata, own, self.form, settings.extras()
        )
        self._shared = SharedStore.acquire(settings, self.form.geometry, engine=ENGINE)
        self._namespace = self._shared.namespace(identity)
        store = self._shared.store
        self._client = self._shared.client()
        lease_ms = store.options.max_lease_ms if store is not None else limits.LEASE_MS_MAX
        self._pins = Pins(lease_ms)
        self._lock = threading.Lock()
        self._putting: Counter[Any] = Counter()
        self.counts: Counter[str] = Counter()

    def __str__(self) -> str:
        return "FlashKVBackend"

    # ---- looking ----

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether a chunk is present; pin: keep it until unpin, for a bounded time."""
        if pin:
            return self.batched_contains([key], pin=True) == 1
        return self._namespace is not None and self._namespace.contains_one(_name(key))

    def batched_contains(self, keys: Sequence[Any], pin: bool = False) -> int:
        """Leading chunks that are present."""
        if self._namespace is None or not keys:
            return 0
        names = _names(keys)
        if not pin:
            return self._namespace.match(names).count
        match = self._namespace.match(names, lease_ms=self._pins.lease_ms)
        self._pins.add(names[: match.count], match.lease)
        return match.count

    async def batched_async_contains(
        self, lookup_id: str, keys: list[Any], pin: bool = False
    ) -> int:
        """As batched_contains: the index is in memory."""
        del lookup_id
        return self.batched_contains(keys, pin)

    def exists_in_put_tasks(self, key: Any) -> bool:
        with self._lock:
            return key in self._putting

    def pin(self, key: Any) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: Any) -> bool:
        """Gives one pin of the chunk back; whether it is present."""
        self._pins.release(_name(key))
        return self.contains(key)

    # ---- putting ----

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[None]] | None:
        """Queues chunks for storing; None where there is nothing to do."""
        del transfer_spec
        self._client.drain()  # of earlier puts; their outcome is noted where it happened
        if self._namespace is None:
            return None
        with self._lock:
            todo = [(k, o) for k, o in zip(keys, objs, strict=True) if k not in self._putting]
            self._putting.update(key for key, _ in todo)
        if not todo:
            return None
        done: Future[None] = Future()
        for _, memory_object in todo:
            memory_object.ref_count_up()

        def work() -> None:
            try:
                self._put(todo, on_complete_callback)
            except FlashKVError as error:
                self._shared.note("put_failed", str(error))
            finally:
                self._let_go(todo)
                done.set_result(None)

        try:
            self._client.submit("put", work, write=True)
        except FlashKVError as error:
            self._shared.note("put_refused", str(error))
            self._let_go(todo)
            return None
        return [done]

    def _let_go(self, todo: list[tuple[Any, Any]]) -> None:
        for _, memory_object in todo:
            memory_object.ref_count_down()
        with self._lock:
            for key, _ in todo:
                del self._putting[key]

    def _put(self, todo: list[tuple[Any, Any]], on_complete: Callable[[Any], None] | None) -> None:
        namespace = self._namespace
        assert namespace is not None
        by_tokens: dict[int, list[tuple[Any, Any]]] = {}
        for key, memory_object in todo:
            tokens = self.form.tokens_of(memory_object)
            if memory_object.metadata.cached_positions is not None:
                self._shared.note("positions", "chunks with positions of their own aren't stored")
            elif not tokens:
                self._shared.note("form", "chunks of another format or shape aren't stored")
            else:
                by_tokens.setdefault(tokens, []).append((key, memory_object))
        for tokens, rows in by_tokens.items():
            result = namespace.put(
                _names([key for key, _ in rows]),
                _pointers([memory_object for _, memory_object in rows]),
                view=self.form.view(tokens),
            )
            self._shared.note_statuses("put", result)
            stored = ~result.lost
            self.counts["stored"] += int(stored.sum())
            if on_complete is not None:
                for row in np.flatnonzero(stored).tolist():
                    self._tell(on_complete, rows[row][0])

    def _tell(self, on_complete: Callable[[Any], None], key: Any) -> None:
        try:
            on_complete(key)
        except Exception as error:  # noqa: BLE001  (the engine's, which asks for it to be logged)
            self._shared.note("callback", repr(error))

    # ---- getting ----

    def get_blocking(self, key: Any) -> Any:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: Sequence[Any]) -> list[Any]:
        """A memory object for each chunk, or None."""
        objects: list[Any] = [None] * len(keys)
        if self._namespace is None or not keys:
            return objects
        names = _names(keys)
        try:
            lengths = self._namespace.lengths(names)
            for tokens in np.unique(lengths[lengths > 0]).tolist():
                rows = np.flatnonzero(lengths == tokens).tolist()
                self._load(names, rows, tokens, objects)
        except FlashKVError as error:
            self._shared.note("get_failed", str(error))
        self.counts["loaded"] += sum(one is not None for one in objects)
        return objects

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """Memory objects of the leading chunks that could be loaded."""
        del lookup_id, transfer_spec
        objects = await asyncio.to_thread(self.batched_get_blocking, keys)
        count = next((i for i, one in enumerate(objects) if one is None), len(objects))
        for left in objects[count:]:
            if left is not None:
                left.ref_count_down()
        return objects[:count]

    def _load(self, names: list[bytes], rows: list[int], tokens: int, objects: list[Any]) -> None:
        """Loads chunks of equal length into new memory objects."""
        assert self._namespace is not None
        fresh = self._allocate(tokens, len(rows))
        rows = rows[: len(fresh)]
        if not fresh:
            return
        arrived = np.zeros(len(fresh), np.bool_)
        try:
            result: BatchResult = self._namespace.get(
                [names[row] for row in rows],
                _pointers(fresh),
                view=self.form.view(tokens),
                tokens=tokens,
            )
            self._shared.note_statuses("get", result)
            arrived = result.ok
        finally:
            for row, memory_object, ok in zip(rows, fresh, arrived.tolist(), strict=True):
                if ok:
                    objects[row] = memory_object
                else:
                    memory_object.ref_count_down()

    def _allocate(self, tokens: int, count: int) -> list[Any]:
        """So many new memory objects, or fewer where memory ran out."""
        shapes, dtypes = self.form.shapes(tokens), list(self.form.dtypes)
        allocator = self.get_allocator_backend()
        fresh: list[Any] = []
        while len(fresh) < count:
            if len(shapes) == 1:
                one = allocator.allocate(shapes[0], dtypes[0], self.form.format)
            else:
                one = allocator.allocate(shapes, dtypes, self.form.format)
            if one is None:
                self._shared.note("no_memory", "LMCache has no memory left to load chunks into")
                break
            fresh.append(one)
        return fresh

    # ---- the rest ----

    def remove(self, key: Any, force: bool = True) -> bool:
        """Deletes a chunk; without force not a pinned one."""
        return self.batched_remove([key], force=force) == 1

    def batched_remove(self, keys: list[Any], force: bool = True) -> int:
        """Deletes chunks; how many there were."""
        names = [name for name in _names(keys) if force or not self._pins.held(name)]
        if self._namespace is None or not names:
            return 0
        try:
            return int(self._namespace.delete(names).ok.sum())
        except FlashKVError as error:
            self._shared.note("delete_failed", str(error))
            return 0

    def touch_cache(self) -> None:
        """Nothing: the store takes notice of gets."""

    def get_allocator_backend(self) -> Any:
        if self.local_cpu_backend is None:
            raise OptionsError(
                "flashkv's storage plugin needs LMCache's CPU memory to load into",
                advice="Set max_local_cpu_size above 0",
            )
        return self.local_cpu_backend

    def close(self) -> None:
        """Finishes puts and makes them durable. May be called again."""
        self._client.close()
        self._pins.clear()
        self._shared.release()

    def stats(self) -> dict[str, Any]:
        """The store's figures, what went wrong, and why blocks are opaque or weights unknown."""
        own = {
            "opaque_reason": self.form.reason,
            "weights_reason": self.weights_reason,
            "blocks": dict(self.counts),
        }
        return {**own, **self._shared.report()}


def _pointers(objects: list[Any]) -> Pointers:
    """The addresses of memory objects, each one piece of exactly its size."""
    return Pointers(np.array([one.data_ptr for one in objects], np.uint64), objects)


@lru_cache(maxsize=65536)
def _name(key: Any) -> bytes:
    """The key as LMCache writes it, in bytes: model, world size, worker, chunk, dtype, tags."""
    return stored_key(key.to_string())


def _names(keys: Sequence[Any]) -> list[bytes]:
    return list(map(_name, keys))


def _settings(config: Any, metadata: Any) -> tuple[StoreSettings, dict[str, Any]]:
    """(the store's settings, our own), from extra_config. Raises OptionsError."""
    given = {
        name.removeprefix(PREFIX): value
        for name, value in (config.extra_config or {}).items()
        if name.startswith(PREFIX)
    }
    settings = store_settings(given, OWN_SETTINGS)
    if metadata.world_size > 1:  # one process writes a store
        rank = f"rank{metadata.worker_id}-of-{metadata.world_size}"
        settings = replace(settings, path=str(Path(settings.path) / rank))
    return settings, {name: given.get(name) for name in OWN_SETTINGS}


def _identity(
    config: Any, metadata: Any, own: dict[str, Any], form: Form, more: Mapping[str, Extra]
) -> tuple[Identity, str]:
    """(identity, why the weights are known by name only, "" where they are known).

    A model that was named in the settings must be found; LMCache's own name may be any.
    """
    extras: dict[str, Extra] = {
        "engine": "lmcache",
        "chunk_hash": str(getattr(config, "pre_caching_hash_algorithm", "builtin")),
        "order": form.order if form.reason else "canonical",
        **more,
    }
    kv_dtype = str(metadata.kv_dtype).removeprefix("torch.")
    geometry: KVGeometry = form.geometry
    named, revision = own.get("model"), own.get("revision") or None
    try:
        checkpoint = Checkpoint.read(os.fspath(named or metadata.model_name), revision)
        return (
            checkpoint.identity(geometry, kv_dtype=kv_dtype, running={}, own={}, extras=extras),
            "",
        )
    except IdentityError as error:
        if named is not None:
            raise
        reason = str(error)
    return (
        Identity(
            model=str(metadata.model_name),
            revision=str(revision or ""),
            kv_dtype=kv_dtype,
            geometry=geometry,
            extras=extras,
        ),
        f"no checkpoint is found under LMCache's model name: {reason}",
    )
