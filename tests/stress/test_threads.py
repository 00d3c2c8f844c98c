"""Eight Python threads on one store that is too small for its keys: put, replace, delete, get,
match with leases, flush and tickets, while segments are reclaimed under them.

What every read is held to: each key's history says which versions may be found. A version may be
found from the moment its put begins (`newest`) until a put of a later one has returned, or a delete
that began after it (`oldest`). A hit holds the bytes of exactly one of those; all else is a miss.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_support import BACKENDS, GQA, IDENTITY, MIB, check_rest, open_store

from flashkv import Milestone, Namespace, Store
from flashkv.errors import BatchResult, BlockStatus, BusyError

pytestmark = pytest.mark.slow

THREADS = 8
KEYS = 3200  # of 16 KiB: more than the store's 32 MiB hold
TOKENS = 16
SHAPE = (2, 2, 2, TOKENS, 64)
NUMBERS = np.random.default_rng(5).standard_normal(1 << 18, np.float32)
NOISE = (NUMBERS.view(np.uint32) >> 16).astype(np.uint16)
BLOCK = int(np.prod(SHAPE))


def content(key: int, version: int) -> np.ndarray:
    """uint16[SHAPE]: bits that look like activations, begun with the key and the version."""
    start = (key * 7919 + version * 104729) % (len(NOISE) - BLOCK)
    block = NOISE[start : start + BLOCK].copy()
    block[:4] = key, version & 0xFFFF, version >> 16, (key ^ version) & 0xFFFF
    return block.reshape(SHAPE)


@dataclass
class History:
    """Versions of all keys, under one lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    oldest: list[int] = field(default_factory=lambda: [1] * KEYS)
    newest: list[int] = field(default_factory=lambda: [0] * KEYS)
    stored: list[int] = field(default_factory=lambda: [0] * KEYS)
    changes: list[int] = field(default_factory=lambda: [0] * KEYS)

    def begin(self, numbers: list[int], versions: list[int]) -> None:
        """A put of these versions begins."""
        with self.lock:
            for number, version in zip(numbers, versions, strict=True):
                self.newest[number] = version
                self.changes[number] += 1

    def end(self, numbers: list[int], versions: list[int], result: BatchResult) -> None:
        """It returned: earlier versions are gone, unless the key's block was not stored."""
        with self.lock:
            for row, (number, version) in enumerate(zip(numbers, versions, strict=True)):
                if result.statuses[row] == BlockStatus.OK:
                    self.stored[number] = version
                    self.oldest[number] = max(self.oldest[number], version)
                self.changes[number] += 1

    def begin_delete(self, numbers: list[int]) -> list[int]:
        with self.lock:
            for number in numbers:
                self.changes[number] += 1
            return [self.stored[number] for number in numbers]

    def end_delete(self, numbers: list[int], before: list[int]) -> None:
        with self.lock:
            for number, version in zip(numbers, before, strict=True):
                self.oldest[number] = max(self.oldest[number], version + 1)
                self.changes[number] += 1

    def of(self, name: str, numbers: list[int]) -> list[int]:
        with self.lock:
            values = getattr(self, name)
            return [values[number] for number in numbers]


class Worker:
    """One thread's part. It alone puts the keys whose number is its own modulo THREADS."""

    def __init__(self, number: int, store: Store, history: History, seed: int) -> None:
        self.number = number
        self.store = store
        self.namespace: Namespace = store.namespace(IDENTITY)
        self.history = history
        self.random = random.Random(f"{seed} {number}")
        self.client = store.client(max_tickets=4)
        self.versions = [0] * KEYS
        self.counts: Counter[str] = Counter()

    # ---- choices ----

    def some(self, most: int) -> list[int]:
        """Neighbouring keys; a quarter of them is asked for more often."""
        first = self.random.randrange(self.random.choice((KEYS, KEYS // 4)))
        return [(first + i) % KEYS for i in range(self.random.randint(1, most))]

    def own(self, most: int) -> list[int]:
        first = self.random.randrange(KEYS // THREADS)
        count = self.random.randint(1, most)
        return [(first + i) % (KEYS // THREADS) * THREADS + self.number for i in range(count)]

    @staticmethod
    def keys(numbers: list[int]) -> list[bytes]:
        return [b"key %d" % number for number in numbers]

    # ---- operations ----

    def put(self, *, by_ticket: bool = False) -> None:
        numbers = self.own(16)
        versions = []
        for number in numbers:
            self.versions[number] += 1
            versions.append(self.versions[number])
        data = np.stack([content(n, v) for n, v in zip(numbers, versions, strict=True)])
        replace = self.random.random() < 0.6
        self.history.begin(numbers, versions)
        if by_ticket:
            notify = self.random.choice(list(Milestone)[1:])
            result = self.finished(
                self.client.submit_put(
                    self.namespace, self.keys(numbers), data, replace=replace, notify=notify
                )
            )
        else:
            result = self.namespace.put(self.keys(numbers), data, replace=replace)
        data[:] = 0xEEEE  # the source is ours again
        self.history.end(numbers, versions, result)
        for status in result.statuses.tolist():
            self.counts[BlockStatus(status).name] += 1

    def finished(self, ticket: Any) -> Any:
        """The ticket's result; drained."""
        assert ticket.wait(60_000), ticket
        assert ticket.error is None, ticket.error
        assert ticket in self.client.drain()
        return ticket.result

    def put_by_ticket(self) -> None:
        with suppress(BusyError):
            self.put(by_ticket=True)

    def get(self, *, by_ticket: bool = False) -> None:
        numbers = self.some(8)
        out = np.full((len(numbers), *SHAPE), 0xA5A5, np.uint16)
        oldest = self.history.of("oldest", numbers)
        if by_ticket:
            result = self.finished(self.client.submit_get(self.namespace, self.keys(numbers), out))
        else:
            result = self.namespace.get(self.keys(numbers), out)
        newest = self.history.of("newest", numbers)
        for row, number in enumerate(numbers):
            status = BlockStatus(int(result.statuses[row]))
            self.counts["hit" if status is BlockStatus.OK else "miss"] += 1
            if status is not BlockStatus.OK:
                assert status is BlockStatus.MISS, status
                continue
            head = out[row].reshape(-1)[:4].tolist()
            version = head[1] | head[2] << 16
            assert head[0] == number, (number, head)
            span = (oldest[row], newest[row])
            assert span[0] <= version <= span[1], (number, version, span)
            assert np.array_equal(out[row], content(number, version)), (number, version)

    def get_by_ticket(self) -> None:
        self.get(by_ticket=True)

    def get_part(self) -> None:
        """Some tokens, layers and heads."""
        numbers = self.some(4)
        first = self.random.randrange(TOKENS)
        stop = self.random.randint(first + 1, TOKENS)
        layer, head = self.random.randrange(2), self.random.randrange(2)
        out = np.full((len(numbers), 1, 2, 1, stop - first, 64), 0xA5A5, np.uint16)
        oldest = self.history.of("oldest", numbers)
        result = self.namespace.get(
            *(self.keys(numbers), out),
            token_range=(first, stop),
            layers=[layer],
            heads=[head],
        )
        newest = self.history.of("newest", numbers)
        for row, number in enumerate(numbers):
            if not result.ok[row]:
                continue
            self.counts["part"] += 1
            wanted = (slice(layer, layer + 1), slice(None), slice(head, head + 1))
            assert any(
                np.array_equal(out[row], content(number, version)[(*wanted, slice(first, stop))])
                for version in range(oldest[row], newest[row] + 1)
            ), number

    def delete(self) -> None:
        numbers = self.some(3)
        before = self.history.begin_delete(numbers)
        self.namespace.delete(self.keys(numbers))
        self.history.end_delete(numbers, before)

    def match(self) -> None:
        """What a lease holds stays, unless somebody deletes or replaces it."""
        numbers = self.some(6)
        changes = self.history.of("changes", numbers)
        match = self.namespace.match(self.keys(numbers), lease_ms=10_000)
        if match.lease is None:
            self.counts["no lease"] += 1
            return
        with match.lease:
            self.counts["lease"] += 1
            for _ in range(self.random.randint(0, 8)):
                self.get()
            held = self.namespace.contains(self.keys(numbers))
            unchanged = np.array(self.history.of("changes", numbers)) == changes
        assert (held | ~unchanged)[: match.count].all(), "a leased block went"

    def contains(self) -> None:
        numbers = self.some(8)
        oldest = self.history.of("oldest", numbers)
        found = self.namespace.contains(self.keys(numbers))
        newest = self.history.of("newest", numbers)
        for row, number in enumerate(numbers):
            assert not found[row] or oldest[row] <= newest[row], number
        assert isinstance(self.namespace.contains_one(self.keys(numbers)[0]), bool)

    def flush(self) -> None:
        self.store.flush()

    def stats(self) -> None:
        stats = self.store.stats()
        assert stats.disk_bytes <= self.store.capacity_bytes

    MIX = {
        "contains": 30,
        "get": 24,
        "put": 16,
        "match": 10,
        "get_part": 6,
        "get_by_ticket": 5,
        "put_by_ticket": 4,
        "delete": 3,
        "stats": 1,
        "flush": 1,
    }

    def run(self, operations: int, until: float, failures: list[BaseException]) -> None:
        """So many operations, or until that time of the clock, or until a thread failed."""
        names, weights = list(self.MIX), list(self.MIX.values())
        try:
            for _ in range(operations):
                if time.monotonic() > until or failures:
                    break
                name = self.random.choices(names, weights)[0]
                getattr(self, name)()
                self.counts["operations"] += 1
        except BaseException as error:  # noqa: BLE001  (the test's thread raises it)
            failures.append(error)
        finally:
            self.client.close()


def stress(store: Store, seed: int, operations: int, seconds: float) -> Counter[str]:
    """Runs the threads; raises what a thread raised."""
    history, failures = History(), []
    workers = [Worker(number, store, history, seed) for number in range(THREADS)]
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=worker.run, args=(operations, until, failures))
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    counts: Counter[str] = Counter()
    for worker in workers:
        counts.update(worker.counts)
    stats = check_rest(store)
    counts["evicted segments"] = stats.evicted_segments
    assert stats.damaged_blocks == 0
    print(f"seed {seed}:", dict(counts))
    return counts


def small_store(path: Path, backend: str) -> Store:
    return open_store(
        *(path, GQA),
        staging_bytes=4 * MIB,
        read_buffer_bytes=4 * MIB,
        header_cache_bytes=MIB,
        backend=backend,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_see_only_what_was_there(seed: int, store_path: Path, backend: str) -> None:
    with small_store(store_path, backend) as store:
        counts = stress(store, seed, 100_000, 10.0)
    assert counts["evicted segments"] > 0
    assert min(counts[name] for name in ("hit", "miss", "OK", "PRESENT", "lease", "part")) > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("backend", BACKENDS)
def test_soak(seed: int, store_path: Path, backend: str) -> None:
    """10^5 operations a thread."""
    with small_store(store_path, backend) as store:
        counts = stress(store, seed, 100_000, float("inf"))
    assert counts["operations"] == THREADS * 100_000
