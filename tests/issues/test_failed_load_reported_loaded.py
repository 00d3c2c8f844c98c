"""Fault: a failed load is reported as loaded, and the caller computes on what was in its buffer.

flashkv guarantees: OK means that all bytes of the block are there. Whatever fails (the device, a
checksum, a segment that is gone) is another status, for just the blocks that it hit; and memory
outside of the destination is never touched.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from small_stores import (
    BACKENDS,
    IDENTITY,
    PAGE,
    broken_segment,
    edit,
    make,
    names,
    payload,
    place_of,
    segment_file,
)

from flashkv import BlockStatus

COUNT = 32
KEYS = names(COUNT)
BLOCKS = payload(21, COUNT)
POISON = 0xDEAD


def poisoned() -> tuple[np.ndarray, np.ndarray]:
    """(memory with a guard block before and behind, the destination in it)."""
    memory = np.full((COUNT + 2, *BLOCKS.shape[1:]), POISON, np.uint16)
    return memory, memory[1:-1]


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_device_fails(folder: Path, backend: str, codec: str) -> None:
    with make(folder, backend=backend, codec=codec, header_cache_bytes=0) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, BLOCKS)
        store.flush()
        memory, out = poisoned()
        with broken_segment(store, 0, os.O_WRONLY):
            result = namespace.get(KEYS, out)
        assert (result.statuses == BlockStatus.IO_ERROR).all()
        assert not result.ok.any()
        assert result.lost.all()
        assert (memory[[0, -1]] == POISON).all()
        assert store.stats().failed_reads == COUNT


@pytest.mark.parametrize("codec", ["lossless", "raw"])
def test_a_part_is_damaged(folder: Path, codec: str) -> None:
    """Blocks of several records, one of them damaged: exactly its blocks aren't OK."""
    with make(folder, codec=codec) as store:
        namespace = store.namespace(IDENTITY)
        for first in range(0, COUNT, 8):
            namespace.put(KEYS[first : first + 8], BLOCKS[first : first + 8])
        store.flush()
        place = place_of(namespace, KEYS[8])
        pages = int(place["pages"]) - int(place["header_pages"])
        with edit(segment_file(folder, int(place["segment"]))) as fd:
            start = (int(place["page"]) + int(place["header_pages"])) * PAGE
            os.pwrite(fd, b"\x13" * (pages * PAGE), start)
        memory, out = poisoned()
        result = namespace.get(KEYS, out)
        wrong = (np.arange(COUNT) >= 8) & (np.arange(COUNT) < 16)
        assert np.array_equal(result.missed, wrong)
        assert np.array_equal(out[~wrong], BLOCKS[~wrong])
        assert (memory[[0, -1]] == POISON).all()


def test_absent_blocks_leave_the_memory_alone(folder: Path) -> None:
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS[::2], BLOCKS[::2])
        memory, out = poisoned()
        result = namespace.get(KEYS, out)
        assert np.array_equal(result.ok, np.arange(COUNT) % 2 == 0)
        assert np.array_equal(out[::2], BLOCKS[::2])
        assert (memory[[0, -1]] == POISON).all()
        assert (out[1::2] == POISON).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ticket_tells(folder: Path, backend: str) -> None:
    """The asynchronous form carries the same statuses."""
    with make(folder, backend=backend) as store, store.client() as client:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, BLOCKS)
        store.flush()
        _, out = poisoned()
        with broken_segment(store, 0, os.O_WRONLY):
            ticket = client.submit_get(namespace, KEYS, out)
            assert ticket.wait(10_000)
        assert ticket.error is None
        assert (ticket.result.statuses == BlockStatus.IO_ERROR).all()
