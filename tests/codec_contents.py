"""Contents of vectors that mean something to the codecs, and real tensors stream by stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import realkv

SPECIAL = np.array(
    [
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x03FF, 0x0400),  # zeros, denormals
        *(0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x7F7F),  # bfloat16: infinities, NaNs, largest
        *(0x7C00, 0xFC00, 0x7E01, 0x7C01, 0x7BFF),  # the same in float16
        *(0x3F80, 0xBF80, 0x3C00, 0xBC00),  # ones
    ],
    np.uint16,
)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def make(kind: str, rows: int, values: int, seed: int) -> np.ndarray:
    """uint16 [rows, values] of a kind of content that means something to the code."""
    rng = np.random.default_rng(seed)
    shape = (rows, values)
    match kind:
        case "normal bf16":
            scale = np.exp2(rng.integers(-8, 8, values))
            return bf16_bits(rng.normal(size=shape) * scale)
        case "normal fp16":
            return rng.normal(size=shape).astype(np.float16).view(np.uint16)
        case "any bits":
            return rng.integers(0, 65536, shape).astype(np.uint16)
        case "special":
            return rng.choice(SPECIAL, shape)
        case "outliers":
            return bf16_bits(rng.normal(size=shape) * np.where(rng.random(shape) < 0.03, 1e25, 1))
        case "mostly zero":
            return np.where(rng.random(shape) < 0.95, 0, rng.integers(0, 65536, shape)).astype(
                np.uint16
            )
        case "low exponents":
            return (rng.integers(0, 9, shape) << 7 | rng.integers(0, 4, shape) << 10).astype(
                np.uint16
            )
        case "two far windows":
            exponent = np.where(
                rng.random(shape) < 0.5, rng.integers(20, 27, shape), rng.integers(3, 12, shape)
            )
            return (exponent << 7 | exponent << 10).astype(np.uint16)
        case _:
            return np.full(shape, rng.integers(0, 65536), np.uint16)


KINDS = ["normal bf16", "normal fp16", "any bits", "special", "outliers", "mostly zero"]
KINDS += ["low exponents", "two far windows", "constant"]


def streams_of(path: Path) -> list[tuple[str, bool, np.ndarray]]:
    """(tensor, is float16, uint16[tokens, dim]) of every layer and head of a file."""
    found = []
    for name, tensor in realkv.read_tensors(path).items():
        if tensor.ndim != 4:
            continue
        is_fp16 = tensor.dtype == np.float16
        words = np.ascontiguousarray(tensor).view(np.uint16).reshape(-1, *tensor.shape[2:])
        found += [(name, is_fp16, stream) for stream in words]
    return found
