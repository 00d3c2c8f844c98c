"""The bounded codec's arithmetic in numpy: what calibration perturbs a model's KV with.

Invariants
  - the same predictions as the codec's (docs/codecs.md), and its steps before they are limited;
    records of 256 tokens, the first tokens of a sequence exact; no bytes;
  - |decoded - value| is at most half a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

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


def on_grid(steps: Floats) -> Floats:
    grid = np.rint(np.log2(np.maximum(steps, 1e-30)) * STEP_GRID) / STEP_GRID
    return np.asarray(np.exp2(grid), np.float32)


def code_k(values: Floats, factors: Floats) -> Floats:
    """Keys [layer, head, token, dim] as they come back: steps are factors[layer], each token is
    predicted from the one before.

    Narrow channels have that step too, unlike the codec's: noise is wanted in proportion to it.
    """
    out: Floats = np.array(values, np.float32)
    step = on_grid(factors)[:, None, None, None]
    for begin, part in _records(values):
        mean = np.rint(part.mean(2, keepdims=True) / step) * step
        out[:, :, begin : begin + part.shape[2]] = _predicted(part, mean, step)
    return out


def _predicted(part: Floats, mean: Floats, step: Floats) -> Floats:
    centred = part - mean
    before, after = centred[:, :, :-1], centred[:, :, 1:]
    energy = np.maximum((before**2).sum(2), 1e-20)
    grid = np.rint((before * after).sum(2) / energy * COEFFICIENT_GRID) / COEFFICIENT_GRID
    coefficient = np.clip(grid, 0, 1 - 1 / COEFFICIENT_GRID).astype(np.float32)
    decoded = np.empty_like(part)
    mean, step = mean[:, :, 0], step[:, :, 0]
    last = np.zeros_like(mean)
    for token in range(part.shape[2]):
        predicted = mean + coefficient * last if token % PAGE_TOKENS else mean
        decoded[:, :, token] = predicted + halfway((part[:, :, token] - predicted) / step) * step
        last = decoded[:, :, token] - mean
    return decoded


def code_v(values: Floats, factors: Floats) -> Floats:
    """Values likewise: a token's step is factors[layer] * its deviation over the channels."""
    out: Floats = np.array(values, np.float32)
    for begin, part in _records(values):
        mean = part.mean(2, keepdims=True)
        step = on_grid(factors[:, None, None, None] * part.std(3, keepdims=True))
        out[:, :, begin : begin + part.shape[2]] = mean + halfway((part - mean) / step) * step
    return out


def halfway(symbols: NDArray[Any]) -> Floats:
    """The nearest number that lies halfway between two integers."""
    return np.asarray(np.floor(symbols) + np.float32(0.5), np.float32)


def _records(values: Floats) -> Iterator[tuple[int, Floats]]:
    """The tokens of each record that are coded, and where they begin."""
    for first in range(0, values.shape[2], RECORD_TOKENS):
        begin = first or EXACT_TOKENS
        yield begin, values[:, :, begin : first + RECORD_TOKENS]
