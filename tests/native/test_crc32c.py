"""CRC-32C against an independent implementation, on every code path."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import crc32c as reference
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkv.native import ffi, lib

CONTENT = np.random.default_rng(1).integers(0, 256, 3 * 4096 + 64, dtype=np.uint8).tobytes()
BASE = ffi.from_buffer("uint8_t[]", CONTENT)
PAGE_BYTES = 4096


@pytest.fixture(params=[0, 1, 2], ids=["portable", "best", "without folding"])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    lib.fkv_use_simd(request.param)
    yield request.param
    lib.fkv_use_simd(1)


def check_value_of(data: bytes, crc: int = 0) -> int:
    return int(lib.fkv_crc32c(crc, data, len(data)))


def test_check_values(level: int) -> None:
    assert check_value_of(b"123456789") == 0xE3069283
    assert check_value_of(b"") == 0
    # RFC 3720, B.4
    assert check_value_of(bytes(32)) == 0x8A9136AA
    assert check_value_of(b"\xff" * 32) == 0x62A8AB43
    assert check_value_of(bytes(range(32))) == 0x46DD794E
    assert check_value_of(bytes(range(31, -1, -1))) == 0x113FDB5C


def test_portable_is_callable_beside_the_fast_path() -> None:
    assert lib.fkv_crc32c_portable(0, b"123456789", 9) == 0xE3069283


@pytest.mark.parametrize(
    "length", [*range(70), 167, 168, 503, 504, 505, 1008, 4079, 4080, 4081, 4095, 4096, 4097, 8192]
)
def test_every_alignment(level: int, length: int) -> None:
    for offset in range(17):
        expected = reference.crc32c(CONTENT[offset : offset + length])
        assert lib.fkv_crc32c(0, BASE + offset, length) == expected


@given(data=st.binary(max_size=9000), cuts=st.lists(st.integers(0, 9000), max_size=4))
def test_chaining_is_the_checksum_of_the_concatenation(data: bytes, cuts: list[int]) -> None:
    expected = reference.crc32c(data)
    ends = [*sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for function in (lib.fkv_crc32c, lib.fkv_crc32c_portable):
        crc, start = 0, 0
        for end in ends:
            crc = function(crc, data[start:end], end - start)
            start = end
        assert crc == expected


@pytest.mark.parametrize("sequence", [0, 1, 0x0123456789ABCDEF, 2**64 - 1])
@pytest.mark.parametrize("ordinal", [0, 7, 2**32 - 1])
def test_page_checksum_binds_sequence_and_ordinal(level: int, sequence: int, ordinal: int) -> None:
    for offset in (0, 1, 4096):
        page = CONTENT[offset : offset + PAGE_BYTES]
        expected = reference.crc32c(struct.pack("<QI", sequence, ordinal) + page)
        assert lib.fkv_page_crc(sequence, ordinal, BASE + offset) == expected


def test_code_paths_are_named() -> None:
    lib.fkv_use_simd(0)
    assert ffi.string(lib.fkv_code_paths()) == b"crc32c=portable sha256=portable codec=portable"
    lib.fkv_use_simd(1)
    names = dict(pair.split("=") for pair in ffi.string(lib.fkv_code_paths()).decode().split())
    assert names.keys() == {"crc32c", "sha256", "codec"}
