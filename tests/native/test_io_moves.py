"""Each backend moves every byte: sizes, ends of files, more than the queue holds, threads."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from io_support import (
    BACKENDS,
    disk_folder,
    noise,
    open_file,
    reap_all,
    settled_counts,
    write_rows,
)

from flashkv.blockio import BlockIO
from flashkv.native import aligned_array

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with disk_folder() as path:
        yield path


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def io(folder: Path, backend: str) -> Iterator[BlockIO]:
    with BlockIO(folder, backend=backend, queue_depth=8, workers=1, read_buffer_bytes=0) as io:
        assert io.backend_name == backend
        yield io


@pytest.mark.parametrize("pages", [1, 2, 3, 16, 255, 256, 257, 513, 1025])
@pytest.mark.parametrize("first_page", [0, 7])
def test_round_trip(io: BlockIO, folder: Path, pages: int, first_page: int) -> None:
    data, back = noise(pages * 4096, seed=pages), aligned_array(pages * 4096)
    with open_file(io, folder / "f") as fd:
        assert io.write(fd, data, first_page * 4096) == 0
        assert io.read(fd, back, first_page * 4096) == 0
    assert np.array_equal(data, back)
    assert (folder / "f").read_bytes()[first_page * 4096 :] == data.tobytes()


def test_sector_sizes_below_a_page(io: BlockIO, folder: Path) -> None:
    if io.offset_alignment > 512 or io.memory_alignment > 512:
        pytest.skip("the file system's direct I/O needs more than 512 bytes")
    data, back = noise(8192), aligned_array(8192)
    with open_file(io, folder / "f") as fd:
        assert io.write(fd, data[512:1536], 512) == 0
        assert io.read(fd, back[1024:2048], 512) == 0
    assert np.array_equal(back[1024:2048], data[512:1536])


def test_any_size_and_address_without_direct_io(folder: Path, backend: str) -> None:
    with BlockIO(folder, backend=backend, direct_io=False) as io, open_file(io, folder / "f") as fd:
        assert not io.direct_io
        for length in (1, 28, 511, 4095, 4097, 1_000_003, 3 * MIB + 1):
            data = noise(length + 8, seed=length)[8:]
            back = np.zeros(length + 3, dtype=np.uint8)[3:]
            assert io.write(fd, data, 777) == 0
            assert io.read(fd, back, 777) == 0
            assert np.array_equal(data, back)


def test_nothing_to_move(io: BlockIO, folder: Path) -> None:
    with open_file(io, folder / "f") as fd:
        assert io.read(fd, np.zeros(0, dtype=np.uint8), 0) == 0
        assert io.write(fd, np.zeros(0, dtype=np.uint8), 0) == 0
        assert io.sync([]).tolist() == []
        assert len(io.write_reap(4, -1)) == 0
        page = aligned_array(4096)
        io.write_submit(write_rows(fd, page, [(0, 0), (0, 4096)]), keep=page)
        assert reap_all(io) == {0: 0, 1: 0}


@pytest.mark.parametrize("file_bytes", [0, 1, 4095, 4096, 10_000, 12_288])
def test_end_of_file_is_no_data(io: BlockIO, folder: Path, file_bytes: int) -> None:
    data = noise(4 * 4096)
    (folder / "f").write_bytes(data[:file_bytes].tobytes())
    with open_file(io, folder / "f") as fd:
        assert io.read(fd, aligned_array(4 * 4096), 0) == -errno.ENODATA
        assert io.read(fd, aligned_array(4096), 64 * KIB) == -errno.ENODATA
        whole = file_bytes // 4096 * 4096
        if whole:
            back = aligned_array(whole)
            assert io.read(fd, back, 0) == 0
            assert np.array_equal(back, data[:whole])
    assert io.counters()["retries"] <= 2, "the end of a file is no reason to repeat for long"


def test_more_operations_than_the_queue_holds(io: BlockIO, folder: Path) -> None:
    data = noise(4 * MIB)
    bounds = [(start, 4096) for start in range(0, len(data), 4096)]
    with open_file(io, folder / "f") as fd:
        io.write_submit(write_rows(fd, data, bounds), keep=data)
        assert reap_all(io) == dict.fromkeys(range(len(bounds)), 0)
        back = aligned_array(len(data))
        assert io.read(fd, back, 0) == 0
    assert np.array_equal(back, data)
    counters = io.counters()
    assert counters["inflight"] == 0
    assert counters["writes"] >= len(bounds)


def test_long_writes_are_cut_to_a_mebibyte(io: BlockIO, folder: Path) -> None:
    data = noise(5 * MIB + 4096)
    before = io.counters()["writes"]
    with open_file(io, folder / "f") as fd:
        io.write_submit(write_rows(fd, data, [(0, len(data))]), keep=data)
        assert reap_all(io) == {0: 0}
    assert io.counters()["writes"] - before == 6
    assert (folder / "f").read_bytes() == data.tobytes()


def test_many_threads_share_one_engine(io: BlockIO, folder: Path) -> None:
    share, failures = 64 * 4096, []

    def work(number: int, fd: int) -> None:
        data, random = noise(share, seed=number), np.random.default_rng(number)
        back = aligned_array(share)
        for _ in range(40):
            first, count = int(random.integers(0, 60)), int(random.integers(1, 5))
            part = slice(first * 4096, (first + count) * 4096)
            place = number * share + first * 4096
            if io.write(fd, data[part], place) or io.read(fd, back[part], place):
                failures.append(number)
            if not np.array_equal(data[part], back[part]):
                failures.append(number)

    with open_file(io, folder / "f") as fd:
        threads = [threading.Thread(target=work, args=(i, fd)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "an operation was never completed"
    assert failures == []


def test_no_wake_up_is_lost(io: BlockIO, folder: Path) -> None:
    """Single operations from several threads to an idle backend, each waited for."""

    def work(fd: int) -> None:
        page = aligned_array(4096)
        for _ in range(400):
            assert io.read(fd, page, 0) == 0

    with open_file(io, folder / "f") as fd:
        assert io.write(fd, noise(4096), 0) == 0
        threads = [threading.Thread(target=work, args=(fd,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a wake-up was lost"


def test_reap_waits_no_longer_than_told(io: BlockIO, folder: Path) -> None:
    start = time.monotonic()
    assert len(io.write_reap(8, 10_000)) == 0, "nothing in flight: nothing to wait for"
    assert time.monotonic() - start < 5
    with open_file(io, folder / "f") as fd:
        data = noise(4 * 4096)
        io.write_submit(write_rows(fd, data, [(i * 4096, 4096) for i in range(4)]), keep=data)
        seen = []
        while io.writes_inflight():
            finished = io.write_reap(1, 1000)
            assert len(finished) <= 1
            seen += finished["tag"].tolist()
    assert sorted(seen) == [0, 1, 2, 3]


def test_closing_waits_for_writes(folder: Path, backend: str) -> None:
    data = noise(8 * MIB)
    io = BlockIO(folder, backend=backend, queue_depth=2)
    with open_file(io, folder / "f") as fd:
        io.write_submit(write_rows(fd, data, [(i * MIB, MIB) for i in range(8)]), keep=data)
        io.close()
    assert (folder / "f").read_bytes() == data.tobytes()


def test_nothing_leaks(folder: Path, backend: str) -> None:
    def once() -> None:
        with BlockIO(folder, backend=backend, workers=2) as io, open_file(io, folder / "f") as fd:
            data = noise(MIB)
            io.write_submit(write_rows(fd, data, [(0, MIB)]), keep=data)
            assert io.read(fd, aligned_array(4096), 1 << 40) in (-errno.ENODATA, -errno.EINVAL)
            assert io.sync([fd]).tolist() == [0]

    once()
    before = settled_counts((0, 1), timeout_s=1)
    for _ in range(10):
        once()
    after = settled_counts(before)
    assert after[0] <= before[0], "descriptors leak"
    assert after[1] <= before[1], "threads leak"
