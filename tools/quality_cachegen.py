"""CacheGen's scheme (Liu et al., SIGCOMM 2024) in numpy, for comparison at equal bits.

Written from the paper's description: tokens in groups of 10, the first of a group (the anchor) in 8
bits, the others as differences to it; bins grow over the thirds of the layers; an arithmetic coder
with a distribution of its own for each layer and channel.

Invariants
  - what the paper leaves to tuning is decided in its favour: bits are the entropy of the very
    symbols that are coded (no tables, no coder's loss, no headers), and of both ways to scale bins
    the caller may take the better;
  - differences are taken from the anchor as the decoder has it: errors don't add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

GROUP: Final = 10
BINS: Final = (0.5, 1.0, 1.5)
"""Relative size of the bins in the first, middle and last third of the layers."""
ANCHOR_MAX: Final = 127
SCALE_BITS: Final = 16
SCALINGS: Final = ("channel", "token")
"""Bins follow the deviation of a channel, or the largest value of a token (vector-wise)."""
SCALES: Final = tuple(float(2.0**power) for power in np.arange(-6, 2.51, 0.5))

LAYERS_TRIED: Final = 6


@dataclass(frozen=True)
class Coded:
    """values: as decoded, [layer, head, token, dim]; bits: of all of them together."""

    values: Floats
    bits: float


def entropy_bits(symbols: NDArray[np.int32]) -> float:
    """Bits of [layer, head, token, dim] under each (layer, head, dim)'s own distribution."""
    layers, heads, tokens, dim = symbols.shape
    low, high = int(symbols.min()), int(symbols.max())
    span = high - low + 1
    total = 0.0
    for layer in symbols:  # one layer at a time: the table of counts stays small
        channel = np.arange(heads * dim).reshape(heads, 1, dim) * span
        counts = np.bincount((channel + (layer - low)).ravel(), minlength=heads * dim * span)
        used = counts[counts > 0].astype(np.float64)
        total += float(layers and (used * (np.log2(tokens) - np.log2(used))).sum())
    return total


def thirds(layers: int) -> Floats:
    """Relative bin size of each layer."""
    return np.array([BINS[min(2, 3 * layer // layers)] for layer in range(layers)], np.float32)


def code(values: Floats, scale: float, scaling: str) -> Coded:
    """K or V of a text, [layer, head, token, dim], coded with bins `scale` times the scaling's."""
    layers, _, tokens, _ = values.shape
    anchors = values[:, :, ::GROUP]
    step = np.abs(anchors).max(axis=(1, 3), keepdims=True) / ANCHOR_MAX
    anchor_symbols = np.rint(anchors / np.maximum(step, 1e-20)).astype(np.int32)
    decoded = anchor_symbols * step
    inside = np.arange(tokens) % GROUP != 0
    ahead = decoded[:, :, np.arange(tokens)[inside] // GROUP]
    differences = values[:, :, inside] - ahead
    bins, scale_count = _bins(differences, scaling)
    bins = bins * (scale * thirds(layers))[:, None, None, None]
    symbols = np.rint(differences / np.maximum(bins, 1e-20)).astype(np.int32)
    out = np.empty_like(values)
    out[:, :, ::GROUP] = decoded
    out[:, :, inside] = ahead + symbols * bins
    bits = entropy_bits(anchor_symbols) + entropy_bits(symbols)
    return Coded(out, bits + SCALE_BITS * (scale_count + step.size))


def _bins(differences: Floats, scaling: str) -> tuple[Floats, int]:
    """What a bin is relative to, and how many numbers a decoder needs for it."""
    if scaling == "channel":
        around = differences.std(axis=2, keepdims=True)
    elif scaling == "token":
        around = np.abs(differences).max(axis=(1, 3), keepdims=True) / 4
    else:
        raise ValueError(f"no scaling: {scaling}")
    return around.astype(np.float32), around.size


def bits_a_value(kv: Floats, scale: float, scaling: str) -> float:
    """kv: [layer, K|V, head, token, dim]."""
    return sum(code(kv[:, plane], scale, scaling).bits for plane in (0, 1)) / kv.size


def scale_for(kv: Floats, bits: float, scaling: str) -> float:
    """The scale at which a value takes so many bits, within SCALES.

    Found on some of the layers by halving the interval, and put right once on all of them.
    """
    some = kv[:: max(1, len(kv) // LAYERS_TRIED)]
    low, high = 0, len(SCALES) - 1
    at_low, at_high = np.inf, 0.0
    while high - low > 1:
        middle = (low + high) // 2
        found = bits_a_value(some, SCALES[middle], scaling)
        if found > bits:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
    if not np.isfinite(at_low):
        return SCALES[low]
    if at_high == 0.0:
        return SCALES[high]
    share = (at_low - bits) / (at_low - at_high)
    scale = SCALES[low] * (SCALES[high] / SCALES[low]) ** share
    return float(scale * 2.0 ** (bits_a_value(kv, scale, scaling) - bits))
