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
import time
from functools import cache
from pathlib import Path

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
    memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    print(lib.fkv_direct_alignment(fd, memory, offset), lib.fkv_preallocate(fd, 100_000),
          os.fstat(fd).st_size)
"""


START = """
import sys
print("started", flush=True)
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


def under(script: str, *arguments: object, inject: list[str]) -> str:
    """Output of a new interpreter that runs the script with these calls failing.

    strace comes once it is started: its own start would not survive them.
    """
    if not can_inject():
        pytest.skip("strace can't inject failures here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(IMPORTS + START + script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    tracer = None
    try:
        assert child.stdout.readline() == "started\n"
        names = ",".join(rule.split(":")[0] for rule in inject)
        rules = [word for rule in inject for word in ("-e", f"inject={rule}")]
        command = [str(shutil.which("strace")), "-f", "-qq", "-o", "/dev/null"]
        command += ["-e", f"trace={names}", *rules, "-p", str(child.pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        end = time.monotonic() + ATTACH_S
        while not traced(child.pid):
            assert tracer.poll() is None, "strace can't attach"
            assert time.monotonic() < end
            time.sleep(0.005)
        said = child.communicate("go\n", timeout=120)[0]
    finally:
        child.kill()
        child.wait()
        if tracer is not None:
            tracer.wait()
    assert child.returncode == 0, said
    return said.strip()


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
@pytest.mark.parametrize("when", ["4", "5", "6", "5+"])
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


@pytest.mark.parametrize("error", ["ENOSYS", "EINVAL"])
def test_kernels_that_dont_tell_alignment(disk_path: Path, error: str) -> None:
    said = under(FILES, disk_path / "f", inject=[f"statx:error={error}"])
    assert said.split() == [str(-errno.EOPNOTSUPP), "0", "100000"]


def test_alignment_of_what_fails(disk_path: Path) -> None:
    said = under(FILES, disk_path / "f", inject=["statx:error=EACCES"])
    assert said.split() == [str(-errno.EACCES), "0", "100000"]


@pytest.mark.parametrize(
    ("rules", "status", "size"),
    [
        (["fallocate:error=EINTR:when=1..10"], 0, 100_000),
        (["fallocate:error=EINTR"], -errno.EINTR, 0),
        (["fallocate:error=ENOSPC"], -errno.ENOSPC, 0),
        (["fallocate:error=EOPNOTSUPP"], 1, 100_000),
        (["fallocate:error=ENOSYS"], 1, 100_000),
        (["fallocate:error=EOPNOTSUPP", "ftruncate:error=EFBIG"], -errno.EFBIG, 0),
    ],
)
def test_reserving_space(disk_path: Path, rules: list[str], status: int, size: int) -> None:
    said = under(FILES, disk_path / "f", inject=rules)
    assert said.split()[1:] == [str(status), str(size)]
