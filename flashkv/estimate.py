"""How long a load will take, learnt from those that were; and what of a prompt to load at all.

Invariants
  - what is learnt fades: half of a figure's weight is gone after HALF_LIFE gets, so that another
    device, load or codec is known soon;
  - a plan never takes longer, by the same figures, than loading all or computing all.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits

HALF_LIFE: Final = 64.0
FIRST_LATENCY_S: Final = 200e-6
FIRST_BYTES_PER_S: Final = 1e9
"""Before any get: of a slow NVMe device."""
_FIRST_WEIGHT: Final = 0.05  # two such loads of 0 and 64 MiB, soon outweighed
_FIRST_BYTES: Final = 64 * limits.MIB


class LoadModel:
    """Seconds of a get by its bytes on flash: latency and a rate, fitted by least squares whose
    weights fade. Each error counts as a share of its load, so that small ones matter as well. Safe
    for all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = np.zeros(5)  # of w, w x, w y, w x x, w x y; x: bytes, y: seconds
        for size in (0, _FIRST_BYTES):
            self._add(size, FIRST_LATENCY_S + size / FIRST_BYTES_PER_S, _FIRST_WEIGHT)

    def _add(self, size: float, seconds: float, weight: float) -> None:
        weight /= max(seconds, 1e-6) ** 2
        self._sums += weight * np.array([1.0, size, seconds, size * size, size * seconds])

    def note(self, flash_bytes: int, seconds: float) -> None:
        """A get read so much in that time."""
        if flash_bytes <= 0 or seconds <= 0:
            return
        with self._lock:
            self._sums *= 0.5 ** (1 / HALF_LIFE)
            self._add(flash_bytes, seconds, 1.0)

    def seconds(self, flash_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected seconds of gets of so many bytes: float64 as given; 0 for none."""
        latency_s, seconds_a_byte = self.fit()
        return np.where(flash_bytes > 0, latency_s + flash_bytes * seconds_a_byte, 0.0)

    def fit(self) -> tuple[float, float]:
        """(seconds of any get, seconds a byte), neither negative."""
        with self._lock:
            w, x, y, xx, xy = self._sums.tolist()
        spread = w * xx - x * x
        slope = (w * xy - x * y) / spread if spread > 1e-9 * w * xx else 0.0
        latency = (y - slope * x) / w
        if slope <= 0 or latency < 0:  # all of about one size: a rate says more
            return 0.0, y / x
        return latency, slope


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
