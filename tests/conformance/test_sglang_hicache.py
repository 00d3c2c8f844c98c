"""Drives the store as SGLang's HiCache v1 would: pages of 64 tokens in a host pool, K and V apart.

What a HiCacheStorage backend is asked for (SGLang 0.5.23):
  - the host pool comes late, by register_mem_pool_host(); dtype, page size and layout are the
    pool's;
  - batch_exists(keys) -> leading count; batch_get_v1 / batch_set_v1(keys, host_indices) ->
    list[bool], at most 128 pages a call; keys are hex digests;
  - host_indices name the tokens of the pool, page after page;
  - three threads call at once, and ranks take the least of their answers: the same question has the
    same answer while nothing changes.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MIB

import flashkv
from flashkv import Identity, KVGeometry, MemoryView, Namespace, Options, Pointers, Regions, Shard

PAGE_TOKENS = 64
PAGES_MAX = 128
LAYERS, HEADS, DIM = 3, 2, 32

VIEWS = {
    "layer_first": MemoryView("plane layer token head", regions=("plane",)),
    "page_first": MemoryView("plane token layer head", regions=("plane",)),
    "page_first_direct": MemoryView("plane layer token head", regions=("plane",)),
}


class HostPool:
    """SGLang's host memory: kv_buffer[K|V] in one of its layouts; `ones` makes the array."""

    def __init__(self, layout: str, pages: int, ones: Any) -> None:
        self.layout, self.pages, self.page_size = layout, pages, PAGE_TOKENS
        tokens = pages * PAGE_TOKENS
        shapes = {
            "layer_first": (2, LAYERS, tokens, HEADS, DIM),
            "page_first": (2, tokens, LAYERS, HEADS, DIM),
            "page_first_direct": (2, pages, LAYERS, PAGE_TOKENS, HEADS, DIM),
        }
        self.kv_buffer = ones(shapes[layout])
        self.dtype = "bfloat16"

    def page_views(self) -> tuple[list[Any], int]:
        """(K and V by pages, the axis that counts them)."""
        k_and_v = [self.kv_buffer[0], self.kv_buffer[1]]
        if self.layout == "layer_first":
            return [part.reshape(LAYERS, -1, PAGE_TOKENS, HEADS, DIM) for part in k_and_v], 1
        if self.layout == "page_first":
            return [part.reshape(-1, PAGE_TOKENS, LAYERS, HEADS, DIM) for part in k_and_v], 0
        return k_and_v, 0

    def page(self, number: int) -> np.ndarray:
        """[K|V, layer, token, head, dim] of a page, as numbers, whatever the layout."""
        parts, axis = self.page_views()
        arrays = [np.take(as_bits(part), number, axis=axis) for part in parts]
        if self.layout == "page_first":
            arrays = [array.transpose(1, 0, 2, 3) for array in arrays]
        return np.stack(arrays)

    def get_page_buffer_meta(self, host_indices: np.ndarray) -> tuple[list[int], list[int]]:
        """Addresses and lengths of the K and the V of each page, of page-first pools."""
        parts, axis = self.page_views()
        assert axis == 0
        pointers, sizes = [], []
        for page in host_indices[::PAGE_TOKENS] // PAGE_TOKENS:
            for part in parts:
                row = as_bits(part)[int(page)]
                pointers.append(row.ctypes.data)
                sizes.append(row.nbytes)
        return pointers, sizes


def as_bits(array: Any) -> np.ndarray:
    """uint16 view of a numpy array or torch tensor of bfloat16."""
    if isinstance(array, np.ndarray):
        return array
    import torch

    return array.view(torch.uint16).numpy()


class FlashHiCache:
    """The adapter that a connector would be."""

    def __init__(self, path: Path, tp_rank: int = 0, tp_size: int = 1) -> None:
        self.path = path
        heads = HEADS * tp_size
        self.geometry = KVGeometry.gqa(LAYERS, heads, DIM, "bfloat16")
        self.shard = Shard(heads=(tp_rank * HEADS, (tp_rank + 1) * HEADS)) if tp_size > 1 else None
        self.store = flashkv.open(
            path,
            capacity=64 * MIB,
            geometry=self.geometry,
            options=Options(staging_bytes=8 * MIB, read_buffer_bytes=8 * MIB),
        )

    def register_mem_pool_host(self, pool: HostPool) -> None:
        self.pool = pool
        identity = Identity(model="org/model", kv_dtype=pool.dtype)
        self.namespace: Namespace = self.store.namespace(identity, shard=self.shard)

    def _memory(self, host_indices: np.ndarray) -> Regions:
        parts, axis = self.pool.page_views()
        return Regions(parts, rows=host_indices[::PAGE_TOKENS] // PAGE_TOKENS, row_axis=axis)

    def batch_exists(self, keys: list[str]) -> int:
        return self.namespace.match(packed(keys)).count

    def exists(self, key: str) -> bool:
        return self.namespace.contains_one(bytes.fromhex(key))

    def batch_set_v1(self, keys: list[str], host_indices: np.ndarray) -> list[bool]:
        memory = self._memory(host_indices)
        result = self.namespace.put(packed(keys), memory, view=VIEWS[self.pool.layout])
        return result.ok.tolist()

    def batch_get_v1(self, keys: list[str], host_indices: np.ndarray) -> list[bool]:
        memory = self._memory(host_indices)
        result = self.namespace.get(packed(keys), memory, view=VIEWS[self.pool.layout])
        return result.ok.tolist()


def packed(keys: list[str]) -> np.ndarray:
    """uint8[N, 32] of hex digests."""
    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32)


def chain(count: int, salt: str = "") -> list[str]:
    """Hex SHA-256 keys, each over the one before."""
    keys, last = [], salt
    for number in range(count):
        last = hashlib.sha256(f"{last}/{number}".encode()).hexdigest()
        keys.append(last)
    return keys


def indices(pages: Any) -> np.ndarray:
    """The host tokens of pages."""
    starts = np.asarray(pages, np.int64) * PAGE_TOKENS
    return (starts[:, None] + np.arange(PAGE_TOKENS)).ravel()


def numpy_pool(layout: str, pages: int, seed: int) -> HostPool:
    rng = np.random.default_rng(seed)

    def random(shape: tuple[int, ...]) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    return HostPool(layout, pages, random)


def torch_pool(layout: str, pages: int, seed: int) -> HostPool:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    made = torch.Generator().manual_seed(seed)
    return HostPool(layout, pages, lambda s: torch.randn(s, generator=made).to(torch.bfloat16))


@pytest.mark.parametrize("make_pool", [numpy_pool, torch_pool])
@pytest.mark.parametrize("read_layout", list(VIEWS))
@pytest.mark.parametrize("layout", list(VIEWS))
def test_pages_of_every_layout(folder: Path, layout: str, read_layout: str, make_pool: Any) -> None:
    """Pages set through one layout are got through another, after a restart, elsewhere."""
    source = make_pool(layout, 24, 1)
    keys = chain(20)
    pages = np.random.default_rng(0).permutation(24)[:20]
    cache = FlashHiCache(folder)
    cache.register_mem_pool_host(source)
    assert cache.batch_exists(keys) == 0
    assert cache.batch_set_v1(keys[:12], indices(pages[:12])) == [True] * 12
    assert cache.batch_exists(keys) == 12
    assert cache.batch_set_v1(keys, indices(pages)) == [True] * 20, "present ones are fine"
    assert cache.batch_exists(keys + chain(3, "other")) == 20
    assert cache.exists(keys[-1])
    cache.store.close()

    target = make_pool(read_layout, 30, 2)
    before = target.page(29).copy()
    cache = FlashHiCache(folder)
    cache.register_mem_pool_host(target)
    places = np.random.default_rng(1).permutation(29)[:22]
    asked = keys[:5] + chain(1, "absent") + keys[5:] + chain(1, "gone")
    assert cache.batch_exists(asked) == 5
    got = cache.batch_get_v1(asked, indices(places))
    assert got == [True] * 5 + [False] + [True] * 15 + [False]
    for row, place in enumerate(places):
        if got[row]:
            page = pages[keys.index(asked[row])]
            assert np.array_equal(target.page(int(place)), source.page(int(page)))
    assert np.array_equal(target.page(29), before)
    cache.store.close()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pages_by_address(folder: Path, layout: str) -> None:
    """The pool's own (pointers, sizes), two regions a page, instead of tensors."""
    pool = numpy_pool(layout, 16, 1)
    keys = chain(16)
    cache = FlashHiCache(folder)
    cache.register_mem_pool_host(pool)
    pointers, sizes = pool.get_page_buffer_meta(indices(range(16)))
    assert set(sizes) == {cache.geometry.block_bytes(0, PAGE_TOKENS) // 2}
    view = MemoryView(VIEWS[layout].order, regions=VIEWS[layout].regions, block_tokens=PAGE_TOKENS)
    addresses = np.array(pointers, np.uint64).reshape(16, 2)
    put = cache.namespace.put(packed(keys), Pointers(addresses, pool), view=view)
    assert (put.statuses == 0).all()
    expected = np.stack([pool.page(number) for number in range(16)])
    pool.kv_buffer[:] = 0
    got = cache.namespace.get(packed(keys), Pointers(addresses[::-1], pool), view=view)
    assert got.all_ok
    assert np.array_equal(np.stack([pool.page(number) for number in range(16)]), expected[::-1])
    cache.store.close()


def test_three_threads(folder: Path) -> None:
    """Backup, prefetch and lookup at once, 128 pages a call: whole pages and monotone answers."""
    pages = PAGES_MAX
    keys = [chain(pages, f"sequence {number}") for number in range(5)]
    source, target = numpy_pool("layer_first", pages, 1), numpy_pool("layer_first", pages, 2)
    expected = np.stack([source.page(number) for number in range(pages)])
    writer, reader = FlashHiCache(folder), None
    writer.register_mem_pool_host(source)
    reader = FlashHiCache.__new__(FlashHiCache)
    reader.__dict__.update(writer.__dict__)
    reader.pool = target
    everything = indices(range(pages))
    stored = 0
    errors: list[str] = []
    done = threading.Event()

    def backup() -> None:
        nonlocal stored
        for number, chained in enumerate(keys):
            for first in range(0, pages, 32):
                part = slice(first, first + 32)
                if not all(writer.batch_set_v1(chained[part], indices(range(first, first + 32)))):
                    errors.append("set")
            stored = number + 1
        done.set()

    def prefetch() -> None:
        while not done.is_set():
            known = stored
            for chained in keys[:known]:
                target.kv_buffer[:] = 0
                if not all(reader.batch_get_v1(chained, everything)):
                    errors.append("get of stored pages")
                elif not all(np.array_equal(target.page(n), expected[n]) for n in (0, 63, 127)):
                    errors.append("bytes")

    def lookup() -> None:
        seen = [0] * len(keys)
        while not done.is_set():
            known = stored
            for number, chained in enumerate(keys):
                count = writer.batch_exists(chained)
                if count < seen[number] or (number < known and count != pages):
                    errors.append(f"exists {count} after {seen[number]}")
                seen[number] = count

    threads = [threading.Thread(target=work) for work in (backup, prefetch, lookup)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[:5]
    answers = {
        (writer.batch_exists(keys[0]), tuple(reader.batch_get_v1(keys[0], everything)))
        for _ in range(5)
    }
    assert answers == {(pages, (True,) * pages)}, "the same question, the same answer"
    writer.store.close()


def test_ranks_take_the_least(folder: Path) -> None:
    """Two ranks on one folder, one after the other: each holds its heads under the same keys."""
    keys = chain(10)
    counts = []
    pools = [numpy_pool("page_first", 10, rank) for rank in range(2)]
    for rank, have in enumerate((10, 6)):
        cache = FlashHiCache(folder, rank, 2)
        cache.register_mem_pool_host(pools[rank])
        assert cache.batch_exists(keys) == 0, "another rank's pages are not this one's"
        assert cache.batch_set_v1(keys[:have], indices(range(have))) == [True] * have
        counts.append(cache.batch_exists(keys))
        cache.store.close()
    assert min(counts) == 6
    for rank in range(2):
        cache = FlashHiCache(folder, rank, 2)
        expected = [pools[rank].page(number) for number in range(6)]
        cache.register_mem_pool_host(numpy_pool("layer_first", 10, 9))
        assert cache.batch_get_v1(keys[:6], indices(range(6))) == [True] * 6
        assert all(np.array_equal(cache.pool.page(n), expected[n]) for n in range(6))
        cache.store.close()
