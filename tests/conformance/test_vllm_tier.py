"""Drives the store as vLLM's secondary tier would: rows of a shared host region, keyed by block
hash and group, stored and loaded by jobs whose ends are polled.

What the tier manager asks for (vLLM 0.32, SecondaryTierManager):
  - one memoryview of (chunks, row bytes) for all layers of a chunk, page-aligned rows;
  - lookup(key) -> MISS | HIT | HIT_PENDING, key by key, in the scheduler's process;
  - submit_store(job), submit_load(job) return at once; finished jobs are collected later, a job
    with the keys that it achieved when not all of them;
  - drain_jobs() waits for all; nothing else ever waits.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from small_stores import MIB, PAGE, edit, place_of, segment_file

import flashkv
from flashkv import BusyError, Identity, KVGeometry, Milestone, Namespace, Options, Regions, Ticket

TOKEN_BYTES = 2304  # 3 layers of 3 heads of 64: a row is no power of two


@dataclass(frozen=True)
class TransferJob:
    """As vLLM gives it; chunk_ids are rows of the region."""

    job_id: int
    keys: Sequence[bytes]
    chunk_ids: np.ndarray
    is_promotion: bool = False


@dataclass(frozen=True)
class JobResult:
    """As vLLM wants it; successful_keys only where not all were."""

    job_id: int
    success: bool
    successful_keys: tuple[bytes, ...] | None
    transfer_bytes: int


class FlashTier:
    """The adapter that a connector would be: one opaque block a row, jobs as tickets."""

    def __init__(self, primary_kv_view: memoryview, path: Path, identity: Identity) -> None:
        self.rows = np.asarray(primary_kv_view)
        chunks, row_bytes = self.rows.shape
        self.row_bytes = row_bytes
        self.store = flashkv.open(
            path,
            capacity=96 * MIB,
            geometry=KVGeometry.opaque(row_bytes),
            options=Options(codec="raw", staging_bytes=16 * MIB, read_buffer_bytes=8 * MIB),
        )
        self.namespace: Namespace = self.store.namespace(identity)
        self.client = self.store.client()
        self.jobs: dict[int, tuple[TransferJob, Ticket]] = {}
        self.storing: dict[bytes, int] = {}
        assert chunks > 0

    def lookup(self, key: bytes) -> str:
        if self.namespace.contains_one(key):
            return "HIT"
        return "HIT_PENDING" if key in self.storing else "MISS"

    def submit_store(self, job: TransferJob) -> None:
        ticket = self.client.submit_put(
            self.namespace, job.keys, self._rows(job), notify=Milestone.CAPTURED
        )
        self.jobs[ticket.id] = (job, ticket)
        self.storing.update(dict.fromkeys(job.keys, job.job_id))

    def submit_load(self, job: TransferJob) -> None:
        ticket = self.client.submit_get(self.namespace, job.keys, self._rows(job))
        self.jobs[ticket.id] = (job, ticket)

    def _rows(self, job: TransferJob) -> Regions:
        return Regions([self.rows], rows=job.chunk_ids)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Never waits."""
        for ticket in self.client.drain():
            job, _ = self.jobs.pop(ticket.id)
            if ticket.kind == "put":
                for key in job.keys:
                    self.storing.pop(key, None)
            ok = np.zeros(len(job.keys), bool) if ticket.error else ticket.result.ok
            some = tuple(key for key, good in zip(job.keys, ok, strict=True) if good)
            yield JobResult(
                job.job_id,
                bool(ok.all()),
                None if ok.all() else some,
                int(ok.sum()) * self.row_bytes,
            )

    def has_pending_work(self) -> bool:
        return bool(self.jobs)

    def drain_jobs(self) -> None:
        for _, ticket in list(self.jobs.values()):
            ticket.wait()

    def shutdown(self) -> None:
        self.client.close()
        self.store.close()


class Region:
    """A shared mapping of rows, page-aligned, as the engine's host tier has it."""

    def __init__(self, chunks: int, chunk_tokens: int) -> None:
        self.row_bytes = -(-TOKEN_BYTES * chunk_tokens // PAGE) * PAGE
        self._map = mmap.mmap(-1, chunks * self.row_bytes)
        self.view = memoryview(self._map).cast("B", (chunks, self.row_bytes))
        self.array = np.asarray(self.view)

    def fill(self, seed: int) -> np.ndarray:
        """New content; a copy of it."""
        rng = np.random.default_rng(seed)
        self.array[:] = rng.integers(0, 256, self.array.shape, np.uint8)
        return self.array.copy()


def offload_keys(count: int, group: int, seed: int = 0) -> list[bytes]:
    """Block hashes with the group's number behind, 4 bytes big-endian."""
    rng = np.random.default_rng(1000 + seed)
    return [rng.bytes(32) + group.to_bytes(4, "big") for _ in range(count)]


def finish(tier: FlashTier, count: int, timeout_s: float = 20.0) -> dict[int, JobResult]:
    """Results of so many jobs, collected whenever the eventfd says so."""
    found: dict[int, JobResult] = {}
    end = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < end, "jobs don't finish"
        readable, _, _ = select.select([tier.client.fileno()], [], [], 0.5)
        if readable:
            for result in tier.get_finished_jobs():
                assert result.job_id not in found
                found[result.job_id] = result
    return found


IDENTITY = Identity(model="org/model", extras={"tokens": 16})


@pytest.mark.parametrize("chunk_tokens", [16, 32, 128, 256])
def test_rows_of_two_groups(folder: Path, chunk_tokens: int) -> None:
    """Chunks of both groups go out by jobs, and after a restart come back into other rows."""
    chunks = 24
    region = Region(chunks, chunk_tokens)
    content = region.fill(1)
    full, sliding = offload_keys(12, 0), offload_keys(12, 1)
    assert [key[:32] for key in full] == [key[:32] for key in sliding]
    tier = FlashTier(region.view, folder, IDENTITY)
    assert {tier.lookup(key) for key in full + sliding} == {"MISS"}
    order = np.random.default_rng(2).permutation(chunks)
    jobs = [
        TransferJob(7, full[:8], order[:8]),
        TransferJob(8, sliding, order[12:]),
        TransferJob(9, full[8:], order[8:12]),
    ]
    for job in jobs:
        tier.submit_store(job)
    assert {tier.lookup(key) for key in full} <= {"HIT", "HIT_PENDING"}
    assert tier.has_pending_work()
    results = finish(tier, 3)
    assert all(result.success and result.successful_keys is None for result in results.values())
    assert results[8].transfer_bytes == 12 * region.row_bytes
    assert {tier.lookup(key) for key in full + sliding} == {"HIT"}
    assert not tier.has_pending_work()
    tier.shutdown()

    region.array[:] = 0xEE
    tier = FlashTier(region.view, folder, IDENTITY)
    assert {tier.lookup(key) for key in full + sliding} == {"HIT"}
    targets = np.random.default_rng(3).permutation(chunks)
    tier.submit_load(TransferJob(1, full + sliding, targets, is_promotion=True))
    assert finish(tier, 1)[1].success
    assert np.array_equal(region.array[targets], content[order])
    tier.shutdown()


def test_partial_success(folder: Path) -> None:
    """Unknown and damaged keys fail alone; the job tells which succeeded."""
    region = Region(16, 32)
    content = region.fill(1)
    keys = offload_keys(12, 0)
    tier = FlashTier(region.view, folder, IDENTITY)
    for row, key in enumerate(keys[:8]):
        tier.submit_store(TransferJob(row, [key], np.array([row])))
    finish(tier, 8)
    tier.store.flush()
    place = place_of(tier.namespace, keys[3])
    with edit(segment_file(folder, int(place["segment"]))) as fd:
        at = (int(place["page"]) + int(place["header_pages"])) * PAGE
        os.pwrite(fd, bytes(PAGE), at)
    region.array[:] = 0xEE
    tier.submit_load(TransferJob(50, keys, np.arange(12)))
    result = finish(tier, 1)[50]
    assert not result.success
    assert result.successful_keys == tuple(keys[:3] + keys[4:8])
    assert np.array_equal(region.array[[0, 1, 2, 4, 5, 6, 7]], content[[0, 1, 2, 4, 5, 6, 7]])
    assert (region.array[12:] == 0xEE).all()
    assert tier.lookup(keys[3]) == "MISS", "a failed load is no hit any more"
    region.array[3] = content[3]
    tier.submit_store(TransferJob(51, keys[:4], np.arange(4)))
    assert finish(tier, 1)[51].success
    assert tier.lookup(keys[3]) == "HIT"
    tier.shutdown()


def test_submitting_never_waits(folder: Path) -> None:
    """While someone holds the store's lock: stores and loads are taken, lookups answered."""
    region = Region(8, 16)
    content = region.fill(1)
    keys = offload_keys(8, 0)
    tier = FlashTier(region.view, folder, IDENTITY)
    tier.submit_store(TransferJob(1, keys[:4], np.arange(4)))
    finish(tier, 1)
    with tier.store.writer_lock:
        tier.submit_store(TransferJob(2, keys[4:], np.arange(4, 8)))
        assert [tier.lookup(key) for key in keys] == ["HIT"] * 4 + ["HIT_PENDING"] * 4
        tier.submit_load(TransferJob(3, keys[:4], np.arange(4)))
        assert finish(tier, 1)[3].success, "a load doesn't queue behind a store"
        assert list(tier.get_finished_jobs()) == []
    assert finish(tier, 1)[2].success
    assert np.array_equal(region.array, content)
    tier.shutdown()


def test_a_full_queue_and_draining(folder: Path) -> None:
    """Too many jobs are refused at once with BusyError; drain_jobs() waits for those taken."""
    region = Region(4, 16)
    region.fill(1)
    keys = offload_keys(4, 0)
    tier = FlashTier(region.view, folder, IDENTITY)
    tier.client = tier.store.client(max_tickets=5)
    with tier.store.writer_lock:
        for job in range(5):
            tier.submit_store(TransferJob(job, keys, np.arange(4)))
        with pytest.raises(BusyError):
            tier.submit_store(TransferJob(5, keys, np.arange(4)))
        assert len(tier.jobs) == 5
    tier.drain_jobs()
    assert len(list(tier.get_finished_jobs())) == 5
    tier.submit_load(TransferJob(6, keys, np.arange(4)))
    tier.drain_jobs()
    assert [result.success for result in tier.get_finished_jobs()] == [True]
    tier.shutdown()


def test_rows_that_are_reused_after_the_job(folder: Path) -> None:
    """The region's rows are the engine's again once the job is finished: they change at once."""
    region = Region(8, 128)
    tier = FlashTier(region.view, folder, IDENTITY)
    contents = []
    for turn in range(10):
        contents.append(region.fill(turn))
        tier.submit_store(TransferJob(turn, offload_keys(8, 0, turn), np.arange(8)))
        finish(tier, 1)
        region.array[:] = 0xEE
    for turn in range(10):
        tier.submit_load(TransferJob(turn, offload_keys(8, 0, turn), np.arange(8)))
        assert finish(tier, 1)[turn].success
        assert np.array_equal(region.array, contents[turn])
    tier.shutdown()
