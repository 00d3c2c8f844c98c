"""Fault: foreign files and blocks of older namespaces aren't counted, and the folder grows past its
cap.

flashkv guarantees: what du tells of the store's folder, foreign files and metadata included, stays
within the capacity (the folders' own entries aside). The oldest segments go first, so namespaces
that nobody writes to any more make room for the one in use.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_stores import GEOMETRY, MIB, OPTIONS, assert_equal, du, make, names

from flashkv import CapacityError, Identity, KVGeometry

CAPACITY = 32 * MIB
FOLDERS = 64 << 10  # blocks of the folders themselves


def noise(seed: int, count: int) -> np.ndarray:
    """Blocks that no codec makes smaller."""
    return np.random.default_rng(seed).integers(0, 1 << 16, (count, 2, 2, 2, 16, 64), np.uint16)


def test_three_namespaces_at_the_cap(folder: Path) -> None:
    """Each namespace alone would fill the store; one after the other they stay within the cap."""
    with make(folder, capacity=CAPACITY) as store:
        for generation in range(3):
            namespace = store.namespace(Identity(model="m", revision=f"r{generation}"))
            for batch in range(12):
                keys = names(200, first=200 * batch)
                blocks = noise(1000 * generation + batch, 200)
                assert (namespace.put(keys, blocks).statuses == 0).all()
                store.flush()
                assert du(folder) <= CAPACITY + FOLDERS
                assert_equal(namespace, keys, blocks)
        kept = [
            int(store.namespace(Identity(model="m", revision=f"r{g}")).contains(names(2400)).sum())
            for g in range(3)
        ]
        assert kept[0] == kept[1] == 0, "stale namespaces go first"
        assert kept[2] > 1000
        assert store.stats().evicted_blocks > 0
    assert du(folder) <= CAPACITY + FOLDERS
    with make(folder) as store:
        assert store.stats().capacity_bytes == CAPACITY
        assert store.stats().blocks == sum(kept)


def test_foreign_files_count(folder: Path) -> None:
    """Other content of the folder is part of the cap, and nobody touches it."""
    other = folder / "other"
    other.mkdir()
    (other / "model.bin").write_bytes(b"x" * (6 * MIB))
    with make(folder, capacity=CAPACITY) as store:
        namespace = store.namespace(Identity(model="m"))
        for batch in range(6):
            namespace.put(names(200, first=200 * batch), noise(batch, 200))
            assert du(folder) <= CAPACITY + FOLDERS
        assert store.stats().foreign_bytes >= 6 * MIB
        (other / "late.bin").write_bytes(b"y" * (5 * MIB))
        for batch in range(6, 16):
            namespace.put(names(200, first=200 * batch), noise(batch, 200))
        assert du(folder) <= CAPACITY + FOLDERS, "files that came later count as well"
        assert store.stats().foreign_bytes >= 11 * MIB
    assert (other / "model.bin").stat().st_size == 6 * MIB
    assert (other / "late.bin").stat().st_size == 5 * MIB


def test_a_smaller_cap_holds_at_once(folder: Path) -> None:
    with make(folder, capacity=CAPACITY) as store:
        store.namespace(Identity(model="m")).put(names(1600), noise(0, 1600))
    assert du(folder) > 24 * MIB
    with make(folder, capacity=20 * MIB) as store:
        assert du(folder) <= 20 * MIB + FOLDERS
        kept = store.namespace(Identity(model="m")).contains(names(1600))
        assert kept.any()
        assert kept[-1], "the newest stay"
    with make(folder, capacity=None) as store:
        assert store.stats().capacity_bytes == 20 * MIB
    with pytest.raises(CapacityError, match="capacity"):
        make(folder, capacity=8 * MIB)


def test_metadata_counts(folder: Path, seed: int) -> None:
    """Deletes are logged: very many must not take the store beyond its cap."""
    capacity = 20 * MIB
    geometry = KVGeometry.opaque(64)
    count = 40_000
    blocks = np.random.default_rng(seed).integers(0, 256, (count, 64), np.uint8)
    with make(folder, capacity=capacity, geometry=geometry, codec="raw") as store:
        namespace = store.namespace(Identity(model="m"))
        most = 0
        for round_number in range(6):
            keys = names(count, f"{round_number}-")
            assert namespace.put(keys, blocks).all_ok
            namespace.delete(keys[::2])
            most = max(most, du(folder))
        assert most <= capacity + FOLDERS
        assert_equal(namespace, keys[1::2], blocks[1::2])
        assert not namespace.contains(keys[::2]).any()
    with make(folder, geometry=geometry) as store:
        assert du(folder) <= capacity + FOLDERS
        assert not store.namespace(Identity(model="m")).contains(keys[::2]).any()


def test_the_geometry_of_the_cap(folder: Path) -> None:
    """A cap that holds no four segments is refused, with the numbers."""
    with pytest.raises(CapacityError, match=r"at least \d+ bytes"):
        make(folder, capacity=10 * MIB)
    assert OPTIONS.segment_bytes == 4 * MIB
    assert GEOMETRY.token_bytes() == 1024
