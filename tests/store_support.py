"""Shared by the tests of whole stores: geometries with their data, crashes, images, leak checks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flashkv
from flashkv import (
    Identity,
    KVGeometry,
    MemoryView,
    Milestone,
    Namespace,
    Options,
    Regions,
    Store,
)
from flashkv.blockio import backend_available

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
BACKENDS = [name for name in ("io_uring", "threads") if backend_available(name)]
GQA = KVGeometry.gqa(2, 2, 64, "bfloat16")
"""1 KiB a token."""
OPAQUE = KVGeometry.opaque(10_000)
IDENTITY = Identity(model="test/model", revision="1")


def small_options(**changes: Any) -> Options:
    """Segments of 4 MiB, small buffers, no free floor."""
    given: dict[str, Any] = {
        "segment_bytes": 4 * MIB,
        "free_floor_bytes": 0,
        "staging_bytes": 8 * MIB,
        "read_buffer_bytes": 8 * MIB,
        "header_cache_bytes": 4 * MIB,
        "queue_depth": 16,
        "workers": 2,
    }
    return Options(**{**given, **changes})


def open_store(
    path: Path,
    geometry: KVGeometry | None = GQA,
    *,
    capacity: int | str | None = 32 * MIB,
    read_only: bool = False,
    **options: Any,
) -> Store:
    """A small store."""
    if read_only:
        capacity = None
    return flashkv.open(
        path,
        capacity=capacity,
        geometry=geometry,
        options=small_options(**options),
        read_only=read_only,
    )


def file_system(path: Path) -> str:
    """Type of the file system that a path lies on."""
    done = subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def du_bytes(path: Path) -> int:
    """What du says, folders included."""
    done = subprocess.run(
        ["du", "-s", "-B1", str(path)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[0])


def shard_of(path: Path) -> Path:
    """The folder of a store's only shard."""
    return path / "shards" / "0"


def segment_file(path: Path, number: int) -> Path:
    """A segment's file."""
    return shard_of(path) / "segments" / f"{number:08d}.seg"


# ---- data --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A geometry and how a test makes, holds and compares its blocks."""

    name: str
    geometry: KVGeometry
    tokens: int  # of a block

    @property
    def block_bytes(self) -> int:
        return self.geometry.block_bytes(0, self.tokens)

    def shape(self) -> tuple[int, ...]:
        """Of one block with all of its tokens, default order; opaque and MLA: flat bytes."""
        plane = self.geometry.groups[0].planes[0]
        if (
            len({p.vector_bytes for p in self.geometry.groups[0].planes}) > 1
            or plane.dtype.value == "opaque"
        ):
            return (self.block_bytes,)
        planes = len(self.geometry.groups[0].planes)
        return (plane.layers, planes, plane.heads, self.tokens, plane.elements)

    def numpy_dtype(self) -> Any:
        if len(self.shape()) == 1:
            return np.uint8
        dtype = self.geometry.groups[0].planes[0].dtype.value
        return {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}[dtype]

    def block(self, key: bytes, version: int) -> np.ndarray:
        """What key holds in its n-th version: like activations, and no two alike."""
        rng = np.random.default_rng([version, *key])
        shape = self.shape()
        if len(shape) == 1:
            return rng.integers(0, 256, shape, np.uint8)
        values = rng.standard_normal(shape, np.float32)
        if self.numpy_dtype() == np.uint16:
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(self.numpy_dtype())

    def blocks(self, keys: Sequence[bytes], versions: Sequence[int]) -> np.ndarray:
        """[N, *shape]"""
        if not keys:
            return np.zeros((0, *self.shape()), self.numpy_dtype())
        return np.stack([self.block(k, v) for k, v in zip(keys, versions, strict=True)])

    def empty(self, count: int) -> np.ndarray:
        return np.full((count, *self.shape()), 0xA5, self.numpy_dtype())


KINDS = (
    Kind("gqa-bf16", KVGeometry.gqa(2, 2, 64, "bfloat16"), 64),
    Kind("gqa-fp16", KVGeometry.gqa(3, 1, 80, "float16"), 16),
    Kind("gqa-fp32", KVGeometry.gqa(1, 3, 32, "float32"), 32),
    Kind("mla", KVGeometry.mla(3, 128, 64, "bfloat16"), 48),
    Kind("opaque-large", KVGeometry.opaque(200_003), 1),
    Kind("opaque-small", KVGeometry.opaque(300), 1),
)


def equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Bit for bit: NaNs too."""
    return left.shape == right.shape and left.tobytes() == right.tobytes()


# ---- crashes and images ------------------------------------------------------------------------


def crash(store: Store) -> None:
    """Ends the handle as the end of its process would: nothing is flushed, no log is written.

    What was on its way to the device arrives; nothing of it is synced.
    """
    with store.writer_lock:
        store._reach(Milestone.WRITTEN)
        store._stop()


def image(store: Store, to: Path) -> Path:
    """A copy of the store's files as they are now: what a crash at this moment could leave."""
    shutil.rmtree(to, ignore_errors=True)
    subprocess.run(["cp", "-r", "--sparse=always", str(store.path), str(to)], check=True)
    return to


# ---- leaks -------------------------------------------------------------------------------------


def check_rest(store: Store) -> flashkv.Stats:
    """Asserts that nothing is held at rest and that the figures fit together."""
    if not store.read_only:
        store._reach(Milestone.WRITTEN)
        store.io.later(lambda: None).result()  # syncs in the background come before
    stats = store.stats()
    assert stats.staging_in_use == 0
    assert stats.read_buffers_in_use == 0
    assert stats.writes_inflight == 0
    assert stats.io["inflight"] == 0
    usage = store.index.usage([segment.number for segment in store.segments])
    assert int(usage["live_blocks"].sum()) == stats.blocks
    assert int(usage["live_records"].sum()) == stats.records
    assert int(usage["live_pages"].sum()) * 4096 == stats.live_bytes
    if not len(store.leases):
        assert not usage["pins"].any()
    if not store.read_only:
        assert du_bytes(store.path) <= store.capacity_bytes
        assert stats.disk_bytes <= store.capacity_bytes
    return stats


def put_all(ns: Namespace, kind: Kind, keys: Sequence[bytes], version: int = 0, **how: Any) -> None:
    """Stores blocks; every one must go in."""
    result = ns.put(keys, kind.blocks(keys, [version] * len(keys)), **how)
    assert result.all_ok, result


def present(ns: Namespace, kind: Kind, keys: Sequence[bytes], version: int = 0) -> np.ndarray:
    """bool[N]: which keys can be read; asserts that what is read is right."""
    out = kind.empty(len(keys))
    result = ns.get(keys, out)
    for row, key in enumerate(keys):
        if result.ok[row]:
            assert equal(out[row], kind.block(key, version)), f"wrong bytes of {key!r}"
    return result.ok


__all__ = [
    "BACKENDS",
    "GQA",
    "IDENTITY",
    "KINDS",
    "MIB",
    "OPAQUE",
    "ROOT",
    "Kind",
    "MemoryView",
    "Regions",
    "check_rest",
    "crash",
    "du_bytes",
    "equal",
    "file_system",
    "image",
    "open_store",
    "present",
    "put_all",
    "segment_file",
    "shard_of",
    "small_options",
]
