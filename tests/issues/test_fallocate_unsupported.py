"""Fault: fallocate is unsupported, and the store doesn't start.

flashkv guarantees: it opens all the same and works; how often space could not be reserved is
counted.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from small_disks import small_disk
from small_stores import IDENTITY, MIB, assert_equal, make, names, payload

from flashkv import BlockStatus
from flashkv.filesystem import FileSystem

BLOCKS = payload(1, 300)


def works(folder: Path, refusals: int) -> None:
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(names(300), BLOCKS).all_ok
        store.flush()
        assert_equal(namespace, names(300), BLOCKS)
        assert (store.stats().fallocate_refusals > 0) == (refusals > 0)
    with make(folder) as store:
        assert_equal(store.namespace(IDENTITY), names(300), BLOCKS)


def test_a_file_system_without_fallocate() -> None:
    """ext2 has none."""
    with small_disk("ext2", 80 * MIB) as disk:
        works(disk.place / "kv", 1)


def test_a_file_system_in_memory() -> None:
    """ramfs has neither fallocate, nor direct I/O, nor a size."""
    with small_disk("ramfs") as disk:
        works(disk.place / "kv", 1)


def test_where_it_works(folder: Path) -> None:
    works(folder, 0)


def test_a_disk_that_fills_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC of fallocate is a lack of space, not an error: an old segment goes instead."""
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(names(300), BLOCKS).all_ok

        def full(self: FileSystem, fd: int, length_bytes: int) -> bool:
            if os.fstat(fd).st_blocks * 512 < length_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return True

        monkeypatch.setattr(FileSystem, "preallocate", full)
        for batch in range(6):
            result = namespace.put(names(300, f"{batch}-"), BLOCKS)
            assert set(result.statuses.tolist()) <= {BlockStatus.OK}
        assert store.stats().floor_refusals > 0
        assert_equal(namespace, names(300, "5-")[-100:], BLOCKS[-100:])
