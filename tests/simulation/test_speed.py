"""What overlaps: a device that keeps to a rate tells whether the queue is full and whether coding
goes on while it works.

Times are compared with what the device itself must take, and the machine's own speed is measured in
the same run. The best of a few counts: what can't overlap never comes near it, however quiet the
machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from simulation.device import READ, Device
from simulation.filesystem import SimFiles
from simulation.images import fresh, scratch
from simulation.workload import IDENTITY
from store_support import small_options

from flashkv import KVGeometry, Store

MIB = 1 << 20
SEGMENT_BYTES = 20 * MIB
TRIES = 5
ROUNDS = 3
PAGES = 128
CHANNELS = 16
LATENCY_S = 0.01
TOKENS = 64
GEOMETRY = KVGeometry.gqa(8, 2, 64, "bfloat16")
BLOCK_SHAPE = (8, 2, 2, TOKENS, 64)  # layer, plane, head, token, dim: 256 KiB
BLOCKS = 64  # 16 MiB
DEVICE_SHARE = 1.5
"""The device takes so many times as long as the machine does without it: one after the other would
take 1.67 times as long as the device."""
OVERLAP = 1.4


@contextmanager
def opened(device: Device, folder: Path, geometry: KVGeometry, codec: str) -> Iterator[Store]:
    """A new store, one worker. Its segments are large: to seal one waits for all of its writes."""
    options = small_options(codec=codec, segment_bytes=SEGMENT_BYTES, workers=1)
    with fresh(folder) as root:
        files = SimFiles(root, device, inline=False)
        how = {"read_only": False, "files": files}
        with Store(root / "store", 6 * SEGMENT_BYTES, geometry, options, **how) as store:
            yield store
            device.rate()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_a_get_keeps_the_queue_full() -> None:
    """128 pages of 128 records, 16 at a time: 8 times the latency, and little more."""
    keys = [b"%d" % number for number in range(PAGES)]
    pages = np.random.default_rng(1).integers(0, 256, (PAGES, 4096), np.uint8)
    out = np.zeros_like(pages)
    geometry = KVGeometry.opaque(4096)
    with scratch() as folder, Device() as device, opened(device, folder, geometry, "raw") as store:
        space = store.namespace(IDENTITY)
        for key, page in zip(keys, pages, strict=True):
            assert space.put([key], page[None]).all_ok
        assert space.get(keys, out).all_ok  # the headers are in the cache now
        device.rate(latency_us=int(LATENCY_S * 1e6), channels=CHANNELS)
        device.reset()
        single = min(seconds(lambda: space.get(keys[:1], out[:1])) for _ in range(TRIES))
        assert device.calls(READ) == TRIES, "a page is one read"
        out[:] = 0
        batch = min(seconds(lambda: space.get(keys, out)) for _ in range(TRIES))
        assert device.calls(READ) == TRIES * (1 + PAGES)
    assert np.array_equal(out, pages)
    ideal = PAGES / CHANNELS * LATENCY_S
    assert single >= 0.99 * LATENCY_S
    assert 0.99 * ideal <= batch <= 1.5 * ideal, f"{batch:.3f} s; the device takes {ideal:.3f} s"
    assert batch < 0.15 * PAGES * single


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize("what", ["put", "get"])
def test_coding_goes_on_while_the_device_works(
    what: str, codec: str, say: Callable[[str], None]
) -> None:
    """Records as a whole: the time is nearly the device's, not the sum of both."""
    values = np.random.default_rng(2).standard_normal((BLOCKS, *BLOCK_SHAPE), np.float32)
    data = (values.view(np.uint32) >> 16).astype(np.uint16)
    measure = measure_put if what == "put" else measure_get
    with scratch() as folder, Device() as device:
        for _ in range(ROUNDS):
            alone = [measure(device, folder, codec, data, 0) for _ in range(TRIES)]
            moved, machine = alone[0][0], min(taken for _, taken in alone)
            rate = int(moved / (DEVICE_SHARE * machine))
            together = [measure(device, folder, codec, data, rate) for _ in range(TRIES)]
            ideal, best = moved / rate, min(taken for _, taken in together)
            assert best >= 0.95 * ideal, "the device doesn't keep to its rate"
            if best <= OVERLAP * ideal:
                break  # else others may have had the processors just then
    say(f"{moved / MIB:.1f} MiB in {best / ideal:.2f} times the device's {ideal * 1e3:.0f} ms")
    assert best <= OVERLAP * ideal, f"{best:.3f} s; the device takes {ideal:.3f} s"


def measure_put(
    device: Device, folder: Path, codec: str, data: np.ndarray, rate: int
) -> tuple[int, float]:
    """(bytes that the device moved, seconds) of a put and its flush."""
    keys = [b"%d" % number for number in range(len(data))]
    with opened(device, folder, GEOMETRY, codec) as store:
        space = store.namespace(IDENTITY)
        assert space.put([b"first"], data[:1]).all_ok  # the segment is made
        store.flush()
        device.rate(bytes_per_s=rate)
        before = store.io.counters()["written_bytes"]
        start = time.perf_counter()
        assert space.put(keys, data).all_ok
        store.flush()
        taken = time.perf_counter() - start
        return store.io.counters()["written_bytes"] - before, taken


def measure_get(
    device: Device, folder: Path, codec: str, data: np.ndarray, rate: int
) -> tuple[int, float]:
    """(bytes that the device moved, seconds) of a get of all that was put."""
    keys = [b"%d" % number for number in range(len(data))]
    out = np.zeros_like(data)
    with opened(device, folder, GEOMETRY, codec) as store:
        space = store.namespace(IDENTITY)
        assert space.put(keys, data).all_ok
        store.flush()
        device.rate(bytes_per_s=rate)
        before = store.io.counters()["read_bytes"]
        start = time.perf_counter()
        assert space.get(keys, out).all_ok
        taken = time.perf_counter() - start
        moved = store.io.counters()["read_bytes"] - before
    assert np.array_equal(out, data)
    return moved, taken
