"""What both halves of the vLLM connector are made of, from vLLM's configuration.

Invariant: what an operator must change is a FlashKVError here, when the engine starts, never later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flashkv.connectors.shared_store import SharedStore, StoreSettings
from flashkv.connectors.vllm_model import PagedLayout, model_identity, own_config, paged_layout
from flashkv.connectors.vllm_ranks import Ranks
from flashkv.errors import OptionsError
from flashkv.identity import Identity
from flashkv.namespace import Namespace

LOADS: Final = ("auto", "layerwise", "between_steps")
SETTINGS: Final = frozenset({"loads", "layer_groups"})
"""Of the connector alone; the others are the store's."""


@dataclass(frozen=True)
class Setup:
    """What both halves are made of, before a store is opened."""

    settings: StoreSettings
    layout: PagedLayout
    identity: Identity
    ranks: Ranks
    between: bool
    layer_groups: int

    @classmethod
    def of(
        cls,
        vllm_config: Any,
        kv_cache_config: Any,
        kernel_form: Callable[[Any, str], str] | None = None,
    ) -> Setup:
        """kernel_form: see paged_layout(). Raises FlashKVError for what an operator must change."""
        given: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = StoreSettings.parse(given, "vLLM", others=SETTINGS)
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            raise OptionsError(
                "with this policy vLLM fails requests whose blocks can't be loaded",
                value=f"kv_load_failure_policy={policy!r}",
                advice='set kv_load_failure_policy="recompute"',
            )
        layout = paged_layout(vllm_config, kv_cache_config, kernel_form)
        layer_groups = given.get("layer_groups", 0)
        if not isinstance(layer_groups, int) or not 0 <= layer_groups <= len(layout.layers):
            raise OptionsError(
                "layer_groups is out of range",
                value=repr(layer_groups),
                limit=f"0 (by size) to {len(layout.layers)}",
            )
        return cls(
            settings,
            layout,
            model_identity(vllm_config, layout, own_config(vllm_config.model_config)),
            Ranks.of(vllm_config),
            _between(given.get("loads", "auto"), vllm_config),
            layer_groups,
        )

    def acquire(self, rank: int, *, say: bool) -> tuple[SharedStore, Namespace | None]:
        """The store of a rank, and its blocks there; None without a store. say: why, then."""
        settings = self.ranks.settings(self.settings, rank)
        shared = SharedStore.acquire(settings, self.layout.geometry, engine="vLLM", say=say)
        return shared, shared.namespace(self.identity, self.ranks.shard(self.layout, rank))


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
