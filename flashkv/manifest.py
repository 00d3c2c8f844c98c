"""The manifest: a shard's small log of segments, kills and namespaces, and the superblocks that
point to it.

Invariants
  - only this module renames, unlinks and syncs folders;
  - a superblock is written only after the manifest that it names, and that file's folder entry, are
    durable; the other superblock stays as it was, so that a torn write leaves the state before;
  - an entry counts once all entries before it count: the log ends at the first one whose checksum
    or ordinal is wrong;
  - a failed write or sync of the log is never repeated in place: the state goes into a new log, or
    the shard stops accepting writes.
"""

from __future__ import annotations

import os
import re
import struct
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.errors import FormatError, NotAStoreError, StoreError, SuperblockError
from flashkv.native import dtype_of, ffi, lib

SUPERBLOCKS: Final = ("superblock.a", "superblock.b")
SUPER_MAGIC: Final = b"FKVSUPER"
SEGMENTS: Final = "segments"
NEW_LOG: Final = "manifest.new"
KILL: Final = dtype_of("fkv_manifest_kill")
_ENTRY_BYTES: Final = int(ffi.sizeof("fkv_manifest_entry"))
_CRC_FIELD: Final = struct.Struct("<I")
_SHARD_FILE: Final = re.compile(r"lock|superblock\.[ab]|manifest-\d+\.log|manifest\.new")
_SEGMENT_FILE: Final = re.compile(r"\d{8}\.seg")


def reserve_of(capacity_bytes: int) -> int:
    """Metadata's share of a capacity: a 64th, within 1 and 64 MiB."""
    return max(limits.MIB, min(capacity_bytes // 64, 64 * limits.MIB))


def crc32c(crc: int, data: bytes) -> int:
    """CRC-32C of the data before (crc) and `data`."""
    return int(lib.fkv_crc32c(crc, data, len(data)))


def new_uuid() -> bytes:
    """16 random bytes: the names of stores and segments."""
    return uuid.uuid4().bytes


@dataclass(frozen=True)
class Superblock:
    """What never changes about a shard, and which manifest rules."""

    store_uuid: bytes
    segment_bytes: int
    capacity_bytes: int
    geometry_json: bytes
    created_ms: int
    generation: int = 0
    manifest_generation: int = 0

    def encode(self) -> bytes:
        """The page on flash."""
        row = ffi.new("fkv_superblock *")
        row.magic = SUPER_MAGIC
        row.version = lib.FKV_FORMAT_VERSION
        row.generation = self.generation
        row.store_uuid = self.store_uuid
        row.page_shift = lib.FKV_PAGE_SHIFT
        row.checksum_id = lib.FKV_CHECKSUM_CRC32C
        row.segment_bytes = self.segment_bytes
        row.manifest_generation = self.manifest_generation
        row.created_ms = self.created_ms
        row.capacity_bytes = self.capacity_bytes
        row.geometry_bytes = len(self.geometry_json)
        page = (bytes(ffi.buffer(row)) + self.geometry_json).ljust(limits.PAGE_BYTES, b"\0")
        return _with_crc(page)

    @classmethod
    def decode(cls, page: bytes, name: str) -> Superblock | None:
        """None where the page is damaged.

        Raises FormatError for a format that this build doesn't know.
        """
        size = int(ffi.sizeof("fkv_superblock"))
        if len(page) != limits.PAGE_BYTES or page[:8] != SUPER_MAGIC or not _crc_right(page):
            return None
        row = ffi.new("fkv_superblock *")
        ffi.memmove(row, page, size)
        if row.version != lib.FKV_FORMAT_VERSION:
            raise FormatError(
                f"{name} is of another format version",
                value=row.version,
                limit=f"version {lib.FKV_FORMAT_VERSION}",
                advice="use a new folder: version 0 is not kept between builds",
            )
        unknown = row.features_incompatible or row.features_read_only or row.reserved
        if (
            unknown
            or row.page_shift != lib.FKV_PAGE_SHIFT
            or row.checksum_id != lib.FKV_CHECKSUM_CRC32C
        ):
            raise FormatError(f"{name} uses a feature that this build lacks", value=f"{unknown:#x}")
        if size + row.geometry_bytes > limits.PAGE_BYTES:
            return None
        return cls(
            store_uuid=bytes(row.store_uuid),
            segment_bytes=int(row.segment_bytes),
            capacity_bytes=int(row.capacity_bytes),
            geometry_json=page[size : size + row.geometry_bytes],
            created_ms=int(row.created_ms),
            generation=int(row.generation),
            manifest_generation=int(row.manifest_generation),
        )


@dataclass
class ManifestState:
    """What the log says, entry by entry."""

    next_sequence: int = 1
    epochs: dict[int, int] = field(default_factory=dict)  # segment -> epoch begun last
    freed: set[int] = field(default_factory=set)  # segments whose last epoch is dead
    uuids: dict[int, bytes] = field(default_factory=dict)
    kills: dict[int, list[NDArray[Any]]] = field(
        default_factory=dict
    )  # segment -> rows of its epoch
    namespaces: dict[bytes, bytes] = field(
        default_factory=dict
    )  # digest -> readable identity, JSON
    retired: dict[bytes, int] = field(default_factory=dict)  # digest -> last dead sequence

    def opened(self, segment: int, epoch: int, segment_uuid: bytes) -> None:
        """The segment starts an epoch: what was said of the one before is void."""
        self.epochs[segment] = epoch
        self.uuids[segment] = segment_uuid
        self.freed.discard(segment)
        self.kills.pop(segment, None)

    def free(self, segment: int, epoch: int) -> None:
        """All of that epoch is dead."""
        if self.epochs.get(segment, epoch) == epoch:
            self.epochs[segment] = epoch
            self.freed.add(segment)
            self.kills.pop(segment, None)

    def add_kills(self, rows: NDArray[Any]) -> None:
        """Keeps the rows that name a segment's present epoch."""
        for segment in np.unique(rows["segment"]).tolist():
            mine = rows[
                (rows["segment"] == segment) & (rows["epoch"] == self.epochs.get(segment, -1))
            ]
            if len(mine) and segment not in self.freed:
                self.kills.setdefault(segment, []).append(mine)

    def kills_of(self, segment: int) -> NDArray[Any]:
        """Kill rows of the segment's present epoch."""
        rows = self.kills.get(segment)
        return np.concatenate(rows) if rows else np.zeros(0, KILL)


class Manifest:
    """The log that is open for writing. Calls are made under the store's writer lock."""

    def __init__(self, folder: Path, superblock: Superblock, state: ManifestState) -> None:
        self.folder = folder
        self.superblock = superblock
        self.state = state
        self.bytes_written = 0
        self._fd = -1
        self._ordinal = 0
        self._length = 0
        self._checkpoint_length = 0
        self._length_before = 0  # of the log before, which is kept
        self._length_max = min(4 * limits.MIB, reserve_of(superblock.capacity_bytes) // 8)
        self._uncertain = False

    # ---- creation ----

    @classmethod
    def create(cls, folder: Path, superblock: Superblock) -> Manifest:
        """A new shard in an empty folder; durable on return."""
        (folder / SEGMENTS).mkdir()
        manifest = cls(folder, superblock, ManifestState())
        manifest.checkpoint()
        manifest.checkpoint()  # the second one writes the other superblock
        sync_folder(folder.parent)
        sync_folder(folder.parent.parent)
        return manifest

    # ---- entries ----

    def segment_opened(
        self, segment: int, epoch: int, segment_uuid: bytes, *, sync: bool = True
    ) -> None:
        """The segment's space is used again from here on."""
        self.state.opened(segment, epoch, segment_uuid)
        self._append(
            [(lib.FKV_MANIFEST_OPENED, _segment_row(segment, epoch, segment_uuid))], sync=sync
        )

    def segments_freed(self, epochs: dict[int, int], kills: NDArray[Any]) -> None:
        """The kills that these segments' contents caused, then their end, in one durable write."""
        entries = _kill_entries(kills)
        self.state.add_kills(kills)
        for segment, epoch in epochs.items():
            entries.append((lib.FKV_MANIFEST_FREED, _segment_row(segment, epoch, b"")))
            self.state.free(segment, epoch)
        self._append(entries, sync=True)

    def kill(self, kills: NDArray[Any], *, sync: bool) -> None:
        """Blocks that must never come back."""
        kills = kills[~np.isin(kills["segment"], list(self.state.freed))]
        if len(kills):
            self.state.add_kills(kills)
            self._append(_kill_entries(kills), sync=sync)

    def bytes_max(self, more_bytes: int = 0) -> int:
        """Most that logs and superblocks take on disk before the next entry but one.

        The log before, the present one with what is to come, and a checkpoint of both.
        """
        length = self._length + more_bytes
        return self._length_before + 2 * length + 16 * limits.PAGE_BYTES

    def namespace_added(self, digest: bytes, identity_json: bytes) -> None:
        """Readable identity of a namespace, before its first record."""
        self.state.namespaces[digest] = identity_json
        self._append([(lib.FKV_MANIFEST_NAMESPACE, digest + identity_json)], sync=True)

    def namespace_retired(self, digest: bytes, last_sequence: int) -> None:
        """All records of the namespace up to this sequence are dead."""
        self.state.retired[digest] = last_sequence
        self._append([(lib.FKV_MANIFEST_RETIRED, _retired_row(digest, last_sequence))], sync=True)

    def _append(self, entries: list[tuple[int, bytes]], *, sync: bool) -> None:
        data = b"".join(self._encode(kind, payload) for kind, payload in entries)
        if not data:
            return
        long = self._length > max(self._length_max, 2 * self._checkpoint_length)
        if long or self._uncertain:
            self.checkpoint()  # the state has these entries already
            return
        try:
            _write_all(self._fd, data)
            if sync:
                os.fdatasync(self._fd)
        except OSError:
            self.checkpoint()  # never the same file again; raises if that fails as well
            return
        self._length += len(data)
        self.bytes_written += len(data)

    def _encode(self, kind: int, payload: bytes) -> bytes:
        entry = _encode_entry(kind, payload, self._ordinal, self.superblock.store_uuid)
        self._ordinal += 1
        return entry

    # ---- a new log ----

    def checkpoint(self) -> None:
        """Writes the state into a log of its own and lets a superblock point to it.

        Raises StoreError where the folder can't be written. Which log rules on flash is uncertain
        then, so nothing is appended to either: the next entry tries again.
        """
        block = self.superblock
        generation = block.manifest_generation + 1
        path = self.folder / manifest_name(generation)
        self._ordinal = 0
        data = b"".join(
            self._encode(kind, payload) for kind, payload in self._state_entries(generation)
        )
        new = self.folder / NEW_LOG
        self._uncertain = True
        try:
            fd = os.open(
                new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
            try:
                _write_all(fd, data)
                os.fsync(fd)
                new.rename(path)  # a log of this name, of a try that failed, was whole as well
                sync_folder(self.folder)
                self._point_to(generation)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            raise StoreError(f"can't write the manifest {path.name}: {error}") from error
        self._uncertain = False
        self.close()
        self._fd = fd
        self._length_before = self._length
        self._length = self._checkpoint_length = len(data)
        self.bytes_written += len(data) + limits.PAGE_BYTES
        self._remove_old(generation)

    def _point_to(self, generation: int) -> None:
        block = self.superblock
        new = Superblock(
            **{
                **block.__dict__,
                "generation": block.generation + 1,
                "manifest_generation": generation,
            }
        )
        path = self.folder / SUPERBLOCKS[new.generation % 2]
        existed = path.exists()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            _write_all(fd, new.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        if not existed:
            sync_folder(self.folder)
        self.superblock = new

    def _state_entries(self, generation: int) -> Iterable[tuple[int, bytes]]:
        state = self.state
        begin = ffi.new("fkv_manifest_begin *")
        begin.store_uuid = self.superblock.store_uuid
        begin.generation = generation
        begin.next_sequence = state.next_sequence
        yield lib.FKV_MANIFEST_BEGIN, bytes(ffi.buffer(begin))
        for segment, epoch in sorted(state.epochs.items()):
            row = _segment_row(segment, epoch, state.uuids.get(segment, b""))
            yield lib.FKV_MANIFEST_OPENED, row
            if segment in state.freed:
                yield lib.FKV_MANIFEST_FREED, row
        for segment in sorted(state.kills):
            yield from _kill_entries(state.kills_of(segment))
        for digest, text in state.namespaces.items():
            yield lib.FKV_MANIFEST_NAMESPACE, digest + text
        for digest, last_sequence in state.retired.items():
            yield lib.FKV_MANIFEST_RETIRED, _retired_row(digest, last_sequence)

    def _remove_old(self, generation: int) -> None:
        """Logs that no superblock needs: the one before stays until the next checkpoint."""
        for path in self.folder.glob("manifest-*.log"):
            if path.name not in (manifest_name(generation), manifest_name(generation - 1)):
                path.unlink(missing_ok=True)

    # ---- segment files ----

    def create_segment(self, segment: int) -> Path:
        """An empty file for a segment, its folder entry durable."""
        path = segment_path(self.folder, segment)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        os.close(fd)
        sync_folder(path.parent)
        return path

    def remove_segment(self, segment: int) -> None:
        """The file goes.

        Its last epoch stays known, so that a file of that name never looks new.
        """
        segment_path(self.folder, segment).unlink(missing_ok=True)
        sync_folder(self.folder / SEGMENTS)

    def close(self) -> None:
        """Closes the file; what was synced is durable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ---- reading
# ---------------------------------------------------------------------------------------


def segment_path(folder: Path, segment: int) -> Path:
    """The file of a segment."""
    return folder / SEGMENTS / f"{segment:08d}.seg"


def is_own_file(shard: Path, folder: Path, name: str) -> bool:
    """Whether a file of this name is the shard's own; others may keep files there too."""
    if folder == shard / SEGMENTS:
        return _SEGMENT_FILE.fullmatch(name) is not None
    return folder == shard and _SHARD_FILE.fullmatch(name) is not None


def manifest_name(generation: int) -> str:
    """The file name of a log."""
    return f"manifest-{generation:08d}.log"


def read_superblock(folder: Path) -> Superblock:
    """The ruling superblock. Raises NotAStoreError, FormatError, SuperblockError."""
    found: list[Superblock] = []
    present = 0
    for name in SUPERBLOCKS:
        path = folder / name
        if not path.is_file():
            continue
        present += 1
        block = Superblock.decode(path.read_bytes(), str(path))
        if block is not None:
            found.append(block)
    if found:
        block = max(found, key=lambda block: block.generation)
        return block if len(found) == len(SUPERBLOCKS) else _with_last_log(folder, block)
    if not present and not (folder / SEGMENTS).exists():
        raise NotAStoreError(
            f"{folder} holds no superblock", advice="give the folder of a flashkv store"
        )
    raise SuperblockError(f"both superblocks of {folder} are damaged or missing")


def _with_last_log(folder: Path, block: Superblock) -> Superblock:
    """The block, or where a log follows its own, with that log.

    The other superblock is lost. If it was the ruling one, it named a log that is whole; without
    that log deleted blocks would come back.
    """
    later = replace(block, manifest_generation=block.manifest_generation + 1)
    return later if read_state(folder, later)[1] else block


def read_state(folder: Path, superblock: Superblock) -> tuple[ManifestState, bool]:
    """The state that the log gives, and whether the log was there and began rightly.

    A log that ends in garbage ends there; a log that is lost gives an empty state (False).
    """
    state = ManifestState()
    try:
        data = (folder / manifest_name(superblock.manifest_generation)).read_bytes()
    except OSError:
        return state, False
    began = False
    for kind, payload in _entries(data, superblock.store_uuid):
        if kind == lib.FKV_MANIFEST_BEGIN:
            begin = ffi.from_buffer("fkv_manifest_begin *", payload)
            began = begin.generation == superblock.manifest_generation
            state.next_sequence = int(begin.next_sequence)
        if not began:
            break
        _apply(state, kind, payload)
    return state, began


def _apply(state: ManifestState, kind: int, payload: bytes) -> None:
    if kind in (lib.FKV_MANIFEST_OPENED, lib.FKV_MANIFEST_FREED):
        row = ffi.from_buffer("fkv_manifest_segment *", payload)
        if kind == lib.FKV_MANIFEST_OPENED:
            state.opened(int(row.segment), int(row.epoch), bytes(row.segment_uuid))
        else:
            state.free(int(row.segment), int(row.epoch))
    elif kind == lib.FKV_MANIFEST_KILL:
        state.add_kills(np.frombuffer(payload, KILL).copy())
    elif kind == lib.FKV_MANIFEST_NAMESPACE:
        state.namespaces[payload[:32]] = payload[32:]
    elif kind == lib.FKV_MANIFEST_RETIRED:
        retired = ffi.from_buffer("fkv_manifest_retired *", payload)
        state.retired[bytes(retired.namespace_digest)] = int(retired.last_sequence)


def _entries(data: bytes, store_uuid: bytes) -> Iterable[tuple[int, bytes]]:
    at = ordinal = 0
    while at + _ENTRY_BYTES <= len(data):
        entry = ffi.from_buffer("fkv_manifest_entry *", data[at : at + _ENTRY_BYTES])
        end = at + _ENTRY_BYTES + entry.length_bytes
        if end > len(data) or entry.ordinal != ordinal:
            return
        payload = data[at + _ENTRY_BYTES : end]
        if crc32c(crc32c(0, store_uuid), data[at + 4 : end]) != entry.crc:
            return
        yield int(entry.type), payload
        at += _ENTRY_BYTES + (entry.length_bytes + 7 & ~7)
        ordinal += 1


def _encode_entry(kind: int, payload: bytes, ordinal: int, store_uuid: bytes) -> bytes:
    entry = ffi.new("fkv_manifest_entry *")
    entry.type = kind
    entry.length_bytes = len(payload)
    entry.ordinal = ordinal
    body = bytes(ffi.buffer(entry))[4:] + payload
    padding = b"\0" * (-len(payload) % 8)
    return _CRC_FIELD.pack(crc32c(crc32c(0, store_uuid), body)) + body + padding


def _segment_row(segment: int, epoch: int, segment_uuid: bytes) -> bytes:
    row = ffi.new("fkv_manifest_segment *")
    row.segment = segment
    row.epoch = epoch
    row.segment_uuid = segment_uuid.ljust(16, b"\0")
    return bytes(ffi.buffer(row))


def _retired_row(digest: bytes, last_sequence: int) -> bytes:
    row = ffi.new("fkv_manifest_retired *")
    row.namespace_digest = digest
    row.last_sequence = last_sequence
    return bytes(ffi.buffer(row))


def _kill_entries(kills: NDArray[Any]) -> list[tuple[int, bytes]]:
    """One entry for at most 4,096 kills, so that a torn one loses little."""
    return [
        (lib.FKV_MANIFEST_KILL, kills[at : at + 4096].tobytes())
        for at in range(0, len(kills), 4096)
    ]


def _with_crc(page: bytes) -> bytes:
    """The page with the CRC-32C of itself, that field being zero, at byte 8."""
    return page[:8] + _CRC_FIELD.pack(crc32c(0, page[:8] + b"\0\0\0\0" + page[12:])) + page[12:]


def _crc_right(page: bytes) -> bool:
    return _with_crc(page) == page


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
