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


def padded(rng: np.random.Generator, blocks: int, dim: int) -> np.ndarray:
    """Runs of equal vectors, about half of them zeros, as padding leaves them."""
    shape = (blocks, 2, 2, 2)
    data = np.zeros((*shape, 256, dim), np.uint16)
    for place in np.ndindex(shape):
        at = 0
        while at < 256:
            run = int(rng.integers(2, 9))
            if rng.random() < 0.5:
                data[place][at : at + run] = rng.integers(0, 65536, dim)
            at += run
    return data


@pytest.mark.parametrize("codec", ["lossless", "fast"])
def test_vectors_that_stand_still_between_zeros(tmp_path: Path, codec: str, seed: int) -> None:
    """A page may begin with a vector that costs less without the one before."""
    print(f"seed {seed}")
    round_trip(tmp_path / "store", padded(np.random.default_rng(seed), 1, 64), codec)


@pytest.mark.parametrize("codec", ["lossless", "fast", "bounded-1", "cold"])
@pytest.mark.parametrize("position", [0, 1024])
def test_a_head_of_zeros(tmp_path: Path, codec: str, position: int) -> None:
    """It takes no bytes in the bounded code, which no stripe may do."""
    data = np.zeros((4, 2, 2, 2, 16, 64), np.uint16)
    round_trip(tmp_path / "store", data, codec, position)


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


@pytest.mark.parametrize("codec", ["lossless", "fast"])
def test_floats_whose_lower_halves_are_zero_take_none_of_them(tmp_path: Path, codec: str) -> None:
    noise = np.random.default_rng(6).normal(size=(4, 1, 2, 2, 64, 64)).astype(np.float32)
    short = (noise.view(np.uint32) & 0xFFFF0000).view(np.float32)
    ratios = []
    for name, data in (("short", short), ("whole", noise)):
        geometry = KVGeometry.gqa(1, 2, 64, "float32")
        with open_store(tmp_path / name, geometry, codec=codec) as store:
            namespace = store.namespace(Identity(model="m"))
            assert namespace.put([bytes([n]) for n in range(4)], data, position=0).all_ok
            store.flush()
            ratios.append(store.stats().compression)
    assert ratios[0] > 2 > ratios[1]
