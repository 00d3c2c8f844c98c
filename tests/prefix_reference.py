"""The prefix code in bit planes for tests: native functions on numpy arrays, and the format again.

The second half is written from the description in docs/format.md, bit by bit, not from the C code.
Vectors are uint16 arrays [rows, values], whatever the mode; of one-byte types see widened().
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from fxp_reference import CANARY, _u8, _u64, addresses, decoded_rows

from flashkv.native import ffi, lib

BF16, FP16 = int(lib.FKV_STREAM_PREFIX_BF16), int(lib.FKV_STREAM_PREFIX_FP16)
E4M3, E5M2 = int(lib.FKV_STREAM_PREFIX_E4M3), int(lib.FKV_STREAM_PREFIX_E5M2)
MODES = [BF16, FP16, E4M3, E5M2]
EXPONENT_MAX = {BF16: 255, FP16: 31, E4M3: 15, E5M2: 31}
PATTERN = {BF16: 0xFFFF, FP16: 0xFFFF, E4M3: 0xBF80, E5M2: 0xFF00}  # bits that a value may have
MANTISSA = {BF16: 7, FP16: 10, E4M3: 3, E5M2: 2}
PLANES = {BF16: [], FP16: [8, 9], E4M3: [8, 9, 7], E5M2: [8, 9]}  # bits of the mantissa
ESCAPE, BATCH, GROUP = 15, 64, 64
NARROW, WIDE = 0, 1
DISTANCES = (
    {0: 0, 3: 1, 4: 2, 5: 3, 6: -1, 7: 4, 8: 5, 9: 6, 10: -2, 11: 7, 12: 8, 13: 9, 14: 10},
    dict(enumerate([0, 1, 2, 3, 4, -1, 5, 6, 7, 8, -2, 9, 10, -3, -4])),
)
PAGE_BYTES = 4096


def choose(vectors: np.ndarray, vector_bytes: int, mode: int) -> np.ndarray:
    rows = addresses(vectors)
    parameters = np.full(vector_bytes // 2 + 2, CANARY, np.uint8)
    lib.fkv_prefix_choose(_u64(rows), len(rows), vector_bytes, mode, _u8(parameters))
    assert parameters[-1] == CANARY
    return parameters[:-1]


def costs(vectors: np.ndarray, vector_bytes: int, mode: int, parameters: np.ndarray) -> np.ndarray:
    rows, result = addresses(vectors), np.zeros(len(vectors), np.uint16)
    target = ffi.cast("uint16_t *", result.ctypes.data)
    lib.fkv_prefix_costs(_u64(rows), len(rows), vector_bytes, mode, _u8(parameters), target)
    return result


def encode(vectors: np.ndarray, vector_bytes: int, mode: int, parameters: np.ndarray) -> bytes:
    """The stripe; fails where its length isn't the costs', or bytes behind it were written."""
    rows = addresses(vectors)
    bits = int(costs(vectors, vector_bytes, mode, parameters).astype(np.int64).sum())
    room = -(-bits // 8)
    out = np.full(room + 64, CANARY, np.uint8)
    length = lib.fkv_prefix_encode(
        _u64(rows), len(rows), vector_bytes, mode, _u8(parameters), _u8(out)
    )
    assert length == room
    assert (out[room:] == CANARY).all()
    return out[:room].tobytes()


def decode(
    stripe: bytes,
    shape: tuple[int, int],
    mode: int,
    parameters: np.ndarray,
    **how: Any,
) -> np.ndarray | None:
    """The rows, or None where the stripe was refused; `how` as decoded_rows() has it."""

    def call(source: object, rows: object) -> int:
        return lib.fkv_prefix_decode(source, len(stripe), *shape, mode, _u8(parameters), rows)

    return decoded_rows(call, stripe, shape, behind=0xFF, **how)


def widened(values: np.ndarray, mode: int) -> np.ndarray:
    """uint8 elements of a one-byte type as the 16-bit values that are coded."""
    wide = values.astype(np.uint16)
    return wide << 8 if mode == E5M2 else (wide & 0x80) << 8 | (wide & 0x7F) << 7


# ---- the format again -------------------------------------------------------------------------
@dataclass(frozen=True)
class Channel:
    """What a stream's parameters say of one channel."""

    base: int
    kind: int
    steady: bool
    negative: bool


def channels(parameters: np.ndarray, mode: int) -> list[Channel]:
    common, *own = (int(byte) for byte in parameters)
    result = []
    for byte in own:
        delta = byte & 31
        base = 0 if delta == 31 else (common - delta) % (EXPONENT_MAX[mode] + 1)
        result.append(Channel(base, byte >> 5 & 1, bool(byte & 0x80), bool(byte & 0x40)))
    return result


def symbol_of(exponent: int, negative: bool, channel: Channel, mode: int) -> int:
    if channel.steady and negative != channel.negative:
        return ESCAPE
    period = EXPONENT_MAX[mode] + 1
    for symbol, distance in DISTANCES[channel.kind].items():
        if (channel.base - distance) % period == exponent:
            return symbol
    return ESCAPE


def digits_of(symbol: int, kind: int) -> list[tuple[int, int]]:
    """A symbol's digits, each as (value, bits)."""
    if symbol < 3:
        return [(symbol, 2 if kind == WIDE else 1)]
    digits = [(3, 2) if kind == WIDE else (1, 1), (int(symbol > 3), 1)]
    if symbol > 3:
        digits.append((int(symbol > 4), 1))
    if symbol > 4:
        digits.append((min(symbol - 5, 3), 2))
    if symbol > 7:
        digits.append((symbol - 8, 3))
    return digits


def fields(value: int, mode: int) -> tuple[bool, int, int]:
    """Sign, exponent, mantissa."""
    if mode != BF16:
        return bool(value >> 15), value >> 10 & 0x1F, value & 0x3FF
    return bool(value >> 15), value >> 7 & 0xFF, value & 0x7F


def reference_encode(values: np.ndarray, mode: int, parameters: np.ndarray) -> bytes:
    """The stripe of uint16[rows, values], one bit after another."""
    known = channels(parameters, mode)
    low, planes, escapes = bytearray(), [], bytearray()
    groups = []  # of every 64 values: (sign, digits, channel) of each
    for row in values.tolist():
        for first in range(0, len(row), GROUP):
            part = []
            for value, channel in zip(row[first : first + GROUP], known[first:], strict=False):
                negative, exponent, mantissa = fields(value, mode)
                symbol = symbol_of(exponent, negative, channel, mode)
                part.append((negative, mantissa, digits_of(symbol, channel.kind), channel))
                if symbol == ESCAPE:
                    escapes.append(exponent)
            if mode != BF16:
                for bit in PLANES[mode]:
                    planes += [mantissa >> bit & 1 for _, mantissa, _, _ in part]
                planes += [digits[0][0] & 1 for _, _, digits, _ in part]
            if mode == FP16:
                low += bytes(mantissa & 0xFF for _, mantissa, _, _ in part)
            elif mode == BF16:
                low += bytes(mantissa | (digits[0][0] & 1) << 7 for _, mantissa, digits, _ in part)
            planes += [digits[0][0] >> 1 for _, _, digits, own in part if own.kind == WIDE]
            planes += [int(negative) for negative, _, _, own in part if not own.steady]
            groups.append(part)
    bits = planes
    for first in range(0, len(groups), BATCH):
        batch = groups[first : first + BATCH]
        for place in range(1, 5):
            for part in batch:
                there = [digits[place] for _, _, digits, _ in part if len(digits) > place]
                for k in range(there[0][1] if there else 0):
                    bits += [digit >> k & 1 for digit, _ in there]
        for part in batch:
            bits += [
                int(negative)
                for negative, _, digits, own in part
                if own.steady and len(digits) == 5 and digits[4][0] == 7
            ]
    packed = np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()
    return bytes(low) + packed + bytes(escapes[::-1])


def reference_bits(values: np.ndarray, mode: int, parameters: np.ndarray) -> int:
    """Bits of a stripe without padding."""
    known, total = channels(parameters, mode), 0
    for row in values.tolist():
        for value, own in zip(row, known, strict=True):
            negative, exponent, _ = fields(value, mode)
            symbol = symbol_of(exponent, negative, own, mode)
            total += MANTISSA[mode] + (not own.steady)
            total += sum(bits for _, bits in digits_of(symbol, own.kind))
            total += (8 + own.steady) * (symbol == ESCAPE)
    return total


# ---- what is chosen, again --------------------------------------------------------------------
DELTAS, DELTA_FIRST, COUNT_MAX, OTHERS = 8, -6, 3855, 15
WIDE_FLAG, NEGATIVE, STEADY = 0x20, 0x40, 0x80


def _price(kind: int, distance: int) -> int:
    symbol = next((s for s, own in DISTANCES[kind].items() if own == distance), ESCAPE)
    return sum(bits for _, bits in digits_of(symbol, kind)) + 8 * (symbol == ESCAPE)


NO_DISTANCE = 1000
PRICES = np.array(
    [
        [_price(kind, k + DELTA_FIRST + d if k < OTHERS else NO_DISTANCE) for k in range(16)]
        for kind in (NARROW, WIDE)
        for d in range(DELTAS)
    ]
)
"""Bits by combination of kind and base, and by distance below the highest exponent."""


def _own_choice(exponents: np.ndarray, negatives: int, mode: int) -> tuple[int, int]:
    """(base, flags) of a channel."""
    count, limit = len(exponents), 256
    for _ in range(4):
        top = int(exponents[exponents < limit].max(initial=0))
        below = np.where(exponents > top, OTHERS, np.minimum(top - exponents, OTHERS))
        counts = np.bincount(below, minlength=16)
        if counts[OTHERS] <= count // 2 or top < OTHERS:
            break
        limit = top - 14  # a few outliers on top of what matters
    shift = 0
    while count >> shift > COUNT_MAX:
        shift += 1
    best = int((PRICES @ (counts >> shift)).argmin())
    base = (top + DELTA_FIRST + best % DELTAS) & EXPONENT_MAX[mode]
    flags = WIDE_FLAG if best >= DELTAS else 0
    if negatives * 13 < count:
        flags |= STEADY
    elif (count - negatives) * 13 < count:
        flags |= STEADY | NEGATIVE
    return base, flags


def reference_choose(values: np.ndarray, mode: int) -> list[int]:
    """What choose() gives: the base that most channels reach, the lowest one of equals."""
    exponents = values >> 7 & 0xFF if mode == BF16 else values >> 10 & 0x1F
    signs = (values >> 15).sum(0)
    own = [
        _own_choice(exponents[:, c].astype(int), int(signs[c]), mode)
        for c in range(values.shape[1])
    ]
    bases = np.array([base for base, _ in own])
    reached = [((bases <= b) & (bases > b - 31)).sum() for b in range(256)]
    common, out = int(np.argmax(reached)), []
    for base, flags in own:
        delta = max(common - base, 0)
        if delta >= 31:
            delta = 30 if base >= common // 2 else 31  # 31: base 0
        out.append(delta | flags)
    return [common, *out]
