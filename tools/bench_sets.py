"""What flashkv-bench stores: stores of blocks with known contents, and the timed passes over them.

Invariants
  - a timed pass holds nothing but calls of the store; buffers were touched and keys made before;
  - every status is checked after the pass, and what a get brought is compared with what was put;
  - a store is opened for one pass and closed after it, so record headers are cold but where a pass
    says otherwise.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import flashkv
from flashkv.data import load_sample
from flashkv.geometry import DType, Group, GroupKind, KVGeometry, Plane, Role

from .measure import Measurement, stopwatch

Bytes = npt.NDArray[np.uint8]

MIB = 1 << 20
PAGE_BYTES = 4096
KEY_BYTES = 32
SEGMENT_BYTES_MAX = 256 * MIB
SAMPLE_BLOCK_TOKENS = 64
SAMPLE_MODEL_LAYERS = 30
"""SmolLM2-135M's depth, to which the sample's layers are repeated: records of real size."""


class BenchError(RuntimeError):
    """The store did not do what was to be timed: the figures would be worthless."""


def keys(label: str, first: int, count: int) -> Bytes:
    """Keys [count, 32] that are distinct over label and number."""
    made = np.zeros((count, KEY_BYTES), dtype=np.uint8)
    name = label.encode()[: KEY_BYTES - 8]
    made[:, : len(name)] = np.frombuffer(name, dtype=np.uint8)
    numbers = np.arange(first, first + count, dtype="<u8")
    made[:, KEY_BYTES - 8 :] = numbers.view(np.uint8).reshape(count, 8)
    return made


def page_aligned(length_bytes: int) -> Bytes:
    """Touched memory that begins on a page, as an engine's host pool does."""
    memory = np.frombuffer(mmap.mmap(-1, length_bytes), dtype=np.uint8)
    memory[:] = 0
    return memory


@dataclass(frozen=True)
class StoreSettings:
    """Where and how the stores of a run are made."""

    folder: Path
    size_bytes: int
    backend: str = "auto"

    def options(self, codec: str) -> flashkv.Options:
        """Few large segments, as a store of some hundred GB has them."""
        segment = min(SEGMENT_BYTES_MAX, max(32 * MIB, self.size_bytes // 4 // MIB * MIB))
        return flashkv.Options(backend=self.backend, codec=codec, segment_bytes=segment)

    @property
    def capacity_bytes(self) -> int:
        """Room for all blocks twice, so that nothing is reclaimed during a pass."""
        return 2 * self.size_bytes + 512 * MIB


class BlockSet:
    """A store of `count` blocks that repeat `source`, put and got `batch` at a time."""

    def __init__(
        self,
        settings: StoreSettings,
        name: str,
        geometry: KVGeometry,
        codec: str,
        source: npt.NDArray[Any],
    ) -> None:
        """source: [batch, ...] the contents of a batch; each batch of the store holds the same."""
        self.settings = settings
        self.path = settings.folder / name
        self.geometry = geometry
        self.codec = codec
        self.batch = len(source)
        self.block_bytes = source.nbytes // self.batch
        self.batches = max(1, settings.size_bytes // source.nbytes)
        self.count = self.batches * self.batch
        self.source = source
        self.name = name
        self.keys = [keys(name, i * self.batch, self.batch) for i in range(self.batches)]
        self.stats: dict[str, Any] = {}

    @property
    def bytes(self) -> int:
        return self.count * self.block_bytes

    @contextmanager
    def opened(self) -> Iterator[tuple[flashkv.Store, flashkv.Namespace]]:
        """The store and its namespace; keeps the stats that it had at the end."""
        with flashkv.open(
            self.path,
            capacity=self.settings.capacity_bytes,
            geometry=self.geometry,
            options=self.settings.options(self.codec),
        ) as store:
            yield store, store.namespace(flashkv.Identity(model="flashkv-bench"))
            self.stats = store.stats().as_dict()

    def put(self) -> Measurement:
        """Puts all blocks into a new store and flushes once at the end."""
        self.remove()
        results: list[flashkv.BatchResult] = []
        with self.opened() as (store, namespace):
            with stopwatch() as watch:
                for batch in self.keys:
                    results.append(namespace.put(batch, self.source))  # noqa: PERF401
                store.flush()
            expect_all_ok(results, f"put {self.name}")
        return watch.measured(self.bytes, self.count)

    def get(self) -> Measurement:
        """Gets all blocks of the store, headers cold, into one page-aligned buffer."""
        memory = page_aligned(self.source.nbytes)
        out = memory.view(self.source.dtype).reshape(self.source.shape)
        results: list[flashkv.BatchResult] = []
        with self.opened() as (_, namespace):
            with stopwatch() as watch:
                for batch in self.keys:
                    results.append(namespace.get(batch, out))  # noqa: PERF401
            expect_all_ok(results, f"get {self.name}")
        if not np.array_equal(out, self.source):
            raise BenchError(f"get {self.name}: other bytes than were put")
        return watch.measured(self.bytes, self.count)

    def remove(self) -> None:
        """Deletes the store's files."""
        shutil.rmtree(self.path, ignore_errors=True)


def expect_all_ok(results: Sequence[flashkv.BatchResult], what: str) -> None:
    """Raises BenchError where a block of a timed pass was not OK."""
    for result in results:
        if not result.all_ok:
            bad = np.flatnonzero(~result.ok)
            first = int(bad[0])
            raise BenchError(
                f"{what}: {len(bad)} of {len(result)} blocks failed, the first with"
                f" {result[first].name}"
            )


def opaque_blocks(settings: StoreSettings) -> BlockSet:
    """1 MiB opaque blocks, stored raw, 64 a batch."""
    batch = min(64, max(1, settings.size_bytes // MIB))
    memory = page_aligned(batch * MIB)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.size, dtype=np.uint8)
    return BlockSet(settings, "opaque", KVGeometry.opaque(MIB), "raw", memory.reshape(batch, MIB))


def real_kv_blocks(settings: StoreSettings) -> BlockSet:
    """Blocks of 64 tokens of real bf16 KV, [layer, K|V, head, token, dim], stored lossless."""
    sample = load_sample().tensors
    kv = np.stack([sample["K"], sample["V"]], axis=1)  # [layer, plane, head, token, dim]
    layers, planes, heads, tokens, dim = kv.shape
    blocks = tokens // SAMPLE_BLOCK_TOKENS
    kv = kv[:, :, :, : blocks * SAMPLE_BLOCK_TOKENS]
    kv = kv.reshape(layers, planes, heads, blocks, SAMPLE_BLOCK_TOKENS, dim)
    kv = np.moveaxis(kv, 3, 0)[:, np.arange(SAMPLE_MODEL_LAYERS) % layers]
    memory = page_aligned(kv.nbytes)
    source = memory.view(kv.dtype).reshape(kv.shape)
    source[:] = kv
    geometry = KVGeometry.gqa(SAMPLE_MODEL_LAYERS, heads, dim, DType.BFLOAT16)
    return BlockSet(settings, "realkv", geometry, "lossless", source)


class PageSet:
    """Blocks whose every (layer, head) is one page: 16 tokens of K and V joined, 256 bytes each."""

    layers, heads, tokens, vector_bytes = 8, 8, 16, 256
    batch = 256

    def __init__(self, settings: StoreSettings) -> None:
        plane = Plane(Role.KV, self.layers, self.heads, self.vector_bytes, DType.BFLOAT16)
        geometry = KVGeometry((Group("kv", GroupKind.FULL, (plane,)),))
        shape = (16, self.layers, 1, self.heads, self.tokens, self.vector_bytes // 2)
        source = np.random.default_rng(2).integers(0, 1 << 16, shape, dtype=np.uint16)
        self.blocks = BlockSet(settings, "pages", geometry, "raw", source)
        self.keys = np.concatenate(self.blocks.keys)

    def get_pages(self, pages: int, seed: int) -> Measurement:
        """Gets `pages` single pages: 256 random blocks a batch, of one random layer and head."""
        batches = max(1, pages // self.batch)
        size = min(self.batch, len(self.keys))
        random = np.random.default_rng(seed)
        rows = [random.choice(len(self.keys), size, replace=False) for _ in range(batches)]
        wanted = [self.keys[row] for row in rows]
        layers = random.integers(0, self.layers, batches).tolist()
        heads = random.integers(0, self.heads, batches).tolist()
        shape = (size, 1, 1, 1, self.tokens, self.vector_bytes // 2)
        out = page_aligned(size * PAGE_BYTES).view(np.uint16).reshape(shape)
        results: list[flashkv.BatchResult] = []
        with self.blocks.opened() as (_, namespace):
            for first in range(0, len(self.keys), size):  # brings every record's header in
                some = self.keys[first : first + size]
                warm = namespace.get(some, out[: len(some)], layers=[0], heads=[0])
                expect_all_ok([warm], "warming headers")
            with stopwatch() as watch:
                for batch, layer, head in zip(wanted, layers, heads, strict=True):
                    results.append(namespace.get(batch, out, layers=[layer], heads=[head]))
            expect_all_ok(results, "get pages")
        source = self.blocks.source
        expected = source[rows[-1] % len(source), layers[-1], 0, heads[-1]]
        if not np.array_equal(out[:, 0, 0, 0], expected):
            raise BenchError("get pages: other bytes than were put")
        operations = batches * size
        return watch.measured(operations * PAGE_BYTES, operations)
