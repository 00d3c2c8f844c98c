"""Every element type through a store, with both codecs.

Bit-exact on both code paths, and as small as it is meant to be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fxp_reference import LEVELS
from store_support import open_store

from flashkv import Identity, KVGeometry
from flashkv.native import lib

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 2, 2, 64, 48, 8
IDENTITY = Identity(model="types")


def values(seed: int = 1) -> np.ndarray:
    """float32 [block, layer, K|V, head, token, dim], channels of unlike scales."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-3, 4, DIM))
    made = rng.normal(size=(BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM)) * scale
    return made.astype(np.float32)


def bf16_of(made: np.ndarray) -> np.ndarray:
    return (made.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def mixed(made: np.ndarray) -> np.ndarray:
    """float32 of 16 bits but for one value: its stream alone needs all bits."""
    words = bf16_of(made).view(np.uint32).copy()
    words[2, 1, 0, 1, 5, 7] |= 1
    return words.view(np.float32)


def eight_bits(name: str) -> Callable[[np.ndarray], np.ndarray]:
    def cast(made: np.ndarray) -> np.ndarray:
        torch = pytest.importorskip("torch")
        result: np.ndarray = (
            torch.from_numpy(made).to(getattr(torch, name)).view(torch.uint8).numpy()
        )
        return result

    return cast


def any_words(made: np.ndarray) -> np.ndarray:
    bits = np.random.default_rng(2).integers(0, 1 << 32, made.shape, dtype=np.uint64)
    return bits.astype(np.uint32).view(np.float32)


def any_bytes(made: np.ndarray) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, made.shape).astype(np.uint8)


CASES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], float, float]] = {
    # name: (dtype, content, ratios of lossless and fast at least)
    "float32": ("float32", lambda made: made, 1.1, 1.05),
    "float32 from bfloat16": ("float32", bf16_of, 2.5, 2.3),
    "float32, one value of all bits": ("float32", mixed, 2.3, 2.1),
    "any float32": ("float32", any_words, 0.9, 0.9),
    "float8_e4m3fn": ("float8_e4m3fn", eight_bits("float8_e4m3fn"), 1.1, 0.9),
    "float8_e5m2": ("float8_e5m2", eight_bits("float8_e5m2"), 1.2, 0.9),
    "any float8_e4m3fn": ("float8_e4m3fn", any_bytes, 0.9, 0.9),
    "any float8_e5m2": ("float8_e5m2", any_bytes, 0.9, 0.9),
    "int8": ("int8", any_bytes, 0.9, 0.9),
}


@pytest.mark.parametrize("codec", ["lossless", "fast"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip(tmp_path: Path, case: str, codec: str) -> None:
    dtype, content, *least = CASES[case]
    blocks = content(values())
    geometry = KVGeometry.gqa(LAYERS, HEADS, DIM, dtype)
    keys = [b"%d" % number for number in range(BLOCKS)]
    with open_store(tmp_path / "store", geometry, codec=codec) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(keys, blocks, position=0).all_ok
        store.flush()
        ratio = store.stats().compression
    for level in LEVELS:
        lib.fkv_use_simd(level)
        try:
            with open_store(tmp_path / "store", geometry) as store:
                back = np.empty_like(blocks)
                assert store.namespace(IDENTITY).get(keys, back).all_ok
                assert back.tobytes() == blocks.tobytes()
                one = np.empty_like(blocks[:1])
                assert store.namespace(IDENTITY).get(keys[3:4], one).all_ok
                assert one.tobytes() == blocks[3:4].tobytes()
        finally:
            lib.fkv_use_simd(1)
    assert ratio > least[codec == "fast"]
