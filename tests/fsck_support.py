"""Stores for the tests of flashkv-fsck, what they must hold, and hands on their files."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.fsck import CLEAN, MENDED, Outcome, check, repair
from small_stores import GEOMETRY, IDENTITY, OPTIONS, PAGE, crash, make, names, payload

import flashkv
from flashkv import BlockStatus, Store
from flashkv.blockio import BlockIO
from flashkv.filesystem import FileSystem

KEYS = names(240)
DELETED = KEYS[::20]
"""In the first segment, the second and the one that is open."""
DATA = payload(1, len(KEYS))


def build(path: Path) -> Path:
    """Two sealed segments and an open one, deleted blocks in each; closed."""
    with make(path, bloom=True) as store:
        namespace = store.namespace(IDENTITY)
        for first in range(0, len(KEYS), 20):
            if first in (80, 160):
                store.writer.seal()
            assert namespace.put(KEYS[first : first + 20], DATA[first : first + 20]).all_ok
        assert namespace.delete(DELETED).all_ok
    assert [file.name for file in segments(path)] == [f"0000000{n}.seg" for n in range(3)]
    return path


def copy(template: Path, to: Path) -> Path:
    """A copy to be harmed."""
    return Path(shutil.copytree(template, to, symlinks=True))


def shard(path: Path) -> Path:
    return path / "shards" / "0"


def segments(path: Path) -> list[Path]:
    return sorted((shard(path) / "segments").glob("*.seg"))


def logs(path: Path) -> list[Path]:
    """Oldest first."""
    return sorted(shard(path).glob("manifest-*.log"))


def superblocks(path: Path) -> list[Path]:
    return sorted(shard(path).glob("superblock.*"))


def snapshot(path: Path) -> dict[str, tuple[object, ...]]:
    """Everything about every file and folder but its access time."""
    found = {}
    for entry in [path, *sorted(path.rglob("*"))]:
        status = entry.lstat()
        digest = ""
        if entry.is_file() and not entry.is_symlink():
            digest = hashlib.sha256(entry.read_bytes()).hexdigest()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found[str(entry)] = (status.st_ino, status.st_size, status.st_blocks, *times, digest)
    return found


def change(path: Path, offset: int, length: int, make_bytes: Callable[[bytes], bytes]) -> None:
    """Replaces bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(length)
        file.seek(offset)
        new = make_bytes(old)
        assert new != old
        file.write(new)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    change(path, offset, 1, lambda old: bytes([old[0] ^ 1 << bit]))


def zero(path: Path, page: int) -> None:
    change(path, page * PAGE, PAGE, lambda _old: bytes(PAGE))


def held(path: Path, *, back: bool = False) -> set[bytes]:
    """The keys that an open store gives; right bytes are asserted, and that deleted ones stay away
    (back: they may be back).
    """
    with make(path) as store:
        assert store.geometry.to_json()
        namespace = store.namespace(IDENTITY)
        out = np.full_like(DATA, 0xA5A5)
        result = namespace.get(KEYS, out)
        found = set()
        for row, key in enumerate(KEYS):
            if result[row] == BlockStatus.OK:
                assert np.array_equal(out[row], DATA[row]), f"wrong bytes of {key!r}"
                found.add(key)
        assert back or not found & set(DELETED), "deleted blocks are back"
        again = payload(7, 20)
        assert namespace.put(names(20, "after"), again).all_ok, "it takes new blocks"
        store.flush()
    return found


ALIVE = set(KEYS) - set(DELETED)


def mended(path: Path, **how: object) -> Outcome:
    """Repairs, and asserts that all was mended and that nothing is left to do."""
    before = check(path, **how)
    assert before.status == MENDED, before
    outcome = repair(path, **how)
    assert (outcome.status, outcome.after, outcome.plan.left) == (MENDED, [], []), outcome
    assert [step.what for step in before.plan.steps] == [step.what for step in outcome.mended]
    again = check(path)
    assert again.status == CLEAN, again.findings
    quiet = snapshot(path)
    assert repair(path).status == CLEAN
    assert snapshot(path) == quiet
    return outcome


def crashed(path: Path) -> None:
    """Puts that nothing made durable, and the end of the process."""
    store = make(path)
    namespace = store.namespace(IDENTITY)
    assert namespace.put(names(40, "new"), payload(3, 40)).all_ok
    crash(store)


def evicting(path: Path) -> None:
    """A small store that used all of its space again and again, and deleted most."""
    with flashkv.open(
        path,
        capacity=20 << 20,
        geometry=GEOMETRY,
        options=flashkv.Options(segment_bytes=4 << 20, free_floor_bytes=0),
    ) as store:
        namespace = store.namespace(IDENTITY)
        data = payload(5, 80)
        for turn in range(40):
            keys = names(80, first=80 * turn)
            assert namespace.put(keys, data).all_ok
            namespace.delete(keys[::3])
        assert store.stats().evicted_segments > 2


def remove(path: Path) -> None:
    """Whatever it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def access_times(path: Path) -> dict[str, int]:
    return {str(entry): entry.lstat().st_atime_ns for entry in [path, *path.rglob("*")]}


def age(path: Path) -> None:
    """Access times from long ago, so that relatime would renew them."""
    for entry in sorted([path, *path.rglob("*")], reverse=True):
        os.utime(entry, ns=(10**18, entry.lstat().st_mtime_ns), follow_symlinks=False)


# ---- cut off ------------------------------------------------------------------------------------


class Power(BaseException):
    """It went: nothing is written from here on."""


class Cut(FileSystem):
    """Everything that changes files works `count` times, and never again.

    torn: bytes that a write does all the same which is the first not to work; a disk writes whole
    sectors of 512.
    """

    def __init__(self, count: int, *, torn: int = 0) -> None:
        self.left = count
        self.torn = torn

    def step(self) -> None:
        """Raises Power."""
        self.left -= 1
        if self.left < 0:
            raise Power

    def write(self, fd: int, data: bytes) -> None:
        if self.left == 0:
            super().write(fd, data[: self.torn])
        self.step()
        super().write(fd, data)

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and not (path.exists() and not flags & os.O_TRUNC):
            self.step()
        return super().open(path, flags)


def _stepping(name: str) -> None:
    original = getattr(FileSystem, name)

    def method(self: Cut, *arguments: object) -> object:
        self.step()
        return original(self, *arguments)

    setattr(Cut, name, method)


for _name in (
    *("sync", "sync_data", "preallocate", "reserve", "truncate"),
    *("make_folder", "remove_folder", "rename", "unlink", "sync_folder"),
):
    _stepping(_name)


def cut_block_io(patch: pytest.MonkeyPatch, files: Cut) -> None:
    """Writes to segments count as well; a torn one leaves half of its pages."""
    write, sync = BlockIO.write, BlockIO.sync

    def cut_write(self: BlockIO, fd: int, array: np.ndarray, offset: int) -> int:
        if files.left == 0 and files.torn and len(array) > PAGE:
            write(self, fd, array[: len(array) // 2 // PAGE * PAGE], offset)
        files.step()
        return write(self, fd, array, offset)

    def cut_sync(self: BlockIO, fds: list[int]) -> np.ndarray:
        files.step()
        return sync(self, fds)

    patch.setattr(BlockIO, "write", cut_write)
    patch.setattr(BlockIO, "sync", cut_sync)


def make_cut(path: Path, files: Cut) -> bool:
    """Makes a store until the power goes; whether it went."""
    try:
        Store(path, 48 << 20, GEOMETRY, OPTIONS.resolved(), read_only=False, files=files).close()
    except Power:
        return True
    return False
