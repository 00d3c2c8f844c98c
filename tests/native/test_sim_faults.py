"""Every action of the simulated device that fails or falsifies, once and for good."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from io_support import noise
from simulation import device as dev
from simulation.device import ALWAYS, Device
from simulation.engine import PAGE, RETRIES, Engine, file_content, open_plain, page_rows

from flashkv.native import aligned_array


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
        assert file_content(plain) == data[:1000].tobytes()
        assert engine.write(fd, data) == -errno.EIO
        assert file_content(plain) == data.tobytes()


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
    assert file_content(fd) == data.tobytes()


def test_a_flipped_bit(device: Device, engine: Engine, fd: int, seed: int) -> None:
    data, back = noise(PAGE), aligned_array(PAGE)
    assert engine.write(fd, data) == 0
    for call, bit in enumerate((0, 7, 8, 8 * PAGE - 1, seed, ALWAYS), start=1):
        device.fault(dev.READ, dev.FLIP, first=call, amount=bit)
        assert engine.read(fd, back) == 0
        wrong = np.unpackbits(data ^ back, bitorder="little")
        assert np.flatnonzero(wrong).tolist() == [bit % (8 * PAGE)]
    assert file_content(fd) == data.tobytes()
    assert engine.read(fd, back) == 0
    assert np.array_equal(data, back)


def test_a_lost_write(device: Device, engine: Engine, fd: int) -> None:
    old, new = noise(PAGE, 1), noise(PAGE, 2)
    assert engine.write(fd, old) == 0
    device.fault(dev.WRITE, dev.LOSE, first=2)
    assert engine.write(fd, new) == 0
    assert file_content(fd) == old.tobytes()
    assert engine.write(fd, new) == 0
    assert file_content(fd) == new.tobytes()


@pytest.mark.parametrize("amount", [PAGE, 77])
def test_a_stray_write(device: Device, engine: Engine, disk_path: Path, amount: int) -> None:
    old, new = noise(4 * PAGE, 1), noise(PAGE, 2)
    with open_plain(disk_path / "f", os.O_DIRECT) as fd, open_plain(disk_path / "f") as plain:
        assert engine.write(fd, old) == 0
        device.fault(dev.WRITE, dev.STRAY, first=2, amount=amount)
        assert engine.write(fd, new, PAGE) == 0
        old[PAGE + amount : 2 * PAGE + amount] = new
        assert file_content(plain) == old.tobytes()


def test_one_fault_of_time_and_one_of_outcome_meet(device: Device, engine: Engine, fd: int) -> None:
    device.fault(dev.WRITE, dev.HANG)
    device.fault(dev.WRITE, dev.FAIL, result=-errno.EIO)
    device.fault(dev.WRITE, dev.FAIL, result=-errno.ENOSPC)
    data = noise(PAGE)
    assert engine.submit(page_rows(fd, data, 1)) == 0
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
