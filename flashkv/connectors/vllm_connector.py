"""FlashKVConnector: vLLM's KV connector (KVConnectorBase_V1) on a flashkv store.

    KVTransferConfig(
        kv_connector="FlashKVConnector",
        kv_connector_module_path="flashkv.connectors.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"path": "/nvme/kv", "capacity": "200GiB"},
    )

Here is only what vLLM calls; vllm_scheduler and vllm_worker do it.

Invariants
  - without a store (locked, damaged, no space) vLLM runs as if there were no connector;
  - what an operator must change is a FlashKVError when the engine starts, never later.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from dataclasses import dataclass
from typing import Any

from flashkv.connectors.engines import check_fields, check_methods, engine_imports
from flashkv.connectors.shared_store import SharedStore
from flashkv.connectors.vllm_cpu import kernel_form
from flashkv.connectors.vllm_plan import Heard, Plan
from flashkv.connectors.vllm_ranks import SnapshotLookup
from flashkv.connectors.vllm_scheduler import Lookup, SchedulerSide, StoreLookup
from flashkv.connectors.vllm_setup import Setup
from flashkv.connectors.vllm_worker import WorkerSide

with engine_imports("vllm"):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput

    check_methods(
        "vllm",
        KVConnectorBase_V1,
        {
            "__init__": ("vllm_config", "role", "kv_cache_config"),
            "register_kv_caches": ("kv_caches",),
            "bind_connector_metadata": ("connector_metadata",),
            "handle_preemptions": ("kv_connector_metadata",),
            "start_load_kv": ("forward_context",),
            "wait_for_layer_load": ("layer_name",),
            "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
            "wait_for_save": (),
            "get_finished": ("finished_req_ids",),
            "get_block_ids_with_load_errors": (),
            "on_new_request": ("request",),
            "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
            "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
            "build_connector_meta": ("scheduler_output",),
            "update_connector_output": ("connector_output",),
            "request_finished": ("request", "block_ids"),
            "build_connector_worker_meta": (),
            "get_handshake_metadata": (),
            "set_xfer_handshake_metadata": ("metadata",),
            "shutdown": (),
        },
    )
    check_fields(
        "vllm",
        SchedulerOutput,
        (
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
            "kv_connector_block_state",
        ),
    )
    check_fields("vllm", KVConnectorOutput, ("finished_recving", "invalid_block_ids"))

log = logging.getLogger(__name__)


class FlashKVMetadata(Plan, KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan, as vLLM hands it from the scheduler to the workers."""


class FlashKVWorkerMetadata(Heard, KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker in a process of its own tells after a step."""

    def aggregate(self, other: Any) -> FlashKVWorkerMetadata:
        self.add(other)
        return self


@dataclass
class FlashKVHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Whether a worker in a process of its own has its store."""

    has_store: bool


class FlashKVStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> FlashKVStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class FlashKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's face of flashkv. One is the scheduler's, one the worker's; see `role`."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        form = kernel_form if current_platform.is_cpu() else None
        self._setup = Setup.of(vllm_config, kv_cache_config, form)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._shared: SharedStore | None = None
        self._snapshot: SnapshotLookup | None = None
        self._ended: list[list[int]] = []  # blocks of requests that ended while others were loaded
        if role == KVConnectorRole.WORKER:
            self._start_worker()
        else:
            self._start_scheduler(vllm_config.kv_transfer_config)
        _close_at_exit(self)

    def _start_worker(self) -> None:
        setup = self._setup
        rank = int(get_tensor_model_parallel_rank())
        self._shared, namespace = setup.acquire(rank, say=True)
        if setup.layout.reason:
            log.warning("flashkv stores vLLM's blocks as opaque bytes: %s", setup.layout.reason)
        self._worker = WorkerSide(
            self._shared,
            namespace,
            setup.layout,
            layer_groups=setup.layer_groups,
            tells_as=rank if setup.ranks.apart else None,
        )

    def _start_scheduler(self, transfer: Any) -> None:
        setup = self._setup
        lookup: Lookup
        if setup.ranks.apart:
            digest = setup.identity.digest()
            lookup = self._snapshot = SnapshotLookup(digest, setup.ranks.size)
        else:
            self._shared, namespace = setup.acquire(0, say=False)  # the worker does
            if namespace is None or self._shared.store is None:
                return
            lookup = StoreLookup(self._shared.store, namespace)
        self._scheduler = SchedulerSide(
            lookup,
            setup.layout,
            salt=setup.settings.salt,
            between=setup.between,
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
        )

    # ---- both ----

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not saved is a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("loads", "auto") != "between_steps")

    def report(self) -> dict[str, Any]:
        """What this half has done so far, and how: for operators and tests."""
        side, shared = self._scheduler or self._worker, self._shared
        return {
            "store": shared is not None and shared.store is not None,
            "reason": shared.reason if shared is not None else "",
            "layout": self._setup.layout.form,
            "opaque_because": self._setup.layout.reason,
            "loads": "between_steps" if self._setup.between else "layerwise",
            "events": dict(shared.events) if shared is not None else {},
            "counts": dict(side.counts) if side is not None else {},
        }

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._snapshot is not None:
            self._snapshot.close()
        if self._worker is not None:
            self._worker.close()
        if self._shared is not None:
            self._shared.release()

    # ---- the worker's ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert self._worker is not None
        self._worker.release(kv_connector_metadata.released)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        assert self._worker is not None
        self._worker.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        assert self._worker is not None
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: saves begin when all layers are computed, see vllm_worker."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        self._worker.save(self._get_connector_metadata())

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        assert self._worker is not None
        idle = self.has_connector_metadata() and self._get_connector_metadata().idle
        return None, self._worker.finished(idle=idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> Any:
        heard = self._worker.heard() if self._worker is not None else None
        return None if heard is None else FlashKVWorkerMetadata(heard.stored, heard.lost)

    def get_handshake_metadata(self) -> Any:
        if self._worker is None or not self._setup.ranks.apart:
            return None
        return FlashKVHandshake(self._shared is not None and self._shared.store is not None)

    def get_kv_connector_stats(self) -> Any:
        if self._worker is None:
            return None
        counts = self._worker.take_counts()
        return FlashKVStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return FlashKVStats(data=data or {})

    # ---- the scheduler's ----

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """All workers have begun, in processes of their own: what their stores hold is known now.

        Where one is without its store, nothing is ever found.
        """
        setup = self._setup
        if self._snapshot is None:
            return
        usable = [told.has_store for told in metadata.values()]
        if len(usable) == setup.ranks.size and all(usable):
            self._snapshot.open(setup.settings, setup.ranks, setup.layout, setup.identity)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens > 0:
            (block_ids,) = blocks.get_block_ids()
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = FlashKVMetadata()
        if self._scheduler is not None:
            metadata.__dict__.update(self._scheduler.plan(scheduler_output).__dict__)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            return
        failed = set(connector_output.invalid_block_ids or ())
        self._scheduler.heard(
            set(connector_output.finished_recving or ()),
            failed,
            connector_output.kv_connector_worker_meta,
        )
        if failed and not self._setup.between:
            self._forget_computed_on(failed)
        self._ended.clear()

    def _forget_computed_on(self, failed: set[int]) -> None:
        """Takes blocks that failed, and what was computed on them, out of vLLM's prefix cache.

        vLLM leaves them there, since their requests compute them again; but one that is preempted
        or aborted before it does would leave wrong bytes to others.
        """
        manager = self._kv_cache_manager
        assert self._scheduler is not None
        if manager is None:
            return
        spoilt = set(failed)
        of_requests = [manager.get_block_ids(name)[0] for name in self._scheduler.request_ids()]
        for blocks in [*of_requests, *self._ended]:
            first = next((i for i, block in enumerate(blocks) if block in failed), None)
            if first is not None:
                spoilt.update(blocks[first:])
        manager.evict_blocks(spoilt)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            if self._scheduler.loading and not self._setup.between:
                self._ended.append(list(block_ids))
            self._scheduler.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Forgets all that is stored of this model, as after its weights were updated in place."""
        return self._scheduler.forget() if self._scheduler is not None else None


def _close_at_exit(connector: FlashKVConnector) -> None:
    """vLLM in one process may end without a word to its connectors."""
    reference = weakref.ref(connector)

    def close() -> None:
        found = reference()
        if found is not None:
            found.shutdown()

    atexit.register(close)
