"""Stripes that no encoder wrote: taken or refused, on all code paths alike.

tests/fuzz looks after what lies outside them, under sanitizers.
"""

from __future__ import annotations

import fxp_reference as fxp
import numpy as np
from fxp_reference import BF16, FP16, PLAIN
from hypothesis import given
from hypothesis import strategies as st

from flashkv.native import ffi, lib


def decode_on_all_paths(
    stripe: bytes, shape: tuple[int, int], mode: int, parameters: np.ndarray
) -> np.ndarray | None:
    with fxp.code_path(0):
        portable = fxp.decode(stripe, shape, mode, parameters)
    best = fxp.decode(stripe, shape, mode, parameters)
    assert (portable is None) == (best is None)
    if portable is not None and best is not None:
        assert (portable == best).all()
    return best


def a_stripe(mode: int, rows: int, values: int, seed: int) -> tuple[bytes, np.ndarray]:
    rng = np.random.default_rng(seed)
    content = rng.normal(size=(rows, values)) * np.where(rng.random((rows, values)) < 0.02, 1e9, 1)
    if mode == FP16:
        bits = content.clip(-60000, 60000).astype(np.float16).view(np.uint16)
    else:
        bits = (content.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    parameters = fxp.reference_choose(bits, mode)
    return fxp.reference_encode(bits, mode, parameters), parameters


STRIPES = {
    "mode": st.sampled_from([BF16, FP16]),
    "rows": st.integers(1, 40),
    "values": st.integers(1, 140),
    "seed": st.integers(0, 2**32 - 1),
}


@given(**STRIPES, cut=st.integers(1, 200))
def test_truncated_and_longer_stripes_are_refused(
    mode: int, rows: int, values: int, seed: int, cut: int
) -> None:
    stripe, parameters = a_stripe(mode, rows, values, seed)
    shape = (rows, 2 * values)
    assert decode_on_all_paths(stripe, shape, mode, parameters) is not None
    assert decode_on_all_paths(stripe + bytes(cut), shape, mode, parameters) is None
    assert decode_on_all_paths(stripe[:-cut], shape, mode, parameters) is None


@given(**STRIPES, flips=st.lists(st.integers(0, 2**31), min_size=1, max_size=6))
def test_mutated_stripes(mode: int, rows: int, values: int, seed: int, flips: list[int]) -> None:
    stripe, parameters = a_stripe(mode, rows, values, seed)
    mutated = bytearray(stripe)
    for flip in flips:
        mutated[flip // 8 % len(mutated)] ^= 1 << flip % 8
    decode_on_all_paths(bytes(mutated), (rows, 2 * values), mode, parameters)


@given(**STRIPES, length=st.integers(0, 4096))
def test_random_stripes(mode: int, rows: int, values: int, seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    parameters = rng.integers(0, 256, fxp.parameter_bytes(values)).astype(np.uint8)
    content = (rng.integers(0, 256, length) & rng.integers(0, 256, length)).astype(np.uint8)
    decode_on_all_paths(content.tobytes(), (rows, 2 * values), mode, parameters)


@given(rows=st.integers(0, 20), vector_bytes=st.integers(1, 70), length=st.integers(0, 1400))
def test_plain_takes_exactly_its_length(rows: int, vector_bytes: int, length: int) -> None:
    parameters = np.zeros(1, np.uint8)
    fits = length == rows * vector_bytes
    stripe = bytes(i % 251 for i in range(length))
    decoded = decode_on_all_paths(stripe, (rows, vector_bytes), PLAIN, parameters)
    assert (decoded is not None) == fits
    exact = bytes(i % 251 for i in range(rows * vector_bytes))
    decoded = decode_on_all_paths(exact, (rows, vector_bytes), PLAIN, parameters)
    assert decoded is not None
    assert decoded.tobytes() == exact


def test_absurd_counts_and_modes_are_refused() -> None:
    parameters, rows = np.zeros(4096, np.uint8), ffi.new("uint64_t[1]")
    pointer = ffi.cast("uint8_t *", parameters.ctypes.data)
    for mode in (BF16, FP16):
        assert lib.fkv_fxp_decode(pointer, 4096, 1, 2050, mode, pointer, rows) == -1
    for mode in (PLAIN, BF16, FP16):
        assert lib.fkv_fxp_decode(pointer, 64, 2**32 - 1, 2**32 - 2, mode, pointer, rows) == -1
        assert lib.fkv_fxp_decode(pointer, 64, 2**32 - 1, 128, mode, pointer, rows) == -1
    assert lib.fkv_fxp_decode(pointer, 0, 0, 128, 3, pointer, rows) == -1
    assert lib.fkv_fxp_decode(pointer, 0, 0, 128, 2**32 - 1, pointer, rows) == -1


def test_fp16_escapes_have_five_bits() -> None:
    parameters = np.array([15, 0, 0], np.uint8)
    stripe = bytes(3) + bytes.fromhex("0700000000000000") + bytes(8) + b"\x1e"
    assert decode_on_all_paths(stripe, (1, 6), FP16, parameters) is not None
    assert decode_on_all_paths(stripe[:-1] + b"\x3e", (1, 6), FP16, parameters) is None
