"""A segment whose header is of an earlier epoch, as a lost write leaves it, or damaged, is read by
what the log knows of it.

Found by the damage suite: the first passed for a segment in which nothing had been written yet; of
the second a read-only handle took any other damage for a writer's doing, and dropped the whole
segment without counting it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.fsck import CLEAN, MENDED, check, repair
from small_stores import (
    IDENTITY,
    PAGE,
    edit,
    make,
    names,
    payload,
    place_of,
    read_back,
    segment_file,
)

KEYS = names(8)
DATA = payload(1, 8)


@pytest.fixture
def reused(store_path: Path) -> tuple[Path, bytes]:
    """A segment in its second epoch, and the header of its first."""
    with make(store_path) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(names(4, "old"), DATA[:4]).all_ok
        store.writer.seal()
        header = segment_file(store_path, 0).read_bytes()[:PAGE]
        with store.writer_lock:
            assert store.space.reclaim(1, store.writer.take_kills) == 1
        for first in range(0, 8, 2):
            assert namespace.put(KEYS[first : first + 2], DATA[first : first + 2]).all_ok
        assert namespace.delete(KEYS[:1]).all_ok
        assert [(s.number, s.epoch) for s in store.segments] == [(0, 2)]
    return store_path, header


@pytest.mark.parametrize("read_only", [True, False])
def test_the_header_of_the_epoch_before(reused: tuple[Path, bytes], read_only: bool) -> None:
    path, header = reused
    with edit(segment_file(path, 0)) as fd:
        os.pwrite(fd, header, 0)
    with make(path, read_only=read_only) as store:
        assert store.recovery.damaged_headers == 1
        result, out = read_back(store.namespace(IDENTITY), KEYS, DATA)
        assert result.ok.tolist() == [False] + [True] * 7
        assert np.array_equal(out[1:], DATA[1:])


def test_fsck_writes_it_anew(reused: tuple[Path, bytes]) -> None:
    path, header = reused
    with edit(segment_file(path, 0)) as fd:
        os.pwrite(fd, header, 0)
    found = check(path).damage
    assert [(each.file, each.page) for each in found] == [("00000000.seg", 0)]
    assert "epoch 1" in found[0].what
    assert repair(path).status == MENDED
    assert check(path).status == CLEAN
    with make(path) as store:
        assert store.recovery.damaged_headers == 0
        assert read_back(store.namespace(IDENTITY), KEYS[1:], DATA[1:])[0].all_ok


def test_an_epoch_that_was_begun_and_not_written(reused: tuple[Path, bytes]) -> None:
    """What a crash leaves between the log's entry and the header: nothing is wrong."""
    path, _ = reused
    with make(path) as store:
        store.writer.seal()
        with store.writer_lock:
            assert store.space.reclaim(1, store.writer.take_kills) == 1
        store.manifest.segment_opened(0, 3, store.segments[0].uuid)
    assert check(path).status == CLEAN
    with make(path) as store:
        assert store.recovery.damaged_headers == 0
        assert not read_back(store.namespace(IDENTITY), KEYS, DATA)[0].ok.any()
        assert store.namespace(IDENTITY).put(KEYS, DATA).all_ok
        assert store.segments[0].epoch == 4


@pytest.mark.parametrize("what", ["noise", "the epoch before"])
def test_more_damage_under_a_read_only_handle(reused: tuple[Path, bytes], what: str) -> None:
    path, header = reused
    with make(path, read_only=True) as store:
        place = place_of(store.namespace(IDENTITY), KEYS[2])
    with edit(segment_file(path, 0)) as fd:
        os.pwrite(fd, header if what == "the epoch before" else b"\x5a" * PAGE, 0)
    with make(path, read_only=True) as store:
        with edit(segment_file(path, 0)) as fd:
            os.pwrite(fd, b"\x5a", int(place["page"]) * PAGE + 20)
        result, _ = read_back(store.namespace(IDENTITY), KEYS, DATA)
        assert result.ok.tolist() == [False, True, False, False, True, True, True, True]
        assert store.stats().damaged_blocks == 2
        assert store.stats().stale_blocks == 0
