"""A store as its files are now, for tools: read without a lock and without changing anything.

Invariants
  - files are opened read-only, without following links and where possible without touching their
    access times; nothing is made, locked or written;
  - what can't be believed is shown as such and never stops the rest: this must open what the store
    refuses;
  - a segment whose epoch moved on while it was read is `in flux`, not damaged.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.errors import FormatError, NotAStoreError
from flashkv.folder import SEGMENTS, SHARD, SUPERBLOCKS, manifest_name
from flashkv.index import Index
from flashkv.manifest_log import ManifestState, read_state
from flashkv.opening import READ_TRIES
from flashkv.recovery import matching_kills, segment_files, without_retired, without_void
from flashkv.superblock import Superblock

from .evidence import QUIET, read_any_log, stand_in
from .segment_view import (
    ReadFile,
    SegmentView,
    bound_by_footer,
    contents_of,
    decoded,
    read_whole,
    sealed,
    walk_segment,
)


class StoreView:
    """What the files of a store say at one time."""

    def __init__(self, path: Path, *, salvage: bool = False) -> None:
        """path: of the store, or of a shard in it. Raises NotAStoreError, FormatError, OSError.

        salvage: where the log that rules is lost, the newest other one is used, and footers tell
        what damaged segment headers don't: more than an open of the store looks for.
        """
        self.path = path
        self.folder = shard_folder(path)
        self.salvage = salvage
        self.superblocks: dict[str, Superblock | None] = {}
        self.superblock_faults: dict[str, str] = {}
        self.log_used: int | None = None  # generation of the log that the state is from
        self.block, self.state, self.manifest_found = self._read_log()
        self.dropped: list[NDArray[Any]] = []  # superseded blocks, fkv_dropped rows; by index()
        self.segments: dict[int, SegmentView] = {}
        self._index: Index | None = None
        self.namespace_ids: dict[bytes, int] = {}
        for number, segment_path in self._segment_files():
            self.segments[number] = self._load(number, segment_path)
        self._find_missing()
        self._name_open_segment()

    # ---- superblocks and manifest ----

    def _read_superblocks(self) -> Superblock | None:
        other: FormatError | None = None
        self.superblock_faults.clear()
        for name in SUPERBLOCKS:
            data = read_whole(self.folder / name)
            self.superblocks[name] = None
            if data is None:
                self.superblock_faults[name] = "missing or unreadable"
                continue
            try:
                block = Superblock.decode(data, name)
            except FormatError as error:
                other = error
                self.superblock_faults[name] = error.message
                continue
            self.superblocks[name] = block
            if block is None:
                self.superblock_faults[name] = "checksum or length is wrong"
        good = [block for block in self.superblocks.values() if block is not None]
        if not good and other is not None:
            raise other
        if self.salvage and len({block.store_uuid for block in good}) > 1:
            mine = stand_in(self.folder)
            good = [b for b in good if mine and b.store_uuid == mine.store_uuid] or good
        return max(good, key=lambda block: block.generation, default=None)

    def _block_of_segments(self) -> Superblock:
        """A stand-in for two lost superblocks, from the segments' headers and the logs."""
        block = stand_in(self.folder)
        if block is not None:
            return block
        if not any((self.folder / name).exists() for name in (*SUPERBLOCKS, SEGMENTS)):
            raise NotAStoreError(
                f"{self.path} holds no flashkv store", advice="give the folder of a store"
            )
        return Superblock(bytes(16), 0, 0, b"", 0, 0, 0)

    def _read_log(self) -> tuple[Superblock, ManifestState, bool]:
        """As opening.load_manifest, without refusals: a writer may begin a new log meanwhile."""
        for _ in range(READ_TRIES):
            block = self._read_superblocks() or self._block_of_segments()
            if any(self.superblocks.values()):  # a later log rules: see read_superblock()
                later = replace(block, manifest_generation=block.manifest_generation + 1)
                block = later if self._state_of(later)[1] else block
            state, found = self._state_of(block)
            if found:
                self.log_used = block.manifest_generation
                return block, state, True
            time.sleep(0.01)
        other = read_any_log(self.folder, block) if self.salvage else None
        if other is not None:
            state, self.log_used = other
        return block, state, False

    def _state_of(self, block: Superblock) -> tuple[ManifestState, bool]:
        try:
            return read_state(self.folder, block, QUIET)
        except OSError:  # a link or folder in its place, or no permission
            return ManifestState(), False

    @property
    def superblocks_lost(self) -> bool:
        """Neither is right: the store refuses to open."""
        return not any(block is not None for block in self.superblocks.values())

    @property
    def manifest_path(self) -> Path:
        """The log that rules."""
        return self.folder / manifest_name(self.block.manifest_generation)

    # ---- segments ----

    def _segment_files(self) -> list[tuple[int, Path]]:
        try:
            return segment_files(self.folder, QUIET)
        except OSError:
            return []

    def _load(self, number: int, path: Path) -> SegmentView:
        known = self.state.epochs.get(number, 0)
        freed = number in self.state.freed
        try:
            file = ReadFile(path)
        except OSError:
            return SegmentView(number, path, None, bytes(16), known, 0, False, state="missing")
        with file:
            header = decoded(file.pages(0, 1))
            size = self.block.segment_bytes or file.size
            segment = SegmentView(
                number, path, header, bytes(16), known, size // limits.PAGE_BYTES - 1, False
            )
            segment.file_bytes = file.size
            mine = header is not None and header.store_uuid == self.block.store_uuid
            believed = header if mine and header is not None and header.segment == number else None
            logged = known and not freed and number in self.state.uuids
            if logged and (believed is None or believed.epoch < known):
                segment.uuid, segment.by_log = self.state.uuids[number], True
                segment.counts = True
            elif believed is not None:
                segment.uuid, segment.epoch = believed.segment_uuid, believed.epoch
                segment.counts = believed.epoch > known or (believed.epoch == known and not freed)
                if believed.epoch > known:  # by the log it isn't there yet, or the log was lost
                    self.state.opened(number, believed.epoch, believed.segment_uuid)
            elif self.salvage and not self.manifest_found and not known:
                self._by_footer(segment, file)
            if segment.counts:
                self._fill(segment, file)
            if segment.by_log and not segment.counts and believed is not None:
                # The epoch was begun, nothing of it was written: what is there is the one before.
                segment.uuid, segment.epoch = believed.segment_uuid, believed.epoch
                segment.by_log = False
        return segment

    def _by_footer(self, segment: SegmentView, file: ReadFile) -> None:
        """What a footer says of itself, where neither header nor log tell uuid and epoch."""
        bound = bound_by_footer(segment, file)
        if bound is not None:
            segment.uuid, segment.epoch = bound
            segment.counts = segment.by_log = True
            self.state.opened(segment.number, segment.epoch, segment.uuid)

    def _fill(self, segment: SegmentView, file: ReadFile) -> None:
        """Contents by the directory, else by a walk; in flux where the epoch moves meanwhile."""
        rows = sealed(segment, file)
        segment.state = "sealed" if rows is not None else "closed"
        if rows is None:
            segment.walked = walk_segment(segment, file)
        segment.contents = rows if rows is not None else contents_of(segment.walked)
        if segment.by_log and rows is None and not segment.walked:
            segment.state, segment.counts = "free", False  # never begun: nothing lies there
        now = decoded(file.pages(0, 1))
        before = segment.header.epoch if segment.header is not None else None
        if (now.epoch if now is not None else None) != before:
            segment.state, segment.contents, segment.counts = "in flux", None, False

    def _find_missing(self) -> None:
        for number in set(self.state.epochs) - set(self.segments) - self.state.freed:
            path = self.folder / SEGMENTS / f"{number:08d}.seg"
            self.segments[number] = SegmentView(
                number, path, None, bytes(16), self.state.epochs[number], 0, False, state="missing"
            )
        self.segments = dict(sorted(self.segments.items()))

    def _name_open_segment(self) -> None:
        """The newest segment without a directory is the one that is filled."""
        bare = [segment for segment in self.segments.values() if segment.state == "closed"]
        bare = [segment for segment in bare if segment.header is not None]
        newest = max(bare, key=lambda s: s.header.first_sequence if s.header else 0, default=None)
        if newest is not None:
            newest.state = "open"

    # ---- what is alive ----

    def index(self) -> Index:
        """The index that an open of the store would build."""
        if self._index is not None:
            return self._index
        self._index = Index()
        for segment in self.segments.values():
            if segment.contents is None or not segment.counts:
                continue
            found = without_retired(segment.contents, self.state.retired)
            found = without_void(found, self.state.voids_of(segment.number))
            self._index.begin_segment(segment.number, segment.epoch)
            kills = self.state.kills_of(segment.number)
            kills = matching_kills(kills[kills["epoch"] == segment.epoch], found.records)
            ids = np.array([self._id_of(digest) for digest in found.namespaces], np.uint32)
            dropped = self._index.add(segment.number, found.records, found.blocks, ids, kills)
            if len(dropped):
                self.dropped.append(dropped)
        return self._index

    def _id_of(self, digest: bytes) -> int:
        return self.namespace_ids.setdefault(digest, len(self.namespace_ids))

    def live_blocks(self, segment: SegmentView, page: int, digests: list[bytes]) -> list[bool]:
        """Which blocks of the record at a page the index holds there. digests: of all of them."""
        if not digests:
            return []
        array = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, limits.DIGEST_BYTES)
        places = self.index().lookup(array.copy())
        here = (places["segment"] == segment.number) & (places["page"] == page)
        same = here & (places["ordinal"] == np.arange(len(digests)))
        return [bool(value) for value in same]

    def writer_seen(self) -> bool:
        """Whether a process that this one can see holds the shard's lock; takes none itself."""
        try:
            status = (self.folder / "lock").stat()
            locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
        return any("FLOCK" in line and f" {device}" in line for line in locks.splitlines())


def shard_folder(path: Path) -> Path:
    """The folder of the store's shard. Raises NotAStoreError."""
    if not path.exists():
        raise NotAStoreError(f"{path} does not exist", advice="give the folder of a store")
    if not path.is_dir():
        raise NotAStoreError(f"{path} is a file", advice="give the folder of a store")
    if (path / SHARD).is_dir():
        return path / SHARD
    if (path / SEGMENTS).is_dir() or any((path / name).exists() for name in SUPERBLOCKS):
        return path
    raise NotAStoreError(f"{path} holds no flashkv store", advice="give the folder of a store")
