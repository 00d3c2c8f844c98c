"""System calls that fail now and then, by strace: old kernels, kernels short of memory, signals.

The child does everything that an engine does, and says how it went. Whatever fails on the way, the
bytes are right, nothing hangs, and what could not be had is said or done without.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from functools import cache
from pathlib import Path
from typing import IO

import pytest
from io_support import BACKENDS

IMPORTS = """
import os, sys
import numpy as np
from io_support import noise, write_rows
from simulation.engine import Engine, open_plain
from flashkv.native import aligned_array, ffi, lib, pointer
"""

ENGINE = """
MIB = 1 << 20
backend = {"io_uring": lib.FKV_BACKEND_IO_URING, "threads": lib.FKV_BACKEND_THREADS}[sys.argv[2]]
data, back = noise(5 * MIB), aligned_array(5 * MIB)
with open_plain(sys.argv[1]) as fd:
    try:
        engine = Engine(None, backend=backend, io_threads=2, retries=100)
    except RuntimeError as error:
        print(error)
        sys.exit()
    with engine:
        base = pointer(back, "uint8_t *")
        registered = lib.fkv_engine_register(engine.engine, base, back.nbytes)
        for round in range(3):
            rows = write_rows(fd, data, [(i * MIB, MIB) for i in range(5)])
            assert engine.submit(rows) == 0
            assert [result for _, result in engine.reap()] == [0] * 5
            assert engine.sync([fd] * 20) == [0] * 20
            back[:] = 0
            assert engine.read(fd, back) == 0
            assert np.array_equal(data, back)
        if registered == 0:
            assert lib.fkv_engine_unregister(engine.engine, base) == 0
        assert lib.fkv_engine_unregister(engine.engine, base) < 0
        assert engine.counters()["inflight"] == 0
print("right, registered" if registered == 0 else f"right, {registered}")
"""

FILES = """
with open_plain(sys.argv[1]) as fd:
    os.truncate(fd, int(sys.argv[2]))
    memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    print(lib.fkv_direct_alignment(fd, memory, offset), lib.fkv_preallocate(fd, 100_000),
          os.fstat(fd).st_size)
"""


# strace comes and goes between these: an interpreter's start, or the writing of coverage data at
# its end, would not survive what it does.
FRAME = """
print("started", flush=True)
sys.stdin.readline()
try:
{script}
finally:
    print("ended", flush=True)
    sys.stdin.readline()
"""
ATTACH_S = 20


@cache
def can_inject() -> bool:
    """Whether strace is here and may trace."""
    strace = shutil.which("strace")
    if strace is None:
        return False
    command = [strace, "-o", "/dev/null", "-e", "inject=getpid:error=EPERM", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def traced(process: int) -> bool:
    """Whether something traces the process."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return "TracerPid:\t0\n" not in status


def attach(process: int, inject: list[str]) -> subprocess.Popen[bytes]:
    """strace, tracing the process: from here on these calls fail."""
    names = ",".join(rule.split(":")[0] for rule in inject)
    command = [str(shutil.which("strace")), "-f", "-qq", "-o", "/dev/null", "-p", str(process)]
    command += ["-e", f"trace={names}"]
    command += [word for rule in inject for word in ("-e", f"inject={rule}")]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    end = time.monotonic() + ATTACH_S
    while not traced(process):
        assert tracer.poll() is None, "strace can't attach"
        assert time.monotonic() < end
        time.sleep(0.005)
    return tracer


def under(script: str, *arguments: object, inject: list[str]) -> str:
    """Output of a new interpreter that runs the script with these calls failing."""
    if not can_inject():
        pytest.skip("strace can't inject failures here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    framed = FRAME.format(script=textwrap.indent(textwrap.dedent(script), "    "))
    child = subprocess.Popen(
        [sys.executable, "-c", IMPORTS + framed, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    watchdog = threading.Timer(120, child.kill)
    watchdog.start()
    try:
        assert child.stdout.readline() == "started\n"
        tracer = attach(child.pid, inject)
        child.stdin.write("go\n")
        child.stdin.flush()
        said = lines_until_end(child.stdout)
        tracer.terminate()
        tracer.wait()
        rest = child.communicate("go\n")[0]
    finally:
        watchdog.cancel()
        child.kill()
        child.wait()
    assert child.returncode == 0, said + rest
    return said.strip()


def lines_until_end(stream: IO[str]) -> str:
    """What the script said."""
    said = ""
    for line in stream:
        if line == "ended\n":
            break
        said += line
    return said


uring = pytest.mark.skipif("io_uring" not in BACKENDS, reason="io_uring isn't available here")


@uring
@pytest.mark.parametrize("refused", [1, 2, 3])
def test_kernels_that_know_fewer_kinds_of_rings(disk_path: Path, refused: int) -> None:
    rule = f"io_uring_setup:error=EINVAL:when=1..{refused}"
    assert under(ENGINE, disk_path / "f", "io_uring", inject=[rule]).startswith("right, reg")


@uring
@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("io_uring_setup:error=EINVAL", "io_uring: Invalid argument"),
        ("io_uring_setup:error=ENOMEM", "io_uring: Cannot allocate memory"),
        ("io_uring_setup:error=EPERM", "io_uring: Operation not permitted"),
        ("eventfd2:error=EMFILE", "io_uring: Too many open files"),
    ],
)
def test_a_ring_that_cant_be_had(disk_path: Path, rule: str, says: str) -> None:
    assert under(ENGINE, disk_path / "f", "io_uring", inject=[rule]) == says


@uring
def test_a_kernel_that_cant_tell_what_it_knows(disk_path: Path) -> None:
    rule = "io_uring_register:error=EINVAL:when=1"
    assert "not in this kernel" in under(ENGINE, disk_path / "f", "io_uring", inject=[rule])


@uring
def test_a_buffer_that_the_kernel_takes_in_part(disk_path: Path) -> None:
    rule = "io_uring_register:retval=0:when=5"
    said = under(ENGINE, disk_path / "f", "io_uring", inject=[rule])
    assert said == f"right, {-errno.ENOMEM}"


@uring
def test_a_kernel_without_the_operations(disk_path: Path) -> None:
    """The probe answers, and names none."""
    rule = "io_uring_register:retval=0:when=1"
    assert "not in this kernel" in under(ENGINE, disk_path / "f", "io_uring", inject=[rule])


@uring
@pytest.mark.parametrize("when", ["2", "2+", "3", "4", "4+", "5", "5+", "6+"])
def test_registering_fails(disk_path: Path, when: str) -> None:
    """No table of buffers, no registered ring, no memory for a buffer: then unregistered."""
    error = "ENOMEM" if when.endswith("+") else "EINVAL"
    rule = f"io_uring_register:error={error}:when={when}"
    said = under(ENGINE, disk_path / "f", "io_uring", inject=[rule])
    assert said in ("right, registered", f"right, {-getattr(errno, error)}"), said


@uring
@pytest.mark.parametrize("when", ["4", "5", "6", "9", "5+"])
def test_registering_fails_where_there_is_no_table(disk_path: Path, when: str) -> None:
    """Before 5.19 the list of buffers is given anew each time."""
    rules = [f"io_uring_register:error=EINVAL:when={w}" for w in ("2", when)]
    said = under(ENGINE, disk_path / "f", "io_uring", inject=rules)
    assert said in ("right, registered", f"right, {-errno.EINVAL}"), said


@uring
@pytest.mark.parametrize("error", ["EAGAIN", "ENOMEM", "EINTR", "EBUSY"])
def test_a_kernel_short_of_something_is_entered_again(disk_path: Path, error: str) -> None:
    rule = f"io_uring_enter:error={error}:when=1+2"
    assert under(ENGINE, disk_path / "f", "io_uring", inject=[rule]) == "right, registered"


@pytest.mark.parametrize("backend", BACKENDS)
def test_signals_interrupt_everything(disk_path: Path, backend: str) -> None:
    calls = ["write", "io_uring_enter", "pread64", "pwrite64", "preadv", "pwritev"]
    inject = [f"{call}:error=EINTR:when=1+3" for call in calls]
    assert under(ENGINE, disk_path / "f", backend, inject=inject).startswith("right")


def test_threads_meet_errors_that_pass(disk_path: Path) -> None:
    calls = ("preadv", "pwritev", "pread64", "pwrite64")
    inject = [f"{call}:error=EAGAIN:when=2+3" for call in calls]
    assert under(ENGINE, disk_path / "f", "threads", inject=inject).startswith("right")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("ENOSYS", -errno.EOPNOTSUPP),
        ("EINVAL", -errno.EOPNOTSUPP),
        ("EACCES", -errno.EACCES),
    ],
)
def test_kernels_that_dont_tell_alignment(disk_path: Path, error: str, status: int) -> None:
    said = under(FILES, disk_path / "f", 0, inject=[f"statx:error={error}"])
    assert said.split() == [str(status), "0", "100000"]


NO_FALLOCATE = "fallocate:error=EOPNOTSUPP"


@pytest.mark.parametrize(
    ("rules", "before", "status", "size"),
    [
        (["fallocate:error=EINTR:when=1..10"], 0, 0, 100_000),
        (["fallocate:error=EINTR"], 0, -errno.EINTR, 0),
        (["fallocate:error=ENOSPC"], 0, -errno.ENOSPC, 0),
        ([NO_FALLOCATE], 0, 1, 100_000),
        ([NO_FALLOCATE], 200_000, 1, 200_000),
        (["fallocate:error=ENOSYS"], 0, 1, 100_000),
        ([NO_FALLOCATE, "ftruncate:error=EFBIG:when=2"], 0, -errno.EFBIG, 0),
        ([NO_FALLOCATE, "newfstatat:error=EIO:when=1", "fstat:error=EIO:when=1"], 0, -errno.EIO, 0),
    ],
)
def test_reserving_space(
    disk_path: Path, rules: list[str], before: int, status: int, size: int
) -> None:
    said = under(FILES, disk_path / "f", before, inject=rules)
    assert said.split()[1:] == [str(status), str(size)]
