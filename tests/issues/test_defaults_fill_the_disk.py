"""Fault: there is no cap by default, and the node's disk fills.

flashkv guarantees: without a capacity a store takes half of what the file system has free; it
leaves the free floor alone even when others fill the disk meanwhile, and no ENOSPC reaches the
caller: blocks are evicted, or NO_SPACE.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from small_disks import small_disk
from small_stores import GEOMETRY, MIB, payload

import flashkv
from flashkv import BlockStatus, CapacityError, Identity, KVGeometry, Options

OPTIONS = Options(staging_bytes=8 * MIB, read_buffer_bytes=8 * MIB)
BLOCKS = payload(3, 256)  # 4 MiB


def free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def offer(namespace: flashkv.Namespace, batches: int, first: int = 0) -> list[BlockStatus]:
    """Statuses that came back for so many batches of 4 MiB."""
    seen: set[int] = set()
    for batch in range(first, first + batches):
        keys = [f"{batch}/{i}".encode() for i in range(len(BLOCKS))]
        seen.update(np.unique(namespace.put(keys, BLOCKS).statuses).tolist())
    return [BlockStatus(status) for status in seen]


def test_defaults_on_a_small_file_system() -> None:
    with small_disk("ext4", 160 * MIB) as disk:
        before = free(disk.place)
        with flashkv.open(disk.place / "kv", geometry=GEOMETRY, options=OPTIONS) as store:
            capacity = store.stats().capacity_bytes
            assert capacity <= before // 2
            namespace = store.namespace(Identity(model="m"))
            assert offer(namespace, 60) == [BlockStatus.OK]
            store.flush()
            stats = store.stats()
            assert stats.disk_bytes <= capacity
            assert stats.evicted_blocks > 0
            assert free(disk.place) > before // 3


def test_the_floor_holds_when_others_fill_the_disk() -> None:
    floor = 12 * MIB
    with small_disk("ext4", 96 * MIB) as disk:
        path = disk.place / "kv"
        options = Options(
            free_floor_bytes=floor,
            segment_bytes=4 * MIB,
            staging_bytes=8 * MIB,
            read_buffer_bytes=8 * MIB,
        )
        with flashkv.open(path, capacity="80MiB", geometry=GEOMETRY, options=options) as kv:
            namespace = kv.namespace(Identity(model="m"))
            assert offer(namespace, 4) == [BlockStatus.OK]
            (disk.place / "other").write_bytes(b"z" * (free(disk.place) - floor - 9 * MIB))
            assert offer(namespace, 20, 4) == [BlockStatus.OK], "the oldest made room"
            assert free(disk.place) >= floor
            assert kv.stats().evicted_blocks > 0
            kv.flush()
            last = [f"23/{i}".encode() for i in range(len(BLOCKS))]
            assert namespace.contains(last).all()


def test_a_full_disk_is_no_space() -> None:
    """No room for even one segment: each put says NO_SPACE, and the store works again once there is
    room.
    """
    with small_disk("ext4", 64 * MIB) as disk:
        path = disk.place / "kv"
        options = Options(segment_bytes=4 * MIB, staging_bytes=8 * MIB, read_buffer_bytes=8 * MIB)
        with flashkv.open(path, capacity="40MiB", geometry=GEOMETRY, options=options) as kv:
            namespace = kv.namespace(Identity(model="m"))
            filler = disk.place / "other"
            filler.write_bytes(b"z" * (free(disk.place) - 2 * MIB))
            assert offer(namespace, 2) == [BlockStatus.NO_SPACE]
            assert not namespace.contains([b"0/0", b"1/255"]).any()
            filler.unlink()
            assert offer(namespace, 2, 2) == [BlockStatus.OK]
            assert namespace.contains([b"2/0", b"3/255"]).all()


def test_a_file_system_that_does_not_tell() -> None:
    """Where nobody knows how much is free, a capacity must be given."""
    with small_disk("ramfs") as disk:
        path = disk.place / "kv"
        with pytest.raises(CapacityError, match="Give a capacity"):
            flashkv.open(path, geometry=GEOMETRY, options=OPTIONS)
        with flashkv.open(path, capacity="32MiB", geometry=GEOMETRY, options=OPTIONS) as kv:
            assert offer(kv.namespace(Identity(model="m")), 4) == [BlockStatus.OK]


@pytest.mark.parametrize("block_bytes", [300_000, 3_000_000, 5_900_000])
def test_default_segments_take_opaque_blocks(disk_path: Path, block_bytes: int) -> None:
    """Opaque blocks can't be cut: a store that opens takes them, or says what it needs."""
    block = np.zeros((1, block_bytes), np.uint8)
    for capacity in (16, 24, 48, 112):
        path = disk_path / str(capacity)
        geometry = KVGeometry.opaque(block_bytes)
        if 17 * block_bytes > capacity * MIB:
            with pytest.raises(CapacityError, match="at least"):
                flashkv.open(path, capacity=capacity * MIB, geometry=geometry, options=OPTIONS)
            continue
        with flashkv.open(path, capacity=capacity * MIB, geometry=geometry, options=OPTIONS) as kv:
            for number in range(9):
                assert kv.namespace(Identity(model="m")).put([b"%d" % number], block)[0] == 0
