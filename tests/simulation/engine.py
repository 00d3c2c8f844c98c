"""A native engine on a simulated device, without a store around it; and files for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from io_support import write_rows
from simulation.device import Device

from flashkv.blockio import WRITE_DTYPE
from flashkv.native import ffi, lib, pointer

PAGE: Final = 4096
RETRIES: Final = 4


class Engine:
    """An open engine. Raises RuntimeError with the data plane's message where it can't be."""

    def __init__(self, device: Device | None, **changes: Any) -> None:
        options = {
            "backend": lib.FKV_BACKEND_SIM,
            "queue_depth": 8,
            "workers": 1,
            "io_threads": 1,
            "retries": RETRIES,
            "memory_alignment": 1,
            "read_buffer_bytes": 1 << 20,
            "header_cache_bytes": 1 << 20,
            "sim": device.sim if device is not None else ffi.NULL,
        }
        error = ffi.new("char[]", 256)
        given = ffi.new("fkv_engine_options *", {**options, **changes})
        self.engine: Any = lib.fkv_engine_open(given, error, 256)
        if self.engine == ffi.NULL:
            raise RuntimeError(ffi.string(error).decode())

    def close(self) -> None:
        """Waits for what is in flight. May be called again."""
        engine, self.engine = self.engine, ffi.NULL
        lib.fkv_engine_close(engine)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read(self, fd: int, array: np.ndarray, offset: int = 0) -> int:
        """0 or -errno."""
        data = pointer(array, "uint8_t *")
        return int(lib.fkv_pread(self.engine, fd, data, array.nbytes, offset))

    def write(self, fd: int, array: np.ndarray, offset: int = 0) -> int:
        """0 or -errno."""
        data = pointer(array, "uint8_t *")
        return int(lib.fkv_pwrite(self.engine, fd, data, array.nbytes, offset))

    def sync(self, fds: Sequence[int]) -> list[int]:
        """0 or -errno of each."""
        files = np.array(fds, np.int32)
        results = np.full(len(files), 1, np.int32)
        lib.fkv_sync(
            self.engine, pointer(files, "int32_t *"), len(files), pointer(results, "int32_t *")
        )
        return [int(result) for result in results]

    def submit(self, rows: np.ndarray) -> int:
        """Starts writes (rows of WRITE_DTYPE), whose memory the caller keeps: 0 or -ENOMEM."""
        return int(lib.fkv_write_submit(self.engine, pointer(rows, "fkv_write *"), len(rows)))

    def reap(self, timeout_ms: int = 10_000) -> list[tuple[int, int]]:
        """(tag, result) of all writes in flight, in the order in which they finished.

        Returns what there is where nothing more finishes within the time.
        """
        finished = np.zeros(1, WRITE_DTYPE)
        order: list[tuple[int, int]] = []
        row = pointer(finished, "fkv_write *")
        while lib.fkv_write_reap(self.engine, row, 1, timeout_ms):
            order.append((int(finished["tag"][0]), int(finished["result"][0])))
        return order

    def counters(self) -> dict[str, int]:
        """The engine's counters."""
        counters = ffi.new("fkv_engine_counters *")
        lib.fkv_engine_counters_get(self.engine, counters)
        return {name: getattr(counters, name) for name in dir(counters)}


@contextmanager
def open_plain(path: Path, flags: int = 0) -> Iterator[int]:
    """A file for reading and writing; buffered where the flags don't say otherwise."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def file_content(fd: int) -> bytes:
    """All of a small file, past the engine."""
    return os.pread(fd, 1 << 24, 0)


def page_rows(fd: int, data: np.ndarray, count: int) -> np.ndarray:
    """Rows for Engine.submit(): the first pages of `data`, each a write to its place."""
    return write_rows(fd, data, [(i * PAGE, PAGE) for i in range(count)])


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails after 20 seconds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
