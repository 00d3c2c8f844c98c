"""Rows of vLLM's primary tier: what lies in them, of which model, at which addresses.

A row is a chunk: for each layer of the group, in the group's order, the layer's pages of the
chunk's blocks, one behind the other. It is what vLLM's copy worker makes of its paged KV.

Invariants
  - a row whose inside is known gets the model's geometry, and its heads the page codec; any other
    is stored whole, as opaque bytes, and says why;
  - rows that don't mean the same never meet: all that changes the bytes' order (vLLM's version,
    device and attention backend, ranks, groups, sizes of blocks and chunks) is in the identity;
  - no address is made from a row number that the view doesn't have.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.connectors.checkpoint import Checkpoint, canonical
from flashkv.connectors.vllm_model import (
    PagedLayout,
    UnsupportedSetupError,
    model_identity,
    own_config,
    paged_layout,
)
from flashkv.errors import IdentityError, MemoryViewError
from flashkv.geometry import KVGeometry, MemoryView
from flashkv.identity import Extra, Identity
from flashkv.memory import Pointers
from flashkv.native import ffi

ORDERS: Final = {
    ("LBHNC", "joined"): "layer head token plane",
    ("LBNHC", "joined"): "layer token head plane",
    ("LBHNC", "latent"): "layer head token plane",
    ("LBNHC", "latent"): "layer token head plane",
}
"""Axes of a layer's page, by vLLM's name of the cache's order and the content of a head slot.

On CPUs a page of a head is its keys, then its values, in an order of the kernel. That is taken for
"joined" here: rows come back bit for bit all the same, and meet no others (see row_identity).
"""


@dataclass(frozen=True)
class Rows:
    """The rows of one primary tier.

    tokens   of a block, as flashkv counts it; 1: a row is opaque.
    offsets  int64[pages x layers] of the regions in a row, page by page, layers as in the geometry.
    reason   why rows are opaque; "" where they aren't.
    """

    geometry: KVGeometry
    view: MemoryView | None
    tokens: int
    offsets: NDArray[np.int64]
    base: int
    count: int
    row_bytes: int
    reason: str

    def pointers(self, chunk_ids: NDArray[Any]) -> Pointers:
        """Memory of these rows. Raises MemoryViewError."""
        rows = np.asarray(chunk_ids).astype(np.int64)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.count:
            raise MemoryViewError(
                "vLLM names a row that its primary tier doesn't have",
                value=[int(rows.min()), int(rows.max())],
                limit=self.count,
            )
        addresses = self.base + rows[:, None] * self.row_bytes + self.offsets[None, :]
        return Pointers(addresses.astype(np.uint64))


def rows_of(spec: Any, view: memoryview, configs: tuple[Any, Any]) -> tuple[Rows, PagedLayout]:
    """The rows of the primary tier's view, and the layout that they were taken for."""
    assert view.strides is not None
    assert view.shape is not None
    base = int(ffi.cast("uintptr_t", ffi.from_buffer(view)))  # kept by no one: vLLM releases it
    count, row_bytes = int(view.shape[0]), int(view.strides[0])
    known = _known(spec, row_bytes, configs)
    if isinstance(known, str):
        layout = _opaque_layout(spec, row_bytes, known)
        rows = Rows(layout.geometry, None, 1, np.zeros(1, np.int64), base, count, row_bytes, known)
        return rows, layout
    layout, order, offsets, tokens = known
    page = layout.block_tokens
    memory = MemoryView(order, regions=("layer",), block_tokens=tokens, page_tokens=page)
    return Rows(layout.geometry, memory, tokens, offsets, base, count, row_bytes, ""), layout


def _known(
    spec: Any, row_bytes: int, configs: tuple[Any, Any]
) -> tuple[PagedLayout, str, NDArray[np.int64], int] | str:
    """(layout, order of a layer's page, offsets, tokens of a chunk), or why it isn't known."""
    config, blocks = spec.config, int(spec.blocks_per_chunk)
    if len(config.groups) != 1:
        return f"a row may be of any of {len(config.groups)} KV groups"
    if config.parallel.world_size != 1:
        return f"a row holds the parts of {config.parallel.world_size} ranks"
    if config.canonical_layout:
        return "rows are in vLLM's canonical layout"
    try:
        layout = paged_layout(*configs)
    except UnsupportedSetupError as error:
        return str(error)
    if layout.form == "opaque":
        return layout.reason
    order = ORDERS.get((str(config.kv_cache_layout), layout.form))
    if order is None:
        return f"the KV cache lies in the order {config.kv_cache_layout}"
    tokens = blocks * layout.block_tokens
    layers = list(config.groups[0].layer_names)
    page_bytes = layout.geometry.block_bytes(0, layout.block_tokens) // len(layers)
    if sorted(layers) != sorted(layout.layers):
        return "the group's layers are not those of the KV cache"
    if page_bytes * len(layers) != int(config.worker_kv_bytes_per_block):
        return "pages are padded"
    if page_bytes * len(layers) * blocks > row_bytes:
        return "a row is smaller than its layers' pages"
    if tokens > limits.BLOCK_TOKENS_MAX or blocks * len(layers) > limits.REGIONS_MAX:
        return f"a chunk has {tokens} tokens in {blocks * len(layers)} pieces"
    place = np.array([layers.index(name) for name in layout.layers], np.int64)
    pages = np.arange(blocks, dtype=np.int64)[:, None] * page_bytes
    return layout, order, (pages + place[None, :] * (page_bytes * blocks)).reshape(-1), tokens


def _opaque_layout(spec: Any, row_bytes: int, reason: str) -> PagedLayout:
    block_tokens = int(spec.config.groups[0].tokens_per_block)
    names = tuple(name for group in spec.config.groups for name in group.layer_names)
    geometry = KVGeometry.opaque(row_bytes)
    return PagedLayout(
        geometry=geometry,
        layers=names,
        block_tokens=block_tokens,
        granule=block_tokens,
        form="opaque",
        heads=1,
        reason=reason,
    )


# ---- whose rows they are ----


def engine_configs() -> tuple[Any, Any]:
    """vLLM's whole configuration, and that of its KV cache.

    A tier is only told of sizes and the model's name, which don't identify its KV: rotary settings,
    quantisation, overrides. The connector that makes the tier has it all, and is among the callers.
    Raises IdentityError where it isn't.
    """
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        if "vllm_config" in names and "kv_cache_config" in names:
            return names["vllm_config"], names["kv_cache_config"]
        frame = frame.f_back  # type: ignore[assignment]
    raise IdentityError(
        "vLLM's configuration is not to be found, and the model can't be identified without it",
        advice="Let vLLM's OffloadingConnector make the tier",
    )


def row_identity(
    spec: Any, configs: tuple[Any, Any], layout: PagedLayout, more: Mapping[str, Extra]
) -> Identity:
    """Identity of rows: the model's, and how this vLLM orders their bytes; more: further extras.

    Raises IdentityError.
    """
    vllm_config = configs[0]
    whole = model_identity(vllm_config, layout, own_config(vllm_config.model_config))
    order = _digest(_order_of_bytes(spec, vllm_config))
    extras: dict[str, Extra] = {**whole.extras, "rows": order, **more}
    speculative = vllm_config.speculative_config
    if speculative is not None:
        extras["speculative"] = _digest(_draft(speculative))
    return replace(whole, extras=extras)


def _order_of_bytes(spec: Any, vllm_config: Any) -> dict[str, Any]:
    from vllm import __version__
    from vllm.platforms import current_platform

    config, parallel = spec.config, spec.config.parallel
    return {
        "vllm": __version__,
        "device": str(current_platform.get_device_name()),
        "backend": str(getattr(vllm_config.attention_config, "backend", None)),
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "ranks": [
            getattr(parallel, f"{name}_size") for name in ("world", "tp", "pp", "pcp", "dcp")
        ],
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)]
            for group in config.groups
        ],
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
    }


def _draft(speculative: Any) -> Mapping[str, Any]:
    """The draft model: its layers' KV may be in the rows too."""
    told: dict[str, Any] = {"method": str(speculative.method)}
    model = getattr(speculative, "draft_model_config", None)
    if model is not None and isinstance(getattr(model, "model", None), str):
        try:
            draft = Checkpoint.read(model.model, model.revision)
        except IdentityError:  # as ngram, which has no weights
            told["model"] = model.model
        else:
            told["model"] = [draft.name, draft.revision, draft.weights_fingerprint, draft.settings]
    return told


def _digest(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(told).encode()).hexdigest()
