"""A fixed course of calls on a small simulated store, which goes on whatever fails below it.

Invariants
  - the same seed makes the same calls, up to the one that fails;
  - after each call the account says what the handle shows, and what a crash may leave;
  - no call raises but those that say so, and only what they say; nothing vanishes without a cause
    that the store may have, and what a failure took is reported by the next flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from simulation.account import ABSENT, Account, Allowed
from simulation.device import Device
from simulation.faults import Faults
from simulation.filesystem import SimFiles
from simulation.workload import (
    BLOCK_SHAPE,
    CAPACITY,
    FILL_BYTES,
    FILLERS,
    GEOMETRY,
    KEYS,
    OTHER_KEYS,
    block,
    blocks,
    by_namespace,
    namespace_of,
    options,
    version_of,
)

from flashkv import BlockStatus, DurabilityError, Milestone, Store, StoreError
from flashkv.client import Client
from flashkv.errors import BatchResult, FlashKVError
from flashkv.namespace import Namespace
from flashkv.tickets import Ticket

NEW_KEYS: Final = tuple(b"new-%d" % number for number in range(3))
ALL_KEYS: Final = (*KEYS, *FILLERS, *NEW_KEYS, *OTHER_KEYS)
TICKET_MS: Final = 20_000
LEASE_MS: Final = 60_000


class Course:
    """A store on a simulated device, with the account of what was done to it."""

    def __init__(self, root: Path, seed: int, faults: Faults, *, inline: bool = True) -> None:
        """root: an empty folder. inline: no device thread."""
        self.device = Device(seed)
        self.device.record()
        self.files = SimFiles(root, self.device, inline=inline)
        self.path = root / "store"
        self.account = Account()
        self.versions: dict[bytes, set[int]] = {key: set() for key in ALL_KEYS}
        self.version = 0
        self.errors: list[FlashKVError] = []
        self.evicted_blocks = self.sealed_segments = self.failed_syncs = 0
        self.opened: list[int] = []  # positions at which opening a handle began
        self.faults = faults
        self._options = options(codec="lossless", bloom=seed % 2 == 0, free_floor_bytes=None)
        self._unreported: set[bytes] = set()  # lost, and no flush has said so yet
        self._evicted: Allowed = {}  # what an eviction took that a failure kept out of the log
        self._owed: Allowed = {}  # what an open found taken away by a log that it couldn't keep
        self._store: Store | None = None
        faults.arm(self)

    # ---- what is there ----

    @property
    def store(self) -> Store:
        """The open store."""
        assert self._store is not None
        return self._store

    @property
    def position(self) -> int:
        """Events so far."""
        return self.device.event_count()

    def _namespace(self, key: bytes) -> Namespace:
        return namespace_of(self.store, key)

    def _shown(self, keys: Sequence[bytes]) -> set[bytes]:
        """Which of them the handle shows; no I/O."""
        shown = set()
        for part in by_namespace(keys):
            there = self._namespace(part[0]).contains(part).tolist()
            shown |= {key for key, is_there in zip(part, there, strict=True) if is_there}
        return shown

    def _get(self, keys: Sequence[bytes]) -> tuple[BatchResult, np.ndarray]:
        out = np.full((len(keys), *BLOCK_SHAPE), 0xA5A5, np.uint16)
        return self._namespace(keys[0]).get(keys, out), out

    def _look(self, hits: int) -> dict[bytes, int]:
        """Which version each key shows: one that the account allows, and all that must be there.

        hits: before the store was opened.
        """
        found = {}
        for part in by_namespace(ALL_KEYS):
            result, out = self._get(part)
            if BlockStatus.BUSY in list(result):  # no memory: another time
                assert self.faults.hits() > hits
                self.faults.end()
                result, out = self._get(part)
            for row, key in enumerate(part):
                if result[row] == BlockStatus.OK:
                    found[key] = self._version(key, out[row].tobytes())
                    continue
                assert result[row] in (BlockStatus.MISS, BlockStatus.IO_ERROR), result
                forgets = self.faults.hits() > hits and self.faults.forgets_opening
                self._check_absence(key, forgets)
        return found

    def _version(self, key: bytes, data: bytes) -> int:
        version, allowed = version_of(key, data, self.versions[key]), self.account.of(key)
        revived = self.faults.revives and self.faults.hits()
        assert revived or version in allowed, f"{key!r} holds version {version} of {set(allowed)}"
        return version

    def _check_absence(self, key: bytes, forgets: bool) -> None:
        """A key that must be there is absent only where a fault excuses it."""
        excused = forgets or (self.faults.rots and self.faults.hits())
        allowed = self.account.of(key)
        assert excused or ABSENT in allowed, f"{key!r} is gone, not one of {set(allowed)}"

    # ---- the store's life ----

    def open(self) -> None:
        """Opens the store, or makes it. Where that fails the fault is over, and it must work.

        What it shows then is durable; what it doesn't, unless the disk is too full for a log.
        """
        begun = opening = self.position
        hits = self.faults.hits()
        self.account.mark(begun)
        try:
            self._store = self._opened()
        except FlashKVError as error:
            self._failed(error)
            self.check_descriptors()
            self.faults.end()
            opening = self.position
            self._store = self._opened()
        shown = self._shown(ALL_KEYS)
        found = self._look(hits)
        gone = [key for key in self.account.allowed if key not in found]
        self.account.may_be_gone(gone, begun, self.position)
        unread = {key: self.account.of(key) for key in shown - set(found)}
        self.account.live = found
        self._evicted.clear()
        self._owed = {key: self.account.of(key) for key in gone} if self._is_behind() else {}
        self.account.is_durable(self.position)
        self.account.allowed.update(unread)  # gone, and durably with the next flush
        self.account.allowed.update(self._owed)
        self.account.mark(self.position)
        self.opened.append(opening)

    def _is_behind(self) -> bool:
        assert not self.store.manifest.behind or self.faults.hits()
        return self.store.manifest.behind

    def _opened(self) -> Store:
        given = (None, None) if self.opened else (CAPACITY, GEOMETRY)
        return Store(self.path, *given, self._options, read_only=False, files=self.files)

    def close(self) -> None:
        """Closes the store: what it showed is durable, or it says that something is not."""
        begun = self.position
        self.account.mark(begun)
        store = self._end_handle()
        try:
            store.close()
        except StoreError as error:
            self._failed(error)
            captured = [key for key in self.account.live if len(self.account.of(key)) > 1]
            self.account.may_be_gone(captured, begun, self.position)
        else:
            self._is_durable(None)
        self._unreported.clear()
        self.check_descriptors()

    def crash(self) -> None:
        """Ends the handle as its process' end would: no flush; what is on its way arrives."""
        store = self._end_handle()
        with store.writer_lock:
            store._reach(Milestone.WRITTEN)
            store._stop()
        self._unreported.clear()
        self.check_descriptors()

    def check_descriptors(self) -> None:
        """No store is open: nor are files."""
        assert self.files.open_descriptors() == 0, "descriptors are left open"

    def _end_handle(self) -> Store:
        store, self._store = self.store, None
        assert len(store.leases) == 0
        self.evicted_blocks += store.space.evicted_blocks
        self.sealed_segments += store.writer.sealer.counters.sealed_segments
        self.failed_syncs += store.writer.sealer.counters.failed_syncs
        return store

    def end(self) -> None:
        """Gives the device back; no store is open."""
        assert self._store is None
        self.device.close()

    def _failed(self, error: BaseException) -> None:
        assert isinstance(error, FlashKVError), repr(error)
        assert self.faults.hits(), repr(error)
        assert not isinstance(error, DurabilityError) or error.blocks_lost > 0
        self.errors.append(error)

    # ---- calls ----

    @contextmanager
    def _call(self) -> Iterator[int]:
        """Around a call: takes notice of what vanished. Gives the position where it begins."""
        begun, hits, evicted = self.position, self.faults.hits(), self.store.space.evicted_blocks
        self.account.mark(begun)
        yield begun
        lost = set(self.account.live) - self._shown(list(self.account.live))
        is_evicted = self.store.space.evicted_blocks != evicted
        hit = self.faults.hits() > hits
        if is_evicted:  # what came over the versions that went isn't durable yet
            self.account.may_miss(None, begun)
            unsure = [key for key, may in self.account.allowed.items() if len(may) > 1]
            self.account.may_be_gone(unsure, begun, self.position)
        forgets = is_evicted or (hit and self.faults.forgets_reading)
        for key in lost:
            # A version that came over a durable one and was lost leaves neither.
            came_over = len(self.account.of(key)) > 1 and self.faults.hits() > 0
            self._check_absence(key, forgets or came_over)
            if is_evicted and self.faults.hits():
                self._evicted[key] = self._evicted.get(key, frozenset()) | self.account.of(key)
            if not (forgets or self.faults.rots):
                self._unreported.add(key)
            del self.account.live[key]
        self.account.may_be_gone(lost, begun, self.position)

    def _tried(self, call: Callable[[], Any]) -> Any:
        """What a call returns, or the StoreError that it raised."""
        try:
            return call()
        except StoreError as error:
            self._failed(error)
            return error

    def put(self, keys: Sequence[bytes], *, replace: bool = True) -> bool:
        """Stores a new version of each; whether all went in."""
        with self._call() as begun:
            wanted = self._begin_put(keys, begun, replace=replace)
            data = blocks(keys, self.version)
            return self._end_put(
                keys, self._namespace(keys[0]).put(keys, data, replace=replace), wanted
            )

    def _begin_put(self, keys: Sequence[bytes], begun: int, *, replace: bool) -> dict[bytes, int]:
        self.version += 1
        for key in keys:
            self.versions[key].add(self.version)
        wanted = {k: self.version for k in keys if replace or k not in self.account.live}
        self.account.may_become(dict(wanted), begun)
        return wanted

    def _end_put(
        self, keys: Sequence[bytes], result: BatchResult, wanted: dict[bytes, int]
    ) -> bool:
        for status, key in zip(result, keys, strict=True):
            if key not in wanted:
                assert status == BlockStatus.PRESENT, f"{key!r}: {status.name}"
            elif status == BlockStatus.OK:
                self.account.is_stored({key: wanted[key]})
                self._unreported.discard(key)
            else:
                assert status in (BlockStatus.NO_SPACE, BlockStatus.BUSY), status.name
                assert self.faults.hits(), f"{key!r}: {status.name}"
        return result.all_ok

    def fill(self, count: int) -> None:
        """So many puts that each take a third of a segment or more, under keys in turn."""
        for _ in range(count):
            first = self.version % len(FILLERS)
            self.put([FILLERS[(first + n) % len(FILLERS)] for n in range(FILL_BYTES)])

    def get(self, keys: Sequence[bytes]) -> int:
        """Reads; what arrives is what was put. How many did."""
        with self._call():
            return self._check_got(keys, *self._get(keys))

    def _check_got(self, keys: Sequence[bytes], result: BatchResult, out: np.ndarray) -> int:
        for row, key in enumerate(keys):
            status, version = result[row], self.account.live.get(key, ABSENT)
            if status == BlockStatus.OK:
                assert version is not ABSENT, f"{key!r} is there, which was gone"
                assert out[row].tobytes() == block(key, version).tobytes(), f"{key!r}: other bytes"
            elif status == BlockStatus.BUSY:
                assert self.faults.hits()
            else:
                assert status in (BlockStatus.MISS, BlockStatus.IO_ERROR), status.name
                assert version is ABSENT or not self._shown([key]), f"{key!r} misses and is there"
        return int(result.ok.sum())

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes: for good, unless it says that it failed."""
        self._take_away(keys, lambda: self._namespace(keys[0]).delete(keys))

    def rotate(self) -> None:
        """Retires the other namespace."""
        self._take_away(OTHER_KEYS, lambda: self._namespace(OTHER_KEYS[0]).rotate())

    def _take_away(self, keys: Sequence[bytes], call: Callable[[], Any]) -> None:
        with self._call() as begun:
            self.account.may_become(dict.fromkeys(keys), begun)
            self._is_gone(keys, failed=isinstance(self._tried(call), StoreError))

    def _is_gone(self, keys: Sequence[bytes], *, failed: bool) -> None:
        shown = self._shown(keys)
        if not failed:
            assert not shown, f"{shown} was deleted"
            self.account.is_gone(keys, self.position)
            self._evicted.clear()  # the log is written
            self._owed.clear()
        for key in set(keys) - shown:  # a failed one: gone till the next crash
            self.account.live.pop(key, None)

    def flush(self) -> None:
        """What is shown is durable, unless the log can't be written."""
        with self._call():
            raised = self._tried(self.store.flush)
        self._flushed(raised)

    def _flushed(self, raised: BaseException | None) -> None:
        if raised is None or isinstance(raised, DurabilityError):
            self._is_durable(raised)

    def _is_durable(self, raised: DurabilityError | None) -> None:
        assert raised or not self._unreported, f"no word of the loss of {self._unreported}"
        self._unreported.clear()
        self.account.is_durable(self.position)
        if raised is None:
            self._owed.clear()
        for away in (self._evicted, self._owed):
            for key in away.keys() - self.account.live.keys():
                self.account.allowed[key] = self.account.of(key) | away[key]
        self.account.mark(self.position)

    def lease(self, keys: Sequence[bytes], count: int) -> None:
        """Holds what leads the keys through some puts."""
        with self._call():
            match = self._namespace(keys[0]).match(keys, lease_ms=LEASE_MS)
            assert (match.lease is not None) == (match.count > 0)
            there = [key in self.account.live for key in keys]
            assert match.count == [*there, False].index(False)
        self.fill(count)
        if match.lease is not None:
            # Reclaiming left its segments alone; a fault may have taken blocks in them.
            gone = set(keys[: match.count]) - self._shown(keys[: match.count])
            assert not gone or self.faults.hits()
            match.lease.release()

    def tickets(self, keys: Sequence[bytes]) -> None:
        """The same through a client: a put till it is durable, a get, a lookup, a delete."""
        with self.store.client() as client:
            with self._call() as begun:
                wanted = self._begin_put(keys, begun, replace=True)
                data, space = blocks(keys, self.version), self._namespace(keys[0])
                ticket = client.submit_put(
                    space, keys, data, replace=True, notify=Milestone.DURABLE
                )
                self._finished(client, ticket)
                self._end_put(keys, ticket.result, wanted)
            self._flushed(ticket.error)
            with self._call():
                out = np.full((len(keys), *BLOCK_SHAPE), 0xA5A5, np.uint16)
                ticket = self._finished(client, client.submit_get(space, keys, out))
                self._check_got(keys, ticket.result, out)
            ticket = self._finished(client, client.submit_contains(space, keys))
            assert ticket.result.tolist() == [key in self.account.live for key in keys]
            with self._call() as begun:
                self.account.may_become(dict.fromkeys(keys[:1]), begun)
                ticket = self._finished(client, client.submit_delete(space, keys[:1]))
                self._is_gone(keys[:1], failed=ticket.error is not None)
            assert client.open_tickets == 0

    def _finished(self, client: Client, ticket: Ticket) -> Ticket:
        assert ticket.wait(TICKET_MS), f"{ticket} hangs"
        drained = client.drain()
        assert drained == [ticket]
        if ticket.error is not None:
            assert isinstance(ticket.error, StoreError), repr(ticket.error)
            self._failed(ticket.error)
        return ticket

    # ---- all of them ----

    def run(self) -> None:
        """The course; leaves the store open."""
        self.open()
        self.put(KEYS[:4])
        self.put(OTHER_KEYS[:2])
        self.flush()
        self.get(KEYS)
        self.put(KEYS[2:])
        self.put(KEYS[:3], replace=False)
        self.delete(KEYS[1:2])
        self.lease(KEYS[2:4], 3)
        self.flush()
        self.rotate()
        self.put(OTHER_KEYS[1:])
        self.tickets(KEYS[3:])
        self.close()
        self.open()
        self.fill(4)
        self.put(KEYS[:3])
        self.delete(KEYS[4:])
        self.put(KEYS[4:])
        self.crash()
        self.open()
        self.put(KEYS[1:3])
        self.flush()
        self.delete(KEYS[2:3])
        self.fill(2)
        self.get(KEYS)
