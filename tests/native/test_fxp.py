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
from fxp_reference import BF16, FP16, LEVELS, PLAIN
from hypothesis import given
from hypothesis import strategies as st


def check(values: np.ndarray, mode: int, gap_bytes: int = 0, offset: int = 0) -> int:
    """Every property of one stripe; returns its length."""
    rows, width = values.shape
    vectors, vector_bytes = fxp.scattered(values, gap_bytes, offset), 2 * width
    expected = np.ascontiguousarray(values).view(np.uint8).reshape(rows, vector_bytes)
    parameters = fxp.reference_choose(values, mode)
    stripe = fxp.reference_encode(values, mode, parameters)
    for level in LEVELS:
        with fxp.code_path(level):
            assert fxp.choose(vectors, vector_bytes, mode).tolist() == parameters.tolist()
            assert fxp.encode(vectors, vector_bytes, mode, parameters) == stripe
            decoded = fxp.decode(
                stripe, (rows, vector_bytes), mode, parameters, gap_bytes=gap_bytes, offset=offset
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
def test_any_parameters_are_exact(mode: int, values: int, seed: int) -> None:
    """Parameters that nobody would choose, also such that the window reaches below zero."""
    rng = np.random.default_rng(seed)
    parameters = rng.integers(0, 256, fxp.parameter_bytes(values)).astype(np.uint8)
    parameters[0] = rng.integers(0, rng.choice([8, fxp.EXPONENT_MAX[mode] + 1, 256]))
    content = make(rng.choice(KINDS), 20, values, seed)
    vectors, stripe = fxp.scattered(content), fxp.reference_encode(content, mode, parameters)
    for level in LEVELS:
        with fxp.code_path(level):
            assert fxp.encode(vectors, 2 * values, mode, parameters) == stripe
            decoded = fxp.decode(stripe, (20, 2 * values), mode, parameters)
        assert decoded is not None
        assert (decoded == vectors).all()


@given(
    mode=st.sampled_from([BF16, FP16]), values=st.integers(1, 140), seed=st.integers(0, 2**32 - 1)
)
def test_unwanted_rows_are_skipped_with_their_escapes(mode: int, values: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    content = make("mostly zero", 50, values, seed)
    parameters = fxp.reference_choose(content, mode)
    stripe = fxp.reference_encode(content, mode, parameters)
    wanted = rng.random(50) < rng.random()
    for level in LEVELS:
        with fxp.code_path(level):
            decoded = fxp.decode(stripe, (50, 2 * values), mode, parameters, wanted=wanted)
        assert decoded is not None
        expected = content.view(np.uint8).reshape(50, 2 * values)
        assert (decoded == np.where(wanted[:, None], expected, fxp.CANARY)).all()


GOLDEN = [
    # 1.0, -2.0, 0.0, 1.5: codes 1, 0, escape, 1
    (BF16, ["3F80C00000003FC0"], "80 00 00", "00 01 00 80  01 00 07 01 00 00 00 00  00"),
    # two rows: the second one's NaN and infinity (exponents FF) are escapes; the first one's 0 too
    (
        BF16,
        ["3F800000", "FFC1FF80"],
        "7F 00",
        "00 00  00 07 00 00 00 00 00 00  83 01  07 07 00 00 00 00 00 00  00 FF FF",
    ),
    # nine values, so one in the upper nibbles; exponents 127, 126 ... 119: codes 0 ... 6, escapes
    (
        BF16,
        ["3F803F003E803E003D803D003C803C003B80"],
        "7F 00 00 00 00 00",
        "00 00 00 00 00 00 00 00 00  70 01 02 03 04 05 06 07  78 77",
    ),
    # bases 127, 125, 6: codes 0, 0, 2
    (BF16, ["3F803E800200"], "7F 20 0F", "00 00 00  00 00 02 00 00 00 00 00"),
    # 1.0, -1.5, 65504: codes 0, 0, escape; then mantissa bits 8 and 9, and signs
    (
        FP16,
        ["3C00BE007BFF"],
        "0F 00 00",
        "00 00 FF  00 00 07 00 00 00 00 00  00 06 03 00 00 00 00 00  1E",
    ),
    # 64 values: exponents 127 - i % 8, all but every eighth within the window, one of them negative
    (
        BF16,
        ["BF803F003E803E003D803D003C803C00" + "3F803F003E803E003D803D003C803C00" * 7],
        "7F" + "00" * 32,
        "01" + "00" * 63 + "0055AAFF0055AAFF" * 2 + "00000000FFFFFFFF" + "78" * 8,
    ),
    (PLAIN, ["01020304", "05060708"], "", "02 01 04 03  06 05 08 07"),
]


def golden_rows(rows: list[str]) -> np.ndarray:
    """Rows of big-endian hex words, as they lie in little-endian memory."""
    pairs = [[row[i : i + 4] for i in range(0, len(row), 4)] for row in rows]
    return np.array(
        [list(b"".join(bytes.fromhex(pair)[::-1] for pair in row)) for row in pairs], np.uint8
    )


@pytest.mark.parametrize(("mode", "rows", "chosen", "stripe"), GOLDEN)
@pytest.mark.parametrize("level", LEVELS)
def test_golden_stripes(mode: int, rows: list[str], chosen: str, stripe: str, level: int) -> None:
    vectors = golden_rows(rows)
    parameters = np.frombuffer(bytes.fromhex(chosen) + b"\0", np.uint8)
    with fxp.code_path(level):
        assert fxp.encode(vectors, vectors.shape[1], mode, parameters) == bytes.fromhex(stripe)
        decoded = fxp.decode(bytes.fromhex(stripe), vectors.shape, mode, parameters)
    assert decoded is not None
    assert decoded.tolist() == vectors.tolist()


@pytest.mark.parametrize("level", LEVELS)
def test_choices(level: int) -> None:
    def chosen(exponents: list[int], mode: int = BF16) -> list[int]:
        shift = 10 if mode == FP16 else 7
        values = np.array(exponents, np.uint16)[:, None] << shift
        with fxp.code_path(level):
            return fxp.choose(fxp.scattered(values), 2, mode).tolist()

    assert chosen([127] * 4) == [128, 0]  # room above, where it costs nothing
    assert chosen([127, 121]) == [127, 0]
    assert chosen([255, 255]) == [255, 0]
    assert chosen([31, 31], FP16) == [31, 0]
    assert chosen([3, 2, 1]) == [6, 0]
    assert chosen([]) == [6, 0]
    assert chosen([200] + [127] * 3) == [128, 0]  # one far above the others
    assert chosen([250, 200, 150] + [127] * 5) == [128, 0]
    assert chosen([250] * 2 + [127]) == [251, 0]


@pytest.mark.parametrize("level", LEVELS)
def test_bases_far_apart(level: int) -> None:
    """A channel of small values has the nibble's lowest base; one of zeros always a right one."""
    values = np.array([[127 << 7, 113 << 7, 90 << 7, 0, 127 << 7]], np.uint16)
    with fxp.code_path(level):
        assert fxp.choose(fxp.scattered(values), 10, BF16).tolist() == [128, 0xE0, 0xFE, 0x00]


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
        assert bits < (11.5 if mode == BF16 else 14.4), (
            f"{path.name} {name}: {bits:.2f} bits a value"
        )


@pytest.mark.skipif(not realkv.SAMPLE.exists(), reason="the sample of real tensors is not there")
def test_real_sample() -> None:
    check_real(realkv.SAMPLE, every=1)


@pytest.mark.skipif(not realkv.full_set(), reason="the full set of real tensors is not there")
@pytest.mark.parametrize("path", realkv.full_set(), ids=lambda path: path.stem)
def test_real_full_set(path: Path) -> None:
    check_real(path, every=5)
