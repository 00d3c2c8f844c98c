"""FlashKVTier: flashkv under vLLM's CPU offloading, a secondary tier of TieringOffloadingSpec.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": N,
        "secondary_tiers": [{"type": "FlashKVTier", "module_path": "flashkv.connectors.vllm",
                             "path": "/nvme/kv", "capacity": "200GiB"}]}}'

Invariants
  - no call waits for the device or the store's lock, but drain_jobs() and shutdown(): a lookup asks
    the index in memory, transfers are tickets of the store's own clients;
  - every submitted job comes out of get_finished_jobs() exactly once;
  - a key that could not be loaded is a miss until it has been stored anew: vLLM computes it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from flashkv.connectors.engines import check_fields, check_methods, engine_imports
from flashkv.connectors.shared_store import SharedStore, StoreSettings
from flashkv.errors import BatchResult, FlashKVError
from flashkv.tickets import Ticket

with engine_imports("vllm"):
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingMetricMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

    from flashkv.connectors.vllm_rows import Rows, engine_configs, row_identity, rows_of

    check_methods(
        "vllm",
        SecondaryTierManager,
        {
            "__init__": (
                "offloading_spec",
                "primary_kv_view",
                "tier_type",
                "backpressure_detector",
            ),
            "lookup": ("key", "req_context"),
            "submit_store": ("job_metadata",),
            "submit_load": ("job_metadata",),
            "get_finished_jobs": (),
            "has_pending_work": (),
            "touch": ("keys", "req_context"),
            "on_new_request": ("req_context",),
            "on_request_finished": ("req_context",),
            "drain_jobs": (),
            "shutdown": (),
            "get_stats": (),
            "build_metric_definitions": ("extra_config",),
        },
    )
    check_fields("vllm", TransferJob, ("job_id", "keys", "chunk_ids", "is_promotion"))
    check_fields("vllm", JobResult, ("job_id", "success", "successful_keys", "transfer_bytes"))

ENGINE: Final = "vLLM"
STORES_MAX: Final = 256
"""Stores queued at once: each holds rows of the primary tier; what comes beyond is not stored."""
FAILED_KEYS_MAX: Final = 65536
"""Keys remembered as not to be loaded; the oldest are asked for again."""
FIGURES_EVERY_S: Final = 5.0
"""Between two looks at the store's figures, which take longer than a step should."""

_COUNTERS: Final = {
    "vllm:flashkv_failed_loads": "Blocks that were found and could not be loaded.",
    "vllm:flashkv_refused_stores": "Blocks that were offered and not stored.",
    "vllm:flashkv_damaged_blocks": "Blocks whose checksums were wrong.",
    "vllm:flashkv_evicted_blocks": "Blocks that gave way to newer ones.",
}
_GAUGES: Final = {
    "vllm:flashkv_blocks": "Blocks that are stored.",
    "vllm:flashkv_disk_bytes": "Bytes that the store takes on disk.",
}
_OF_STORE: Final = {
    "vllm:flashkv_damaged_blocks": "damaged_blocks",
    "vllm:flashkv_evicted_blocks": "evicted_blocks",
    "vllm:flashkv_blocks": "blocks",
    "vllm:flashkv_disk_bytes": "disk_bytes",
}


@dataclass(frozen=True, eq=False)
class _Transfer:
    job_id: int
    keys: list[bytes]
    promotion: bool
    began: float
    ticket: Ticket


class FlashKVTier(SecondaryTierManager):  # type: ignore[misc]
    """A store as a tier. Runs in vLLM's scheduler process.

    path, capacity, codec, salt, options: see StoreSettings. locality: "LOCAL" or "REMOTE", as in
    vLLM's own tiers.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            offloading_spec=offloading_spec,
            primary_kv_view=primary_kv_view,
            tier_type=tier_type,
            backpressure_detector=backpressure_detector,
        )
        self.locality = Locality(locality) if locality is not None else None
        parsed = _of_replica(StoreSettings.parse(settings, ENGINE), offloading_spec)
        configs = engine_configs()
        self._rows: Rows
        self._rows, layout = rows_of(offloading_spec, primary_kv_view, configs)
        identity = row_identity(offloading_spec, configs, layout, parsed.extras())
        self._shared = SharedStore.acquire(parsed, self._rows.geometry, engine=ENGINE)
        self._namespace = self._shared.namespace(identity)
        self._loads = self._shared.client()
        self._stores = self._shared.client(max_tickets=STORES_MAX)
        self._open: dict[Ticket, _Transfer] = {}
        self._over: list[Any] = []  # results of jobs that were refused
        self._failed: dict[bytes, None] = {}  # keys not to be loaded, oldest first
        self._counts = dict.fromkeys((*_COUNTERS, "loaded", "stored"), 0)
        self._told = dict.fromkeys(_COUNTERS, 0)
        self._figures_at = time.monotonic()

    # ---- lookups ----

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS, from the index in memory."""
        del req_context
        if self._namespace is None or key in self._failed:
            return LookupResult.MISS
        try:
            found = self._namespace.contains_one(key)
        except FlashKVError as error:  # closed under us
            self._shared.note("lookup", str(error))
            return LookupResult.MISS
        return LookupResult.HIT if found else LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Nothing: the store takes notice of gets."""

    def on_new_request(self, req_context: Any) -> Any:
        """Blocks are stored as they are computed."""
        del req_context
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Nothing is kept by request."""

    # ---- transfers ----

    def submit_store(self, job_metadata: Any) -> None:
        """Queues a store; where too many are queued the job fails at once."""
        keys, chunks = _by_position(job_metadata)
        again = np.array([key in self._failed for key in keys], np.bool_)
        self._submit(self._stores, job_metadata, keys, lambda: self._put(keys, chunks, again))

    def submit_load(self, job_metadata: Any) -> None:
        """Queues a load."""
        keys = list(job_metadata.keys)
        chunks = np.array(job_metadata.chunk_ids)
        self._submit(self._loads, job_metadata, keys, lambda: self._get(keys, chunks))

    def _submit(self, client: Any, job: Any, keys: list[bytes], call: Any) -> None:
        kind = "load" if job.is_promotion else "store"
        try:
            ticket = client.submit(kind, call, write=not job.is_promotion)
        except FlashKVError as error:
            self._shared.note(f"{kind}_refused", str(error))
            self._note_lost(keys, promotion=job.is_promotion)
            self._over.append(JobResult(job_id=job.job_id, success=False, transfer_bytes=0))
            return
        self._open[ticket] = _Transfer(
            job.job_id, keys, bool(job.is_promotion), time.monotonic(), ticket
        )

    def _put(
        self, keys: list[bytes], chunks: NDArray[Any], again: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """On the store's write lane: which keys are stored. again: replace what is there."""
        stored = np.zeros(len(keys), np.bool_)
        if self._namespace is None:
            return stored
        for anew, rows in ((False, np.flatnonzero(~again)), (True, np.flatnonzero(again))):
            if len(rows):
                result = self._namespace.put(
                    [keys[row] for row in rows.tolist()],
                    self._rows.pointers(chunks[rows]),
                    view=self._rows.view,
                    replace=anew,
                )
                self._shared.note_statuses("store", result)
                stored[rows] = ~result.lost
        return stored

    def _get(self, keys: list[bytes], chunks: NDArray[Any]) -> NDArray[np.bool_]:
        """On a read lane of the store: which keys were loaded."""
        if self._namespace is None:
            return np.zeros(len(keys), np.bool_)
        result: BatchResult = self._namespace.get(
            keys, self._rows.pointers(chunks), view=self._rows.view, tokens=self._rows.tokens
        )
        self._shared.note_statuses("load", result)
        return result.ok

    def get_finished_jobs(self) -> Iterable[Any]:
        """Results of the jobs that are over, each once. Never waits."""
        results, self._over = self._over, []
        for client in (self._loads, self._stores):
            results += [self._result(ticket) for ticket in client.drain()]
        return results

    def _result(self, ticket: Ticket) -> Any:
        transfer = self._open.pop(ticket)
        keys = transfer.keys
        if ticket.error is None:
            done: NDArray[np.bool_] = ticket.result
        else:
            self._shared.note(f"{ticket.kind}_failed", str(ticket.error))
            done = np.zeros(len(keys), np.bool_)
        good = [key for key, ok in zip(keys, done.tolist(), strict=True) if ok]
        if len(good) < len(keys):
            lost = [key for key, ok in zip(keys, done.tolist(), strict=True) if not ok]
            self._note_lost(lost, promotion=transfer.promotion)
        if not transfer.promotion:
            for key in good:
                self._failed.pop(key, None)
        self._counts["loaded" if transfer.promotion else "stored"] += len(good)
        partial = transfer.promotion and 0 < len(good) < len(keys)
        return JobResult(
            job_id=transfer.job_id,
            success=len(good) == len(keys),
            successful_keys=tuple(good) if partial else None,
            transfer_time=time.monotonic() - transfer.began,
            transfer_bytes=len(good) * self.block_size_bytes,
        )

    def _note_lost(self, keys: list[bytes], *, promotion: bool) -> None:
        if not promotion:
            self._counts["vllm:flashkv_refused_stores"] += len(keys)
            return
        self._counts["vllm:flashkv_failed_loads"] += len(keys)
        self._failed.update(dict.fromkeys(keys))
        while len(self._failed) > FAILED_KEYS_MAX:
            del self._failed[next(iter(self._failed))]

    def has_pending_work(self) -> bool:
        """Whether jobs are under way, or over and not told yet."""
        return bool(self._open or self._over)

    def drain_jobs(self) -> None:
        """Waits until every submitted job is over; get_finished_jobs() tells of them."""
        for ticket in list(self._open):
            ticket.wait()

    def shutdown(self) -> None:
        """Finishes jobs, makes what is stored durable, gives the store back. Twice is once."""
        self._loads.close()
        self._stores.close()
        self._shared.release()

    # ---- figures ----

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """What get_stats() tells, for Prometheus."""
        del extra_config
        metrics: dict[str, OffloadingMetricMetadata] = {}
        for name, text in _COUNTERS.items():
            metrics[name] = OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
        for name, text in _GAUGES.items():
            metrics[name] = OffloadingGaugeMetadata(documentation=text, labelnames=("tier",))
        return metrics

    def get_stats(self) -> Any:
        """Counters since the last call, every few seconds the store's figures; or None."""
        stats, label = OffloadingConnectorStats(), (self.tier_type,)
        store = self._shared.store
        now = time.monotonic()
        if store is not None and not store.closed and now - self._figures_at >= FIGURES_EVERY_S:
            self._figures_at = now
            figures = store.stats().as_dict()
            for name, field in _OF_STORE.items():
                value: Any = figures[field]
                if name in _GAUGES:
                    stats.set_gauge(name, value, label)
                else:
                    self._counts[name] = value
        for name in _COUNTERS:
            more = self._counts[name] - self._told[name]
            if more:
                self._told[name] += more
                stats.increase_counter(name, more, label)
        return None if stats.is_empty() else stats

    def report(self) -> dict[str, Any]:
        """The store's figures, what went wrong, and why rows are opaque."""
        own = {"opaque_reason": self._rows.reason, "blocks": dict(self._counts)}
        return {**own, **self._shared.report()}


def _by_position(job: Any) -> tuple[list[bytes], NDArray[Any]]:
    """(keys, chunks) of a store in the order of their tokens, as far as the request tells it: what
    is read together lies together, and is reclaimed together.
    """
    keys, chunks = list(job.keys), np.array(job.chunk_ids)
    place = getattr(job.req_context, "get_offload_key_position", lambda _: None)
    ends: list[Any] = [place(key) for key in keys]
    if None in ends:
        return keys, chunks
    order = np.argsort(np.array(ends), kind="stable")
    return [keys[row] for row in order.tolist()], chunks[order]


def _of_replica(settings: StoreSettings, spec: Any) -> StoreSettings:
    """One process writes a store: each data-parallel replica has its own, in a folder within."""
    parallel = spec.config.parallel
    if parallel.data_parallel_size <= 1:
        return settings
    path = f"{settings.path}/replica{parallel.data_parallel_index}"
    return replace(settings, path=path)
