"""Fault: opening validates every entry one by one, and takes minutes.

flashkv guarantees: of a sealed segment an open reads the header, the footer and the directory,
however many blocks there are; only the one segment that was being filled is scanned.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from small_stores import MIB, make, names

from flashkv import Identity, KVGeometry

BLOCKS = 100_000
BLOCK_BYTES = 512


def test_an_open_reads_directories_only(folder: Path) -> None:
    geometry = KVGeometry.opaque(BLOCK_BYTES)
    identity = Identity(model="m")
    blocks = np.zeros((10_000, BLOCK_BYTES), np.uint8)
    blocks[:, :8] = np.arange(10_000)[:, None].view(np.uint8)
    with make(folder, capacity=96 * MIB, geometry=geometry, codec="raw") as store:
        namespace = store.namespace(identity)
        for first in range(0, BLOCKS, 10_000):
            assert namespace.put(names(10_000, first=first), blocks).all_ok
        written = store.stats().record_bytes_written
    with make(folder, geometry=geometry) as store:
        stats = store.stats()
        recovery = stats.recovery
        assert stats.blocks == BLOCKS
        assert recovery["sealed_segments"] >= written // (4 * MIB) - 1
        assert recovery["scanned_segments"] <= 1
        assert recovery["scanned_bytes"] <= 4 * MIB, "nothing but the segment that was being filled"
        # Header, footer and directory of each segment, and the tail: a small part of all.
        assert stats.io["read_bytes"] - recovery["scanned_bytes"] < written // 8
        assert stats.index_bytes <= 120 * BLOCKS
        out = np.empty((64, BLOCK_BYTES), np.uint8)
        some = names(64, first=54_321)
        assert store.namespace(identity).get(some, out).all_ok
        assert np.array_equal(out[:, :8].copy().view(np.int64)[:, 0], np.arange(4321, 4385))


def test_opening_twice_costs_the_same(folder: Path) -> None:
    """Nothing grows from open to open: neither the log, nor what is read."""
    geometry = KVGeometry.opaque(BLOCK_BYTES)
    blocks = np.ones((20_000, BLOCK_BYTES), np.uint8)
    with make(folder, geometry=geometry, codec="raw") as store:
        assert store.namespace(Identity(model="m")).put(names(20_000), blocks).all_ok
    seen = []
    for _ in range(4):
        with make(folder, geometry=geometry) as store:
            stats = store.stats()
            seen.append((stats.blocks, stats.io["read_bytes"], stats.disk_bytes))
    assert len(set(seen[1:])) == 1, seen
    assert seen[0][0] == 20_000
