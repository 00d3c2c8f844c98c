"""What the lossless codecs make of real tensors, and how fast, on one thread.

Invariants
  - ratios are of bytes on disk: headers, stripe tables, checksums and unused ends of pages count;
  - speeds are bytes of the tensors by the thread's CPU time, checksums of all pages included: the
    median of several passes over the whole set;
  - what was decoded is compared with what was coded, every time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import KVGeometry, MemoryView
from flashkv.codec import CODECS, ENCODE_BLOCK, ENCODE_RECORD, EncodeJob
from flashkv.errors import native_ok
from flashkv.layout import packed_view
from flashkv.native import ffi, lib, pointer

from .bench_peers import measure_peers
from .bench_sets import BenchError

PAGE: Final = 4096
RUNS: Final = (16, 32, 64, 128, 256, 512, 1024)
BLOCK_TOKENS: Final = 16
PASSES: Final = 7
_UUID: Final = bytes(16)


@dataclass
class Tensors:
    """K and V of one text: uint16[layer, plane, head, token, dim]."""

    name: str
    dtype: str
    values: NDArray[np.uint16]

    def wider(self, dim: int) -> Tensors:
        """Vectors of `dim` values made of those of neighbouring heads."""
        layers, planes, heads, tokens, own = self.values.shape
        joined = dim // own
        count = layers * heads // joined
        flat = self.values.transpose(1, 0, 2, 3, 4).reshape(planes, layers * heads, tokens, own)
        parts = flat[:, : count * joined].reshape(planes, count, joined, tokens, own)
        wide = parts.transpose(1, 0, 3, 2, 4).reshape(count, planes, 1, tokens, dim)
        return Tensors(self.name, self.dtype, np.ascontiguousarray(wide))


def read(folder: Path) -> list[Tensors]:
    """The K and V of every .safetensors file. Raises BenchError where there is none."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        start = 8 + int.from_bytes(path.open("rb").read(8), "little")
        content = np.fromfile(path, np.uint8)
        rows = json.loads(bytes(content[8:start]))
        if not {"K", "V"} <= rows.keys():
            continue
        planes = []
        for name in ("K", "V"):
            begin, end = (start + at for at in rows[name]["data_offsets"])
            planes.append(content[begin:end].view(np.uint16).reshape(rows[name]["shape"]))
        dtype = {"BF16": "bfloat16", "F16": "float16"}[rows["K"]["dtype"]]
        found.append(Tensors(path.stem, dtype, np.stack(planes, axis=1)))
    if not found:
        raise BenchError(f"no .safetensors file with K and V in {folder}")
    return found


class Record:
    """One record of blocks of 16 tokens (fewer where the record is shorter), coded alone."""

    def __init__(self, tensors: Tensors, first: int, tokens: int, block: int, codec: str) -> None:
        part = tensors.values[:, :, :, first : first + tokens]
        layers, planes, heads, _, dim = part.shape
        count = tokens // block
        split = part.reshape(layers, planes, heads, count, block, dim).transpose(3, 0, 1, 2, 4, 5)
        self.blocks = np.ascontiguousarray(split)
        self.expected = np.ascontiguousarray(part)
        geometry = KVGeometry.gqa(layers, heads, dim, tensors.dtype)
        self._native = geometry.native(0)
        self._view = packed_view(geometry, 0, MemoryView(), block)
        rows = np.zeros(count, ENCODE_BLOCK)
        rows["key_bytes"], rows["tokens"] = 32, block
        rows["key_offset"], rows["source"] = np.arange(count) * 32, np.arange(count)
        self._records = np.zeros(1, ENCODE_RECORD)
        self._records["block_count"], self._records["sequence"] = count, 1
        self._codec = CODECS[codec]
        self._records["codec"] = self._codec
        starts = self.blocks.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(
            self.blocks[0].nbytes
        )
        self._job = EncodeJob(
            geometry=self._native,
            view=self._view.pointer,
            namespace_digest=bytes(32),
            shard=bytes(16),
            keys=np.zeros(32 * count, np.uint8),
            parents=None,
            pointers=starts.reshape(count, 1),
            blocks=rows,
            records=self._records,
            created_ms=1,
        )
        self._buffer = np.zeros(int(self._job.bounds()[0]), np.uint8)
        self._out = np.empty_like(self.expected)

    def encode(self) -> None:
        self._records["codec"], self._records["buffer_offset"] = self._codec, 0
        batch = self._job._with(self._records)
        batch.buffer = pointer(self._buffer, "uint8_t *")
        lib.fkv_encode(ffi.NULL, batch)
        if not native_ok(int(self._records["status"][0])):
            raise BenchError(f"a record was not coded: status {self._records['status'][0]}")

    def _image(self) -> Any:
        begin = int(self._records["buffer_offset"][0])
        return pointer(self._buffer[begin:], "uint8_t *")

    def bind(self) -> None:
        lib.fkv_record_bind(self._image(), _UUID, 1, 0)

    def decode(self) -> None:
        out = pointer(self._out.reshape(-1).view(np.uint8), "uint8_t *")
        room = self._out.nbytes
        status = lib.fkv_record_decode(self._image(), self.stored_bytes, _UUID, 1, 0, out, room)
        if not native_ok(status):
            raise BenchError(f"a record was not decoded: status {status}")

    def check(self) -> None:
        stored = self._out.reshape(-1)
        layers, planes = self.expected.shape[:2]
        if not np.array_equal(stored, self.expected.reshape(-1)):
            raise BenchError(f"other bytes came back ({layers} layers, {planes} planes)")

    @property
    def stored_bytes(self) -> int:
        return int(self._records["pages"][0]) * PAGE


def records(sets: Iterable[Tensors], run: int, codec: str) -> list[Record]:
    """All tokens of all sets in records of `run` tokens, coded, decoded and compared."""
    made = []
    for tensors in sets:
        for first in range(0, tensors.values.shape[3], run):
            record = Record(tensors, first, run, min(run, BLOCK_TOKENS), codec)
            record.encode()
            record.bind()
            record.decode()
            record.check()
            made.append(record)
    return made


def ratio(sets: Iterable[Tensors], run: int, codec: str = "lossless") -> float:
    """Bytes in memory by bytes on disk."""
    made = records(sets, run, codec)
    return sum(r.expected.nbytes for r in made) / sum(r.stored_bytes for r in made)


def _gbps(made: list[Record], step: Callable[[Record], None]) -> float:
    """GB of tensors a second of this thread's CPU time: the median of PASSES."""
    total, seconds = sum(record.expected.nbytes for record in made), []
    for _ in range(PASSES):
        before = time.thread_time()
        for record in made:
            step(record)
        seconds.append(time.thread_time() - before)
    return total / statistics.median(seconds) / 1e9


def run_codec(
    folder: Path, step: Callable[[str], None], peers: Path | None = None
) -> dict[str, Any]:
    """All figures; step(text) is called before each of them. Raises BenchError.

    peers: folder of packages that are not in this environment.
    """
    sets = read(folder)
    bf16 = [tensors for tensors in sets if tensors.dtype == "bfloat16"]
    fp16 = [tensors for tensors in sets if tensors.dtype == "float16"]
    paths = ffi.string(lib.fkv_code_paths()).decode()
    figures: dict[str, Any] = {"passes": PASSES, "code_paths": paths}
    step("ratios by run length")
    by_run = {str(run): ratio(bf16, run) for run in RUNS}
    figures["ratio_by_run_length"] = by_run
    figures["lossless_bf16_ratio_on_disk"] = by_run["256"]
    figures["fast_ratio_on_disk"] = ratio(bf16, 256, "fast")
    for dim in (128, 256):
        step(f"vectors of {dim} values")
        wide = [tensors.wider(dim) for tensors in bf16]
        figures[f"lossless_bf16_ratio_on_disk_dim_{dim}"] = ratio(wide, 256)
    if fp16:
        figures["lossless_fp16_ratio_on_disk"] = ratio(fp16, 256)
    for codec in ("lossless", "fast"):
        step(f"speed of {codec}")
        made = records(bf16, 256, codec)
        figures[f"{codec}_decode_gbps"] = _gbps(made, Record.decode)
        figures[f"{codec}_encode_gbps"] = _gbps(made, Record.encode)
    del made
    figures |= measure_peers(b"".join(t.values.tobytes() for t in bf16), peers, step)
    for unit in ("zipnn", "zipnn_32k"):
        if f"{unit}_decode_gbps" in figures:
            ours, theirs = figures["lossless_decode_gbps"], figures[f"{unit}_decode_gbps"]
            figures[f"lossless_decode_to_{unit}"] = ours / theirs
    return figures
