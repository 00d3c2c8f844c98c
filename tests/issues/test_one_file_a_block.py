"""Fault: one file a block, and millions of inodes.

flashkv guarantees: files and folders grow with the segments, never with the keys, and deleting keys
or opening the store again adds none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from small_stores import make, names, segment_files

from flashkv import Identity, KVGeometry

FILES_BESIDE_SEGMENTS = 8  # shards, 0, segments, lock, two superblocks, two logs


def inodes(path: Path) -> int:
    return sum(1 for _ in path.rglob("*"))


def test_inodes_follow_segments(folder: Path) -> None:
    geometry = KVGeometry.opaque(128)
    blocks = np.zeros((20_000, 128), np.uint8)
    for round_number in range(3):
        with make(folder, geometry=geometry, codec="raw") as store:
            namespace = store.namespace(Identity(model="m"))
            keys = names(20_000, f"r{round_number}-")
            assert namespace.put(keys, blocks).all_ok
            assert namespace.delete(keys[::2]).all_ok
            store.flush()
            segments = len(segment_files(folder))
            assert segments <= 12
            assert inodes(folder) <= segments + FILES_BESIDE_SEGMENTS
    assert inodes(folder) <= len(segment_files(folder)) + FILES_BESIDE_SEGMENTS
