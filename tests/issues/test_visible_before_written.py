"""Fault: a key becomes visible before its write succeeded, and stays visible when it failed.

flashkv guarantees: when write j of a batch fails, exactly its record's blocks are gone, at the
latest when flush() says so with the number of blocks lost; all others hit and are equal. That holds
after a reopen, although the bytes may have reached the device after all, and the next put of the
key stores it.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import (
    BACKENDS,
    BLOCK_SHAPE,
    IDENTITY,
    MIB,
    assert_equal,
    crash,
    make,
    names,
    payload,
    read_back,
)

from flashkv import DurabilityError, Store

KEYS = names(32)
SHAPE = (*BLOCK_SHAPE[:3], 1024, 64)  # a megabyte: every block is a record and a write of its own
BLOCKS = payload(13, 32, SHAPE)


def make_large(folder: Path, **changes: Any) -> Store:
    """A store whose segments take a dozen such blocks."""
    return make(folder, capacity=80 * MIB, segment_bytes=16 * MIB, codec="raw", **changes)


class Failing:
    """write_reap of a store, which tells of a failure for writes of certain numbers."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, failing: set[int]) -> None:
        self.failed = 0
        self._reap = store.io.write_reap
        self._failing = failing
        monkeypatch.setattr(store.io, "write_reap", self)

    def __call__(self, room: int = 64, timeout_ms: int = 0) -> Any:
        finished = self._reap(room, timeout_ms)
        wrong = np.isin(finished["tag"], list(self._failing))
        finished["result"][wrong] = -errno.EIO
        self.failed += int(wrong.sum())
        return finished


@pytest.mark.parametrize("end", ["close", "crash"])
@pytest.mark.parametrize("failing", [0, 7, 31])
@pytest.mark.parametrize("backend", BACKENDS)
def test_write_j_of_a_batch_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, failing: int, end: str
) -> None:
    store = make_large(folder, backend=backend)
    namespace = store.namespace(IDENTITY)
    fault = Failing(store, monkeypatch, {store.writer.flights._next_tag + failing})
    assert (namespace.put(KEYS, BLOCKS).statuses == 0).all()
    with pytest.raises(DurabilityError, match="1 captured") as caught:
        store.flush()
    assert caught.value.blocks_lost == fault.failed == 1
    others = np.arange(32) != failing
    for _ in range(2):
        result, out = read_back(namespace, KEYS, BLOCKS)
        assert result.missed.tolist() == (~others).tolist()
        assert np.array_equal(out[others], BLOCKS[others])
    stats = store.stats()
    assert (stats.lost_blocks, stats.failed_writes) == (1, 1)
    store.flush()
    if end == "crash":
        crash(store)
    else:
        store.close()
    with make(folder, backend=backend) as store:
        namespace = store.namespace(IDENTITY)
        result, out = read_back(namespace, KEYS, BLOCKS)
        assert result.missed.tolist() == (~others).tolist()
        assert np.array_equal(out[others], BLOCKS[others])
        assert namespace.put(KEYS, BLOCKS)[failing] == 0
    with make(folder) as store:
        assert_equal(store.namespace(IDENTITY), KEYS, BLOCKS)


def test_a_get_meets_the_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A get that comes before the flush waits for the write, and then it is a miss."""
    with make_large(folder) as store:
        namespace = store.namespace(IDENTITY)
        Failing(store, monkeypatch, {store.writer.flights._next_tag})
        assert namespace.put(KEYS[:1], BLOCKS[:1]).all_ok
        result, _ = read_back(namespace, KEYS[:1], BLOCKS[:1])
        assert result.missed.all()
        assert not namespace.contains_one(KEYS[0])
        with pytest.raises(DurabilityError):
            store.flush()


def test_a_failed_version_frees_no_older_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fails: what is read is the old payload or a miss; deleted, neither comes back."""
    store = make_large(folder)
    namespace = store.namespace(IDENTITY)
    namespace.put(KEYS[:2], BLOCKS[:2])
    store.flush()
    Failing(
        store,
        monkeypatch,
        set(range(store.writer.flights._next_tag, store.writer.flights._next_tag + 8)),
    )
    namespace.put(KEYS[:2], BLOCKS[2:4], replace=True)
    with pytest.raises(DurabilityError):
        store.flush()
    result, out = read_back(namespace, KEYS[:2], BLOCKS[:2])
    for row in range(2):
        assert not result.ok[row] or np.array_equal(out[row], BLOCKS[row])
    namespace.delete(KEYS[:2])
    crash(store)
    for _ in range(2):
        with make(folder) as store:
            assert not store.namespace(IDENTITY).contains(KEYS[:2]).any()


def test_a_failed_sync_loses_what_it_covered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sync fails: what was captured since the last one is gone, also after a crash; the rest
    stays.
    """
    store = make_large(folder)
    namespace = store.namespace(IDENTITY)
    namespace.put(KEYS[:4], BLOCKS[:4])
    store.flush()
    namespace.put(KEYS[4:6], BLOCKS[4:6])
    with monkeypatch.context() as patched:
        patched.setattr(
            store.io, "sync", lambda fds: np.full(len(fds), -errno.EIO, np.int32), raising=True
        )
        with pytest.raises(DurabilityError) as caught:
            store.flush()
    assert caught.value.blocks_lost == 2
    assert namespace.contains(KEYS[:6]).tolist() == [True] * 4 + [False] * 2
    assert namespace.put(KEYS[6:8], BLOCKS[6:8]).all_ok
    store.flush()
    crash(store)
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.contains(KEYS[:8]).tolist() == [True] * 4 + [False] * 2 + [True] * 2
        assert_equal(namespace, KEYS[:4] + KEYS[6:8], np.concatenate([BLOCKS[:4], BLOCKS[6:8]]))
