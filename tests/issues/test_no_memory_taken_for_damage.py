"""Fault: a record counts as damaged where only the memory to decode its header ran out.

A read then takes its blocks out of the index, and an opening after a crash leaves it out of its
segment's directory for good. flashkv guarantees: a lack of memory says nothing about a record; its
blocks are busy, or the opening says that there is no memory.
"""

from __future__ import annotations

from pathlib import Path

from simulation.device import allocation_calls, fail_allocations
from store_support import IDENTITY, KINDS, crash, open_store, present, put_all

from flashkv import BlockStatus, FlashKVError

KIND = KINDS[0]
KEYS = [b"key-%d" % number for number in range(12)]


def test_a_read_without_memory_costs_no_block(store_path: Path) -> None:
    with open_store(store_path, KIND.geometry, codec="lossless", header_cache_bytes=0) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, KIND, KEYS)
        store.flush()
        out, busy = KIND.empty(len(KEYS)), 0
        for first in range(1, 1000):
            fail_allocations(first, 1)
            result = ns.get(KEYS, out)
            reached = allocation_calls() >= first
            fail_allocations()
            assert set(result) <= {BlockStatus.OK, BlockStatus.BUSY}, (first, set(result))
            busy += BlockStatus.BUSY in set(result)
            if not reached:
                break
        assert busy > 10
        assert present(ns, KIND, KEYS).all()
        assert store.stats().damaged_blocks == 0


def test_an_opening_without_memory_costs_no_record(store_path: Path) -> None:
    store = open_store(store_path, KIND.geometry, codec="lossless")
    ns = store.namespace(IDENTITY)
    put_all(ns, KIND, KEYS)
    store.flush()
    refused = 0
    for first in range(1, 1000):
        crash(store)
        fail_allocations(first, 1)
        try:
            store = open_store(store_path, None, capacity=None)
            reached = allocation_calls() >= first
            fail_allocations()
        except (FlashKVError, MemoryError):
            refused += 1
            reached = True
            fail_allocations()
            store = open_store(store_path, None, capacity=None)
        assert present(store.namespace(IDENTITY), KIND, KEYS).all(), first
        if not reached:
            break
    assert refused > 10
    store.close()
