"""Fault: a blocking enqueue stops the engine, or the work is done in the submitting call and
freezes decode.

flashkv guarantees: submitting queues and returns, whatever the store is busy with; a full queue is
a BusyError at once; completions are collected without waiting.
"""

from __future__ import annotations

import select
import time
from pathlib import Path

import numpy as np
import pytest
from small_stores import IDENTITY, make, names, payload

from flashkv import BusyError, ClosedError

KEYS = names(64)
BLOCKS = payload(1, 64)


def test_submitting_waits_for_nothing(folder: Path) -> None:
    """With the store's lock held by someone else nothing could be put; submitting works all the
    same.
    """
    out = np.zeros_like(BLOCKS)
    with make(folder) as store, store.client(max_tickets=8) as client:
        namespace = store.namespace(IDENTITY)
        with store.writer_lock:
            tickets = [
                client.submit_put(namespace, KEYS, BLOCKS),
                client.submit_delete(namespace, KEYS[:8]),
                client.submit_put(namespace, KEYS[:8], BLOCKS[:8]),
            ]
            assert not any(ticket.done for ticket in tickets)
            assert client.drain() == []
            tickets += [client.submit_contains(namespace, KEYS) for _ in range(5)]
            for call in (
                lambda: client.submit_put(namespace, KEYS, BLOCKS),
                lambda: client.submit_get(namespace, KEYS, out),
                lambda: client.submit_contains(namespace, KEYS),
                lambda: client.submit_delete(namespace, KEYS),
            ):
                with pytest.raises(BusyError, match="8") as caught:
                    call()
                assert isinstance(caught.value, BlockingIOError)
        for ticket in tickets:
            assert ticket.wait(10_000)
        assert len(client.drain()) == 8
        ticket = client.submit_get(namespace, KEYS, out)
        assert ticket.wait(10_000)
        assert ticket.result.all_ok
        assert np.array_equal(out, BLOCKS)


def test_submitting_is_cheap(folder: Path) -> None:
    """The least of several tries: what submitting itself costs, on a busy machine too."""
    with make(folder) as store, store.client() as client:
        namespace = store.namespace(IDENTITY)
        costs = []
        for turn in range(20):
            keys = names(64, f"{turn}-")
            begin = time.perf_counter()
            client.submit_put(namespace, keys, BLOCKS)
            costs.append(time.perf_counter() - begin)
        assert min(costs) < 0.001
        full = store.client(max_tickets=1)
        full.submit_contains(namespace, KEYS)
        refusals = []
        for _ in range(20):
            begin = time.perf_counter()
            with pytest.raises(BusyError):
                full.submit_contains(namespace, KEYS)
            refusals.append(time.perf_counter() - begin)
        assert min(refusals) < 0.001


def test_bad_arguments_come_with_the_ticket(folder: Path) -> None:
    """What a synchronous call would raise is the ticket's error; the queue goes on."""
    with make(folder) as store, store.client() as client:
        namespace = store.namespace(IDENTITY)
        bad = client.submit_put(namespace, KEYS, BLOCKS[:3])
        good = client.submit_put(namespace, KEYS, BLOCKS)
        assert bad.wait(10_000)
        assert good.wait(10_000)
        assert isinstance(bad.error, ValueError)
        assert bad.result is None
        assert good.error is None
        assert {ticket.id for ticket in client.drain()} == {bad.id, good.id}


def test_completions_are_polled(folder: Path) -> None:
    with make(folder) as store:
        client = store.client()
        namespace = store.namespace(IDENTITY)
        poll = select.poll()
        poll.register(client.fileno(), select.POLLIN)
        assert poll.poll(0) == []
        wanted = {
            client.submit_put(namespace, KEYS[r : r + 1], BLOCKS[r : r + 1]).id for r in range(64)
        }
        seen: list[int] = []
        end = time.monotonic() + 20
        while len(seen) < 64 and time.monotonic() < end:
            if poll.poll(100):
                seen += [ticket.id for ticket in client.drain()]
        assert sorted(seen) == sorted(wanted), "each exactly once"
        assert poll.poll(0) == []
        assert client.drain() == []
        client.close()
        with pytest.raises(ClosedError):
            client.submit_contains(namespace, KEYS)
