"""Space: how many segments a store may have, where the next one comes from, and whose contents go
for it.

Invariants
  - segments, manifest and superblocks together stay within the capacity; what others keep in the
    folder counts too;
  - a new file is made only while the file system keeps its free floor;
  - a segment's space is used again only after its end, and the kills that its contents caused, are
    durable, its blocks are out of the index and no reader pins it; leased segments are left alone;
  - the simplest right order: a segment in which nothing lives goes first, then the oldest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv.background import Later
from flashkv.blockio import BlockIO
from flashkv.budget import Budget, disk_usage
from flashkv.errors import StoreError
from flashkv.filesystem import DISK, FileSystem
from flashkv.folder import segment_path
from flashkv.index import Index
from flashkv.manifest import Manifest, new_uuid
from flashkv.manifest_log import KILL
from flashkv.native import aligned_copy, lib
from flashkv.segments import FIRST_PAGE, NO_UUID, Segment, Segments, SegmentState, encode_header

PIN_WAIT_S: Final = 5.0
"""A read that pins a segment ends within milliseconds.

A device that hangs longer keeps its segment.
"""


class Space:
    """Gives segments to the writer. Calls are made under the store's writer lock."""

    def __init__(
        self,
        root: Path,
        budget: Budget,
        watermarks: tuple[float, float],
        segments: Segments,
        manifest: Manifest,
        index: Index,
        io: BlockIO,
        clock_ms: Callable[[], int],
        unless_leased: Callable[[int, Callable[[], int]], int | None],
        files: FileSystem = DISK,
    ) -> None:
        """root: the store's folder, of which others may use a part. unless_leased: see Leases."""
        self.budget = budget
        self._root = root
        self._files = files
        self.low_watermark, self.high_watermark = watermarks
        self.evicted_blocks = 0
        self.evicted_segments = 0
        self.floor_refusals = 0
        self.fallocate_refusals = 0
        self._segments = segments
        self._manifest = manifest
        self._index = index
        self._io = io
        self._clock_ms = clock_ms
        self._unless_leased = unless_leased
        self.before_freeing: Callable[[Collection[int]], None] = lambda _: None
        """Called with numbers of segments that are about to be freed; the writer's."""
        self._making: int | None = None  # see next_number
        self._made: Later[None] | None = None

    # ---- the next segment ----

    def take(
        self,
        next_sequence: int,
        kills: Callable[[], NDArray[Any]],
        seal: Callable[[], bool],
    ) -> Segment | None:
        """A segment that starts a new epoch, its header written; None where there is no space.

        kills(): rows that must be durable before anything is freed. seal(): finishes segments that
        are being sealed, which can be freed then; whether there were any. Where the log can't be
        written (on a disk that others filled) nothing is begun or freed: that is no space as well.
        """
        try:
            return self._take(next_sequence, kills, seal)
        except (StoreError, OSError):
            self.floor_refusals += 1
            return None

    def _take(
        self,
        next_sequence: int,
        kills: Callable[[], NDArray[Any]],
        seal: Callable[[], bool],
    ) -> Segment | None:
        self.shrink(kills)
        self.keep_watermark(kills)
        segment = self._free_file() or self._new_file()
        if segment is None and (self.reclaim(1, kills) or (seal() and self.reclaim(1, kills))):
            segment = self._free_file()
        return self._begin(segment, next_sequence) if segment is not None else None

    def _free_file(self) -> Segment | None:
        free = [s for s in self._segments.in_state(SegmentState.FREE) if s.has_file()]
        return next((segment for segment in free if self._reserve(segment)), None)

    def _reserve(self, segment: Segment) -> bool:
        """Gives the segment's file all of its space; a file that was found cut short lacks some."""
        files, size = self._files, self.budget.segment_bytes
        lacks = size - files.allocated_bytes(segment.fd)
        if lacks <= 0 and files.length_bytes(segment.fd) == size:
            return True  # on a full disk xfs refuses to reserve what is reserved
        if lacks > 0 and self._spare_bytes() < lacks:
            self.floor_refusals += 1
            return False
        try:
            if not files.preallocate(segment.fd, size):
                self.fallocate_refusals += 1
        except OSError:  # the disk filled meanwhile: as if there were no room
            self.floor_refusals += 1
            return False
        return True

    def _new_file(self) -> Segment | None:
        if self._segments.count_files() >= self.budget.segments_max:
            return None
        if self.next_number is None and self._spare_bytes() < self.budget.segment_bytes:
            self.floor_refusals += 1
            return None
        number, made = self._make_next()
        try:
            made.result()
            segment = self._segments.get(number) or self._segments.add(number)
            self._segments.open_file(segment, writable=True)
        except OSError:
            self.close()
            self.floor_refusals += 1
            return None
        if not self._reserve(segment):
            self._segments.close_file(segment)
            self.close()
            return None
        self._making = self._made = None
        segment.uuid = NO_UUID
        return segment

    def prepare(self) -> None:
        """Begins to make the next segment's file, if one will be needed and there is room for it.

        A file system may take long over it while it is written to.
        """
        files = self._segments.count_files()
        if self.next_number is not None or files >= self.budget.segments_max:
            return
        free = any(s.has_file() for s in self._segments.in_state(SegmentState.FREE))
        with suppress(OSError):  # the file system doesn't tell: once the file is needed
            if not free and self._spare_bytes() >= self.budget.segment_bytes:
                self._make_next()

    @property
    def next_number(self) -> int | None:
        """The number of the file that is being made, until a segment has it.

        It counts as soon as it may be there, whatever signal cuts the making of it.
        """
        segment = None if self._making is None else self._segments.get(self._making)
        return None if segment is not None and segment.has_file() else self._making

    def _make_next(self) -> tuple[int, Later[None]]:
        """The file that is being made; begins one where there is none."""
        number, made = self.next_number, self._made
        if number is None:
            number, made = self._unused_number(), None
        if made is None:
            self._making, self._made = number, None
            made = self._made = self._io.later(lambda: self._make(number))
        return number, made

    def _make(self, number: int) -> None:
        """On any thread. Raises OSError."""
        path = self._manifest.create_segment(number)
        fd = self._files.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            with suppress(OSError):  # is tried again once it is needed
                self._files.preallocate(fd, self.budget.segment_bytes)
        finally:
            self._files.close(fd)

    def close(self) -> None:
        """Gives up the file that is being made; one that can't be removed counts on."""
        number = self.next_number
        if number is None:
            return
        if self._made is not None:
            with suppress(OSError):
                self._made.result()
            self._made = None
        with suppress(OSError):
            self._manifest.remove_segment(number)
            self._making = None

    def _unused_number(self) -> int:
        """The lowest number without a file; nothing else has its name, be it a link or a folder."""
        for number in count():
            segment = self._segments.get(number)
            if segment is not None and (segment.has_file() or segment.state != SegmentState.FREE):
                continue
            if not self._files.exists(segment_path(self._segments.folder, number)):
                return number
        raise AssertionError

    def _begin(self, segment: Segment, next_sequence: int) -> Segment | None:
        reused = segment.uuid != NO_UUID
        if not reused:
            segment.uuid = new_uuid()
        epoch = self._manifest.state.epochs.get(segment.number, 0)
        segment.epoch = max(epoch, segment.epoch) + 1
        segment.first_sequence = next_sequence
        segment.next_page = FIRST_PAGE
        segment.created_ms = self._clock_ms()
        segment.touched = False
        segment.clear_rows()
        segment.namespaces = []
        self._manifest.segment_opened(segment.number, segment.epoch, segment.uuid, sync=reused)
        lib.fkv_header_cache_drop(self._io.engine, segment.number)
        page = encode_header(segment, self._segments.store_uuid, self._segments.segment_bytes)
        if self._io.write(segment.fd, aligned_copy(page), 0) != 0:
            return None
        segment.unsynced = True
        self._index.begin_segment(segment.number, segment.epoch)
        segment.state = SegmentState.OPEN
        self._segments.publish(segment)
        return segment

    # ---- making room ----

    def keep_watermark(self, kills: Callable[[], NDArray[Any]]) -> None:
        """Frees segments from the high watermark down to the low one."""
        used = sum(segment.state is not SegmentState.FREE for segment in self._segments)
        room = self._room()
        if used >= self.high_watermark * room:
            self.reclaim(max(0, int(np.ceil(used - self.low_watermark * room))), kills)

    def _room(self) -> int:
        """Segments that can be had: the capacity's, or what the free floor leaves."""
        files = self._segments.count_files() + (self.next_number is not None)
        more = self._spare_bytes() // self.budget.segment_bytes
        return max(1, min(self.budget.segments_max, files + more))

    def _spare_bytes(self) -> int:
        """What the file system has above the free floor."""
        return max(0, self._files.free_bytes(self._segments.folder) - self.budget.floor_bytes)

    def reclaim(self, wanted: int, kills: Callable[[], NDArray[Any]]) -> int:
        """Drops the records of up to `wanted` segments; returns how many became free."""
        dropped: dict[int, int] = {}  # a pinned one's end is logged too: its blocks stay away
        freed: list[int] = []
        candidates = self._segments.in_state(SegmentState.SEALED, SegmentState.CLOSED)
        usage = self._index.usage([segment.number for segment in candidates])
        order = np.lexsort((np.arange(len(candidates)), usage["live_blocks"] > 0))
        try:
            for row in order.tolist():
                if len(freed) == wanted:
                    break
                segment = candidates[row]
                dropped[segment.number] = segment.epoch
                drop = partial(self._index.drop_segment, segment.number)
                blocks = self._unless_leased(segment.number, drop)
                if blocks is None:
                    del dropped[segment.number]
                    continue
                self.evicted_blocks += blocks
                if self._wait_unpinned(segment, patient=not freed):
                    freed.append(segment.number)
        finally:  # an interrupt too: what left the index must not come back
            if dropped:
                self.before_freeing(dropped)
                self._manifest.segments_freed(dropped, kills())
        self.evicted_segments += len(freed)
        for number in freed:
            self._segments[number].state = SegmentState.FREE
            lib.fkv_header_cache_drop(self._io.engine, number)
        return len(freed)

    def _wait_unpinned(self, segment: Segment, *, patient: bool) -> bool:
        """No new pins can come: the segment's blocks are out of the index."""
        end = time.monotonic() + (PIN_WAIT_S if patient else 0.0)
        while self._index.usage([segment.number])["pins"][0]:
            if time.monotonic() >= end:
                return False
            time.sleep(0.0005)
        return True

    def shrink(self, kills: Callable[[], NDArray[Any]], log_bytes: int = 0) -> None:
        """Removes files until the capacity holds.

        After an open with a smaller one, after others took room in the folder, and where the log is
        to grow by log_bytes beyond metadata's share.
        """
        self.budget = replace(
            self.budget,
            foreign_bytes=disk_usage(self._root, self._segments.folder),
            metadata_bytes=self._manifest.bytes_max(log_bytes),
        )
        if self._segments.count_files() >= self.budget.segments_max:
            self.close()
        while (over := self._segments.count_files() - self.budget.segments_max) > 0:
            files = [s for s in self._segments.in_state(SegmentState.FREE) if s.has_file()]
            if not files and not self.reclaim(over, kills):
                return
            for segment in files[:over]:
                try:
                    self._manifest.remove_segment(segment.number)
                except OSError:  # another time
                    return
                self._segments.close_file(segment)
                self._segments.publish(segment)

    def end(self, segment: Segment) -> int:
        """Drops all that the segment holds, for good; returns how many blocks. Raises StoreError.

        Its space is free.
        """
        blocks = self._index.drop_segment(segment.number)
        self._manifest.segments_freed({segment.number: segment.epoch}, np.zeros(0, KILL))
        segment.state = SegmentState.FREE
        lib.fkv_header_cache_drop(self._io.engine, segment.number)
        return blocks
