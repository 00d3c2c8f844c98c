"""Chosen layers, heads or token ranges read only the pages that they need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashkv
from flashkv import Identity, KVGeometry, MemoryView, Options
from flashkv.limits import PAGE_BYTES

LAYERS, HEADS, DIM, TOKENS = 6, 4, 64, 256


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_pages_read(store_path: Path, codec: str, backend: str) -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((1, LAYERS, 2, HEADS, TOKENS, DIM)).astype(np.float32)
    data = (values.view(np.uint32) >> 16).astype(np.uint16)
    key = [b"block"]
    options = Options(codec=codec, backend=backend)
    geometry = KVGeometry.gqa(LAYERS, HEADS, DIM, "bfloat16")
    with flashkv.open(store_path, capacity="64MiB", geometry=geometry, options=options) as store:
        blocks = store.namespace(Identity(model="m"))
        assert blocks.put(key, data).all_ok
        store.flush()

        def pages_read(out: np.ndarray, want: np.ndarray, **selection: object) -> int:
            before = store.stats().io["read_bytes"]
            assert blocks.get(key, out, view=MemoryView(), **selection).all_ok
            assert (out == want).all()
            return (store.stats().io["read_bytes"] - before) // PAGE_BYTES

        whole = pages_read(np.zeros_like(data), data)  # and the header is known from here on
        stream_pages = -(-TOKENS * DIM * 2 // PAGE_BYTES)  # plain, of one layer, plane and head
        streams = LAYERS * 2 * HEADS
        assert whole > streams * stream_pages // 2
        spare = 2  # the remainder's shared pages: one more where it is split

        out = np.zeros((1, 1, 2, 1, TOKENS, DIM), np.uint16)
        head = pages_read(out, data[:, [3]][:, :, :, [2]], layers=[3], heads=[2])
        assert 0 < head <= 2 * (stream_pages + spare) * 1.25

        out = np.zeros((1, 1, 2, HEADS, TOKENS, DIM), np.uint16)
        layer = pages_read(out, data[:, [1]], layers=[1])
        assert head < layer <= 2 * HEADS * (stream_pages + spare) * 1.25

        out = np.zeros((1, LAYERS, 2, HEADS, 8, DIM), np.uint16)
        tokens = pages_read(out, data[:, :, :, :, 8:16], token_range=(8, 16))
        assert 0 < tokens <= streams * spare * 1.25

        out = np.zeros((1, 1, 2, 1, 8, DIM), np.uint16)
        want = data[:, [3]][:, :, :, [2], 8:16]
        few = pages_read(out, want, layers=[3], heads=[2], token_range=(8, 16))
        assert few == 2  # a page of K, a page of V
