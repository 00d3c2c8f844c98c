"""Fault: a positive lookup stays positive after its load failed, and the engine tries forever.

flashkv guarantees: a block whose load failed, for damage or because the device said no, is a miss
at the next lookup, and match() ends before it; putting it again makes it a hit.
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
    assert_equal,
    broken_segment,
    edit,
    make,
    names,
    payload,
    place_of,
    read_back,
    segment_file,
)

KEYS = names(20)
BLOCKS = payload(1, 20)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", ["device", "damage", "truncated"])
def test_the_next_lookup_is_a_miss(folder: Path, backend: str, fault: str) -> None:
    with make(folder, backend=backend, header_cache_bytes=0) as store:
        namespace = store.namespace(IDENTITY)
        for row in range(20):
            namespace.put(KEYS[row : row + 1], BLOCKS[row : row + 1])
        store.flush()
        assert namespace.match(KEYS).count == 20
        place = place_of(namespace, KEYS[12])
        if fault == "device":
            with broken_segment(store, int(place["segment"]), os.O_WRONLY):
                result, _ = read_back(namespace, KEYS[12:13], BLOCKS[12:13])
        else:
            with edit(segment_file(folder, int(place["segment"]))) as fd:
                at = (int(place["page"]) + int(place["header_pages"])) * PAGE
                if fault == "damage":
                    os.pwrite(fd, bytes(PAGE), at)
                else:
                    os.ftruncate(fd, at)
            result, _ = read_back(namespace, KEYS[12:13], BLOCKS[12:13])
        assert not result.ok.any()
        assert not namespace.contains_one(KEYS[12])
        assert not namespace.contains(KEYS)[12]
        assert namespace.match(KEYS).count == 12
        assert_equal(namespace, KEYS[:12], BLOCKS[:12])
        put = namespace.put(KEYS, BLOCKS)
        assert put[12] == 0
        result, out = read_back(namespace, KEYS, BLOCKS)
        repaired = namespace.put(
            KEYS, BLOCKS
        )  # those that a truncation took, and nobody had asked for
        assert repaired.all_ok
        assert_equal(namespace, KEYS, BLOCKS)
        assert np.array_equal(out[:13], BLOCKS[:13])
        assert result.ok[:13].all()
        assert namespace.match(KEYS).count == 20


def test_under_a_lease(folder: Path) -> None:
    """A lease keeps blocks from eviction, not from their fate."""
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, BLOCKS)
        store.flush()
        match = namespace.match(KEYS, lease_ms=60_000)
        assert match.lease is not None
        with match.lease, broken_segment(store, 0, os.O_WRONLY):
            result, _ = read_back(namespace, KEYS, BLOCKS)
            assert not result.ok.any()
            assert namespace.match(KEYS).count == 0
        assert namespace.put(KEYS, BLOCKS).all_ok
        assert_equal(namespace, KEYS, BLOCKS)
