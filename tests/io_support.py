"""Shared by the tests of the I/O layer: folders on a disk, children under limits, leak counts.

Direct I/O means something only on a disk's file system; /tmp may be memory, so test files lie in
the project's build folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flashkv.blockio import WRITE_DTYPE, BlockIO, backend_available
from flashkv.native import address, aligned_array

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = [name for name in ("io_uring", "threads") if backend_available(name)]

# Makes system call 425 (io_uring_setup) fail with EPERM, as container profiles do; or, given an
# opcode, io_uring_register (427) of that opcode with EINVAL, as older kernels do.
SECCOMP = """
import ctypes, struct
def deny(register_opcode=None):
    if register_opcode is None:
        rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | 1)]
    else:
        rows = [(0x20, 0, 0, 0), (0x15, 0, 3, 427), (0x20, 0, 0, 24),
                (0x15, 0, 1, register_opcode), (0x06, 0, 0, 0x00050000 | 22)]
    rows.append((0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0, ctypes.get_errno()
"""


@contextmanager
def disk_folder() -> Iterator[Path]:
    """A temporary folder on the project's own disk."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix="test-io-") as folder:
        yield Path(folder)


@contextmanager
def open_file(io: BlockIO, path: Path) -> Iterator[int]:
    fd = io.open_file(path, create=True, writable=True)
    try:
        yield fd
    finally:
        os.close(fd)


def noise(length_bytes: int, seed: int = 1) -> np.ndarray:
    """Page-aligned bytes that no two places share."""
    array = aligned_array(length_bytes)
    array[:] = np.random.default_rng(seed).integers(0, 256, length_bytes, dtype=np.uint8)
    return array


def write_rows(fd: int, array: np.ndarray, bounds: list[tuple[int, int]]) -> np.ndarray:
    """Rows of WRITE_DTYPE, tags 0, 1 ...: array[start:start+length] to that place in the file."""
    rows = np.zeros(len(bounds), dtype=WRITE_DTYPE)
    for tag, (start, length) in enumerate(bounds):
        rows[tag] = (tag, start, length, address(array) + start, fd, 0)
    return rows


def reap_all(io: BlockIO, timeout_s: float = 30.0) -> dict[int, int]:
    """Result of every write in flight, by tag."""
    results: dict[int, int] = {}
    end = time.monotonic() + timeout_s
    while io.writes_inflight():
        assert time.monotonic() < end, "writes did not finish"
        for row in io.write_reap(16, 1000):
            assert int(row["tag"]) not in results, "reaped twice"
            results[int(row["tag"])] = int(row["result"])
    return results


def process_counts() -> tuple[int, int]:
    """(open descriptors, threads) of this process."""
    fds, tasks = (sum(1 for _ in Path("/proc/self", name).iterdir()) for name in ("fd", "task"))
    return fds, tasks


def settled_counts(wanted: tuple[int, int], timeout_s: float = 5.0) -> tuple[int, int]:
    """process_counts() once no more than wanted: the kernel ends its threads a bit later."""
    end = time.monotonic() + timeout_s
    while True:
        counts = process_counts()
        if (counts[0] <= wanted[0] and counts[1] <= wanted[1]) or time.monotonic() > end:
            return counts
        time.sleep(0.01)


def run_child(script: str, *arguments: object, timeout_s: float = 60.0) -> str:
    """Output of a new interpreter that runs the script; it must end with 0."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
