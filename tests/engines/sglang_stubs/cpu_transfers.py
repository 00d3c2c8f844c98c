"""HiCache's copies between device and host pools on a CPU, for tests: see README.md.

Invariant: only who moves the bytes is replaced; pools, layouts, radix tree, controller and storage
interface are SGLang's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Rows of tokens, layer by layer, in either direction."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices.view(-1, page_size)[:, 0] // page_size


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of whole pages [page, layer, token, ...] to rows of tokens."""
    pages = _pages(src_indices, page_size)
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        rows = source[pages, layer_id]
        destination[dst_indices] = rows.reshape(-1, *destination.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Rows of tokens, all layers of K and then all of V, to whole pages."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = _pages(dst_indices, page_size)
    for plane, destination in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[plane * layers + layer][src_indices]
            destination[pages, layer] = rows.reshape(len(pages), *destination.shape[2:])


def _allocate(
    dims: Any,
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    tensor: torch.Tensor = allocator.allocate(dims, dtype=dtype, device="cpu")
    return tensor


def install() -> None:
    """Puts these copies, and memory that isn't pinned, into SGLang's host pools."""
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    for module in (mha, mla):
        for copy in (
            transfer_kv_direct,
            transfer_kv_per_layer_direct_pf_lf,
            transfer_kv_all_layer_direct_lf_pf,
        ):
            setattr(module, copy.__name__, copy)
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    whole = base.HostKVCache.__init__

    def without_pinning(self: Any, *positional: Any, **named: Any) -> None:
        named["pin_memory"] = False
        whole(self, *positional, **named)

    base.HostKVCache.__init__ = without_pinning
