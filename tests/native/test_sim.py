"""The simulated device does what sim.h says: else what other tests see on it means nothing."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from io_support import noise, write_rows
from simulation import device as dev
from simulation.device import ALWAYS, NEVER, NOT_ENDED, Device
from simulation.engine import Engine

from flashkv.native import aligned_array, lib

PAGE = 4096
RETRIES = 4


@pytest.fixture
def device(seed: int) -> Iterator[Device]:
    with Device(seed) as device:
        yield device


@pytest.fixture
def engine(device: Device) -> Iterator[Engine]:
    with Engine(device, retries=RETRIES) as engine:
        yield engine


@contextmanager
def open_plain(path: Path, flags: int = 0) -> Iterator[int]:
    """A file for reading and writing; buffered where the flags don't say otherwise."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with open_plain(tmp_path / "file") as fd:
        yield fd


def content(fd: int) -> bytes:
    return os.pread(fd, 1 << 24, 0)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def pages(fd: int, data: np.ndarray, count: int) -> np.ndarray:
    return write_rows(fd, data, [(i * PAGE, PAGE) for i in range(count)])


# ---- the engine on it ----


def test_it_is_a_backend_as_the_others(engine: Engine, fd: int) -> None:
    assert lib.fkv_backend_available(lib.FKV_BACKEND_SIM)
    data, back = noise(3 << 20), aligned_array(3 << 20)
    assert engine.write(fd, data, 512) == 0
    assert engine.sync([fd, fd]) == [0, 0]
    assert engine.read(fd, back, 512) == 0
    assert np.array_equal(data, back)
    assert engine.read(fd, back, 513) == -errno.ENODATA
    assert engine.read(1_000_000, back) == -errno.EBADF
    assert lib.fkv_engine_probe(engine.engine, fd, True) == 0
    counters = engine.counters()
    assert counters["syncs"] == 3
    assert counters["written_bytes"] == data.nbytes + PAGE
    assert counters["inflight"] == 0


def test_it_takes_a_device_and_one_engine_at_a_time(device: Device) -> None:
    with pytest.raises(RuntimeError, match="sim: No such device"):
        Engine(None)
    with Engine(device), pytest.raises(RuntimeError, match="sim: Device or resource busy"):
        Engine(device)
    Engine(device).close()


# ---- the recording ----


def test_recording_holds_contents_in_order(
    device: Device, engine: Engine, tmp_path: Path, fd: int
) -> None:
    data = noise(8 * PAGE)
    with open_plain(tmp_path / "second") as second, open_plain(tmp_path / "other") as other:
        device.bind(fd, 7)
        device.bind(second, 8)
        assert engine.write(fd, data[:PAGE]) == 0
        assert device.events() == []
        assert device.note(1) == NEVER
        device.record()
        assert engine.submit(pages(fd, data, 3)) == 0
        assert len(engine.reap()) == 3
        assert engine.write(second, data[100:777], 33) == 0
        assert engine.write(other, data[:PAGE]) == 0
        assert device.note(41) == 4
        assert engine.sync([second]) == [0]
        assert engine.read(fd, aligned_array(PAGE)) == 0
        device.unbind(second)
        assert engine.write(second, data[:PAGE]) == 0
        device.record(False)
        assert engine.write(fd, data[:PAGE]) == 0

    events = device.events()
    assert device.event_count() == len(events)
    assert [(e.kind, e.inode, e.offset) for e in events] == [
        (dev.WRITE, 7, 0),
        (dev.WRITE, 7, PAGE),
        (dev.WRITE, 7, 2 * PAGE),
        (dev.WRITE, 8, 33),
        (dev.NOTE, 41, 0),
        (dev.SYNC, 8, 0),
        (dev.SYNC_END, 8, 0),
    ]
    assert b"".join(e.data for e in events[:3]) == data[: 3 * PAGE].tobytes()
    assert events[3].data == data[100:777].tobytes()
    assert events[6].begun == 5
    assert device.events(5) == events[5:]
    assert device.events(99) == []
    device.forget()
    assert device.events() == []
    device.record()
    assert device.note(2) == 0


def test_a_copy_of_the_bytes_as_they_were(device: Device, engine: Engine, fd: int) -> None:
    data = noise(PAGE)
    before = data.tobytes()
    device.bind(fd, 1)
    device.record()
    assert engine.write(fd, data) == 0
    data[:] = 0
    assert device.events()[0].data == before


def test_which_writes_a_sync_covers(device: Device, engine: Engine, fd: int) -> None:
    """Those that had ended when it was submitted; not those that ended while it ran."""
    data = noise(3 * PAGE)
    device.bind(fd, 1)
    device.record()
    device.fault(dev.WRITE, dev.HANG, first=2)
    device.fault(dev.SYNC, dev.HANG)
    assert engine.write(fd, data[:PAGE]) == 0
    assert engine.submit(pages(fd, data, 2)[1:]) == 0  # hangs
    syncing = threading.Thread(target=engine.sync, args=([fd],))
    syncing.start()
    wait_for(lambda: device.hanging() == 2)
    assert engine.write(fd, data[:PAGE], 2 * PAGE) == 0
    first, second, sync, third = device.events()
    assert (first.result, second.result, sync.result, third.result) == (0, 1, 1, 0)
    assert first.ended <= 2
    assert second.ended == NEVER
    assert second.result == sync.result == NOT_ENDED
    assert third.ended == 4
    device.release()
    syncing.join()
    engine.reap()
    events = device.events()
    assert events[1].ended > 2
    assert events[1].result == events[2].result == 0
    assert [e.kind for e in events].count(dev.SYNC_END) == 1
    end = events[4]
    assert (end.kind, end.begun, end.result) == (dev.SYNC_END, 2, 0)


def test_failures_stand_in_the_recording(device: Device, engine: Engine, fd: int) -> None:
    data = noise(PAGE)
    device.bind(fd, 1)
    device.record()
    device.fault(dev.WRITE, dev.FAIL, result=-errno.EIO)
    device.fault(dev.SYNC, dev.FAIL, result=-errno.ENOSPC)
    assert engine.write(fd, data) == -errno.EIO
    assert engine.sync([fd]) == [-errno.ENOSPC]
    write, sync, end = device.events()
    assert (write.result, write.data) == (-errno.EIO, data.tobytes())
    assert sync.result == end.result == -errno.ENOSPC
    assert content(fd) == b""


def test_a_repeated_write_is_one_event(device: Device, engine: Engine, fd: int) -> None:
    data = noise(PAGE)
    device.bind(fd, 1)
    device.record()
    device.fault(dev.WRITE, dev.SHORT, amount=512)
    device.fault(dev.WRITE, dev.FAIL, first=2, result=-errno.EAGAIN)
    assert engine.write(fd, data) == 0
    assert device.calls(dev.WRITE) == 3
    (event,) = device.events()
    assert (event.offset, event.data, event.result) == (0, data.tobytes(), 0)


def test_the_file_is_the_one_at_submission(
    device: Device, engine: Engine, tmp_path: Path, fd: int
) -> None:
    data = noise(2 * PAGE)
    device.bind(fd, 1)
    device.record()
    device.fault(dev.WRITE, dev.HANG)
    assert engine.submit(pages(fd, data, 1)) == 0
    device.unbind(fd)
    device.bind(fd, 2, 1)
    assert engine.write(fd, data[PAGE:], PAGE) == 0
    device.release()
    assert engine.reap() == [(0, 0)]
    assert [e.inode for e in device.events()] == [1, 2]


def test_forgetting_while_operations_run(device: Device, engine: Engine, fd: int) -> None:
    data = noise(PAGE)
    device.bind(fd, 1)
    device.record()
    device.fault(dev.WRITE, dev.HANG)
    assert engine.submit(pages(fd, data, 1)) == 0
    device.forget()
    device.note(5)
    device.release()
    assert engine.reap() == [(0, 0)]
    (note,) = device.events()
    assert (note.kind, note.inode, note.result) == (dev.NOTE, 5, 0)


# ---- failures ----


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENODEV])
def test_errors_come_back_once_and_for_good(
    device: Device, engine: Engine, fd: int, code: int
) -> None:
    data = noise(PAGE)
    calls = {
        dev.READ: lambda: engine.read(fd, data.copy()),
        dev.WRITE: lambda: engine.write(fd, data),
        dev.SYNC: lambda: engine.sync([fd])[0],
    }
    assert engine.write(fd, data) == 0
    for kind, call in calls.items():
        device.reset()
        device.fault(kind, dev.FAIL, first=2, result=-code)
        assert [call() for _ in range(3)] == [0, -code, 0]
        assert (device.calls(kind), device.hits()) == (3, 1)
        device.fault(kind, dev.FAIL, first=5, count=ALWAYS, result=-code)
        assert [call() for _ in range(4)] == [0, -code, -code, -code]
        device.reset()
        assert call() == 0
        assert (device.calls(kind), device.hits()) == (1, 0)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_repeated(device: Device, engine: Engine, fd: int, code: int) -> None:
    data, back = noise(PAGE), aligned_array(PAGE)
    calls = {
        dev.WRITE: lambda: engine.write(fd, data),
        dev.READ: lambda: engine.read(fd, back),
    }
    for kind, call in calls.items():
        device.reset()
        device.fault(kind, dev.FAIL, count=RETRIES, result=-code)
        assert call() == 0
        assert device.calls(kind) == device.hits() + 1 == RETRIES + 1
        device.reset()
        device.fault(kind, dev.FAIL, count=ALWAYS, result=-code)
        assert call() == -code
        assert device.calls(kind) == RETRIES + 1
    assert np.array_equal(data, back)
    device.reset()
    device.fault(dev.SYNC, dev.FAIL, result=-code)
    assert engine.sync([fd]) == [-code]
    assert device.calls(dev.SYNC) == 1


def test_more_than_was_asked_for_is_an_error(device: Device, engine: Engine, fd: int) -> None:
    device.fault(dev.WRITE, dev.FAIL, result=PAGE + 1)
    assert engine.write(fd, noise(PAGE)) == -errno.EIO


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
def test_a_failed_write_may_reach_the_file_in_part(
    device: Device, engine: Engine, disk_path: Path, flags: int
) -> None:
    data = noise(4 * PAGE)
    with open_plain(disk_path / "f", flags) as fd, open_plain(disk_path / "f") as plain:
        device.fault(dev.WRITE, dev.FAIL, result=-errno.EIO, amount=1000)
        device.fault(dev.WRITE, dev.FAIL, first=2, result=-errno.EIO, amount=ALWAYS)
        assert engine.write(fd, data) == -errno.EIO
        assert content(plain) == data[:1000].tobytes()
        assert engine.write(fd, data) == -errno.EIO
        assert content(plain) == data.tobytes()


@pytest.mark.parametrize("flags", [0, os.O_DIRECT], ids=["buffered", "direct"])
@pytest.mark.parametrize("amount", [PAGE, 512, 1000, 2 * PAGE + 17])
def test_short_results_are_resumed(
    device: Device, engine: Engine, disk_path: Path, flags: int, amount: int
) -> None:
    data, back = noise(4 * PAGE), aligned_array(4 * PAGE)
    with open_plain(disk_path / "f", flags) as fd:
        device.fault(dev.WRITE, dev.SHORT, amount=amount)
        device.fault(dev.READ, dev.SHORT, amount=amount)
        assert engine.write(fd, data) == 0
        assert engine.read(fd, back) == 0
        assert np.array_equal(data, back)
    # Less than what the operation is aligned to is no progress, but is tried again.
    assert device.calls(dev.WRITE) == device.calls(dev.READ) == 2
    assert engine.counters()["short_results"] == 2


def test_zero_results(device: Device, engine: Engine, fd: int) -> None:
    data = noise(PAGE)
    device.fault(dev.WRITE, dev.SHORT, count=RETRIES)
    assert engine.write(fd, data) == 0
    device.reset()
    device.fault(dev.WRITE, dev.SHORT, count=ALWAYS)
    assert engine.write(fd, data) == -errno.EIO
    assert device.calls(dev.WRITE) == RETRIES + 1
    device.fault(dev.READ, dev.SHORT)
    assert engine.read(fd, data) == -errno.ENODATA
    assert device.calls(dev.READ) == 1


def test_a_short_result_that_covers_everything(device: Device, engine: Engine, fd: int) -> None:
    data = noise(PAGE)
    device.fault(dev.WRITE, dev.SHORT, amount=ALWAYS)
    assert engine.write(fd, data) == 0
    assert content(fd) == data.tobytes()


def test_a_flipped_bit(device: Device, engine: Engine, fd: int, seed: int) -> None:
    data, back = noise(PAGE), aligned_array(PAGE)
    assert engine.write(fd, data) == 0
    for call, bit in enumerate((0, 7, 8, 8 * PAGE - 1, seed, ALWAYS), start=1):
        device.fault(dev.READ, dev.FLIP, first=call, amount=bit)
        assert engine.read(fd, back) == 0
        wrong = np.unpackbits(data ^ back, bitorder="little")
        assert np.flatnonzero(wrong).tolist() == [bit % (8 * PAGE)]
    assert content(fd) == data.tobytes()
    assert engine.read(fd, back) == 0
    assert np.array_equal(data, back)


def test_a_lost_write(device: Device, engine: Engine, fd: int) -> None:
    old, new = noise(PAGE, 1), noise(PAGE, 2)
    assert engine.write(fd, old) == 0
    device.fault(dev.WRITE, dev.LOSE, first=2)
    assert engine.write(fd, new) == 0
    assert content(fd) == old.tobytes()
    assert engine.write(fd, new) == 0
    assert content(fd) == new.tobytes()


@pytest.mark.parametrize("amount", [PAGE, 77])
def test_a_stray_write(device: Device, engine: Engine, disk_path: Path, amount: int) -> None:
    old, new = noise(4 * PAGE, 1), noise(PAGE, 2)
    with open_plain(disk_path / "f", os.O_DIRECT) as fd, open_plain(disk_path / "f") as plain:
        assert engine.write(fd, old) == 0
        device.fault(dev.WRITE, dev.STRAY, first=2, amount=amount)
        assert engine.write(fd, new, PAGE) == 0
        old[PAGE + amount : 2 * PAGE + amount] = new
        assert content(plain) == old.tobytes()


def test_one_fault_of_time_and_one_of_outcome_meet(
    device: Device, engine: Engine, fd: int
) -> None:
    device.fault(dev.WRITE, dev.HANG)
    device.fault(dev.WRITE, dev.FAIL, result=-errno.EIO)
    device.fault(dev.WRITE, dev.FAIL, result=-errno.ENOSPC)
    data = noise(PAGE)
    assert engine.submit(pages(fd, data, 1)) == 0
    assert device.hanging() == device.hits() == 1
    device.release()
    assert engine.reap() == [(0, -errno.EIO)]


@pytest.mark.parametrize(
    ("kind", "action", "first", "count"),
    [
        (3, dev.FAIL, 1, 1),
        (dev.READ, 8, 1, 1),
        (dev.READ, dev.FAIL, 0, 1),
        (dev.READ, dev.FAIL, 1, 0),
        (dev.SYNC, dev.SHORT, 1, 1),
        (dev.WRITE, dev.FLIP, 1, 1),
        (dev.SYNC, dev.LOSE, 1, 1),
        (dev.READ, dev.STRAY, 1, 1),
    ],
)
def test_faults_that_make_no_sense(
    device: Device, kind: int, action: int, first: int, count: int
) -> None:
    with pytest.raises(ValueError, match="no such fault"):
        device.fault(kind, action, first=first, count=count)


def test_many_faults(device: Device, engine: Engine, fd: int) -> None:
    data = noise(PAGE)
    for call in range(1, 200, 2):
        device.fault(dev.WRITE, dev.FAIL, first=call, result=-call)
    assert [engine.write(fd, data) for _ in range(10)] == [-1, 0, -3, 0, -5, 0, -7, 0, -9, 0]


@pytest.mark.parametrize("alignment", [512, PAGE])
def test_misaligned(device: Device, engine: Engine, fd: int, alignment: int) -> None:
    data = aligned_array(4 * PAGE)
    device.bind(fd, 1, alignment)
    step = alignment // 2
    cases = [
        (data[:PAGE], 0, 0),
        (data[: 2 * PAGE], alignment, 0),
        (data[step : PAGE + step], 0, -errno.EINVAL),
        (data[: PAGE + step], 0, -errno.EINVAL),
        (data[:PAGE], step, -errno.EINVAL),
    ]
    for array, offset, result in cases:
        assert engine.write(fd, array, offset) == result
        assert engine.read(fd, array, offset) == result
    assert engine.sync([fd]) == [0]
    device.bind(fd, 1)
    assert engine.write(fd, data[1:8], 3) == 0
    device.unbind(fd)
    assert engine.write(fd, data[1:8], 3) == 0


@pytest.mark.parametrize(("fd", "alignment"), [(-1, 1), (1 << 20, 1), (3, 0), (3, 24)])
def test_what_cannot_be_bound(device: Device, fd: int, alignment: int) -> None:
    with pytest.raises(OSError, match="can't be bound"):
        device.bind(fd, 1, alignment)


# ---- time and order ----


def test_late(device: Device, engine: Engine, fd: int) -> None:
    data = noise(8 * PAGE)
    device.fault(dev.WRITE, dev.LATE, first=1, amount=2)
    device.fault(dev.WRITE, dev.LATE, first=4, amount=1)
    device.fault(dev.WRITE, dev.LATE, first=7, amount=100)
    assert engine.submit(pages(fd, data, 8)) == 0
    assert [tag for tag, _ in engine.reap()] == [1, 2, 0, 4, 3, 5, 7, 6]
    assert content(fd) == data.tobytes()
    device.fault(dev.SYNC, dev.LATE, amount=ALWAYS)
    assert engine.sync([fd]) == [0]


def test_late_does_not_wait_for_what_hangs(device: Device, engine: Engine, fd: int) -> None:
    device.fault(dev.WRITE, dev.LATE, first=1, count=2, amount=9)
    device.fault(dev.WRITE, dev.HANG, first=3)
    data = noise(3 * PAGE)
    assert engine.submit(pages(fd, data, 3)) == 0
    assert [tag for tag, _ in engine.reap(200)] == [0, 1]
    device.release()
    assert engine.reap() == [(2, 0)]


def test_slow(device: Device, engine: Engine, fd: int) -> None:
    data = noise(3 * PAGE)
    device.fault(dev.WRITE, dev.SLOW, amount=50_000)
    start = time.monotonic()
    assert engine.submit(pages(fd, data, 3)) == 0
    assert [tag for tag, _ in engine.reap()] == [1, 2, 0]
    assert time.monotonic() - start >= 0.05


def test_slow_ends_with_the_engine(device: Device, fd: int) -> None:
    data = noise(PAGE)
    device.fault(dev.WRITE, dev.SLOW, amount=3_600_000_000)
    engine = Engine(device)
    assert engine.submit(pages(fd, data, 1)) == 0
    engine.close()
    assert content(fd) == data.tobytes()


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
    wait_for(lambda: device.hanging() == 1)
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
    assert engine.submit(pages(fd, data, 3)) == 0
    assert device.hanging() == 3
    engine.close()
    assert device.hanging() == 0
    assert content(fd) == data.tobytes()
    assert [event.result for event in device.events()] == [0, 0, 0]


def test_a_repeat_hangs_too(device: Device, fd: int) -> None:
    device.fault(dev.WRITE, dev.FAIL, result=-errno.EINTR)
    device.fault(dev.WRITE, dev.HANG, first=2, count=ALWAYS)
    data = noise(PAGE)
    with Engine(device) as engine:
        assert engine.submit(pages(fd, data, 1)) == 0
        wait_for(lambda: device.hanging() == 1)
        assert device.calls(dev.WRITE) == 2


def order_of(seed: int, window: int, count: int, fd: int) -> list[int]:
    data = noise(count * PAGE)
    with Device(seed) as device, Engine(device) as engine:
        device.order(window)
        assert engine.submit(pages(fd, data, count)) == 0
        order = engine.reap()
    assert {result for _, result in order} == {0}
    assert content(fd) == data.tobytes()
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
    rows = pages(fd, data, 64)
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
    assert content(fd) == data.tobytes()


def test_a_rate_and_a_slow_operation(device: Device, engine: Engine, fd: int) -> None:
    """It keeps its channel busy: what comes behind it on the only one waits."""
    device.rate(latency_us=1000, channels=1)
    device.fault(dev.WRITE, dev.SLOW, amount=100_000)
    data, start = noise(2 * PAGE), time.monotonic()
    assert engine.submit(pages(fd, data, 2)) == 0
    assert [tag for tag, _ in engine.reap()] == [0, 1]
    assert time.monotonic() - start >= 0.102
