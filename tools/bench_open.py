"""flashkv-bench open: the time to open a store of very many small blocks, and its index's size.

Invariants
  - the store was closed in good order; each sample opens it anew and ends with a key looked up;
  - all files lie in one new folder, gone at the end whatever happens.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flashkv
from flashkv.geometry import KVGeometry

from .bench_control import contains_one_us
from .bench_sets import MIB, BenchError, expect_all_ok, keys
from .machine import machine_facts
from .measure import spread

BLOCK_BYTES = 64
BATCH_BLOCKS = 4096
OPENS = 5
BLOCKS_MIN = 1000


@dataclass(frozen=True)
class OpenSettings:
    """One run of flashkv-bench open."""

    path: Path
    blocks: int
    backend: str = "auto"

    @property
    def capacity_bytes(self) -> int:
        """A block takes its bytes, its key, its rows in header and directory: far below 256."""
        return 256 * self.blocks + 512 * MIB


def open_steps(settings: OpenSettings) -> int:
    """How often run_open() calls step()."""
    return -(-settings.blocks // BATCH_BLOCKS) + OPENS


def run_open(settings: OpenSettings, step: Callable[[str], None]) -> dict[str, Any]:
    """Fills a store, closes it, opens it OPENS times. step(text) is called before each step."""
    folder = Path(tempfile.mkdtemp(prefix="flashkv-bench-", dir=settings.path))
    try:
        return _run_open(folder, settings, step)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_open(folder: Path, settings: OpenSettings, step: Callable[[str], None]) -> dict[str, Any]:
    machine = machine_facts(folder)
    path = folder / "store"
    put_s = _fill(path, settings, step)
    opens: list[float] = []
    lookups: list[float] = []
    known = [row.tobytes() for row in keys("open", 0, min(1000, settings.blocks))]
    stats: dict[str, Any] = {}
    for number in range(OPENS):
        step(f"open {number + 1}")
        started = time.perf_counter()
        with _open(path, settings) as store:
            opens.append(time.perf_counter() - started)
            namespace = store.namespace(flashkv.Identity(model="flashkv-bench"))
            stats = store.stats().as_dict()
            if stats["blocks"] != settings.blocks or not namespace.contains_one(known[-1]):
                raise BenchError(
                    f"{stats['blocks']} blocks after the opening, {settings.blocks} were put"
                )
            lookups.append(contains_one_us(namespace, known))
    open_s, contains_one = spread(opens), spread(lookups)
    return {
        "blocks": settings.blocks,
        "open_s": open_s.median,
        "index_bytes_per_block": stats["index_bytes"] / settings.blocks,
        "contains_one_us": contains_one.median,
        "put_blocks_per_s": settings.blocks / put_s,
        "spread": {"open_s": open_s.as_dict(), "contains_one_us": contains_one.as_dict()},
        "settings": {"block_bytes": BLOCK_BYTES, "batch_blocks": BATCH_BLOCKS, "opens": OPENS},
        "store": {name: stats[name] for name in ("backend", "direct_io", "code_paths")},
        "machine": machine,
        "samples": {"open_s": opens, "contains_one_us": lookups},
    }


def _open(path: Path, settings: OpenSettings) -> flashkv.Store:
    return flashkv.open(
        path,
        capacity=settings.capacity_bytes,
        geometry=KVGeometry.opaque(BLOCK_BYTES),
        options=flashkv.Options(backend=settings.backend, codec="raw", segment_bytes=64 * MIB),
    )


def _fill(path: Path, settings: OpenSettings, step: Callable[[str], None]) -> float:
    """Puts the blocks; returns the seconds that it took."""
    data = np.full((BATCH_BLOCKS, BLOCK_BYTES), 7, dtype=np.uint8)
    started = time.perf_counter()
    with _open(path, settings) as store:
        namespace = store.namespace(flashkv.Identity(model="flashkv-bench"))
        for first in range(0, settings.blocks, BATCH_BLOCKS):
            step(f"{first:,} blocks")
            count = min(BATCH_BLOCKS, settings.blocks - first)
            result = namespace.put(keys("open", first, count), data[:count])
            expect_all_ok([result], "put")
        store.flush()
    return time.perf_counter() - started
