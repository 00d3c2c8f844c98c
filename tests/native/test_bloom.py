"""Split-block Bloom filter: nothing added is missed, false positives are as rare as predicted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkv.native import ffi, lib

BLOCK_BITS = 256


def digests(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def filled(keys: np.ndarray, bits_per_key: int, stride: int = 16) -> np.ndarray:
    length = lib.fkv_bloom_bytes(len(keys), bits_per_key)
    filter_bytes = np.zeros(length, np.uint8)
    rows = np.zeros((len(keys), stride), np.uint8)
    rows[:, :16] = keys
    rows[:, 16:] = 0xEE
    lib.fkv_bloom_add(
        ffi.from_buffer("uint8_t[]", filter_bytes),
        length,
        ffi.from_buffer("uint8_t[]", rows),
        len(keys),
        stride,
    )
    return filter_bytes


def found(filter_bytes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    answers = np.full(len(keys), 0xFF, np.uint8)
    lib.fkv_bloom_test(
        ffi.from_buffer("uint8_t[]", filter_bytes),
        len(filter_bytes),
        ffi.from_buffer("uint8_t[]", np.ascontiguousarray(keys)),
        len(keys),
        ffi.from_buffer("uint8_t[]", answers),
    )
    assert set(answers) <= {0, 1}
    return answers.astype(bool)


def theory(keys_a_block: float) -> float:
    """False positives of a split-block filter.

    A block holds Poisson-many keys, each of which sets one bit of 32 in each of eight words.
    """
    return sum(
        math.exp(n * math.log(keys_a_block) - keys_a_block - math.lgamma(n + 1))
        * (1 - (1 - 1 / 32) ** n) ** 8
        for n in range(400)
    )


@pytest.mark.parametrize("count", [1, 2, 33, 1000])
@pytest.mark.parametrize("bits_per_key", [1, 8, 12])
@pytest.mark.parametrize("stride", [16, 20, 64])
def test_no_false_negatives(count: int, bits_per_key: int, stride: int) -> None:
    keys = digests(count, seed=count)
    assert found(filled(keys, bits_per_key, stride), keys).all()


@pytest.mark.parametrize("bits_per_key", [6, 8, 12, 16])
def test_false_positive_rate(bits_per_key: int) -> None:
    count, tried = 50_000, 200_000
    filter_bytes = filled(digests(count, seed=3), bits_per_key)
    expected = theory(count / (len(filter_bytes) * 8 / BLOCK_BITS))
    measured = found(filter_bytes, digests(tried, seed=4)).mean()
    deviation = math.sqrt(expected * (1 - expected) / tried)
    assert abs(measured - expected) < 0.05 * expected + 6 * deviation


@given(st.integers(0, 10**9), st.integers(1, 64))
def test_length_is_whole_blocks_and_enough(count: int, bits_per_key: int) -> None:
    length = lib.fkv_bloom_bytes(count, bits_per_key)
    assert length % 32 == 0
    assert 32 <= length < max(count * bits_per_key / 8, 1) + 32
    assert length * 8 >= count * bits_per_key


def test_one_bit_in_each_word_and_blocks_spread_evenly() -> None:
    filter_bytes = np.zeros(32 * 1024, np.uint8)
    key = digests(1, seed=5)
    pointer = ffi.from_buffer("uint8_t[]", filter_bytes)
    lib.fkv_bloom_add(pointer, len(filter_bytes), ffi.from_buffer("uint8_t[]", key), 1, 16)
    words = filter_bytes.view("<u4")
    assert [int(word).bit_count() for word in words[words != 0]] == [1] * 8

    many = digests(100_000, seed=6)
    lib.fkv_bloom_add(pointer, len(filter_bytes), ffi.from_buffer("uint8_t[]", many), 1000, 16)
    used = (filter_bytes.reshape(-1, 32) != 0).any(axis=1).mean()
    assert abs(used - (1 - math.exp(-1000 / 1024))) < 0.06


def test_known_filter() -> None:
    """Byte 0..7 choose the block, the low 40 bits of bytes 8..15 five bits for each word."""
    first_half, second_half = (2**63).to_bytes(8, "little"), (0b00001_00000).to_bytes(8, "little")
    key = np.frombuffer(first_half + second_half, np.uint8).reshape(1, 16)
    filter_bytes = np.zeros(64, np.uint8)
    lib.fkv_bloom_add(
        ffi.from_buffer("uint8_t[]", filter_bytes), 64, ffi.from_buffer("uint8_t[]", key), 1, 16
    )
    assert filter_bytes.view("<u4").tolist() == [0] * 8 + [1, 2, 1, 1, 1, 1, 1, 1]


def test_a_filter_shorter_than_a_block_excludes_nothing() -> None:
    assert found(np.zeros(0, np.uint8), digests(5, seed=7)).all()
    assert found(np.zeros(31, np.uint8), digests(5, seed=7)).all()
