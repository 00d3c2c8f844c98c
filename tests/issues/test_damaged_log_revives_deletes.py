"""Damage to one entry of the manifest's log costs what that entry said, and no other.

Found by the damage suite: kills of a segment whose beginning was the damaged entry counted no
more, though they were whole; and a segment that had been reclaimed lived on behind damage, with
what had been deleted from it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from small_stores import IDENTITY, edit, make, names, payload, place_of, read_back

OPENED, FREED, KILL = 2, 3, 4
KEYS = names(6)
DATA = payload(1, 6)


def entries(log: Path) -> list[tuple[int, int, bytes]]:
    """(offset, type, payload) of each entry."""
    data, at, found = log.read_bytes(), 0, []
    while at < len(data):
        _, kind, _, length, _ = struct.unpack_from("<IHHII", data, at)
        found.append((at, kind, data[at + 16 : at + 16 + length]))
        at += 16 + length + -length % 8
    return found


def ruling_log(path: Path) -> Path:
    return max((path / "shards" / "0").glob("manifest-*.log"))


def damage(log: Path, offset: int) -> None:
    with edit(log) as fd:
        byte = os.pread(fd, 1, offset)[0]
        os.pwrite(fd, bytes([byte ^ 0x10]), offset)


@pytest.fixture
def deleted(store_path: Path) -> Path:
    """A store with a sealed segment and an open one; in both a block was deleted, and compacted."""
    with make(store_path) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(KEYS[:3], DATA[:3]).all_ok
        store.writer.seal()
        assert namespace.put(KEYS[3:], DATA[3:]).all_ok
        assert namespace.delete([KEYS[0], KEYS[3]]).all_ok
    make(store_path).close()
    return store_path


@pytest.mark.parametrize("which", [0, 1])
def test_the_beginning_of_a_segment_is_lost(deleted: Path, which: int) -> None:
    log = ruling_log(deleted)
    begun = [(offset, payload) for offset, kind, payload in entries(log) if kind == OPENED]
    damage(log, begun[which][0] + 20)
    for turn in range(3):  # the second opening is a writer's, which begins a log anew
        with make(deleted, read_only=turn != 1) as store:
            assert store.recovery.damaged_log_entries == (turn < 2)
            result, out = read_back(store.namespace(IDENTITY), KEYS, DATA)
            assert result.ok.tolist() == [False, True, True, False, True, True]
            assert np.array_equal(out[result.ok], DATA[result.ok])


def test_a_later_epoch_begins_in_the_damaged_entry(store_path: Path) -> None:
    """Not compacted yet: the segment's earlier epoch is known, its present one is not."""
    with make(store_path) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(KEYS[:3], DATA[:3]).all_ok
        store.writer.seal()
        with store.writer_lock:
            assert store.space.reclaim(1, store.writer.take_kills) == 1
        assert namespace.put(KEYS[3:], DATA[3:]).all_ok
        assert place_of(namespace, KEYS[4])["segment"] == 0
        assert namespace.delete([KEYS[3]]).all_ok
    log = ruling_log(store_path)
    begun = [offset for offset, kind, _ in entries(log) if kind == OPENED]
    damage(log, begun[-1])
    with make(store_path) as store:
        result, _ = read_back(store.namespace(IDENTITY), KEYS, DATA)
        assert result.ok.tolist() == [False, False, False, False, True, True]


def test_what_was_reclaimed_stays_so_behind_damage(store_path: Path) -> None:
    """In a compacted log no kill comes before an end, so that none can be what was damaged."""
    with make(store_path) as store:
        namespace = store.namespace(IDENTITY)
        for first in (0, 3):
            assert namespace.put(KEYS[first : first + 3], DATA[first : first + 3]).all_ok
            store.writer.seal()
        assert namespace.delete([KEYS[3]]).all_ok
        with store.writer_lock:
            assert store.space.reclaim(2, store.writer.take_kills) == 2
    make(store_path).close()
    log = ruling_log(store_path)
    ends = [(offset, payload) for offset, kind, payload in entries(log) if kind == FREED]
    assert [struct.unpack_from("<I", row)[0] for _, row in ends] == [0, 1]
    damage(log, entries(log)[1][0])  # the beginning of segment 0; the end of 1 lies behind
    with make(store_path) as store:
        result, _ = read_back(store.namespace(IDENTITY), KEYS, DATA)
        assert not result.ok.any()


def test_the_beginning_of_the_log_is_lost(deleted: Path) -> None:
    """The first entry says whose log it is and where it begins; all others count without it."""
    damage(ruling_log(deleted), 20)
    with make(deleted) as store:
        assert store.stats().recovery["manifest_rebuilt"]
        result, out = read_back(store.namespace(IDENTITY), KEYS, DATA)
        assert result.ok.tolist() == [False, True, True, False, True, True]
        assert np.array_equal(out[result.ok], DATA[result.ok])
