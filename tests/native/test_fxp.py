"""The fixed-width exponent code.

Bit-exact for every pattern, the same bytes on every code path, and as small on real tensors as it
is meant to be.
"""

from __future__ import annotations

from pathlib import Path

import fxp_reference as fxp
import numpy as np
import pytest
import realkv
from codec_contents import KINDS, SPECIAL, make, streams_of
from fxp_reference import BF16, FP16, PLAIN
from hypothesis import given
from hypothesis import strategies as st


def check(values: np.ndarray, mode: int, gap_bytes: int = 0, offset: int = 0) -> int:
    """Every property of one stripe; returns its length."""
    rows, width = values.shape
    vectors, vector_bytes = fxp.scattered(values, gap_bytes, offset), 2 * width
    expected = np.ascontiguousarray(values).view(np.uint8).reshape(rows, vector_bytes)
    bases = fxp.reference_choose(values, mode)
    stripe = fxp.reference_encode(values, mode, bases)
    for level in (0, 1):
        with fxp.code_path(level):
            assert fxp.choose(vectors, vector_bytes, mode).tolist() == bases.tolist()
            assert fxp.encode(vectors, vector_bytes, mode, bases) == stripe
            decoded = fxp.decode(
                stripe, (rows, vector_bytes), mode, bases, gap_bytes=gap_bytes, offset=offset
            )
        assert decoded is not None
        assert (decoded == expected).all()
    return len(stripe)


@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from([BF16, FP16]),
    rows=st.integers(0, 90),
    values=st.one_of(
        st.integers(1, 200), st.sampled_from([16, 32, 48, 64, 80, 96, 128, 192, 256, 576])
    ),
    gap_bytes=st.integers(0, 9),
    offset=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip(
    kind: str, mode: int, rows: int, values: int, gap_bytes: int, offset: int, seed: int
) -> None:
    check(make(kind, rows, values, seed), mode, gap_bytes, offset)


@given(
    mode=st.sampled_from([BF16, FP16]),
    values=st.integers(1, 40),
    data=st.data(),
)
def test_round_trip_of_chosen_bits(mode: int, values: int, data: st.DataObject) -> None:
    bits = st.one_of(st.integers(0, 65535), st.sampled_from([int(bits) for bits in SPECIAL]))
    row = st.lists(bits, min_size=values, max_size=values)
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    check(np.array(rows, np.uint16), mode)


@pytest.mark.parametrize("mode", [BF16, FP16])
def test_every_bit_pattern(mode: int) -> None:
    check(np.arange(65536, dtype=np.uint16).reshape(1024, 64), mode)
    check(np.arange(65536, dtype=np.uint16).reshape(64, 1024).T.copy(), mode)


@given(
    mode=st.sampled_from([BF16, FP16]), values=st.integers(1, 80), seed=st.integers(0, 2**32 - 1)
)
def test_any_bases_are_exact(mode: int, values: int, seed: int) -> None:
    """Bases that nobody would choose, also such that the window reaches below zero."""
    rng = np.random.default_rng(seed)
    bases = rng.integers(0, fxp.EXPONENT_MAX[mode] + 1, -(-values // fxp.GROUP)).astype(np.uint8)
    bases[rng.random(len(bases)) < 0.3] = rng.integers(0, 7)
    content = make(rng.choice(KINDS), 20, values, seed)
    vectors, stripe = fxp.scattered(content), fxp.reference_encode(content, mode, bases)
    for level in (0, 1):
        with fxp.code_path(level):
            assert fxp.encode(vectors, 2 * values, mode, bases) == stripe
            decoded = fxp.decode(stripe, (20, 2 * values), mode, bases)
        assert decoded is not None
        assert (decoded == vectors).all()


@given(
    mode=st.sampled_from([BF16, FP16]), values=st.integers(1, 140), seed=st.integers(0, 2**32 - 1)
)
def test_unwanted_rows_are_skipped_with_their_escapes(mode: int, values: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    content = make("mostly zero", 50, values, seed)
    bases = fxp.reference_choose(content, mode)
    stripe = fxp.reference_encode(content, mode, bases)
    wanted = rng.random(50) < rng.random()
    for level in (0, 1):
        with fxp.code_path(level):
            decoded = fxp.decode(stripe, (50, 2 * values), mode, bases, wanted=wanted)
        assert decoded is not None
        expected = content.view(np.uint8).reshape(50, 2 * values)
        assert (decoded == np.where(wanted[:, None], expected, fxp.CANARY)).all()


GOLDEN = [
    # 1.0, -2.0, 0.0, 1.5: codes 1, 0, escape, 1
    (BF16, ["3F80C00000003FC0"], [128], "00 80 00 40  0D 04 04  00"),
    # two rows: the second one's NaN and infinity (exponents FF) are escapes; the first one's 0 too
    (BF16, ["3F800000", "FFC1FF80"], [127], "00 00  02 02 02  C1 80  03 03 03  00 FF FF"),
    # nine values, so planes of two bytes; exponents 127, 126 ... 119: codes 0 ... 6, two escapes
    (
        BF16,
        ["3F803F003E803E003D803D003C803C003B80"],
        [127],
        "00 00 00 00 00 00 00 00 00  AA 01 CC 01 F0 01  78 77",
    ),
    # 1.0, -1.5, 65504: codes 0, 0, escape; then mantissa bits 8 and 9, then signs
    (FP16, ["3C00BE007BFF"], [15], "00 00 FF  04 04 04  04 06 02  1E"),
    (PLAIN, ["01020304", "05060708"], [], "02 01 04 03  06 05 08 07"),
]


def golden_rows(rows: list[str]) -> np.ndarray:
    """Rows of big-endian hex words, as they lie in little-endian memory."""
    pairs = [[row[i : i + 4] for i in range(0, len(row), 4)] for row in rows]
    return np.array(
        [list(b"".join(bytes.fromhex(pair)[::-1] for pair in row)) for row in pairs], np.uint8
    )


@pytest.mark.parametrize(("mode", "rows", "bases", "stripe"), GOLDEN)
@pytest.mark.parametrize("level", [0, 1])
def test_golden_stripes(
    mode: int, rows: list[str], bases: list[int], stripe: str, level: int
) -> None:
    vectors, base_bytes = golden_rows(rows), np.array([*bases, 0], np.uint8)
    with fxp.code_path(level):
        assert fxp.encode(vectors, vectors.shape[1], mode, base_bytes) == bytes.fromhex(stripe)
        decoded = fxp.decode(bytes.fromhex(stripe), vectors.shape, mode, base_bytes)
    assert decoded is not None
    assert decoded.tolist() == vectors.tolist()


def test_ties_go_to_the_higher_base() -> None:
    vectors = fxp.scattered(np.full((4, 16), 0x3F80, np.uint16))  # exponent 127 alone
    for level in (0, 1):
        with fxp.code_path(level):
            assert fxp.choose(vectors, 32, BF16).tolist() == [133]
            assert fxp.choose(vectors[:0], 32, BF16).tolist() == [255]
            assert fxp.choose(vectors[:0], 32, FP16).tolist() == [31]


def test_costs_that_fit_no_page_saturate() -> None:
    content = make("any bits", 2, 40_000, 1)
    for level in (0, 1):
        with fxp.code_path(level):
            bases = fxp.choose(fxp.scattered(content), 80_000, BF16)
            assert fxp.costs(fxp.scattered(content), 80_000, BF16, bases).tolist() == [65535] * 2


def test_many_rows_at_once() -> None:
    """More rows than an 8-bit counter and than the list of waiting escapes can hold."""
    check(make("any bits", 1024, 64, 1), BF16)
    check(make("normal bf16", 1500, 96, 2), BF16)
    check(make("outliers", 1024, 80, 3), FP16)


def check_real(path: Path, every: int) -> None:
    sizes: dict[tuple[str, int], list[int]] = {}
    for name, is_fp16, stream in streams_of(path)[::every]:
        mode = FP16 if is_fp16 else BF16
        sizes.setdefault((name, mode), []).append(check(stream, mode))
    for (name, mode), lengths in sizes.items():
        bits = 8 * sum(lengths) / (len(lengths) * 1024 * 64)
        assert bits < (11.7 if mode == BF16 else 14.6), (
            f"{path.name} {name}: {bits:.2f} bits a value"
        )


@pytest.mark.skipif(not realkv.SAMPLE.exists(), reason="the sample of real tensors is not there")
def test_real_sample() -> None:
    check_real(realkv.SAMPLE, every=1)


@pytest.mark.skipif(not realkv.full_set(), reason="the full set of real tensors is not there")
@pytest.mark.parametrize("path", realkv.full_set(), ids=lambda path: path.stem)
def test_real_full_set(path: Path) -> None:
    check_real(path, every=5)
