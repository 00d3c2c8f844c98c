"""Writes to segment files for repairs, through the engine's own I/O.

Invariants
  - what a call wrote is durable when it returns;
  - files are opened one at a time, and nothing is made: a repair writes to files that are there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flashkv import limits, opening
from flashkv.blockio import BlockIO
from flashkv.errors import StoreError
from flashkv.filesystem import DISK, FileSystem
from flashkv.folder import segment_path
from flashkv.native import aligned_copy
from flashkv.options import Options
from flashkv.recovery import segment_files


class SegmentHands:
    """The I/O engine of a repair; begun with the first write."""

    def __init__(self, folder: Path, files: FileSystem = DISK) -> None:
        self.folder = folder
        self.files = files
        self._io: BlockIO | None = None

    def _engine(self) -> BlockIO:
        if self._io is None:
            options = Options(
                queue_depth=4,
                workers=1,
                io_threads=1,
                read_buffer_bytes=limits.BUFFER_BYTES_MIN,
                header_cache_bytes=limits.BUFFER_BYTES_MIN,
            )
            self._io = opening.open_io(self.folder, options.resolved(), self.files, read_only=False)
        return self._io

    def close(self) -> None:
        """Ends the engine."""
        if self._io is not None:
            self._io.close()
            self._io = None

    @contextmanager
    def _opened(self, number: int) -> Iterator[tuple[BlockIO, int]]:
        io = self._engine()
        fd = io.open_file(segment_path(self.folder, number), writable=True)
        try:
            yield io, fd
        finally:
            io.close_file(fd)

    def write(self, number: int, parts: Sequence[tuple[int, bytes]]) -> None:
        """Writes (first page, whole pages), each durable before the next. Raises OSError."""
        with self._opened(number) as (io, fd):
            for page, data in parts:
                result = io.write(fd, aligned_copy(data), page * limits.PAGE_BYTES)
                result = result or int(io.sync([fd])[0])
                if result != 0:
                    path = segment_path(self.folder, number)
                    raise OSError(-result, os.strerror(-result), str(path))

    def set_length(self, number: int, length_bytes: int) -> None:
        """Cuts a file that is too long, gives one that is too short its space. Raises OSError."""
        with self._opened(number) as (_, fd):
            if self.files.length_bytes(fd) > length_bytes:
                self.files.truncate(fd, length_bytes)
            else:
                self.files.preallocate(fd, length_bytes)
            self.files.sync(fd)

    def settle(self) -> None:
        """Returns once what a killed writer left on its way to segments has arrived.

        Raises StoreError where a file can't be opened for writing.
        """
        for _, path in segment_files(self.folder, self.files):
            try:
                fd = self.files.open(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError as error:
                raise StoreError(f"can't open {path}: {error}") from error
            try:
                self.files.settle(fd)
            finally:
                self.files.close(fd)
