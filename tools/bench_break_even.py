"""flashkv-bench ttft, second part: from which prefill speed on loading KV doesn't pay any more.

    break_even_tokens_per_s = usable bytes of KV a second / bytes of KV a token

Method and keys: docs/benchmarks.md.

Invariants
  - the speed is measured on a store of blocks of that very geometry, what the drive brings and the
    codec costs included; the model itself is not needed;
  - the numbers stored are real ones (the sample of SmolLM2's KV), repeated to the geometry's shape:
    lossless compresses them about as it would compress the model's own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flashkv.data import load_sample
from flashkv.geometry import DType, KVGeometry
from flashkv.identity import CHAIN_TOKENS

from .bench_sets import MIB, BlockSet, StoreSettings, page_aligned
from .measure import spread

BLOCK_TOKENS: Final = CHAIN_TOKENS
CODECS: Final = ("raw", "lossless")
PASSES: Final = 3

GEOMETRIES: Final = {
    "Llama-3-8B": KVGeometry.gqa(32, 8, 128, DType.BFLOAT16),
    "Llama-3-70B, one rank of TP8": KVGeometry.gqa(80, 1, 128, DType.BFLOAT16),
    "DeepSeek-like MLA": KVGeometry.mla(61, 512, 64, DType.BFLOAT16),
}


@dataclass(frozen=True)
class BreakEvenSettings:
    """size_bytes: of KV that each store holds."""

    path: Path
    size_bytes: int = 512 * MIB
    backend: str = "auto"


def break_even_steps() -> int:
    """How often run_break_even() calls step()."""
    return len(GEOMETRIES) * len(CODECS)


def run_break_even(settings: BreakEvenSettings, step: Callable[[str], None]) -> dict[str, Any]:
    """Figures by geometry and codec; step(text) is called before each pair of them."""
    folder = Path(tempfile.mkdtemp(prefix="flashkv-bench-", dir=settings.path))
    stores = StoreSettings(folder, settings.size_bytes, settings.backend)
    figures: dict[str, Any] = {}
    try:
        for name, geometry in GEOMETRIES.items():
            figures[name] = {"bytes_per_token": geometry.token_bytes(0)}
            source = blocks_of(geometry)
            for codec in CODECS:
                step(f"{name}, {codec}")
                figures[name][codec] = _measured(stores, geometry, codec, source)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def _measured(
    stores: StoreSettings, geometry: KVGeometry, codec: str, source: npt.NDArray[Any]
) -> dict[str, Any]:
    blocks = BlockSet(stores, f"{codec}-{geometry.token_bytes(0)}", geometry, codec, source)
    try:
        blocks.put()
        speeds = spread([blocks.get().bytes_per_s for _ in range(PASSES)])
    finally:
        blocks.remove()
    return {
        "kv_bytes_per_s": speeds.as_dict(),
        "compression": blocks.bytes / max(1, blocks.stats["live_bytes"]),
        "break_even_tokens_per_s": speeds.median / geometry.token_bytes(0),
    }


def blocks_of(geometry: KVGeometry) -> npt.NDArray[Any]:
    """A batch of blocks of real numbers: uint8[blocks, bytes], 16 to 64 MiB."""
    token_bytes = geometry.token_bytes(0)
    count = max(2, 64 * MIB // (token_bytes * BLOCK_TOKENS) // 2)
    memory = page_aligned(count * BLOCK_TOKENS * token_bytes)
    blocks = memory.reshape(count, -1)
    parts = [_plane(geometry, number, count) for number in range(len(geometry.groups[0].planes))]
    layers = geometry.groups[0].planes[0].layers
    # Canonical order: all planes of a layer, then the next layer.
    rows = [part.reshape(count, layers, -1).view(np.uint8) for part in parts]
    blocks[:] = np.concatenate(rows, axis=2).reshape(count, -1)
    return blocks


def _plane(geometry: KVGeometry, number: int, count: int) -> npt.NDArray[np.uint16]:
    """uint16[block, layer, head, token, element] of a plane, from the sample's channels."""
    plane = geometry.groups[0].planes[number]
    sample = load_sample().tensors["K" if number == 0 else "V"]  # [layer, head, token, dim]
    layers, heads, tokens, dim = sample.shape
    channels = np.moveaxis(sample, 2, 0).reshape(tokens, layers * heads, dim)
    copies = -(-plane.elements // dim)
    streams = np.arange(plane.layers * plane.heads)
    wide = np.concatenate(
        [channels[:, (streams * copies + copy) % (layers * heads)] for copy in range(copies)],
        axis=2,
    )[:, :, : plane.elements]
    first = np.arange(count) * BLOCK_TOKENS % max(1, tokens - BLOCK_TOKENS)
    blocks = wide[first[:, None] + np.arange(BLOCK_TOKENS)]  # block, token, stream, element
    shape = (count, BLOCK_TOKENS, plane.layers, plane.heads, plane.elements)
    return np.ascontiguousarray(blocks.reshape(shape).transpose(0, 2, 3, 1, 4))
