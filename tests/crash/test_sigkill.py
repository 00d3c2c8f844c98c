"""A process that uses a store is killed, again and again, at random moments.

The child says what it did before each call and after it, and this process keeps the account:
  - what it said after flush() returned is there with equal bytes, or was evicted: eviction takes
    the oldest first, so that what it took lies before all that is there, and only so much as the
    capacity asks for;
  - what it said after delete() or rotate() returned is gone for good; so is what was superseded;
  - between the two words either state will do, of each block as a whole.
Then the store takes no more of the disk than its capacity, and it opens about as fast as a store
that was closed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from sigkill_child import IDENTITIES, SHAPE, Nursery, Task, block, key_of
from store_support import BACKENDS, GQA, MIB, Store, check_rest, du_bytes, open_store

from flashkv import BlockStatus

CAPACITY = 32 * MIB
SEGMENTS = 7
"""Of 4 MiB: what fits the capacity beside the metadata."""
BLOCKS_A_SEGMENT = 200
"""At least: each coded as itself, with a header page."""
KEPT_BLOCKS = (SEGMENTS - 3) * BLOCKS_A_SEGMENT
"""Blocks that were put later than an evicted one: all segments are full then but the one that went,
one that is about to go and the one being filled."""
KEYS_MAX = 20_000
OPENING_SLACK_S = 0.005
"""Two medians of some 10 ms each on a machine that does other things too."""


@dataclass
class Opening:
    """Times of the first open after a kill and of one after a close, of the same store."""

    killed_s: list[float] = field(default_factory=list)
    clean_s: list[float] = field(default_factory=list)
    tail_bytes: list[int] = field(default_factory=list)

    def verdict(self) -> tuple[bool, str]:
        """Whether it was swift enough, and the figures."""
        killed, clean = median(self.killed_s), median(self.clean_s)
        tail = median(self.tail_bytes)
        said = (
            f"open after a kill {1e3 * killed:.1f} ms, after a close {1e3 * clean:.1f} ms "
            f"(x {killed / clean:.2f}), tail {tail / MIB:.1f} MiB, medians of {len(self.clean_s)}"
        )
        return killed <= 2 * clean + tail / 1e9 + OPENING_SLACK_S, said


@dataclass
class Known:
    """What the children said: which versions of each key may be there. None: it may be absent."""

    allowed: dict[int, set[int | None]] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)
    place: dict[tuple[int, int], int] = field(default_factory=dict)
    """(key, version) -> how many blocks were put before."""
    blocks_put: int = 0
    next_key: int = 0
    version: int = 0
    deeds: Counter[str] = field(default_factory=Counter)
    evicted: int = 0

    def listen(self, lines: list[bytes]) -> None:
        for line in lines:
            verb, *words = line.decode().split()
            numbers = list(map(int, words))
            self.deeds[verb] += 1
            if verb == "putting":
                self._putting(*numbers)
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

    def stored(self) -> list[int]:
        return sorted(key for key, versions in self.allowed.items() if versions != {None})

    def check(self, store: Store) -> None:
        """What the next process finds; that was made durable by opening."""
        found = {**self._read(store, 0), **self._read(store, 1)}
        present = [self.place[key, version] for key, version in found.items()]
        evicted = []
        for key, allowed in self.allowed.items():
            version = found.get(key)
            if version is None and None not in allowed:
                flushed = min(v for v in allowed if v is not None)  # later ones may never have been
                evicted.append(self.place[key, flushed])
            self.allowed[key] = {version}
            if version is not None:
                self.latest[key] = version
        self._forget()
        if evicted:
            self.evicted += len(evicted)
            newest = max(evicted)
            assert newest < min(present, default=0), "a flushed block is lost, older ones are not"
            assert self.blocks_put - newest > KEPT_BLOCKS, "flushed blocks are lost: not the oldest"
        stats = check_rest(store)
        assert stats.blocks == len(found)
        assert stats.damaged_blocks == 0
        assert not stats.recovery["manifest_rebuilt"]
        for name in ("damaged_log_entries", "damaged_headers", "damaged_directories"):
            assert stats.recovery[name] == 0, name

    def _forget(self) -> None:
        """Keys that are long gone; that they stay away shows in the number of blocks."""
        if len(self.allowed) > KEYS_MAX:
            gone = [key for key, versions in self.allowed.items() if versions == {None}]
            for key in sorted(gone)[: KEYS_MAX // 2]:
                del self.allowed[key]
            self.place = {at: n for at, n in self.place.items() if at[0] in self.allowed}

    def _read(self, store: Store, parity: int) -> dict[int, int]:
        """The version that each key of a namespace has; asserts that it is an allowed one."""
        keys = [key for key in sorted(self.allowed) if key % 2 == parity]
        ns = store.namespace(IDENTITIES[parity])
        keys = [keys[row] for row in np.flatnonzero(ns.contains([key_of(key) for key in keys]))]
        out = np.zeros((len(keys), *SHAPE), np.uint16)
        result = ns.get([key_of(key) for key in keys], out)
        assert (result.statuses == BlockStatus.OK).all(), result
        found = {}
        for row, key in enumerate(keys):
            versions = [v for v in self.allowed[key] if v is not None]
            equal = [v for v in versions if np.array_equal(out[row], block(key, v))]
            assert equal, f"block {key} holds none of {self.allowed[key]}"
            found[key] = equal[0]
        return found


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    path = os.pathsep.join(folder for folder in sys.path if folder)
    nursery = Nursery(
        [sys.executable], {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    )
    yield nursery
    nursery.close()


def kill_once(
    nursery: Nursery, path: Path, backend: str, known: Known, random_: random.Random
) -> str:
    """One child, killed at a random moment; returns the last thing that it said."""
    pid, fd = nursery.start(
        Task(
            str(path),
            backend,
            random_.randrange(1 << 30),
            known.next_key,
            known.version,
            known.stored(),
        )
    )
    with os.fdopen(fd, "rb") as pipe:
        try:
            lines = []
            # Now and then in the middle of opening; else so many words later, whatever time they
            # take on a busy machine.
            if random_.random() < 0.2:
                time.sleep(random_.uniform(0, 0.03))
            else:
                words = 1 + int(random_.expovariate(1 / 30))
                lines += [pipe.readline() for _ in range(words)]
                time.sleep(random_.uniform(0, 0.01))
        finally:
            nursery.kill(pid)
            lines += pipe.readlines()
            code = nursery.bury(pid)
    assert code == -signal.SIGKILL, "the child ended by itself: see its traceback above"
    whole = [line for line in lines if line.endswith(b"\n")]
    known.listen(whole)
    return whole[-1].decode().split()[0] if whole else "nothing"


def timed_open(path: Path, backend: str) -> tuple[Store, float]:
    begun = time.perf_counter()
    store = open_store(path, None, capacity=None, backend=backend)
    return store, time.perf_counter() - begun


def loop(
    nursery: Nursery,
    path: Path,
    backend: str,
    kills: int,
    seed: int,
    say: Callable[[str], None],
) -> None:
    print(f"seed {seed}")
    random_ = random.Random(seed)
    known, opening = Known(), Opening()
    last_words: Counter[str] = Counter()
    open_store(path, GQA, capacity=CAPACITY, backend=backend).close()
    for _ in range(kills):
        last_words[kill_once(nursery, path, backend, known, random_)] += 1
        assert du_bytes(path) <= CAPACITY
        store, killed_s = timed_open(path, backend)
        tail = store.recovery.scanned_bytes
        with store:
            known.check(store)
        store, clean_s = timed_open(path, backend)
        store.close()
        opening.killed_s.append(killed_s)
        opening.clean_s.append(clean_s)
        opening.tail_bytes.append(tail)
    swift, said = opening.verdict()
    say(f"{backend}, {kills} kills: {said}")
    print(f"last words {dict(last_words)}")
    print(f"deeds {dict(known.deeds)}; {known.blocks_put} blocks put, {known.evicted} evicted")
    assert swift, said
    assert known.evicted, "the test is meant to evict"
    for verb in ("put", "flushed", "deleted", "rotated"):
        assert known.deeds[verb], f"the test is meant to see {verb}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_loop(
    nursery: Nursery, store_path: Path, seed: int, backend: str, say: Callable[[str], None]
) -> None:
    loop(nursery, store_path, backend, 100 // len(BACKENDS), seed, say)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_loop_at_length(
    nursery: Nursery, store_path: Path, seed: int, backend: str, say: Callable[[str], None]
) -> None:
    loop(nursery, store_path, backend, 1000, seed, say)
