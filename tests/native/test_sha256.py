"""SHA-256 and the token chain against hashlib, on both code paths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkv.native import ffi, lib


@pytest.fixture(params=[0, 1], ids=["portable", "simd"])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    lib.fkv_use_simd(request.param)
    yield request.param
    lib.fkv_use_simd(1)


def digest_of(data: bytes, function: str = "fkv_sha256") -> bytes:
    digest = ffi.new("uint8_t[32]")
    getattr(lib, function)(data, len(data), digest)
    return bytes(digest)


def chain_of(
    tokens: np.ndarray, granule: int, seed: bytes = bytes(32), extra: bytes = b""
) -> list[bytes]:
    count = -(-len(tokens) // granule)
    keys = ffi.new("uint8_t[]", 32 * count + 1)
    keys[32 * count] = 0xA5
    values = ffi.from_buffer("int32_t[]", tokens.astype("<i4"))
    lib.fkv_token_chain(seed, values, len(tokens), granule, extra, len(extra), keys)
    assert keys[32 * count] == 0xA5
    return [bytes(keys[32 * i : 32 * i + 32]) for i in range(count)]


def reference_chain(tokens: np.ndarray, granule: int, seed: bytes, extra: bytes) -> list[bytes]:
    keys: list[bytes] = []
    for first in range(0, len(tokens), granule):
        parent = keys[-1] if keys else seed
        ids = tokens[first : first + granule].astype("<i4").tobytes()
        keys.append(hashlib.sha256(parent + ids + extra).digest())
    return keys


def test_check_values(level: int) -> None:
    assert digest_of(b"abc").hex() == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert digest_of(b"").hex() == (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )


def test_every_length_around_the_block_bounds(level: int) -> None:
    content = np.random.default_rng(2).integers(0, 256, 1100, dtype=np.uint8).tobytes()
    for length in [*range(330), 1024, 1087, 1088, 1100]:
        data = content[:length]
        assert digest_of(data) == hashlib.sha256(data).digest(), length
        assert digest_of(data, "fkv_sha256_portable") == hashlib.sha256(data).digest(), length


@given(data=st.binary(max_size=5000))
def test_arbitrary_data(data: bytes) -> None:
    assert digest_of(data) == hashlib.sha256(data).digest()


@pytest.mark.parametrize("granule", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("extra", [b"", b"adapter 7", bytes(range(200))])
def test_token_chain(level: int, granule: int, count: int, extra: bytes) -> None:
    tokens = np.random.default_rng(count).integers(-(2**31), 2**31, count)
    seed = hashlib.sha256(b"namespace").digest()
    assert chain_of(tokens, granule, seed, extra) == reference_chain(tokens, granule, seed, extra)


def test_a_prefix_has_the_same_keys_and_any_change_ends_that() -> None:
    tokens = np.arange(640)
    keys = chain_of(tokens, 64)
    assert chain_of(tokens[:320], 64) == keys[:5]
    changed = tokens.copy()
    changed[200] += 1
    other = chain_of(changed, 64)
    assert other[:3] == keys[:3]
    assert not set(other[3:]) & set(keys)
    assert not set(chain_of(tokens, 64, extra=b"x")) & set(keys)
    assert not set(chain_of(tokens, 64, seed=b"s" * 32)) & set(keys)
