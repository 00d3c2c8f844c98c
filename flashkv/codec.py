"""Blocks in the caller's memory -> coded records in staging buffers. No I/O.

Invariants
  - one native call codes all records of a slice; nothing here runs per block;
  - a staging buffer belongs to the write that reads it until that write is released;
  - staging is bounded: a slice waits for a buffer, and only a record that is larger than all of a
    buffer gets one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import checks, limits
from flashkv.errors import OptionsError
from flashkv.native import dtype_of, ffi, lib, pointer

ENCODE_BLOCK: Final = dtype_of("fkv_encode_block")
ENCODE_RECORD: Final = dtype_of("fkv_encode_record")
CODECS: Final = {
    "raw": int(lib.FKV_CODEC_RAW),
    "lossless": int(lib.FKV_CODEC_LOSSLESS),
    "fast": int(lib.FKV_CODEC_FAST),
    "bounded-1": int(lib.FKV_CODEC_BOUNDED),
    "bounded-2": int(lib.FKV_CODEC_BOUNDED),
    "bounded-3": int(lib.FKV_CODEC_BOUNDED),
    "bounded-4": int(lib.FKV_CODEC_BOUNDED),
    "cold": int(lib.FKV_CODEC_COLD),
}
FIDELITIES: Final = {
    "exact": int(lib.FKV_FIDELITY_EXACT),
    "cold": int(lib.FKV_FIDELITY_COLD),
    **{f"bounded-{level}": int(lib.FKV_FIDELITY_BOUNDED_1) + level - 1 for level in range(1, 5)},
}
"""The lower, the nearer to what was put."""
STAGING_BUFFERS: Final = 4
"""One is filled, one is written, and two keep both busy when records differ in size."""


def fidelity_number(name: str, given: str) -> int:
    """FKV_FIDELITY_* of "exact", "bounded-1" ... "cold". Raises OptionsError."""
    if given not in FIDELITIES:
        raise OptionsError(
            f"{name} must be one of {', '.join(FIDELITIES)}", value=checks.shown(given)
        )
    return FIDELITIES[given]


class StagingBuffer:
    """Page-aligned memory; `address` is its first byte."""

    def __init__(self, length: int, *, pooled: bool) -> None:
        self.length = length
        self.pooled = pooled
        self.used = 0  # bytes that hold records
        self.base: Any = lib.fkv_buffer_alloc(length)
        if self.base == ffi.NULL:
            raise MemoryError(f"no memory for a staging buffer of {length} bytes")
        self.address = int(ffi.cast("uintptr_t", self.base))

    def free(self) -> None:
        """Gives the memory back."""
        if self.base is not None:
            lib.fkv_buffer_free(self.base, self.length)
            self.base = None


class Staging:
    """The staging buffers of a store; take() never blocks."""

    def __init__(self, total_bytes: int) -> None:
        self.buffer_bytes = total_bytes // STAGING_BUFFERS // limits.PAGE_BYTES * limits.PAGE_BYTES
        self._lock = threading.Lock()
        self._all: list[StagingBuffer] = []
        self._free: list[StagingBuffer] = []

    def take(self, length: int) -> StagingBuffer | None:
        """An empty buffer of at least this length, or None: wait for a write to end."""
        pooled = length <= self.buffer_bytes
        with self._lock:
            if pooled and self._free:
                buffer = self._free.pop()
                buffer.used = 0
                return buffer
            same = sum(buffer.pooled == pooled for buffer in self._all)
            if same >= (STAGING_BUFFERS if pooled else 1):
                return None
            buffer = StagingBuffer(self.buffer_bytes if pooled else length, pooled=pooled)
            self._all.append(buffer)
            return buffer

    def keep(self, used: set[StagingBuffer]) -> None:
        """Takes back every buffer but those in use."""
        with self._lock:
            for buffer in [buffer for buffer in self._all if buffer not in used]:
                if not buffer.pooled:
                    self._all.remove(buffer)
                    buffer.free()
                elif buffer not in self._free:
                    self._free.append(buffer)

    def close(self) -> None:
        """Frees all; nothing may be in flight."""
        with self._lock:
            for buffer in self._all:
                buffer.free()
            self._all.clear()
            self._free.clear()


@dataclass(eq=False)
class EncodeJob:
    """Everything that coding a put needs.

    blocks   ENCODE_BLOCK[B], the blocks that are stored; records: ENCODE_RECORD[R], runs of them.
    keys     uint8[], keys back to back; parents likewise. pointers: uint64[N, regions].
    factors  float32[2, layers] of bounded levels; profile: its digest, if they come from one.
    """

    geometry: Any
    view: Any
    namespace_digest: bytes
    shard: bytes
    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8] | None
    pointers: NDArray[np.uint64]
    blocks: NDArray[Any]
    records: NDArray[Any]
    created_ms: int
    factors: NDArray[np.float32] | None = None
    profile: bytes | None = None
    keepalive: Any = None

    def __post_init__(self) -> None:
        self._held = (
            ffi.from_buffer("uint8_t[]", self.namespace_digest),
            ffi.from_buffer("uint8_t[]", self.shard),
        )
        batch = self._batch = ffi.new("fkv_encode_batch *")
        batch.geometry = self.geometry
        batch.view = self.view
        batch.namespace_digest, batch.shard = self._held
        batch.keys = pointer(self.keys, "uint8_t *")
        batch.parents = pointer(self.parents, "uint8_t *")
        batch.pointers = pointer(self.pointers, "uint64_t *")
        batch.blocks = pointer(self.blocks, "fkv_encode_block *")
        batch.created_ms = self.created_ms
        if self.factors is not None:
            batch.factors = pointer(self.factors, "float *")
        if self.profile is not None:
            batch.profile = ffi.from_buffer("uint8_t[]", self.profile)

    def _with(self, records: NDArray[Any]) -> Any:
        self._batch.records = pointer(records, "fkv_encode_record *")
        self._batch.record_count = len(records)
        return self._batch

    def bounds(self) -> NDArray[np.uint64]:
        """Staging bytes that each record can need: uint64[records]."""
        bounds = np.empty(len(self.records), np.uint64)
        lib.fkv_encode_bounds(self._with(self.records), pointer(bounds, "uint64_t *"))
        return bounds

    def slices(
        self, bounds: NDArray[np.uint64], buffer_bytes: int
    ) -> Iterator[tuple[int, int, int]]:
        """(first record, end, staging bytes) of slices that fit a buffer, or are one record."""
        ends = bounds.cumsum(dtype=np.int64)
        if int(ends[-1]) <= buffer_bytes:
            yield 0, len(bounds), int(ends[-1])
            return
        first, before = 0, 0
        while first < len(bounds):
            end = max(int(np.searchsorted(ends, before + buffer_bytes, "right")), first + 1)
            yield first, end, int(ends[end - 1]) - before
            first, before = end, int(ends[end - 1])

    def encode(
        self, engine: Any, records: NDArray[Any], bounds: NDArray[np.uint64], buffer: StagingBuffer
    ) -> None:
        """Codes records (a slice of self.records) into the buffer, behind what it holds.

        Their rows receive the results.
        """
        records["buffer_offset"] = bounds.cumsum() - bounds + np.uint64(buffer.used)
        batch = self._with(records)
        batch.buffer = buffer.base
        lib.fkv_encode(engine, batch)
        ends = records["buffer_offset"] + records["pages"] * np.uint64(limits.PAGE_BYTES)
        buffer.used = int(ends.max())
