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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flashkv.connectors.engines import check_fields, check_methods, engine_imports
from flashkv.connectors.shared_store import SharedStore, StoreSettings
from flashkv.connectors.vllm_model import PagedLayout, model_identity, own_config, paged_layout
from flashkv.connectors.vllm_plan import Plan
from flashkv.connectors.vllm_scheduler import SchedulerSide, StoreLookup
from flashkv.connectors.vllm_worker import WorkerSide
from flashkv.errors import OptionsError
from flashkv.namespace import Namespace

with engine_imports("vllm"):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
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

LOADS: Final = ("auto", "layerwise", "between_steps")
SETTINGS: Final = frozenset({"loads", "layer_groups"})


class FlashKVMetadata(Plan, KVConnectorMetadata):  # type: ignore[misc]
    """A step's plan, as vLLM hands it from the scheduler to the workers."""


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


@dataclass(frozen=True)
class Setup:
    """What both halves are made of. namespace: None without a store."""

    settings: StoreSettings
    layout: PagedLayout
    shared: SharedStore
    namespace: Namespace | None
    between: bool
    layer_groups: int

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> Setup:
        """Raises FlashKVError for what an operator must change."""
        given: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = StoreSettings.parse(given, "vLLM", others=SETTINGS)
        _check_policy(vllm_config)
        layout = paged_layout(vllm_config, kv_cache_config)
        if layout.reason:
            log.warning("flashkv stores vLLM's blocks as opaque bytes: %s", layout.reason)
        identity = model_identity(vllm_config, layout, own_config(vllm_config.model_config))
        between = _between(given.get("loads", "auto"), vllm_config)
        layer_groups = given.get("layer_groups", 0)
        if not isinstance(layer_groups, int) or not 0 <= layer_groups <= len(layout.layers):
            raise OptionsError(
                "layer_groups is out of range",
                value=repr(layer_groups),
                limit=f"0 (by size) to {len(layout.layers)}",
            )
        shared = SharedStore.acquire(settings, layout.geometry, engine="vLLM")
        return cls(settings, layout, shared, shared.namespace(identity), between, layer_groups)


def _check_policy(vllm_config: Any) -> None:
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise OptionsError(
            "with this policy vLLM fails requests whose blocks can't be loaded",
            value=f"kv_load_failure_policy={policy!r}",
            advice='set kv_load_failure_policy="recompute"',
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.distributed_executor_backend != "uni":
        raise OptionsError(
            "vLLM's workers are processes of their own",
            value=f"{parallel.distributed_executor_backend}, {parallel.world_size} workers",
            limit='distributed_executor_backend="uni"',
        )


def _between(loads: object, vllm_config: Any) -> bool:
    """Whether loads run between steps.

    Layer by layer they may fail in the midst of a step; vLLM takes back what it computed then only
    where it schedules one step at a time and prompts in their order.
    """
    if loads not in LOADS:
        raise OptionsError("there is no such way of loading", value=repr(loads), limit=LOADS)
    scheduler = vllm_config.scheduler_config
    why = ""
    if scheduler.async_scheduling:
        why = "async_scheduling"
    elif scheduler.long_prefill_token_threshold > 0:
        why = "long_prefill_token_threshold"
    if loads == "layerwise" and why:
        raise OptionsError(
            "layer by layer is no way of loading with the scheduler as it is set",
            value=why,
            advice='set "loads": "auto", or switch it off',
        )
    return loads == "between_steps" or bool(why)


class FlashKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's face of flashkv. One is the scheduler's, one the worker's; see `role`."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        setup = Setup.of(vllm_config, kv_cache_config)
        self._setup = setup
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        transfer = vllm_config.kv_transfer_config
        if role == KVConnectorRole.WORKER:
            self._worker = WorkerSide(
                setup.shared, setup.namespace, setup.layout, layer_groups=setup.layer_groups
            )
        elif setup.namespace is not None:
            self._scheduler = SchedulerSide(
                StoreLookup(setup.namespace),
                setup.layout,
                salt=setup.settings.salt,
                between=setup.between,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
        _close_at_exit(self)

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
        side = self._scheduler or self._worker
        return {
            "store": self._setup.shared.store is not None,
            "reason": self._setup.shared.reason,
            "layout": self._setup.layout.form,
            "opaque_because": self._setup.layout.reason,
            "loads": "between_steps" if self._setup.between else "layerwise",
            "events": dict(self._setup.shared.events),
            "counts": dict(side.counts) if side is not None else {},
        }

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
        self._setup.shared.release()

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

    def get_kv_connector_stats(self) -> Any:
        if self._worker is None:
            return None
        counts = self._worker.take_counts()
        return FlashKVStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return FlashKVStats(data=data or {})

    # ---- the scheduler's ----

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

    def _forget_computed_on(self, failed: set[int]) -> None:
        """Takes blocks that failed, and what was computed on them, out of vLLM's prefix cache.

        vLLM leaves them there, since their requests compute them again; but one that is preempted
        or aborted before it does would leave wrong bytes to others.
        """
        manager = self._kv_cache_manager
        assert self._scheduler is not None
        if manager is None:
            return
        spoilt: set[int] = set()
        for request_id in self._scheduler.request_ids():
            blocks = [block for group in manager.get_block_ids(request_id) for block in group]
            first = next((i for i, block in enumerate(blocks) if block in failed), None)
            if first is not None:
                spoilt.update(blocks[first:])
        manager.evict_blocks(spoilt)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None


def _close_at_exit(connector: FlashKVConnector) -> None:
    """vLLM in one process may end without a word to its connectors."""
    reference = weakref.ref(connector)

    def close() -> None:
        found = reference()
        if found is not None:
            found.shutdown()

    atexit.register(close)
