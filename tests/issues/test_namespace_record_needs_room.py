"""Fault: what a segment tells about its namespaces isn't counted when a record's place is chosen:
the record behind it is refused as too large, or the segment's directory runs out of room.

flashkv guarantees: any mix of identities, long ones too, fills segments to their end: every block
is stored, every sealed directory is whole; and identities that have no blocks any more take no
space.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from small_stores import GEOMETRY, MIB, assert_equal, du, make, names

from flashkv import BlockStatus, Identity, KVGeometry


def identity(number: int, length: int = 0) -> Identity:
    extras = {f"part {n}": "x" * 15_000 for n in range(length)}
    return Identity(model=f"model {number}", extras=extras)


def test_identities_of_all_lengths(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    blocks = np.random.default_rng(seed).integers(0, 1 << 16, (40, 2, 2, 2, 16, 64), np.uint16)
    put: list[tuple[int, list[bytes], int]] = []
    identities = [identity(number, rng.randrange(4)) for number in range(24)]
    with make(folder, capacity=96 * MIB, codec="raw") as store:
        for turn in range(160):
            number = rng.randrange(24)
            count = rng.randrange(1, 40)
            keys = names(count, f"{turn}-")
            result = store.namespace(identities[number]).put(keys, blocks[:count])
            assert (result.statuses == BlockStatus.OK).all(), (turn, result)
            put.append((number, keys, count))
        assert store.stats().segments["sealed"] >= 6
        assert store.stats().evicted_blocks == 0
    with make(folder) as store:
        recovery = store.stats().recovery
        assert recovery["sealed_segments"] >= 6
        assert recovery["damaged_directories"] == 0
        assert recovery["scanned_segments"] <= 1
        for number, keys, count in put:
            assert_equal(store.namespace(identities[number]), keys, blocks[:count])


def test_a_segment_that_is_nearly_full(folder: Path) -> None:
    """A long identity comes when a few pages are left: too little for it and a block, never an
    error.
    """
    geometry = KVGeometry.opaque(4096 * 3)
    block = np.zeros((1, 4096 * 3), np.uint8)
    for left in range(8):
        path = folder / str(left)
        with make(path, geometry=geometry, codec="raw", capacity=24 * MIB) as store:
            namespace = store.namespace(identity(0))
            turn, room = 0, 1024
            while room > 12 + left:
                assert namespace.put([b"%d" % turn], block)[0] == BlockStatus.OK
                segment = store.segments[0]
                turn, room = turn + 1, segment.end_page - segment.next_page
            for number in range(1, 4):
                other = store.namespace(identity(number, number))
                assert other.put([b"k"], block)[0] == BlockStatus.OK
            blocks = store.stats().blocks
        with make(path, geometry=geometry) as store:
            assert store.stats().blocks == blocks
            assert store.stats().recovery["damaged_directories"] == 0


def test_identities_without_blocks_leave_no_trace(folder: Path) -> None:
    """Hundreds of identities come and go: the log doesn't keep them beyond the next open."""
    block = np.zeros((1, *(2, 2, 2, 16, 64)), np.uint16)
    with make(folder, capacity=24 * MIB) as store:
        for number in range(120):
            namespace = store.namespace(identity(number, 1))
            assert namespace.put([b"k"], block).all_ok
            if number % 10:
                namespace.delete([b"k"])
        assert du(folder) <= 24 * MIB + (64 << 10)
    for _ in range(3):
        with make(folder) as store:
            stats = store.stats()
            logs = sum(p.stat().st_size for p in (folder / "shards" / "0").glob("manifest-*"))
            assert stats.blocks == 12
    assert logs < 2 * 12 * 20_000
    with make(folder) as store:
        namespace = store.namespace(identity(1, 1))
        assert namespace.put([b"k"], block)[0] == BlockStatus.OK
        assert_equal(namespace, [b"k"], block)
    with make(folder) as store:
        for number in (0, 1, 110):
            assert store.namespace(identity(number, 1)).contains_one(b"k")
        assert store.geometry == GEOMETRY
