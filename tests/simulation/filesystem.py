"""The file system of the simulation: carries calls out on real files, notes them in the device's
recording, and fails the n-th call of a kind.

Invariants
  - what changes files is noted before it is done, in one order with the device's writes and syncs;
  - an inode has one number from its first open or creation to the end of the recording, whatever
    its names are;
  - a call that is to fail does nothing, but a torn write, which does a part.
"""

from __future__ import annotations

import copy
import errno
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from simulation.device import Device

from flashkv.background import When
from flashkv.filesystem import FileSystem

SECTOR: Final = 512
CALLS: Final = (
    "open temporary close write sync sync_data truncate preallocate reserve settle length_bytes "
    "allocated_bytes read names make_folder remove_folder rename unlink sync_folder size_bytes "
    "free_bytes"
).split()
"""Kinds of calls that can be made to fail."""


@dataclass(frozen=True)
class Note:
    """What was done to files beside the device's own writes and syncs.

    what: create, unlink, rename; make, remove (a folder); size, truncate, write; sync, synced,
    sync_failed; sync_folder, folder_synced, folder_sync_failed.
    """

    what: str
    folder: str = ""
    name: str = ""
    to: str = ""
    inode: int = 0
    offset: int = 0
    length: int = 0
    data: bytes = b""
    begun: int = 0  # of a sync's end: position of what began it


@dataclass
class FileFault:
    """The first-th to (first + count - 1)-th call of a kind fails."""

    kind: str
    first: int
    count: int = 1
    code: int = errno.EIO
    amount: int = 0  # bytes that a failing write writes all the same


@dataclass
class _Open:
    inode: int
    position: int = 0


@dataclass
class Files:
    """The names below a root and whose they are: folder -> name -> inode, 0 for a folder."""

    folders: dict[str, dict[str, int]] = field(default_factory=lambda: {"": {}})


class InlineFiles(FileSystem):
    """The real files, with nothing but the caller's thread at work: opens fast."""

    backend = "sim"
    workers = 0
    when = When.AT_LAST

    def __init__(self) -> None:
        self._device = Device()
        self._device.inline()
        self.device = self._device.sim

    def close_device(self) -> None:
        """Once no store is open on it."""
        self._device.close()


class SimFiles(FileSystem):
    """Files below `root`, seen through a device."""

    backend = "sim"
    when = When.AT_LAST

    def __init__(self, root: Path, device: Device, *, inline: bool = True) -> None:
        """root: a folder that is there; what it holds is taken as durable."""
        self.root = root
        self.simulated = device
        if inline:  # nothing runs but the caller: the same calls give the same recording
            device.inline()
            self.workers = 0
        self.device = device.sim
        self.notes: list[Note] = []
        self.names_now = Files()
        self.inode_contents: dict[int, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.faults: list[FileFault] = []
        self.hits = 0
        self.free: int | None = None
        """What free_bytes() answers; None: what the real file system says."""
        self._open: dict[int, _Open] = {}
        self._inodes = 0
        self._adopt("")
        self.start_names = copy.deepcopy(self.names_now)

    def _adopt(self, folder: str) -> None:
        """Takes what is there as durable from before."""
        here = self.names_now.folders.setdefault(folder, {})
        for entry in sorted(os.scandir(self.root / folder), key=lambda entry: entry.name):
            path = f"{folder}/{entry.name}".lstrip("/")
            if entry.is_dir(follow_symlinks=False):
                here[entry.name] = 0
                self._adopt(path)
            elif entry.is_file(follow_symlinks=False):
                here[entry.name] = self._new_inode()
                self.inode_contents[here[entry.name]] = Path(entry.path).read_bytes()

    def _new_inode(self) -> int:
        self._inodes += 1
        return self._inodes

    # ---- faults ----

    def fail(
        self, kind: str, first: int, *, count: int = 1, code: int = errno.EIO, amount: int = 0
    ) -> None:
        """Lets calls of a kind fail, counted from the last reset()."""
        assert kind in CALLS
        self.faults.append(FileFault(kind, first, count, code, amount))

    def reset(self) -> None:
        """No faults; calls are counted from 0."""
        self.faults.clear()
        self.calls.clear()
        self.hits = 0

    def _call(self, kind: str) -> FileFault | None:
        self.calls[kind] += 1
        number = self.calls[kind]
        for fault in self.faults:
            if fault.kind == kind and fault.first <= number < fault.first + fault.count:
                self.hits += 1
                return fault
        return None

    def _check(self, kind: str) -> None:
        fault = self._call(kind)
        if fault is not None:
            raise OSError(fault.code, f"{os.strerror(fault.code)} (simulated, {kind})")

    def open_descriptors(self) -> int:
        """Descriptors that were opened through it and not closed."""
        return len(self._open)

    # ---- notes ----

    def _note(self, what: str, **facts: Any) -> int:
        self.notes.append(Note(what, **facts))
        return self.simulated.note(len(self.notes) - 1)

    def _split(self, path: Path) -> tuple[str, str]:
        folder = path.parent.relative_to(self.root)
        return "" if folder == Path() else str(folder), path.name

    # ---- descriptors ----

    def open(self, path: Path, flags: int) -> int:
        self._check("open")
        folder, name = self._split(path)
        here = self.names_now.folders[folder]
        inode = here.get(name, 0)
        fd = super().open(path, flags)
        if not inode:
            inode = here[name] = self._new_inode()
            self._note("create", folder=folder, name=name, inode=inode)
        elif flags & os.O_TRUNC:
            self._note("truncate", inode=inode)
        self._open[fd] = _Open(inode)
        self.simulated.bind(fd, inode, SECTOR if flags & os.O_DIRECT else 1)
        return fd

    def temporary(self, folder: Path) -> int:
        self._check("temporary")
        fd = super().temporary(folder)
        self._open[fd] = _Open(0)
        return fd

    def system_close(self, fd: int) -> None:
        if self._open.pop(fd).inode:
            self.simulated.unbind(fd)
        super().system_close(fd)
        self._check("close")

    def write(self, fd: int, data: bytes) -> None:
        fault = self._call("write")
        if fault is not None:
            data = data[: fault.amount]
        opened = self._open[fd]
        if data:
            self._note("write", inode=opened.inode, offset=opened.position, data=data)
            super().write(fd, data)
            opened.position += len(data)
        if fault is not None:
            raise OSError(fault.code, f"{os.strerror(fault.code)} (simulated, write)")

    def sync(self, fd: int) -> None:
        self._sync("sync", fd)

    def sync_data(self, fd: int) -> None:
        self._sync("sync_data", fd)

    def _sync(self, kind: str, fd: int) -> None:
        inode = self._open[fd].inode
        begun = self._note("sync", inode=inode)
        try:
            self._check(kind)
        except OSError:
            self._note("sync_failed", inode=inode, begun=begun)
            raise
        self._note("synced", inode=inode, begun=begun)

    def reserve(self, fd: int, length_bytes: int) -> None:
        self._check("reserve")
        super().reserve(fd, length_bytes)

    def settle(self, fd: int) -> None:
        self._check("settle")
        super().settle(fd)

    def truncate(self, fd: int, length_bytes: int) -> None:
        self._check("truncate")
        self._note("truncate", inode=self._open[fd].inode, length=length_bytes)
        super().truncate(fd, length_bytes)

    def preallocate(self, fd: int, length_bytes: int) -> bool:
        self._check("preallocate")
        self._note("size", inode=self._open[fd].inode, length=length_bytes)
        return super().preallocate(fd, length_bytes)

    def length_bytes(self, fd: int) -> int:
        self._check("length_bytes")
        return super().length_bytes(fd)

    def allocated_bytes(self, fd: int) -> int:
        self._check("allocated_bytes")
        return super().allocated_bytes(fd)

    # ---- names ----

    def read(self, path: Path) -> bytes:
        self._check("read")
        return super().read(path)

    def names(self, folder: Path) -> list[str]:
        self._check("names")
        return super().names(folder)

    def make_folder(self, path: Path) -> None:
        self._check("make_folder")
        super().make_folder(path)
        folder, name = self._split(path)
        self._note("make", folder=folder, name=name)
        self.names_now.folders[folder][name] = 0
        self.names_now.folders[str(path.relative_to(self.root))] = {}

    def remove_folder(self, path: Path) -> None:
        self._check("remove_folder")
        super().remove_folder(path)
        folder, name = self._split(path)
        self._note("remove", folder=folder, name=name)
        del self.names_now.folders[folder][name]

    def rename(self, path: Path, to: Path) -> None:
        self._check("rename")
        super().rename(path, to)
        folder, name = self._split(path)
        assert self._split(to)[0] == folder
        here = self.names_now.folders[folder]
        inode = here.pop(name)
        here[to.name] = inode
        self._note("rename", folder=folder, name=name, to=to.name, inode=inode)

    def unlink(self, path: Path) -> None:
        self._check("unlink")
        super().unlink(path)
        folder, name = self._split(path)
        if self.names_now.folders[folder].pop(name, 0):
            self._note("unlink", folder=folder, name=name)

    def sync_folder(self, folder: Path) -> None:
        name = "" if folder == self.root else str(folder.relative_to(self.root))
        begun = self._note("sync_folder", folder=name)
        try:
            self._check("sync_folder")
        except OSError:
            self._note("folder_sync_failed", folder=name, begun=begun)
            raise
        self._note("folder_synced", folder=name, begun=begun)

    # ---- room ----

    def size_bytes(self, path: Path) -> int:
        self._check("size_bytes")
        return super().size_bytes(path)

    def free_bytes(self, path: Path) -> int:
        self._check("free_bytes")
        return super().free_bytes(path) if self.free is None else self.free
