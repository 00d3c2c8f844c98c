"""The fixed-width exponent code for tests: native functions on numpy arrays, and the format again.

The numpy half is written from the description in engine_native/codec_fxp.c, not from its code.

Vectors are uint16 arrays [rows, values], whatever the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from flashkv.native import ffi, lib

PLAIN, BF16, FP16 = 0, 1, 2
GROUP, PART = 64, 16
SPAN, ESCAPE, BASE_MIN, DELTA_MIN = 7, 7, 6, 15
SAMPLES, BINS = 128, 16
EXPONENT_MAX = {BF16: 255, FP16: 31}
CANARY = 0xC3


def _levels() -> tuple[int, ...]:
    """Portable code, the processor's best, and what it has beside that: AVX2, AVX-512 for all."""
    lib.fkv_use_simd(1)
    return (0, 1, 2, 3) if b"codec=avx512" in ffi.string(lib.fkv_code_paths()) else (0, 1)


LEVELS = _levels()


@contextmanager
def code_path(level: int) -> Iterator[None]:
    """One of LEVELS inside the block."""
    lib.fkv_use_simd(level)
    try:
        yield
    finally:
        lib.fkv_use_simd(1)


def _u8(array: np.ndarray) -> object:
    return ffi.cast("uint8_t *", array.ctypes.data)


def addresses(array: np.ndarray) -> np.ndarray:
    return np.arange(len(array), dtype=np.uint64) * np.uint64(array.strides[0]) + np.uint64(
        array.ctypes.data
    )


def _u64(array: np.ndarray) -> object:
    return ffi.cast("uint64_t *", array.ctypes.data)


def scattered(vectors: np.ndarray, gap_bytes: int = 0, offset: int = 0) -> np.ndarray:
    """The same vectors with a gap between rows, at an odd address if `offset` is odd."""
    rows, values = vectors.shape
    row_bytes = 2 * values + gap_bytes
    room = np.full(rows * row_bytes + offset + 64, CANARY, np.uint8)
    target = np.ndarray((rows, 2 * values), np.uint8, room, offset, (row_bytes, 1))
    target[:] = np.ascontiguousarray(vectors).view(np.uint8)
    return target


def parameter_bytes(values: int) -> int:
    return 1 + (values + 1) // 2


def choose(vectors: np.ndarray, vector_bytes: int, mode: int) -> np.ndarray:
    rows = addresses(vectors)
    parameters = np.full(parameter_bytes(vector_bytes // 2) + 1, CANARY, np.uint8)
    lib.fkv_fxp_choose(_u64(rows), len(rows), vector_bytes, mode, _u8(parameters))
    assert parameters[-1] == CANARY
    return parameters[:-1]


def costs(vectors: np.ndarray, vector_bytes: int, mode: int, parameters: np.ndarray) -> np.ndarray:
    rows, result = addresses(vectors), np.zeros(len(vectors), np.uint16)
    target = ffi.cast("uint16_t *", result.ctypes.data)
    lib.fkv_fxp_costs(_u64(rows), len(rows), vector_bytes, mode, _u8(parameters), target)
    return result


def encode(vectors: np.ndarray, vector_bytes: int, mode: int, parameters: np.ndarray) -> bytes:
    rows = addresses(vectors)
    room = int(costs(vectors, vector_bytes, mode, parameters).astype(np.int64).sum())
    out = np.full(room + 64, CANARY, np.uint8)
    shape = len(rows), vector_bytes, mode
    length = lib.fkv_fxp_encode(_u64(rows), *shape, _u8(parameters), _u8(out))
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
        return lib.fkv_fxp_decode(source, len(stripe), *shape, mode, _u8(parameters), rows)

    return decoded_rows(call, stripe, shape, behind=7, **how)


def decoded_rows(
    call: Callable[[object, object], int],
    stripe: bytes,
    shape: tuple[int, int],
    *,
    behind: int,
    wanted: np.ndarray | None = None,
    gap_bytes: int = 5,
    offset: int = 1,
) -> np.ndarray | None:
    """The rows (unwanted ones keep CANARY bytes), or None where the stripe was refused.

    call(stripe, addresses of rows) decodes; bytes `behind` lie behind the stripe.
    Fails where anything between or behind the rows was written.
    """
    count, vector_bytes = shape
    row_bytes = vector_bytes + gap_bytes
    room = np.full(count * row_bytes + offset + 64, CANARY, np.uint8)
    rows = np.arange(count, dtype=np.uint64) * np.uint64(row_bytes) + np.uint64(
        room.ctypes.data + offset
    )
    if wanted is not None:
        rows = np.where(wanted, rows, np.uint64(0))
    source = np.frombuffer(stripe + bytes([behind]) * 64, np.uint8)
    verdict = call(_u8(source), _u64(rows))
    assert verdict in (0, -1)
    view = np.ndarray((count, vector_bytes), np.uint8, room, offset, (row_bytes, 1))
    result = view.copy()
    view[:] = CANARY
    assert (room == CANARY).all()
    return result if verdict == 0 else None


# ---- the format again -------------------------------------------------------------------------
def exponents(values: np.ndarray, mode: int) -> np.ndarray:
    bits = values.astype(np.int64)
    return bits >> 10 & 0x1F if mode == FP16 else bits >> 7 & 0xFF


def sampled(values: np.ndarray) -> np.ndarray:
    """The rows that bases are chosen from."""
    rows = len(values)
    return values[:: 1 if rows < 2 * SAMPLES else rows // SAMPLES]


def best_base(exponent: np.ndarray, mode: int) -> int:
    """The base of a channel of these exponents."""
    limit, found = 256, []
    for _ in range(4):
        top = int(exponent[exponent < limit].max(initial=0))
        below = top - exponent
        bins = np.bincount(below[(below >= 0) & (below < BINS)], minlength=BINS)
        kept = {min(top + 1, EXPONENT_MAX[mode]): int(bins[: SPAN - 1].sum())}
        for start in range(BINS - SPAN + 1):
            count = int(bins[start : start + SPAN].sum())
            if count > max(kept.values()):
                kept[top - start] = count
        base = max(kept, key=lambda base: kept[base])
        found.append((kept[base], base))
        if 2 * kept[base] >= len(exponent) or top < BINS:
            break
        limit = top - BINS + 1
    most = max(kept for kept, _ in found)
    return max(next(base for kept, base in found if kept == most), BASE_MIN)


def reference_choose(values: np.ndarray, mode: int) -> np.ndarray:
    exponent = exponents(sampled(values), mode)
    bases = np.array([best_base(column, mode) for column in exponent.T], np.int64)
    top = int(bases.max(initial=BASE_MIN))
    delta = np.minimum(top - bases, DELTA_MIN - 1)
    delta = np.where((top - bases >= DELTA_MIN) & (bases == BASE_MIN), DELTA_MIN, delta)
    nibbles = np.append(delta, [0] * (len(delta) % 2)).astype(np.uint8)
    return np.concatenate([[np.uint8(top)], nibbles[::2] | nibbles[1::2] << 4]).astype(np.uint8)


def bases_of(parameters: np.ndarray, values: int) -> np.ndarray:
    nibbles = np.stack([parameters[1:] & 15, parameters[1:] >> 4], axis=1).ravel()[:values]
    delta = nibbles.astype(np.int64)
    return np.where(delta == DELTA_MIN, BASE_MIN, np.maximum(parameters[0] - delta, BASE_MIN))


def in_words(bits: np.ndarray) -> np.ndarray:
    """uint8[rows, bytes]: three bits of each value of the rows, as they are stored."""
    rows, values = bits.shape
    parts = []
    for first in range(0, values // GROUP * GROUP, GROUP):
        eighths = bits[:, first : first + GROUP].reshape(rows, 8, 8)  # [row, k, j]: value 8k + j
        parts.extend(
            sum((eighths[:, 4 * half + k] & 3) << 2 * k for k in range(4)) for half in range(2)
        )
        parts.append(sum((eighths[:, k] >> 2) << k for k in range(8)))
    for first in range(values // GROUP * GROUP, values, PART):
        part = np.zeros((rows, PART), np.int64)
        there = bits[:, first : first + PART]
        part[:, : there.shape[1]] = there
        parts.append(part[:, :8] | part[:, 8:] << 4)
    return np.concatenate([np.zeros((rows, 0), np.int64), *parts], axis=1).astype(np.uint8)


def reference_encode(values: np.ndarray, mode: int, parameters: np.ndarray) -> bytes:
    exponent, bits = exponents(values, mode), values.astype(np.int64)
    code = bases_of(parameters, values.shape[1]) - exponent
    code = np.where((code < 0) | (code >= SPAN), ESCAPE, code)
    if mode == FP16:
        columns = [bits & 0xFF, in_words(code), in_words((bits >> 8 & 3) | bits >> 15 << 2)]
    else:
        columns = [(bits << 1 & 0xFE) | bits >> 15, in_words(code)]
    rows = np.concatenate([column.astype(np.uint8) for column in columns], axis=1)
    return rows.tobytes() + exponent[code == ESCAPE].astype(np.uint8).tobytes()
