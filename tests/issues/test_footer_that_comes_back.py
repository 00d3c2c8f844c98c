"""Fault: a footer that an opening couldn't read, or whose directory it couldn't use, rules later
over what was stored in that segment meanwhile.

flashkv guarantees: what was flushed is there, whatever the device reads wrongly at one opening and
rightly at the next. A passing error costs a second look; a segment that may have a footer is never
filled on.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import (
    IDENTITY,
    MIB,
    PAGE,
    assert_equal,
    edit,
    make,
    names,
    payload,
    place_of,
    read_back,
    segment_file,
)

from flashkv.blockio import BlockIO
from flashkv.segments import SegmentState

KEYS = names(4)
BLOCKS = payload(1, 4)
NEW = payload(5, 1)
FOOTER = 4 * MIB - PAGE


@pytest.fixture
def sealed(folder: Path) -> tuple[Path, int]:
    """A store of one sealed segment whose last record is rotten, and where its directory begins."""
    store = make(folder, codec="raw")
    namespace = store.namespace(IDENTITY)
    for row, key in enumerate(KEYS):
        namespace.put([key], BLOCKS[row : row + 1])
    store.flush()
    with store.writer_lock:
        store.writer.seal()
    place = place_of(namespace, KEYS[3])
    assert int(place["segment"]) == 0
    store.close()
    with edit(segment_file(folder, 0)) as fd:
        at = (int(place["page"]) + 2) * PAGE + 5
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ 1]), at)
    return folder, (int(place["page"]) + int(place["pages"])) * PAGE


class Reads:
    """The device's reads at one offset go wrong so many times: an error, or a flipped bit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offset: int, times: int, code: int) -> None:
        self.left, self.hit = times, 0
        right = BlockIO.read

        def read(io: BlockIO, fd: int, array: Any, offset_read: int) -> int:
            result = right(io, fd, array, offset_read)
            if offset_read != offset or not self.left:
                return result
            self.left -= 1
            self.hit += 1
            if code:
                return -code
            array[40] ^= 1
            return result

        monkeypatch.setattr(BlockIO, "read", read)


@pytest.mark.parametrize("where", ["footer", "directory"])
@pytest.mark.parametrize("code", [errno.EIO, 0])
def test_a_passing_error_costs_nothing(
    sealed: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, code: int, where: str
) -> None:
    folder, directory = sealed
    reads = Reads(monkeypatch, FOOTER if where == "footer" else directory, 1, code)
    with make(folder) as store:
        assert reads.hit == 1
        recovery = store.stats().recovery
        assert (recovery["sealed_segments"], recovery["damaged_directories"]) == (1, 0)
        assert store.namespace(IDENTITY).contains(KEYS).all()


@pytest.mark.parametrize(
    ("where", "code"), [("footer", errno.EIO), ("directory", errno.EIO), ("directory", 0)]
)
def test_what_is_stored_meanwhile_stays(
    sealed: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, where: str, code: int
) -> None:
    folder, directory = sealed
    with monkeypatch.context() as context:
        reads = Reads(context, FOOTER if where == "footer" else directory, 1000, code)
        store = make(folder)
        assert reads.hit >= 2
    assert store.segments[0].state != SegmentState.OPEN
    namespace = store.namespace(IDENTITY)
    assert namespace.put([b"new"], NEW).all_ok
    store.flush()
    assert int(place_of(namespace, b"new")["segment"]) != 0
    store.close()
    for _ in range(2):
        with make(folder) as store:
            namespace = store.namespace(IDENTITY)
            assert_equal(namespace, [b"new"], NEW)
            result, out = read_back(namespace, KEYS, BLOCKS)
            assert result.ok.tolist() == [True, True, True, False]
            assert np.array_equal(out[:3], BLOCKS[:3])
            assert store.stats().recovery["sealed_segments"] >= 1


def test_a_rotten_directory_is_replaced(sealed: tuple[Path, int]) -> None:
    """Nothing comes back here; the segment gets a new directory all the same, and only once."""
    folder, directory = sealed
    with edit(segment_file(folder, 0)) as fd:
        os.pwrite(fd, b"\xff" * 64, directory)
    with make(folder) as store:
        assert store.stats().recovery["damaged_directories"] == 1
        assert store.segments[0].state == SegmentState.SEALED
    with make(folder) as store:
        recovery = store.stats().recovery
        assert (recovery["damaged_directories"], recovery["scanned_segments"]) == (0, 0)
        assert_equal(store.namespace(IDENTITY), KEYS[:3], BLOCKS[:3])
