"""Leases: what a match found stays until it is loaded, for a bounded time and a bounded share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_support import IDENTITY, KINDS, MIB, Kind, check_rest, open_store, present, put_all

from flashkv import BlockStatus, Namespace, Store
from flashkv.index import Index
from flashkv.leases import Leases

KIND: Kind = KINDS[4]  # opaque, 200 kB: a segment has about 20
FIRST = [b"first-%d" % number for number in range(8)]


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with open_store(store_path, KIND.geometry, capacity=25 * MIB) as store:
        yield store
        if not store.closed:
            check_rest(store)


@pytest.fixture
def ns(store: Store) -> Namespace:
    ns = store.namespace(IDENTITY)
    put_all(ns, KIND, FIRST)
    return ns


def churn(ns: Namespace, blocks: int, name: str) -> None:
    for number in range(0, blocks, 10):
        keys = [f"{name}-{n}".encode() for n in range(number, number + 10)]
        put_all(ns, KIND, keys)


def pins(store: Store) -> int:
    return int(store.index.usage([s.number for s in store.segments])["pins"].sum())


def test_without_a_lease_the_oldest_goes(store: Store, ns: Namespace) -> None:
    churn(ns, 200, "churn")
    assert store.stats().evicted_segments > 3
    assert not ns.contains(FIRST).any()


def test_leased_blocks_stay(store: Store, ns: Namespace) -> None:
    match = ns.match([*FIRST, b"absent"], lease_ms=30_000)
    assert match.count == len(FIRST)
    assert match.lease is not None
    assert match.lease.active
    assert store.stats().leases == 1
    assert pins(store) >= 1
    churn(ns, 300, "churn")
    assert store.stats().evicted_segments > 5
    assert present(ns, KIND, FIRST).all()
    match.lease.release()
    match.lease.release()
    assert not match.lease.active
    assert pins(store) == 0
    churn(ns, 200, "more")
    assert not ns.contains(FIRST).any()


def test_lease_ends_by_time(store: Store, ns: Namespace) -> None:
    match = ns.match(FIRST, lease_ms=40)
    assert match.lease is not None
    time.sleep(0.06)
    assert not match.lease.active
    churn(ns, 200, "churn")
    assert not ns.contains(FIRST).any()
    assert pins(store) == 0
    assert store.stats().leases == 0
    match.lease.release()


def test_lease_as_a_context(store: Store, ns: Namespace) -> None:
    match = ns.match(FIRST, lease_ms=1000)
    assert match.lease is not None
    with match.lease:
        assert pins(store) >= 1
    assert pins(store) == 0


def test_nothing_matched_no_lease(store: Store, ns: Namespace) -> None:
    match = ns.match([b"absent", *FIRST], lease_ms=1000)
    assert match.count == 0
    assert match.lease is None
    assert pins(store) == 0


def test_leases_hold_at_most_half(store: Store, ns: Namespace) -> None:
    """Beyond half of the segments a match gets no lease, and puts go on."""
    churn(ns, 60, "churn")
    held = []
    for number in range(60):
        match = ns.match([f"churn-{number}".encode()], lease_ms=30_000)
        assert match.count == 1
        if match.lease is None:
            break
        held.append(match.lease)
    else:
        pytest.fail("leases could hold everything")
    assert store.stats().lease_refusals == 1
    churn(ns, 200, "more")
    for lease in held:
        lease.release()
    assert pins(store) == 0


def test_too_many_leases(store: Store, ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashkv.limits.LEASES_MAX", 3)
    leases = [ns.match(FIRST, lease_ms=1000).lease for _ in range(4)]
    assert [lease is None for lease in leases] == [False] * 3 + [True]
    held = pins(store)
    leases[0].release()  # type: ignore[union-attr]
    assert pins(store) < held
    assert ns.match(FIRST, lease_ms=1000).lease is not None


def test_close_ends_leases(store: Store, ns: Namespace) -> None:
    lease = ns.match(FIRST, lease_ms=30_000).lease
    assert lease is not None
    store.close()
    assert not lease.active
    lease.release()


def test_delete_under_a_lease(store: Store, ns: Namespace) -> None:
    """A lease guards against eviction, not against the owner's delete."""
    lease = ns.match(FIRST, lease_ms=30_000).lease
    assert lease is not None
    assert ns.delete(FIRST[:2]).all_ok
    assert ns.contains(FIRST).tolist() == [False, False] + [True] * 6
    lease.release()


def test_read_only_handle_leases(store: Store, ns: Namespace, store_path: Path) -> None:
    store.flush()
    with open_store(store_path, None, read_only=True) as reader:
        match = reader.namespace(IDENTITY).match(FIRST, lease_ms=1000)
        assert match.count == len(FIRST)
        assert match.lease is not None
        match.lease.release()


def test_release_from_many_threads() -> None:
    """Each pin is given back once, however many release at a time."""
    index = Index()
    leases = Leases(index)
    given: list[np.ndarray] = []
    index.unpin = given.append  # type: ignore[method-assign]
    index.match = lambda *_, **__: (1, np.array([3], np.uint32))  # type: ignore[method-assign]
    held = [leases.match(None, None, 60_000, 8)[1] for _ in range(200)]  # type: ignore[arg-type]

    def release() -> None:
        for lease in held:
            assert lease is not None
            lease.release()

    threads = [threading.Thread(target=release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 200
    assert len(leases) == 0


def test_reads_hold_what_they_read(store: Store, ns: Namespace) -> None:
    """Gets in other threads while everything is reclaimed: right bytes or a miss."""
    stop = threading.Event()
    wrong: list[object] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        out = KIND.empty(8)
        while not stop.is_set():
            keys = [f"churn-{n}".encode() for n in rng.integers(0, 300, 8)]
            result = ns.get(keys, out)
            for row, key in enumerate(keys):
                if result[row] == BlockStatus.OK:
                    if out[row].tobytes() != KIND.block(key, 0).tobytes():
                        wrong.append(key)
                elif result[row] != BlockStatus.MISS:
                    wrong.append(result[row])

    threads = [threading.Thread(target=read, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    churn(ns, 300, "churn")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    stats = check_rest(store)
    assert stats.evicted_segments > 5
    assert stats.damaged_blocks == 0


def test_no_reclaim_between_match_and_lease(
    store: Store, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a match found is still there when it has its lease, whatever comes at that moment."""
    churn(ns, 40, "churn")
    taking = Leases._take
    reclaimed = threading.Thread(target=churn, args=(ns, 200, "more"))

    def slow(*arguments: Any) -> Any:
        reclaimed.start()
        time.sleep(0.2)
        return taking(*arguments)

    monkeypatch.setattr(Leases, "_take", slow)
    match = ns.match(FIRST, lease_ms=30_000)
    monkeypatch.undo()
    reclaimed.join()
    assert match.count == len(FIRST)
    assert match.lease is not None
    assert present(ns, KIND, FIRST).all()
    match.lease.release()


def test_many_short_leases(store: Store, ns: Namespace) -> None:
    """Leases that were released leave nothing behind, though their time isn't over."""
    for _ in range(5000):
        lease = ns.match(FIRST[:1], lease_ms=60_000).lease
        assert lease is not None
        lease.release()
    assert len(store.leases) == 0
    assert len(store.leases._by_end) < 2000
    assert pins(store) == 0
