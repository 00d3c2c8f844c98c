"""Fault: the background writer reads a source that the caller has already reused.

flashkv guarantees: put() returns once the source is the caller's again; of an asynchronous put it
is at `captured`, and until then the ticket keeps the memory alive. What is stored is what the
source held then.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from small_stores import BACKENDS, IDENTITY, assert_equal, make, names, payload

from flashkv import Milestone

KEYS = names(64)
BLOCKS = payload(41, 64)


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_put(folder: Path, backend: str, codec: str) -> None:
    """The source is overwritten at once, while the writes are still on their way."""
    source = BLOCKS.copy()
    with make(folder, backend=backend, codec=codec) as store:
        namespace = store.namespace(IDENTITY)
        for round_number in range(8):
            source[:] = BLOCKS
            namespace.put(names(64, f"r{round_number}-"), source)
            source[:] = 0xFFFF
        for round_number in range(8):
            assert_equal(namespace, names(64, f"r{round_number}-"), BLOCKS)


@pytest.mark.parametrize("codec", ["lossless", "raw"])
def test_after_captured(folder: Path, codec: str) -> None:
    source = BLOCKS.copy()
    with make(folder, codec=codec) as store, store.client() as client:
        namespace = store.namespace(IDENTITY)
        ticket = client.submit_put(namespace, KEYS, source, notify=Milestone.DURABLE)
        assert ticket.wait(10_000, Milestone.CAPTURED)
        source[:] = 0xFFFF
        assert ticket.wait(10_000)
        assert ticket.error is None
        assert ticket.milestone == Milestone.DURABLE
        assert_equal(namespace, KEYS, BLOCKS)
    with make(folder) as store:
        assert_equal(store.namespace(IDENTITY), KEYS, BLOCKS)


def test_a_dropped_source_lives_until_captured(folder: Path) -> None:
    """The caller forgets its array at once: the ticket keeps it, and lets go of it when done."""
    with make(folder) as store, store.client() as client:
        namespace = store.namespace(IDENTITY)
        with store.writer_lock:  # nothing can be captured yet
            source = BLOCKS.copy()
            gone = weakref.ref(source)
            ticket = client.submit_put(namespace, KEYS, source)
            del source
            gc.collect()
            assert gone() is not None
            assert not ticket.wait(50, Milestone.CAPTURED)
        assert ticket.wait(10_000)
        assert_equal(namespace, KEYS, BLOCKS)
        gc.collect()
        assert gone() is None, "a finished ticket still holds the source"


def test_keys_are_copied(folder: Path) -> None:
    """A key array that the caller reuses after put() changes nothing."""
    keys = np.arange(64 * 8, dtype=np.uint8).reshape(64, 8)
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        before = keys.copy()
        namespace.put(keys, BLOCKS)
        keys[:] = 0
        assert namespace.contains(before).all()
        assert not namespace.contains(keys[:1]).any()
