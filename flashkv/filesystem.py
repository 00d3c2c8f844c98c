"""The seam to the file system: every call on files and folders that isn't bulk I/O.

Invariants
  - each method is one thing that can fail or be cut by a crash, and fails with OSError;
  - symbolic links are never followed where something is made or opened for writing;
  - nothing here decides: who may rename, unlink and sync folders is the manifest's business.

DISK is the real one. Tests put a subclass in its place that records, fails and tears.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, Final

from flashkv import limits
from flashkv.background import When
from flashkv.native import ffi, lib


class FileSystem:
    """Calls on the operating system's file system."""

    backend: str | None = None
    """The I/O backend that goes with it; None: any."""

    device: Any = ffi.NULL
    """The native fkv_sim * of that backend."""

    workers: int | None = None
    """Workers of that backend; None: what the options say."""

    when: When = When.THREAD
    """When what may go on beside the caller is done."""

    # ---- descriptors ----

    def open(self, path: Path, flags: int) -> int:
        """A descriptor that child processes don't inherit."""
        return os.open(path, flags | os.O_CLOEXEC, 0o644)

    def temporary(self, folder: Path) -> int:
        """A descriptor of a file without a name: nothing can be left behind."""
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return os.dup(file.fileno())

    def close(self, fd: int) -> None:
        """Gives the descriptor back, which it is whatever the system says: what must last was
        synced before.
        """
        try:
            self.system_close(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise

    def system_close(self, fd: int) -> None:
        """The call itself."""
        os.close(fd)

    def write(self, fd: int, data: bytes) -> None:
        """Writes all of it where the descriptor stands. Not durable before a sync."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def sync(self, fd: int) -> None:
        """Makes a file durable, its length and other metadata included."""
        os.fsync(fd)

    def sync_data(self, fd: int) -> None:
        """Makes what was written durable, and the length that reading it needs."""
        os.fdatasync(fd)

    def preallocate(self, fd: int, length_bytes: int) -> bool:
        """Makes a file `length_bytes` long, never shorter than it is.

        False: the file system can't reserve space, the file is sparse.
        """
        status = lib.fkv_preallocate(fd, length_bytes)
        if status < 0:
            raise OSError(-status, os.strerror(-status), f"{length_bytes} bytes for a segment")
        return bool(status == 0)

    def truncate(self, fd: int, length_bytes: int) -> None:
        """Cuts a file that is longer; for repairs."""
        os.ftruncate(fd, length_bytes)

    def reserve(self, fd: int, length_bytes: int) -> None:
        """Space for a file to grow to `length_bytes`, where it can be had; its length stays."""
        lib.fkv_reserve(fd, length_bytes)

    def settle(self, fd: int) -> None:
        """Returns once direct writes that a killed process left on their way have arrived.

        The kernel lets go of a process with an io_uring, and of its locks, before its writes have
        ended. What may change a file's blocks or length waits for them, if it changes nothing too:
        on ext4, xfs and f2fs the former, on btrfs and ext2 the latter.
        """
        length = os.fstat(fd).st_size
        lib.fkv_reserve(fd, min(length, limits.PAGE_BYTES))  # be it refused
        os.ftruncate(fd, length)

    def length_bytes(self, fd: int) -> int:
        """Length of an open file."""
        return os.fstat(fd).st_size

    def allocated_bytes(self, fd: int) -> int:
        """What an open file takes on disk."""
        return os.fstat(fd).st_blocks * 512

    # ---- names ----

    def read(self, path: Path) -> bytes:
        """All of a file."""
        with path.open("rb", buffering=0) as file:
            return file.read()

    def names(self, folder: Path) -> list[str]:
        """What the folder holds, in order."""
        return sorted(os.listdir(folder))  # noqa: PTH208  (names, not paths)

    def is_file(self, path: Path) -> bool:
        """A regular file, or a link to one."""
        return stat.S_ISREG(_mode(path))

    def is_folder(self, path: Path) -> bool:
        """A folder, or a link to one."""
        return stat.S_ISDIR(_mode(path))

    def exists(self, path: Path) -> bool:
        """Something of that name, be it a link to nothing."""
        return os.path.lexists(path)

    def make_folder(self, path: Path) -> None:
        """A new folder in one that is there."""
        path.mkdir()

    def remove_folder(self, path: Path) -> None:
        """An empty folder goes."""
        path.rmdir()

    def rename(self, path: Path, to: Path) -> None:
        """Gives a file another name, in place of whatever had it."""
        path.rename(to)

    def unlink(self, path: Path) -> None:
        """The name goes; no matter if it is gone already."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Makes the folder's entries durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # ---- room ----

    def size_bytes(self, path: Path) -> int:
        """Size of the file system; 0 where it doesn't tell (ramfs, some network ones)."""
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user can still write; without bound where it doesn't tell."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize if status.f_blocks else 1 << 62


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


DISK: Final = FileSystem()
"""The operating system's."""
