"""Space: how much a store may take, and that it never takes more, whatever it holds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from store_support import (
    IDENTITY,
    KINDS,
    MIB,
    Kind,
    check_rest,
    crash,
    du_bytes,
    open_store,
    present,
    put_all,
)

from flashkv import CapacityError, KVGeometry, Store
from flashkv.budget import (
    Budget,
    choose_segment_bytes,
    default_capacity,
    default_floor,
    disk_usage,
    make_budget,
)
from flashkv.filesystem import DISK
from flashkv.folder import reserve_of
from flashkv.index import Keys

LARGE: Kind = KINDS[4]
SMALL: Kind = KINDS[5]
GIB = 1 << 30


# ---- sizes -------------------------------------------------------------------------------------


@given(capacity=st.integers(1, 1 << 45), foreign=st.integers(0, 1 << 30))
def test_budget_never_exceeds_the_capacity(capacity: int, foreign: int) -> None:
    budget = Budget(capacity, 4 * MIB, 0, foreign)
    assert budget.segments_max >= 0
    if budget.segments_max:
        taken = budget.segments_max * 4 * MIB + budget.reserve_bytes + foreign
        assert taken <= capacity


def test_reserve() -> None:
    assert reserve_of(1) == MIB
    assert reserve_of(GIB) == 16 * MIB
    assert reserve_of(1 << 50) == 64 * MIB


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(GIB, 4 * MIB), (8 * GIB, 32 * MIB), (1024 * GIB, GIB), (1 << 50, GIB)],
)
def test_segment_size_is_a_256th(capacity: int, expected: int) -> None:
    geometry = KVGeometry.opaque(4096)
    assert choose_segment_bytes(capacity, geometry, None, 1024) == expected


@given(
    capacity=st.integers(17 * MIB, 1 << 44),
    layers=st.integers(1, 100),
    heads=st.integers(1, 16),
)
def test_segment_size_has_room(capacity: int, layers: int, heads: int) -> None:
    """At least four segments, of whole MiB, within their limits; or an error that says what is."""
    geometry = KVGeometry.gqa(layers, heads, 128)
    try:
        size = choose_segment_bytes(capacity, geometry, None, 1024)
    except CapacityError as error:
        assert capacity < 64 * GIB
        least = int(str(error.limit).split()[2])
        assert least > capacity
        choose_segment_bytes(least, geometry, None, 1024)
        return
    assert size % MIB == 0
    assert 4 * MIB <= size <= GIB
    assert (capacity - reserve_of(capacity)) // size >= 4


def test_defaults(disk_path: Path) -> None:
    assert default_floor(disk_path) <= 256 * MIB
    assert abs(default_capacity(disk_path) - DISK.free_bytes(disk_path) // 2) < GIB


def test_disk_usage_is_du(disk_path: Path) -> None:
    (disk_path / "a" / "b").mkdir(parents=True)
    (disk_path / "a" / "one").write_bytes(os.urandom(100_000))
    (disk_path / "a" / "b" / "two").write_bytes(os.urandom(5000))
    with (disk_path / "sparse").open("wb") as file:
        file.truncate(50 * MIB)
    (disk_path / "link").symlink_to("/usr")
    os.sync()
    folders = 3 * 4096
    assert disk_usage(disk_path) <= du_bytes(disk_path) <= disk_usage(disk_path) + folders


def test_make_budget(disk_path: Path) -> None:
    (disk_path / "theirs").write_bytes(os.urandom(2 * MIB))
    os.sync()
    budget = make_budget(disk_path, disk_path / "shards", 32 * MIB, 4 * MIB, 0)
    assert 2 * MIB <= budget.foreign_bytes < 3 * MIB
    with pytest.raises(CapacityError, match=r"others take 2\d{6}") as caught:
        make_budget(disk_path, disk_path / "shards", 18 * MIB, 4 * MIB, 0)
    least = int(str(caught.value.limit).split()[2])
    assert make_budget(disk_path, disk_path / "shards", least, 4 * MIB, 0).segments_max == 4


# ---- reclaim -----------------------------------------------------------------------------------


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with open_store(store_path, LARGE.geometry, capacity=25 * MIB) as store:
        yield store


def fill(store: Store, name: str, blocks: int) -> list[bytes]:
    keys = [f"{name}-{number}".encode() for number in range(blocks)]
    for at in range(0, blocks, 10):
        put_all(store.namespace(IDENTITY), LARGE, keys[at : at + 10])
    return keys


def test_oldest_first(store: Store) -> None:
    """What is there is always what was put last."""
    keys = fill(store, "age", 300)
    found = store.namespace(IDENTITY).contains(keys)
    first = int(np.flatnonzero(found)[0])
    assert found[first:].all()
    assert 60 < len(keys) - first < 130
    stats = check_rest(store)
    assert stats.evicted_blocks == first
    assert stats.evicted_segments >= 7


def test_dead_segments_first(store: Store) -> None:
    """A segment in which nothing lives goes before older ones that hold something."""
    ns = store.namespace(IDENTITY)
    old = fill(store, "old", 20)
    middle = fill(store, "middle", 40)
    assert ns.delete(middle).all_ok
    fill(store, "new", 38)
    assert ns.contains(old).all()
    assert store.stats().evicted_blocks == 0


def test_within_capacity_all_the_time(store: Store, store_path: Path) -> None:
    stop = threading.Event()
    most: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            most.append(disk_usage(store_path))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    fill(store, "watched", 300)
    stop.set()
    watcher.join()
    assert max(most) <= 25 * MIB


def test_many_deletes_stay_within_capacity(store_path: Path) -> None:
    """Kills take room in the log: with small blocks more than the metadata's share."""
    with open_store(store_path, SMALL.geometry, capacity=17 * MIB + MIB // 2) as store:
        ns = store.namespace(IDENTITY)
        keys = np.zeros((24_000, 8), np.uint8)
        keys[:, :4] = np.arange(24_000, dtype="<u4").view(np.uint8).reshape(-1, 4)
        data = np.zeros((4000, 300), np.uint8)
        for at in range(0, len(keys), 4000):
            assert ns.put(keys[at : at + 4000], data).all_ok
        store.flush()
        for at in range(0, len(keys), 500):
            ns.delete(keys[at : at + 500][::2])
            if at % 4000 == 0:
                check_rest(store)
        ns.delete(keys[1::2])
        stats = check_rest(store)
        assert stats.blocks == 0
        crash(store)
    with open_store(store_path, None, capacity=None) as store:
        assert store.stats().blocks == 0
        check_rest(store)


def test_pinned_victim_stays_away(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that pins a victim for long keeps its space, but its blocks are gone for good."""
    monkeypatch.setattr("flashkv.space.PIN_WAIT_S", 0.02)
    ns = store.namespace(IDENTITY)
    keys = fill(store, "first", 10)
    fill(store, "second", 20)
    store.flush()
    places = store.index.lookup(Keys.pack(keys).digests(ns._space), pin=True)
    pinned = int(places["segment"][0])
    fill(store, "churn", 200)
    assert not ns.contains(keys).any()
    assert store.segments[pinned].state.value != "free"
    put_all(ns, LARGE, keys[:5], 1)
    assert ns.delete(keys[:5]).all_ok
    store.index.unpin(np.ascontiguousarray(places["segment"]))
    crash(store)
    with open_store(store_path, None, capacity=None) as store:
        assert not store.namespace(IDENTITY).contains(keys).any()
        check_rest(store)


def test_everything_leased_still_ends(store: Store) -> None:
    """Half of the segments are leased, the others turn over; no put hangs or fails."""
    ns = store.namespace(IDENTITY)
    keys = fill(store, "leased", 40)
    match = ns.match(keys, lease_ms=30_000)
    assert match.count == len(keys)
    fill(store, "churn", 200)
    if match.lease is not None:
        assert present(ns, LARGE, keys).all()
        match.lease.release()
    check_rest(store)


def test_capacity_grows(store_path: Path) -> None:
    with open_store(store_path, LARGE.geometry, capacity=17 * MIB) as store:
        fill(store, "few", 100)
        few = store.stats().blocks
    with open_store(store_path, None, capacity=60 * MIB) as store:
        fill(store, "many", 300)
        assert store.stats().blocks > 2 * few
        check_rest(store)
    with open_store(store_path, None, capacity=None) as store:
        assert store.capacity_bytes == 60 * MIB
