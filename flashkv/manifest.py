"""The manifest: a shard's small log of segments, kills and namespaces, and the superblocks that
point to it.

Invariants
  - only this module renames, unlinks and syncs folders;
  - a superblock is written only after the manifest that it names, and that file's folder entry, are
    durable; the other superblock stays as it was, so that a torn write leaves the state before;
  - entries count in their order, see manifest_log.py;
  - a failed write or sync of the log is never repeated in place: the state goes into a new log, or
    the shard stops accepting writes;
  - on a full disk the log lives on its own room: each is begun with some behind its end, and the
    log before gives its own to the next one.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.errors import StoreError
from flashkv.filesystem import DISK, FileSystem
from flashkv.folder import (
    NEW_LOG,
    SEGMENTS,
    SUPERBLOCKS,
    is_log,
    manifest_name,
    reserve_of,
    segment_path,
)
from flashkv.manifest_log import (
    ManifestState,
    encode_entry,
    kill_entries,
    retired_row,
    segment_row,
)
from flashkv.native import ffi, lib
from flashkv.superblock import Superblock

FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT)


def new_uuid() -> bytes:
    """16 random bytes: the names of stores and segments."""
    return uuid.uuid4().bytes


class Manifest:
    """The log that is open for writing. Calls are made under the store's writer lock."""

    def __init__(
        self,
        folder: Path,
        superblock: Superblock,
        state: ManifestState,
        files: FileSystem = DISK,
    ) -> None:
        self.folder = folder
        self._files = files
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
        self._owes_kills = self._owes_ends = False  # the state holds some that no log has
        self._owes_sync = False  # the log's end may not be durable

    # ---- creation ----

    @classmethod
    def create(cls, folder: Path, superblock: Superblock, files: FileSystem = DISK) -> Manifest:
        """A new shard in a folder; durable on return. What a try before left there goes.

        Raises StoreError, OSError.
        """
        for name in files.names(folder):
            if name == SEGMENTS:
                files.remove_folder(folder / name)
            elif is_log(name):
                files.unlink(folder / name)
        files.make_folder(folder / SEGMENTS)
        manifest = cls(folder, superblock, ManifestState(), files)
        try:
            manifest.checkpoint()
            manifest.checkpoint()  # the second one writes the other superblock
        except BaseException:
            manifest.close()
            raise
        return manifest

    # ---- entries ----

    def segment_opened(
        self, segment: int, epoch: int, segment_uuid: bytes, *, sync: bool = True
    ) -> None:
        """The segment's space is used again from here on.

        sync: False where the uuid is new: after a crash that takes this entry the epoch may have
        that number once more, but what was written under it binds to another uuid.
        """
        self.state.opened(segment, epoch, segment_uuid)
        self._append(
            [(lib.FKV_MANIFEST_OPENED, segment_row(segment, epoch, segment_uuid))], sync=sync
        )

    def segments_freed(self, epochs: dict[int, int], kills: NDArray[Any]) -> None:
        """The kills that these segments' contents caused, then their end, in one durable write."""
        self._owes_ends = True
        self._owes_kills |= len(kills) > 0
        entries = kill_entries(kills)
        self.state.add_kills(kills)
        for segment, epoch in epochs.items():
            entries.append((lib.FKV_MANIFEST_FREED, segment_row(segment, epoch, b"")))
            self.state.free(segment, epoch)
        self._append(entries, sync=True)

    def kill(self, kills: NDArray[Any], *, sync: bool) -> None:
        """Blocks that must never come back."""
        kills = kills[~np.isin(kills["segment"], list(self.state.freed))]
        if len(kills):
            self._owes_kills = True
            self.state.add_kills(kills)
            self._append(kill_entries(kills), sync=sync)

    def bytes_max(self, more_bytes: int = 0) -> int:
        """Most that logs and superblocks take on disk before the next entry but one.

        The log before, the present one with what is to come, and a checkpoint of both.
        """
        length = self._length + more_bytes
        room = 3 * limits.LOG_ROOM_BYTES + 16 * limits.PAGE_BYTES
        return self._length_before + 2 * length + room

    def namespace_added(self, digest: bytes, identity_json: bytes) -> None:
        """Readable identity of a namespace, before its first record."""
        self.state.namespaces[digest] = identity_json
        self._append([(lib.FKV_MANIFEST_NAMESPACE, digest + identity_json)], sync=True)

    def profile_used(self, digest: bytes, profile_json: bytes, room_bytes: int) -> None:
        """A calibration profile, before the first record whose steps come from it.

        Logged again where another one was used since: the last ones stay. One without room is not
        kept; records need none to be read.
        """
        if len(profile_json) > room_bytes or digest in list(self.state.profiles)[-1:]:
            return
        self.state.add_profile(digest, profile_json, room_bytes)
        self._append([(lib.FKV_MANIFEST_PROFILE, digest + profile_json)], sync=True)

    def namespace_retired(self, digest: bytes, last_sequence: int) -> None:
        """All records of the namespace up to this sequence are dead."""
        self._owes_kills = True
        self.state.retired[digest] = last_sequence
        self._append([(lib.FKV_MANIFEST_RETIRED, retired_row(digest, last_sequence))], sync=True)

    def _append(self, entries: list[tuple[int, bytes]], *, sync: bool) -> None:
        data = b"".join(self._encode(kind, payload) for kind, payload in entries)
        if not data:
            return
        long = self._length > max(self._length_max, 2 * self._checkpoint_length)
        if long or self._uncertain:
            self.checkpoint()  # the state has these entries already
            return
        try:
            self._files.write(self._fd, data)
            if sync:
                self._files.sync_data(self._fd)
        except OSError:
            self.checkpoint()  # never the same file again; raises if that fails as well
            return
        self._length += len(data)
        self.bytes_written += len(data)
        self._owes_kills = self._owes_ends = False
        self._owes_sync = not sync

    def settle(self, *, ends: bool) -> None:
        """Makes durable what was appended, and what a failed write left out. Raises StoreError.

        ends: of segments too, whose blocks come back else; they are whole and the newest.
        """
        if self._owes_kills or (ends and self._owes_ends):
            self.checkpoint()
        elif self._owes_sync:
            try:
                self._files.sync_data(self._fd)
            except OSError:
                self.checkpoint()  # never the same file again
            self._owes_sync = False

    def _encode(self, kind: int, payload: bytes) -> bytes:
        entry = encode_entry(kind, payload, self._ordinal, self.superblock.store_uuid)
        self._ordinal += 1
        return entry

    # ---- a new log ----

    def checkpoint(self) -> None:
        """Writes the state into a log of its own and lets a superblock point to it.

        Raises StoreError where the folder can't be written. Which log rules on flash is uncertain
        then, so nothing is appended to either: the next entry tries again.
        """
        generation = self.superblock.manifest_generation + 1
        self._ordinal = 0
        data = b"".join(
            self._encode(kind, payload) for kind, payload in self._state_entries(generation)
        )
        self._uncertain = True
        try:
            fd = self._new_log(generation, data)
        except OSError as error:
            name = manifest_name(generation)
            raise StoreError(f"can't write the manifest {name}: {error}") from error
        self._uncertain = self._owes_kills = self._owes_ends = self._owes_sync = False
        self.close()
        self._fd = fd
        self._length_before = self._length
        self._length = self._checkpoint_length = len(data)
        self.bytes_written += len(data) + limits.PAGE_BYTES
        self._remove_old(generation)

    @property
    def behind(self) -> bool:
        """Whether no log has the state: the next entry begins one."""
        return self._uncertain

    def adopt(self, generation: int) -> bool:
        """Makes a log durable that was found behind the one that superblocks name, and lets one
        name it: a handle came no further. Few file systems need room for that; where there is
        none, False, and what only that log says is owed. Raises StoreError.
        """
        files, path = self._files, self.folder / manifest_name(generation)
        try:
            fd = files.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                files.sync(fd)
            finally:
                files.close(fd)
            # Named anew: that handle's sync of its name may have failed, and is never repeated.
            files.rename(path, self.folder / NEW_LOG)
            files.rename(self.folder / NEW_LOG, path)
            files.sync_folder(self.folder)
            self._point_to(generation)
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise StoreError(f"can't make {path.name} durable: {error}") from error
            self._owes_kills = True
            return False
        return True

    def _new_log(self, generation: int, data: bytes) -> int:
        """The new log's descriptor; a superblock points to it. Raises OSError.

        On a full disk it takes over the file of the log before the present one, with all the room
        that it has: xfs makes no file there, and others are quick to take what is given up. That
        log is kept in case the present superblock is damaged; no crash needs it any more.
        """
        files, new = self._files, self.folder / NEW_LOG
        before = self.folder / manifest_name(generation - 2)
        spare = files.is_file(before)
        begun = files.is_file(new)  # by a try that had taken one over, and came no further
        if files.free_bytes(self.folder) > limits.MIB or not (spare or begun):
            try:
                return self._written_log(generation, data, os.O_CREAT | os.O_TRUNC)
            except OSError as error:
                if error.errno not in FULL_DISK or not spare:
                    raise
        if spare:
            files.rename(before, new)
        fd = files.open(new, os.O_RDWR | os.O_NOFOLLOW)
        try:
            files.write(fd, bytes(files.length_bytes(fd)))  # its entries must not follow the new
        finally:
            files.close(fd)
        return self._written_log(generation, data, 0)

    def _written_log(self, generation: int, data: bytes, flags: int) -> int:
        files, new = self._files, self.folder / NEW_LOG
        fd = files.open(new, os.O_RDWR | os.O_NOFOLLOW | flags)
        try:
            files.write(fd, data)
            files.reserve(fd, len(data) + limits.LOG_ROOM_BYTES)
            files.sync(fd)
            # A log of that name, of a try that failed, was whole as well.
            files.rename(new, self.folder / manifest_name(generation))
            files.sync_folder(self.folder)
            self._point_to(generation)
        except OSError:
            files.close(fd)
            raise
        return fd

    def _point_to(self, generation: int) -> None:
        block = self.superblock
        new = Superblock(
            **{
                **block.__dict__,
                "generation": block.generation + 1,
                "manifest_generation": generation,
            }
        )
        files = self._files
        path = self.folder / SUPERBLOCKS[new.generation % 2]
        existed = files.exists(path)
        fd = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
        try:
            files.write(fd, new.encode())
            files.sync(fd)
        finally:
            files.close(fd)
        if not existed:
            files.sync_folder(self.folder)
        self.superblock = new

    def _state_entries(self, generation: int) -> Iterable[tuple[int, bytes]]:
        state = self.state
        begin = ffi.new("fkv_manifest_begin *")
        begin.store_uuid = self.superblock.store_uuid
        begin.generation = generation
        begin.next_sequence = state.next_sequence
        yield lib.FKV_MANIFEST_BEGIN, bytes(ffi.buffer(begin))
        for segment, epoch in sorted(state.epochs.items()):
            row = segment_row(segment, epoch, state.uuids.get(segment, b""))
            yield lib.FKV_MANIFEST_OPENED, row
            if segment in state.freed:
                yield lib.FKV_MANIFEST_FREED, row
        for segment in sorted(state.kills):
            yield from kill_entries(state.kills_of(segment))
        for segment in sorted(state.voids):
            for row in state.voids_of(segment):
                yield lib.FKV_MANIFEST_VOID, row.tobytes()
        for digest, text in state.namespaces.items():
            yield lib.FKV_MANIFEST_NAMESPACE, digest + text
        for digest, text in state.profiles.items():
            yield lib.FKV_MANIFEST_PROFILE, digest + text
        for digest, last_sequence in state.retired.items():
            yield lib.FKV_MANIFEST_RETIRED, retired_row(digest, last_sequence)

    def _remove_old(self, generation: int) -> None:
        """Logs that no superblock needs: the one before stays until the next checkpoint."""
        kept = (manifest_name(generation), manifest_name(generation - 1))
        with suppress(OSError):  # what stays now goes with the next one
            for name in self._files.names(self.folder):
                if is_log(name) and name not in kept:
                    self._files.unlink(self.folder / name)

    # ---- segment files ----

    def create_segment(self, segment: int) -> Path:
        """An empty file for a segment, its folder entry durable. On any thread."""
        path = segment_path(self.folder, segment)
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        self._files.close(fd)
        self._files.sync_folder(path.parent)
        return path

    def remove_segment(self, segment: int) -> None:
        """The file goes. Raises OSError where it stays.

        Its last epoch stays known, so that a file of that name never looks new.
        """
        self._files.unlink(segment_path(self.folder, segment))
        with suppress(OSError):  # one that comes back after a crash is a free segment's
            self._files.sync_folder(self.folder / SEGMENTS)

    def close(self) -> None:
        """Closes the file; what was synced is durable."""
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1


def make_folders(files: FileSystem, folder: Path) -> None:
    """Makes a folder, and those above it that are missing, durably. Raises OSError."""
    if files.is_folder(folder):
        return
    make_folders(files, folder.parent)
    try:
        files.make_folder(folder)
    except FileExistsError:  # another process made it meanwhile
        if not files.is_folder(folder):
            raise
    try:
        files.sync_folder(folder.parent)
    except OSError:
        with suppress(OSError):  # or the next try takes it for durable
            files.remove_folder(folder)
        raise


def sync_entries(files: FileSystem, folder: Path, top: Path) -> None:
    """Makes the entries of a folder and of those above it durable, up to that of `top`: a process
    that was killed may have made them and not synced. Raises OSError.
    """
    files.sync_folder(folder.parent)
    if folder != top:
        sync_entries(files, folder.parent, top)
