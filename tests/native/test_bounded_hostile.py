"""Stripes of the bounded code that no encoder wrote: refused, or the same numbers on every path.

tests/fuzz/fuzz_bounded.c does this at length, under sanitizers.
"""

from __future__ import annotations

import bounded_reference as bounded
import numpy as np
from bounded_reference import MODES, PAGE_BYTES
from codec_contents import KINDS, make
from fxp_reference import LEVELS, code_path, scattered
from hypothesis import given, settings
from hypothesis import strategies as st

from flashkv.native import lib


def decode_on_all_paths(
    stripe: bytes, shape: tuple[int, int], mode: int, parameters: np.ndarray, first_token: int = 0
) -> np.ndarray | None:
    with code_path(0):
        portable = bounded.decode(stripe, shape, mode, parameters, first_token)
    best = bounded.decode(stripe, shape, mode, parameters, first_token)
    assert (portable is None) == (best is None)
    if portable is not None and best is not None:
        assert (portable == best).all()
    return best


def a_stripe(
    kind: str, mode: int, values: int, seed: int
) -> tuple[bytes, np.ndarray, tuple[int, int]] | None:
    """(stripe, parameters, rows and their bytes), or None where it can't be."""
    rows = 1 + seed % 30
    content = make(kind, rows, values, seed)
    words = content if bounded.dtype_of(mode) != "fp32" else content.astype(np.uint32) << 16
    vectors = scattered(np.ascontiguousarray(words).view(np.uint16))
    bits, parameters, levels = bounded.choose(
        vectors, values, mode, -0.3, seed % 3 if rows > 3 else 0
    )
    if not bits:
        return None
    stripe = bounded.encode(vectors, values, mode, parameters, levels)
    return (stripe, parameters, (rows, words.itemsize * values)) if stripe else None


STRIPES = {
    "kind": st.sampled_from(KINDS),
    "mode": st.sampled_from(MODES),
    "values": st.integers(1, 140),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(deadline=None)
@given(**STRIPES, cut=st.integers(1, 200))
def test_truncated_and_longer_stripes_are_refused(
    kind: str, mode: int, values: int, seed: int, cut: int
) -> None:
    made = a_stripe(kind, mode, values, seed)
    if made is None:
        return
    stripe, parameters, shape = made
    assert decode_on_all_paths(stripe, shape, mode, parameters) is not None
    assert decode_on_all_paths(stripe + bytes(cut), shape, mode, parameters) is None
    assert decode_on_all_paths(stripe[:-cut], shape, mode, parameters) is None


@settings(deadline=None)
@given(**STRIPES, flips=st.lists(st.integers(0, 2**31), min_size=1, max_size=6))
def test_mutated_stripes(kind: str, mode: int, values: int, seed: int, flips: list[int]) -> None:
    made = a_stripe(kind, mode, values, seed)
    if made is None:
        return
    stripe, parameters, shape = made
    mutated = bytearray(stripe)
    for flip in flips:
        mutated[flip // 8 % len(mutated)] ^= 1 << flip % 8
    decode_on_all_paths(bytes(mutated), shape, mode, parameters)


@settings(deadline=None)
@given(
    mode=st.sampled_from(MODES),
    rows=st.integers(1, 70),
    values=st.integers(1, 140),
    length=st.integers(0, 5000),
    codes=st.lists(st.integers(0, 15), min_size=1, max_size=4),
    first_token=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_stripes(
    mode: int, rows: int, values: int, length: int, codes: list[int], first_token: int, seed: int
) -> None:
    """Numbers beyond all reach too: steps of 2^124, middles of a thousand of them."""
    rng = np.random.default_rng(seed)
    parameters = rng.integers(0, 256, bounded.parameter_bytes(values, mode)).astype(np.uint8)
    parameters[:2] = np.array([rng.integers(-900, 971)], "<i2").view(np.uint8)
    parameters[2], parameters[3] = rng.integers(0, 5), 0
    size = 2 if mode in bounded.TOKENS else 3
    for c in range(values):
        code = codes[c % len(codes)]
        at = 4 + c * size
        parameters[at] = parameters[at] & 0xF0 | code
        if code == 15:
            parameters[at : at + size] = [15, 0, 0][:size]
    content = (rng.integers(0, 256, length) & rng.integers(0, 256, length)).astype(np.uint8)
    item = 4 if bounded.dtype_of(mode) == "fp32" else 2
    decode_on_all_paths(content.tobytes(), (rows, item * values), mode, parameters, first_token)


def test_absurd_counts_and_modes_are_refused() -> None:
    parameters, stripe = np.full(4000, 15, np.uint8), np.zeros(PAGE_BYTES, np.uint8)
    parameters[:4] = 0
    parameters[5::3] = parameters[6::3] = 0
    rows = np.zeros(8192, np.uint64)

    def verdict(length: int, count: int, vector_bytes: int, mode: int) -> int:
        pointers = bounded._u8(stripe), length, count, vector_bytes, mode, bounded._u8(parameters)
        return int(lib.fkv_bounded_decode(*pointers, 0, bounded._u64(rows)))

    mode = bounded.CHANNELS[0]
    assert verdict(0, 2047, 128, mode) == 0  # zeros take nothing
    assert verdict(1, 2047, 128, mode) == -1
    assert verdict(0, 2048, 128, mode) == -1
    assert verdict(0, 0, 128, mode) == -1
    assert verdict(0, 2**32 - 1, 128, mode) == -1
    assert verdict(0, 1, 2**32 - 2, mode) == -1
    assert verdict(0, 1, 2050, mode) == -1
    assert verdict(0, 1, 0, mode) == -1
    assert verdict(4097, 1, 128, mode) == -1
    for wrong in (0, 4, 31, 38, 2**32 - 1):
        assert verdict(0, 1, 128, wrong) == -1


def test_values_that_the_parameters_cannot_say_fit_no_stripe() -> None:
    """A channel of zeros that isn't: neither bits nor an escape stand for it."""
    words = np.array([[0x3F80, 0x3F80]], np.uint16)
    parameters = np.array([0, 0, 0, 0, 0, 0, 0, 15, 0, 0], np.uint8)
    levels = np.zeros(2, np.uint8)
    for level in LEVELS:
        with code_path(level):
            stripe = bounded.encode(scattered(words), 2, bounded.CHANNELS[0], parameters, levels)
            assert stripe == b""
            words[0, 1] = 0x8000
            assert bounded.encode(scattered(words), 2, bounded.CHANNELS[0], parameters, levels)
            words[0, 1] = 0x3F80
