"""Memory and threads run out, at every allocation of the data plane once: no leak, no hang."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from io_support import BACKENDS, noise, process_counts, settled_counts, write_rows
from simulation.device import (
    Device,
    allocation_calls,
    fail_allocations,
    live_allocations,
)
from simulation.engine import Engine

from flashkv.native import aligned_array, ffi, lib

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
NATIVE = {
    "io_uring": lib.FKV_BACKEND_IO_URING,
    "threads": lib.FKV_BACKEND_THREADS,
    "sim": lib.FKV_BACKEND_SIM,
    "auto": lib.FKV_BACKEND_AUTO,
}


@pytest.fixture(autouse=True)
def no_failure_stays() -> Iterator[None]:
    gc.collect()  # arrays of earlier tests must not go while this one counts
    yield
    fail_allocations()


def use_engine(device: Device, backend: str, fd: int, data: np.ndarray, back: np.ndarray) -> str:
    """Opens an engine, writes, reads; what failed, "" where nothing did."""
    try:
        engine = Engine(device, backend=NATIVE[backend], workers=2, io_threads=2)
    except RuntimeError as error:
        return str(error)
    with engine:
        rows = write_rows(fd, data, [(0, MIB), (MIB, MIB), (2 * MIB, data.nbytes - 2 * MIB)])
        status = engine.submit(rows)
        assert status in (0, -errno.ENOMEM)
        results = engine.reap()
        assert [result for _, result in results] == ([0, 0, 0] if status == 0 else [])
        probe = lib.fkv_engine_probe(engine.engine, fd, False)
        assert probe in (0, -errno.ENOMEM)
        assert engine.sync([fd]) == [0]  # these take none
        assert engine.read(fd, back) == 0
        assert engine.counters()["inflight"] == 0
        return "" if status == probe == 0 else "no memory"


@pytest.mark.parametrize("backend", [*BACKENDS, "sim", "auto"])
@pytest.mark.parametrize("count", [1, 1 << 62], ids=["once", "from there on"])
def test_an_engine(tmp_path: Path, backend: str, count: int) -> None:
    data, back = noise(3 * MIB - 5000), aligned_array(3 * MIB - 5000)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, data, 0)
    before, processes = live_allocations(), process_counts()
    refusals = set()
    with Device() as device:
        for first in range(1, 1000):
            fail_allocations(first, count)
            refusals.add(use_engine(device, backend, fd, data, back))
            reached = allocation_calls() >= first
            fail_allocations()
            assert live_allocations() == before, f"allocation {first} leaks"
            assert use_engine(device, backend, fd, data, back) == ""
            assert np.array_equal(data, back)
            if not reached:
                break
        assert first > 10
    os.close(fd)
    assert "" in refusals
    assert "no memory" in refusals
    assert all(not text or "memory" in text or "unavailable" in text for text in refusals), refusals
    assert settled_counts((processes[0] - 1, processes[1])) == (processes[0] - 1, processes[1])


def test_counts() -> None:
    before = live_allocations()
    fail_allocations(2, 2)
    given = [lib.fkv_buffer_alloc(5000) for _ in range(4)]
    assert [base == ffi.NULL for base in given] == [False, True, True, False]
    assert allocation_calls() == 4
    assert live_allocations() == before + 2
    for base in given:
        lib.fkv_buffer_free(base, 5000)
    assert live_allocations() == before
    fail_allocations()
    assert allocation_calls() == 0
    array = aligned_array(3 * MIB)
    assert live_allocations() == before + 1
    del array
    gc.collect()
    assert live_allocations() == before


def test_a_build_without_it(tmp_path: Path) -> None:
    """What a wheel is built from: no warning, and nothing of the simulation in it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    symbols = ""
    for source in sorted((ROOT / "engine_native").glob("*.c")):
        if not source.name.startswith(("sim_", "io_", "allocate", "engine.", "pool.")):
            continue
        output = tmp_path / f"{source.stem}.o"
        flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-c"]
        subprocess.run([compiler, *flags, str(source), "-o", str(output)], check=True)
        symbols += subprocess.run(
            ["nm", str(output)], check=True, capture_output=True, text=True
        ).stdout
    assert "fkv_io_sim_open" in symbols
    assert "fkv_sim" not in symbols
    assert "fkv_alloc" not in symbols
    assert "fkv_malloc" not in symbols.replace("t fkv_malloc", "")  # an inline one of each file
