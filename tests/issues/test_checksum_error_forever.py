"""Fault: a checksum error is raised again at every later read.

flashkv guarantees: the first read that meets damage drops the entry and counts it once; from then
on it is a plain miss that costs no I/O, for lookups as well, in every later process too.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
from small_stores import (
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

KEYS = names(16)
BLOCKS = payload(6, 16)


def damage(folder: Path, place: object) -> None:
    with edit(segment_file(folder, int(place["segment"]))) as fd:  # type: ignore[index]
        at = (int(place["page"]) + int(place["header_pages"])) * PAGE  # type: ignore[index]
        os.pwrite(fd, bytes(PAGE), at)


def test_the_first_read_drops_the_entry(folder: Path) -> None:
    with make(folder, codec="raw") as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, BLOCKS)
        store.flush()
        damage(folder, place_of(namespace, KEYS[0]))
        result, _ = read_back(namespace, KEYS, BLOCKS)
        gone = result.missed
        assert gone[0]
        assert not gone[4:].any()
        lost = int(gone.sum())
        assert store.stats().damaged_blocks == lost
        assert np.array_equal(namespace.contains(KEYS), ~gone)
        assert namespace.match(KEYS).count == 0
        reads = store.stats().io["reads"]
        for _ in range(10):
            result, _ = read_back(namespace, KEYS[:1], BLOCKS[:1])
            assert result.missed.all()
        assert store.stats().damaged_blocks == lost
        assert store.stats().io["reads"] == reads, "a plain miss reads nothing"
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        assert not namespace.contains(KEYS)[gone].any()
        namespace.put(KEYS, BLOCKS)
        assert_equal(namespace, KEYS, BLOCKS)
        assert store.stats().damaged_blocks == 0


def test_many_readers_count_it_once(folder: Path) -> None:
    """Readers meet the same damage at once, a writer repairs it: the new entry stays."""
    with make(folder, codec="raw") as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS[:1], BLOCKS[:1])
        store.flush()
        damage(folder, place_of(namespace, KEYS[0]))
        start = threading.Barrier(4)
        seen: list[bool] = []

        def read() -> None:
            start.wait()
            for _ in range(20):
                result, out = read_back(namespace, KEYS[:1], BLOCKS[:1])
                seen.append(not result.all_ok or np.array_equal(out, BLOCKS[:1]))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        namespace.put(KEYS[:1], BLOCKS[:1], replace=True)
        for thread in threads:
            thread.join()
        assert len(seen) == 80
        assert all(seen)
        assert_equal(namespace, KEYS[:1], BLOCKS[:1])
