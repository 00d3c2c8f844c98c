"""Which mode a stream gets, at its edges: whole records through the store, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_support import open_store

from flashkv import Identity, KVGeometry


def round_trip(
    path: Path,
    data: np.ndarray,
    codec: str,
    position: int | None = None,
    dtype: str = "bfloat16",
) -> None:
    """data: uint16[blocks, layers, planes, heads, tokens, dim]."""
    _, layers, _, heads, tokens, dim = data.shape
    geometry = KVGeometry.gqa(layers, heads, dim, dtype)
    keys = [bytes([1, n]) for n in range(len(data))]
    how = {"codec": codec, "growth": ((0, len(data) * tokens),)}
    with open_store(path, geometry, **how) as store:
        namespace = store.namespace(Identity(model="m"))
        view = np.float16 if dtype == "float16" else np.uint16
        assert namespace.put(keys, data.view(view), position=position).all_ok
        out = np.zeros_like(data)
        assert namespace.get(keys, out.view(view)).all_ok
        assert (out == data).all()


@pytest.mark.parametrize("dim", [1, 5, 17, 21, 25, 34, 38, 49, 52])
def test_no_code_takes_more_than_the_vectors(tmp_path: Path, dim: int, seed: int) -> None:
    """Words of the fixed-width code may be longer than the vectors of a few values."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    shape = (64, 1, 2, 1, 16, dim)
    noise = rng.integers(0, 65536, shape)
    near = rng.integers(0x3800, 0x3C00, shape)
    data = np.where(rng.random(shape) < 0.56, noise, near).astype(np.uint16)
    round_trip(tmp_path / "store", data, "lossless", dtype="float16")
