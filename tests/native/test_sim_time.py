"""The simulated device holds back, reorders and keeps to a rate."""

from __future__ import annotations

import errno
import os
import threading
import time

import numpy as np
import pytest
from io_support import noise
from simulation import device as dev
from simulation.device import ALWAYS, Device
from simulation.engine import PAGE, Engine, file_content, page_rows, wait_until

from flashkv.native import aligned_array


def test_late(device: Device, engine: Engine, fd: int) -> None:
    data = noise(8 * PAGE)
    device.fault(dev.WRITE, dev.LATE, first=1, amount=2)
    device.fault(dev.WRITE, dev.LATE, first=4, amount=1)
    device.fault(dev.WRITE, dev.LATE, first=7, amount=100)
    assert engine.submit(page_rows(fd, data, 8)) == 0
    assert [tag for tag, _ in engine.reap()] == [1, 2, 0, 4, 3, 5, 7, 6]
    assert file_content(fd) == data.tobytes()
    device.fault(dev.SYNC, dev.LATE, amount=ALWAYS)
    assert engine.sync([fd]) == [0]


def test_late_does_not_wait_until_what_hangs(device: Device, engine: Engine, fd: int) -> None:
    device.fault(dev.WRITE, dev.LATE, first=1, count=2, amount=9)
    device.fault(dev.WRITE, dev.HANG, first=3)
    data = noise(3 * PAGE)
    assert engine.submit(page_rows(fd, data, 3)) == 0
    assert [tag for tag, _ in engine.reap(200)] == [0, 1]
    device.release()
    assert engine.reap() == [(2, 0)]


def test_slow(device: Device, engine: Engine, fd: int) -> None:
    data = noise(3 * PAGE)
    device.fault(dev.WRITE, dev.SLOW, amount=50_000)
    start = time.monotonic()
    assert engine.submit(page_rows(fd, data, 3)) == 0
    assert [tag for tag, _ in engine.reap()] == [1, 2, 0]
    assert time.monotonic() - start >= 0.05


def test_slow_ends_with_the_engine(device: Device, fd: int) -> None:
    data = noise(PAGE)
    device.fault(dev.WRITE, dev.SLOW, amount=3_600_000_000)
    engine = Engine(device)
    assert engine.submit(page_rows(fd, data, 1)) == 0
    engine.close()
    assert file_content(fd) == data.tobytes()


@pytest.mark.parametrize("kind", [dev.READ, dev.WRITE, dev.SYNC])
def test_hang_until_released(device: Device, engine: Engine, fd: int, kind: int) -> None:
    data = noise(PAGE)
    assert engine.write(fd, data) == 0
    device.reset()
    device.fault(kind, dev.HANG)
    back, results = aligned_array(PAGE), []
    calls = {
        dev.READ: lambda: results.append(engine.read(fd, back)),
        dev.WRITE: lambda: results.append(engine.write(fd, data, PAGE)),
        dev.SYNC: lambda: results.append(engine.sync([fd])[0]),
    }
    thread = threading.Thread(target=calls[kind])
    thread.start()
    wait_until(lambda: device.hanging() == 1)
    assert engine.write(fd, data) == 0  # others go by
    assert engine.read(fd, data) == 0
    assert engine.sync([fd]) == [0]
    assert results == []
    assert os.fstat(fd).st_size == PAGE
    assert engine.counters()["inflight"] == 1
    device.reset()
    assert device.hanging() == 1
    device.release()
    thread.join(20)
    assert results == [0]
    assert device.hanging() == 0


def test_what_hangs_ends_with_the_engine(device: Device, fd: int) -> None:
    data = noise(3 * PAGE)
    device.bind(fd, 1)
    device.record()
    device.fault(dev.WRITE, dev.HANG, count=ALWAYS)
    engine = Engine(device)
    assert engine.submit(page_rows(fd, data, 3)) == 0
    assert device.hanging() == 3
    engine.close()
    assert device.hanging() == 0
    assert file_content(fd) == data.tobytes()
    assert [event.result for event in device.events()] == [0, 0, 0]


def test_a_repeat_hangs_too(device: Device, fd: int) -> None:
    device.fault(dev.WRITE, dev.FAIL, result=-errno.EINTR)
    device.fault(dev.WRITE, dev.HANG, first=2, count=ALWAYS)
    data = noise(PAGE)
    with Engine(device) as engine:
        assert engine.submit(page_rows(fd, data, 1)) == 0
        wait_until(lambda: device.hanging() == 1)
        assert device.calls(dev.WRITE) == 2


def order_of(seed: int, window: int, count: int, fd: int) -> list[int]:
    data = noise(count * PAGE)
    with Device(seed) as device, Engine(device) as engine:
        device.order(window)
        assert engine.submit(page_rows(fd, data, count)) == 0
        order = engine.reap()
    assert {result for _, result in order} == {0}
    assert file_content(fd) == data.tobytes()
    return [tag for tag, _ in order]


def test_the_order_follows_from_the_seed(fd: int, seed: int) -> None:
    for window in (0, 1):
        assert order_of(seed, window, 60, fd) == list(range(60))
    for window in (2, 8, 64):
        order = order_of(seed, window, 60, fd)
        assert order == order_of(seed, window, 60, fd)
        assert sorted(order) == list(range(60))
        assert order != list(range(60))
        assert len({tuple(order_of(seed + i, window, 60, fd)) for i in range(5)}) == 5
        # Nobody waits for more than window - 1 that came later.
        for place, tag in enumerate(order):
            assert sum(other > tag for other in order[:place]) < window


def seconds(device: Device, engine: Engine, fd: int, rows: np.ndarray) -> float:
    start = time.monotonic()
    assert engine.submit(rows) == 0
    assert len(engine.reap()) == len(rows)
    return time.monotonic() - start


def test_rate(device: Device, engine: Engine, fd: int) -> None:
    """No faster than told, ever; and in proportion: other processes may take some of the time."""
    data = noise(64 * PAGE)
    rows = page_rows(fd, data, 64)
    device.rate(latency_us=2000, channels=4)  # 64 / 4 * 2 ms
    assert seconds(device, engine, fd, rows) >= 0.032
    device.rate(latency_us=10_000, channels=4)
    slow = seconds(device, engine, fd, rows)
    assert slow >= 0.16
    device.rate(latency_us=10_000, channels=32)
    fast = seconds(device, engine, fd, rows)
    assert 0.02 <= fast < slow / 2
    device.rate(bytes_per_s=1 << 20)  # 256 KiB
    slow = seconds(device, engine, fd, rows)
    assert slow >= 0.25
    device.rate(bytes_per_s=16 << 20)
    fast = seconds(device, engine, fd, rows)
    assert 1 / 64 <= fast < slow / 2
    device.rate(latency_us=20_000)  # any number of channels
    assert 0.02 <= seconds(device, engine, fd, rows) < slow / 2
    device.rate(latency_us=20_000, channels=1)
    assert engine.sync([fd, fd]) == [0, 0]
    device.rate()
    assert seconds(device, engine, fd, rows) < slow / 2
    assert file_content(fd) == data.tobytes()


def test_a_rate_and_a_slow_operation(device: Device, engine: Engine, fd: int) -> None:
    """It keeps its channel busy: what comes behind it on the only one waits."""
    device.rate(latency_us=1000, channels=1)
    device.fault(dev.WRITE, dev.SLOW, amount=100_000)
    data, start = noise(2 * PAGE), time.monotonic()
    assert engine.submit(page_rows(fd, data, 2)) == 0
    assert [tag for tag, _ in engine.reap()] == [0, 1]
    assert time.monotonic() - start >= 0.102
