"""flashkv-bench io: the store beside fio on one file system, in pairs.

Method and keys: docs/benchmarks.md.

Invariants
  - the two sides of a pair run next to each other, and who is first changes from pair to pair:
    drift of the device or its caches counts for both alike;
  - a ratio is made within its pair; medians are taken over ratios, never a ratio of medians;
  - both sides move the same bytes with the same direct I/O and kernel interface;
  - all files lie in one new folder, gone at the end whatever happens.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .bench_control import control_costs
from .bench_sets import (
    MIB,
    PAGE_BYTES,
    BlockSet,
    PageSet,
    StoreSettings,
    opaque_blocks,
    real_kv_blocks,
)
from .fio import run_profile
from .machine import machine_facts
from .measure import Measurement, spread

QUICK_SIZE_BYTES = 256 * MIB
DEFAULT_SIZE_BYTES = 1024 * MIB
PAIRS_MIN = 5
SIZE_MIN_BYTES = 4 * MIB

RATIOS = {
    "put_vs_fio_write": ("put", "fio_write"),
    "get_vs_fio_read": ("get", "fio_read"),
    "page_get_vs_fio_randread": ("page_get", "fio_randread"),
    "get_lossless_vs_fio_read": ("get_lossless", "fio_read_beside_lossless"),
}
"""Key of a ratio: (side of the store, side of fio)."""


@dataclass(frozen=True)
class IoSettings:
    """One run of flashkv-bench io."""

    path: Path
    size_bytes: int
    pairs: int
    backend: str = "auto"

    @property
    def pages(self) -> int:
        """Single pages a pass: half the bytes' worth, between 1,024 and 131,072."""
        return min(131072, max(1024, self.size_bytes // PAGE_BYTES // 2))


@dataclass
class Samples:
    """Every measurement, by side, in the order of the pairs."""

    sides: dict[str, list[Measurement]] = field(default_factory=dict)

    def add(self, side: str, measurement: Measurement) -> None:
        """Keeps one more measurement of a side."""
        self.sides.setdefault(side, []).append(measurement)

    def ratios(self, key: str) -> list[float]:
        """Store over fio of each pair: bytes/s over bytes/s (pages have one size on both sides)."""
        ours, theirs = (self.sides[side] for side in RATIOS[key])
        return [
            our.bytes_per_s / their.bytes_per_s for our, their in zip(ours, theirs, strict=True)
        ]


class FioSide:
    """The profiles with this run's size, on one file, as the store does its I/O."""

    def __init__(self, folder: Path, settings: IoSettings, engine: str, direct: bool) -> None:
        self.folder = folder
        self.pages = settings.pages
        self.common: dict[str, str | int] = {
            "size": settings.size_bytes // MIB * MIB,
            "ioengine": engine,
            "direct": int(direct),
        }

    def write(self) -> Measurement:
        """A new file: 1 MiB, queue depth 16, one sync at the end."""
        for file in self.folder.glob("flashkv-fio-*"):
            file.unlink()
        settle(self.folder)
        return self._run("segment_append", "write", fdatasync=0, end_fsync=1)

    def read(self) -> Measurement:
        """That file: 1 MiB, queue depth 16."""
        return self._run("record_get", "read")

    def read_pages(self) -> Measurement:
        """That file: 4 KiB at random, queue depth 64."""
        return self._run("page_get", "read", io_size=self.pages * PAGE_BYTES)

    def _run(self, profile: str, direction: str, **overrides: int) -> Measurement:
        return run_profile(profile, self.folder, direction, {**self.common, **overrides})


def settle(folder: Path) -> None:
    """Commits what deleting files left to do, so that it isn't charged to who writes next."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run_io(settings: IoSettings, step: Callable[[str], None]) -> dict[str, Any]:
    """Runs all pairs. step(text) is called before each of io_steps(settings) steps."""
    folder = Path(tempfile.mkdtemp(prefix="flashkv-bench-", dir=settings.path))
    try:
        return _run_io(folder, settings, step)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def io_steps(settings: IoSettings) -> int:
    """How often run_io() calls step()."""
    return 4 + 8 * settings.pairs


def _run_io(folder: Path, settings: IoSettings, step: Callable[[str], None]) -> dict[str, Any]:
    stores = StoreSettings(folder, settings.size_bytes, settings.backend)
    machine = machine_facts(folder)
    step("control plane")
    control = control_costs(stores)
    samples = Samples()
    pages, real, opaque = PageSet(stores), real_kv_blocks(stores), opaque_blocks(stores)
    step("put pages")
    pages.blocks.put()
    step("put real KV")
    samples.add("put_lossless", real.put())
    step("put opaque blocks")
    opaque.put()
    facts = _store_facts(opaque, real)
    engine = "io_uring" if facts["backend"] == "io_uring" else "libaio"
    fio = FioSide(folder, settings, engine, bool(facts["direct_io"]))
    for pair in range(settings.pairs):
        _run_pair(samples, pair, _passes(fio, opaque, real, pages, pair), step)
    return {
        **_summary(samples),
        "control_us_per_batch": max(cost["us_per_batch"] for cost in control.values()),
        "control_us_per_block": max(cost["us_per_block"] for cost in control.values()),
        "control": control,
        "settings": {
            "size_bytes": settings.size_bytes,
            "pairs": settings.pairs,
            "pages": settings.pages,
            "fio_engine": engine,
        },
        "store": facts,
        "machine": machine,
        "samples": _raw(samples),
    }


Pass = tuple[str, Callable[[], Measurement]]


def _passes(
    fio: FioSide, opaque: BlockSet, real: BlockSet, pages: PageSet, pair: int
) -> list[tuple[Pass, Pass]]:
    """(store, fio) passes of one pair, in the order of RATIOS."""

    def put() -> Measurement:
        opaque.remove()
        settle(fio.folder)
        return opaque.put()

    return [
        (("put", put), ("fio_write", fio.write)),
        (("get", opaque.get), ("fio_read", fio.read)),
        (
            ("page_get", lambda: pages.get_pages(fio.pages, seed=pair)),
            ("fio_randread", fio.read_pages),
        ),
        (("get_lossless", real.get), ("fio_read_beside_lossless", fio.read)),
    ]


def _run_pair(
    samples: Samples, pair: int, passes: list[tuple[Pass, Pass]], step: Callable[[str], None]
) -> None:
    for ours, theirs in passes:
        for side, run in (ours, theirs) if pair % 2 else (theirs, ours):
            step(f"pair {pair + 1}: {side.replace('_', ' ')}")
            samples.add(side, run())


def _store_facts(opaque: BlockSet, real: BlockSet) -> dict[str, Any]:
    """What of the stores' stats tells how the figures came about."""
    facts = {name: opaque.stats[name] for name in ("backend", "direct_io", "code_paths")}
    facts["segment_bytes"] = opaque.settings.options("raw").segment_bytes
    facts["real_kv_block_bytes"] = real.block_bytes
    facts["real_kv_compression_ratio"] = real.stats["compression"]
    return facts


def _summary(samples: Samples) -> dict[str, Any]:
    ratios = {key: spread(samples.ratios(key)) for key in RATIOS}
    cpu = {
        side: spread([each.cpu_s_per_gb for each in series])
        for side, series in samples.sides.items()
    }
    speed = {
        side: spread([each.bytes_per_s for each in series])
        for side, series in samples.sides.items()
    }
    summary: dict[str, Any] = {key: value.median for key, value in ratios.items()}
    summary["cpu_s_per_gb"] = {side: value.median for side, value in cpu.items()}
    summary["bytes_per_s"] = {side: value.median for side, value in speed.items()}
    summary["spread"] = {
        **{key: value.as_dict() for key, value in ratios.items()},
        "cpu_s_per_gb": _as_dicts(cpu),
        "bytes_per_s": _as_dicts(speed),
    }
    return summary


def _as_dicts(series: Mapping[str, Any]) -> dict[str, Any]:
    return {side: value.as_dict() for side, value in series.items()}


def _raw(samples: Samples) -> dict[str, list[dict[str, float | int]]]:
    return {
        side: [
            {
                "bytes": each.bytes,
                "operations": each.operations,
                "seconds": each.seconds,
                "cpu_s": each.cpu_s,
            }
            for each in series
        ]
        for side, series in samples.sides.items()
    }
