"""Options of a store: how it does its work, never what it holds.

Invariants
  - an Options object is valid from its construction on: each value was checked against limits.py;
  - nothing here changes the meaning of stored bytes; a store may be opened with other options each
    time (segment_bytes counts at creation only).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from flashkv import checks, limits
from flashkv.errors import OptionsError
from flashkv.profiles import BOUNDED_LEVELS, Profile

BACKENDS: Final = ("auto", "io_uring", "threads")
NAMED_CODECS: Final = ("lossless", "fast", "raw", *BOUNDED_LEVELS, "cold")
CODECS: Final = (*NAMED_CODECS, "auto")
ENV_BACKEND: Final = "FLASHKV_BACKEND"
ENV_CODEC: Final = "FLASHKV_CODEC"

_UNITS: Final = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Bytes of an int, or of text such as "8GiB", "512 MB", "1.5TiB". Raises OptionsError."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise OptionsError(
            f"{name} must be an int of bytes or text such as '8GiB'", value=repr(size)
        )
    if isinstance(size, int):
        if size < 0:
            raise OptionsError(f"{name} must not be negative", value=size)
        return size
    match = _SIZE.fullmatch(size)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise OptionsError(
            f"{name} is no size",
            value=repr(size),
            advice="Write a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, as '8GiB'",
        )
    number = match.group(1)
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


@dataclass(frozen=True)
class Options:
    """How a store works. Sizes may be given as text ("64MiB"); they are ints afterwards.

    backend             "auto": io_uring where it works, else threads. FLASHKV_BACKEND overrides.
    codec               "lossless" (bit-exact), "fast" (bit-exact too; larger, decoded faster),
                        "auto" (the better of these two for the device that is measured) or "raw"
                        (as it is); with a bounded error "bounded-1" (finest) to "bounded-4", and
                        "cold". For new records; FLASHKV_CODEC overrides.
    profile             calibration of the bounded levels: a path, or what the file holds; None:
                        steps in proportion to each stream's deviation. See profiles.py.
    queue_depth         operations at the device at once.
    workers             threads that check and code; None: the processors, at most 8.
    io_threads          of the threads backend; None: as the queue depth, at most 32.
    retries             of one operation on EINTR, EAGAIN and short results.
    read_buffer_bytes   bounce buffers of all reads together.
    staging_bytes       encoded records on their way to flash.
    header_cache_bytes  decoded record headers.
    inflight_bytes      callers' memory in tickets that aren't done; see lanes.py.
    segment_bytes       at creation; None: capacity/256 within 4 MiB and 1 GiB, and at least four of
                        the largest records.
    free_floor_bytes    left free on the file system; None: 256 MiB, at most 1 % of it.
    high_watermark      share of the capacity at which reclaim starts ...
    low_watermark       ... and at which it stops.
    growth              (from token, tokens a record), ascending.
    bloom               write a Bloom section into sealed segments.
    direct_io           O_DIRECT where the file system has it.
    max_lease_ms        longest life of a lease.
    read_gap_bytes      unwanted bytes that one read may cover ...
    read_amplification  ... while bytes read stay below this multiple of those wanted.
    """

    backend: str = "auto"
    codec: str = "lossless"
    profile: object = None
    queue_depth: int = 64
    workers: int | None = None
    io_threads: int | None = None
    retries: int = limits.RETRIES
    read_buffer_bytes: int | str = limits.READ_BUFFER_BYTES
    staging_bytes: int | str = limits.STAGING_BYTES
    header_cache_bytes: int | str = limits.HEADER_CACHE_BYTES
    inflight_bytes: int | str = limits.INFLIGHT_BYTES
    segment_bytes: int | str | None = None
    free_floor_bytes: int | str | None = None
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    growth: tuple[tuple[int, int], ...] = ((0, 256), (4096, 512), (16384, 1024))
    bloom: bool = False
    direct_io: bool = True
    max_lease_ms: int = limits.LEASE_MS_MAX
    read_gap_bytes: int | str = limits.READ_GAP_BYTES
    read_amplification: float = limits.READ_AMPLIFICATION

    def __post_init__(self) -> None:
        _check_choice("backend", self.backend, BACKENDS)
        _check_choice("codec", self.codec, CODECS)
        if self.profile is not None:
            object.__setattr__(self, "profile", Profile.load(self.profile))
        _check_int("queue_depth", self.queue_depth, 1, limits.QUEUE_DEPTH_MAX)
        if self.workers is not None:
            _check_int("workers", self.workers, 1, limits.WORKERS_MAX)
        if self.io_threads is not None:
            _check_int("io_threads", self.io_threads, 1, limits.IO_THREADS_MAX)
        _check_int("retries", self.retries, 0, limits.RETRIES_MAX)
        _check_int("max_lease_ms", self.max_lease_ms, 1, 24 * 3600 * 1000)
        self._check_sizes()
        self._check_watermarks()
        object.__setattr__(self, "growth", _checked_growth(self.growth))
        for name in ("bloom", "direct_io"):
            checks.flag(OptionsError, name, getattr(self, name))

    def _check_sizes(self) -> None:
        pool = (limits.BUFFER_BYTES_MIN, limits.BUFFER_BYTES_MAX)
        bounds = {
            "read_buffer_bytes": pool,
            "staging_bytes": pool,
            "header_cache_bytes": (0, limits.BUFFER_BYTES_MAX),
            "inflight_bytes": (1, limits.INFLIGHT_BYTES_MAX),
            "segment_bytes": (limits.SEGMENT_BYTES_MIN, limits.SEGMENT_BYTES_MAX),
            "free_floor_bytes": (0, 1 << 60),
            "read_gap_bytes": (0, limits.IO_BYTES_MAX),
        }
        for name, (low, high) in bounds.items():
            given = getattr(self, name)
            if given is None:
                continue
            size = parse_bytes(given, name)
            _check_int(name, size, low, high)
            object.__setattr__(self, name, size)
        if self.segment_bytes is not None and int(self.segment_bytes) % limits.PAGE_BYTES:
            raise OptionsError(
                "segment_bytes must be a multiple of the page",
                value=self.segment_bytes,
                limit=f"multiples of {limits.PAGE_BYTES}",
            )

    def _check_watermarks(self) -> None:
        low, high = self.low_watermark, self.high_watermark
        if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
            raise OptionsError("watermarks must be numbers", value=f"{low!r} and {high!r}")
        if not 0.0 < low <= high <= 1.0:
            raise OptionsError(
                "watermarks must satisfy 0 < low_watermark <= high_watermark <= 1",
                value=f"low {low}, high {high}",
            )
        if not isinstance(self.read_amplification, (int, float)) or not (
            1.0 <= self.read_amplification <= 100.0
        ):
            raise OptionsError(
                "read_amplification is out of range",
                value=repr(self.read_amplification),
                limit="1.0 to 100.0",
            )

    def resolved(self, environment: Mapping[str, str] | None = None) -> Options:
        """These options with FLASHKV_BACKEND and FLASHKV_CODEC applied. Raises OptionsError."""
        env = os.environ if environment is None else environment
        changes: dict[str, str] = {}
        for variable, name, choices in (
            (ENV_BACKEND, "backend", BACKENDS),
            (ENV_CODEC, "codec", CODECS),
        ):
            value = env.get(variable, "")
            if value:
                _check_choice(f"environment variable {variable}", value, choices)
                changes[name] = value
        return replace(self, **changes) if changes else self  # type: ignore[arg-type]


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise OptionsError(f"{name} must be one of {', '.join(choices)}", value=repr(value))


def check_codec(codec: object) -> str:
    """The name of a codec. Raises OptionsError."""
    _check_choice("codec", codec, NAMED_CODECS)
    return str(codec)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionsError(f"{name} must be an int", value=repr(value))
    if not low <= value <= high:
        raise OptionsError(f"{name} is out of range", value=value, limit=f"{low} to {high}")


def _checked_growth(growth: object) -> tuple[tuple[int, int], ...]:
    """The schedule as ints: starts at token 0, positions ascend, sizes don't shrink."""
    advice = "Give (from token, tokens a record) pairs, as ((0, 256), (4096, 512))"
    try:
        pairs = tuple((int(start), int(tokens)) for start, tokens in growth)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise OptionsError("growth is no schedule", value=repr(growth), advice=advice) from None
    if not pairs or pairs[0][0] != 0:
        raise OptionsError("growth must start at token 0", value=pairs, advice=advice)
    for (start, tokens), (later, more) in pairwise(pairs):
        if later <= start or more < tokens:
            raise OptionsError("growth must ascend", value=pairs, advice=advice)
    for _, tokens in pairs:
        _check_int("tokens a record in growth", tokens, 1, limits.BLOCK_TOKENS_MAX)
    return pairs
