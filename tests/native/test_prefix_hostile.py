"""Stripes of the prefix code that no encoder wrote: taken or refused, on both code paths alike.

tests/fuzz looks after what lies outside them, under sanitizers.
"""

from __future__ import annotations

import numpy as np
import prefix_reference as prefix
from codec_contents import KINDS, make
from fxp_reference import LEVELS, code_path, scattered
from hypothesis import given
from hypothesis import strategies as st
from prefix_reference import BF16, FP16, MODES


def decode_on_all_paths(
    stripe: bytes, shape: tuple[int, int], mode: int, parameters: np.ndarray
) -> np.ndarray | None:
    with code_path(0):
        portable = prefix.decode(stripe, shape, mode, parameters)
    best = prefix.decode(stripe, shape, mode, parameters)
    assert (portable is None) == (best is None)
    if portable is not None and best is not None:
        assert (portable == best).all()
    return best


def a_stripe(kind: str, mode: int, values: int, seed: int) -> tuple[bytes, np.ndarray, int]:
    """(stripe, parameters, rows)."""
    rows = 1 + seed % max(1, min(40, 4096 * 8 // (values * 30)))
    content = make(kind, rows, values, seed) & np.uint16(prefix.PATTERN[mode])
    parameters = prefix.choose(scattered(content), 2 * values, mode)
    return prefix.reference_encode(content, mode, parameters), parameters, rows


STRIPES = {
    "kind": st.sampled_from(KINDS),
    "mode": st.sampled_from(MODES),
    "values": st.integers(1, 140),
    "seed": st.integers(0, 2**32 - 1),
}


@given(**STRIPES, cut=st.integers(1, 200))
def test_truncated_and_longer_stripes_are_refused(
    kind: str, mode: int, values: int, seed: int, cut: int
) -> None:
    stripe, parameters, rows = a_stripe(kind, mode, values, seed)
    shape = (rows, 2 * values)
    assert decode_on_all_paths(stripe, shape, mode, parameters) is not None
    assert decode_on_all_paths(stripe + bytes(cut), shape, mode, parameters) is None
    assert decode_on_all_paths(stripe[:-cut], shape, mode, parameters) is None


@given(**STRIPES, flips=st.lists(st.integers(0, 2**31), min_size=1, max_size=6))
def test_mutated_stripes(kind: str, mode: int, values: int, seed: int, flips: list[int]) -> None:
    """Refused, or what the encoder gives for the rows that came out: one form for everything."""
    stripe, parameters, rows = a_stripe(kind, mode, values, seed)
    mutated = bytearray(stripe)
    for flip in flips:
        mutated[flip // 8 % len(mutated)] ^= 1 << flip % 8
    decoded = decode_on_all_paths(bytes(mutated), (rows, 2 * values), mode, parameters)
    if decoded is not None:
        again = np.ascontiguousarray(decoded).view(np.uint16)
        assert prefix.reference_encode(again, mode, parameters) == bytes(mutated)


@given(
    mode=st.sampled_from(MODES),
    rows=st.integers(1, 70),
    values=st.integers(1, 140),
    length=st.integers(0, 5000),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_stripes(mode: int, rows: int, values: int, length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parameters = rng.integers(0, 256, 1 + values).astype(np.uint8)
    parameters[0] &= prefix.EXPONENT_MAX[mode]
    parameters[1:] &= np.uint8(rng.choice([0x1F, 0x3F, 0xBF]))
    content = (rng.integers(0, 256, length) & rng.integers(0, 256, length)).astype(np.uint8)
    decode_on_all_paths(content.tobytes(), (rows, 2 * values), mode, parameters)


def test_absurd_counts_and_modes_are_refused() -> None:
    parameters, stripe = np.zeros(1025, np.uint8), np.zeros(4096, np.uint8)
    rows = np.zeros(8192, np.uint64)
    pointers = prefix._u8(stripe), prefix._u8(parameters), prefix._u64(rows)

    def verdict(length: int, count: int, vector_bytes: int, mode: int) -> int:
        source, chosen, places = pointers
        return int(
            prefix.lib.fkv_prefix_decode(source, length, count, vector_bytes, mode, chosen, places)
        )

    for mode in MODES:
        assert verdict(64, 2**32 - 1, 128, mode) == -1
        assert verdict(64, 2**32 - 1, 2**32 - 2, mode) == -1
        assert verdict(4096, 4097, 2, mode) == -1
        assert verdict(4096, 1, 2050, mode) == -1
        assert verdict(4096, 1, 0, mode) == -1
        assert verdict(4097, 1, 128, mode) == -1
        assert verdict(0, 0, 128, mode) == -1
    assert verdict(64, 1, 128, 0) == -1
    assert verdict(64, 1, 128, 2**32 - 1) == -1


def test_an_escape_for_what_has_a_code_is_refused() -> None:
    """And one that is above five bits, in float16."""
    narrow = np.array([127, 0], np.uint8)  # base 127, no steady sign
    one, far = np.array([[0x3F80]], np.uint16), np.array([[0x0000]], np.uint16)
    good = prefix.reference_encode(far, BF16, narrow)
    assert good.hex() == "80fe00"  # the low byte; sign 0, then 1 1 11 111; the exponent 0
    assert decode_on_all_paths(good, (1, 2), BF16, narrow) is not None
    assert prefix.reference_encode(one, BF16, narrow).hex() == "0000"
    assert decode_on_all_paths(good[:-1] + b"\x7f", (1, 2), BF16, narrow) is None
    assert decode_on_all_paths(good[:-1] + b"\x70", (1, 2), BF16, narrow) is not None
    zero = np.array([15, 0], np.uint8)
    half = prefix.reference_encode(np.array([[0x7C00]], np.uint16), FP16, zero)
    assert decode_on_all_paths(half, (1, 2), FP16, zero) is not None
    assert decode_on_all_paths(half[:-1] + b"\x3f", (1, 2), FP16, zero) is None


def test_golden_stripes() -> None:
    """Bytes that were worked out by hand: wide and narrow, steady, with an exception."""
    # channel 0 wide, base 127; 1 narrow, base 127 - 2, steady negative
    parameters = np.array([127, 0x20, 0xC0 | 2], np.uint8)
    content = np.array([[0x3F80, 0xBE81], [0xBF02, 0x3E81], [0x3A00, 0xBE00]], np.uint16)
    # row 0: exponents 127 (symbol 0) and 125 (symbol 0); row 1: 126 (1), an exception (15);
    # row 2: 116 (distance 11: an escape), 124 (distance 1: symbol 3)
    low = bytes([0x00, 0x01, 0x82, 0x81, 0x80, 0x80])
    # planes: high bit of channel 0, its sign: 0 0 | 0 1 | 1 0
    # digits: second 1 | 1 0; third 1 | 1; fourth 1 1 | 1 1; fifth 111 | 111; the exception's sign 0
    bits = "00 01 10  1 10 1 1 1 1 1 1 111 111 0".replace(" ", "")
    packed = int(bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")
    stripe = low + packed + bytes([116, 125])
    assert prefix.reference_encode(content, BF16, parameters) == stripe
    for level in LEVELS:
        with code_path(level):
            assert prefix.encode(scattered(content), 4, BF16, parameters) == stripe
            decoded = prefix.decode(stripe, (3, 4), BF16, parameters)
        assert decoded is not None
        assert decoded.tobytes() == content.tobytes()
    padded = bytearray(stripe)
    padded[-3] |= 0x80  # behind the last digit
    assert decode_on_all_paths(bytes(padded), (3, 4), BF16, parameters) is None
