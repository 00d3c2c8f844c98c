"""The bounded code: what comes back is within what its parameters promise.

The same bytes and values on every code path and in the reference, whatever is put, and as few bits
on real tensors as it is meant to take.
"""

from __future__ import annotations

from pathlib import Path

import bounded_reference as bounded
import numpy as np
import pytest
import realkv
from bounded_choice_reference import reference_choose
from bounded_reference import CHANNELS, MODES, PAGE_BYTES, TOKENS
from codec_contents import KINDS, bf16_bits, make, streams_of
from fxp_reference import CANARY, LEVELS, code_path, scattered
from hypothesis import given, settings
from hypothesis import strategies as st

from flashkv.native import lib

FACTORS = (0.0, -0.088, -0.246, -0.72, 0.1, 3.0)


def content_of(kind: str, mode: int, rows: int, values: int, seed: int) -> np.ndarray:
    """Bits [rows, values] of the mode's type."""
    halves = make(kind, rows, values, seed)
    if bounded.dtype_of(mode) != "fp32":
        return halves
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 65536, halves.shape).astype(np.uint32)
    return halves.astype(np.uint32) << 16 | noise


def words_of(numbers: np.ndarray, mode: int) -> np.ndarray:
    """Bits of the mode's type."""
    with np.errstate(over="ignore"):
        match bounded.dtype_of(mode):
            case "bf16":
                return bf16_bits(numbers)
            case "fp16":
                return numbers.astype(np.float16).view(np.uint16)
            case _:
                return numbers.astype(np.float32).view(np.uint32)


def in_memory(words: np.ndarray, gap_bytes: int = 0, offset: int = 0) -> np.ndarray:
    return scattered(np.ascontiguousarray(words).view(np.uint16), gap_bytes, offset)


def check_bound(
    words: np.ndarray, mode: int, parameters: np.ndarray, levels: np.ndarray, first_token: int
) -> None:
    """Every value that came back is within half a step, float32's rounding and its type's own."""
    stream = bounded.stream_of(parameters, mode)
    got = bounded.reference_values(words, mode, parameters, levels, first_token)
    with np.errstate(invalid="ignore"):
        x, y = (bounded.numbers(w, mode).astype(np.float64) for w in (words, got))
    steps = np.array([c.step for c in stream.channels], np.float64)[None, :]
    if stream.by_token:
        steps = np.array([stream.steps[level] for level in levels], np.float64)[:, None]
    rounding = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-23}[bounded.dtype_of(mode)]
    least = {"bf16": 2.0**-133, "fp16": 2.0**-24, "fp32": 2.0**-149}[bounded.dtype_of(mode)]
    exact = (words == got) | ((x == 0) & (y == 0))
    with np.errstate(all="ignore"):
        room = steps / 2 + np.abs(x) * 2.0**-21 + np.maximum(np.abs(y) * rounding / 2, least)
        assert (exact | (np.abs(x - y) <= room)).all()
    assert (got == words)[: max(stream.exact - first_token, 0)].all()


def check_choice(
    words: np.ndarray, vectors: np.ndarray, mode: int, factor: float, exact: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """What is chosen, the same on every code path and in the reference."""
    expected = reference_choose(words, mode, factor, exact)
    for level in LEVELS:
        with code_path(level):
            bits, parameters, levels = bounded.choose(vectors, words.shape[1], mode, factor, exact)
        assert bits == expected[0]
        if bits:
            assert parameters.tolist() == expected[1]
            assert levels.tolist() == expected[2]
    return bits, parameters, levels


def check_stripe(
    words: np.ndarray,
    vectors: np.ndarray,
    mode: int,
    parameters: np.ndarray,
    levels: np.ndarray,
    first_token: int = 0,
    gap_bytes: int = 0,
    offset: int = 0,
) -> bytes:
    """The stripe from first_token on, with all its properties; empty where it can't be."""
    words, vectors, levels = words[first_token:], vectors[first_token:], levels[first_token:]
    rows, values = words.shape
    if not rows:
        return b""
    shape = (rows, words.itemsize * values)
    stripe = bounded.reference_encode(words, mode, parameters, levels, first_token)
    expected = bounded.reference_values(words, mode, parameters, levels, first_token)
    fits = len(stripe) <= PAGE_BYTES
    for level in LEVELS:
        with code_path(level):
            found = bounded.encode(vectors, values, mode, parameters, levels, first_token)
            assert found == (stripe if fits else b"")
            if not found:
                continue
            decoded = bounded.decode(
                found, shape, mode, parameters, first_token, gap_bytes=gap_bytes, offset=offset
            )
        assert decoded is not None
        assert (decoded == expected.view(np.uint8).reshape(shape)).all()
    check_bound(words, mode, parameters, levels, first_token)
    return stripe if fits else b""


def check(
    words: np.ndarray,
    mode: int,
    factor: float = -0.2,
    exact: int = 0,
    first_token: int = 0,
    gap_bytes: int = 0,
    offset: int = 0,
) -> bytes:
    """Every property of the stripe from first_token on of a stream that begins with `exact` tokens
    to be kept; returns it, empty where it can't be.
    """
    vectors = in_memory(words, gap_bytes, offset)
    bits, parameters, levels = check_choice(words, vectors, mode, factor, exact)
    if not bits:
        return b""
    return check_stripe(words, vectors, mode, parameters, levels, first_token, gap_bytes, offset)


@settings(deadline=None)  # the reference goes bit by bit
@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(MODES),
    values=st.one_of(st.integers(1, 70), st.sampled_from([64, 128, 130])),
    rows=st.integers(1, 9),
    factor=st.sampled_from(FACTORS),
    exact=st.integers(0, 4),
    first_token=st.integers(0, 5),
    gap_bytes=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip(
    kind: str,
    mode: int,
    values: int,
    rows: int,
    factor: float,
    exact: int,
    first_token: int,
    gap_bytes: int,
    seed: int,
) -> None:
    words = content_of(kind, mode, rows, values, seed)
    check(words, mode, factor, exact, first_token, gap_bytes, gap_bytes % 4)


@settings(deadline=None, max_examples=40)
@given(
    mode=st.sampled_from(MODES),
    values=st.integers(1, 20),
    rows=st.sampled_from([1, 40, 127, 128, 129, 256, 257]),
    factor=st.one_of(st.sampled_from(FACTORS), st.floats(-2, 2, width=32)),
    scale=st.sampled_from([-40, -7, 0, 9]),
    mean=st.sampled_from([0, 0.5, 60]),
    spread=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_choices_for_numbers_of_all_sizes(
    mode: int,
    values: int,
    rows: int,
    factor: float,
    scale: int,
    mean: float,
    spread: int,
    seed: int,
) -> None:
    """Codes are chosen by a sample of many rows; steps and levels by all of them."""
    rng = np.random.default_rng(seed)
    of_tokens, of_channels = (np.exp2(rng.normal(size=n) * spread) for n in (rows, values))
    numbers = (rng.normal(size=(rows, values)) + mean) * of_tokens[:, None] * of_channels
    words = words_of(numbers * 2.0**scale, mode)
    check_choice(words, in_memory(words), mode, factor, seed % 5)


@pytest.mark.parametrize("mean", [0, 300, 2000])
def test_steps_are_as_large_as_the_middle_needs(mean: int) -> None:
    """Which is so many steps that eleven bits tell it, whatever the deviation asks for."""
    numbers = np.random.default_rng(5).normal(size=(64, 6)) * [1, 1, 1, 1, 1, 8] + mean
    words = words_of(numbers, CHANNELS[2])
    _, parameters, levels = check_choice(words, in_memory(words), CHANNELS[2], -8.0, 0)
    steps = [channel.step for channel in bounded.stream_of(parameters, CHANNELS[2]).channels]
    assert min(steps) > mean / 600
    assert check_stripe(words, in_memory(words), CHANNELS[2], parameters, levels)


@settings(deadline=None)
@given(
    kind=st.sampled_from(["special", "outliers", "normal bf16", "any bits"]),
    mode=st.sampled_from(MODES),
    rows=st.integers(1, 12),
    codes=st.lists(st.sampled_from([*range(14), 15]), min_size=1, max_size=70),
    base=st.sampled_from([-920, -190, -60, -8, 0, 8, 70, 110, 860, 960]),
    first_token=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_parameters(
    kind: str, mode: int, rows: int, codes: list[int], base: int, first_token: int, seed: int
) -> None:
    """Steps that don't fit what is coded: escapes of all kinds, and values that follow them."""
    rng = np.random.default_rng(seed)
    words, levels = content_of(kind, mode, rows, len(codes), seed), rng.integers(0, 16, rows)
    by_token = mode in TOKENS
    base += int(rng.integers(-8, 8))
    fields = [base & 255, base >> 8 & 255, int(rng.integers(0, 5)), int(by_token and seed % 2)]
    for c, code in enumerate(codes):
        middle = int(rng.choice([0, 0, 1, -1, rng.integers(-1024, 1024)]))
        carry, delta = int(rng.integers(0, 8)), int(rng.integers(0, 64))
        field = code | (middle << 4 if by_token else carry << 4 | delta << 7 | middle << 13)
        if code == bounded.NOTHING:
            field, words[:, c] = code, 0
        size = 2 if by_token else 3
        fields += list((field & (1 << 8 * size) - 1).to_bytes(size, "little"))
    parameters = np.array(fields, np.uint8)
    check_stripe(words, in_memory(words), mode, parameters, levels.astype(np.uint8), first_token)


@pytest.mark.parametrize("mode", MODES)
def test_the_greatest_numbers_do_not_become_infinite(mode: int) -> None:
    """Half a step beyond them is an escape, whatever the step."""
    kind = bounded.dtype_of(mode)
    greatest = {"bf16": 0x7F7F, "fp16": 0x7BFF, "fp32": 0x7F7FFFFF}[kind]
    words, levels = np.full((1, 1), greatest, bounded.word_of(mode)), np.zeros(1, np.uint8)
    for base in range(50, 130) if kind == "fp16" else range(930, 970):
        fields = [base & 255, base >> 8, 0, 0, 13, 0, *([] if mode in TOKENS else [0])]
        parameters = np.array(fields, np.uint8)
        assert check_stripe(words, in_memory(words), mode, parameters, levels)
        got = bounded.reference_values(words, mode, parameters, levels)
        assert np.isfinite(bounded.numbers(got, mode)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "values"), [(90, 24), (900, 1)])
def test_many_rows_and_batches(mode: int, rows: int, values: int) -> None:
    """More groups than a batch, of a width that fills no group."""
    words = content_of("normal bf16" if mode % 3 != 0 else "normal fp16", mode, rows, values, 3)
    assert check(words, mode, -0.5, 2)


@pytest.mark.parametrize("mode", [CHANNELS[0], TOKENS[0]])
def test_keys_that_follow_each_other_take_fewer_bits(mode: int) -> None:
    """A carry pays in channels, by prediction; tokens have none."""
    rng = np.random.default_rng(4)
    walk = np.zeros((200, 8), np.float32)
    for t in range(1, 200):
        walk[t] = 0.95 * walk[t - 1] + rng.normal(size=8)
    shuffled = walk[rng.permutation(200)]
    sizes = []
    for values in (walk, shuffled):
        words = (values.view(np.uint32) >> 16).astype(np.uint16)
        sizes.append(len(check(words, mode, -0.1)))
    if mode == CHANNELS[0]:
        assert sizes[0] < 0.85 * sizes[1]
    else:
        assert abs(sizes[0] - sizes[1]) <= 2


def test_the_prediction_goes_on_behind_an_escape() -> None:
    """From the value itself, not from nothing: those behind it follow it where there is a carry."""
    rng = np.random.default_rng(8)
    walk = np.zeros((60, 4), np.float32)
    for t in range(1, 60):
        walk[t] = 0.9 * walk[t - 1] + rng.normal(size=4) + (t % 20 == 7) * 40
    words = (walk.view(np.uint32) >> 16).astype(np.uint16)
    _, parameters, levels = bounded.choose(in_memory(words), 4, CHANNELS[0], -0.05, 0)
    stream = bounded.stream_of(parameters, CHANNELS[0])
    _, rows, _ = bounded.quantised(words, stream, levels, 0)
    assert all(channel.carry > 0 for channel in stream.channels)
    assert sum(value.further == bounded.ROUNDS for row in rows for value in row) >= 1
    assert check(words, CHANNELS[0], -0.05)


@pytest.mark.parametrize("mode", [CHANNELS[0], TOKENS[0]])
def test_channels_of_zeros_take_nothing(mode: int) -> None:
    words = content_of("normal bf16", mode, 64, 32, 9)
    whole = len(check(words, mode, -0.2))
    words[:, 8:] = 0
    words[::3, 9] = 0x8000  # minus zero is a zero
    part = check(words, mode, -0.2)
    assert len(part) < whole * 0.35
    _, parameters, levels = bounded.choose(in_memory(words), 32, mode, -0.2, 0)
    got = bounded.reference_values(words, mode, parameters, levels)
    assert (got[:, 8:] == 0).all()


def test_what_cannot_be_bounded_is_said() -> None:
    for mode in MODES:
        words = content_of("normal bf16", mode, 3, 16, 1)
        assert bounded.choose(in_memory(words), 16, mode, -0.2, 3)[0] == 0  # all exact
    huge = np.full((8, 16), 0x7F7F, np.uint16)  # sums beyond float32's reach
    assert bounded.choose(in_memory(huge), 16, CHANNELS[0], -0.2, 0)[0] == 0


@pytest.mark.parametrize("mode", MODES)
def test_finer_factors_are_nearer(mode: int) -> None:
    words = content_of(
        "normal fp16" if bounded.dtype_of(mode) == "fp16" else "normal bf16", mode, 40, 48, 2
    )
    errors, sizes = [], []
    for factor in (-0.05, -0.2, -0.8):
        _, parameters, levels = bounded.choose(in_memory(words), 48, mode, factor, 0)
        got = bounded.reference_values(words, mode, parameters, levels)
        off = bounded.numbers(got, mode).astype(np.float64) - bounded.numbers(words, mode)
        errors.append(float(np.abs(off / np.abs(bounded.numbers(words, mode)).max(0)).mean()))
        sizes.append(len(bounded.reference_encode(words, mode, parameters, levels)))
    assert errors == sorted(errors)
    assert errors[0] < errors[2] / 2
    assert sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(
    mode=st.sampled_from(MODES),
    values=st.integers(1, 100),
    rows=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_unwanted_rows_are_skipped(mode: int, values: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = content_of("outliers", mode, rows, values, seed)
    bits, parameters, levels = bounded.choose(in_memory(words), values, mode, -0.3, 0)
    if not bits:
        return
    stripe = bounded.reference_encode(words, mode, parameters, levels)
    if len(stripe) > PAGE_BYTES:
        return
    expected = bounded.reference_values(words, mode, parameters, levels)
    shape = (rows, words.itemsize * values)
    wanted = rng.random(rows) < 0.5
    for level in LEVELS:
        with code_path(level):
            decoded = bounded.decode(stripe, shape, mode, parameters, wanted=wanted)
        assert decoded is not None
        whole = expected.view(np.uint8).reshape(shape)
        assert (decoded == np.where(wanted[:, None], whole, CANARY)).all()


def test_golden_stripes() -> None:
    """Bytes that were worked out by hand."""
    # By channel, base 0. Channel 0: a step of 1, no low bits, a digit of one bit, middle 1;
    # channel 1: one low bit, a digit of two bits, carry 4/8, delta 8 (a step of 1/2), middle 0.
    fields = [0 | 0 << 4 | 0 << 7 | 1 << 13, 3 | 4 << 4 | 8 << 7]
    parameters = np.frombuffer(
        bytes([0, 0, 0, 0]) + b"".join(f.to_bytes(3, "little") for f in fields), np.uint8
    )
    # 2.5 - 1 = 1.5: magnitude 1; 0.5 - 1: magnitude 0, negative; -9 - 1: 10 whole steps, an escape
    # 1.25: 2.5 steps of 1/2: magnitude 2, back 1.25; 1 - 0.5 * 1.25 = 0.375: magnitude 0,
    # back 0.875; 0.4375 and 6: 11.125 steps, magnitude 11 = low 1, high 5 = 3 and two ones
    words = np.array([[0x4020, 0x3FA0], [0x3F00, 0x3F80], [0xC110, 0x40C0]], np.uint16)
    # planes of each row: low bit of channel 1; first digits' low bits; channel 1's high bit; signs
    planes = "0 11 0 00   0 00 0 10   1 11 1 00".replace(" ", "")
    # second digits: row 0 channel 0: 0; row 2: 1 1; third: 1 1; fourth: 1 0; the escape's: 1 1 1 1
    digits = "0 11 11 10 1 1 1 1".replace(" ", "")

    def packed(bits: str) -> bytes:
        return int(bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")

    stripe = packed(planes) + packed(digits) + bytes.fromhex("10c1")
    levels = np.zeros(4, np.uint8)
    mode = CHANNELS[0]
    assert bounded.reference_encode(words, mode, parameters, levels) == stripe
    values = [2.5, 1.25, 0.5, 0.875, -9.0, 0.4375 + 5.75]
    for level in LEVELS:
        with code_path(level):
            assert bounded.encode(in_memory(words), 2, mode, parameters, levels) == stripe
            decoded = bounded.decode(stripe, (3, 4), mode, parameters)
        assert decoded is not None
        got = bounded.numbers(decoded.copy().view(np.uint16), mode).reshape(-1)
        assert got.tolist() == values


def check_real(path: Path, every: int) -> None:
    """Bits of stripes with their parameters, 256 tokens a record, against what is meant."""
    for factor, limit_k, limit_v in ((-0.176, 4.85, 4.3), (-0.55, 3.3, 3.2)):
        taken: dict[tuple[str, bool], list[float]] = {}
        for name, is_fp16, stream in streams_of(path)[::every]:
            mode = (TOKENS if name.startswith("V") else CHANNELS)[int(is_fp16)]
            words = np.ascontiguousarray(stream[256:512])
            own = factor * (1.4 if name.startswith("V") else 1.0)
            bits, _, _ = bounded.choose(in_memory(words), words.shape[1], mode, own, 0)
            taken.setdefault((name[0], is_fp16), []).append(bits / words.size)
        for (name, _), each in taken.items():
            mean = sum(each) / len(each)
            assert 1.5 < mean < (limit_k if name == "K" else limit_v), (path.name, name, mean)


@pytest.mark.skipif(not realkv.SAMPLE.exists(), reason="the sample of real tensors is not there")
def test_real_sample() -> None:
    check_real(realkv.SAMPLE, every=4)


@pytest.mark.skipif(not realkv.full_set(), reason="the full set of real tensors is not there")
@pytest.mark.parametrize("path", realkv.full_set(), ids=lambda path: path.stem)
def test_real_full_set(path: Path) -> None:
    check_real(path, every=7)


def test_absurd_parameters_are_refused() -> None:
    for mode in MODES:
        words = content_of("normal bf16", mode, 4, 16, 1)
        _, parameters, levels = bounded.choose(in_memory(words), 16, mode, -0.2, 0)
        stripe, shape = (
            bounded.encode(in_memory(words), 16, mode, parameters, levels),
            (4, 16 * words.itemsize),
        )
        assert bounded.decode(stripe, shape, mode, parameters) is not None
        wrong = {2: 5, 3: 2, 1: 0x7F}  # exact tokens, unit, base
        for at, byte in wrong.items():
            changed = parameters.copy()
            changed[at] = byte
            assert bounded.decode(stripe, shape, mode, changed) is None
        greatest = 970 if mode in TOKENS else 1000  # tokens' step has 15 levels of a quarter octave
        for base, is_refused in ((greatest, False), (greatest + 1, True)):
            changed = parameters.copy()
            changed[:2] = base & 255, base >> 8
            changed[3] = mode in TOKENS
            encoded = bounded.encode(in_memory(words), 16, mode, changed, levels)
            assert (encoded == b"") == is_refused
        changed = parameters.copy()
        changed[4] = changed[4] & 0xF0 | 14
        assert bounded.decode(stripe, shape, mode, changed) is None
        changed[4] = changed[4] & 0xF0 | 15 | 0x10  # nothing, but with something
        assert bounded.decode(stripe, shape, mode, changed) is None
        assert bounded.decode(stripe, (4, 16 * words.itemsize + 1), mode, parameters) is None
        assert lib.fkv_bounded_decode is not None
