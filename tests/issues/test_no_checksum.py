"""Fault: no checksum, or a length check only: damage on disk is served.

flashkv guarantees: a flipped bit, a zeroed page, an appended page or two swapped blocks, found by a
running store or after a reopen, are a miss and one more in stats().damaged_blocks; the entry is
dropped, no other block is harmed, and storing it again hits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
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

COUNT = 48
KEYS = names(COUNT)
BLOCKS = payload(4, COUNT)
VICTIM = 17
Harm = Callable[[int, Any, random.Random], None]


def page_of(place: Any, page: int) -> int:
    """Byte offset of the record's payload page, counted from its end if negative."""
    payload_pages = int(place["pages"]) - int(place["header_pages"])
    return (int(place["page"]) + int(place["header_pages"]) + page % payload_pages) * PAGE


def flip_a_bit(fd: int, place: Any, rng: random.Random) -> None:
    """In a byte that the block needs: at the front of one of its pages."""
    at = page_of(place, rng.randrange(1 << 20)) + rng.randrange(64)
    byte = os.pread(fd, 1, at)[0]
    os.pwrite(fd, bytes([byte ^ 1 << rng.randrange(8)]), at)


def flip_a_bit_of_the_header(fd: int, place: Any, rng: random.Random) -> None:
    at = int(place["page"]) * PAGE + rng.randrange(144)
    byte = os.pread(fd, 1, at)[0]
    os.pwrite(fd, bytes([byte ^ 1 << rng.randrange(8)]), at)


def zero_a_page(fd: int, place: Any, rng: random.Random) -> None:
    os.pwrite(fd, bytes(PAGE), page_of(place, rng.randrange(1 << 20)))


def zero_the_header(fd: int, place: Any, rng: random.Random) -> None:
    os.pwrite(fd, bytes(PAGE), int(place["page"]) * PAGE)


def repeat_a_page(fd: int, place: Any, rng: random.Random) -> None:
    """A page of the same record in another one's place: right bytes, wrong ordinal."""
    os.pwrite(fd, os.pread(fd, PAGE, page_of(place, 0)), page_of(place, -1))


HARMS = [
    flip_a_bit,
    flip_a_bit_of_the_header,
    zero_a_page,
    zero_the_header,
    repeat_a_page,
]


def put_apart(store: Any) -> Any:
    """Every block in a record of its own."""
    namespace = store.namespace(IDENTITY)
    for row, key in enumerate(KEYS):
        assert namespace.put([key], BLOCKS[row : row + 1]).all_ok
    store.flush()
    return namespace


def harm_on_disk(folder: Path, place: Any, harm: Harm, seed: int) -> None:
    with edit(segment_file(folder, int(place["segment"]))) as fd:
        harm(fd, place, random.Random(seed))


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize("harm", HARMS)
def test_found_by_a_running_store(folder: Path, harm: Harm, codec: str, seed: int) -> None:
    with make(folder, codec=codec, header_cache_bytes=0) as store:
        namespace = put_apart(store)
        harm_on_disk(folder, place_of(namespace, KEYS[VICTIM]), harm, seed)
        result, out = read_back(namespace, KEYS, BLOCKS)
        others = np.arange(COUNT) != VICTIM
        assert result.missed.tolist() == (~others).tolist()
        assert np.array_equal(out[others], BLOCKS[others])
        assert store.stats().damaged_blocks == 1
        assert not namespace.contains_one(KEYS[VICTIM])
        assert (namespace.put(KEYS, BLOCKS).statuses == np.where(others, 7, 0)).all()
        assert_equal(namespace, KEYS, BLOCKS)
    with make(folder) as store:
        assert_equal(store.namespace(IDENTITY), KEYS, BLOCKS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("harm", HARMS)
def test_found_after_a_reopen(folder: Path, harm: Harm, backend: str, seed: int) -> None:
    with make(folder, backend=backend) as store:
        place = place_of(put_apart(store), KEYS[VICTIM])
    harm_on_disk(folder, place, harm, seed)
    with make(folder, backend=backend) as store:
        namespace = store.namespace(IDENTITY)
        result, out = read_back(namespace, KEYS, BLOCKS)
        others = np.arange(COUNT) != VICTIM
        assert result.missed.tolist() == (~others).tolist()
        assert np.array_equal(out[others], BLOCKS[others])
        stats = store.stats()
        # A header that no longer looks like one isn't counted as a record.
        of_header = harm in (zero_the_header, flip_a_bit_of_the_header)
        assert stats.recovery["damaged_records"] == 1 or of_header
        assert namespace.put([KEYS[VICTIM]], BLOCKS[VICTIM : VICTIM + 1])[0] == 0
        assert_equal(namespace, KEYS, BLOCKS)


def test_a_page_is_inserted(folder: Path) -> None:
    """Everything behind it lies a page further: records know their place, so none is taken for
    another.
    """
    with make(folder) as store:
        place = place_of(put_apart(store), KEYS[VICTIM])
    file = segment_file(folder, int(place["segment"]))
    data = file.read_bytes()
    cut = page_of(place, 0)
    file.write_bytes((data[:cut] + b"\x5a" * PAGE + data[cut:])[: len(data)])
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        result, out = read_back(namespace, KEYS, BLOCKS)
        assert result.ok.tolist() == [row < VICTIM for row in range(COUNT)]
        assert np.array_equal(out[:VICTIM], BLOCKS[:VICTIM])
        assert namespace.put(KEYS, BLOCKS).all_ok
        assert_equal(namespace, KEYS, BLOCKS)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_page_is_appended(folder: Path, reopened: bool) -> None:
    """A file that is longer than it should be: the page is nobody's."""
    store = make(folder)
    namespace = put_apart(store)
    file = segment_file(folder, int(place_of(namespace, KEYS[0])["segment"]))
    with file.open("ab") as handle:
        handle.write(b"\x77" * PAGE)
    if reopened:
        store.close()
        store = make(folder)
        namespace = store.namespace(IDENTITY)
    assert_equal(namespace, KEYS, BLOCKS)
    assert store.stats().damaged_blocks == 0
    store.close()


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize("reopened", [False, True])
def test_two_blocks_are_swapped(folder: Path, codec: str, reopened: bool) -> None:
    """Whole records, headers and all, in each other's place: both are misses."""
    store = make(folder, codec=codec, header_cache_bytes=0)
    namespace = put_apart(store)
    sizes: dict[int, int] = {}
    first, second = -1, -1
    for row, key in enumerate(KEYS):
        pages = int(place_of(namespace, key)["pages"])
        if pages in sizes:
            first, second = sizes[pages], row
            break
        sizes[pages] = row
    places = [place_of(namespace, KEYS[row]) for row in (first, second)]
    with edit(segment_file(folder, int(places[0]["segment"]))) as fd:
        length = int(places[0]["pages"]) * PAGE
        offsets = [int(place["page"]) * PAGE for place in places]
        images = [os.pread(fd, length, offset) for offset in offsets]
        os.pwrite(fd, images[1], offsets[0])
        os.pwrite(fd, images[0], offsets[1])
    if reopened:
        store.close()
        store = make(folder, codec=codec)
        namespace = store.namespace(IDENTITY)
    result, out = read_back(namespace, KEYS, BLOCKS)
    others = np.ones(COUNT, np.bool_)
    others[[first, second]] = False
    assert result.missed.tolist() == (~others).tolist()
    assert np.array_equal(out[others], BLOCKS[others])
    if not reopened:
        assert store.stats().damaged_blocks == 2
    assert namespace.put(KEYS, BLOCKS).all_ok
    assert_equal(namespace, KEYS, BLOCKS)
    store.close()


def test_one_page_of_a_large_record(folder: Path, seed: int) -> None:
    """Blocks that share a record but not the damaged page are untouched."""
    with make(folder, codec="raw") as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(KEYS, BLOCKS).all_ok
        store.flush()
        place = place_of(namespace, KEYS[0])
        block_pages = BLOCKS[0].nbytes // PAGE
        with edit(segment_file(folder, int(place["segment"]))) as fd:
            page = random.Random(seed).randrange(block_pages)
            at = page_of(place, 3 * block_pages + page)  # block 3 of the record
            os.pwrite(fd, bytes(PAGE), at)
        result, out = read_back(namespace, KEYS, BLOCKS)
        assert np.flatnonzero(result.missed).tolist() == [3]
        others = np.arange(COUNT) != 3
        assert np.array_equal(out[others], BLOCKS[others])
