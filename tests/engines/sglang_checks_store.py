"""Checks of what happens to the store, and of threads: see sglang_checks.py."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any

import sglang_pools as pools  # first: it puts the stand-ins in place
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
)
from sglang_pools import (
    ROWS,
    SEEDS,
    fill,
    filled,
    holds,
    keys,
    slots,
    storage,
    wait_until,
)

import flashkv
from flashkv.connectors import sglang as connector


def check_the_way_back_after_damage(path: Path) -> None:
    """Pages of a damaged record are misses from then on, and can be stored again."""
    make = lambda: pools.mha_pool("layer_first")
    with storage(path, filled(make())) as backend:
        for key, row in zip(keys(3), ROWS, strict=True):  # a record each
            assert backend.batch_set_v1([key], slots([row])) == [True]
    segments = sorted((path / "shards/0/segments").iterdir())
    for number, segment in enumerate(segments):
        data = bytearray(segment.read_bytes())
        at = len(data) // 2 if number else 3 * 4096
        data[at : at + 8192] = bytes(8192)
        segment.write_bytes(data)
    pool = make()
    with storage(path, pool) as backend:
        got = backend.batch_get_v1(keys(3), slots([0, 2, 3]))
        assert not all(got), "nothing was damaged"
        for row, seed, there in zip((0, 2, 3), SEEDS, got, strict=True):
            assert not there or holds(pool, row, seed)
        assert [backend.exists(key) for key in keys(3)] == got
        filled(pool)
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
        assert backend.batch_get_v1(keys(3), slots([0, 2, 3])) == [True] * 3
        for row, seed in zip((0, 2, 3), SEEDS, strict=True):
            assert holds(pool, row, seed)


def check_a_full_store_forgets_and_never_lies(path: Path) -> None:
    make = lambda: pools.mha_pool("page_first", dtype=torch.float32, heads=16, page=64)
    pool, total = make(), 120  # 96 MB of pages, for 24 MB
    extra = {"capacity": "24MiB", "options": {"segment_bytes": "4MiB"}, "codec": "raw"}
    with storage(path, pool, extra=extra) as backend:
        answers = []
        for number in range(total):
            fill(pool, number % 4, number)
            answers += backend.batch_set_v1(keys(1, number), slots([number % 4], 64))
        assert sum(answers) > total // 2, answers
        there = [number for number in range(total) if backend.exists(keys(1, number)[0])]
        assert there
        assert len(there) < total, "it was never full"
        for number in there[-5:]:
            assert backend.batch_get_v1(keys(1, number), slots([6], 64)) == [True]
            assert holds(pool, 6, number)
    used = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    assert used <= 24 << 20, used


def check_a_store_of_another_process_is_gone_without(path: Path) -> None:
    pool = filled(pools.mha_pool("layer_first"))
    geometry = flashkv.KVGeometry.opaque(4096)
    with flashkv.open(path, capacity="64MiB", geometry=geometry):
        for _ in range(2):
            with storage(path, pool) as backend:
                assert backend.batch_set_v1(keys(3), slots(ROWS)) == [False] * 3
                assert backend.batch_exists(keys(3)) == 0
                assert backend.batch_get_v1(keys(3), slots(ROWS)) == [False] * 3
                assert not backend.batch_set(keys(1), [pool.get_data_page(0)])
                assert backend.get(keys(1)[0]) is None
                assert not backend.exists(keys(1)[0])
                assert backend.clear()
                assert "open for writing" in backend.stats()["stores"][str(path)]["reason"]
    with storage(path, pool) as backend:  # made for another geometry, and taken all the same
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3


def check_three_threads(path: Path) -> None:
    make = lambda: pools.mha_pool("page_first_direct")
    pool, faults, ended = make(), [], threading.Event()
    for row in range(4):
        fill(pool, row, row)
    want = [[view.clone() for view in pools.logical(pool, row)] for row in range(4)]

    def guarded(work: Any) -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException:  # noqa: BLE001  (it is told)
            faults.append(traceback.format_exc())
            ended.set()

    count = [0, 0, 0]
    with storage(path, pool, extra={"flush_ms": 1}) as backend:

        def write() -> None:
            first = 4 * count[0]
            assert backend.batch_set_v1(keys(4, first), slots([0, 1, 2, 3])) == [True] * 4
            count[0] += 1

        def look() -> None:
            done = count[0]
            assert backend.batch_exists(keys(4 * done)) == 4 * done
            count[1] += 1

        def read() -> None:
            if not count[0]:
                return
            first = 4 * (count[2] * 7919 % count[0])
            assert backend.batch_get_v1(keys(4, first), slots([4, 5, 6, 7])) == [True] * 4
            for row, views in enumerate(want):
                for view, expected in zip(pools.logical(pool, 4 + row), views, strict=True):
                    assert torch.equal(view, expected)
            count[2] += 1

        threads = [threading.Thread(target=guarded, args=(work,)) for work in (write, look, read)]
        for thread in threads:
            thread.start()
        ended.wait(2.0)
        ended.set()
        for thread in threads:
            thread.join()
    assert not faults, faults
    assert min(count) > 5, count


def check_flushed_soon_without_close(path: Path) -> None:
    """What was stored is on disk before the process ends: SGLang's are killed."""
    pool = filled(pools.mha_pool("layer_first"))
    with storage(path, pool, extra={"flush_ms": 20}) as backend:
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
        with_reader = lambda: flashkv.open(path, read_only=True)

        def durable() -> bool:
            with with_reader() as reader:
                return reader.stats().blocks == 3

        wait_until(durable)


def check_updated_weights_end_it(path: Path) -> None:
    """Pages of weights that the identity doesn't name are neither stored nor restored."""
    pool = filled(pools.mha_pool("layer_first"))
    whole = connector.weights_were_updated
    try:
        with storage(path, pool) as backend:
            assert backend.batch_set_v1(keys(2), slots(ROWS[:2])) == [True] * 2
            connector.weights_were_updated = lambda: True
            assert backend.batch_exists(keys(2)) == 0
            assert backend.batch_get_v1(keys(2), slots([0, 2])) == [False] * 2
            assert backend.batch_set_v1(keys(3), slots(ROWS)) == [False] * 3
            assert backend.get(keys(1)[0]) is None
            assert backend.batch_exists_v2(keys(2)).kv_hit_pages == 0
            connector.weights_were_updated = lambda: False
            assert backend.batch_exists(keys(2)) == 0, "once updated, never known again"
    finally:
        connector.weights_were_updated = whole
    with storage(path, pool) as backend:
        assert backend.batch_exists(keys(3)) == 2


def check_prefix_keys_metrics_and_the_end(path: Path) -> None:
    pool = filled(pools.mha_pool("layer_first"))
    backend = pools.bind(path, pool)
    info = HiCacheStorageExtraInfo(prefix_keys=keys(5, 100))
    assert backend.batch_set_v1(keys(3), slots(ROWS), info) == [True] * 3
    assert backend.batch_exists(keys(3), info) == 3
    assert backend.batch_get_v1(keys(4), slots([0, 1, 2, 3]), info) == [True] * 3 + [False]
    metrics = backend.get_stats()
    assert metrics.prefetch_pgs == [3]
    assert metrics.backup_pgs == [3]
    assert metrics.prefetch_bandwidth[0] > 0
    assert backend.get_stats().prefetch_pgs == []
    assert backend.stats()["pages"]["get_pages_failed"] == 1
    injected = HiCacheStorageFailureInjector(backend, 0.0, 1.0)
    assert injected.batch_get_v1(keys(1), slots([0])) == [False]
    assert backend.clear()
    assert backend.batch_exists(keys(3)) == 0
    injected.close()
    backend.close()
    assert backend.batch_get_v1(keys(1), slots([0])) == [False]
    assert backend.batch_exists(keys(1)) == 0
    with storage(path, pool, enable_storage_metrics=False) as quiet:
        assert quiet.get_stats() is None
