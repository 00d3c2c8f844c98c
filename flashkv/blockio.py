"""Batches of I/O on a native backend: chosen by real I/O at start, the same face over each.

Invariants
 - the backend and direct I/O were proved by writing, syncing and reading a page (where nothing may
   be written: by reading one) on the file system that will be used;
 - a failure of the device is a result (0 or -errno) of its item, never an exception; exceptions
   are for opening, and for arguments that can't be right;
 - memory of asynchronous writes and registered memory is kept alive until it is reaped or released;
 - a forked child's object does nothing: the threads are the parent's.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flashkv import limits
from flashkv.background import Background, Later, Result
from flashkv.errors import BackendError, ClosedError
from flashkv.filesystem import DISK, FileSystem
from flashkv.native import address, aligned_array, dtype_of, ffi, lib, pointer

Array = npt.NDArray[Any]

BACKENDS: Final = {
    "auto": ("io_uring", "threads"),
    "io_uring": ("io_uring",),
    "threads": ("threads",),
    "sim": ("sim",),
}
_NATIVE_BACKENDS: Final = {
    "io_uring": lib.FKV_BACKEND_IO_URING,
    "threads": lib.FKV_BACKEND_THREADS,
    "sim": lib.FKV_BACKEND_SIM,
}

WRITE_DTYPE: Final = dtype_of("fkv_write")
"""Row of write_submit() and write_reap(): tag, offset, length, data (address), fd, result."""

IO_THREADS_DEFAULT_MAX: Final = 32
"""Threads of the `threads` backend by default: NVMe bandwidth is reached well below."""
WORKERS_DEFAULT_MAX: Final = 8
"""Workers by default: they share the memory bandwidth with the engine that embeds the store."""

# What a full or read-only disk answers: the I/O path works, so it says nothing against a backend.
_NOT_THE_BACKEND: Final = frozenset((-errno.ENOSPC, -errno.EDQUOT, -errno.EROFS))
# What file systems and drives answer to direct I/O that they can't do.
_NOT_DIRECT: Final = frozenset((-errno.EINVAL, -errno.EOPNOTSUPP))


class BlockIO:
    """An open I/O engine. Usable from all threads; calls release the GIL while they wait."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        backend: str = "auto",
        queue_depth: int = 64,
        workers: int | None = None,
        io_threads: int | None = None,
        retries: int = limits.RETRIES,
        read_buffer_bytes: int = limits.READ_BUFFER_BYTES,
        header_cache_bytes: int = limits.HEADER_CACHE_BYTES,
        direct_io: bool = True,
        probe_file: str | os.PathLike[str] | None = None,
        files: FileSystem = DISK,
    ) -> None:
        """Opens the first backend that passes a probe on `folder`'s file system.

        folder: where a nameless temporary file of one page may be written.
        probe_file: an existing file of at least one page, to be read instead; nothing is written.
        direct_io: False asks for buffered I/O even where direct I/O works.
        files: what the files lie on; it may ask for a backend of its own.
        Raises BackendError where no backend works, OSError where the folder or file can't be used.
        """
        backend = files.backend or backend
        if backend not in BACKENDS:
            raise BackendError(
                f"the I/O backend must be one of {', '.join(BACKENDS)}", value=repr(backend)
            )
        processors = len(os.sched_getaffinity(0))
        if files.workers is not None:
            workers = files.workers
        elif workers is None:
            workers = min(processors, WORKERS_DEFAULT_MAX)
        self.workers = workers
        self._settings = {
            "queue_depth": queue_depth,
            "workers": workers,
            "io_threads": io_threads or min(queue_depth, IO_THREADS_DEFAULT_MAX),
            "retries": retries,
            "read_buffer_bytes": read_buffer_bytes,
            "header_cache_bytes": header_cache_bytes,
        }
        self._files = files
        self._pid = os.getpid()
        self._engine: Any = ffi.NULL
        self._background = Background(files.when)
        self._held: dict[int, object] = {}
        self._registered: dict[int, object] = {}
        self.direct_io = False
        self.memory_alignment = 1
        self.offset_alignment = 1
        with _probe_descriptor(files, folder, probe_file) as (fd, writable):
            alignment = _direct_alignment(fd, writable) if direct_io else None
            if alignment is not None:
                self.direct_io = True
                self.memory_alignment, self.offset_alignment = alignment
            self._engine = self._open_ladder(backend, fd, writable)
        self.backend_name: str = ffi.string(lib.fkv_engine_backend(self._engine)).decode()

    # ---- opening ----

    def _open_ladder(self, backend: str, fd: int, writable: bool) -> Any:
        refusals = []
        for name in BACKENDS[backend]:
            engine, refusal = self._open_engine(name)
            if refusal == "":
                status = lib.fkv_engine_probe(engine, fd, writable)
                if status in _NOT_DIRECT and self.direct_io:
                    self._give_up_direct(fd)
                    status = lib.fkv_engine_probe(engine, fd, writable)
                if status == 0 or status in _NOT_THE_BACKEND:
                    return engine
                lib.fkv_engine_close(engine)
                refusal = f"{name}: {os.strerror(-status)} (errno {-status}) in a trial of one page"
            refusals.append(refusal)
        raise BackendError(
            "no I/O backend works here: " + "; ".join(refusals),
            advice="" if backend == "auto" else "Ask for backend='auto', or see why it is refused",
        )

    def _open_engine(self, name: str) -> tuple[Any, str]:
        options = ffi.new("fkv_engine_options *", self._settings)
        options.backend = _NATIVE_BACKENDS[name]
        options.memory_alignment = self.memory_alignment
        options.sim = self._files.device
        error = ffi.new("char[]", 256)
        engine = lib.fkv_engine_open(options, error, 256)
        return engine, "" if engine != ffi.NULL else ffi.string(error).decode(errors="replace")

    def _give_up_direct(self, fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct_io = False

    @property
    def engine(self) -> Any:
        """The native fkv_engine *, for the modules that call the data plane. Raises ClosedError."""
        if self._engine == ffi.NULL or self._pid != os.getpid():
            raise ClosedError("the I/O engine is closed, or belongs to a parent process")
        return self._engine

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return bool(self._engine == ffi.NULL)

    def close(self) -> None:
        """Waits for what is in flight and ends the threads. May be called again."""
        if self._pid == os.getpid():
            self._background.close()
        engine, self._engine = self._engine, ffi.NULL
        if engine != ffi.NULL and self._pid == os.getpid():
            lib.fkv_engine_close(engine)
        self._held.clear()
        self._registered.clear()

    def __enter__(self) -> BlockIO:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- files ----

    def open_file(
        self, path: str | os.PathLike[str], *, create: bool = False, writable: bool = False
    ) -> int:
        """File descriptor for this engine's I/O; the caller gives it to close_file().

        create: makes the file where it is missing. Symbolic links are not followed. Raises OSError.
        """
        flags = os.O_NOFOLLOW | (os.O_RDWR if writable else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT
        if self.direct_io:
            flags |= os.O_DIRECT
        return self._files.open(Path(path), flags)

    def close_file(self, fd: int) -> None:
        """Closes a file of open_file()."""
        self._files.close(fd)

    # ---- single extents: results are 0 or -errno ----

    def read(self, fd: int, array: Array, offset_bytes: int) -> int:
        """Fills the whole array from the file; -ENODATA where the file ends before."""
        if not array.flags.writeable:
            raise ValueError("the array to read into is read-only")
        data = pointer(array, "uint8_t *")
        return int(lib.fkv_pread(self.engine, fd, data, array.nbytes, offset_bytes))

    def write(self, fd: int, array: Array, offset_bytes: int) -> int:
        """Writes the whole array. Not durable before sync()."""
        data = pointer(array, "uint8_t *")
        return int(lib.fkv_pwrite(self.engine, fd, data, array.nbytes, offset_bytes))

    def sync(self, fds: Sequence[int]) -> npt.NDArray[np.int32]:
        """Syncs the data of each file, at once; results int32[len(fds)]. Never repeated."""
        files = np.asarray(fds, dtype=np.int32)
        results = np.zeros(len(files), dtype=np.int32)
        lib.fkv_sync(
            self.engine, pointer(files, "int32_t *"), len(files), pointer(results, "int32_t *")
        )
        return results

    def later(self, call: Callable[[], Result]) -> Later[Result]:
        """Runs a call on a thread of its own, one after the other, before close() ends; at once
        where there is none.

        The call may raise OSError. Raises ClosedError.
        """
        _ = self.engine
        return self._background.later(call)

    # ---- asynchronous writes ----

    def write_submit(self, writes: Array, keep: object = None) -> None:
        """Starts writes: rows of WRITE_DTYPE, tags unique among those in flight.

        keep: whatever owns the memory at `data`; held until each tag was reaped.
        Raises MemoryError, nothing being written then.
        """
        if writes.dtype != WRITE_DTYPE:
            raise ValueError("writes must be an array of WRITE_DTYPE")
        engine, tags = self.engine, writes["tag"].tolist()
        self._held.update(dict.fromkeys(tags, keep))
        if lib.fkv_write_submit(engine, pointer(writes, "fkv_write *"), len(writes)) != 0:
            for tag in tags:
                self._held.pop(tag, None)
            raise MemoryError(f"no memory for {len(writes)} writes")

    def write_reap(self, room: int = 64, timeout_ms: int = 0) -> Array:
        """Finished writes, rows of WRITE_DTYPE with result 0 or -errno, at most `room`.

        Waits up to timeout_ms for the first one (-1: without limit); returns at once where none
        is in flight.
        """
        finished = np.zeros(room, dtype=WRITE_DTYPE)
        count = lib.fkv_write_reap(self.engine, pointer(finished, "fkv_write *"), room, timeout_ms)
        finished = finished[:count]
        for tag in finished["tag"].tolist():
            self._held.pop(tag, None)
        return finished

    def writes_inflight(self) -> int:
        """Writes submitted and not yet reaped."""
        return int(lib.fkv_writes_inflight(self.engine))

    # ---- memory and counters ----

    def register_memory(self, array: Array) -> int:
        """Registers memory with the kernel, so that I/O on it pins no pages: 0 or -errno.

        Everything works without (-EOPNOTSUPP: this backend has none; -ENOMEM: memlock limit).
        The array is kept alive until unregister_memory() or close().
        """
        base = address(array)
        if base in self._registered:
            return -errno.EEXIST
        status = int(lib.fkv_engine_register(self.engine, ffi.cast("void *", base), array.nbytes))
        if status == 0:
            self._registered[base] = array
        return status

    def unregister_memory(self, array: Array) -> int:
        """Gives registered memory back: 0, or -ENOENT where it was not registered."""
        base = address(array)
        status = int(lib.fkv_engine_unregister(self.engine, ffi.cast("void *", base)))
        self._registered.pop(base, None)
        return status

    def counters(self) -> dict[str, int]:
        """Counters of I/O since the start; the names are those of fkv_engine_counters."""
        counters = ffi.new("fkv_engine_counters *")
        lib.fkv_engine_counters_get(self.engine, counters)
        return {name: int(getattr(counters, name)) for name in _COUNTER_NAMES}


_COUNTER_NAMES: Final[tuple[str, ...]] = tuple(dtype_of("fkv_engine_counters").names or ())


def backend_available(name: str) -> bool:
    """Whether a backend is compiled in and the kernel lets it start."""
    return bool(lib.fkv_backend_available(_NATIVE_BACKENDS[name]))


@contextmanager
def _probe_descriptor(
    files: FileSystem,
    folder: str | os.PathLike[str],
    probe_file: str | os.PathLike[str] | None,
) -> Iterator[tuple[int, bool]]:
    """(fd, writable) of a file to try I/O on; buffered, its flags may be changed."""
    if probe_file is not None:
        fd = files.open(Path(probe_file), os.O_RDONLY | os.O_NOFOLLOW)
    else:
        fd = files.temporary(Path(folder))
    try:
        yield fd, probe_file is None
    finally:
        files.close(fd)


def _direct_alignment(fd: int, writable: bool) -> tuple[int, int] | None:
    """(memory, offset) alignment of direct I/O on the file, which is left with O_DIRECT set.

    None: the file system refuses direct I/O; the file is left as it was.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return None
    memory, offset = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    if lib.fkv_direct_alignment(fd, memory, offset) == 0:
        told = (int(memory[0]), int(offset[0]))
        if 0 < told[0] <= limits.PAGE_BYTES and 0 < told[1] <= limits.PAGE_BYTES:
            return told
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return None
    aligned = _tried_alignment(fd, writable)
    return aligned, aligned


def _tried_alignment(fd: int, writable: bool) -> int:
    """512 where direct reads at that alignment work, else the page."""
    page = aligned_array(limits.PAGE_BYTES)
    try:
        if writable:
            os.pwritev(fd, [page.data], 0)
        read = os.preadv(fd, [page[512:1024].data], 512)
    except OSError:
        return limits.PAGE_BYTES
    return 512 if read == 512 else limits.PAGE_BYTES


__all__ = ["BACKENDS", "WRITE_DTYPE", "BlockIO", "aligned_array", "backend_available"]
