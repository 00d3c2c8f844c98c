"""Small stores for tests of known faults and of engines' ways, and hands on their files.

Invariants
  - a store takes less than 128 MiB; payloads are made from (seed, count) alone, so another process
    can make them again;
  - what is done to a file is done through an ordinary descriptor and synced, so that direct I/O
    sees it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from io_support import BACKENDS, run_child

import flashkv
from flashkv import Identity, KVGeometry, Namespace, Options, Store
from flashkv.index import NONE, Keys

MIB = 1 << 20
PAGE = 4096
CAPACITY = 48 * MIB
GEOMETRY = KVGeometry.gqa(2, 2, 64, "bfloat16")
BLOCK_SHAPE = (2, 2, 2, 16, 64)  # layer, plane, head, token, dim: 16 KiB
OPTIONS = Options(segment_bytes=4 * MIB, staging_bytes=8 * MIB, read_buffer_bytes=8 * MIB)
IDENTITY = Identity(model="test/model")

__all__ = ["BACKENDS", "run_child"]


def make(path: Path, **changes: Any) -> Store:
    """Opens a small store, making it where there is none; changes: of the options, or of open()."""
    arguments: dict[str, Any] = {"capacity": CAPACITY, "geometry": GEOMETRY}
    if (path / "shards" / "0" / "superblock.a").exists():
        arguments = {}
    for name in ("capacity", "geometry", "read_only"):
        if name in changes:
            arguments[name] = changes.pop(name)
    return flashkv.open(path, options=replace(OPTIONS, **changes), **arguments)


def payload(seed: int, count: int, shape: tuple[int, ...] = BLOCK_SHAPE) -> np.ndarray:
    """uint16[count, *shape]: bit patterns of bfloat16 numbers around 0, as KV has them."""
    numbers = np.random.default_rng(seed).standard_normal((count, *shape), np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def names(count: int, prefix: str = "k", first: int = 0) -> list[bytes]:
    """Different keys."""
    return [f"{prefix}{i:06d}".encode() for i in range(first, first + count)]


def read_back(namespace: Namespace, keys: list[bytes], like: np.ndarray) -> tuple[Any, np.ndarray]:
    """(result, blocks) of a get into poisoned memory."""
    out = np.full_like(like, 0xA5A5 if like.dtype == np.uint16 else 0xA5)
    return namespace.get(keys, out), out


def assert_equal(namespace: Namespace, keys: list[bytes], expected: np.ndarray) -> None:
    """All keys hit with these bytes."""
    result, out = read_back(namespace, keys, expected)
    assert result.all_ok, result
    assert np.array_equal(out, expected)


def crash(store: Store) -> None:
    """Ends the handle as the end of its process would: no sync, no log entry; writes on their way
    arrive.
    """
    with store.writer_lock:
        store.writer.flights.wait_written()
        store._stop()


# ---- what lies where -----------------------------------------------------------------------------


def place_of(namespace: Namespace, key: bytes) -> Any:
    """fkv_place of a block: segment, page and so on."""
    place = namespace._store.index.lookup(Keys.pack([key]).digests(namespace._space))[0]
    assert place["record"] != NONE
    return place


def segment_file(path: Path, number: int) -> Path:
    """The file of a segment of the store in `path`."""
    return path / "shards" / "0" / "segments" / f"{number:08d}.seg"


def segment_files(path: Path) -> list[Path]:
    """All segment files of the store in `path`."""
    return sorted((path / "shards" / "0" / "segments").glob("*.seg"))


def du(path: Path) -> int:
    """Bytes on disk as du counts them, folders included."""
    output = subprocess.run(["du", "-s", "-B1", path], capture_output=True, text=True, check=True)
    return int(output.stdout.split()[0])


@contextlib.contextmanager
def edit(path: Path) -> Iterator[int]:
    """A descriptor to change a file with; what was written is on the device afterwards."""
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@contextlib.contextmanager
def broken_segment(store: Store, number: int, flags: int) -> Iterator[None]:
    """The segment's descriptor fails with EBADF: O_WRONLY at reads, O_RDONLY at writes."""
    fd = store.segments[number].fd
    saved = os.dup(fd)
    other = os.open(segment_file(store.path, number), flags | os.O_CLOEXEC)
    try:
        os.dup2(other, fd, inheritable=False)
        yield
    finally:
        os.dup2(saved, fd, inheritable=False)
        os.close(saved)
        os.close(other)


# ---- other processes -----------------------------------------------------------------------------

PRELUDE = """
import os, sys
from pathlib import Path
import numpy as np
from small_stores import IDENTITY, make, names, payload, read_back
path = Path(sys.argv[1])
"""


def child(script: str, *arguments: object, timeout_s: float = 60.0) -> str:
    """Output of a new interpreter that runs the script after PRELUDE; it must end with 0."""
    return run_child(PRELUDE + textwrap.dedent(script), *arguments, timeout_s=timeout_s)


def start_child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs the script after PRELUDE; its input and output are pipes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
