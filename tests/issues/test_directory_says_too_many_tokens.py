"""Fault: a directory that says that a block has more tokens than its record has makes each get
raise MemoryViewError, as if the caller had given too little memory.

flashkv guarantees: such a block is damage: a miss, counted and dropped, and a new put stores it. A
block that is really longer than the memory still is the caller's error.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from small_stores import (
    IDENTITY,
    PAGE,
    assert_equal,
    edit,
    make,
    names,
    payload,
    read_back,
    segment_file,
)

from flashkv import MemoryViewError, directory
from flashkv.segments import decode_header

KEYS = names(2)
BLOCKS = payload(1, 2)


@pytest.mark.parametrize("claims", [[1000, 1000], [31, 1]])
def test_it_is_damage(folder: Path, claims: list[int]) -> None:
    """The second claim even has the record's sum."""
    store = make(folder, codec="raw")
    store.namespace(IDENTITY).put(KEYS, BLOCKS)
    store.flush()
    with store.writer_lock:
        store.writer.seal()
    store.close()
    data = segment_file(folder, 0).read_bytes()
    header = decode_header(data[:PAGE])
    assert header is not None
    uuid, epoch = header.segment_uuid, header.epoch
    footer = directory.decode_footer(data[-PAGE:], uuid, epoch, len(data))
    assert footer is not None
    first, end = footer.span()
    rows = directory.decode(footer, data[first:end], first)
    assert rows is not None
    assert len(rows.records) == 1
    records, blocks = rows.records.copy(), rows.blocks.copy()
    records["tokens"], blocks["tokens"] = sum(claims), claims
    forged = directory.Directory(records, blocks, rows.namespaces, rows.last_sequence)
    body, page = directory.encode(forged, uuid, epoch, first // PAGE, bloom=False)
    with edit(segment_file(folder, 0)) as fd:
        os.pwrite(fd, body, first)
        os.pwrite(fd, page, len(data) - PAGE)
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        result, _ = read_back(namespace, KEYS[:1], BLOCKS[:1])
        assert result.missed.all()
        assert store.stats().damaged_blocks == 1
        assert not namespace.contains_one(KEYS[0])
        assert namespace.put(KEYS[:1], BLOCKS[:1]).all_ok
        assert_equal(namespace, KEYS[:1], BLOCKS[:1])


def test_a_long_block_is_the_callers_error(folder: Path) -> None:
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, BLOCKS)
        out = np.zeros((2, 2, 2, 2, 8, 64), np.uint16)
        with pytest.raises(MemoryViewError, match="fit the destination"):
            namespace.get(KEYS, out)
        assert namespace.contains(KEYS).all()
        assert store.stats().damaged_blocks == 0
        assert_equal(namespace, KEYS, BLOCKS)
