"""codec="auto": `fast` where the device outruns the decoder of `lossless`, else `lossless`.

Loading overlaps reading with decoding, so a codec's rate is the lesser of what the device delivers,
in bytes before coding, and what all decoding threads do. The denser codec saves space too: the
other one must be clearly faster.

Invariants
  - both are bit-exact and any record says which it has: the choice changes no stored byte;
  - nothing is measured where the options name a codec, nor more often than REST_S;
  - without a figure of the device the choice is `lossless`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flashkv.errors import FlashKVError
from flashkv.native import address, aligned_array, lib, pointer

AUTO: Final = "auto"
DENSE, QUICK = "lossless", "fast"
RATIOS: Final = {DENSE: 1.50, QUICK: 1.40}
"""Bytes before coding for a byte on disk: docs/codecs.md."""
TO_QUICK: Final = 1.15
"""`fast` is taken once its rate is so many times that of `lossless` ..."""
TO_DENSE: Final = 1.05
"""... and kept until it is less than so many times: measurements differ by some per cent."""
REST_S: Final = 600.0
"""A look costs some ten milliseconds of a put."""
RETRY_S: Final = 10.0
"""Until the next look where there was nothing to read from yet."""
PROBE_BYTES: Final = 8 << 20
PROBES: Final = 3
_ROWS, _CHANNELS, _ROUNDS, _TRIES = 32, 64, 50, 5


@dataclass(frozen=True)
class Speeds:
    """Bytes a second: read from the device; decoded by all threads, by codec."""

    device: float
    decoders: dict[str, float]

    def rate(self, codec: str) -> float:
        """Of loading records of a codec, in bytes before coding."""
        return min(self.device * RATIOS[codec], self.decoders[codec])


class CodecChoice:
    """Which codec new records get; current() is asked by every put.

    measure_device gives bytes a second, None where there is nothing to read; measure_decoders gives
    them by codec. clock: seconds.
    """

    def __init__(
        self,
        codec: str,
        measure_device: Callable[[], float | None],
        measure_decoders: Callable[[], dict[str, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._auto = codec == AUTO
        self._codec = DENSE if self._auto else codec
        self._measure_device = measure_device
        self._measure_decoders = measure_decoders
        self._clock = clock
        self._next_look = clock()
        self._lock = threading.Lock()
        self._speeds: Speeds | None = None
        self._changes = 0

    def current(self) -> str:
        """The codec of new records; now and then it is measured again."""
        if self._auto and self._clock() >= self._next_look and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self._codec

    def _look(self) -> None:
        device = None
        with suppress(OSError, MemoryError, FlashKVError):  # no put fails for want of a figure
            device = self._measure_device()
        self._next_look = self._clock() + (RETRY_S if device is None else REST_S)
        if device is None:
            return
        self._speeds = Speeds(device, self._measure_decoders())
        gain = self._speeds.rate(QUICK) / self._speeds.rate(DENSE)
        chosen = QUICK if gain > (TO_DENSE if self._codec == QUICK else TO_QUICK) else DENSE
        self._changes += chosen != self._codec
        self._codec = chosen

    def facts(self) -> dict[str, int | str]:
        """The choice and what it was made from, for stats(); empty where the options made it."""
        if not self._auto:
            return {}
        found: dict[str, int | str] = {"codec": self._codec, "changes": self._changes}
        if self._speeds is not None:
            found["device_bytes_per_s"] = int(self._speeds.device)
            for codec, speed in self._speeds.decoders.items():
                found[f"{codec}_decode_bytes_per_s"] = int(speed)
        return found


def device_speed(
    read: Callable[[NDArray[np.uint8]], int], most_bytes: int = PROBE_BYTES
) -> float | None:
    """Bytes a second of the best of some reads. read(array): fills it; 0, or -errno: no figure."""
    array, best = aligned_array(min(most_bytes, PROBE_BYTES)), 0.0
    for _ in range(PROBES):
        began = time.perf_counter()
        if read(array) != 0:
            return None
        best = max(best, array.nbytes / max(time.perf_counter() - began, 1e-9))
    return best


def decoder_speeds(threads: int) -> dict[str, float]:
    """Bytes of bfloat16 a second that so many threads decode, no more than there are cores."""
    cores = min(threads, len(os.sched_getaffinity(0)))
    modes = {DENSE: lib.FKV_STREAM_PREFIX_BF16, QUICK: lib.FKV_STREAM_FXP_BF16}
    return {codec: cores * _decoder_speed(int(mode)) for codec, mode in modes.items()}


def _decoder_speed(mode: int) -> float:
    """Of one thread, on a stripe of Gaussian values."""
    values = np.random.default_rng(1).normal(size=(_ROWS, _CHANNELS)).astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    rows = np.arange(_ROWS, dtype=np.uint64) * np.uint64(2 * _CHANNELS) + np.uint64(address(words))
    prefix = mode == lib.FKV_STREAM_PREFIX_BF16
    parameters = np.zeros(lib.fkv_stream_parameter_bytes(2 * _CHANNELS, mode) + 1, np.uint8)
    stripe = np.zeros(2 * words.nbytes, np.uint8)
    shape = (_ROWS, 2 * _CHANNELS, mode, pointer(parameters, "uint8_t *"))
    where = pointer(rows, "uint64_t *")
    (lib.fkv_prefix_choose if prefix else lib.fkv_fxp_choose)(where, *shape)
    encode = lib.fkv_prefix_encode if prefix else lib.fkv_fxp_encode
    decode = lib.fkv_prefix_decode if prefix else lib.fkv_fxp_decode
    source = pointer(stripe, "uint8_t *")
    length, best = encode(where, *shape, source), float("inf")
    for _ in range(_TRIES):
        began = time.thread_time_ns()
        for _ in range(_ROUNDS):
            decode(source, length, *shape, where)
        best = min(best, time.thread_time_ns() - began)
    return _ROUNDS * words.nbytes / max(best, 1) * 1e9
