"""Fault: a sequence or an epoch near 2^64 with a right checksum, in a footer, a header or the log,
makes an opening or a later put fail with OverflowError.

flashkv guarantees: what says a number that can't have been given is damaged like any other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import IDENTITY, MIB, PAGE, edit, make, names, payload, segment_file

from flashkv import directory, limits
from flashkv.checksums import crc32c
from flashkv.folder import manifest_name
from flashkv.manifest_log import KILL, encode_entry, read_state, retired_row, segment_row
from flashkv.native import ffi, lib
from flashkv.segments import decode_header
from flashkv.superblock import Superblock

KEYS = names(600)
LAST = int(lib.FKV_COUNT_END) - 1
FAR = [LAST + 1, 2**64 - 1]
UUID = bytes(range(16))
LOG = Superblock(
    store_uuid=UUID,
    segment_bytes=limits.SEGMENT_BYTES_MIN,
    capacity_bytes=32 * MIB,
    geometry_json=b"{}",
    created_ms=0,
    manifest_generation=1,
)


def change(page: bytes, kind: str, **fields: int) -> Any:
    """The structure of a page with other fields, its checksum zero."""
    row = ffi.new(f"{kind} *")
    ffi.memmove(row, page, ffi.sizeof(kind))
    for name, value in fields.items():
        setattr(row, name, value)
    row.crc = 0
    return row


def page_of(row: Any) -> bytes:
    return bytes(ffi.buffer(row)).ljust(PAGE, b"\0")


@pytest.mark.parametrize("number", FAR)
@pytest.mark.parametrize("where", ["last_sequence", "epoch", "first_sequence"])
def test_a_store_goes_on(folder: Path, where: str, number: int) -> None:
    store = make(folder, codec="raw")
    namespace = store.namespace(IDENTITY)
    for at in range(0, len(KEYS), 16):
        blocks = payload(at, len(KEYS[at : at + 16]))
        namespace.put(KEYS[at : at + 16], blocks)
    store.close()
    path = segment_file(folder, 0)
    data = path.read_bytes()
    header = decode_header(data[:PAGE])
    assert header is not None
    if where == "last_sequence":
        row = change(data[-PAGE:], "fkv_segment_footer", last_sequence=number)
        page, at = directory.footer_page(row, header.segment_uuid, header.epoch), len(data) - PAGE
    else:
        row = change(data[:PAGE], "fkv_segment_header", **{where: number})
        row.crc = crc32c(0, page_of(row))
        page, at = page_of(row), 0
    with edit(path) as fd:
        os.pwrite(fd, page, at)
    with make(folder) as store:
        recovery = store.stats().recovery
        assert recovery["damaged_headers"] == (where != "last_sequence")
        assert recovery["last_sequence"] < LAST
        namespace = store.namespace(IDENTITY)
        assert namespace.contains(KEYS).all()
        for first in range(0, 3000, 16):  # all segments begin anew
            namespace.put(names(16, "y", first), payload(first, 16))
        store.flush()
    make(folder).close()


@pytest.mark.parametrize("number", [LAST, *FAR])
def test_a_footer_and_its_rows(number: int) -> None:
    good = number == LAST
    rows = directory.Directory(
        np.zeros(0, directory.DIR_RECORD), np.zeros(0, directory.DIR_BLOCK), [], number
    )
    _, page = directory.encode(rows, UUID, 7, 1, bloom=False)
    assert (directory.decode_footer(page, UUID, 7, limits.SEGMENT_BYTES_MIN) is not None) == good
    record, block = np.zeros(1, directory.DIR_RECORD), np.zeros(1, directory.DIR_BLOCK)
    for name in ("page", "pages", "header_pages", "block_count", "tokens"):
        record[name] = 1
    block["tokens"], record["sequence"] = 1, number
    rows = directory.Directory(record, block, [bytes(32)], 1)
    body, page = directory.encode(rows, UUID, 7, 2, bloom=False)
    footer = directory.decode_footer(page, UUID, 7, limits.SEGMENT_BYTES_MIN)
    assert footer is not None
    assert (directory.decode(footer, body, 2 * PAGE) is not None) == good


def kill(epoch: int, sequence: int) -> bytes:
    rows = np.zeros(2, KILL)
    rows["epoch"], rows["sequence"] = 1, 1
    rows["epoch"][1], rows["sequence"][1] = epoch, sequence
    return rows.tobytes()


def begin(generation: int, next_sequence: int) -> bytes:
    row = ffi.new("fkv_manifest_begin *")
    row.store_uuid, row.generation, row.next_sequence = UUID, generation, next_sequence
    return bytes(ffi.buffer(row))


@pytest.mark.parametrize("number", [LAST, *FAR])
@pytest.mark.parametrize(
    "which", ["opened", "freed", "kill epoch", "kill sequence", "retired", "next_sequence"]
)
def test_an_entry_of_the_log(tmp_path: Path, which: str, number: int) -> None:
    """It is damaged, and hides none behind it."""
    entries = {
        "opened": (lib.FKV_MANIFEST_OPENED, segment_row(3, number, UUID)),
        "freed": (lib.FKV_MANIFEST_FREED, segment_row(3, number, UUID)),
        "kill epoch": (lib.FKV_MANIFEST_KILL, kill(number, 1)),
        "kill sequence": (lib.FKV_MANIFEST_KILL, kill(1, number)),
        "retired": (lib.FKV_MANIFEST_RETIRED, retired_row(bytes(32), number)),
        "next_sequence": (lib.FKV_MANIFEST_BEGIN, begin(1, number)),
    }
    log = [
        (lib.FKV_MANIFEST_BEGIN, begin(1, 5)),
        entries[which],
        (lib.FKV_MANIFEST_OPENED, segment_row(4, 9, UUID)),
    ]
    data = b"".join(encode_entry(kind, text, at, UUID) for at, (kind, text) in enumerate(log))
    (tmp_path / manifest_name(1)).write_bytes(data)
    state, began = read_state(tmp_path, LOG)
    assert began
    assert state.epochs[4] == 9
    assert state.damaged_entries == (number != LAST)
    assert max([state.next_sequence, *state.epochs.values(), *state.retired.values()]) <= LAST
