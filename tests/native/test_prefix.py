"""The prefix code in bit planes.

Bit-exact for every pattern, the same bytes on every code path and in the reference, and as small on
real tensors as it is meant to be.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import prefix_reference as prefix
import pytest
import realkv
from codec_contents import KINDS, make, streams_of
from fxp_reference import LEVELS, code_path, scattered
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_reference import BF16, E4M3, FP16, MODES


def rows_that_fit(values: int, mode: int) -> int:
    """Rows whose fixed part fits a page for sure."""
    return prefix.PAGE_BYTES * 8 // (values * (prefix.MANTISSA[mode] + 3))


def contents(kind: str, rows: int, values: int, seed: int, mode: int) -> np.ndarray:
    return make(kind, rows, values, seed) & np.uint16(prefix.PATTERN[mode])


def check(
    values: np.ndarray,
    mode: int,
    parameters: np.ndarray | None = None,
    gap_bytes: int = 0,
    offset: int = 0,
) -> int:
    """Every property of one stripe; returns its length."""
    rows, width = values.shape
    vectors, vector_bytes = scattered(values, gap_bytes, offset), 2 * width
    expected = np.ascontiguousarray(values).view(np.uint8).reshape(rows, vector_bytes)
    given_parameters = parameters
    if parameters is None:
        parameters = prefix.choose(vectors, vector_bytes, mode)
        assert parameters.tolist() == prefix.reference_choose(values, mode)
    stripe = prefix.reference_encode(values, mode, parameters)
    if len(stripe) > prefix.PAGE_BYTES:
        return len(stripe)
    for level in LEVELS:
        with code_path(level):
            if given_parameters is None:
                chosen = prefix.choose(vectors, vector_bytes, mode)
                assert chosen.tolist() == parameters.tolist()
            cost = prefix.costs(vectors, vector_bytes, mode, parameters).astype(np.int64).sum()
            assert cost == prefix.reference_bits(values, mode, parameters)
            assert prefix.encode(vectors, vector_bytes, mode, parameters) == stripe
            decoded = prefix.decode(
                stripe, (rows, vector_bytes), mode, parameters, gap_bytes=gap_bytes, offset=offset
            )
        assert decoded is not None
        assert (decoded == expected).all()
    return len(stripe)


@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(MODES),
    values=st.one_of(
        st.integers(1, 200), st.sampled_from([16, 32, 48, 64, 80, 96, 128, 192, 256, 576, 1024])
    ),
    share=st.floats(0, 1),
    gap_bytes=st.integers(0, 9),
    offset=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip(
    kind: str, mode: int, values: int, share: float, gap_bytes: int, offset: int, seed: int
) -> None:
    rows = max(1, int(share * min(rows_that_fit(values, mode), 90)))
    check(contents(kind, rows, values, seed, mode), mode, None, gap_bytes, offset)


@given(mode=st.sampled_from(MODES), values=st.integers(1, 200), data=st.data())
def test_any_parameters_are_exact(mode: int, values: int, data: st.DataObject) -> None:
    """Parameters that nobody would choose: windows past the ends, signs that are not steady."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    parameters = rng.integers(0, 256, values + 1).astype(np.uint8)
    parameters[0] = rng.integers(0, prefix.EXPONENT_MAX[mode] + 1)
    unsteady = parameters[1:] < 0x80
    parameters[1:][unsteady] &= 0xBF
    if data.draw(st.booleans()):  # few escapes, at least of the base
        parameters[1:] &= 0xE1
        parameters[0] = {BF16: 127, E4M3: 7}.get(mode, 15)
    rows = max(1, rows_that_fit(values, mode) // 3)
    check(contents(data.draw(st.sampled_from(KINDS)), rows, values, seed, mode), mode, parameters)


@pytest.mark.parametrize("mode", MODES)
def test_every_bit_pattern(mode: int) -> None:
    patterns = np.arange(65536, dtype=np.uint16) & np.uint16(prefix.PATTERN[mode])
    for part in np.split(patterns.reshape(-1, 64), 64):
        assert check(part, mode) <= prefix.PAGE_BYTES
    for part in np.split(patterns.reshape(64, -1).T.copy(), 64):
        assert check(part, mode) <= prefix.PAGE_BYTES


@given(
    mode=st.sampled_from(MODES),
    kind=st.sampled_from(KINDS),
    values=st.integers(1, 140),
    seed=st.integers(0, 2**32 - 1),
)
def test_unwanted_rows_are_skipped(mode: int, kind: str, values: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = max(1, min(50, rows_that_fit(values, mode) // 3))
    content = contents(kind, rows, values, seed, mode)
    parameters = prefix.choose(scattered(content), 2 * values, mode)
    stripe = prefix.reference_encode(content, mode, parameters)
    wanted = rng.random(rows) < rng.random()
    for level in LEVELS:
        with code_path(level):
            decoded = prefix.decode(stripe, (rows, 2 * values), mode, parameters, wanted=wanted)
        assert decoded is not None
        expected = content.view(np.uint8).reshape(rows, 2 * values)
        assert (decoded == np.where(wanted[:, None], expected, prefix.CANARY)).all()


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(MODES),
    rows=st.sampled_from([1, 2, 15, 16, 17, 254, 255, 256, 510, 511, 3855, 3856, 7711, 9000]),
    values=st.integers(1, 40),
    negative=st.sampled_from([0, 0.05, 0.0625, 0.5, 0.94, 1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_choices_for_many_rows(
    kind: str, mode: int, rows: int, values: int, negative: float, seed: int
) -> None:
    """More than counters of eight bits take, more than sums of sixteen do."""
    rng = np.random.default_rng(seed)
    content = contents(kind, rows, values, seed, mode) & 0x7FFF
    content |= (rng.random(content.shape) < negative).astype(np.uint16) << 15
    content[:, values // 2 :] >>= np.uint16(seed % 3)  # channels of other sizes
    content &= np.uint16(prefix.PATTERN[mode])
    expected = prefix.reference_choose(content, mode)
    for level in LEVELS:
        with code_path(level):
            assert prefix.choose(scattered(content), 2 * values, mode).tolist() == expected


def test_what_is_chosen() -> None:
    """A steady sign is found, a narrow channel too, and zeros are cheap."""
    rng = np.random.default_rng(1)
    content = make("normal bf16", 300, 8, 1)
    content[:, 1] |= 0x8000
    content[:, 2] &= 0x7FFF
    content[:, 3] = 0x3F80 | rng.integers(0, 128, 300)
    content[7, 2] |= 0x8000
    content[:, 4] = 0
    for level in LEVELS:
        with code_path(level):
            chosen = prefix.channels(prefix.choose(scattered(content), 16, BF16), BF16)
        assert [c.steady for c in chosen] == [False, True, True, True, True, False, False, False]
        assert (chosen[1].negative, chosen[2].negative) == (True, False)
        assert (chosen[0].kind, chosen[3].kind) == (prefix.WIDE, prefix.NARROW)
        assert chosen[3].base == 127
        assert (prefix.symbol_of(0, False, chosen[4], BF16)) in (0, 1, 2)


def test_choices_at_their_edges() -> None:
    exponents = np.full((40, 8), 100)
    exponents[:4, 0] = 200, 186, 172, 158  # outliers, each as far below as a count reaches
    exponents[:, 5:] = 69, 50, 49  # out of reach; half of the base, and less: nearer to 0
    content = (exponents << 7).astype(np.uint16)
    expected = prefix.reference_choose(content, BF16)
    assert [byte & 31 for byte in expected[1:]] == [0, 0, 0, 0, 0, 30, 30, 31]
    for level in LEVELS:
        with code_path(level):
            assert prefix.choose(scattered(content), 16, BF16).tolist() == expected


def test_a_few_outliers_do_not_matter() -> None:
    content = make("normal bf16", 200, 16, 5)
    plain = prefix.choose(scattered(content), 32, BF16)
    before = prefix.reference_bits(content, BF16, plain)
    content[3] = 0x7F80  # infinity in every channel
    for level in LEVELS:
        with code_path(level):
            chosen = prefix.choose(scattered(content), 32, BF16)
            assert prefix.reference_bits(content, BF16, chosen) < before + 16 * 20


def test_absurd_parameters_are_refused() -> None:
    content = make("normal bf16", 4, 16, 1)
    parameters = prefix.choose(scattered(content), 32, BF16)
    stripe = prefix.reference_encode(content, BF16, parameters)
    wrong = parameters.copy()
    wrong[3] = (wrong[3] & 0x3F) | 0x40  # negative, but not steady
    assert prefix.decode(stripe, (4, 32), BF16, wrong) is None
    rows, out = prefix.addresses(scattered(content)), np.zeros(4096, np.uint8)
    arguments = prefix._u64(rows), 4, 32, BF16, prefix._u8(wrong), prefix._u8(out)
    assert prefix.lib.fkv_prefix_encode(*arguments) == 0
    wrong = np.full(17, 32, np.uint8)
    assert prefix.decode(stripe, (4, 32), FP16, wrong) is None  # a base of six bits
    assert prefix.decode(stripe, (4, 31), BF16, parameters) is None
    assert prefix.decode(stripe, (4, 32), 99, parameters) is None


def test_a_stripe_larger_than_a_page_is_refused() -> None:
    content = make("any bits", 70, 64, 1)
    rows = prefix.addresses(scattered(content))
    parameters = np.zeros(65, np.uint8)
    out = np.zeros(1 << 16, np.uint8)
    arguments = (prefix._u64(rows), 70, 128, BF16, prefix._u8(parameters), prefix._u8(out))
    assert prefix.lib.fkv_prefix_encode(*arguments) == 0


def check_real(path: Path, every: int) -> None:
    sizes: dict[tuple[str, bool], list[int]] = {}
    for name, is_fp16, stream in streams_of(path)[::every]:
        own = FP16 if is_fp16 else BF16
        parameters = prefix.choose(scattered(stream), 128, own)
        for first in range(0, 1024, 32):
            part = np.ascontiguousarray(stream[first : first + 32])
            length = check(part, own, parameters)
            sizes.setdefault((name, own == BF16), []).append(length)
    for (name, is_bf16), lengths in sizes.items():
        bits = 8 * sum(lengths) / (len(lengths) * 32 * 64)
        limit = 13.7 if not is_bf16 else 10.6 if name.startswith("K") else 10.85
        assert bits < limit, f"{path.name} {name}: {bits:.2f} bits a value"


@pytest.mark.skipif(not realkv.SAMPLE.exists(), reason="the sample of real tensors is not there")
def test_real_sample() -> None:
    check_real(realkv.SAMPLE, every=4)


@pytest.mark.skipif(not realkv.full_set(), reason="the full set of real tensors is not there")
@pytest.mark.parametrize("path", realkv.full_set(), ids=lambda path: path.stem)
def test_real_full_set(path: Path) -> None:
    check_real(path, every=29)
