"""The data plane under sanitizers: eight threads do from C what the control plane does natively,
while segments are taken back under them. See plane.h for the contract and stress.c for the mix.

A report of TSan, ASan, UBSan or LeakSanitizer fails the test, and so does a block with bytes that
its key did not have at that time. FLASHKV_SEED repeats the choices of a run, not its schedule.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from store_support import ROOT

from flashkv.blockio import backend_available

pytestmark = pytest.mark.slow

THREADS = 8
NUMBERS = {"io_uring": 1, "threads": 2, "sim": 3}
FLAGS = [
    *("-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-UNDEBUG", "-pthread"),
    *("-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Werror=implicit-function-declaration"),
]
SANITIZERS = {
    # The real backends without FKV_TEST_BUILD: its counted allocations order threads.
    "tsan": ["-fsanitize=thread"],
    "tsan-sim": ["-fsanitize=thread", "-DFKV_TEST_BUILD"],
    "asan": [
        *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        "-DFKV_TEST_BUILD",
    ],
}
ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:detect_deadlocks=1",
    "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}
# A program that each sanitizer must complain about: one that can't is none.
FAULTY = """
#include <pthread.h>
#include <stdlib.h>
static int shared;
static char *volatile block;
static void *run(void *unused) { shared++; return unused; }
int main(void)
{
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, run, NULL);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    block = malloc(8);
    return block[8 + shared / 2 * 0];
}
"""


def command(program: Path) -> list[str]:
    """Without address randomisation: older sanitizers don't know today's wide one."""
    setarch = shutil.which("setarch")
    return [*([setarch, "-R"] if setarch else []), str(program)]


def run(program: Path, *arguments: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )


@cache
def compiler(sanitizer: str) -> str:
    """A compiler whose sanitizer works here; skips the test where there is none."""
    folder = ROOT / "build" / "stress"
    folder.mkdir(parents=True, exist_ok=True)
    why = "no gcc, no clang"
    for name in filter(shutil.which, ("gcc", "clang")):
        source, program = folder / "faulty.c", folder / f"faulty-{name}-{sanitizer}"
        source.write_text(FAULTY, encoding="utf-8")
        flags = [*FLAGS, *SANITIZERS[sanitizer]]
        built = subprocess.run(
            [name, *flags, source, "-o", program], capture_output=True, text=True, check=False
        )
        if built.returncode != 0:
            why = built.stderr.strip().splitlines()[-1]
            continue
        told = run(program, timeout_s=60).stderr
        if "Sanitizer" in told and "FATAL" not in told:
            return name
        why = told.strip()[-300:] or f"{name}'s sanitizer says nothing"
    pytest.skip(f"no compiler with this sanitizer: {why}")


def build(sanitizer: str) -> Path:
    """The driver with the data plane; compiled again when a byte of either changed."""
    name = compiler(sanitizer)
    uring = ["-DFKV_HAVE_LIBURING"] if backend_available("io_uring") else []
    flags = [*FLAGS, *SANITIZERS[sanitizer], *uring, f"-I{ROOT / 'engine_native'}"]
    folders = [ROOT / "engine_native", ROOT / "tests" / "stress"]
    files = sorted(path for folder in folders for path in folder.glob("*.[ch]"))
    version = subprocess.run([name, "--version"], capture_output=True, check=True).stdout
    known = hashlib.sha256(version + repr(flags).encode())
    for path in files:
        known.update(path.name.encode() + b"\0" + path.read_bytes())
    target = ROOT / "build" / "stress" / f"{sanitizer}-{known.hexdigest()[:16]}"
    if target.exists():
        return target
    for old in target.parent.glob(f"{sanitizer}-[0-9a-f]*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    objects = target.with_suffix(".objects")
    objects.mkdir(parents=True)

    def compile_one(path: Path) -> Path:
        output = objects / f"{path.stem}.o"
        subprocess.run([name, *flags, "-c", path, "-o", output], check=True)
        return output

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(compile_one, (path for path in files if path.suffix == ".c")))
    fresh = target.with_suffix(".fresh")
    libraries = ["-lm", *(["-luring"] if uring else [])]
    subprocess.run([name, *flags, *made, "-o", fresh, *libraries], check=True)
    shutil.rmtree(objects)
    return fresh.rename(target)


def stress(
    sanitizer: str, backend: str, seed: int, folder: Path, operations: int
) -> dict[str, int]:
    """What a run counted; it must have ended well, and have met all that it is there for."""
    if backend == "io_uring" and not backend_available(backend):
        pytest.skip("io_uring isn't available here")
    program = build(sanitizer)
    print(f"seed {seed}, {THREADS} threads x {operations} operations")
    done = run(
        *(program, folder, NUMBERS[backend], seed, THREADS, operations),
        timeout_s=120 + operations / 100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Sanitizer" not in done.stderr, done.stderr
    rows = dict(line.split("=") for line in done.stdout.splitlines())
    assert rows.pop("backend") == backend
    counts = {name: int(value) for name, value in rows.items()}
    print(counts)
    assert sum(value for name, value in counts.items() if name.startswith("do_")) == (
        THREADS * operations
    )
    met = ["stored", "skipped", "hits", "misses", "waited", "dropped", "lost", "direct_reads"]
    met += ["bounced_reads", "buffer_waits", "header_hits", "header_misses", "held_back"]
    assert all(counts[name] > 0 for name in met), counts
    assert counts["reclaimed"] > operations // 400
    assert counts["hits"] > counts["misses"] // 10
    return counts


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_no_data_race(seed: int, disk_path: Path, backend: str) -> None:
    stress("tsan", backend, seed, disk_path, 100_000)


@pytest.mark.timeout(600)
def test_no_data_race_on_the_simulated_device(seed: int, disk_path: Path) -> None:
    stress("tsan-sim", "sim", seed, disk_path, 20_000)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["io_uring", "threads", "sim"])
def test_no_bad_access_and_no_leak(seed: int, disk_path: Path, backend: str) -> None:
    stress("asan", backend, seed, disk_path, 20_000)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("backend", ["io_uring", "threads"])
@pytest.mark.parametrize("sanitizer", ["tsan", "asan"])
def test_soak(seed: int, disk_path: Path, sanitizer: str, backend: str) -> None:
    """A hundred times as much, each round from a seed of its own."""
    for number in range(100):
        stress(sanitizer, backend, (seed + number) % (1 << 32), disk_path, 100_000)
