"""Fault: a truncated or over-long entry is accepted.

flashkv guarantees: a block of which a part is missing on disk is a miss, found by a running store
or after a reopen; so is one whose record claims another length than the index or than its pages
have; a new put repairs.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import (
    BACKENDS,
    IDENTITY,
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

from flashkv.checksums import crc32c
from flashkv.native import ffi

COUNT = 24
KEYS = names(COUNT)
BLOCKS = payload(31, COUNT)
VICTIM = 15


def put_apart(store: Any) -> Any:
    namespace = store.namespace(IDENTITY)
    for row, key in enumerate(KEYS):
        namespace.put([key], BLOCKS[row : row + 1])
    store.flush()
    return namespace


@pytest.mark.parametrize("cut", ["header", "payload"])
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_file_ends_early(folder: Path, backend: str, reopened: bool, cut: str) -> None:
    store = make(folder, backend=backend, header_cache_bytes=0)
    namespace = put_apart(store)
    place = place_of(namespace, KEYS[VICTIM])
    pages = int(place["header_pages"]) if cut == "header" else int(place["pages"])
    length = (int(place["page"]) + pages - 1) * PAGE + (512 if cut == "payload" else 0)
    if reopened:
        store.close()
    with edit(segment_file(folder, int(place["segment"]))) as fd:
        os.ftruncate(fd, length)
    if reopened:
        store = make(folder, backend=backend)
        namespace = store.namespace(IDENTITY)
    result, out = read_back(namespace, KEYS, BLOCKS)
    assert result.ok.tolist() == [row < VICTIM for row in range(COUNT)]
    assert np.array_equal(out[:VICTIM], BLOCKS[:VICTIM])
    if not reopened:
        assert store.stats().damaged_blocks == COUNT - VICTIM
    assert (namespace.put(KEYS, BLOCKS).statuses[VICTIM:] == 0).all()
    assert_equal(namespace, KEYS, BLOCKS)
    store.close()
    with make(folder) as store:
        assert_equal(store.namespace(IDENTITY), KEYS, BLOCKS)


def forge(fd: int, place: Any, uuid: bytes, epoch: int, **fields: int) -> None:
    """Changes fields of a record's header and gives the header a right checksum again."""
    at = int(place["page"]) * PAGE
    page = bytearray(os.pread(fd, int(place["header_pages"]) * PAGE, at))
    for name, value in fields.items():
        offset = ffi.offsetof("fkv_record_header", name)
        size = ffi.sizeof(dict(ffi.typeof("fkv_record_header").fields)[name].type)
        page[offset : offset + size] = value.to_bytes(size, "little")
    crc_at = ffi.offsetof("fkv_record_header", "crc")
    page[crc_at : crc_at + 4] = bytes(4)
    seed = crc32c(crc32c(0, uuid), struct.pack("<QI", epoch, int(place["page"])))
    page[crc_at : crc_at + 4] = struct.pack("<I", crc32c(seed, bytes(page)))
    os.pwrite(fd, page, at)


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tokens", 0),  # the forger's art: nothing is changed, and the record is right
        ("pages", 1),
        ("pages", -1),
        ("payload_bytes", 4096),
        ("payload_bytes", -4096),
        ("logical_bytes", 2),
        ("logical_bytes", -2),
        ("tokens", 1),
        ("tokens", -1),
        ("block_count", 1),
    ],
)
def test_a_record_claims_another_length(
    folder: Path, field: str, change: int, reopened: bool
) -> None:
    """Even with a right checksum: lengths that contradict each other are no record."""
    store = make(folder, header_cache_bytes=0)
    namespace = put_apart(store)
    place = place_of(namespace, KEYS[VICTIM])
    segment = store.segments[int(place["segment"])]
    uuid, epoch = segment.uuid, segment.epoch
    if reopened:
        store.close()
    with edit(segment_file(folder, int(place["segment"]))) as fd:
        at = int(place["page"]) * PAGE + ffi.offsetof("fkv_record_header", field)
        kind = dict(ffi.typeof("fkv_record_header").fields)[field].type
        size = ffi.sizeof(kind)
        value = int.from_bytes(os.pread(fd, size, at), "little") + change
        forge(fd, place, uuid, epoch, **{field: value})
    if reopened:
        store = make(folder)
        namespace = store.namespace(IDENTITY)
    result, out = read_back(namespace, KEYS, BLOCKS)
    for row in range(COUNT):
        if row == VICTIM:
            assert result.ok[row] == (change == 0), "a forged length was believed"
        elif row < VICTIM:
            assert result.ok[row]
        assert not result.ok[row] or np.array_equal(out[row], BLOCKS[row])
    assert namespace.put(KEYS, BLOCKS).all_ok
    assert_equal(namespace, KEYS, BLOCKS)
    store.close()
