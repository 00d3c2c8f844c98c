"""stats(): the figures of a store's parts, put together at one time.

Invariants
  - it only reads: no counter, file or lock of the store is changed;
  - parts go on working meanwhile, so figures of different parts may differ by calls under way.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from flashkv import limits
from flashkv.budget import disk_usage
from flashkv.lanes import Lanes
from flashkv.native import ffi, lib
from flashkv.segment_writer import WriterCounters
from flashkv.segments import SegmentState
from flashkv.stats import Stats

if TYPE_CHECKING:
    from flashkv.store import Store


def snapshot(store: Store, lanes: Lanes, namespaces: int) -> Stats:
    """Everything that Stats names, of an open store."""
    totals = store.index.totals()
    io = store.io.counters()
    writing = not store.read_only
    writer = store.writer.counters if writing else WriterCounters()
    counters = store.counters
    accepted_records = writer.record_bytes_written
    total = io["written_bytes"] + (store.manifest.bytes_written if writing else 0)
    report = {name: n for name, n in vars(store.recovery).items() if isinstance(n, int)}
    return Stats(
        backend=store.io.backend_name,
        direct_io=store.io.direct_io,
        code_paths=ffi.string(lib.fkv_code_paths()).decode(),
        codec=store.options.codec,
        codec_choice=store.codec_choice.facts() if writing else {},
        read_only=store.read_only,
        capacity_bytes=store.capacity_bytes,
        segment_bytes=store.segments.segment_bytes,
        segments={state.value: len(store.segments.in_state(state)) for state in SegmentState},
        disk_bytes=disk_usage(store.path),
        live_bytes=totals.live_pages * limits.PAGE_BYTES,
        foreign_bytes=store.space.budget.foreign_bytes if writing else 0,
        blocks=totals.blocks,
        records=totals.records,
        namespaces=namespaces,
        index_bytes=totals.memory_bytes,
        header_cache_bytes=io["header_cache_bytes"],
        staging_in_use=len(store.writer.flights.buffers()) if writing else 0,
        read_buffers_in_use=io["buffers_in_use"],
        writes_inflight=store.io.writes_inflight(),
        leases=len(store.leases),
        lease_refusals=store.leases.refused,
        tickets_inflight=lanes.inflight,
        inflight_bytes=lanes.inflight_bytes,
        busy_puts=lanes.refused.puts,
        busy_gets=lanes.refused.gets,
        reads_inflight=len(store.reads),
        **asdict(counters),
        **_reader(store),
        lost_blocks=writer.lost_blocks,
        failed_writes=store.writer.flights.failed_writes if writing else 0,
        failed_syncs=store.writer.sealer.counters.failed_syncs if writing else 0,
        evicted_blocks=store.space.evicted_blocks if writing else 0,
        evicted_segments=store.space.evicted_segments if writing else 0,
        floor_refusals=store.space.floor_refusals if writing else 0,
        fallocate_refusals=store.space.fallocate_refusals if writing else 0,
        record_bytes_written=writer.record_bytes_written,
        total_bytes_written=total,
        compression=counters.accepted_bytes / writer.record_bytes_written
        if accepted_records
        else 0.0,
        wa_cleaning=1.0,
        wa_total=total / accepted_records if accepted_records else 0.0,
        io=io,
        recovery=report,
    )


def _reader(store: Store) -> dict[str, int]:
    counters = store.reader.counters
    return {"damaged_blocks": counters.damaged_blocks, "stale_blocks": counters.stale_blocks}
