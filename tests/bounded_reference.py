"""The bounded code for tests: native functions on numpy arrays, and the format again.

The second half is written from the description in docs/format.md, not from the C code. Rows are
arrays [rows, values] of uint16 (bfloat16, float16) or uint32 (float32) bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fxp_reference import CANARY, _u8, _u64, addresses, decoded_rows

from flashkv.native import lib

CHANNELS = tuple(int(getattr(lib, f"FKV_STREAM_CHANNELS_{n}")) for n in ("BF16", "FP16", "FP32"))
TOKENS = tuple(int(getattr(lib, f"FKV_STREAM_TOKENS_{n}")) for n in ("BF16", "FP16", "FP32"))
MODES = CHANNELS + TOKENS
GROUP, BATCH, ROUNDS, NOTHING, PAGE_BYTES = 64, 64, 7, 15, 4096
F = np.float32


def dtype_of(mode: int) -> str:
    return ("bf16", "fp16", "fp32")[(mode - CHANNELS[0]) % 3]


def word_of(mode: int) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if dtype_of(mode) == "fp32" else np.uint16


def parameter_bytes(values: int, mode: int) -> int:
    return 4 + (2 if mode in TOKENS else 3) * values


def choose(
    vectors: np.ndarray, values: int, mode: int, factor: float, exact: int
) -> tuple[int, np.ndarray, np.ndarray]:
    """(bits about, parameters, levels); bits 0: not to be coded so."""
    rows = addresses(vectors)
    size = parameter_bytes(values, mode)
    parameters, levels = (
        np.full(size + 1, CANARY, np.uint8),
        np.full(len(rows) + 1, CANARY, np.uint8),
    )
    vector_bytes = values * np.dtype(word_of(mode)).itemsize
    arguments = _u64(rows), len(rows), vector_bytes, mode, factor, exact
    bits = int(lib.fkv_bounded_parameters_of(*arguments, _u8(parameters), _u8(levels)))
    assert parameters[-1] == levels[-1] == CANARY
    return bits, parameters[:-1], levels[:-1]


def encode(
    vectors: np.ndarray,
    values: int,
    mode: int,
    parameters: np.ndarray,
    levels: np.ndarray,
    first_token: int = 0,
) -> bytes:
    """The stripe; empty where it doesn't fit a page."""
    rows = addresses(vectors)
    out = np.full(PAGE_BYTES + 64, CANARY, np.uint8)
    vector_bytes = values * np.dtype(word_of(mode)).itemsize
    arguments = _u64(rows), len(rows), vector_bytes, mode, _u8(parameters), _u8(levels)
    length = int(lib.fkv_bounded_encode(*arguments, first_token, _u8(out)))
    assert (out[max(length, 0) :] == CANARY).all()
    return out[:length].tobytes()


def decode(
    stripe: bytes,
    shape: tuple[int, int],
    mode: int,
    parameters: np.ndarray,
    first_token: int = 0,
    **how: Any,
) -> np.ndarray | None:
    """uint8[shape], or None where the stripe was refused. shape: (rows, bytes of a vector)."""

    def call(source: object, rows: object) -> int:
        return int(
            lib.fkv_bounded_decode(
                source, len(stripe), *shape, mode, _u8(parameters), first_token, rows
            )
        )

    return decoded_rows(call, stripe, shape, behind=0xFF, **how)


# ---- the format again -------------------------------------------------------------------------
def step_of(exponent: int) -> np.float32:
    return F(np.exp2(np.float64(exponent % 8) / 8)) * F(2.0 ** (exponent // 8))


@dataclass(frozen=True)
class Channel:
    """What a stream's parameters say of one channel. step: 0 for tokens' own."""

    low: int
    digit: int  # bits of the first one; 0: no bits at all
    carry: np.float32
    step: np.float32
    middle: np.float32

    @property
    def top(self) -> int:
        """The first digit that goes on."""
        return int((1 << self.digit) - 1)


@dataclass(frozen=True)
class Stream:
    """What its parameters say."""

    mode: int
    exact: int
    channels: list[Channel]
    steps: list[np.float32]  # by level

    @property
    def by_token(self) -> bool:
        return self.mode in TOKENS


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def stream_of(parameters: np.ndarray, mode: int) -> Stream:
    data = parameters.tobytes()
    base, exact, unit = int.from_bytes(data[:2], "little", signed=True), data[2], data[3]
    by_token, found = mode in TOKENS, []
    size = 2 if by_token else 3
    for at in range(4, len(data), size):
        bits = int.from_bytes(data[at : at + size], "little")
        code = bits & 15
        if code == NOTHING:
            found.append(Channel(0, 0, F(0), F(0), F(0)))
            continue
        step = step_of(base if by_token else base - (bits >> 7 & 63))
        low = code >> 1
        middle = _signed(bits >> 4, 12) if by_token else _signed(bits >> 13, 11)
        carry = F(0) if by_token else F(bits >> 4 & 7) / F(8)
        unit_of_middle = step * F(2 ** max(low - 1, 0))
        with np.errstate(over="ignore"):
            middle_value = F(middle) * unit_of_middle
        found.append(Channel(low, 1 + (code & 1), carry, step, middle_value))
    steps = [step_of(base + (level << unit)) for level in range(16)] if by_token else []
    return Stream(mode, exact, found, steps)


def numbers(words: np.ndarray, mode: int) -> np.ndarray:
    """float32 of the bits."""
    kind = dtype_of(mode)
    if kind == "bf16":
        return (words.astype(np.uint32) << 16).view(F)
    return words.view(np.float16 if kind == "fp16" else F).astype(F)


def words_of(value: np.float32, mode: int) -> int:
    """The bits that a number is rounded to."""
    kind = dtype_of(mode)
    if kind == "bf16":
        bits = int(np.array(value, F).view(np.uint32))
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF
    with np.errstate(over="ignore"):
        number = np.array(value, F).astype(np.float16 if kind == "fp16" else F)
    return int(number.view(word_of(mode)))


GREATEST = {"bf16": F(3.3895314e38), "fp16": F(65504), "fp32": F(3.4028235e38)}


@dataclass
class Value:
    """One value of a stripe: its magnitude's parts, or an escape."""

    low: int = 0
    first: int = 0
    further: int = 0  # digits 1 behind the first one; ROUNDS: an escape
    sign: int = 0


def quantise(
    x: np.float32, state: np.float32, channel: Channel, size: np.float32, mode: int
) -> tuple[Value, np.float32, np.float32]:
    """(value, the state behind it, what comes back before it is rounded)."""
    from_ = x - channel.middle
    kept = F(0) if mode in TOKENS else channel.carry * state
    d = from_ - kept
    ratio = np.abs(d) / size
    whole = int(ratio) if ratio < 4095 else 4095
    back = np.copysign((F(whole) + F(0.5)) * size, d)
    z = kept + back
    y = channel.middle + z
    high = whole >> channel.low
    first, further = min(high, channel.top), max(high - channel.top, 0)
    bound = size * F(0.5) + np.abs(x) * F(2.0**-22)
    good = np.abs(x - y) <= bound and np.abs(y) <= GREATEST[dtype_of(mode)]
    if not good or further >= ROUNDS:
        state = from_ if np.isfinite(from_) else F(0)
        return Value(0, channel.top, ROUNDS, 0), state, x
    sign = int(np.signbit(d))
    return Value(whole & ((1 << channel.low) - 1), first, further, sign), z, y


class Bits:
    """Bits one behind the other, the lowest of a byte first."""

    def __init__(self) -> None:
        self.all: list[int] = []

    def put(self, value: int, count: int) -> None:
        self.all += [value >> k & 1 for k in range(count)]

    def bytes(self) -> bytes:
        packed = np.packbits(np.array(self.all, np.uint8), bitorder="little")
        return packed.tobytes()


def quantised(
    words: np.ndarray, stream: Stream, levels: np.ndarray, first_token: int
) -> tuple[int, list[list[Value]], np.ndarray]:
    """(exact rows, values of the others, float32 of all before rounding)."""
    exact = min(max(stream.exact - first_token, 0), len(words))
    x = numbers(words, stream.mode)
    back, rows = x.copy(), []
    state = np.zeros(len(stream.channels), F)
    with np.errstate(all="ignore"):
        if exact:
            state = x[exact - 1] - np.array([c.middle for c in stream.channels], F)
            state[~np.isfinite(state)] = 0
        for r in range(exact, len(words)):
            row = []
            for c, channel in enumerate(stream.channels):
                if not channel.digit:
                    back[r, c] = 0
                    row.append(Value())
                    continue
                size = stream.steps[levels[r]] if stream.by_token else channel.step
                value, state[c], back[r, c] = quantise(
                    x[r, c], state[c], channel, size, stream.mode
                )
                row.append(value)
            rows.append(row)
    return exact, rows, back


def grouped(stream: Stream) -> Iterator[tuple[int, int]]:
    for first in range(0, len(stream.channels), GROUP):
        yield first, min(first + GROUP, len(stream.channels))


def reference_encode(
    words: np.ndarray,
    mode: int,
    parameters: np.ndarray,
    levels: np.ndarray,
    first_token: int = 0,
) -> bytes:
    stream = stream_of(parameters, mode)
    exact, rows, _ = quantised(words, stream, levels, first_token)
    planes, digits, escapes, groups = Bits(), Bits(), [], []
    for r, row in enumerate(rows):
        if stream.by_token:
            planes.put(int(levels[exact + r]), 4)
        for first, end in grouped(stream):
            here = list(zip(row[first:end], stream.channels[first:end], strict=True))
            for k in range(6):
                for value, channel in here:
                    if channel.low > k:
                        planes.put(value.low >> k, 1)
            for value, channel in here:
                if channel.digit:
                    planes.put(value.first, 1)
            for value, channel in here:
                if channel.digit == 2:
                    planes.put(value.first >> 1, 1)
            for value, channel in here:
                if channel.digit:
                    planes.put(value.sign, 1)
            groups.append(here)
        for c, value in enumerate(row):
            if value.further == ROUNDS:
                escapes.append(words[exact + r, c].tobytes())
    for batch in range(0, len(groups), BATCH):
        for k in range(ROUNDS):
            for here in groups[batch : batch + BATCH]:
                for value, channel in here:
                    if channel.digit and value.first == channel.top and value.further >= k:
                        digits.put(int(value.further > k), 1)
    plain = words[:exact].tobytes()
    return plain + planes.bytes() + digits.bytes() + b"".join(reversed(escapes))


def reference_values(
    words: np.ndarray,
    mode: int,
    parameters: np.ndarray,
    levels: np.ndarray,
    first_token: int = 0,
) -> np.ndarray:
    """What the stripe of these rows decodes to."""
    stream = stream_of(parameters, mode)
    exact, rows, back = quantised(words, stream, levels, first_token)
    result = words.copy()
    for r, row in enumerate(rows):
        for c, value in enumerate(row):
            if value.further != ROUNDS:
                result[exact + r, c] = words_of(back[exact + r, c], mode)
    return result
