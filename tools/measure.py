"""What a measurement is: work, wall time and processor time; and how repeated ones are summed up.

Invariants
  - processor time counts every thread of the process, kernel workers of io_uring included;
  - a GB is 10**9 bytes;
  - nothing is dropped from a series: outliers stay in the samples and show in the spread.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Measurement:
    """One run of one side: bytes moved, operations done, and what they took."""

    bytes: int
    operations: int
    seconds: float
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds

    @property
    def operations_per_s(self) -> float:
        return self.operations / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.bytes / GB)


class Stopwatch:
    """Wall and processor time of a `with stopwatch()` block, valid after it."""

    seconds: float = 0.0
    cpu_s: float = 0.0

    def measured(self, bytes_moved: int, operations: int) -> Measurement:
        """The block's measurement, once it is known what it moved."""
        return Measurement(bytes_moved, operations, self.seconds, self.cpu_s)


def process_cpu_s() -> float:
    """Processor seconds, user and system, of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Times its block."""
    watch = Stopwatch()
    cpu_s, started = process_cpu_s(), time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - started
        watch.cpu_s = process_cpu_s() - cpu_s


@dataclass(frozen=True)
class Spread:
    """Median and spread of a series."""

    median: float
    q1: float
    q3: float
    minimum: float
    maximum: float
    count: int

    def as_dict(self) -> dict[str, float | int]:
        """As JSON holds it."""
        return {
            "median": self.median,
            "q1": self.q1,
            "q3": self.q3,
            "min": self.minimum,
            "max": self.maximum,
            "count": self.count,
        }


def spread(series: Sequence[float]) -> Spread:
    """Median, quartiles (linear between samples) and extremes. Raises ValueError if empty."""
    if not series:
        raise ValueError("no samples to sum up")
    if len(series) == 1:
        only = series[0]
        return Spread(only, only, only, only, only, 1)
    q1, median, q3 = statistics.quantiles(series, n=4, method="inclusive")
    return Spread(median, q1, q3, min(series), max(series), len(series))


def fit_line(sizes: Sequence[int], costs: Sequence[float]) -> tuple[float, float]:
    """(constant, slope) of cost = constant + slope * size, weighted by 1/cost.

    Relative errors count alike for small and large sizes; a plain fit would let the largest batch
    alone decide, and the constant be noise. Neither is ever below zero.
    """
    weights = [1.0 / max(cost, 1e-12) ** 2 for cost in costs]
    total = sum(weights)
    mean_size = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_cost = sum(w * y for w, y in zip(weights, costs, strict=True)) / total
    variance = sum(w * (x - mean_size) ** 2 for w, x in zip(weights, sizes, strict=True))
    if variance == 0:
        raise ValueError("a line needs at least two different sizes")
    slope = (
        sum(
            w * (x - mean_size) * (y - mean_cost)
            for w, x, y in zip(weights, sizes, costs, strict=True)
        )
        / variance
    )
    slope = max(slope, 0.0)
    return max(mean_cost - slope * mean_size, 0.0), slope
