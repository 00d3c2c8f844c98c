"""Fault: pages that say that long headers begin there make a scan take the square of their number.

flashkv guarantees: the time for a segment without a directory is that of some passes over it,
whatever lies there; what is good behind it is found.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from small_stores import IDENTITY, PAGE, assert_equal, crash, edit, make, names, payload, place_of
from small_stores import segment_file as file_of

from flashkv.checksums import crc32c
from flashkv.native import ffi
from flashkv.segments import decode_header

PAGES = 1020
KEYS = names(2)
BLOCKS = payload(1, 2)


def fake(pages: int) -> bytes:
    """A page that begins as a header of so many pages would."""
    row = ffi.new("fkv_record_header *")
    row.magic = b"FKVR"
    row.header_pages = row.pages = pages
    row.header_bytes = 200
    return bytes(ffi.buffer(row)).ljust(PAGE, b"\0")


def fill(fd: int, first: int, end: int) -> None:
    data = b"".join(fake(end - page) for page in range(first, end))
    os.pwrite(fd, data, first * PAGE)


@pytest.mark.parametrize("epoch", [1, 300])
def test_it_takes_some_passes(folder: Path, epoch: int) -> None:
    """It took two minutes at epoch 300, with 200 such pages alone 6 s."""
    store = make(folder, codec="raw")
    store.namespace(IDENTITY).put(KEYS, BLOCKS)
    store.flush()
    crash(store)
    with edit(file_of(folder, 0)) as fd:
        header = os.pread(fd, PAGE, 0)
        assert decode_header(header) is not None
        row = ffi.new("fkv_segment_header *")
        ffi.memmove(row, header, ffi.sizeof("fkv_segment_header"))
        row.epoch, row.crc = epoch, 0
        row.crc = crc32c(0, bytes(ffi.buffer(row)).ljust(PAGE, b"\0"))
        os.pwrite(fd, bytes(ffi.buffer(row)).ljust(PAGE, b"\0"), 0)
        fill(fd, 20, PAGES)
    began = time.monotonic()
    make(folder).close()
    took_s = time.monotonic() - began
    assert took_s < 5, f"opened in {took_s:.1f} s"


def test_what_lies_behind_is_found(folder: Path) -> None:
    """The budget is long spent there; a header of few pages is checked all the same."""
    store = make(folder, codec="raw")
    namespace = store.namespace(IDENTITY)
    filler = payload(2, 180)
    for row, key in enumerate(names(180, "f")):
        namespace.put([key], filler[row : row + 1])
    namespace.put(KEYS, BLOCKS)
    store.flush()
    place = place_of(namespace, KEYS[0])
    assert int(place["segment"]) == 0
    assert int(place["page"]) > 800
    crash(store)
    with edit(file_of(folder, 0)) as fd:
        fill(fd, 1, int(place["page"]))
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        assert store.stats().recovery["damaged_records"] >= int(place["page"]) - 1
        assert_equal(namespace, KEYS, BLOCKS)
        assert not namespace.contains(names(180, "f")).any()
