"""The simulated device as a backend, and what it records; sim.h says what it must."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from io_support import noise
from simulation import device as dev
from simulation.device import NEVER, NOT_ENDED, Device
from simulation.engine import PAGE, Engine, file_content, open_plain, page_rows, wait_until

from flashkv.native import aligned_array, lib

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
        assert engine.submit(page_rows(fd, data, 3)) == 0
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
    assert engine.submit(page_rows(fd, data, 2)[1:]) == 0  # hangs
    syncing = threading.Thread(target=engine.sync, args=([fd],))
    syncing.start()
    wait_until(lambda: device.hanging() == 2)
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
    assert file_content(fd) == b""


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
    assert engine.submit(page_rows(fd, data, 1)) == 0
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
    assert engine.submit(page_rows(fd, data, 1)) == 0
    device.forget()
    device.note(5)
    device.release()
    assert engine.reap() == [(0, 0)]
    (note,) = device.events()
    assert (note.kind, note.inode, note.result, note.ended) == (dev.NOTE, 5, 0, NEVER)
