"""float32 and one-byte floats through the codes of 16-bit values.

Bit-exact for every pattern, the same bytes on every code path and in the reference below, which is
written from docs/format.md; real tensors, cast, shrink as far as docs/codecs.md says.
"""

from __future__ import annotations

import fxp_reference as fxp
import numpy as np
import prefix_reference as prefix
import pytest
import realkv
from codec_contents import KINDS, make, streams_of
from fxp_reference import LEVELS, _u8, _u64, addresses, code_path, decoded_rows
from hypothesis import given
from hypothesis import strategies as st

from flashkv.native import lib

FXP, FXP_SHORT = int(lib.FKV_STREAM_FXP_FP32), int(lib.FKV_STREAM_FXP_FP32_SHORT)
PREFIX, PREFIX_SHORT = int(lib.FKV_STREAM_PREFIX_FP32), int(lib.FKV_STREAM_PREFIX_FP32_SHORT)
E4M3, E5M2 = prefix.E4M3, prefix.E5M2
FP32_MODES = [FXP, FXP_SHORT, PREFIX, PREFIX_SHORT]
MODES = [*FP32_MODES, E4M3, E5M2]
OF_HALVES = {FXP: fxp.BF16, FXP_SHORT: fxp.BF16, PREFIX: prefix.BF16, PREFIX_SHORT: prefix.BF16}
SHORT = (FXP_SHORT, PREFIX_SHORT)
SPECIAL_FP32 = np.array(
    [
        *(0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF),  # zeros, denormals, ends
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF),  # infinities, NaNs
        *(0x3F800000, 0xBF800001),
    ],
    np.uint32,
)


def halves_of(values: np.ndarray, mode: int) -> np.ndarray:
    """The 16-bit values of uint32 or uint8 elements."""
    if mode in FP32_MODES:
        return (values >> 16).astype(np.uint16)
    return prefix.widened(values, mode)


def choose(values: np.ndarray, mode: int) -> np.ndarray:
    halves = halves_of(values, mode)
    vectors, of_halves = fxp.scattered(halves), OF_HALVES.get(mode, mode)
    chosen = fxp.choose if of_halves == fxp.BF16 else prefix.choose
    return chosen(vectors, 2 * values.shape[1], of_halves)


def reference_encode(values: np.ndarray, mode: int, parameters: np.ndarray) -> bytes:
    halves, of_halves = halves_of(values, mode), OF_HALVES.get(mode, mode)
    code = fxp.reference_encode if of_halves == fxp.BF16 else prefix.reference_encode
    rest = values.astype("<u2").tobytes() if mode in (FXP, PREFIX) else b""
    return rest + code(halves, of_halves, parameters)


def encode(values: np.ndarray, mode: int, parameters: np.ndarray, gap_bytes: int = 0) -> bytes:
    """Of rows with a gap between them; empty where the stripe is refused."""
    count, width = len(values), values.shape[1] * values.itemsize
    memory = np.full((count, width + gap_bytes), fxp.CANARY, np.uint8)
    memory[:, :width] = np.ascontiguousarray(values).view(np.uint8).reshape(count, width)
    rows, out = addresses(memory), np.full(3 * prefix.PAGE_BYTES, fxp.CANARY, np.uint8)
    length = lib.fkv_halves_encode(_u64(rows), count, width, mode, _u8(parameters), _u8(out))
    assert (out[length:] == fxp.CANARY).all() or length == 0
    return out[:length].tobytes()


def decode(
    stripe: bytes, shape: tuple[int, int], mode: int, parameters: np.ndarray, **how: object
) -> np.ndarray | None:
    def call(source: object, rows: object) -> int:
        return lib.fkv_halves_decode(source, len(stripe), *shape, mode, _u8(parameters), rows)

    return decoded_rows(call, stripe, shape, behind=0xFF, **how)  # type: ignore[arg-type]


def check(values: np.ndarray, mode: int, gap_bytes: int = 0, offset: int = 0) -> int:
    """Every property of one stripe; its length, more than a page where there is none."""
    rows, width = len(values), values.shape[1] * values.itemsize
    parameters = choose(values, mode)
    stripe = reference_encode(values, mode, parameters)
    if len(stripe) > prefix.PAGE_BYTES:
        return len(stripe)
    expected = np.ascontiguousarray(values).view(np.uint8).reshape(rows, width)
    for level in LEVELS:
        with code_path(level):
            assert encode(values, mode, parameters, gap_bytes) == stripe
            back = decode(
                stripe, (rows, width), mode, parameters, gap_bytes=gap_bytes, offset=offset
            )
            assert back is not None
            assert (back == expected).all()
            wanted = np.arange(rows) % 2 == 1
            some = decode(stripe, (rows, width), mode, parameters, wanted=wanted)
            assert some is not None
            assert (some == np.where(wanted[:, None], expected, fxp.CANARY)).all()
    return len(stripe)


def contents(kind: str, rows: int, values: int, seed: int, mode: int) -> np.ndarray:
    """uint32 or uint8 elements whose 16-bit values are of that kind."""
    rng, halves = np.random.default_rng(seed), make(kind, rows, values, seed)
    if mode not in FP32_MODES:
        return (halves >> 8 if mode == E5M2 else halves >> 7 & 0x7F | halves >> 8 & 0x80).astype(
            np.uint8
        )
    lower = rng.integers(0, 65536, halves.shape).astype(np.uint32)
    made = halves.astype(np.uint32) << 16 | (0 if mode in SHORT else lower)
    if kind == "special":
        special = rng.choice(SPECIAL_FP32, halves.shape)
        made = np.where(rng.random(halves.shape) < 0.5, special, made)
    return made & np.uint32(0xFFFF0000 if mode in SHORT else 0xFFFFFFFF)


@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(MODES),
    values=st.one_of(st.integers(1, 150), st.sampled_from([16, 64, 80, 128, 256, 512])),
    rows=st.integers(1, 60),
    gap_bytes=st.integers(0, 9),
    offset=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip(
    kind: str, mode: int, values: int, rows: int, gap_bytes: int, offset: int, seed: int
) -> None:
    rows = max(1, min(rows, 4096 // (values * (4 if mode in FP32_MODES else 1))))
    check(contents(kind, rows, values, seed, mode), mode, gap_bytes, offset)


@pytest.mark.parametrize("mode", [E4M3, E5M2])
def test_every_byte(mode: int) -> None:
    patterns = np.arange(256, dtype=np.uint8)
    assert check(patterns.reshape(4, 64), mode) <= prefix.PAGE_BYTES
    assert check(patterns.reshape(64, 4).T.copy(), mode) <= prefix.PAGE_BYTES


@pytest.mark.parametrize("mode", FP32_MODES)
def test_every_upper_half(mode: int) -> None:
    upper = np.arange(65536, dtype=np.uint32) << 16
    lower = np.uint32(0) if mode in SHORT else np.arange(65536, dtype=np.uint32) * 40503 % 65536
    for part in np.split((upper | lower).reshape(-1, 64), 128):
        assert check(part, mode) <= prefix.PAGE_BYTES


@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(MODES),
    values=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
    cut=st.integers(1, 200),
    flips=st.lists(st.integers(0, 2**31), max_size=6),
)
def test_damaged_stripes(
    kind: str, mode: int, values: int, seed: int, cut: int, flips: list[int]
) -> None:
    """Refused, on both paths; or, where bits were changed only, another stripe of the encoder's."""
    content = contents(kind, 1 + seed % 12, values, seed, mode)
    parameters = choose(content, mode)
    stripe = reference_encode(content, mode, parameters)
    shape = (len(content), values * content.itemsize)
    mutated = bytearray(stripe)
    for flip in flips:
        mutated[flip // 8 % len(mutated)] ^= 1 << flip % 8
    results = []
    for level in LEVELS:
        with code_path(level):
            assert decode(stripe + bytes(cut), shape, mode, parameters) is None
            assert decode(stripe[:-cut], shape, mode, parameters) is None
            results.append(decode(bytes(mutated), shape, mode, parameters))
    assert (results[0] is None) == (results[1] is None)
    if results[0] is not None and results[1] is not None:
        assert (results[0] == results[1]).all()
        again = np.ascontiguousarray(results[0]).view(content.dtype)
        if OF_HALVES.get(mode) != fxp.BF16:  # that one takes escapes for what has a code
            assert reference_encode(again, mode, parameters) == bytes(mutated)


GOLDEN = [
    # 1.0 and -1.5000001: lower halves, then low bytes, a word of codes (bases 127: both 0)
    (
        FXP,
        np.array([[0x3F800000, 0xBFC00001]], np.uint32),
        [127, 0],
        "0000 0100  0081 0000000000000000",
    ),
    (FXP_SHORT, np.array([[0x3F800000, 0xBFC00000]], np.uint32), [127, 0], "0081" + "00" * 8),
    # the prefix code, both channels wide: low bytes; high bits 0 0, signs 0 1
    (PREFIX, np.array([[0x3F800000, 0xBFC00001]], np.uint32), [127, 32, 32], "0000 0100  0040 08"),
    (PREFIX_SHORT, np.array([[0x3F800000, 0xBFC00000]], np.uint32), [127, 32, 32], "0040 08"),
    # 1.0, -1.125 (exponents 7): mantissa bits 0 0, 0 0, 0 1; first digits' low bits 0 0, high 0 0;
    # signs 0 1
    (E4M3, np.array([[0x38, 0xB9]], np.uint8), [7, 32, 32], "2008"),
    # 1.0, -1.75 (exponents 15): mantissa bits 0 1, 0 1; 0 0, 0 0; signs 0 1
    (E5M2, np.array([[0x3C, 0xBF]], np.uint8), [15, 32, 32], "0A02"),
]


@pytest.mark.parametrize(("mode", "values", "parameters", "stripe"), GOLDEN)
@pytest.mark.parametrize("level", LEVELS)
def test_golden_stripes(
    mode: int, values: np.ndarray, parameters: list[int], stripe: str, level: int
) -> None:
    """Bytes that were worked out by hand."""
    chosen, expected = np.array(parameters, np.uint8), bytes.fromhex(stripe)
    with code_path(level):
        assert encode(values, mode, chosen) == expected
        shape = (1, values.shape[1] * values.itemsize)
        back = decode(expected, shape, mode, chosen)
    assert back is not None
    assert back.tobytes() == values.tobytes()


def test_absurd_shapes_are_refused() -> None:
    parameters, stripe = np.zeros(1026, np.uint8), np.zeros(4096, np.uint8)
    rows = np.zeros(1 << 14, np.uint64)

    def verdict(length: int, count: int, vector_bytes: int, mode: int) -> int:
        return int(
            lib.fkv_halves_decode(
                _u8(stripe), length, count, vector_bytes, mode, _u8(parameters), _u64(rows)
            )
        )

    for mode in MODES:
        assert verdict(64, 2**32 - 1, 128, mode) == -1
        assert verdict(4096, 2048, 4, mode) == -1
        assert verdict(4096, 1, 0, mode) == -1
        assert verdict(4096, 2047, 2048, mode) == -1
    for mode in FP32_MODES:
        assert verdict(4096, 1, 126, mode) == -1
    assert verdict(3, 1, 8, PREFIX) == -1  # shorter than the lower halves
    assert verdict(64, 1, 128, prefix.BF16) == -1
    assert verdict(64, 1, 128, 2**32 - 1) == -1


def test_what_fits_no_page_is_refused() -> None:
    parameters = np.zeros(65, np.uint8)
    for rows in (64, 65):
        values = np.zeros((rows, 64), np.uint32)
        for mode in (PREFIX, PREFIX_SHORT):  # the upper halves' low bytes alone fill a page
            assert encode(values, mode, parameters) == b""
    assert encode(np.zeros((33, 64), np.uint32), FXP, parameters) == b""  # the lower halves
    assert encode(np.zeros((32, 64), np.uint32), FXP, parameters) != b""


def test_exponents_of_e4m3_have_four_bits() -> None:
    """One of five would come back as another byte."""
    zero = np.array([7, 0], np.uint8)  # narrow
    stripe = prefix.reference_encode(np.array([[15 << 10]], np.uint16), E4M3, zero)
    assert decode(stripe, (1, 1), E4M3, zero) is not None
    assert decode(stripe[:-1] + b"\x1f", (1, 1), E4M3, zero) is None
    assert decode(stripe, (1, 1), E4M3, np.array([16, 0], np.uint8)) is None


def cast_to_fp8(words: np.ndarray, mode: int) -> np.ndarray:
    torch = pytest.importorskip("torch")
    values = torch.from_numpy((words.astype(np.uint32) << 16).view(np.float32))
    name = torch.float8_e4m3fn if mode == E4M3 else torch.float8_e5m2
    cast: np.ndarray = values.to(name).view(torch.uint8).numpy()
    return cast


@pytest.mark.skipif(not realkv.SAMPLE.exists(), reason="the sample of real tensors is not there")
@pytest.mark.parametrize(
    ("mode", "limit"),
    [(E4M3, 6.75), (E5M2, 5.8), (PREFIX_SHORT, 10.9), (FXP_SHORT, 11.6)],
)
def test_real_tensors(mode: int, limit: float) -> None:
    """Bits a value of K and V, cast or seen as float32."""
    bits = values = 0
    for _, is_fp16, stream in streams_of(realkv.SAMPLE)[::7]:
        if is_fp16:
            continue
        if mode in FP32_MODES:
            part = stream[:32].astype(np.uint32) << 16
        else:
            part = cast_to_fp8(stream[:64], mode)
        bits += 8 * check(np.ascontiguousarray(part), mode)
        values += part.size
    assert values
    assert bits / values < limit
