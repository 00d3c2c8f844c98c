"""What waits is bounded: BUSY at once, stores before loads, and every refusal is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_support import IDENTITY, open_store

from flashkv import BusyError, KVGeometry, Namespace, Options, OptionsError, Regions, Store
from flashkv.memory import memory_bytes

MIB = 1 << 20
BLOCK = 64 << 10
LIMIT = 64 * BLOCK
GEOMETRY = KVGeometry.opaque(BLOCK)


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with open_store(store_path, GEOMETRY, inflight_bytes=LIMIT) as store:
        yield store
        assert store.stats().inflight_bytes == store.stats().tickets_inflight == 0


@pytest.fixture
def ns(store: Store) -> Namespace:
    return store.namespace(IDENTITY)


def keys_of(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def blocks(count: int) -> np.ndarray:
    return np.zeros((count, BLOCK), np.uint8)


def test_stores_are_refused_before_loads(store: Store, ns: Namespace) -> None:
    gate = threading.Event()
    with store.client() as client:
        for write in (True, False, False):
            client.submit("block", gate.wait, write=write)
        tickets = [client.submit_put(ns, keys_of(8), blocks(8)) for _ in range(4)]  # half of it
        with pytest.raises(BusyError, match="bytes of puts are in flight") as raised:
            client.submit_put(ns, keys_of(1), blocks(1))
        assert "inflight_bytes" in str(raised.value)
        tickets += [client.submit_get(ns, keys_of(8), blocks(8)) for _ in range(4)]
        assert store.stats().inflight_bytes == LIMIT
        with pytest.raises(BusyError, match="bytes of gets are in flight"):
            client.submit_get(ns, keys_of(1), blocks(1))
        stats = store.stats()
        assert (stats.busy_puts, stats.busy_gets) == (1, 1)
        assert tickets[0].cancel()
        with pytest.raises(BusyError):  # loads have what is left
            client.submit_put(ns, keys_of(8), blocks(8))
        tickets.append(client.submit_get(ns, keys_of(8), blocks(8)))
        gate.set()
        assert all(ticket.wait(20_000) for ticket in tickets)
        client.submit_put(ns, keys_of(8), blocks(8))


def test_one_operation_is_never_too_large(store: Store, ns: Namespace) -> None:
    with store.client() as client:
        put = client.submit_put(ns, keys_of(100), blocks(100))
        assert put.wait(20_000)
        get = client.submit_get(ns, keys_of(100), blocks(100))
        assert get.wait(20_000)
        assert get.result.all_ok


def test_what_fails_gives_its_bytes_back(store: Store, ns: Namespace) -> None:
    with store.client() as client:
        wrong = client.submit_get(ns, keys_of(3), np.zeros((2, BLOCK), np.uint8))
        assert wrong.wait(20_000)
        assert wrong.error is not None
        assert store.stats().inflight_bytes == 0


def test_a_client_of_a_closed_store(store_path: Path) -> None:
    with open_store(store_path, GEOMETRY) as store:
        client = store.client()
    with pytest.raises(ValueError, match="closed"):
        client.submit_get(store.namespace, keys_of(1), blocks(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "count", "expected"),
    [
        (blocks(3), 3, 3 * BLOCK),
        (list(blocks(3)), 3, 3 * BLOCK),
        (Regions([blocks(10)], rows=np.array([1, 2])), 2, 2 * BLOCK),
        (Regions([blocks(10), blocks(10)], rows=np.array([[1, 2], [4, 5]])), 2, 8 * BLOCK),
        (Regions([np.zeros((2, 5, BLOCK))], [[1, 2], [0, 4]], (0, 1)), 2, 2 * 8 * BLOCK),
        (bytes(100), 1, 100),
        (memoryview(bytes(100)), 1, 100),
        ([], 0, 0),
        (None, 0, 0),
        (object(), 5, 0),
        (Regions([]), 0, 0),
    ],
)
def test_how_much_memory_a_batch_has(data: object, count: int, expected: int) -> None:
    assert memory_bytes(data, count) == expected


def test_limits_of_the_option() -> None:
    assert Options(inflight_bytes="1GiB").inflight_bytes == 1 << 30
    for wrong in (0, -1, "no size", 1 << 60):
        with pytest.raises(OptionsError, match="inflight_bytes"):
            Options(inflight_bytes=wrong)
