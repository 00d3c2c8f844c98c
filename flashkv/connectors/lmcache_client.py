"""LMCache's multi-process server: the object that its `native_plugin` L2 adapter drives.

    {"type": "native_plugin", "module_path": "flashkv.connectors.lmcache",
     "class_name": "FlashKVClient", "adapter_params": {"path": "/nvme/kv", "model": "NAME"}}

The adapter submits batches of keys and bare buffers and waits on one eventfd; these are tickets of
the store's own client.

Invariants
  - submitting never waits and never raises: what can't be done is told by the completion;
  - every submission comes out of drain_completions() once;
  - a key whose stored size is not that of the buffer is a miss, and makes room for the next store.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashkv.connectors.checkpoint import Checkpoint
from flashkv.connectors.lmcache_common import ENGINE, store_settings, stored_key
from flashkv.connectors.opaque import OPAQUE_GEOMETRY, split
from flashkv.connectors.padded import get_padded, padded_form, put_padded
from flashkv.connectors.shared_store import SharedStore
from flashkv.errors import BlockStatus, FlashKVError, OptionsError
from flashkv.identity import Extra, Identity
from flashkv.namespace import Namespace

OWN_PARAMS: Final = frozenset({"model", "revision", "kv_dtype"})
OPAQUE_REASON: Final = "native_plugin hands over bare buffers, without shape or dtype"

Completion: TypeAlias = "tuple[int, bool, str, list[bool] | None]"


class FlashKVClient:
    """A client of one store, for LMCache's NativeConnectorL2Adapter. Safe for all threads.

    path, capacity, codec, salt, options: see StoreSettings. model, revision: what LMCache serves, a
    folder or a name of the hub; with it, blocks are bound to these weights, else to LMCache's own
    keys (model name, rank, chunk hash) only. kv_dtype: where two servers of one model differ in it.
    """

    def __init__(self, **params: Any) -> None:
        settings = store_settings(params, OWN_PARAMS)
        identity = _identity(params, settings.extras())
        self._shared = SharedStore.acquire(settings, OPAQUE_GEOMETRY, engine=ENGINE)
        self._namespace = self._shared.namespace(identity)
        padded = replace(identity, extras={**identity.extras, "form": "padded"})
        self._padded = self._shared.namespace(padded)
        self._client = self._shared.client()
        self._lock = threading.Lock()
        self._refused: deque[Completion] = deque()
        self._refusals = 0
        self._closed = False
        self.counts: Counter[str] = Counter()

    # ---- the interface ----

    def event_fd(self) -> int:
        """Readable while completions wait."""
        return self._client.fileno()

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """Reads blocks into buffers of exactly their size; the completion has a bool a key."""
        return self._submit("get", lambda: self._get(keys, buffers), write=False)

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """Stores buffers; the completion says whether all of them are stored."""
        return self._submit("set", lambda: self._set(keys, buffers), write=True)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Looks keys up; the completion has a bool a key."""
        return self._submit("exists", lambda: self._exists(keys), write=False)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Deletes keys; the completion has a bool a key: whether it was there."""
        return self._submit("delete", lambda: self._delete(keys), write=True)

    def drain_completions(self) -> list[Completion]:
        """(id, whether it went well, error, results) of what is over, each once. Never waits."""
        done = [_completion(ticket) for ticket in self._client.drain()]
        while self._refused:
            done.append(self._refused.popleft())
        return done

    def close(self) -> None:
        """Finishes what was submitted and makes it durable. May be called again."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._client.close()
            self._shared.release()

    def stats(self) -> dict[str, Any]:
        """The store's figures, what went wrong, and why blocks are opaque."""
        own = {"opaque_reason": OPAQUE_REASON, "blocks": dict(self.counts)}
        return {**own, **self._shared.report()}

    # ---- on the store's lanes ----

    def _submit(self, kind: str, call: Callable[[], Any], *, write: bool) -> int:
        try:
            return self._client.submit(kind, call, write=write).id
        except FlashKVError as error:
            self._shared.note(f"{kind}_refused", str(error))
            with self._lock:
                self._refusals += 1
                self._refused.append((-self._refusals, False, str(error), None))
                if not self._closed:
                    os.eventfd_write(self._client.fileno(), 1)
                return -self._refusals

    def _get(self, keys: Sequence[str], buffers: Sequence[Any]) -> tuple[bool, list[bool]]:
        if self._namespace is None or self._padded is None or not len(keys):
            return True, [False] * len(keys)
        packed = _encoded(keys)
        loaded = np.zeros(len(keys), np.bool_)
        for size, rows in _by_size(buffers).items():
            some, memory, form = _pick(packed, rows), _pick(buffers, rows), split(size)
            namespace = self._namespace
            if form is not None:
                result = namespace.get(some, memory, group=form[0], tokens=form[1])
            else:
                padded = padded_form(size)
                if padded is None:
                    self._shared.note("get_size", f"there are no blocks of {size} bytes")
                    continue
                namespace = self._padded
                result = get_padded(namespace, some, memory, padded)
            self._shared.note_statuses("get", result)
            loaded[rows] = result.ok
            if not result.all_ok:
                self._retire_other_sizes(namespace, some, result.statuses)
        self.counts["loaded"] += int(loaded.sum())
        return True, loaded.tolist()

    def _retire_other_sizes(
        self, namespace: Namespace, keys: Sequence[bytes], statuses: NDArray[np.uint8]
    ) -> None:
        """A key that is there and was a miss has another size: what comes next shall replace it."""
        missed = [keys[row] for row in np.flatnonzero(statuses == BlockStatus.MISS).tolist()]
        if not missed:
            return
        found = np.flatnonzero(namespace.contains(missed)).tolist()
        if found:
            self._shared.note("other_size", "a block has another size than was asked for")
            namespace.delete([missed[row] for row in found])

    def _set(self, keys: Sequence[str], buffers: Sequence[Any]) -> tuple[bool, None]:
        if self._namespace is None or self._padded is None:
            return False, None
        packed = _encoded(keys) if len(keys) else []
        stored = 0
        for size, rows in _by_size(buffers).items():
            some, memory, form = _pick(packed, rows), _pick(buffers, rows), split(size)
            if form is not None:
                result = self._namespace.put(some, memory, group=form[0], tokens=form[1])
            else:
                padded = padded_form(size)
                if padded is None:
                    self._shared.note("set_size", f"blocks of {size} bytes can't be stored")
                    continue
                result = put_padded(self._padded, some, memory, padded)
            self._shared.note_statuses("set", result)
            stored += len(rows) - int(result.lost.sum())
        self.counts["stored"] += stored
        return stored == len(keys), None

    def _exists(self, keys: Sequence[str]) -> tuple[bool, list[bool]]:
        if self._namespace is None or self._padded is None or not len(keys):
            return True, [False] * len(keys)
        packed = _encoded(keys)
        found = self._namespace.contains(packed)
        if not found.all():
            found |= self._padded.contains(packed)
        return True, found.tolist()

    def _delete(self, keys: Sequence[str]) -> tuple[bool, list[bool]]:
        if self._namespace is None or self._padded is None or not len(keys):
            return True, [False] * len(keys)
        packed = _encoded(keys)
        gone = self._namespace.delete(packed).ok
        if self._padded.contains(packed).any():
            gone |= self._padded.delete(packed).ok
        return True, gone.tolist()


def _by_size(buffers: Sequence[Any]) -> dict[int, list[int]]:
    """Rows of each size in bytes."""
    lengths = [buffer.nbytes for buffer in buffers]
    if len(set(lengths)) == 1:
        return {lengths[0]: list(range(len(lengths)))}
    rows: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        rows.setdefault(length, []).append(row)
    return rows


def _completion(ticket: Any) -> Completion:
    if ticket.error is not None:
        return ticket.id, False, str(ticket.error), None
    well, results = ticket.result
    return ticket.id, well, "" if well else "not all blocks were stored", results


def _pick(items: Sequence[Any], rows: list[int]) -> Sequence[Any]:
    return items if len(rows) == len(items) else [items[row] for row in rows]


def _encoded(keys: Sequence[str]) -> list[bytes]:
    return list(map(stored_key, keys))


def _identity(params: dict[str, Any], more: Mapping[str, Extra]) -> Identity:
    """What adapter_params tell; the keys carry LMCache's model name, rank, group and salt.

    Raises OptionsError, IdentityError.
    """
    for name in OWN_PARAMS:
        if not isinstance(params.get(name, ""), (str, os.PathLike)):
            raise OptionsError(f"{name} must be text", value=repr(params[name]))
    extras: dict[str, Extra] = {"engine": "lmcache", "interface": "l2", **more}
    kv_dtype = str(params.get("kv_dtype", ""))
    model = params.get("model", "")
    if not model:
        return Identity(model="lmcache", kv_dtype=kv_dtype, geometry=OPAQUE_GEOMETRY, extras=extras)
    checkpoint = Checkpoint.read(os.fspath(model), str(params.get("revision", "")) or None)
    return checkpoint.identity(
        OPAQUE_GEOMETRY, kv_dtype=kv_dtype, running={}, own={}, extras=extras
    )
