"""Failures come back as the operation's own errno, and are the same on every backend."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from io_support import (
    BACKENDS,
    SECCOMP,
    disk_folder,
    noise,
    open_file,
    reap_all,
    run_child,
    write_rows,
)

from flashkv.blockio import BlockIO
from flashkv.native import aligned_array

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    with disk_folder() as path:
        yield path


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def io(folder: Path, backend: str) -> Iterator[BlockIO]:
    with BlockIO(folder, backend=backend, queue_depth=8, workers=1) as io:
        yield io


def test_closed_descriptor(io: BlockIO) -> None:
    page = aligned_array(4096)
    bad = 1_000_000
    assert io.read(bad, page, 0) == -errno.EBADF
    assert io.write(bad, page, 0) == -errno.EBADF
    assert io.sync([bad, bad]).tolist() == [-errno.EBADF] * 2
    io.write_submit(write_rows(bad, page, [(0, 4096)]))
    assert reap_all(io) == {0: -errno.EBADF}


def test_one_failure_among_many_stays_one(io: BlockIO, folder: Path) -> None:
    data = noise(32 * 4096)
    with open_file(io, folder / "f") as fd:
        rows = write_rows(fd, data, [(i * 4096, 4096) for i in range(32)])
        rows["fd"][13] = 1_000_000
        io.write_submit(rows, keep=data)
        results = reap_all(io)
        assert results.pop(13) == -errno.EBADF
        assert set(results.values()) == {0}
        for _ in range(100):
            assert io.write(fd, data[:4096], 0) == 0


def test_wrong_access_mode(io: BlockIO, folder: Path) -> None:
    (folder / "f").write_bytes(noise(4096).tobytes())
    page = aligned_array(4096)
    reader = os.open(folder / "f", os.O_RDONLY)
    writer = os.open(folder / "f", os.O_WRONLY)
    try:
        assert io.write(reader, page, 0) == -errno.EBADF
        assert io.read(writer, page, 0) == -errno.EBADF
    finally:
        os.close(reader)
        os.close(writer)


def test_folder_instead_of_a_file(io: BlockIO, folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        assert io.read(fd, aligned_array(4096), 0) == -errno.EISDIR
    finally:
        os.close(fd)


def test_full_device(io: BlockIO) -> None:
    fd = os.open("/dev/full", os.O_RDWR)
    data = noise(4 * MIB)
    try:
        assert io.write(fd, data[:4096], 0) == -errno.ENOSPC
        io.write_submit(write_rows(fd, data, [(0, 4 * MIB), (0, 4096)]), keep=data)
        assert reap_all(io) == {0: -errno.ENOSPC, 1: -errno.ENOSPC}
    finally:
        os.close(fd)
    assert io.counters()["retries"] == 0


def test_unaligned_direct_io_is_refused_not_hidden(io: BlockIO, folder: Path) -> None:
    if not io.direct_io:
        pytest.skip("no direct I/O on this file system")
    data = noise(3 * 4096)
    with open_file(io, folder / "f") as fd:
        assert io.write(fd, data[:4096], 0) == 0
        assert io.write(fd, data[:100], 0) == -errno.EINVAL
        assert io.read(fd, data[:4096], 7) == -errno.EINVAL


LIMITED = """
import json, resource, sys
from pathlib import Path
from io_support import noise, open_file
from flashkv.blockio import BlockIO
folder, backend, direct = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
limit = int(sys.argv[4])
data = noise(3 << 20)
with BlockIO(folder, backend=backend, direct_io=direct) as io, open_file(io, folder / "f") as fd:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    status = io.write(fd, data, 0)
    counters = io.counters()
written = (folder / "f").read_bytes()
whole = written == data[:len(written)].tobytes()
print(json.dumps([status, len(written), whole, counters["short_results"], counters["retries"]]))
"""


@pytest.mark.parametrize("direct", [True, False])
def test_short_write_is_resumed_then_fails(folder: Path, backend: str, direct: bool) -> None:
    """The limit lies in the middle of the second operation: it moves a part, then EFBIG."""
    limit = MIB + 5 * 4096
    output = run_child(LIMITED, folder, backend, direct, limit)
    status, length, whole, short_results, retries = json.loads(output)
    assert status == -errno.EFBIG
    assert length == limit
    assert whole
    assert short_results == 1
    assert retries == 1


def trace(folder: Path, backend: str) -> tuple[list[int], bytes, dict[str, int]]:
    """The same few hundred operations, some of them wrong; the results, the file, the counters."""
    random = np.random.default_rng(42)
    data, back, results = noise(2 * MIB), aligned_array(2 * MIB), []
    (folder / "short").write_bytes(b"x" * 6000)
    with (
        BlockIO(folder, backend=backend, queue_depth=4) as io,
        open_file(io, folder / f"f-{backend}") as fd,
        open_file(io, folder / "short") as short,
    ):
        for _ in range(200):
            kind, file = (
                int(random.integers(0, 4)),
                [fd, fd, fd, short, 999_999][random.integers(5)],
            )
            first, count = int(random.integers(0, 256)), int(random.integers(1, 257))
            skew = int(random.integers(0, 8) == 0)
            part = slice(first * 4096 + skew, first * 4096 + skew + count * 4096)
            place = int(random.integers(0, 512)) * 4096
            if kind == 0:
                results.append(io.read(file, back[part], place))
                results.append(int(back[part].sum(dtype=np.int64)) if results[-1] == 0 else 0)
            elif kind == 1 and file != short:
                results.append(io.write(file, data[part], place))
            elif kind == 2:
                results += io.sync([file, fd]).tolist()
            elif file != short:
                starts = [i * 8192 for i in range(int(random.integers(1, 40)))]
                io.write_submit(write_rows(file, data, [(s, 8192) for s in starts]), keep=data)
                results += [result for _, result in sorted(reap_all(io).items())]
        counters = io.counters()
    return results, (folder / f"f-{backend}").read_bytes(), counters


@pytest.mark.skipif(len(BACKENDS) < 2, reason="only one backend here")
def test_backends_agree(folder: Path) -> None:
    first, second = (trace(folder, name) for name in BACKENDS)
    assert first[0] == second[0]
    assert first[1] == second[1]
    names = ("reads", "writes", "syncs", "read_bytes", "written_bytes", "errors", "short_results")
    assert [first[2][n] for n in names] == [second[2][n] for n in names]
    assert {-errno.EBADF, -errno.ENODATA, 0} <= set(first[0])


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_io_uring_refused_by_seccomp(folder: Path) -> None:
    script = (
        SECCOMP
        + """
import sys
from flashkv.blockio import BlockIO, backend_available
from flashkv.errors import BackendError
deny()
assert not backend_available("io_uring") and backend_available("threads")
with BlockIO(sys.argv[1]) as io:
    print(io.backend_name)
try:
    BlockIO(sys.argv[1], backend="io_uring")
except BackendError as error:
    print(error)
"""
    )
    name, message = run_child(script, folder).splitlines()
    assert name == "threads"
    assert "Operation not permitted" in message
    assert "backend='auto'" in message


REGISTER = """
import sys, errno
import numpy as np
from pathlib import Path
from io_support import noise, open_file
from flashkv.blockio import BlockIO
from flashkv.native import aligned_array
opcode = int(sys.argv[2])
if opcode:
    deny(opcode)
folder = Path(sys.argv[1])
data = noise(1 << 20)
with BlockIO(folder, backend="io_uring") as io, open_file(io, folder / "f") as fd:
    assert io.write(fd, data, 0) == 0
    start = io.counters()["registered_bytes"]
    pools = [aligned_array(1 << 20) for _ in range(8)]
    for pool in pools:
        assert io.register_memory(pool) == 0
        assert io.register_memory(pool) == -errno.EEXIST
    assert io.counters()["registered_bytes"] == start + (8 << 20)
    for pool in pools:
        assert io.read(fd, pool, 0) == 0 and np.array_equal(pool, data)
        assert io.write(fd, pool[4096:], 4096) == 0
    assert io.unregister_memory(pools[3]) == 0
    assert io.unregister_memory(pools[3]) == -errno.ENOENT
    for pool in pools:
        pool[:] = 0
        assert io.read(fd, pool[8192:12288], 8192) == 0
        assert np.array_equal(pool[8192:12288], data[8192:12288])
    more = [aligned_array(4096) for _ in range(100)]
    statuses = {io.register_memory(page) for page in more}
    assert statuses == {0, -errno.ENOSPC}, statuses
    for page in more:
        assert io.read(fd, page, 0) == 0 and np.array_equal(page, data[:4096])
        io.unregister_memory(page)
    assert io.counters()["registered_bytes"] == start + (7 << 20)
print("fine", start > 0)
"""


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
@pytest.mark.parametrize("denied_opcode", [0, 15], ids=["table", "before-5.19"])
def test_registered_memory(folder: Path, denied_opcode: int) -> None:
    assert run_child(SECCOMP + REGISTER, folder, denied_opcode).startswith("fine")


@pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")
def test_memory_that_the_kernel_refuses_to_register(folder: Path) -> None:
    """IORING_REGISTER_BUFFERS (0) and its successor (15) denied: all works, unregistered."""
    script = (
        SECCOMP
        + """
import sys
import numpy as np
from pathlib import Path
from io_support import noise, open_file
from flashkv.blockio import BlockIO
from flashkv.native import aligned_array
deny(15)
deny(0)
folder, data, back = Path(sys.argv[1]), noise(1 << 20), aligned_array(1 << 20)
with BlockIO(folder, backend="io_uring") as io, open_file(io, folder / "f") as fd:
    assert io.register_memory(back) < 0
    assert io.counters()["registered_bytes"] == 0
    assert io.write(fd, data, 0) == 0 and io.read(fd, back, 0) == 0
assert np.array_equal(data, back)
"""
    )
    run_child(script, folder)
