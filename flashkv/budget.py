"""How many bytes a store may take, and how large its segments are.

Invariants
  - segments, manifest and superblocks together stay within the capacity; what others keep in the
    folder counts too;
  - a capacity that can't hold the least number of segments is refused, with what is needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from flashkv import limits
from flashkv.errors import CapacityError
from flashkv.filesystem import DISK, FileSystem
from flashkv.folder import is_own_file, reserve_of
from flashkv.geometry import DType, KVGeometry
from flashkv.openfiles import open_files_max


@dataclass(frozen=True)
class Budget:
    """Bytes that a store may take. reserve_bytes: for all that isn't segments.

    metadata_bytes: what manifest logs and superblocks can take at present. files_max: segment files
    that may be open.
    """

    capacity_bytes: int
    segment_bytes: int
    floor_bytes: int
    foreign_bytes: int = 0
    metadata_bytes: int = 0
    files_max: int = limits.SEGMENT_COUNT_MAX

    @property
    def reserve_bytes(self) -> int:
        """Manifest logs (three at a time, at checkpoints), superblocks, folders."""
        return max(self.metadata_bytes, reserve_of(self.capacity_bytes))

    @property
    def segments_max(self) -> int:
        """Segment files that fit."""
        free = self.capacity_bytes - self.reserve_bytes - self.foreign_bytes
        return max(0, min(free // self.segment_bytes, self.files_max, limits.SEGMENT_COUNT_MAX))


def choose_segment_bytes(
    capacity_bytes: int, geometry: KVGeometry, asked: int | None, tokens: int
) -> int:
    """Size of a new store's segments. tokens: of the largest record. Raises CapacityError."""
    usable = capacity_bytes - reserve_of(capacity_bytes)
    if asked is not None:
        size = asked
    else:
        opaque = [
            plane
            for group in geometry.groups
            for plane in group.planes
            if plane.dtype is DType.OPAQUE
        ]
        largest = max(
            geometry.token_bytes(index) * (1 if opaque else tokens)
            for index in range(len(geometry.groups))
        )
        # A header and a directory ride on top of a record's own bytes.
        wanted = limits.RECORDS_PER_SEGMENT_MIN * (largest + largest // 32 + 4 * limits.PAGE_BYTES)
        size = max(capacity_bytes // limits.SEGMENTS_PER_CAPACITY, wanted, limits.SEGMENT_BYTES_MIN)
        # The growth schedule stops at a quarter of a segment; a handful of huge segments would cost
        # more. An opaque block can't be cut: without room for it nothing could ever be stored.
        least = wanted if opaque else limits.SEGMENT_BYTES_MIN
        size = min(size, max(usable // 8, least), limits.SEGMENT_BYTES_MAX)
        size = -(-size // limits.MIB) * limits.MIB
    if usable // size < limits.SEGMENT_COUNT_MIN:
        need = limits.SEGMENT_COUNT_MIN * size
        raise CapacityError(
            f"the capacity is too small for {limits.SEGMENT_COUNT_MIN} segments of {size} bytes",
            value=f"{capacity_bytes} bytes",
            limit=f"at least {need + max(limits.MIB, need // 63)} bytes",
            advice="raise capacity, or lower Options.segment_bytes",
        )
    return size


def default_capacity(path: Path, files: FileSystem = DISK) -> int:
    """Half of what the file system has free: a cache never fills a disk by default.

    Raises CapacityError where the file system doesn't tell.
    """
    if not files.size_bytes(path):
        raise CapacityError(
            f"the file system of {path} doesn't tell how much is free", advice="give a capacity"
        )
    return files.free_bytes(path) // 2


def default_floor(path: Path, files: FileSystem = DISK) -> int:
    """What stays free on the file system unless the options say otherwise."""
    return min(limits.FREE_FLOOR_BYTES, int(files.size_bytes(path) * limits.FREE_FLOOR_FRACTION))


def make_budget(
    path: Path,
    own: Path,
    capacity_bytes: int,
    segment_bytes: int,
    floor: int | str | None,
    files: FileSystem = DISK,
) -> Budget:
    """The budget of a store at `path` whose files lie in `own`. Raises CapacityError."""
    budget = Budget(
        capacity_bytes,
        segment_bytes,
        default_floor(path, files) if floor is None else int(floor),
        disk_usage(path, own),
    )
    budget = replace(budget, files_max=open_files_max(budget.segments_max))
    least = limits.SEGMENT_COUNT_MIN
    if budget.segments_max < least:
        need = least * segment_bytes + budget.reserve_bytes + budget.foreign_bytes
        raise CapacityError(
            f"the capacity is too small for {least} segments of {segment_bytes} bytes",
            value=f"{capacity_bytes} bytes, of which others take {budget.foreign_bytes}",
            limit=f"at least {need} bytes",
        )
    return budget


def disk_usage(root: Path, own: Path | None = None) -> int:
    """Bytes on disk below `root`, as du counts them.

    own: a shard's folder; then without the shard's own files.
    """
    return _usage(os.fspath(root), None if own is None else os.fspath(own))


def _usage(folder: str, own: str | None) -> int:
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    total += _usage(entry.path, own)
                elif own is None or not is_own_file(own, folder, entry.name):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:  # it went meanwhile, or others keep it for themselves
        pass
    return total
