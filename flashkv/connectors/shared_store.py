"""A store as connectors hold it: opened once a process, given up without harm to the engine.

    shared = SharedStore.acquire(StoreSettings.parse(extra_config, "vLLM"), geometry)
    if shared.store is not None: ...
    shared.release()

Invariants
  - one path is one handle in a process, whoever asks: an engine's scheduler and its worker, or
    several ranks, share it, and the last to release it closes it;
  - a store that can't be had (locked by another process, damaged beyond opening, no space, no
    rights) is said once and leaves the engine without a store, never with an exception; what an
    operator wrote wrongly into the settings is an exception;
  - what goes wrong again and again is logged once, and counted each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import flashkv
from flashkv import limits
from flashkv.client import Client, detached_client
from flashkv.errors import (
    BatchResult,
    BlockStatus,
    CapacityError,
    FlashKVError,
    GeometryError,
    NotAStoreError,
    OptionsError,
    StoreError,
)
from flashkv.geometry import KVGeometry
from flashkv.identity import Extra, Identity, Shard
from flashkv.namespace import Namespace
from flashkv.options import Options
from flashkv.store import Store

log = logging.getLogger(__name__)

DEFAULT_CAPACITY: Final = "64GiB"

_WHAT: Final = {
    BlockStatus.IO_ERROR: "the device reports errors",
    BlockStatus.BLOCK_TOO_LARGE: "blocks are larger than a quarter of a segment",
    BlockStatus.NO_SPACE: "there is no space, on the disk or within the capacity",
    BlockStatus.BUSY: "memory for work in flight ran out",
}


@dataclass(frozen=True)
class StoreSettings:
    """What an engine's configuration says about the store, the same words in every engine.

    path      folder of the store; made where there is none.
    capacity  most bytes on disk: an int, or text as "64GiB".
    codec     "lossless", "fast", "auto" or "raw"; None: the default, or FLASHKV_CODEC.
    salt      text that separates keys that must not meet, as of two tenants.
    options   further fields of flashkv.Options.
    """

    path: str
    capacity: int | str = DEFAULT_CAPACITY
    codec: str | None = None
    salt: str = ""
    options: Mapping[str, Any] | None = None

    @classmethod
    def parse(
        cls, given: Mapping[str, Any], engine: str, *, others: frozenset[str] = frozenset()
    ) -> StoreSettings:
        """Settings from an engine's dictionary. others: keys that are not the store's.

        Raises OptionsError: a key that nobody knows, no path, an impossible value.
        """
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(names) - others)
        if unknown:
            raise OptionsError(
                f"flashkv's settings in {engine} have no {unknown[0]!r}",
                value=", ".join(unknown),
                limit=", ".join([*names, *sorted(others)]),
            )
        path = given.get("path")
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise OptionsError(
                f"flashkv's settings in {engine} need a path",
                value=repr(path),
                advice='Give the folder of the store, as "path": "/nvme/kv"',
            )
        chosen = {name: given[name] for name in names if name in given}
        settings = cls(**{**chosen, "path": os.fspath(path)})
        if not isinstance(settings.salt, str):
            raise OptionsError("salt must be text", value=repr(settings.salt))
        settings.store_options()  # raises what is wrong with them now
        return settings

    def extras(self) -> dict[str, Extra]:
        """What of the settings goes into an identity, where keys are the engine's own."""
        return {"salt": hashlib.sha256(self.salt.encode()).hexdigest()} if self.salt else {}

    def store_options(self) -> Options:
        """The options to open the store with. Raises OptionsError."""
        given = dict(self.options or {})
        try:
            options = Options(**given)
        except TypeError:
            known = [field.name for field in fields(Options)]
            wrong = sorted(set(given) - set(known))
            raise OptionsError(
                "there are no such options of a store",
                value=", ".join(map(str, wrong)),
                limit=", ".join(known),
            ) from None
        return options if self.codec is None else replace(options, codec=self.codec)


class SharedStore:
    """A process' use of one store, or of none, by one connector.

    store   None where the store can't be had; `reason` then says why.
    events  what went wrong so far, by a short word, each time counted.
    """

    def __init__(self, store: Store | None, reason: str, engine: str, path: Path) -> None:
        self.store = store
        self.reason = reason
        self.events: Counter[str] = Counter()
        self._engine = engine
        self._path = path
        self._released = False

    @classmethod
    def acquire(
        cls, settings: StoreSettings, geometry: KVGeometry, *, engine: str, say: bool = True
    ) -> SharedStore:
        """The process' handle of settings.path, opened where it is the first to ask.

        geometry: of blocks, used where the store is made now. say: False where another part of the
        engine says why there is none. Raises OptionsError, CapacityError: what the operator must
        change.
        """
        path = Path(settings.path).expanduser().absolute()
        try:
            store = _HANDLES.take(path, settings, geometry)
        except (OptionsError, CapacityError, NotAStoreError):
            raise
        except (StoreError, FlashKVError, OSError) as error:
            reason = str(error)
            if say:
                log.error("%s goes on without the flashkv store at %s: %s", engine, path, reason)
            return cls(None, reason, engine, path)
        return cls(store, "", engine, path)

    def namespace(self, identity: Identity, shard: Shard | None = None) -> Namespace | None:
        """The namespace of an identity; None without a store, or where it can't be had (said once).

        A store that was made for another model takes this one's blocks too.
        """
        if self.store is None:
            return None
        try:
            return self.store.namespace(identity, shard=shard)
        except (StoreError, OSError) as error:
            self.note("namespace", str(error))
            return None

    def client(self, *, max_tickets: int = limits.TICKETS_MAX) -> Client:
        """A client of the store; without one, of no store: its calls find nothing to work on."""
        if self.store is None:
            return detached_client(max_tickets)
        return self.store.client(max_tickets=max_tickets)

    def report(self) -> dict[str, Any]:
        """For operators: the store's figures, None without an open one; what went wrong."""
        open_store = self.store if self.store is not None and not self.store.closed else None
        return {
            "no_store_reason": self.reason,
            "events": dict(self.events),
            "store": None if open_store is None else open_store.stats().as_dict(),
        }

    def note(self, word: str, reason: str) -> None:
        """Something went wrong: counted under `word`, and logged the first time."""
        self.events[word] += 1
        if self.events[word] == 1:
            log.warning(
                "%s, flashkv store at %s: %s (%s; later ones are counted, not logged)",
                self._engine,
                self._path,
                reason,
                word,
            )

    def note_statuses(self, call: str, result: BatchResult) -> None:
        """Notes the failures among the statuses of a put or a get; misses are none."""
        if not result.lost.any():
            return
        for status, what in _WHAT.items():
            if (result.statuses == status).any():
                self.note(f"{call}_{status.name.lower()}", what)

    def release(self) -> None:
        """Gives the handle back; the last one to do so closes the store. Twice is once."""
        if self._released or self.store is None:
            return
        self._released = True
        try:
            _HANDLES.give_back(self._path)
        except (StoreError, OSError) as error:
            self.note("close", str(error))


def _open(path: Path, capacity: int | str, geometry: KVGeometry, options: Options) -> Store:
    """The store; one that was made for another geometry takes this one's namespaces too."""
    try:
        return flashkv.open(path, capacity=capacity, geometry=geometry, options=options)
    except GeometryError:
        return flashkv.open(path, capacity=capacity, options=options)


class _Handles:
    """Open stores of this process, by path, with the number of their users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Path, tuple[Store, int]] = {}

    def take(self, path: Path, settings: StoreSettings, geometry: KVGeometry) -> Store:
        options = settings.store_options()
        with self._lock:
            store, users = self._open.get(path, (None, 0))
            if store is None or store.closed:
                users = 0
                store = _open(path, settings.capacity, geometry, options)
            self._open[path] = (store, users + 1)
            return store

    def give_back(self, path: Path) -> None:
        with self._lock:
            if path not in self._open:
                return
            store, users = self._open[path]
            if users > 1:
                self._open[path] = (store, users - 1)
                return
            del self._open[path]
        store.close()

    def forget(self) -> None:
        """In a forked child: the handles are the parent's."""
        self._lock = threading.Lock()
        self._open = {}

    def users(self, path: Path) -> int:
        with self._lock:
            return self._open.get(path, (None, 0))[1]


_HANDLES: Final = _Handles()
with contextlib.suppress(AttributeError):  # where there is no fork
    os.register_at_fork(after_in_child=_HANDLES.forget)
