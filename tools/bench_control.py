"""What the control plane costs: processor time of the calling thread for tiny blocks.

Invariants
  - blocks are so small (64 bytes, inside their record's header page) that moving, checking and
    hashing them is noise; what remains is the way through Python and the native calls' set-up;
  - the thread's processor time is taken, not the wall's: waiting for the device isn't the plane's;
  - the store's other threads don't count.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import flashkv
from flashkv.geometry import KVGeometry

from .bench_sets import Bytes, StoreSettings, expect_all_ok, keys, page_aligned
from .measure import fit_line

BLOCK_BYTES = 64
BATCHES = (1, 16, 256, 1024)
REPEATS = 31
CONTAINS_ONE_CALLS = 20_000


def control_costs(settings: StoreSettings) -> dict[str, dict[str, Any]]:
    """By operation: us_per_batch and us_per_block of the fitted line, and the medians it fits."""
    path = settings.folder / "control"
    medians: dict[str, list[float]] = {"put": [], "get": [], "contains": []}
    with flashkv.open(
        path,
        capacity=settings.capacity_bytes,
        geometry=KVGeometry.opaque(BLOCK_BYTES),
        options=settings.options("raw"),
    ) as store:
        namespace = store.namespace(flashkv.Identity(model="flashkv-bench"))
        for size in BATCHES:
            for operation, cost in _batch_costs(store, namespace, size).items():
                medians[operation].append(cost)
    shutil.rmtree(path, ignore_errors=True)
    costs: dict[str, dict[str, Any]] = {}
    for operation, series in medians.items():
        constant, slope = fit_line(BATCHES, series)
        costs[operation] = {
            "us_per_batch": constant,
            "us_per_block": slope,
            "batch_us": dict(zip(map(str, BATCHES), series, strict=True)),
        }
    return costs


def _batch_costs(store: flashkv.Store, namespace: flashkv.Namespace, size: int) -> dict[str, float]:
    """Median thread microseconds of a put, a get and a contains of `size` blocks."""
    wanted = [keys(f"control {size}", i * size, size) for i in range(REPEATS)]
    data = np.full((size, BLOCK_BYTES), 7, dtype=np.uint8)
    out = page_aligned(size * BLOCK_BYTES).reshape(size, BLOCK_BYTES)
    results: list[flashkv.BatchResult] = []

    def put(batch: Bytes) -> None:
        results.append(namespace.put(batch, data))

    def get(batch: Bytes) -> None:
        results.append(namespace.get(batch, out))

    costs = {"put": _median_thread_us(put, wanted)}
    store.flush()
    costs["get"] = _median_thread_us(get, wanted)
    costs["contains"] = _median_thread_us(namespace.contains, wanted)
    expect_all_ok(results, f"control plane, {size} blocks")
    return costs


def _median_thread_us(call: Callable[[Bytes], object], batches: Sequence[Bytes]) -> float:
    """Processor microseconds of this thread for one call, over a call a batch."""
    series: list[float] = []
    for batch in batches:
        started = time.thread_time_ns()
        call(batch)
        series.append((time.thread_time_ns() - started) / 1000)
    return statistics.median(series)


def contains_one_us(namespace: flashkv.Namespace, known: list[bytes]) -> float:
    """Median microseconds of one contains_one, over runs of 1,000 calls with known keys."""
    contains_one = namespace.contains_one
    runs: list[float] = []
    for first in range(0, CONTAINS_ONE_CALLS, 1000):
        some = [known[(first + i) % len(known)] for i in range(1000)]
        started = time.perf_counter_ns()
        for key in some:
            contains_one(key)
        runs.append((time.perf_counter_ns() - started) / 1000 / len(some))
    return statistics.median(runs)
