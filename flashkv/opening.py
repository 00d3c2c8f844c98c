"""From a path to a running store: folder, lock, superblocks, manifest, recovery.

Invariants
  - a shard has one writer: an flock on its lock file, and a registry for handles of the same
    process;
  - nothing is changed before the lock is held and the store was found to be one that this build may
    write;
  - a read-only open takes no lock, writes nothing and tolerates a writer that goes on meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.blockio import BlockIO
from flashkv.budget import choose_segment_bytes, default_capacity
from flashkv.errors import (
    CapacityError,
    FlashKVError,
    FormatError,
    GeometryError,
    LockedError,
    NotAStoreError,
    StoreAccessError,
    StoreError,
    SuperblockError,
)
from flashkv.filesystem import DISK, FileSystem
from flashkv.folder import SEGMENTS, SHARD, SUPERBLOCKS
from flashkv.geometry import KVGeometry
from flashkv.index import Index
from flashkv.manifest import FULL_DISK, Manifest, make_folders, new_uuid, sync_entries
from flashkv.manifest_log import (
    VOID,
    ManifestState,
    read_state,
    read_superblock,
    whole_superblocks,
)
from flashkv.options import Options, parse_bytes
from flashkv.recovery import RecoveryReport
from flashkv.superblock import Superblock

READ_TRIES: Final = 5
"""A writer may replace the manifest between two reads of a read-only open."""

_registry_lock = threading.Lock()
_open_shards: dict[str, int] = {}  # name -> descriptor of its lock file


class ShardLock:
    """The right to write a shard; given back by release(), or by the end of the process."""

    def __init__(self, folder: Path, files: FileSystem = DISK) -> None:
        """Raises LockedError."""
        self._files = files
        self._name = os.path.realpath(folder)
        with _registry_lock:
            if self._name in _open_shards:
                raise LockedError(
                    f"{folder} is open for writing in this process",
                    advice="close that handle first",
                )
            self._fd = files.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                files.close(self._fd)
                raise LockedError(
                    f"{folder} is open for writing in another process",
                    advice="close it there, or open with read_only=True",
                ) from None
            _open_shards[self._name] = self._fd

    def release(self) -> None:
        """Gives the lock back."""
        with _registry_lock:
            _open_shards.pop(self._name, None)
            self._files.close(self._fd)


def _after_fork() -> None:
    """In a forked child the locks stay the parent's: a descriptor that is left would hold them."""
    for fd in _open_shards.values():
        os.close(fd)
    _open_shards.clear()
    _registry_lock.release()


# No thread is half-way through taking a lock, or giving one back, while the process forks.
os.register_at_fork(
    before=_registry_lock.acquire,
    after_in_parent=_registry_lock.release,
    after_in_child=_after_fork,
)


@contextmanager
def access_errors(path: Path) -> Iterator[None]:
    """Turns what the operating system refuses into errors that say what to do."""
    try:
        yield
    except FlashKVError:
        raise
    except PermissionError as error:
        raise StoreAccessError(
            f"no permission for {error.filename or path}",
            advice="run as the store's owner, or choose a folder of yours",
        ) from error
    except (NotADirectoryError, FileExistsError) as error:
        raise NotAStoreError(
            f"{error.filename or path} is not a folder", advice="give the path of a folder"
        ) from error
    except OSError as error:  # a link or folder where a file should be, a full or read-only disk
        kind = StoreAccessError if error.errno == errno.EROFS else StoreError
        raise kind(f"{path} can't be opened: {error}") from error


def prepare_folder(path: Path, files: FileSystem, *, read_only: bool, may_create: bool) -> Path:
    """The shard's folder, made where it is missing.

    may_create: a geometry was given. Raises NotAStoreError, StoreAccessError, GeometryError.
    """
    with access_errors(path):
        if path.exists() and not files.is_folder(path):
            raise NotAStoreError(
                f"{path} is a file, not a folder", advice="give the path of a folder"
            )
        folder = path / SHARD
        if read_only:
            if not files.is_folder(folder):
                raise NotAStoreError(
                    f"{path} holds no flashkv store", advice="open it for writing once to make one"
                )
        else:
            if not may_create and not files.is_folder(folder):
                raise _no_geometry(path)
            make_folders(files, folder)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise StoreAccessError(f"no permission to write {folder}")
        return folder


def is_new(folder: Path, files: FileSystem = DISK) -> bool:
    """No store yet, or one whose creation never came to its first whole superblock.

    Where there are no segments, nothing is lost by making it anew. Raises FormatError.
    """
    segments = folder / SEGMENTS
    if files.is_folder(segments) and files.names(segments):
        return False
    return not whole_superblocks(folder, files)[0]


def _no_geometry(path: Path) -> GeometryError:
    return GeometryError(
        f"{path} holds no store yet, and no geometry was given",
        advice="pass geometry=KVGeometry.gqa(...), .mla(...) or .opaque(...)",
    )


def create(
    folder: Path,
    path: Path,
    capacity: int | str | None,
    geometry: KVGeometry | None,
    options: Options,
    now_ms: int,
    files: FileSystem,
) -> Manifest:
    """A new, empty shard. Raises GeometryError, CapacityError, StoreError."""
    if geometry is None:
        raise _no_geometry(path)
    with suppress(PermissionError):  # of a folder above that isn't ours
        sync_entries(files, folder, path)
    capacity_bytes = given_capacity(capacity) or default_capacity(path, files)
    largest = max(tokens for _, tokens in options.growth)
    asked = None if options.segment_bytes is None else int(options.segment_bytes)
    segment_bytes = choose_segment_bytes(capacity_bytes, geometry, asked, largest)
    block = Superblock(
        store_uuid=new_uuid(),
        segment_bytes=segment_bytes,
        capacity_bytes=capacity_bytes,
        geometry_json=geometry.to_json(),
        created_ms=now_ms,
    )
    return Manifest.create(folder, block, files)


def given_capacity(capacity: int | str | None) -> int | None:
    """Bytes of a capacity argument. Raises OptionsError, CapacityError."""
    if capacity is None:
        return None
    size = parse_bytes(capacity, "capacity")
    if size < 1:
        raise CapacityError("the capacity must be positive", value=size)
    if size > limits.CAPACITY_BYTES_MAX:
        raise CapacityError(
            "the capacity is too large", value=size, limit=limits.CAPACITY_BYTES_MAX
        )
    return size


def stored_geometry(block: Superblock, given: KVGeometry | None, path: Path) -> KVGeometry:
    """The store's geometry. Raises GeometryError where another one was asked for."""
    try:
        stored = KVGeometry.from_json(block.geometry_json)
    except ValueError as error:
        raise FormatError(f"the geometry in {path}'s superblock can't be read: {error}") from error
    if given is not None and given != stored:
        raise GeometryError(
            f"{path} was made for another geometry",
            value=given.to_json().decode(),
            limit=block.geometry_json.decode(),
            advice="open it without geometry, or use another folder",
        )
    return stored


def load_manifest(folder: Path, files: FileSystem = DISK) -> tuple[Superblock, ManifestState, bool]:
    """Superblock, state and whether the log was whole, for a reader beside a writer or a writer's
    own open.
    """
    for attempt in range(READ_TRIES):
        block = read_superblock(folder, files)
        state, found = read_state(folder, block, files)
        if found or attempt == READ_TRIES - 1:
            return block, state, found
        time.sleep(0.01)
    raise SuperblockError(f"{folder} changes all the time")  # pragma: no cover


def open_io(folder: Path, options: Options, files: FileSystem, *, read_only: bool) -> BlockIO:
    """The I/O engine for the shard. Raises BackendError."""
    paths = (folder / name for name in SUPERBLOCKS)
    whole = (path for path in paths if path.is_file() and path.stat().st_size >= limits.PAGE_BYTES)
    probe = next(whole, None)

    def engine(probe_file: Path | None) -> BlockIO:
        return BlockIO(
            folder,
            backend=options.backend,
            queue_depth=options.queue_depth,
            workers=options.workers,
            io_threads=options.io_threads,
            retries=options.retries,
            read_buffer_bytes=int(options.read_buffer_bytes),
            header_cache_bytes=int(options.header_cache_bytes),
            direct_io=options.direct_io,
            probe_file=probe_file,
            files=files,
        )

    if read_only:
        return engine(probe)
    try:
        return engine(None)
    except OSError as error:  # not even a file without a name can be made
        if error.errno not in FULL_DISK or probe is None:
            raise
        return engine(probe)


def settle_state(
    state: ManifestState, found: RecoveryReport, index: Index, namespace_ids: dict[bytes, int]
) -> None:
    """Lets the log's state be what recovery found: namespaces without blocks leave it, no sequence
    that was ever seen is given again, and none that was given and not seen counts later.
    """
    seen = [found.last_sequence, *state.retired.values()]
    seen += [int(rows["sequence"].max()) for parts in state.kills.values() for rows in parts]
    state.next_sequence = max(state.next_sequence, max(seen) + 1)
    if found.bare:
        state.next_sequence += limits.SEQUENCES_UNSEEN
    for number in found.sure:
        state.voids.pop(number, None)
    for number, (epoch, taken) in found.taken.items():
        state.voids[number] = _void_rows(number, epoch, taken, state.next_sequence)
    forget_namespaces(state, index, namespace_ids)


def _void_rows(number: int, epoch: int, taken: NDArray[Any], end: int) -> NDArray[Any]:
    """The sequences up to `end` that no record of a segment has: what a handle before wrote there
    in vain, and then ended, may reach the device after all.

    Those below the first too: a segment begins behind the sequences of the batch that opened it.
    """
    edges = np.concatenate([[0], np.unique(taken.astype(np.int64)), [end]]).astype(np.int64)
    gaps = (np.diff(edges) > 1).nonzero()[0]
    rows = np.zeros(len(gaps), VOID)
    rows["segment"], rows["epoch"] = number, epoch
    rows["first_sequence"], rows["last_sequence"] = edges[gaps] + 1, edges[gaps + 1] - 1
    return rows


def forget_namespaces(state: ManifestState, index: Index, namespace_ids: dict[bytes, int]) -> None:
    """Namespaces without blocks leave the state."""
    state.namespaces = {
        digest: text
        for digest, text in state.namespaces.items()
        if digest in namespace_ids and index.namespace_blocks(namespace_ids[digest])
    }


def begin_log(
    folder: Path, block: Superblock, state: ManifestState, capacity_bytes: int, files: FileSystem
) -> Manifest:
    """A writer's own log: the state, compacted, with the present capacity.

    On a full disk it is begun with the first entry that finds room; till then the present one is
    what a crash leaves. Where no superblock names that one, which a handle made that came no
    further, its name may not be durable: the new one takes its place, or it is adopted.
    Raises StoreError.
    """
    blocks, _ = whole_superblocks(folder, files)
    named = max((b.manifest_generation for b in blocks), default=block.manifest_generation)
    begun = replace(block, capacity_bytes=capacity_bytes, manifest_generation=named)
    manifest = Manifest(folder, begun, state, files)
    full = not _begun(manifest)
    if full and block.manifest_generation > named and manifest.adopt(block.manifest_generation):
        _begun(manifest)  # in the room of the log before
    return manifest


def _begun(manifest: Manifest) -> bool:
    """Whether there was room for a log. Raises StoreError where something else was in the way."""
    try:
        manifest.checkpoint()
    except StoreError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in FULL_DISK):
            raise
        return False
    return True


Clock = Callable[[], int]


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
