"""Fault: others fill the disk to the last block, and the cache can't be opened any more, or forgets
nothing and takes nothing until somebody makes room.

flashkv guarantees: on a full disk a store opens, reads, deletes and stores, within the space that
it has. Where even its log's own room is gone, it opens and reads, and says what it can't do.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from small_disks import MIB, SmallDisk, small_disk
from small_stores import IDENTITY, assert_equal, crash, make, names, payload

from flashkv import BlockStatus, StoreError
from flashkv.filesystem import FileSystem

KEYS, BLOCKS = names(1500), payload(1, 1500)
"""24 MiB of 48."""


def filled(disk: SmallDisk, how: str) -> Path:
    """A store on a disk without a free block, left as `how` says; the first 100 keys are gone."""
    path = disk.place / "kv"
    store = make(path, codec="raw")
    ns = store.namespace(IDENTITY)
    assert ns.put(KEYS, BLOCKS).all_ok
    store.flush()
    disk.fill()
    assert ns.delete(KEYS[:100]).all_ok
    store.close() if how == "closed" else crash(store)
    return path


@pytest.mark.parametrize("how", ["closed", "killed"])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs"])
def test_all_works_on_a_full_disk(kind: str, how: str) -> None:
    with small_disk(kind, 64 * MIB) as disk:
        path = filled(disk, how)
        with make(path) as store:
            ns = store.namespace(IDENTITY)
            assert not ns.contains(KEYS[:100]).any()
            assert_equal(ns, KEYS[100:], BLOCKS[100:])
        for life in range(8):
            store = make(path, codec="raw")
            ns = store.namespace(IDENTITY)
            gone = KEYS[100 + 50 * life : 150 + 50 * life]
            ns.delete(gone)
            disk.fill()
            for number in range(4):  # in all as much as the store holds: it reclaims
                more = names(200, f"life-{life}-{number}-")
                blocks = payload(100 * life + number + 2, 200)
                assert ns.put(more, blocks).all_ok
                store.flush()
            disk.fill()
            crash(store)
            with make(path) as store:
                ns = store.namespace(IDENTITY)
                assert not ns.contains(gone).any()
                assert_equal(ns, more, blocks)


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_without_any_room_for_the_log(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are quicker and take what the log gives up."""
    with small_disk("tmpfs", 64 * MIB) as disk:
        path = filled(disk, how)

        def full(_: FileSystem, fd: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(FileSystem, "write", full)
            for life in range(2):
                store = make(path, codec="raw")
                ns = store.namespace(IDENTITY)
                assert not ns.contains(KEYS[:100]).any()
                assert_equal(ns, KEYS[100:], BLOCKS[100:])
                with pytest.raises(StoreError, match="manifest"):
                    ns.delete(KEYS[100:110])
                more = names(1500, f"life-{life}-")
                assert set(ns.put(more, BLOCKS).counts()) <= {"OK", "NO_SPACE"}
                assert ns.put(more[-1:], BLOCKS[-1:])[0] == BlockStatus.NO_SPACE
                crash(store)
        disk.empty()
        with make(path, codec="raw") as store:
            ns = store.namespace(IDENTITY)
            assert_equal(ns, KEYS[110:], BLOCKS[110:])
            assert ns.delete(KEYS[110:120]).all_ok
            assert ns.put(more[:700], BLOCKS[:700], replace=True).all_ok
            store.flush()
            assert_equal(ns, more[:700], BLOCKS[:700])


def test_a_smaller_capacity_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store opens; it shrinks as soon as its log can be written."""
    with small_disk("tmpfs", 64 * MIB) as disk:
        path = filled(disk, "closed")

        def full(_: FileSystem, fd: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(FileSystem, "write", full)
            with make(path, capacity=20 * MIB, codec="raw") as store:
                assert store.stats().disk_bytes > 20 * MIB
        with make(path, capacity=20 * MIB, codec="raw") as store:
            assert store.stats().disk_bytes <= 20 * MIB
