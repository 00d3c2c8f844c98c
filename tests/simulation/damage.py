"""Opens a golden store with a change to its files, and holds what it shows to the promises.

What must hold, whatever a change is
  - the store opens; each key reads as bytes that were put under it, or is a miss; no exception;
  - only what the change hit is lost, and where something is lost a counter of stats() says so;
  - what was deleted, superseded, evicted or retired stays away. The one exception: what is kept
    away by an entry of the log that the change touched, and by nothing else, may be back, with its
    own bytes;
  - opened for writing, the store takes what was lost again, and new blocks besides.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from simulation.device import FLIP, READ, Device
from simulation.golden import (
    BLOCK_SHAPE,
    IDENTITIES,
    PAGE,
    SHARD,
    Golden,
    Name,
    block,
    options,
    segment_path,
    small_segments,
)
from simulation.images import scratch

from flashkv import BlockStatus, Store
from flashkv.filesystem import FileSystem

NEW = 1 << 20
"""Version of what is put after the damage."""
SIGNS = (
    *("damaged_records", "damaged_directories", "damaged_headers", "damaged_log_entries"),
    *("unreadable_pages", "manifest_rebuilt"),
)
Found = dict[Name, int]
MAGIC = b"FKVR"


class DamageError(AssertionError):
    """A promise that a damaged store broke."""


@dataclass
class Allowed:
    """What a damaged store may show besides what it must.

    lost: live names that may be a miss. back: dead versions that may be there. counted: whether a
    loss must show in the counters.
    """

    lost: set[Name] = field(default_factory=set)
    back: set[tuple[Name, int]] = field(default_factory=set)
    counted: bool = True


class Bench:
    """A golden store in a folder; after each look its files are as they were."""

    def __init__(self, golden: Golden, folder: Path) -> None:
        self.golden = golden
        self.path = folder / "store"
        self.device = Device()
        self.device.inline()  # nothing but the caller's thread at work: opens fast
        self.files = FileSystem()
        self.files.backend, self.files.device, self.files.workers = "sim", self.device.sim, 0
        self.looks = 0
        self.lossy = 0  # looks at which something was lost
        self.reads = 0  # that the last look took, but for those of a second opening
        self._names = {
            space: [name for name in golden.versions if name[0] == space] for space in IDENTITIES
        }
        self._keys = {space: [key for _, key in names] for space, names in self._names.items()}
        self._bytes = {
            name: {block(name, version).tobytes(): version for version in (*versions, NEW)}
            for name, versions in golden.versions.items()
        }
        self._new: Name = ("main", b"new")
        self.options = options()
        (self.path / SHARD / "segments").mkdir(parents=True)
        self.restore()

    def __str__(self) -> str:
        return f"{self.looks} images, {self.lossy} of them with a loss"

    # ---- files ----

    def write(self, files: Mapping[str, bytes | None]) -> None:
        """Gives files these contents; None: the file goes."""
        for name, data in files.items():
            path = self.path / name
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(data)

    def poke(self, name: str, offset: int, data: bytes) -> None:
        """Overwrites a piece of a file."""
        fd = os.open(self.path / name, os.O_WRONLY)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def restore(self) -> None:
        """All files as in the golden store."""
        golden = self.golden.files
        for folder in (SHARD, f"{SHARD}/segments"):
            for name in os.listdir(self.path / folder):  # noqa: PTH208
                if f"{folder}/{name}" not in golden and name != "segments":
                    (self.path / folder / name).unlink()
        self.write(golden)

    # ---- looking ----

    def open(self, *, writable: bool) -> Store:
        """The store as it lies there."""
        return Store(self.path, None, None, self.options, read_only=not writable, files=self.files)

    def look(self, what: str, allowed: Allowed, *, writable: bool, again: bool = False) -> None:
        """Opens the store as it lies there and checks it. Raises DamageError, with `what`.

        again: it is closed and opened once more; what was put must be there.
        """
        self.looks += 1
        try:
            self._look(allowed, writable=writable, again=again)
        except Exception as error:
            mode = "written" if writable else "read"
            raise DamageError(f"{what}, opened to be {mode}: {error!r}") from error

    def _look(self, allowed: Allowed, *, writable: bool, again: bool) -> None:
        store = self.open(writable=writable)
        try:
            found = self.read(store)
            lost = self.judge(found, allowed)
            self.reads = self.device.calls(READ)
            self.lossy += bool(lost)
            if lost and allowed.counted:
                assert self.counted(store), f"nothing counts the loss of {lost}"
            if writable:
                self._put(store, lost)
                store.flush()
        finally:
            store.close()
        if again and writable:
            self._look_again(found, lost)

    def _look_again(self, found: Found, lost: set[Name]) -> None:
        """What was found is there, and what was put."""
        with self.open(writable=False) as store:
            more = self.read(store)
            assert {n: v for n, v in more.items() if n in found} == found, "more is lost"
            for name in set(more) - set(found) - lost:
                raise AssertionError(f"{name} is back after a second opening")
            assert all(more.get(name) == NEW for name in lost), "what was put again is gone"
            self._check_new(store)

    def counted(self, store: Store) -> int:
        """Damage that the counters say."""
        stats = store.stats()
        return stats.damaged_blocks + sum(stats.recovery[sign] for sign in SIGNS)

    def read(self, store: Store) -> Found:
        """name -> version of everything that the store shows."""
        found = {}
        for space, keys in self._keys.items():
            if not keys:
                continue
            out = np.full((len(keys), *BLOCK_SHAPE), 0xA5A5, np.uint16)
            result = store.namespace(IDENTITIES[space]).get(keys, out)
            for name, status, data in zip(self._names[space], result, out, strict=True):
                if status == BlockStatus.MISS:
                    continue
                assert status == BlockStatus.OK, f"{name}: {status.name}"
                version = self._bytes[name].get(data.tobytes())
                assert version is not None, f"{name} has bytes that were never put under it"
                found[name] = version
        return found

    def judge(self, found: Found, allowed: Allowed) -> set[Name]:
        """The live names that are lost. Fails where that, or what is there, isn't allowed."""
        live = self.golden.live
        lost = set(live) - set(found)
        for name, version in found.items():
            may = live.get(name) == version or (name, version) in allowed.back
            assert may, f"{name} shows version {version}, which is dead"
        assert lost <= allowed.lost, f"{sorted(lost - allowed.lost)} are lost"
        return lost

    def _put(self, store: Store, lost: set[Name]) -> None:
        """What was lost, and a new block."""
        for space, identity in IDENTITIES.items():
            keys = [key for its_space, key in lost | {self._new} if its_space == space]
            if not keys:
                continue
            data = np.stack([block((space, key), NEW) for key in keys])
            result = store.namespace(identity).put(keys, data)
            assert result.all_ok, f"put says {result}"
            out = np.zeros_like(data)
            assert store.namespace(identity).get(keys, out).all_ok, "what was put isn't there"
            assert np.array_equal(out, data), "what was put reads as something else"

    def _check_new(self, store: Store) -> None:
        space, key = self._new
        out = np.zeros((1, *BLOCK_SHAPE), np.uint16)
        assert store.namespace(IDENTITIES[space]).get([key], out).all_ok, "the new block is gone"
        assert np.array_equal(out[0], block(self._new, NEW)), "the new block's bytes are wrong"

    # ---- damage ----

    def flip_read(self, number: int, bit: int, *, writable: bool) -> None:
        """The n-th read of an opening and a look gives a wrong bit, once."""
        device = self.device
        device.reset()
        device.fault(READ, FLIP, first=number, amount=bit)
        what = f"bit {bit} of read {number}"
        try:
            self.look(what, Allowed(lost=set(self.golden.live)), writable=writable)
            assert device.hits() == 1
        finally:
            device.reset()
        if writable:  # what was put anew meanwhile shows, what was lost may be back
            allowed = Allowed(lost=set(self.golden.live), back=self._anew())
            self.look(f"after {what}", allowed, writable=False)
            self.restore()
        else:
            self.look(f"after {what}", Allowed(), writable=False)

    def _anew(self) -> set[tuple[Name, int]]:
        return {(name, NEW) for name in self.golden.live}

    def damage(
        self,
        what: str,
        files: Mapping[str, bytes | None],
        *,
        writable: bool,
        again: bool = False,
        counted: bool = True,
    ) -> None:
        """Looks at the store with these files in place of its own, and puts those back."""
        allowed = self.allowed_of(files)
        allowed.counted &= counted
        self.write(files)
        try:
            self.look(what, allowed, writable=writable, again=again)
        finally:
            if writable:
                self.restore()
            else:
                self.write({name: self.golden.files.get(name) for name in files})

    # ---- what a change allows ----

    def allowed_of(self, files: Mapping[str, bytes | None]) -> Allowed:
        """By which files differ from the golden ones, and where."""
        golden, allowed = self.golden, Allowed()
        if golden.log in files:
            allowed.back = golden.may_be_back(files[golden.log])
        for number in golden.segments:
            path = segment_path(number)
            if path in files:
                self._allow(number, golden.files[path], files[path] or b"", allowed)
        return allowed

    def _allow(self, number: int, was: bytes, now: bytes, allowed: Allowed) -> None:
        """Live names of records of which a page changed may be lost.

        In a segment without a footer, what doesn't begin as a record does is taken for a hole that
        a crash left: nothing counts it.
        """
        whole = number in self.golden.sealed and was[-PAGE:] == now[len(was) - PAGE : len(was)]
        for page in range(len(was) // PAGE):
            piece = slice(page * PAGE, (page + 1) * PAGE)
            if was[piece] != now[piece]:
                hit = self.golden.record_at(number, page)
                allowed.lost |= hit
                if hit and not whole and not now[piece].startswith(MAGIC):
                    allowed.counted &= not was[piece].startswith(MAGIC)


@contextmanager
def bench(golden: Golden) -> Iterator[Bench]:
    """A bench in memory, without the collector at work, which would take a tenth of the time."""
    gc.collect()
    gc.disable()
    try:
        with small_segments(), scratch() as folder:
            made = Bench(golden, folder)
            try:
                yield made
            finally:
                made.device.close()
                shutil.rmtree(made.path)
    finally:
        gc.enable()


def flipped(data: bytes, offset: int, pattern: int) -> bytes:
    """The bytes with one of them xored."""
    return data[:offset] + bytes([data[offset] ^ pattern]) + data[offset + 1 :]
