"""A close that fails: descriptors and the store's lock stay with the process.

The descriptor is gone whatever the system answers, and what had to last was synced before.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
from simulation.device import Device
from simulation.filesystem import SimFiles
from simulation.images import scratch
from simulation.moments import get, put, small_store
from simulation.workload import CAPACITY, GEOMETRY, KEYS, options

from flashkv import KVGeometry, Options, Store, StoreError


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR, errno.ENOSPC])
@pytest.mark.parametrize("number", range(1, 8))
def test_closing(code: int, number: int) -> None:
    with small_store() as workload:
        assert put(workload, KEYS).all_ok
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        workload.files.reset()
        workload.files.fail("close", number, count=1 << 30, code=code)
        workload.store.close()
        assert workload.files.open_descriptors() == 0
        workload.store = workload._open()
        assert get(workload, KEYS).all_ok
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("kind", ["open", "write", "sync", "rename", "sync_folder"])
def test_an_opening_that_fails(kind: str) -> None:
    """... gives back all that it had opened, and the next one works."""
    with small_store() as workload:
        workload.store.close()
        for number in range(1, 100):
            workload.files.reset()
            workload.files.fail(kind, number)
            try:
                workload.store = workload._open()
            except StoreError:
                assert workload.files.open_descriptors() == 0
            else:
                workload.store.close()
            if not workload.files.hits:
                break
        assert number > 1


@pytest.mark.parametrize("kind", ["open", "write", "sync", "rename", "sync_folder"])
def test_a_creation_that_fails(kind: str) -> None:
    """... likewise."""
    hits, number = 1, 0
    while hits:
        number += 1
        with scratch() as folder, Device() as device:
            files = SimFiles(folder, device)
            files.fail(kind, number)
            with suppress(StoreError):
                Store(*arguments(folder), read_only=False, files=files).close()
            hits = files.hits
            files.reset()
            assert files.open_descriptors() == 0
            Store(*arguments(folder), read_only=False, files=files).close()
    assert number > 2


def arguments(folder: Path) -> tuple[Path, int, KVGeometry, Options]:
    return folder / "store", CAPACITY, GEOMETRY, options()
