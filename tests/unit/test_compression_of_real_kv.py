"""The lossless codec on real KV tensors: bit-exact, and measured against zstd."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

import flashkv
from flashkv.data import load_sample

BLOCK_TOKENS = 64


def blocks_of(names):
    """uint16[block, layer, K|V, head, token, dim] and the dtype's name."""
    sample = load_sample()
    kv = np.stack([sample.tensors[name].view(np.uint16) for name in names], axis=1)
    layers, planes, heads, tokens, dim = kv.shape
    split = kv.reshape(layers, planes, heads, tokens // BLOCK_TOKENS, BLOCK_TOKENS, dim)
    return np.ascontiguousarray(split.transpose(3, 0, 1, 2, 4, 5)), sample.dtypes[names[0]]


# float16 has few redundant bits: there the static exponent code only comes close to zstd.
@pytest.mark.parametrize(
    ("names", "of_yardstick"), [(("K", "V"), 1.0), (("K_fp16", "V_fp16"), 0.98)]
)
def test_real_kv_shrinks_and_comes_back(tmp_path, names, of_yardstick):
    blocks, dtype = blocks_of(names)
    # numpy knows float16, but not bfloat16, whose bits stay uint16.
    blocks = blocks.view(np.float16) if dtype == "float16" else blocks
    _, layers, _, heads, _, dim = blocks.shape
    geometry = flashkv.KVGeometry.gqa(layers, heads, dim, dtype)
    identity = flashkv.Identity("SmolLM2-135M-Instruct", kv_dtype=dtype)
    keys = [f"block {number}".encode() for number in range(len(blocks))]
    with flashkv.open(tmp_path / "store", capacity="64MiB", geometry=geometry) as store:
        namespace = store.namespace(identity)
        assert namespace.put(keys, blocks, position=0).all_ok
        store.flush()
        ratio = store.stats().compression
    with flashkv.open(tmp_path / "store") as store:
        restored = np.empty_like(blocks)
        assert store.namespace(identity).get(keys, restored).all_ok
    assert restored.tobytes() == blocks.tobytes()
    yardstick = blocks.nbytes / len(zstandard.ZstdCompressor(level=3).compress(blocks.tobytes()))
    assert ratio > of_yardstick * yardstick, f"lossless {ratio:.3f}, zstd {yardstick:.3f}"
