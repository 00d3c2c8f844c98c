"""How long a load will take, learnt from those that were; and what of a prompt to load at all.

Invariants
  - what is learnt fades: half of a figure's weight is gone after HALF_LIFE gets, so that another
    device, load or codec is known soon;
  - a plan never takes longer, by the same figures, than loading all or computing all.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits

HALF_LIFE: Final = 64.0
_FADING: Final = 0.5 ** (1 / HALF_LIFE)
FIRST_LATENCY_S: Final = 200e-6
FIRST_BYTES_PER_S: Final = 1e9
"""Before any get: of a slow NVMe device."""
_FIRST_WEIGHT: Final = 0.05
_FIRST_BYTES: Final = (0.0, 64.0 * limits.MIB)
_SMALL_BYTES: Final = (64.0 * limits.KIB, 64.0 * limits.MIB)
"""Loads of fewer bytes take about as long as one of none: from, to."""

_Sums = tuple[float, float, float, float, float]


class LoadModel:
    """Seconds of a get by its bytes on flash: latency and a rate, fitted by least squares whose
    weights fade. An error counts by its share of what such a load is expected to take, never of
    what it took: or the quick ones would count for more. Safe for all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of w, w x, w y, w x x, w x y; x: bytes, y: seconds. Plain floats: every get adds to them.
        self._sums: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        # What little is known before stays: loads of one size alone don't tell a line.
        small = FIRST_LATENCY_S * FIRST_BYTES_PER_S
        first = self._sums
        for size in _FIRST_BYTES:
            seconds = FIRST_LATENCY_S + size / FIRST_BYTES_PER_S
            first = _added(first, 1.0, size, seconds, _FIRST_WEIGHT * _weight(size, small))
        self._first = first

    def note(self, flash_bytes: float, seconds: float) -> None:
        """A get read so much in that time."""
        if not (0 < flash_bytes < math.inf and 0 < seconds < math.inf):
            return
        size = float(flash_bytes)
        with self._lock:
            latency_s, seconds_a_byte = self._fit()
            small = latency_s / seconds_a_byte if seconds_a_byte else math.inf
            small = min(max(small, _SMALL_BYTES[0]), _SMALL_BYTES[1])
            self._sums = _added(self._sums, _FADING, size, seconds, _weight(size, small))

    def seconds(self, flash_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected seconds of gets of so many bytes: float64 as given; 0 for none."""
        latency_s, seconds_a_byte = self.fit()
        return np.where(flash_bytes > 0, latency_s + flash_bytes * seconds_a_byte, 0.0)

    def fit(self) -> tuple[float, float]:
        """(seconds of any get, seconds a byte), neither negative."""
        with self._lock:
            return self._fit()

    def _fit(self) -> tuple[float, float]:
        w, x, y, xx, xy = (a + b for a, b in zip(self._sums, self._first, strict=True))
        slope = (w * xy - x * y) / (w * xx - x * x)
        if slope <= 0:
            return y / w, 0.0
        latency = (y - slope * x) / w
        return (latency, slope) if latency >= 0 else (0.0, xy / xx)


def _weight(size: float, small: float) -> float:
    """Of a load. small: bytes that take as long as a load's latency."""
    return (small / (small + size)) ** 2


def _added(sums: _Sums, fading: float, size: float, seconds: float, weight: float) -> _Sums:
    """The sums, faded, with a load of that weight."""
    w, x, y, xx, xy = sums
    return (
        fading * w + weight,
        fading * x + weight * size,
        fading * y + weight * seconds,
        fading * xx + weight * size * size,
        fading * xy + weight * size * seconds,
    )


@dataclass(frozen=True)
class LoadPlan:
    """Which blocks of a prefix to compute, from its beginning, and which to load, meanwhile.

    compute_blocks  leading blocks to compute; 0: load all.
    load_blocks     the blocks behind them, to be loaded at the same time; 0: compute all.
    ms              until both are done; load_ms, compute_ms: of loading or computing all.
    """

    compute_blocks: int
    load_blocks: int
    ms: float
    load_ms: float
    compute_ms: float


def flash_bytes(places: NDArray[Any]) -> NDArray[np.float64]:
    """Bytes on flash of blocks, their share of their records: float64[N]. places: fkv_place[N]."""
    share = places["tokens"] / np.maximum(places["record_tokens"], 1)
    return np.asarray(places["pages"] * share * limits.PAGE_BYTES, np.float64)


def plan_load(model: LoadModel, places: NDArray[Any], prefill_tokens_per_s: float) -> LoadPlan:
    """Loads from the end while computing from the beginning, until both meet: Jin et al., "Compute
    Or Load KV Cache? Why Not Both?" (2024). places: fkv_place[N] of blocks that are there.
    """
    sizes, tokens = flash_bytes(places), places["tokens"].astype(np.float64)
    loads = model.seconds(np.append(sizes[::-1].cumsum()[::-1], 0.0))
    with np.errstate(over="ignore"):  # a speed of nearly nothing takes for ever
        computes = np.append(0.0, tokens.cumsum()) / prefill_tokens_per_s
    both = np.maximum(loads, computes)
    best = int(both.argmin())
    return LoadPlan(
        compute_blocks=best,
        load_blocks=len(places) - best,
        ms=1e3 * float(both[best]),
        load_ms=1e3 * float(loads[0]),
        compute_ms=1e3 * float(computes[-1]),
    )
