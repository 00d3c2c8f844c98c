"""vLLM's paged cache as flashkv's memory: which pages a granule lies in, as Regions and a view.

A page is what one row of vLLM's tensors holds: a block, or a part of one where the attention kernel
wants smaller ones. A granule is made of pages, or is a part of one.

Invariants
  - tensors that are not what the configuration says are refused before anything is read or written;
  - gather and scatter are flashkv's own: nothing here copies KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashkv.connectors.vllm_model import PagedLayout
from flashkv.errors import MemoryViewError
from flashkv.geometry import MemoryView
from flashkv.memory import Regions


class PagedMemory:
    """The cache of one worker.

    Raises MemoryViewError where the tensors don't fit the layout.
    """

    def __init__(self, layout: PagedLayout, kv_caches: Mapping[str, Any]) -> None:
        self._layout = layout
        missing = [name for name in layout.layers if name not in kv_caches]
        if missing:
            raise MemoryViewError("vLLM gave no cache of a layer", value=missing[0])
        tensors = [kv_caches[name] for name in layout.layers]
        of_tensor = {id(tensor): number for number, tensor in enumerate(tensors)}
        # A layer that computes with another one's cache waits for that one.
        self._layers = {name: of_tensor.get(id(cache)) for name, cache in kv_caches.items()}
        first = tensors[0]
        for tensor in tensors:
            if tensor.shape != first.shape or tensor.dtype != first.dtype:
                raise MemoryViewError(
                    "caches of layers differ in shape",
                    value=f"{tensor.dtype}{list(tensor.shape)}",
                    limit=f"{first.dtype}{list(first.shape)}",
                )
        if first.ndim != 4:
            raise MemoryViewError(
                "vLLM's cache of a layer is not [page, head, token, content]",
                value=list(first.shape),
            )
        self.page_tokens = int(first.shape[2])
        self._pages_per_block, rest = divmod(layout.block_tokens, self.page_tokens)
        granule = layout.granule
        if (
            rest
            or not self._pages_per_block
            or max(granule, self.page_tokens) % min(granule, self.page_tokens)
        ):
            raise MemoryViewError(
                "pages of vLLM's cache don't make up its blocks or flashkv's",
                value=f"{self.page_tokens} tokens",
                limit=f"blocks of {layout.block_tokens}, granules of {granule}",
            )
        self._parts = self.page_tokens // granule  # granules a page; 0: a granule is pages
        self._device = first.device if first.device.type != "cpu" else None
        self._tensors = [self._shaped(tensor) for tensor in tensors]

    def _shaped(self, tensor: Any) -> list[Any]:
        """The regions of a layer's cache, as the view names their axes, in the same memory."""
        layout = self._layout
        if layout.form == "opaque":
            return [_flat_pages(tensor, layout.geometry.groups[0].planes[0].vector_bytes)]
        if layout.form in ("split", "transposed"):
            keys, values = _halves(tensor, transposed=layout.form == "transposed")
            return [self._in_granules(keys), self._in_granules(values)]
        return [self._in_granules(tensor)]

    def _in_granules(self, tensor: Any) -> Any:
        """Pages of several granules get an axis that counts them."""
        return (
            tensor.unflatten(2, (self._parts, self._layout.granule)) if self._parts > 1 else tensor
        )

    def layer_number(self, name: str) -> int | None:
        """Number of a layer by vLLM's name; None where its cache is not one that is loaded."""
        return self._layers.get(name)

    def places(self, start_token: int, count: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where granules lie: int64[count, pages], or [count, 2] of a page and the part of it.

        blocks: vLLM's blocks from the one that holds start_token on.
        """
        unit = min(self.page_tokens, self._layout.granule)
        steps = count * (self._layout.granule // unit)
        tokens = start_token + np.arange(steps, dtype=np.int64) * unit
        block_tokens = self._layout.block_tokens
        of_block = tokens // block_tokens - start_token // block_tokens
        pages = blocks[of_block] * self._pages_per_block
        pages += tokens % block_tokens // self.page_tokens
        if self._parts > 1:
            return np.stack([pages, tokens % self.page_tokens // self._layout.granule], axis=1)
        return pages.reshape(count, -1)

    def blocks_of(self, place: NDArray[np.int64], offset: int = 0) -> list[int]:
        """vLLM's blocks that a granule lies in, from its token `offset` on."""
        pages = place[:1] if self._parts > 1 else place[offset // self.page_tokens :]
        blocks: list[int] = (pages // self._pages_per_block).tolist()
        return blocks

    def regions(
        self, places: NDArray[np.int64], layers: tuple[int, ...], offset: int = 0
    ) -> tuple[Regions, MemoryView]:
        """Memory of granules, from their token `offset` on, in some layers."""
        tensors = [region for layer in layers for region in self._tensors[layer]]
        view = self._layout.view(self.page_tokens, self._layout.granule - offset)
        if self._parts > 1:
            return Regions(tensors, places, (0, 2)), view
        rows = places[:, offset // self.page_tokens :]
        return Regions(tensors, rows[:, 0] if rows.shape[1] == 1 else rows), view

    # ---- GPUs: the store's threads copy on the device's default stream ----

    def hand_over(self) -> None:
        """What the engine has queued comes before what the store's threads are given next."""
        if self._device is not None:
            import torch

            torch.cuda.default_stream(self._device).wait_stream(
                torch.cuda.current_stream(self._device)
            )

    def take_back(self) -> None:
        """What the store's threads have copied comes before what the engine queues next."""
        if self._device is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_stream(
                torch.cuda.default_stream(self._device)
            )


def _halves(tensor: Any, *, transposed: bool) -> tuple[Any, Any]:
    """Keys and values, [page, head, token, dim] each, of pages that hold one after the other.

    transposed: the keys' tokens lie innermost.
    """
    tokens, dim = int(tensor.shape[2]), int(tensor.shape[3]) // 2
    if not tensor.is_contiguous():
        raise MemoryViewError("vLLM's pages on a CPU are not contiguous", value=tensor.stride())
    halves = tensor.flatten(2).unflatten(2, (2, tokens * dim))
    keys, values = halves[:, :, 0], halves[:, :, 1].unflatten(2, (tokens, dim))
    if transposed:
        return keys.unflatten(2, (dim, tokens)).transpose(2, 3), values
    return keys.unflatten(2, (tokens, dim)), values


def _flat_pages(tensor: Any, page_bytes: int) -> Any:
    """uint8[page, bytes] of a cache whose pages are dense, in whatever order their axes lie."""
    import torch

    order = sorted(range(1, 4), key=lambda axis: (-tensor.stride(axis), axis))
    moved = tensor.permute(0, *order)
    dense = moved[0].is_contiguous() and moved[0].numel() * moved.element_size() == page_bytes
    if not dense:
        raise MemoryViewError(
            "pages of vLLM's cache are neither understood nor contiguous",
            value=f"{tensor.dtype}{list(tensor.shape)}, strides {tensor.stride()}",
            limit=f"{page_bytes} bytes a page",
        )
    return moved.flatten(1).view(torch.uint8)
