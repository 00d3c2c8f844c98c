"""Opening an engine, its options, probing; writes and waits at their edges. sim.h's device answers
where a real one would not fail on demand.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from io_support import BACKENDS, noise, write_rows
from simulation import device as dev
from simulation.device import Device
from simulation.engine import PAGE, Engine, open_plain

from flashkv.blockio import WRITE_DTYPE
from flashkv.native import aligned_array, ffi, lib, pointer

MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backend": 77}, "unknown backend"),
        ({"queue_depth": 0}, "queue_depth must be 1 to 4096"),
        ({"queue_depth": 4097}, "queue_depth must be 1 to 4096"),
        ({"workers": 257}, "workers must be"),
        ({"workers": 0, "backend": lib.FKV_BACKEND_THREADS}, "workers must be"),
        ({"io_threads": 0}, "io_threads must be 1 to 256"),
        ({"io_threads": 257}, "io_threads must be 1 to 256"),
        ({"memory_alignment": 0}, "memory_alignment must be a power of two"),
        ({"memory_alignment": 768}, "memory_alignment must be a power of two"),
        ({"read_buffer_bytes": 1 << 62}, "no memory or threads for buffers"),
        ({"read_buffer_bytes": 1 << 52}, "no memory or threads for buffers"),
        ({"read_buffer_bytes": 1 << 60, "header_cache_bytes": 0}, "no memory or threads"),
    ],
)
def test_options_out_of_range(device: Device, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        Engine(device, **changes)


def test_a_cache_for_all_headers_there_are(device: Device) -> None:
    with Engine(device, header_cache_bytes=1 << 50) as engine:
        assert engine.counters()["header_cache_bytes"] == 0


def test_no_engine_is_closed() -> None:
    lib.fkv_engine_close(ffi.NULL)


def test_what_runs_here() -> None:
    assert not lib.fkv_backend_available(lib.FKV_BACKEND_AUTO)
    assert not lib.fkv_backend_available(77)
    assert lib.fkv_backend_available(lib.FKV_BACKEND_THREADS)


def test_auto_takes_one_that_works() -> None:
    with Engine(None, backend=lib.FKV_BACKEND_AUTO) as engine:
        name = ffi.string(lib.fkv_engine_backend(engine.engine)).decode()
    assert name == BACKENDS[0]


def test_buffers_of_no_or_all_memory() -> None:
    assert lib.fkv_buffer_alloc(0) == ffi.NULL
    assert lib.fkv_buffer_alloc((1 << 64) - 1) == ffi.NULL
    assert lib.fkv_buffer_alloc(1 << 61) == ffi.NULL
    lib.fkv_buffer_free(ffi.NULL, 10)


# ---- probing ----


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        (dev.READ, dev.FAIL),
        (dev.READ, dev.FLIP),
        (dev.WRITE, dev.FAIL),
        (dev.WRITE, dev.LOSE),
        (dev.SYNC, dev.FAIL),
    ],
)
def test_a_probe_finds_what_lies(
    device: Device, engine: Engine, fd: int, kind: int, action: int
) -> None:
    os.pwrite(fd, bytes(PAGE), 0)
    device.fault(kind, action, result=-errno.EIO)
    assert lib.fkv_engine_probe(engine.engine, fd, True) == -errno.EIO
    device.reset()
    assert lib.fkv_engine_probe(engine.engine, fd, True) == 0


# ---- registered memory ----


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="io_uring isn't available here")
def test_memory_that_cant_be_registered() -> None:
    array = aligned_array(MIB)
    base = pointer(array, "uint8_t *")
    with Engine(None, backend=lib.FKV_BACKEND_IO_URING) as engine:
        assert lib.fkv_engine_register(engine.engine, base, 0) == -errno.EINVAL
        assert lib.fkv_engine_register(engine.engine, base, 65 << 30) == -errno.ENOSPC
        nowhere = ffi.cast("uint8_t *", 1 << 46)
        assert lib.fkv_engine_register(engine.engine, nowhere, MIB) == -errno.EFAULT
        held = [aligned_array(PAGE) for _ in range(80)]
        statuses = [
            lib.fkv_engine_register(engine.engine, pointer(one, "uint8_t *"), PAGE) for one in held
        ]
        assert statuses.count(0) < 64
        assert set(statuses) == {0, -errno.ENOSPC}
        for one, status in zip(held, statuses, strict=True):
            gone = lib.fkv_engine_unregister(engine.engine, pointer(one, "uint8_t *"))
            assert gone == (0 if status == 0 else -errno.ENOENT)
        assert lib.fkv_engine_register(engine.engine, base, MIB) == 0


def test_threads_have_nothing_to_register_with() -> None:
    array = aligned_array(PAGE)
    base = pointer(array, "uint8_t *")
    with Engine(None, backend=lib.FKV_BACKEND_THREADS) as engine:
        assert lib.fkv_engine_register(engine.engine, base, PAGE) == -errno.EOPNOTSUPP
        assert lib.fkv_engine_unregister(engine.engine, base) == -errno.ENOENT


# ---- writes and waits ----


def test_writes_of_nothing(engine: Engine, fd: int) -> None:
    data = noise(PAGE)
    assert engine.submit(write_rows(fd, data, [(0, 0), (0, 0)])) == 0
    assert engine.reap() == [(0, 0), (1, 0)]
    assert engine.submit(write_rows(fd, data, [])) == 0
    assert engine.reap(0) == []


def test_a_reap_waits_for_as_long_as_told(device: Device, engine: Engine, fd: int) -> None:
    data, row = noise(PAGE), np.zeros(4, WRITE_DTYPE)
    rows = pointer(row, "fkv_write *")
    device.fault(dev.WRITE, dev.HANG)
    assert engine.submit(write_rows(fd, data, [(0, PAGE)])) == 0
    assert lib.fkv_write_reap(engine.engine, rows, 0, -1) == 0
    assert lib.fkv_write_reap(engine.engine, rows, 4, 0) == 0
    begun = time.monotonic()
    assert lib.fkv_write_reap(engine.engine, rows, 4, 1100) == 0
    assert time.monotonic() - begun > 1.0
    later = threading.Timer(0.1, device.release)
    later.start()
    assert lib.fkv_write_reap(engine.engine, rows, 4, -1) == 1
    later.join()
    assert lib.fkv_write_reap(engine.engine, rows, 4, -1) == 0  # nothing is left to come
    assert lib.fkv_writes_inflight(engine.engine) == 0


@pytest.mark.parametrize("count", [3, 2, 1])
def test_waiters_share_what_finishes(device: Device, engine: Engine, fd: int, count: int) -> None:
    """Each write is reaped once; who finds nothing left to come returns with nothing."""
    data, taken = noise(PAGE), []
    device.fault(dev.WRITE, dev.HANG, count=dev.ALWAYS)
    assert engine.submit(write_rows(fd, data, [(0, PAGE)] * count)) == 0

    def wait() -> None:
        row = np.zeros(1, WRITE_DTYPE)
        if lib.fkv_write_reap(engine.engine, pointer(row, "fkv_write *"), 1, 20_000):
            taken.append(int(row["tag"][0]))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    device.release()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(count))


@pytest.mark.parametrize("n", [1, 7, 16, 17, 20])
def test_a_long_move_ends_at_the_first_error(
    device: Device, engine: Engine, fd: int, n: int
) -> None:
    data = noise(20 * MIB)
    device.fault(dev.WRITE, dev.FAIL, first=n, result=-errno.ENOSPC)
    assert engine.write(fd, data) == -errno.ENOSPC
    written = 16 if n <= 16 else 20
    assert device.calls(dev.WRITE) == written
    device.reset()
    assert engine.write(fd, data) == 0
    back = aligned_array(20 * MIB)
    device.fault(dev.READ, dev.FAIL, first=n, result=-errno.EIO)
    assert engine.read(fd, back) == -errno.EIO
    device.reset()
    assert engine.read(fd, back) == 0
    assert np.array_equal(data, back)
    device.fault(dev.SYNC, dev.FAIL, first=n, result=-errno.EIO)
    assert engine.sync([fd] * 20) == [-errno.EIO if i == n else 0 for i in range(1, 21)]


def test_a_read_that_sticks(device: Device, engine: Engine, tmp_path: Path) -> None:
    """A result inside an alignment unit: the file's end, or a device that fails behind it."""
    back = aligned_array(2 * PAGE)
    with open_plain(tmp_path / "file") as fd:
        os.pwrite(fd, bytes(2 * PAGE), 0)
        device.fault(dev.READ, dev.SHORT, count=dev.ALWAYS, amount=100)
        assert engine.read(fd, back) == -errno.EIO
        device.reset()
        os.ftruncate(fd, 100)
        assert engine.read(fd, back) == -errno.ENODATA
    device.fault(dev.READ, dev.SHORT, count=dev.ALWAYS, amount=100)
    zero = os.open("/dev/zero", os.O_RDONLY)
    assert engine.read(zero, back) == -errno.ENODATA
    os.close(zero)
