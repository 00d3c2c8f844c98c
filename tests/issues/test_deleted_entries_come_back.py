"""Fault: deleted entries come back after recovery.

flashkv guarantees: once delete() returned, the key is absent until it is put again: after a close,
after a kill of the process, after the space was used again, whatever became of the versions before
it. Nor does an older version come back when the newer one is damaged, once a flush returned.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from small_stores import (
    IDENTITY,
    MIB,
    PAGE,
    assert_equal,
    broken_segment,
    crash,
    edit,
    make,
    names,
    payload,
    place_of,
    read_back,
    segment_file,
    start_child,
)

KEYS = names(64)
BLOCKS = payload(11, 64)


def reopen_three_times(folder: Path, gone: list[bytes]) -> None:
    for _ in range(3):
        with make(folder) as store:
            namespace = store.namespace(IDENTITY)
            assert not namespace.contains(gone).any()
            result, _ = read_back(namespace, gone, payload(0, len(gone)))
            assert result.missed.all()
            assert namespace.match(gone).count == 0


def test_wrapped_and_reopened(folder: Path) -> None:
    """Put, delete, fill the store twice over, reopen three times: absent."""
    with make(folder, capacity=24 * MIB) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, BLOCKS)
        assert (namespace.delete(KEYS).statuses == 0).all()
        filler = np.random.default_rng(1).integers(0, 1 << 16, (256, 2, 2, 2, 16, 64), np.uint16)
        for batch in range(12):
            assert namespace.put(names(256, "f", 256 * batch), filler).all_ok
        assert store.stats().evicted_segments > 4
    reopen_three_times(folder, KEYS)


@pytest.mark.parametrize("flushed", ["nothing", "first", "both"])
def test_a_superseded_version(folder: Path, flushed: str) -> None:
    """Put, replace, delete, die: neither version is there, whichever of them had reached the
    device.
    """
    store = make(folder)
    namespace = store.namespace(IDENTITY)
    namespace.put(KEYS, BLOCKS)
    if flushed in ("first", "both"):
        store.flush()
    namespace.put(KEYS, BLOCKS[::-1], replace=True)
    if flushed == "both":
        store.flush()
    assert (namespace.delete(KEYS[:32]).statuses == 0).all()
    crash(store)
    reopen_three_times(folder, KEYS[:32])
    if flushed == "both":
        with make(folder) as store:
            assert_equal(store.namespace(IDENTITY), KEYS[32:], BLOCKS[::-1][32:])


def test_a_killed_process(folder: Path) -> None:
    """SIGKILL right after delete() returned, without any flush or close."""
    with start_child(
        """
        store = make(path)
        namespace = store.namespace(IDENTITY)
        namespace.put(names(64), payload(11, 64))
        store.flush()
        namespace.put(names(64), payload(12, 64), replace=True)
        namespace.delete(names(64))
        print("deleted", flush=True)
        sys.stdin.read()
        """,
        folder,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "deleted\n"
        process.kill()
    reopen_three_times(folder, KEYS)


def test_an_unflushed_block(folder: Path) -> None:
    """Deleted while its write is still on its way."""
    store = make(folder)
    namespace = store.namespace(IDENTITY)
    namespace.put(KEYS, BLOCKS)
    namespace.delete(KEYS)
    crash(store)
    reopen_three_times(folder, KEYS)


def test_a_key_that_could_not_be_read(folder: Path) -> None:
    """A block that fell out of the index through a failed read is deleted like any other."""
    store = make(folder)
    namespace = store.namespace(IDENTITY)
    namespace.put(KEYS, BLOCKS)
    store.flush()
    with broken_segment(store, 0, os.O_WRONLY):
        result, _ = read_back(namespace, KEYS[:8], BLOCKS[:8])
        assert not result.ok.any()
    namespace.delete(KEYS[:8])
    crash(store)
    reopen_three_times(folder, KEYS[:8])


def test_the_version_before_a_damaged_one(folder: Path) -> None:
    """The newer version is damaged after a flush: a miss, never the older version, also after a
    crash.
    """
    store = make(folder)
    namespace = store.namespace(IDENTITY)
    namespace.put(KEYS[:1], BLOCKS[:1])
    store.flush()
    namespace.put(KEYS[:1], BLOCKS[1:2], replace=True)
    store.flush()
    place = place_of(namespace, KEYS[0])
    crash(store)
    with edit(segment_file(folder, int(place["segment"]))) as fd:
        os.pwrite(fd, b"\xff" * 64, (int(place["page"]) + int(place["header_pages"])) * PAGE)
    reopen_three_times(folder, KEYS[:1])


def test_rotated_namespaces_stay_away(folder: Path) -> None:
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, BLOCKS)
        assert namespace.rotate() == len(KEYS)
        assert not namespace.contains(KEYS).any()
        namespace.put(KEYS[:4], BLOCKS[4:8])
    for _ in range(3):
        with make(folder) as store:
            namespace = store.namespace(IDENTITY)
            assert not namespace.contains(KEYS[4:]).any()
            assert_equal(namespace, KEYS[:4], BLOCKS[4:8])


def test_a_deleted_key_can_be_put_again(folder: Path) -> None:
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        for version in range(4):
            namespace.put(KEYS, payload(version, 64))
            if version < 3:
                namespace.delete(KEYS)
    for _ in range(2):
        with make(folder) as store:
            assert_equal(store.namespace(IDENTITY), KEYS, payload(3, 64))
