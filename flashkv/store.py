"""Store: a handle on one shard; the parts that it is made of, and their life together.

Invariants
  - one lock orders all that changes the store (puts, deletes, flushes, sealing, reclaiming); reads
    take none of it;
  - a handle that was closed, or inherited through fork(), answers with a clear error and touches
    nothing;
  - close() makes durable what was captured; a handle that is dropped without close() loses at most
    what was not flushed.

It knows no byte layout: namespaces turn batches into jobs, codec and segment_writer turn jobs into
records, segment_reader turns places into the caller's bytes.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flashkv import checks, limits, opening
from flashkv.background import on_a_thread
from flashkv.budget import make_budget
from flashkv.client import Client, ClientHooks
from flashkv.codec import Staging
from flashkv.codec_choice import CodecChoice, decoder_speeds
from flashkv.errors import (
    BusyError,
    ClosedError,
    DurabilityError,
    ForkedError,
    GeometryError,
    OptionsError,
    ReadOnlyStoreError,
    StoreError,
)
from flashkv.estimate import LoadModel
from flashkv.filesystem import DISK, FileSystem
from flashkv.gate import Gate
from flashkv.geometry import DType, KVGeometry
from flashkv.identity import Identity, Shard
from flashkv.index import Index
from flashkv.lanes import Lanes
from flashkv.leases import Leases
from flashkv.manifest import Manifest
from flashkv.namespace import Namespace
from flashkv.native import aligned_array
from flashkv.options import Options
from flashkv.profiles import check_layers
from flashkv.reads import Reads
from flashkv.records import OPAQUE_RECORD_BYTES, RecordLimits
from flashkv.recovery import Recovery
from flashkv.registry import Registry
from flashkv.segment_reader import SegmentReader
from flashkv.segment_writer import SegmentWriter
from flashkv.segments import Segments, SegmentState, decode_header
from flashkv.space import Space
from flashkv.stats import Counters, Stats
from flashkv.tickets import Milestone


def open(  # noqa: A001  (the face of the package is flashkv.open)
    path: str | os.PathLike[str],
    *,
    capacity: int | str | None = None,
    geometry: KVGeometry | None = None,
    options: Options | None = None,
    read_only: bool = False,
) -> Store:
    """Opens the store in a folder; makes it where there is none.

    capacity   most that it may take on disk, metadata included: bytes or "8GiB". None: what it had,
               at creation half of what is free. A smaller one than before drops the oldest
               segments.
    geometry   of the KV; needed at creation, later None or equal.
    read_only  no lock, no writes; beside a live writer it sees what was on disk when it was opened.
    Raises LockedError, NotAStoreError, StoreAccessError, FormatError, SuperblockError,
    GeometryError, CapacityError, BackendError, OptionsError.
    """
    if geometry is not None:
        checks.instance(GeometryError, "geometry", geometry, KVGeometry)
    options = Options() if options is None else options
    checks.instance(OptionsError, "options", options, Options)
    return Store(_path(path), capacity, geometry, options.resolved(), read_only=read_only)


def _path(path: object) -> Path:
    """A path that the operating system can be given. Raises OptionsError."""
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
        if b"\0" not in os.fsencode(text):
            return Path(text)
    except (TypeError, UnicodeError):
        pass
    raise OptionsError("path must be a path without NUL bytes", value=checks.shown(path))


class Store:
    """An open store.

    Use open(); usable as a context manager, from any thread of the process that opened it.
    """

    digest_bytes = limits.DIGEST_BYTES
    """Bytes of a key's digest that the index uses; tests use fewer, to make keys meet."""

    def __init__(
        self,
        path: Path,
        capacity: int | str | None,
        geometry: KVGeometry | None,
        options: Options,
        *,
        read_only: bool,
        files: FileSystem = DISK,
    ) -> None:
        self.path = path
        self._files = files
        self.options = options
        self.read_only = read_only
        self.counters = Counters()
        self.load_model = LoadModel()
        self.clock_ms = opening.now_ms
        self.writer_lock = threading.RLock()
        self._closed = True
        self._forked = False
        self.gate = Gate(self.check_open)
        self._lanes = Lanes(int(options.inflight_bytes))
        self._clients: set[Client] = set()
        self.registry = Registry(self)
        self._folder = opening.prepare_folder(
            path, files, read_only=read_only, may_create=geometry is not None
        )
        self._lock: opening.ShardLock | None = None
        with opening.access_errors(path):
            if not read_only:
                self._lock = opening.ShardLock(self._folder, files)
            try:
                self._start(capacity, geometry)
            except BaseException:
                self._stop()
                raise
        self._closed = False
        _handles.add(self)

    # ---- starting ----

    def _start(self, capacity: int | str | None, geometry: KVGeometry | None) -> None:
        options, folder, files = self.options, self._folder, self._files
        if not self.read_only and opening.is_new(folder, files):
            manifest = opening.create(
                folder, self.path, capacity, geometry, options, self.clock_ms(), files
            )
            manifest.close()
        block, state, log_found = opening.load_manifest(folder, files)
        self.geometry = opening.stored_geometry(block, geometry, self.path)
        self.superblock = block
        planes = [plane for group in self.geometry.groups for plane in group.planes]
        check_layers(options.profile, max(plane.layers for plane in planes))
        self.store_uuid = block.store_uuid
        self.capacity_bytes = opening.given_capacity(capacity) or block.capacity_bytes
        self.io = opening.open_io(folder, options, files, read_only=self.read_only)
        self.reads = Reads(self.io)
        self.index = Index()
        self.segments = Segments(folder, self.io, block.segment_bytes, block.store_uuid)
        self.leases = Leases(self.index)
        recovery = Recovery(
            self.segments,
            self.index,
            self.io,
            state,
            self.registry.ids,
            files,
            writable=not self.read_only,
            digest_bytes=self.digest_bytes,
        )
        self.recovery = recovery.run()
        self.recovery.manifest_rebuilt = not log_found
        self.recovery.damaged_log_entries = state.damaged_entries
        self.manifest_state = state
        self.reader = SegmentReader(
            self.segments,
            self.index,
            self.io,
            gap_bytes=int(options.read_gap_bytes),
            amplification=options.read_amplification,
            reads=self.reads,
            is_unwritten=self._is_unwritten,
            wait_written=self._wait_written,
            on_damage=self._on_damage,
            is_stale=self._is_stale,
        )
        if not self.read_only:
            self._start_writer(block.segment_bytes)

    def _start_writer(self, segment_bytes: int) -> None:
        options, state = self.options, self.manifest_state
        files = self._files
        budget = make_budget(
            self.path,
            self._folder,
            self.capacity_bytes,
            segment_bytes,
            options.free_floor_bytes,
            files,
        )
        # The log is begun anew with every open: what it says is then what recovery found.
        opening.settle_state(state, self.recovery, self.index, self.registry.ids)
        self.manifest: Manifest = opening.begin_log(
            self._folder, self.superblock, state, self.capacity_bytes, files
        )
        if self.manifest.behind:  # what it says of a tail is not logged: nothing is filled on
            for segment in self.segments.in_state(SegmentState.OPEN):
                segment.state = SegmentState.CLOSED
        self.staging = Staging(int(options.staging_bytes))
        self.codec_choice = CodecChoice(
            options.codec, self.segments.read_speed, lambda: decoder_speeds(self.io.workers)
        )
        self.space = Space(
            self.path,
            budget,
            (options.low_watermark, options.high_watermark),
            self.segments,
            self.manifest,
            self.index,
            self.io,
            self.clock_ms,
            self.leases.unless_held,
            files,
        )
        self.writer = SegmentWriter(
            self.segments,
            self.space,
            self.manifest,
            self.index,
            self.io,
            self.staging,
            next_sequence=state.next_sequence,
            bloom=options.bloom,
        )
        self.writer.settle_tails(self.recovery.incomplete)
        for dropped in self.recovery.dropped:
            self.writer.queue_kills(dropped, 0)
        with suppress(StoreError):  # a log that can't be written now; take() tries again
            self.space.shrink(self.writer.take_kills)

    # ---- checks ----

    def check_open(self) -> None:
        """Raises ClosedError, ForkedError."""
        if self._closed:
            if self._forked:
                raise ForkedError(
                    f"this handle on {self.path} was inherited through fork()",
                    advice="open it again in the child, once the parent closed it or read-only",
                )
            raise ClosedError(f"the store {self.path} is closed")

    def check_writable(self) -> None:
        """Raises ClosedError, ForkedError, ReadOnlyStoreError."""
        self.check_open()
        if self.read_only:
            raise ReadOnlyStoreError(f"{self.path} is open read-only")

    @property
    def closed(self) -> bool:
        """True once close() was called, or in a forked child."""
        return self._closed

    @property
    def block_bytes_max(self) -> int:
        """Largest block: a record is at most a quarter of a segment, its header included."""
        quarter = self.segments.segment_bytes // limits.RECORDS_PER_SEGMENT_MIN
        return quarter - quarter // 64 - 2 * limits.PAGE_BYTES

    def record_limits(self, geometry: KVGeometry, group: int) -> RecordLimits:
        """What bounds a record of this group."""
        planes = geometry.groups[group].planes
        opaque = any(plane.dtype is DType.OPAQUE for plane in planes)
        bytes_max = self.block_bytes_max
        return RecordLimits(
            self.options.growth, min(bytes_max, OPAQUE_RECORD_BYTES) if opaque else bytes_max
        )

    # ---- namespaces ----

    def namespace(self, identity: Identity, *, shard: Shard | None = None) -> Namespace:
        """The blocks of an identity.

        The same object for the same identity and shard. Raises IdentityError, BusyError.
        """
        self.check_open()
        return self.registry.namespace(identity, shard)

    def profiles(self) -> dict[bytes, dict[str, Any]]:
        """The calibration profiles that the store holds, by digest."""
        self.check_open()
        return self.registry.profiles()

    # ---- durability ----

    def flush(self) -> None:
        """Makes all captured blocks durable.

        Raises DurabilityError where writes or a sync failed: those blocks are gone (blocks_lost
        says how many), the rest is durable and the store goes on.
        """
        with self.gate:
            self.check_writable()
            self._flush()

    def _flush(self) -> None:
        with self.writer_lock:
            lost = self.writer.flush()
        if lost:
            raise DurabilityError(
                f"{lost} captured blocks could not be made durable and were dropped",
                advice="put them again; see stats() for failed writes and syncs",
                blocks_lost=lost,
            )

    def _is_unwritten(self, sequences: NDArray[Any]) -> bool:
        return not self.read_only and self.writer.flights.holds(sequences)

    def _wait_written(self, sequences: NDArray[Any], wait_ms: float = math.inf) -> bool:
        """Returns once these records are written; whether there was cause to wait."""
        return not self.read_only and self.writer.flights.wait_for(sequences, wait_ms)

    def kill(self, dropped: NDArray[Any]) -> None:
        """Logs deleted blocks, durably. Under writer_lock. Raises StoreError."""
        self.writer.kill(dropped)

    def _on_damage(self, dropped: NDArray[Any]) -> None:
        if not self.read_only and len(dropped):
            self.writer.note_damaged(dropped)

    def _is_stale(self, segment: int, epoch: int) -> bool:
        """Whether a live writer has used the segment's space again since this handle was opened."""
        if not self.read_only:
            return False
        page = aligned_array(limits.PAGE_BYTES)
        if self.io.read(self.segments[segment].fd, page, 0) != 0:
            return True
        header = decode_header(page.tobytes())
        if self.segments[segment].by_log:  # a bad header is none of a writer's doing
            return header is not None and header.segment == segment and header.epoch > epoch
        return header is None or header.epoch != epoch

    @property
    def segments_max(self) -> int:
        """Segments that the store may have."""
        return self.space.budget.segments_max if not self.read_only else len(self.segments)

    # ---- asynchronous use ----

    def client(self, *, max_tickets: int = limits.TICKETS_MAX) -> Client:
        """A completion queue with an eventfd of its own.

        max_tickets: submitted and not drained at once. Raises ClosedError, BusyError, OptionsError.
        """
        self.check_open()
        max_tickets = checks.whole(
            OptionsError, "max_tickets", max_tickets, 1, limits.TICKETS_LIMIT
        )
        if len(self._clients) >= limits.CLIENTS_MAX:
            raise BusyError("too many clients", value=len(self._clients), limit=limits.CLIENTS_MAX)
        hooks = ClientHooks(self.check_open, self._reach, self._clients.discard, self.reads.at)
        client = Client(self._lanes, hooks, max_tickets)
        self._clients.add(client)
        return client

    def _reach(self, milestone: Milestone) -> None:
        if milestone == Milestone.DURABLE:
            self.flush()
        elif milestone == Milestone.WRITTEN:
            self.writer.flights.wait_written()

    # ---- figures ----

    def stats(self) -> Stats:
        """A snapshot of figures and counters."""
        from flashkv.snapshot import snapshot

        with self.gate:
            self.check_open()
            return snapshot(self, self._lanes, len(self.registry.ids))

    # ---- the end ----

    def close(self) -> None:
        """Finishes tickets and calls, makes captured blocks durable and gives everything back.

        May be called again. Raises DurabilityError where something could not be made durable; the
        handle is closed all the same.
        """
        if self._closed:
            return
        for client in list(self._clients):
            client.close()
        self._lanes.close()
        self._closed = True
        if not self.gate.shut():
            return
        try:
            if not self.read_only:
                self._flush()
        finally:
            self._stop()

    def _stop(self) -> None:
        self._closed = True
        _handles.discard(self)
        with ExitStack() as ending:  # whatever one raises, the others end; the lock goes last
            if self._lock is not None:
                ending.callback(self._lock.release)
                self._lock = None
            for name in _PARTS:
                part = getattr(self, name, None)
                if part is not None:
                    ending.callback(part.close)

    def _after_fork(self) -> None:
        """In the child: threads, locks and buffers are the parent's."""
        self._closed = self._forked = True
        self.gate = Gate(self.check_open)
        for client in list(self._clients):
            client.after_fork()
        self._lock = None

    def __del__(self) -> None:
        """A handle that nobody holds gives everything back; what was not flushed may be lost."""
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            warnings.warn(
                f"{self!r} was dropped, not closed", ResourceWarning, stacklevel=1, source=self
            )
            if on_a_thread():  # the collector runs anywhere; _stop() waits for that thread
                threading.Thread(target=self._stop, name="flashkv-stop").start()
            else:
                self._stop()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"Store({str(self.path)!r}, {state})"


_PARTS = ("manifest", "segments", "staging", "io", "space", "writer", "leases", "reads")
"""Of a store, those that are closed; the last one first."""
_handles: weakref.WeakSet[Store] = weakref.WeakSet()


def _fork_guard() -> None:
    for store in list(_handles):
        store._after_fork()


os.register_at_fork(after_in_child=_fork_guard)
