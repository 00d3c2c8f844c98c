"""The bounded codec's arithmetic in numpy: what calibration perturbs a model's KV with.

Invariants
  - the same steps and predictions as the codec's (docs/codecs.md), records of 256 tokens, the first
    tokens of a sequence exact; no bytes: bits are an estimate;
  - |decoded - value| is at most half a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

RECORD_TOKENS: Final = 256
EXACT_TOKENS: Final = 4
PAGE_TOKENS: Final = 128
"""About a stripe's: its first token is predicted by the channel's mean alone."""
STEP_GRID: Final = 8
"""Steps are powers of two of multiples of 1 / STEP_GRID."""
COEFFICIENT_GRID: Final = 8
K_SIDE_BITS: Final = 24
"""Of a channel's mean, step, coefficient and table."""
V_TOKEN_BITS: Final = 8
V_CHANNEL_BITS: Final = 8
TABLE_LOSS: Final = 0.05
"""Bits a value by which static tables lose to a distribution fitted to each channel."""


@dataclass(frozen=True)
class Coded:
    """values: as decoded, [layer, head, token, dim]; bits: of all of them together, estimated."""

    values: Floats
    bits: float


def on_grid(steps: Floats) -> Floats:
    grid = np.rint(np.log2(np.maximum(steps, 1e-30)) * STEP_GRID) / STEP_GRID
    return np.asarray(np.exp2(grid), np.float32)


def code_k(values: Floats, factors: Floats, power: float = 0.0) -> Coded:
    """Keys: a step for each channel, f[layer] * deviation ** power; each token predicted from the
    one before."""
    out, bits = np.empty_like(values), 0.0
    for first, part, exact in _records(values):
        mean, deviation = part.mean(2, keepdims=True), part.std(2, keepdims=True)
        step = on_grid(factors[:, None, None, None] * deviation**power)
        mean = np.rint(mean / step) * step
        symbols, decoded = _predicted(part, mean, step)
        begin = first + exact
        out[:, :, first:begin] = values[:, :, first:begin]
        out[:, :, begin : begin + part.shape[2]] = decoded
        bits += symbol_bits(symbols) + mean.size * (K_SIDE_BITS + 16 * exact)
    return Coded(out, bits)


def _predicted(part: Floats, mean: Floats, step: Floats) -> tuple[NDArray[np.int32], Floats]:
    centred = part - mean
    before, after = centred[:, :, :-1], centred[:, :, 1:]
    energy = np.maximum((before**2).sum(2), 1e-20)
    grid = np.rint((before * after).sum(2) / energy * COEFFICIENT_GRID) / COEFFICIENT_GRID
    coefficient = np.clip(grid, 0, 1 - 1 / COEFFICIENT_GRID).astype(np.float32)
    symbols, decoded = np.empty(part.shape, np.int32), np.empty_like(part)
    mean, step = mean[:, :, 0], step[:, :, 0]
    last = np.zeros_like(mean)
    for token in range(part.shape[2]):
        predicted = mean + coefficient * last if token % PAGE_TOKENS else mean
        symbols[:, :, token] = np.rint((part[:, :, token] - predicted) / step)
        decoded[:, :, token] = predicted + symbols[:, :, token] * step
        last = decoded[:, :, token] - mean
    return symbols, decoded


def code_v(values: Floats, factors: Floats, power: float = 1.0) -> Coded:
    """Values: a step for each token, f[layer] * deviation over its channels ** power."""
    out, bits = np.empty_like(values), 0.0
    for first, part, exact in _records(values):
        deviation = part.std(3, keepdims=True)
        step = on_grid(factors[:, None, None, None] * deviation**power)
        symbols = np.rint(part / step).astype(np.int32)
        begin = first + exact
        out[:, :, first:begin] = values[:, :, first:begin]
        out[:, :, begin : begin + part.shape[2]] = symbols * step
        channels = part.size // part.shape[2]
        bits += symbol_bits(symbols) + step.size * V_TOKEN_BITS
        bits += channels * (V_CHANNEL_BITS + 16 * exact)
    return Coded(out, bits)


def _records(values: Floats) -> list[tuple[int, Floats, int]]:
    """(first token, the tokens that are coded, exact ones before them) of each record."""
    parts = []
    for first in range(0, values.shape[2], RECORD_TOKENS):
        exact = EXACT_TOKENS if first == 0 else 0
        parts.append((first, values[:, :, first + exact : first + RECORD_TOKENS], exact))
    return parts


def symbol_bits(symbols: NDArray[np.int32]) -> float:
    """Bits of [layer, head, token, dim]: tables are chosen for each channel by its deviation.

    The tables are those of the symbols themselves, pooled over channels of like deviation.
    """
    deviation = np.sqrt((symbols.astype(np.float32) ** 2).mean(2, keepdims=True) + 1e-4)
    table = np.clip(np.rint(4 * np.log2(deviation)) + 27, 0, 63).astype(np.int64)
    low, high = int(symbols.min()), int(symbols.max())
    span = high - low + 1
    rows = np.broadcast_to(table * span, symbols.shape) + (symbols - low)
    counts = np.bincount(rows.ravel(), minlength=64 * span).reshape(64, span).astype(np.float64)
    totals = counts.sum(axis=1, keepdims=True)
    share = np.where(counts > 0, counts / np.maximum(totals, 1), 1)
    return float(-(counts * np.log2(share)).sum() + TABLE_LOSS * symbols.size)
