"""What a store tells of itself where its superblocks, or its ruling log, are lost.

Invariants
  - nothing is believed that no checksum bears out, but for what both damaged superblocks say alike,
    or what one of them and a namespace's identity say alike;
  - reading only, as everything for tools: see QuietFiles.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flashkv import limits
from flashkv.checksums import crc32c
from flashkv.errors import FlashKVError, FormatError
from flashkv.filesystem import FileSystem
from flashkv.folder import SUPERBLOCKS, manifest_name
from flashkv.geometry import KVGeometry
from flashkv.manifest_log import ManifestState, read_state
from flashkv.native import ffi, lib
from flashkv.recovery import segment_files
from flashkv.segments import SegmentHeader, decode_header
from flashkv.superblock import Superblock

_LOG_NAME: Final = re.compile(r"manifest-(\d{1,18})\.log")
_ENTRY: Final = int(ffi.sizeof("fkv_manifest_entry"))
_BEGIN: Final = int(ffi.sizeof("fkv_manifest_begin"))
_SUPER: Final = int(ffi.sizeof("fkv_superblock"))


class QuietFiles(FileSystem):
    """Reads without following links, and where the system lets it without touching access times."""

    def open(self, path: Path, flags: int) -> int:
        """Only the owner may leave access times alone; others read all the same."""
        flags |= os.O_NOFOLLOW
        try:
            return super().open(path, flags | os.O_NOATIME)
        except PermissionError:
            return super().open(path, flags)

    def read(self, path: Path) -> bytes:
        """All of a file. A device or a pipe is none."""
        fd = self.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(fd, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a file", str(path))
            return file.read()

    def names(self, folder: Path) -> list[str]:
        """What the folder holds, in order."""
        fd = self.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return sorted(os.listdir(fd))  # noqa: PTH208  (of a descriptor)
        finally:
            os.close(fd)


QUIET: Final = QuietFiles()


def log_generations(folder: Path) -> list[int]:
    """Generations of the logs that are there, newest first."""
    try:
        names = QUIET.names(folder)
    except OSError:
        return []
    found = [_LOG_NAME.fullmatch(name) for name in names]
    return sorted((int(match.group(1)) for match in found if match), reverse=True)


def read_any_log(folder: Path, block: Superblock) -> tuple[ManifestState, int] | None:
    """State and generation of the newest log of this store that begins rightly."""
    for generation in log_generations(folder):
        named = replace(block, manifest_generation=generation)
        try:
            state, found = read_state(folder, named, QUIET)
        except OSError:
            continue
        if found:
            return state, generation
    return None


def stand_in(folder: Path) -> Superblock | None:
    """A superblock in place of two lost ones, as far as segments and logs tell.

    Store uuid and segment size are those that most of them name; geometry and capacity stay empty.
    None where nothing is there that could be a store's. Raises FormatError where the segments are
    of another version.
    """
    headers = _headers(folder)
    generations = log_generations(folder)
    logs = [(generation, _begun_by(folder, generation)) for generation in generations]
    if not headers and not generations and not _segment_files(folder):
        return None
    votes = Counter(header.store_uuid for header in headers)
    votes.update(uuid for _, uuid in logs if uuid is not None)
    store_uuid = _most(votes) or agreed_by_damaged(folder, "store_uuid") or bytes(16)
    mine = [header for header in headers if header.store_uuid == store_uuid]
    sizes = Counter(header.segment_bytes for header in mine)
    sizes = sizes or Counter([agreed_by_damaged(folder, "segment_bytes") or 0])
    if not any(map(plausible_size, sizes)):
        sizes = _file_sizes(folder)
    generation = next((g for g, uuid in logs if uuid == store_uuid), max(generations, default=0))
    return Superblock(
        store_uuid=store_uuid,
        segment_bytes=_most(Counter({n: c for n, c in sizes.items() if plausible_size(n)})) or 0,
        capacity_bytes=0,
        geometry_json=b"",
        created_ms=min((header.created_ms for header in mine), default=0),
        generation=generation,
        manifest_generation=generation,
    )


def plausible_size(segment_bytes: int) -> bool:
    """Whether segments may have that size."""
    within = limits.SEGMENT_BYTES_MIN <= segment_bytes <= limits.SEGMENT_BYTES_MAX
    return within and segment_bytes % limits.PAGE_BYTES == 0


def _most(votes: Counter[Any]) -> Any:
    """What was named most often; the first of those named equally often."""
    return votes.most_common(1)[0][0] if votes else None


def _headers(folder: Path) -> list[SegmentHeader]:
    """Right segment headers in files of their own numbers. Raises FormatError."""
    found, other = [], None
    for number, path in _segment_files(folder):
        try:
            header = decode_header(_first_page(path))
        except FormatError as error:
            other = error
            continue
        if header is not None and header.segment == number:
            found.append(header)
    if not found and other is not None:
        raise other
    return found


def _segment_files(folder: Path) -> list[tuple[int, Path]]:
    try:
        return segment_files(folder, QUIET)
    except OSError:
        return []


def _first_page(path: Path) -> bytes:
    try:
        fd = QUIET.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.pread(fd, limits.PAGE_BYTES, 0)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _file_sizes(folder: Path) -> Counter[int]:
    try:
        return Counter(path.lstat().st_size for _, path in _segment_files(folder))
    except OSError:  # one went meanwhile
        return Counter()


def _begun_by(folder: Path, generation: int) -> bytes | None:
    """The store uuid in a log's first entry, whose checksum is bound to it; None: no such entry."""
    try:
        data = QUIET.read(folder / manifest_name(generation))[: _ENTRY + _BEGIN]
    except OSError:
        return None
    if len(data) < _ENTRY + _BEGIN:
        return None
    entry = ffi.from_buffer("fkv_manifest_entry *", data)
    begin = ffi.from_buffer("fkv_manifest_begin *", data[_ENTRY:])
    store_uuid = bytes(begin.store_uuid)
    if entry.type != lib.FKV_MANIFEST_BEGIN or entry.length_bytes != _BEGIN or entry.ordinal:
        return None
    return store_uuid if crc32c(crc32c(0, store_uuid), data[4:]) == entry.crc else None


# ---- geometry and capacity ----------------------------------------------------------------------


def geometry_of_identity(identity_json: bytes) -> bytes | None:
    """The geometry in a namespace's readable identity, as canonical JSON."""
    try:
        return KVGeometry.from_json(json.dumps(json.loads(identity_json)["geometry"])).to_json()
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def damaged_geometries(folder: Path) -> list[bytes]:
    """What damaged superblocks say of the geometry, where that still is canonical JSON."""
    found = []
    for row, page in _damaged_superblocks(folder):
        text = page[_SUPER : _SUPER + int(row.geometry_bytes)]
        try:
            if KVGeometry.from_json(text).to_json() == text:
                found.append(text)
        except (FlashKVError, RecursionError):
            continue
    return found


def agreed_by_damaged(folder: Path, field: str) -> Any:
    """A field of fkv_superblock that both damaged ones give alike, bytes or int; else None."""
    rows = [row for row, _ in _damaged_superblocks(folder)]
    if len(rows) < len(SUPERBLOCKS):
        return None
    values = {_plain(getattr(row, field)) for row in rows}
    return values.pop() if len(values) == 1 else None


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) else bytes(value)


def _damaged_superblocks(folder: Path) -> list[tuple[Any, bytes]]:
    """(fkv_superblock, page) of those that still have a page's length."""
    found = []
    for name in SUPERBLOCKS:
        try:
            page = QUIET.read(folder / name)
        except OSError:
            continue
        if len(page) == limits.PAGE_BYTES and any(page):
            row = ffi.new("fkv_superblock *")
            ffi.memmove(row, page, _SUPER)
            found.append((row, page))
    return found


def choose_geometry(folder: Path, identities: Iterable[bytes]) -> tuple[bytes | None, list[bytes]]:
    """(the store's geometry, all that may be it), canonical JSON; None where the traces don't tell.

    identities: readable ones of the store's namespaces. A namespace may have a geometry of its own.
    """
    named = {text for text in map(geometry_of_identity, identities) if text is not None}
    damaged = damaged_geometries(folder)
    possible = sorted(named | set(damaged))
    if len(damaged) == len(SUPERBLOCKS) and len(set(damaged)) == 1:
        return damaged[0], possible
    agreed = named & set(damaged)
    if len(agreed) == 1:
        return agreed.pop(), possible
    return (named.pop() if len(named) == 1 else None), possible
