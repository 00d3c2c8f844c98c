"""The manifest's log as bytes, and the state that it gives. Reads files, writes none.

Invariants
  - an entry counts where its checksum is right and its ordinal is not before its turn; what follows
    the last such entry is a torn tail;
  - behind damage nothing that was appended ends a segment: the kills that belong to its end may be
    what was lost; and a kill tells that its segment's epoch began, if that entry is what was lost;
  - kills are kept for a segment's present epoch only: a kill list dies with its segment.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.checksums import CRC_FIELD, crc32c
from flashkv.errors import NotAStoreError, SuperblockError
from flashkv.filesystem import DISK, FileSystem
from flashkv.folder import SEGMENTS, SUPERBLOCKS, manifest_name
from flashkv.native import dtype_of, ffi, lib, pointer
from flashkv.superblock import Superblock

KILL: Final = dtype_of("fkv_manifest_kill")
VOID: Final = dtype_of("fkv_manifest_void")
_LOST: Final = frozenset((errno.ENOENT, errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG))
_ROW: Final = dtype_of("fkv_manifest_row")
_ENTRY_BYTES_USUAL: Final = 48  # a head of 16 and the smallest payload


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
    voids: dict[int, NDArray[Any]] = field(default_factory=dict)  # segment -> rows of its epoch
    namespaces: dict[bytes, bytes] = field(
        default_factory=dict
    )  # digest -> readable identity, JSON
    retired: dict[bytes, int] = field(default_factory=dict)  # digest -> last dead sequence
    profiles: dict[bytes, bytes] = field(default_factory=dict)  # digest -> calibration, JSON
    damaged_entries: int = 0  # 1 where good entries lie behind damaged ones

    def opened(self, segment: int, epoch: int, segment_uuid: bytes) -> None:
        """The segment starts an epoch: what was said of the one before is void."""
        self.epochs[segment] = epoch
        self.uuids[segment] = segment_uuid
        self.freed.discard(segment)
        self.kills.pop(segment, None)
        self.voids.pop(segment, None)

    def free(self, segment: int, epoch: int) -> None:
        """All of that epoch is dead."""
        if self.epochs.get(segment, epoch) == epoch:
            self.epochs[segment] = epoch
            self.freed.add(segment)
            self.kills.pop(segment, None)
            self.voids.pop(segment, None)

    def add_kills(self, rows: NDArray[Any]) -> None:
        """Keeps the rows that name a segment's present epoch."""
        for segment, mine in self._present(rows):
            self.kills.setdefault(segment, []).append(mine)

    def add_voids(self, rows: NDArray[Any]) -> None:
        """Keeps the rows that name a segment's present epoch."""
        for segment, mine in self._present(rows):
            self.voids[segment] = np.concatenate([self.voids_of(segment), mine])

    def _present(self, rows: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        """(segment, its rows) of those that name a segment's present epoch."""
        for segment in np.unique(rows["segment"]).tolist():
            mine = rows[
                (rows["segment"] == segment) & (rows["epoch"] == self.epochs.get(segment, -1))
            ]
            if len(mine) and segment not in self.freed:
                yield segment, mine

    def voids_of(self, segment: int) -> NDArray[Any]:
        """Sequences that no record of the segment's present epoch may have: fkv_manifest_void[]."""
        return self.voids.get(segment, np.zeros(0, VOID))

    def infer_epochs(self, rows: NDArray[Any]) -> None:
        """Kills of a later epoch than is known: what began it was lost, they are not."""
        for segment in np.unique(rows["segment"]).tolist():
            epoch = int(rows["epoch"][rows["segment"] == segment].max())
            if epoch > self.epochs.get(segment, 0):
                segment_uuid = self.uuids.get(segment)
                self.opened(segment, epoch, segment_uuid or b"")
                if segment_uuid is None:
                    del self.uuids[segment]  # the segment's header tells

    def namespace_bytes(self) -> int:
        """Bytes that the namespaces take in a log, without their heads."""
        return sum(len(text) for text in self.namespaces.values())

    def add_profile(self, digest: bytes, text: bytes, room_bytes: int | None = None) -> None:
        """Keeps a profile; of too many, or too long ones, those go that were used first."""
        self.profiles.pop(digest, None)
        self.profiles[digest] = text
        while len(self.profiles) > limits.PROFILES_MAX or (
            room_bytes is not None and sum(map(len, self.profiles.values())) > room_bytes
        ):
            del self.profiles[next(iter(self.profiles))]

    def kills_of(self, segment: int) -> NDArray[Any]:
        """Kill rows of the segment's present epoch."""
        rows = self.kills.get(segment)
        return np.concatenate(rows) if rows else np.zeros(0, KILL)


# ---- reading


def whole_superblocks(folder: Path, files: FileSystem = DISK) -> tuple[list[Superblock], int]:
    """(those that can be believed, how many files there are). Raises FormatError, OSError."""
    found: list[Superblock] = []
    present = 0
    for name in SUPERBLOCKS:
        path = folder / name
        if not files.is_file(path):
            continue
        present += 1
        data = _read(files, path)
        block = None if data is None else Superblock.decode(data, str(path))
        if block is not None:
            found.append(block)
    return found, present


def read_superblock(folder: Path, files: FileSystem = DISK) -> Superblock:
    """The ruling superblock. Raises NotAStoreError, FormatError, SuperblockError."""
    found, present = whole_superblocks(folder, files)
    if found:
        return _with_last_log(folder, max(found, key=lambda block: block.generation), files)
    if not present and not files.exists(folder / SEGMENTS):
        raise NotAStoreError(
            f"{folder} holds no superblock", advice="give the folder of a flashkv store"
        )
    store = shlex.quote(str(folder.parents[1]))
    raise SuperblockError(
        f"both superblocks of {folder} are damaged or missing",
        advice=f"the segments tell what they said: flashkv-fsck --repair {store}",
    )


def _read(files: FileSystem, path: Path) -> bytes | None:
    """A file's bytes; None where it is gone or the device can't read it.

    Raises OSError for what is not the file's fault: it must not pass for a loss.
    """
    try:
        return files.read(path)
    except OSError as error:
        if error.errno in _LOST:
            return None
        raise


def _with_last_log(folder: Path, block: Superblock, files: FileSystem) -> Superblock:
    """The block, or where a log follows its own, with that log.

    A log takes its name once it is whole, and a superblock names it next: if that write was lost,
    or the page is damaged, deleted blocks would come back without the log. After a crash in
    between both logs say the same: nothing is appended to the one before any more.
    """
    later = replace(block, manifest_generation=block.manifest_generation + 1)
    return later if read_state(folder, later, files)[1] else block


def read_state(
    folder: Path, superblock: Superblock, files: FileSystem = DISK
) -> tuple[ManifestState, bool]:
    """The state that the log gives, and whether the log was there and began rightly.

    A log that ends in garbage ends there; a log that is lost gives an empty state (False), one
    whose beginning is damaged the state of what is behind it (False too).
    """
    state = ManifestState()
    data = _read(files, folder / manifest_name(superblock.manifest_generation))
    if data is None:
        return state, False
    began = False
    for kind, payload, behind_damage in _entries(data, superblock.store_uuid):
        if kind == lib.FKV_MANIFEST_BEGIN:
            begin = ffi.from_buffer("fkv_manifest_begin *", payload)
            began = begin.generation == superblock.manifest_generation
            state.next_sequence = int(begin.next_sequence)
            if not began:
                break
        elif not (began or behind_damage):
            break
        state.damaged_entries += behind_damage and not state.damaged_entries
        _apply(state, kind, payload, behind_damage=behind_damage)
    return state, began


def _apply(state: ManifestState, kind: int, payload: bytes, *, behind_damage: bool) -> None:
    if kind in (lib.FKV_MANIFEST_OPENED, lib.FKV_MANIFEST_FREED):
        row = ffi.from_buffer("fkv_manifest_segment *", payload)
        if kind == lib.FKV_MANIFEST_OPENED:
            state.opened(int(row.segment), int(row.epoch), bytes(row.segment_uuid))
        # The kills that were appended before an end may be what was damaged: a segment that lives
        # on has the newer versions, one that is gone leaves the older ones. A compacted log, whose
        # ends have a uuid, has its kills behind all ends.
        elif not behind_damage or any(bytes(row.segment_uuid)):
            state.free(int(row.segment), int(row.epoch))
    elif kind == lib.FKV_MANIFEST_KILL:
        rows = np.frombuffer(payload, KILL).copy()
        if behind_damage:
            state.infer_epochs(rows)
        state.add_kills(rows)
    elif kind == lib.FKV_MANIFEST_VOID:
        rows = np.frombuffer(payload, VOID).copy()
        if behind_damage:
            state.infer_epochs(rows)
        state.add_voids(rows)
    elif kind == lib.FKV_MANIFEST_NAMESPACE:
        state.namespaces[payload[:32]] = payload[32:]
    elif kind == lib.FKV_MANIFEST_PROFILE:
        state.add_profile(payload[:32], payload[32:])
    elif kind == lib.FKV_MANIFEST_RETIRED:
        retired = ffi.from_buffer("fkv_manifest_retired *", payload)
        state.retired[bytes(retired.namespace_digest)] = int(retired.last_sequence)


def _entries(data: bytes, store_uuid: bytes) -> Iterable[tuple[int, bytes, bool]]:
    """(type, payload, whether damaged entries came before).

    The log ends where no good entry follows: a torn tail. Where one does, it was damaged.
    """
    rows = np.zeros(len(data) // _ENTRY_BYTES_USUAL + 1, _ROW)
    count = _walk(data, store_uuid, rows)
    if count > len(rows):  # of entries that this version knows there can't be so many
        rows = np.zeros(count, _ROW)
        count = _walk(data, store_uuid, rows)
    for row in rows[:count]:
        at, length = int(row["offset"]), int(row["length_bytes"])
        yield int(row["type"]), data[at : at + length], bool(row["behind_damage"])


def _walk(data: bytes, store_uuid: bytes, rows: NDArray[Any]) -> int:
    room = pointer(rows, "fkv_manifest_row *")
    return int(lib.fkv_manifest_walk(data, len(data), store_uuid, room, len(rows)))


# ---- writing


def encode_entry(kind: int, payload: bytes, ordinal: int, store_uuid: bytes) -> bytes:
    entry = ffi.new("fkv_manifest_entry *")
    entry.type = kind
    entry.length_bytes = len(payload)
    entry.ordinal = ordinal
    body = bytes(ffi.buffer(entry))[4:] + payload
    padding = b"\0" * (-len(payload) % 8)
    return CRC_FIELD.pack(crc32c(crc32c(0, store_uuid), body)) + body + padding


def segment_row(segment: int, epoch: int, segment_uuid: bytes) -> bytes:
    row = ffi.new("fkv_manifest_segment *")
    row.segment = segment
    row.epoch = epoch
    row.segment_uuid = segment_uuid.ljust(16, b"\0")
    return bytes(ffi.buffer(row))


def retired_row(digest: bytes, last_sequence: int) -> bytes:
    row = ffi.new("fkv_manifest_retired *")
    row.namespace_digest = digest
    row.last_sequence = last_sequence
    return bytes(ffi.buffer(row))


def kill_entries(kills: NDArray[Any]) -> list[tuple[int, bytes]]:
    """One entry for at most 4,096 kills, so that a torn one loses little."""
    return [
        (lib.FKV_MANIFEST_KILL, kills[at : at + 4096].tobytes())
        for at in range(0, len(kills), 4096)
    ]
