"""BlockIO: what it chooses and tells, what it refuses, what it leaves behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from io_support import BACKENDS, disk_folder, noise, open_file, reap_all, write_rows

from flashkv import blockio
from flashkv.blockio import WRITE_DTYPE, BlockIO
from flashkv.errors import BackendError, ClosedError
from flashkv.filesystem import DISK
from flashkv.native import aligned_array, ffi, lib

MIB = 1 << 20


class Native:
    """The native library with some calls replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)


@pytest.fixture
def folder() -> Iterator[Path]:
    with disk_folder() as path:
        yield path


@pytest.fixture
def io(folder: Path) -> Iterator[BlockIO]:
    with BlockIO(folder) as io:
        yield io


def refuse_io_uring(options: Any, error: Any, error_bytes: int) -> Any:
    if options.backend == lib.FKV_BACKEND_IO_URING:
        ffi.memmove(error, b"io_uring: refused\0", 18)
        return ffi.NULL
    return lib.fkv_engine_open(options, error, error_bytes)


def test_falls_to_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockio, "lib", Native(fkv_engine_open=refuse_io_uring))
    with BlockIO(folder) as io:
        assert io.backend_name == "threads"
    with pytest.raises(BackendError, match="io_uring: refused") as caught:
        BlockIO(folder, backend="io_uring")
    assert isinstance(caught.value, OSError)


def test_a_backend_that_fails_its_trial_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(engine: Any, fd: int, writable: bool) -> int:
        name = ffi.string(lib.fkv_engine_backend(engine))
        return -errno.EIO if name == b"io_uring" else lib.fkv_engine_probe(engine, fd, writable)

    monkeypatch.setattr(blockio, "lib", Native(fkv_engine_probe=probe))
    with BlockIO(folder) as io:
        assert io.backend_name == "threads"
    monkeypatch.setattr(blockio, "lib", Native(fkv_engine_probe=lambda *_: -errno.EIO))
    with pytest.raises(BackendError, match=r"threads: Input/output error \(errno 5\)"):
        BlockIO(folder)


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_opens(folder: Path, monkeypatch: pytest.MonkeyPatch, full: int) -> None:
    monkeypatch.setattr(blockio, "lib", Native(fkv_engine_probe=lambda *_: -full))
    with BlockIO(folder) as io:
        assert io.backend_name == BACKENDS[0]


def test_direct_io_refused_by_the_trial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(engine: Any, fd: int, writable: bool) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return -errno.EINVAL
        return int(lib.fkv_engine_probe(engine, fd, writable))

    monkeypatch.setattr(blockio, "lib", Native(fkv_engine_probe=probe))
    with BlockIO(folder) as io, open_file(io, folder / "f") as fd:
        assert not io.direct_io
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        assert io.write(fd, np.ones(4097, np.uint8)[1:], 3) == 0


def test_direct_io_that_the_kernel_says_it_has_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockio, "lib", Native(fkv_direct_alignment=lambda *_: 0))
    with BlockIO(folder) as io:
        assert not io.direct_io


def test_alignment_is_tried_where_the_kernel_does_not_tell(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlockIO(folder) as io:
        told = (io.direct_io, io.memory_alignment, io.offset_alignment)
    untold = Native(fkv_direct_alignment=lambda *_: -errno.EOPNOTSUPP)
    monkeypatch.setattr(blockio, "lib", untold)
    with BlockIO(folder) as io:
        assert io.direct_io == told[0]
        if io.direct_io:
            assert io.memory_alignment in (512, 4096)
            assert io.memory_alignment >= max(told[1], 512)
            assert io.offset_alignment >= told[2]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_memory_file_system() -> None:
    """Tmpfs refuses direct I/O or not, by the kernel's age; both must work."""
    name = Path("/dev/shm", f"flashkv-test-{os.getpid()}")
    data, back = noise(MIB), aligned_array(MIB)
    try:
        with BlockIO("/dev/shm") as io, open_file(io, name) as fd:
            assert DISK.preallocate(fd, MIB) in (True, False)
            assert io.write(fd, data, 0) == 0
            assert io.sync([fd]).tolist() == [0]
            assert io.read(fd, back, 0) == 0
    finally:
        name.unlink(missing_ok=True)
    assert np.array_equal(data, back)


def test_the_trial_leaves_nothing(folder: Path, io: BlockIO) -> None:
    assert list(folder.iterdir()) == []
    assert io.counters()["inflight"] == 0


def test_reading_trial_writes_nothing(folder: Path) -> None:
    file = folder / "superblock"
    file.write_bytes(noise(4096).tobytes())
    before = file.stat()
    with BlockIO(folder / "nowhere", probe_file=file) as io:
        assert io.counters()["writes"] == 0
        assert io.counters()["reads"] == 1
    after = file.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


def test_places_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BlockIO(folder / "nowhere")
    (folder / "file").write_bytes(b"x")
    with pytest.raises(NotADirectoryError):
        BlockIO(folder / "file")
    (folder / "link").symlink_to(folder / "file")
    with pytest.raises(OSError, match="symbolic links") as caught:
        BlockIO(folder, probe_file=folder / "link")
    assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "aio"},
        {"queue_depth": 0},
        {"queue_depth": 5000},
        {"workers": 1000},
        {"io_threads": 1000},
    ],
)
def test_impossible_settings(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="must be"):
        BlockIO(folder, **wrong)


def test_open_file_flags(folder: Path, io: BlockIO) -> None:
    with pytest.raises(FileNotFoundError):
        io.open_file(folder / "f", writable=True)
    with open_file(io, folder / "f") as fd:
        assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) == io.direct_io
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert io.write(fd, noise(4096), 0) == 0
    reader = io.open_file(folder / "f")
    try:
        assert io.write(reader, noise(4096), 0) == -errno.EBADF
        assert io.read(reader, aligned_array(4096), 0) == 0
    finally:
        os.close(reader)
    (folder / "link").symlink_to(folder / "f")
    with pytest.raises(OSError, match="symbolic links") as caught:
        io.open_file(folder / "link")
    assert caught.value.errno == errno.ELOOP


def test_preallocation(folder: Path, io: BlockIO) -> None:
    with open_file(io, folder / "f") as fd:
        reserved = DISK.preallocate(fd, 3 * MIB + 4096)
        status = os.fstat(fd)
        assert status.st_size == 3 * MIB + 4096
        if reserved:
            assert 3 * MIB + 4096 <= status.st_blocks * 512 <= 3 * MIB + 64 * 1024
        assert DISK.preallocate(fd, 4096) in (True, False)
        assert os.fstat(fd).st_size == 3 * MIB + 4096, "never shortens"
        with pytest.raises(OSError, match="bytes for a segment") as caught:
            DISK.preallocate(fd, 1 << 62)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    with pytest.raises(OSError, match="Bad file descriptor"):
        DISK.preallocate(1_000_000, 4096)


def test_arguments_that_cannot_be_right(folder: Path, io: BlockIO) -> None:
    page = aligned_array(4096)
    page.setflags(write=False)
    with open_file(io, folder / "f") as fd:
        with pytest.raises(ValueError, match="read-only"):
            io.read(fd, page, 0)
        with pytest.raises(ValueError, match="contiguous"):
            io.write(fd, aligned_array(8192)[::2], 0)
        with pytest.raises(ValueError, match="WRITE_DTYPE"):
            io.write_submit(np.zeros(3, np.uint8))
        with pytest.raises(ValueError, match="contiguous"):
            io.write_submit(np.zeros(4, WRITE_DTYPE)[::2])
    assert io.writes_inflight() == 0


def test_memory_of_a_write_lives_until_it_is_reaped(folder: Path, io: BlockIO) -> None:
    class Owner:
        def __init__(self) -> None:
            self.array = noise(4 * MIB)

    owner = Owner()
    wanted, alive = owner.array.tobytes(), weakref.ref(owner)
    with open_file(io, folder / "f") as fd:
        io.write_submit(write_rows(fd, owner.array, [(0, 2 * MIB), (2 * MIB, 2 * MIB)]), owner)
        del owner
        gc.collect()
        assert alive() is not None
        assert reap_all(io) == {0: 0, 1: 0}
    gc.collect()
    assert alive() is None
    assert (folder / "f").read_bytes() == wanted


def test_registered_memory_lives_until_it_is_given_back(io: BlockIO) -> None:
    array = aligned_array(MIB)
    status = io.register_memory(array)
    assert status in (0, -errno.EOPNOTSUPP, -errno.ENOMEM)
    if status == 0:
        assert io.register_memory(array) == -errno.EEXIST
        assert io.unregister_memory(array) == 0
    assert io.unregister_memory(array) == -errno.ENOENT


def test_closed_and_closed_again(folder: Path) -> None:
    io = BlockIO(folder)
    io.close()
    io.close()
    assert io.closed
    for call in (io.counters, io.write_reap, io.writes_inflight, lambda: io.sync([1])):
        with pytest.raises(ClosedError):
            call()


def test_forked_child_is_harmless(folder: Path) -> None:
    with BlockIO(folder) as io, open_file(io, folder / "f") as fd:
        assert io.write(fd, noise(4096), 0) == 0
        child = os.fork()
        if child == 0:
            try:
                io.read(fd, aligned_array(4096), 0)
            except ClosedError:
                io.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert io.read(fd, aligned_array(4096), 0) == 0


def test_counters_count(folder: Path, io: BlockIO) -> None:
    before = io.counters()
    with open_file(io, folder / "f") as fd:
        assert io.write(fd, noise(3 * MIB), 0) == 0
        assert io.read(fd, aligned_array(2 * MIB), 0) == 0
        assert io.sync([fd]).tolist() == [0]
    grown = {name: value - before[name] for name, value in io.counters().items()}
    assert (grown["writes"], grown["written_bytes"]) == (3, 3 * MIB)
    assert (grown["reads"], grown["read_bytes"]) == (2, 2 * MIB)
    assert (grown["syncs"], grown["errors"], grown["buffers_in_use"]) == (1, 0, 0)
