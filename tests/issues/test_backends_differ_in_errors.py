"""Fault: backends differ in the errors that they raise.

flashkv guarantees: the same fault gives the same statuses, the same exception types and messages,
and the same counters, whichever backend moves the bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import (
    BACKENDS,
    IDENTITY,
    MIB,
    PAGE,
    broken_segment,
    edit,
    make,
    names,
    payload,
    place_of,
    segment_file,
)

from flashkv import FlashKVError, Store
from flashkv.blockio import BlockIO
from flashkv.native import aligned_array

KEYS = names(24)
BLOCKS = payload(1, 24)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call says: statuses, or its exception."""
    try:
        result = call()
    except (FlashKVError, OSError, ValueError) as error:
        return type(error).__name__, str(error)
    return result.statuses.tolist() if hasattr(result, "statuses") else result


def trace(folder: Path, backend: str) -> list[Any]:
    """Everything that a list of faults led to."""
    seen: list[Any] = []
    out = np.zeros_like(BLOCKS)
    store: Store = make(folder, backend=backend, header_cache_bytes=0)
    namespace = store.namespace(IDENTITY)
    for row in range(24):
        namespace.put(KEYS[row : row + 1], BLOCKS[row : row + 1])
    seen.append(outcome(store.flush))
    with broken_segment(store, 0, os.O_WRONLY):
        seen.append(outcome(lambda: namespace.get(KEYS[:4], out[:4])))
    with broken_segment(store, 0, os.O_RDONLY):
        seen.append(outcome(lambda: namespace.put(names(3, "lost"), BLOCKS[:3])))
        seen.append(outcome(lambda: namespace.get(names(3, "lost"), out[:3])))
        seen.append(outcome(store.flush))
    place = place_of(namespace, KEYS[9])
    with edit(segment_file(folder, int(place["segment"]))) as fd:
        os.pwrite(fd, bytes(PAGE), int(place["page"]) * PAGE)
        os.ftruncate(fd, int(place_of(namespace, KEYS[20])["page"]) * PAGE + 4096 + 100)
    seen.append(outcome(lambda: namespace.get(KEYS, out)))
    large = payload(2, 1, (2, 2, 2, 1024, 64))
    seen.append(outcome(lambda: namespace.put(names(1, "large"), large)))
    seen.append(outcome(lambda: namespace.put(KEYS, BLOCKS)))
    seen.append(outcome(lambda: namespace.get(KEYS, out)))
    seen.append(bool((out == BLOCKS).all()))
    stats = store.stats()
    seen.append(
        [
            getattr(stats, name)
            for name in (
                "damaged_blocks",
                "failed_reads",
                "lost_blocks",
                "failed_writes",
                "failed_syncs",
                "missed_blocks",
                "blocks",
                "refused_blocks",
            )
        ]
    )
    store.close()
    return seen


def test_the_same_trace(folder: Path) -> None:
    if len(BACKENDS) < 2:
        pytest.skip("only one backend here")
    first, second = (trace(folder / backend, backend) for backend in BACKENDS)
    assert first == second
    assert first[3] == [1, 1, 1]
    assert first[4][0] == "DurabilityError"


def test_the_same_numbers(folder: Path) -> None:
    """Raw results: -errno of reads, writes and syncs on descriptors that can't."""
    results = []
    for backend in BACKENDS:
        path = folder / backend
        path.write_bytes(bytes(2 * MIB))
        with BlockIO(folder, backend=backend) as io:
            data = aligned_array(PAGE)
            read_only, write_only = os.open(path, os.O_RDONLY), os.open(path, os.O_WRONLY)
            pipe, pipe_in = os.pipe()
            closed = os.dup(read_only)
            os.close(closed)
            results.append(
                [
                    io.read(write_only, data, 0),
                    io.write(read_only, data, 0),
                    io.read(closed, data, 0),
                    io.write(closed, data, 0),
                    io.read(read_only, data, 2 * MIB),
                    io.read(read_only, data, 2 * MIB - 512),
                    io.read(read_only, data, 1 << 50),
                    io.write(write_only, data, (1 << 63) - PAGE),
                    io.sync([pipe, closed, write_only]).tolist(),
                ]
            )
            for fd in (read_only, write_only, pipe, pipe_in):
                os.close(fd)
    assert all(result == results[0] for result in results), results
    assert results[0][0] == -9
    assert results[0][4] == -61
