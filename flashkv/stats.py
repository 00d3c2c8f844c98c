"""What a store counts, and the snapshot that stats() returns.

Invariant: everything that can be derived (usage, live bytes, blocks) is asked of its owner at the
time of the call; only events are counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv.errors import BlockStatus

# As plain ints: an enum's attributes cost more than the counting.
_OK, _MISS, _IO_ERROR, _PRESENT, _CANCELLED = map(
    int,
    (
        BlockStatus.OK,
        BlockStatus.MISS,
        BlockStatus.IO_ERROR,
        BlockStatus.PRESENT,
        BlockStatus.CANCELLED,
    ),
)
_STATUSES: Final = max(BlockStatus) + 1


@dataclass
class Counters:
    """Events of a handle since it was opened, in blocks unless the name says otherwise."""

    put_blocks: int = 0
    put_bytes: int = 0  # logical bytes of blocks offered
    accepted_blocks: int = 0
    accepted_bytes: int = 0  # logical bytes of blocks stored
    present_blocks: int = 0
    refused_blocks: int = 0
    get_blocks: int = 0
    hit_blocks: int = 0
    hit_bytes: int = 0
    missed_blocks: int = 0
    failed_reads: int = 0
    given_up_blocks: int = 0  # of gets that had begun: timed out, cancelled
    deleted_blocks: int = 0
    lookups: int = 0

    def note_put(self, statuses: NDArray[np.uint8], sizes: NDArray[np.int64]) -> None:
        """Counts a put. sizes: logical bytes of each block."""
        counts = np.bincount(statuses, minlength=_STATUSES).tolist()
        ok, present, offered = counts[_OK], counts[_PRESENT], int(sizes.sum())
        self.put_blocks += len(statuses)
        self.put_bytes += offered
        self.accepted_blocks += ok
        all_ok = ok == len(statuses)
        self.accepted_bytes += offered if all_ok else int(sizes[statuses == _OK].sum())
        self.present_blocks += present
        self.refused_blocks += len(statuses) - ok - present

    def note_get(self, statuses: NDArray[np.uint8], tokens: NDArray[Any], token_bytes: int) -> None:
        """Counts a get. tokens: read of each block that hit."""
        counts = np.bincount(statuses, minlength=_STATUSES).tolist()
        self.get_blocks += len(statuses)
        self.hit_blocks += len(tokens)
        self.hit_bytes += int(tokens.sum(dtype=np.int64)) * token_bytes
        self.missed_blocks += counts[_MISS]
        self.failed_reads += counts[_IO_ERROR]
        self.given_up_blocks += counts[_CANCELLED]


@dataclass(frozen=True)
class Stats:
    """A snapshot. Sizes in bytes; counters since the handle was opened.

    wa_cleaning   record bytes written, cleaning included / record bytes accepted; 1.0 without
                  cleaning.
    wa_total      all bytes that this process wrote to the store / record bytes accepted.
    compression   logical bytes stored / record bytes written for them.
    inflight_bytes  callers' memory in tickets that aren't done; busy_puts, busy_gets: submissions
                  that were answered by BusyError for it.
    reads_inflight  gets of tickets, and those with a deadline, that the device or a worker has;
                  those that were given up count until the device is through.
    codec_choice  of codec "auto": the codec of new records, how often it changed, and the speeds
                  that were measured; else empty.
    """

    backend: str
    direct_io: bool
    code_paths: str
    codec: str
    read_only: bool
    capacity_bytes: int
    segment_bytes: int
    segments: dict[str, int]
    disk_bytes: int
    live_bytes: int
    foreign_bytes: int
    blocks: int
    records: int
    namespaces: int
    index_bytes: int
    header_cache_bytes: int
    staging_in_use: int
    read_buffers_in_use: int
    writes_inflight: int
    leases: int
    lease_refusals: int
    tickets_inflight: int
    inflight_bytes: int
    busy_puts: int
    busy_gets: int
    reads_inflight: int
    put_blocks: int
    put_bytes: int
    accepted_blocks: int
    accepted_bytes: int
    present_blocks: int
    refused_blocks: int
    get_blocks: int
    hit_blocks: int
    hit_bytes: int
    missed_blocks: int
    failed_reads: int
    given_up_blocks: int
    deleted_blocks: int
    lookups: int
    damaged_blocks: int
    stale_blocks: int
    lost_blocks: int
    failed_writes: int
    failed_syncs: int
    evicted_blocks: int
    evicted_segments: int
    floor_refusals: int
    fallocate_refusals: int
    record_bytes_written: int
    total_bytes_written: int
    compression: float
    wa_cleaning: float
    wa_total: float
    codec_choice: dict[str, int | str] = field(default_factory=dict)
    io: dict[str, int] = field(default_factory=dict)
    recovery: dict[str, int | bool] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """All fields as plain values, for JSON and metrics."""
        return asdict(self)
