"""Fault: one OSError ends the I/O thread, and every later operation hangs.

flashkv guarantees: an operation that fails is a status of its blocks and nothing else: thousands of
operations afterwards work, synchronous and as tickets, and nothing is held.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from small_stores import BACKENDS, IDENTITY, assert_equal, broken_segment, make, names, payload

from flashkv import BlockStatus, DurabilityError

BLOCKS = payload(1, 40)
KEYS = names(40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_operations_after_a_failed_read(folder: Path, backend: str) -> None:
    with make(folder, backend=backend) as store, store.client() as client:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, BLOCKS)
        store.flush()
        out = np.zeros_like(BLOCKS)
        with broken_segment(store, 0, os.O_WRONLY):
            assert (namespace.get(KEYS, out).statuses == BlockStatus.IO_ERROR).all()
        assert namespace.put(KEYS, BLOCKS).all_ok
        for row in range(500):
            one = row % 40
            assert namespace.get(KEYS[one : one + 1], out[one : one + 1]).all_ok
        tickets = [client.submit_get(namespace, KEYS[r % 40 :][:1], out[:1]) for r in range(500)]
        assert all(ticket.wait(10_000) and ticket.result.all_ok for ticket in tickets)
        assert len(client.drain()) == 500
        assert_equal(namespace, KEYS, BLOCKS)
        stats = store.stats()
        assert stats.read_buffers_in_use == 0
        assert stats.failed_reads == 40


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_operations_after_a_failed_write(folder: Path, backend: str) -> None:
    with make(folder, backend=backend) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS[:1], BLOCKS[:1])
        store.flush()
        with broken_segment(store, 0, os.O_RDONLY):
            namespace.put(KEYS[1:], BLOCKS[1:])
            with pytest.raises(DurabilityError) as caught:
                store.flush()
            assert caught.value.blocks_lost == 39
        assert namespace.contains(KEYS).tolist() == [True] + [False] * 39
        for row in range(1000):
            assert namespace.put([b"%d" % row], BLOCKS[row % 40][None])[0] == BlockStatus.OK
            if row % 100 == 0:
                store.flush()
        store.flush()
        assert_equal(namespace, [b"%d" % row for row in range(960, 1000)], BLOCKS)
        stats = store.stats()
        assert (stats.lost_blocks, stats.staging_in_use, stats.writes_inflight) == (39, 0, 0)
        assert namespace.put(KEYS, BLOCKS).all_ok
    with make(folder) as store:
        assert_equal(store.namespace(IDENTITY), KEYS, BLOCKS)
