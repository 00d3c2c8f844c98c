"""Random lives of a store, and the account of what they said, kept apart from them.

A Life puts, replaces, reads, flushes, deletes, rotates, closes and opens. Known hears what it says
and asks a store that was opened later what is there.

Invariants
  - a life says what it is about to do before each call, and what is done after it;
  - what it said after flush() returned is there with equal bytes, or was evicted: eviction takes
    the oldest first, so that what it took lies before all that is there;
  - what it said after delete() or rotate() returned is gone for good; so is what was superseded,
    and what was refused or reported lost;
  - between the two words either state will do, of each block as a whole.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from store_support import IDENTITY, MIB, Store, check_rest, open_store

from flashkv import BlockStatus, DurabilityError, FlashKVError, Identity

SHAPE = (2, 2, 2, 16, 64)
"""16 KiB: layers, planes, heads, tokens, elements."""
VALUES = 8 * 1024
IDENTITIES = (IDENTITY, Identity(model="test/other", revision="1"))
"""A key belongs to the namespace of its parity."""
CAPACITY = 32 * MIB
KEPT_BLOCKS = (7 - 3) * 200
"""That were put later than an evicted one at least. Seven segments of 4 MiB fit the capacity, and
all are full then but the one that went, one that is about to go and the one that is being filled; a
segment holds 200 blocks or more: each coded as itself, with a header page.
"""
KEYS_MAX = 20_000

Say = Callable[[str, Sequence[int]], None]


@dataclass(frozen=True)
class Task:
    """What a life is to do. stored: keys that are there, all flushed."""

    path: str
    backend: str
    seed: int
    next_key: int
    version: int  # the last that was given
    stored: list[int]


# ---- data --------------------------------------------------------------------------------------


def _pool() -> np.ndarray:
    values = np.random.default_rng(7).standard_normal(1 << 20, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


POOL = _pool()
"""Like activations; blocks are cut from it, since making each anew would take longer than I/O."""


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") + b"-key"


def block(number: int, version: int) -> np.ndarray:
    """What a key holds in a version: it begins with both, and no two are alike in any page."""
    mixed = (number * 0x9E3779B1 + version * 0x85EBCA77) & 0xFFFFFFFF
    at = mixed % (len(POOL) - VALUES)
    data = POOL[at : at + VALUES] ^ np.uint16(mixed >> 25)
    data[:4] = np.array([number, version], np.uint32).view(np.uint16)
    return data.reshape(SHAPE)


def blocks(numbers: Sequence[int], version: int) -> np.ndarray:
    return np.stack([block(number, version) for number in numbers])


def version_of(number: int, data: np.ndarray) -> int:
    """The version that a block says it has; asserts that it is that block, whole."""
    said, version = data.reshape(-1)[:4].view(np.uint32).tolist()
    assert said == number, f"block {number} holds another block's bytes"
    assert np.array_equal(data, block(number, version)), f"block {number} is not whole"
    return int(version)


# ---- a life ------------------------------------------------------------------------------------


class Life:
    """Random use of the store in `task.path`."""

    def __init__(self, task: Task, say: Say, *, steady: bool = True) -> None:
        """steady: nothing may fail. Else the operating system may refuse anything."""
        self.task = task
        self.say = say
        self.steady = steady
        self.random = random.Random(task.seed)
        self.codec = self.random.choice(["raw", "lossless"])
        self.next_key = task.next_key
        self.version = task.version
        self.known = list(task.stored)
        self.pending: list[int] = []  # put and not flushed
        self.errors: Counter[str] = Counter()
        self.hits = 0  # blocks that were read
        self.store: Store | None = None
        self.attempt(self.open)
        self.say("ready", [])

    def deed(self) -> None:
        """One random thing."""
        if self.store is None:
            self.attempt(self.open)
            return
        deeds = [self.put, self.flush, self.read, self.delete, self.rotate, self.reopen]
        self.attempt(self.random.choices(deeds, [60, 14, 12, 12, 1, 1])[0])

    def attempt(self, deed: Callable[[], None]) -> None:
        try:
            deed()
        except FlashKVError as error:
            if self.steady:
                raise
            self.errors[type(error).__name__] += 1

    def open(self) -> None:
        self.store = open_store(
            self.task.path, None, capacity=None, backend=self.task.backend, codec=self.codec
        )
        self.names = [self.store.namespace(identity) for identity in IDENTITIES]
        if self.store.stats().lost_blocks:
            assert not self.steady
            self.say("tail", [])  # opening could not make it durable: what it holds is gone

    def put(self) -> None:
        parity = self.random.randrange(2)
        first = self.next_key + (self.next_key + parity) % 2
        keys = list(range(first, first + 2 * self.random.randrange(1, 40), 2))
        self.next_key = keys[-1] + 1
        known = [key for key in self.known if key % 2 == parity]
        if self.random.random() < 0.5:
            keys += self.random.sample(known, min(len(known), self.random.randrange(1, 40)))
        self.version += 1
        self.say("putting", [self.version, *keys])
        result = self.names[parity].put(
            [key_of(key) for key in keys], blocks(keys, self.version), replace=True
        )
        refused = [key for key, ok in zip(keys, result.ok, strict=True) if not ok]
        if refused:
            assert not self.steady, result
            assert set(result.counts()) <= {"OK", "NO_SPACE", "BUSY"}, result
            self.say("refused", [self.version, *refused])
        self.say("put", [])
        self.pending += sorted(set(keys) - set(refused) - set(self.pending))

    def flush(self) -> None:
        assert self.store
        self.say("flushing", [])
        try:
            self.store.flush()
        except DurabilityError:
            if self.steady:
                raise
            there = {key for key in self.pending if self._shows(key)}
            self.say("lost", [key for key in self.pending if key not in there])
            self.pending = [key for key in self.pending if key in there]
        self._flushed()

    def _shows(self, key: int) -> bool:
        return bool(self.names[key % 2].contains_one(key_of(key)))

    def _flushed(self) -> None:
        self.say("flushed", self.pending)
        known = set(self.known)
        self.known += [key for key in self.pending if key not in known]
        self.pending = []

    def read(self) -> None:
        """What is given is right; what isn't given needn't be."""
        parity = self.random.randrange(2)
        keys = [key for key in self.known + self.pending if key % 2 == parity]
        keys = self.random.sample(keys, min(len(keys), 30))
        out = np.zeros((len(keys), *SHAPE), np.uint16)
        result = self.names[parity].get([key_of(key) for key in keys], out)
        for row, status in enumerate(result):
            if status == BlockStatus.OK:
                version_of(keys[row], out[row])
                self.hits += 1
            else:
                assert status == BlockStatus.MISS or not self.steady
                assert status in (BlockStatus.MISS, BlockStatus.IO_ERROR)

    def delete(self) -> None:
        if self.known:
            parity = self.random.choice(self.known) % 2
            known = [key for key in self.known if key % 2 == parity]
            gone = self.random.sample(known, min(len(known), 3))
            keys = [key_of(key) for key in gone]
            self._gone("delet", gone, gone, lambda: self.names[parity].delete(keys))

    def rotate(self) -> None:
        parity = self.random.randrange(2)
        gone = [key for key in self.known + self.pending if key % 2 == parity]
        self._gone("rotat", [parity], gone, self.names[parity].rotate)

    def _gone(
        self, stem: str, said: list[int], gone: list[int], call: Callable[[], object]
    ) -> None:
        self.say(f"{stem}ing", said)
        dead = set(gone)
        self.known = [key for key in self.known if key not in dead]
        self.pending = [key for key in self.pending if key not in dead]
        call()
        self.say(f"{stem}ed", said)

    def reopen(self) -> None:
        self.close()
        self.open()

    def close(self) -> None:
        """As a user would: after it nothing is held, be it that it failed."""
        store, self.store = self.store, None
        if store is not None:
            self.say("closing", [])
            try:
                store.close()
            except FlashKVError:
                assert store.closed
                self.say("doubtful", self.pending)
                self.pending = []
                raise
            self._flushed()

    def abandon(self) -> None:
        """The end, whatever the store says to it."""
        with suppress(FlashKVError):
            self.close()


# ---- the account -------------------------------------------------------------------------------


@dataclass
class Known:
    """Which versions of each key may be there. None: it may be absent."""

    kept_blocks: int = KEPT_BLOCKS
    allowed: dict[int, set[int | None]] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)
    place: dict[tuple[int, int], int] = field(default_factory=dict)
    """(key, version) -> how many blocks were put before."""
    blocks_put: int = 0
    next_key: int = 0
    version: int = 0
    deeds: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    heard: deque[tuple[str, list[int]]] = field(default_factory=lambda: deque(maxlen=1000))

    def task(self, path: object, backend: str, seed: int) -> Task:
        return Task(str(path), backend, seed, self.next_key, self.version, self.stored())

    def stored(self) -> list[int]:
        return sorted(key for key, versions in self.allowed.items() if versions != {None})

    def story(self, key: int) -> list[str]:
        """What was said of a key lately, for who looks for a fault."""
        return [
            f"{verb} {numbers[0] if numbers else ''}"
            for verb, numbers in self.heard
            if key in numbers or verb not in ("putting", "refused", "lost", "flushed", "deleted")
        ][-40:]

    # ---- hearing ----

    def hear(self, verb: str, numbers: Sequence[int]) -> None:
        self.deeds[verb] += 1
        self.heard.append((verb, list(numbers)))
        if verb == "putting":
            self._putting(*numbers)
        elif verb == "refused":
            for key in numbers[1:]:
                self._unsay(key, numbers[0])
        elif verb == "lost":
            for key in numbers:
                self._unsay(key, self.latest[key])
                self.allowed[key].add(None)
        elif verb == "doubtful":  # lost, and with them what they superseded
            for key in numbers:
                self.allowed[key].add(None)
        elif verb == "tail":
            for versions in self.allowed.values():
                versions.add(None)
        elif verb == "flushed":
            for key in numbers:
                self.allowed[key] = {self.latest[key]}
        elif verb in ("deleting", "deleted", "rotating", "rotated"):
            if verb.startswith("rotat"):
                numbers = [key for key in self.allowed if key % 2 == numbers[0]]
            for key in numbers:
                if verb.endswith("ing"):
                    self.allowed[key].add(None)
                else:
                    self.allowed[key] = {None}

    def _putting(self, version: int, *keys: int) -> None:
        self.version = version
        for key in keys:
            self.allowed.setdefault(key, {None}).add(version)
            self.latest[key] = version
            self.place[key, version] = self.blocks_put
            self.blocks_put += 1
            self.next_key = max(self.next_key, key + 1)

    def _unsay(self, key: int, version: int) -> None:
        self.allowed[key].discard(version)
        self.latest[key] = max((v for v in self.allowed[key] if v is not None), default=0)

    # ---- asking ----

    def check(self, store: Store, *, whole: bool = True) -> None:
        """What the next process finds; that was made durable by opening.

        whole: nothing can have been damaged, unfinished directories and headers included.
        """
        found = {**self._read(store, 0), **self._read(store, 1)}
        present = [self.place[key, version] for key, version in found.items()]
        evicted: list[tuple[int, int]] = []  # (place, key)
        for key, allowed in self.allowed.items():
            version = found.get(key)
            if version is None and None not in allowed:
                flushed = min(v for v in allowed if v is not None)  # later ones may never have been
                evicted.append((self.place[key, flushed], key))
            self.allowed[key] = {version}
            if version is not None:
                self.latest[key] = version
        self._forget()
        if evicted:
            self.evicted += len(evicted)
            newest, key = max(evicted)
            oldest = min(present, default=self.blocks_put)
            assert newest < oldest, f"flushed block {key} is lost: {self.story(key)}"
            assert self.blocks_put - newest > self.kept_blocks, "flushed blocks are lost, too many"
        stats = check_rest(store)
        assert stats.blocks == len(found)
        assert stats.damaged_blocks == 0
        assert not stats.recovery["manifest_rebuilt"]
        assert stats.recovery["damaged_log_entries"] == 0
        if whole:
            assert stats.recovery["damaged_headers"] == 0
            assert stats.recovery["damaged_directories"] == 0

    def _read(self, store: Store, parity: int) -> dict[int, int]:
        """The version that each key of a namespace has; asserts that it is an allowed one."""
        ns = store.namespace(IDENTITIES[parity])
        keys = [key for key in sorted(self.allowed) if key % 2 == parity]
        keys = [keys[row] for row in np.flatnonzero(ns.contains([key_of(key) for key in keys]))]
        out = np.zeros((len(keys), *SHAPE), np.uint16)
        result = ns.get([key_of(key) for key in keys], out)
        assert result.all_ok, result
        found = {key: version_of(key, out[row]) for row, key in enumerate(keys)}
        for key, version in found.items():
            allowed = self.allowed[key]
            assert version in allowed, (
                f"block {key} has version {version}, not one of {allowed}: {self.story(key)}"
            )
        return found

    def _forget(self) -> None:
        """Keys that are long gone; that they stay away shows in the number of blocks."""
        if len(self.allowed) > KEYS_MAX:
            gone = sorted(key for key, versions in self.allowed.items() if versions == {None})
            for key in gone[: KEYS_MAX // 2]:
                del self.allowed[key]
            self.place = {at: n for at, n in self.place.items() if at[0] in self.allowed}


__all__ = ["CAPACITY", "Known", "Life", "Task"]
