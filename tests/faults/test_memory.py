"""Memory and threads run out under a store, at every allocation of the data plane once.

A call says so (MemoryError, BackendError, a block that is busy) or does without; no block is lost
that was flushed, none is taken for damaged, nothing leaks, and once there is memory all works.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from simulation.device import allocation_calls, fail_allocations, live_allocations
from store_support import IDENTITY, KINDS, Kind, check_rest, crash, equal, open_store

from flashkv import BlockStatus, DurabilityError, FlashKVError, Namespace, Store

KIND: Kind = KINDS[0]
OLD = [b"old-%d" % number for number in range(6)]
NEW = [b"new-%d" % number for number in range(12)]
ABSENT = [b"absent-%d" % number for number in range(20)]
MISSING = (BlockStatus.BUSY, BlockStatus.MISS)


@cache
def block(key: bytes) -> np.ndarray:
    return KIND.block(key, 1)


def blocks(keys: list[bytes]) -> np.ndarray:
    return np.stack([block(key) for key in keys])


def readable(ns: Namespace, keys: list[bytes]) -> list[bool]:
    """Which can be read; asserts that what is read is right."""
    out = KIND.empty(len(keys))
    result = ns.get(keys, out)
    for row, (key, status) in enumerate(zip(keys, result, strict=True)):
        assert status in (BlockStatus.OK, *MISSING), f"{key!r}: {status!r}"
        assert status != BlockStatus.OK or equal(out[row], block(key)), f"wrong bytes of {key!r}"
    return [bool(ok) for ok in result.ok]


def make(path: Path) -> None:
    """A store that was killed: OLD is flushed, its segment is open and must be scanned."""
    store = open_store(path, KIND.geometry, codec="lossless", backend="threads")
    ns = store.namespace(IDENTITY)
    assert ns.put(OLD, blocks(OLD)).all_ok
    store.flush()
    crash(store)
    del store, ns
    gc.collect()


class Run:
    """A fixed course of calls on a copy of that store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raised: list[BaseException] = []
        self.busy = 0
        self.flushed: set[bytes] = set(OLD)

    def course(self) -> None:
        store = open_store(self.path, None, capacity=None, backend="threads")
        try:
            self.use(store, store.namespace(IDENTITY))
        finally:
            store.close()

    def use(self, store: Store, ns: Namespace) -> None:
        readable(ns, OLD)
        put = set()
        for keys in (NEW[:8], NEW[8:]):
            try:
                result = ns.put(keys, blocks(keys))
            except (FlashKVError, MemoryError) as error:
                self.raised.append(error)
                continue
            for key, status in zip(keys, result, strict=True):
                assert status in (BlockStatus.OK, BlockStatus.BUSY)
                self.busy += status == BlockStatus.BUSY
                if status == BlockStatus.OK:
                    put.add(key)
        readable(ns, NEW)
        try:
            store.flush()
            self.flushed |= put
        except (FlashKVError, MemoryError) as error:
            self.raised.append(error)
            assert not isinstance(error, DurabilityError) or error.blocks_lost  # noqa: PT017
        readable(ns, NEW + OLD)
        ns.contains(NEW + ABSENT)
        ns.match(NEW + ABSENT)
        store.stats()


def fail_from(path: Path, image: Path, first: int, count: int) -> int:
    """One course with these allocations failing; how many calls there were."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(image, path)
    gc.collect()  # what earlier stores held
    run, before = Run(path), live_allocations()
    fail_allocations(first, count)
    try:
        run.course()
    except (FlashKVError, MemoryError) as error:  # the open, the namespace, a lookup
        run.raised.append(error)
    calls = allocation_calls()
    fail_allocations()
    for error in run.raised:
        error.__traceback__ = None  # frames that hold arrays
    gc.collect()
    assert live_allocations() == before, f"allocation {first} leaks: {run.raised}"

    with open_store(path, None, capacity=None, backend="threads") as store:
        ns = store.namespace(IDENTITY)
        keys = sorted(run.flushed)
        lost = [key for key, found in zip(keys, readable(ns, keys), strict=True) if not found]
        assert not lost, f"allocation {first} lost {lost}: {run.raised}"
        assert ns.put(NEW, blocks(NEW), replace=True).all_ok
        assert all(readable(ns, NEW))
        store.flush()
        assert check_rest(store).damaged_blocks == 0
    return calls


@pytest.fixture(autouse=True)
def cheap_collections() -> Iterator[None]:
    """What is there before a test is no garbage of it."""
    gc.collect()
    gc.freeze()
    yield
    fail_allocations()
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 1 << 62], ids=["once", "from there on"])
def test_every_allocation(disk_path: Path, count: int) -> None:
    image, path = disk_path / "image", disk_path / "store"
    make(image)
    first = 1
    while fail_from(path, image, first, count) >= first:
        first += 1
    assert first > 50
    print(f"{first - 1} allocations")


def test_the_course_is_clean_with_memory(disk_path: Path) -> None:
    make(disk_path / "store")
    run = Run(disk_path / "store")
    run.course()
    assert not run.raised
    assert not run.busy
    assert run.flushed == {*OLD, *NEW}
