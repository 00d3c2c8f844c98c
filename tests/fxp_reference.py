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
GROUP, SPAN, ESCAPE = 16, 7, 7
EXPONENT_MAX = {BF16: 255, FP16: 31}
CANARY = 0xC3


@contextmanager
def code_path(level: int) -> Iterator[None]:
    """Portable code (0) or the processor's best (1) inside the block."""
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


def choose(vectors: np.ndarray, vector_bytes: int, mode: int) -> np.ndarray:
    rows = addresses(vectors)
    bases = np.full(-(-(vector_bytes // 2) // GROUP) + 1, CANARY, np.uint8)
    lib.fkv_fxp_choose(_u64(rows), len(rows), vector_bytes, mode, _u8(bases))
    assert bases[-1] == CANARY
    return bases[:-1]


def costs(vectors: np.ndarray, vector_bytes: int, mode: int, bases: np.ndarray) -> np.ndarray:
    rows, result = addresses(vectors), np.zeros(len(vectors), np.uint16)
    target = ffi.cast("uint16_t *", result.ctypes.data)
    lib.fkv_fxp_costs(_u64(rows), len(rows), vector_bytes, mode, _u8(bases), target)
    return result


def encode(vectors: np.ndarray, vector_bytes: int, mode: int, bases: np.ndarray) -> bytes:
    rows = addresses(vectors)
    room = int(costs(vectors, vector_bytes, mode, bases).astype(np.int64).sum())
    out = np.full(room + 64, CANARY, np.uint8)
    length = lib.fkv_fxp_encode(_u64(rows), len(rows), vector_bytes, mode, _u8(bases), _u8(out))
    assert length == room
    assert (out[room:] == CANARY).all()
    return out[:room].tobytes()


def decode(
    stripe: bytes,
    shape: tuple[int, int],
    mode: int,
    bases: np.ndarray,
    **how: Any,
) -> np.ndarray | None:
    """The rows, or None where the stripe was refused; `how` as decoded_rows() has it."""

    def call(source: object, rows: object) -> int:
        return lib.fkv_fxp_decode(source, len(stripe), *shape, mode, _u8(bases), rows)

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


def reference_choose(values: np.ndarray, mode: int) -> np.ndarray:
    highest = EXPONENT_MAX[mode]
    bases = []
    for first in range(0, values.shape[1], GROUP):
        bins = np.bincount(exponents(values[:, first : first + GROUP], mode).ravel(), minlength=256)
        kept = {base: bins[max(base - SPAN + 1, 0) : base + 1].sum() for base in range(highest + 1)}
        bases.append(max(kept, key=lambda base: (kept[base], base)))
    return np.array(bases, np.uint8)


def reference_encode(values: np.ndarray, mode: int, bases: np.ndarray) -> bytes:
    base = np.repeat(bases.astype(np.int64), GROUP)[: values.shape[1]]
    exponent = exponents(values, mode)
    code = base - exponent
    code = np.where((code < 0) | (code >= SPAN), ESCAPE, code)
    planes = [code & 1, code >> 1 & 1, code >> 2 & 1]
    if mode == FP16:
        low = values & 0xFF
        planes += [values >> 8 & 1, values >> 9 & 1, values >> 15 & 1]
    else:
        low = (values >> 8 & 0x80) | (values & 0x7F)
    columns = [low.astype(np.uint8)]
    columns += [np.packbits(plane.astype(np.uint8), axis=1, bitorder="little") for plane in planes]
    rows = np.concatenate(columns, axis=1)
    return rows.tobytes() + exponent[code == ESCAPE].astype(np.uint8).tobytes()
