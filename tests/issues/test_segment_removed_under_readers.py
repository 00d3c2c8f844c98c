"""Fault: a segment is removed, or its space used again, while readers use it.

flashkv guarantees: a reader gets a block's own bytes or a miss, never others; what a lease holds
stays until the lease ends; and reads don't keep space from being used again for longer than they
take.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from small_stores import BACKENDS, IDENTITY, MIB, make

from flashkv import BatchResult, BlockStatus, Namespace

SHAPE = (2, 2, 2, 16, 64)


def put(namespace: Namespace, numbers: range) -> BatchResult:
    """Puts the blocks of these numbers, each under its own."""
    return namespace.put([b"%d" % n for n in numbers], np.stack([block(n) for n in numbers]))


def block(number: int) -> np.ndarray:
    """Every element tells whose it is."""
    return np.full(SHAPE, number % 65_000, np.uint16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_readers_while_the_store_wraps(folder: Path, backend: str) -> None:
    with make(folder, capacity=20 * MIB, backend=backend, codec="raw") as store:
        namespace = store.namespace(IDENTITY)
        newest = 0
        done = threading.Event()
        wrong: list[str] = []
        hits = [0] * 4

        def read(number: int) -> None:
            rng = np.random.default_rng(number)
            out = np.zeros((16, *SHAPE), np.uint16)
            while not done.is_set():
                wanted = np.maximum(newest - rng.integers(0, 1400, 16), 0)
                result = namespace.get([b"%d" % n for n in wanted], out)
                hits[number] += int(result.ok.sum())
                for row, n in enumerate(wanted):
                    status = result[row]
                    if status == BlockStatus.OK and not (out[row] == n % 65_000).all():
                        wrong.append(f"{n} has other bytes")
                    if status not in (BlockStatus.OK, BlockStatus.MISS):
                        wrong.append(f"{n}: {status!r}")

        readers = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for reader in readers:
            reader.start()
        try:
            for first in range(0, 6400, 64):
                assert put(namespace, range(first, first + 64)).all_ok
                newest = first + 64
        finally:
            done.set()
            for reader in readers:
                reader.join()
        assert not wrong, wrong[:5]
        assert sum(hits) > 0
        stats = store.stats()
        assert stats.evicted_segments >= 10
        assert stats.damaged_blocks == 0


def test_a_lease_holds(folder: Path) -> None:
    with make(folder, capacity=24 * MIB, codec="raw") as store:
        namespace = store.namespace(IDENTITY)
        keys = [b"%d" % n for n in range(64)]
        expected = np.stack([block(n) for n in range(64)])
        namespace.put(keys, expected)
        match = namespace.match(keys, lease_ms=60_000)
        assert match.count == 64
        assert match.lease is not None
        for first in range(100, 4000, 64):
            put(namespace, range(first, first + 64))
        assert store.stats().evicted_segments > 4
        out = np.zeros_like(expected)
        assert namespace.get(keys, out).all_ok
        assert np.array_equal(out, expected)
        match.lease.release()
        for first in range(4000, 6000, 64):
            put(namespace, range(first, first + 64))
        assert not namespace.contains(keys).any(), "without the lease the oldest go"


def test_a_reader_in_another_handle(folder: Path) -> None:
    """Space that the writer uses again is a miss of a read-only handle, no damage."""
    with make(folder, capacity=20 * MIB, codec="raw") as store:
        namespace = store.namespace(IDENTITY)
        keys = [b"%d" % n for n in range(256)]
        put(namespace, range(256))
        store.flush()
        with make(folder, read_only=True) as reader:
            mine = reader.namespace(IDENTITY)
            out = np.zeros((256, *SHAPE), np.uint16)
            assert mine.get(keys, out).all_ok
            for first in range(256, 2560, 64):
                put(namespace, range(first, first + 64))
                store.flush()
                out[:] = 0
                result = mine.get(keys, out)
                for n in range(256):
                    assert result[n] in (BlockStatus.OK, BlockStatus.MISS)
                    assert not result.ok[n] or (out[n] == n).all(), n
            assert not namespace.contains(keys).any()
            assert not mine.get(keys, out).ok.any()
            stats = reader.stats()
            assert stats.damaged_blocks == 0
            assert stats.stale_blocks > 0
