"""Paged memory: blocks made of pages that lie anywhere, as paged attention keeps them.

What goes in through one layout comes out through another, bit for bit, for both codecs, whole and
in parts; and pages that don't fit are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from small_stores import IDENTITY, names
from store_support import GQA, open_store

from flashkv import KVGeometry, MemoryView, MemoryViewError, Namespace, Pointers, Regions, staging

LAYERS, HEADS, DIM, TOKENS, BLOCKS = 2, 2, 64, 64, 5
FREE = 7  # pages that no block uses
PAINT = 0xA5A5


def logical(seed: int, count: int = BLOCKS) -> np.ndarray:
    """uint16[block, layer, plane, head, token, dim]: bits of bfloat16 numbers."""
    shape = (count, LAYERS, 2, HEADS, TOKENS, DIM)
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


class Layout(NamedTuple):
    """How an engine lays out its pages.

    axes     of a page's tensor, "row" being the one that counts pages; outermost first.
    joined   K and V lie side by side in the last dimension.
    regions  as of MemoryView.
    """

    axes: str
    joined: bool = False
    regions: tuple[str, ...] = ("layer",)


LAYOUTS = {
    "heads outside, joined": Layout("row head token", joined=True),
    "plane outside": Layout("plane row token head"),
    "plane inside": Layout("row plane token head"),
    "K and V apart": Layout("row token head", regions=("layer", "plane")),
    "all in one": Layout("row layer plane token head", regions=()),
}


class Pages:
    """Pages of `page_tokens` tokens in a layout, those of the blocks in random order."""

    def __init__(self, layout: Layout, page_tokens: int, count: int = BLOCKS) -> None:
        self.layout, self.page_tokens = layout, page_tokens
        pages = TOKENS // page_tokens
        rows = np.random.default_rng(page_tokens).permutation(count * pages + FREE)
        self.rows = rows[: count * pages].reshape(count, pages)
        self.free = rows[count * pages :]
        self.sizes = {
            "row": len(rows), "layer": LAYERS, "plane": 2, "head": HEADS, "token": page_tokens
        }  # fmt: skip
        axes = layout.axes.split()
        shape = [*(self.sizes[axis] for axis in axes), DIM * (2 if layout.joined else 1)]
        copies = LAYERS if "layer" in layout.regions else 1
        copies *= 2 if "plane" in layout.regions else 1
        self.tensors = [np.full(shape, PAINT, np.uint16) for _ in range(copies)]
        missing = [axis for axis in ("layer", "plane") if axis not in axes]
        if layout.joined:
            missing.remove("plane")
            axes = [*axes, "plane"]
        order = " ".join([*missing, *(axis for axis in axes if axis != "row")])
        self.view = MemoryView(
            order, regions=layout.regions, block_tokens=TOKENS, page_tokens=page_tokens
        )

    @property
    def regions(self) -> Regions:
        rows = self.rows if self.rows.shape[1] > 1 else self.rows[:, 0]
        return Regions(self.tensors, rows, self.layout.axes.split().index("row"))

    def canonical(self) -> np.ndarray:
        """All pages, as uint16[row, layer, plane, head, token, dim]."""
        names = [axis for axis in ("layer", "plane") if axis in self.layout.regions]
        whole = np.stack(self.tensors)
        whole = whole.reshape(*(self.sizes[name] for name in names), *self.tensors[0].shape)
        axes = [*names, *self.layout.axes.split()]
        if self.layout.joined:
            whole = whole.reshape(*whole.shape[:-1], 2, DIM)
            axes.append("plane")
        order = [axes.index(axis) for axis in ("row", "layer", "plane", "head", "token")]
        return whole.transpose(*order, whole.ndim - 1)

    def blocks(self) -> np.ndarray:
        """What the blocks' pages hold, as logical() gives it."""
        pages = self.canonical()[self.rows]  # block, page, layer, plane, head, token, dim
        moved = np.moveaxis(pages, 1, 4)
        return moved.reshape(len(self.rows), LAYERS, 2, HEADS, TOKENS, DIM)

    def fill(self, blocks: np.ndarray) -> None:
        """Lets the pages hold these blocks."""
        for region, tensor in enumerate(self.tensors):
            tensor[:] = self._region(blocks, region)

    def _region(self, blocks: np.ndarray, region: int) -> np.ndarray:
        parts = blocks.reshape(len(blocks), LAYERS, 2, HEADS, -1, self.page_tokens, DIM)
        pages = np.full((self.sizes["row"], LAYERS, 2, HEADS, self.page_tokens, DIM), PAINT)
        pages[self.rows] = np.moveaxis(parts, 4, 1)
        axes = ["row", "layer", "plane", "head", "token", "dim"]
        if "plane" in self.layout.regions:
            pages = pages[:, region // 2, region % 2]
            axes = [axis for axis in axes if axis not in ("layer", "plane")]
        elif "layer" in self.layout.regions:
            pages = pages[:, region]
            axes.remove("layer")
        wanted = [*self.layout.axes.split(), *(["plane"] if self.layout.joined else []), "dim"]
        moved = pages.transpose([axes.index(axis) for axis in wanted])
        return moved.reshape(self.tensors[region].shape)


@pytest.fixture(params=["lossless", "raw"])
def ns(request: pytest.FixtureRequest, store_path: Path) -> Iterator[Namespace]:
    with open_store(store_path, GQA, codec=request.param) as store:
        yield store.namespace(IDENTITY)


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_in_and_out_through_pages(ns: Namespace, layout: Layout, page_tokens: int) -> None:
    blocks, keys = logical(1), names(BLOCKS)
    source = Pages(layout, page_tokens)
    source.fill(blocks)
    assert np.array_equal(source.blocks(), blocks)
    assert ns.put(keys, source.regions, view=source.view, position=0).all_ok
    plain = np.zeros_like(blocks)
    assert ns.get(keys, plain).all_ok
    assert np.array_equal(plain, blocks)
    for other in (16, 32, 64):
        target = Pages(layout, other)
        assert ns.get(keys, target.regions, view=target.view).all_ok
        assert np.array_equal(target.blocks(), blocks)
        assert (target.canonical()[target.free] == PAINT).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_parts(ns: Namespace, layout: Layout) -> None:
    """Tokens from the middle of a page to the middle of another land at the pages' beginning."""
    blocks, keys = logical(2), names(BLOCKS)
    assert ns.put(keys, blocks, position=0).all_ok
    for first, end in ((0, 64), (5, 23), (17, 64), (31, 33), (63, 64)):
        target = Pages(layout, 16)
        result = ns.get(keys, target.regions, view=target.view, token_range=(first, end))
        assert result.all_ok
        count = end - first
        assert np.array_equal(target.blocks()[:, :, :, :, :count], blocks[:, :, :, :, first:end])
        assert (target.blocks()[:, :, :, :, count:] == PAINT).all()


def test_chosen_layers_and_heads(ns: Namespace) -> None:
    blocks, keys = logical(3), names(BLOCKS)
    assert ns.put(keys, blocks, position=0).all_ok
    target = Pages(Layout("row head token", joined=True), 16)
    regions = Regions(target.tensors[1:], target.rows)
    assert ns.get(keys, regions, view=target.view, layers=[1]).all_ok
    assert np.array_equal(target.blocks()[:, 1], blocks[:, 1])
    assert (target.blocks()[:, 0] == PAINT).all()
    one_head = [np.full((target.sizes["row"], 1, 16, 2 * DIM), PAINT, np.uint16) for _ in range(2)]
    assert ns.get(keys, Regions(one_head, target.rows), view=target.view, heads=[1]).all_ok
    for layer in range(LAYERS):
        pages = one_head[layer][target.rows][:, :, 0].reshape(BLOCKS, TOKENS, 2, DIM)
        assert np.array_equal(pages.transpose(0, 2, 1, 3), blocks[:, layer, :, 1])


def test_blocks_shorter_than_their_pages(ns: Namespace) -> None:
    blocks, keys = logical(4), names(BLOCKS)
    source = Pages(LAYOUTS["plane outside"], 16)
    source.fill(blocks)
    lengths = [64, 1, 16, 17, 63]
    assert ns.put(keys, source.regions, view=source.view, tokens=lengths).all_ok
    target = Pages(LAYOUTS["heads outside, joined"], 32)
    assert ns.get(keys, target.regions, view=target.view, tokens=lengths).all_ok
    for block, length in enumerate(lengths):
        found = target.blocks()[block]
        assert np.array_equal(found[:, :, :, :length], blocks[block, :, :, :, :length])
        assert (found[:, :, :, length:] == PAINT).all()


def test_blocks_that_are_parts_of_pages(ns: Namespace) -> None:
    """Pages of 128 tokens hold two blocks each: a row is a page and a half of it."""
    blocks, keys = logical(5, 6), names(6)
    view = MemoryView("layer head token plane", regions=("layer",), block_tokens=TOKENS)
    pages = [np.full((4, HEADS, 2, TOKENS, 2 * DIM), PAINT, np.uint16) for _ in range(LAYERS)]
    rows = np.array([(3, 0), (3, 1), (0, 0), (0, 1), (2, 1), (1, 0)])
    for block, (page, half) in enumerate(rows):
        for layer in range(LAYERS):
            joined = blocks[block, layer].transpose(1, 2, 0, 3).reshape(HEADS, TOKENS, 2 * DIM)
            pages[layer][page, :, half] = joined
    assert ns.put(keys, Regions(pages, rows, (0, 2)), view=view).all_ok
    plain = np.zeros_like(blocks)
    assert ns.get(keys, plain).all_ok
    assert np.array_equal(plain, blocks)
    target = [np.full_like(tensor, PAINT) for tensor in pages]
    assert ns.get(keys, Regions(target, rows, (0, 2)), view=view).all_ok
    for layer in range(LAYERS):
        assert np.array_equal(target[layer], pages[layer])


def test_pointers_page_by_page(ns: Namespace) -> None:
    """Contiguous pages by their addresses: [page of the block][layer]."""
    blocks, keys = logical(6), names(BLOCKS)
    source = Pages(Layout("row plane head token"), 32)
    source.fill(blocks)
    base = np.array([tensor.ctypes.data for tensor in source.tensors])
    addresses = base + source.rows[:, :, None] * source.tensors[0][0].nbytes
    pointers = Pointers(addresses.reshape(BLOCKS, -1), keepalive=source)
    assert ns.put(keys, pointers, view=source.view).all_ok
    plain = np.zeros_like(blocks)
    assert ns.get(keys, plain).all_ok
    assert np.array_equal(plain, blocks)


def test_a_cast_to_other_dtypes_keeps_pages(store_path: Path) -> None:
    """float32 has no stripes of its own: stored plain, paged all the same."""
    geometry = KVGeometry.gqa(LAYERS, HEADS, DIM, "float32")
    blocks = np.random.default_rng(7).standard_normal(
        (BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM), np.float32
    )
    rows = np.random.default_rng(8).permutation(BLOCKS * 4).reshape(BLOCKS, 4)
    pages = np.moveaxis(blocks.reshape(BLOCKS, LAYERS, 2, HEADS, 4, 16, DIM), 4, 1)
    pool = np.zeros((BLOCKS * 4, LAYERS, 2, HEADS, 16, DIM), np.float32)
    pool[rows] = pages
    view = MemoryView(block_tokens=TOKENS, page_tokens=16)
    with open_store(store_path, geometry) as store:
        ns = store.namespace(IDENTITY)
        keys = names(BLOCKS)
        assert ns.put(keys, Regions([pool], rows), view=view).all_ok
        plain = np.zeros_like(blocks)
        assert ns.get(keys, plain).all_ok
        assert np.array_equal(plain, blocks)


def test_staging_of_pages() -> None:
    """The way of CUDA tensors, walked with CPU ones: two row axes, pages, blocks that miss."""
    torch = pytest.importorskip("torch")
    pool = torch.arange(3 * 4 * 2 * 5).reshape(3, 4, 2, 5)
    rows = np.array([[(1, 0), (0, 1)], [(3, 1), (2, 0)]])  # [block, page, axis]
    source, _, _ = staging.stage(Regions([pool], rows, (1, 2)), destination=False)
    expected = torch.stack([pool[:, a, b] for a, b in rows.reshape(-1, 2)])
    assert torch.equal(source.tensors[0], expected)
    assert source.rows.tolist() == [[0, 1], [2, 3]]
    target = torch.zeros_like(pool)
    regions, _, finish = staging.stage(Regions([target], rows, (1, 2)), destination=True)
    regions.tensors[0].copy_(expected)
    finish(np.array([False, True]))
    for block, pages in enumerate(rows):
        for a, b in pages:
            wanted = pool[:, a, b] if block else torch.zeros_like(pool[:, a, b])
            assert torch.equal(target[:, a, b], wanted)
    with pytest.raises(MemoryViewError, match="no such row"):
        staging.stage(Regions([pool], rows + 3, (1, 2)), destination=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": None}, "need rows"),
        ({"rows": np.zeros((BLOCKS, 3), int)}, "one int a page"),
        ({"rows": np.zeros(BLOCKS, int)}, "one int a page"),
        ({"rows": np.zeros((BLOCKS, 4), int)}, "same row as destination"),
        ({"rows": np.arange(BLOCKS * 4).reshape(BLOCKS, 4) + 8}, "no such row"),
        ({"rows": np.arange(BLOCKS * 4).reshape(BLOCKS, 4) - 1}, "no such row"),
        ({"row_axis": (0, 1)}, "2 ints a page"),
        ({"row_axis": (0, 0)}, "different"),
        ({"row_axis": ()}, "at least one"),
        ({"row_axis": (9,)}, "no such row axis"),
    ],
    ids=str,
)
def test_pages_that_do_not_fit(ns: Namespace, changes: dict[str, Any], said: str) -> None:
    pages = Pages(Layout("row plane head token"), 16)
    given = {"rows": pages.rows, "row_axis": 0, **changes}
    with pytest.raises(MemoryViewError, match=said):
        ns.get(names(BLOCKS), Regions(pages.tensors, **given), view=pages.view)


def test_a_view_of_pages_that_can_not_be(ns: Namespace) -> None:
    for wrong in ({"page_tokens": 16}, {"block_tokens": 64, "page_tokens": 48}):
        with pytest.raises(MemoryViewError, match="whole pages"):
            MemoryView(**wrong)
    for wrong in (0, -1, 1.5, 70000):
        with pytest.raises(MemoryViewError, match="page_tokens"):
            MemoryView(block_tokens=64, page_tokens=wrong)  # type: ignore[arg-type]
    view = MemoryView(block_tokens=64, page_tokens=16)
    with pytest.raises(MemoryViewError, match="paged memory needs"):
        ns.get(names(BLOCKS), logical(9), view=view)
    many = MemoryView(regions=("layer",), block_tokens=1024, page_tokens=1)
    assert many.pages == 1024


# ---- vectors whose elements lie apart ----


class Transposed:
    """Pages as some attention kernels keep them: K [row, layer, head, dim, token], V as ever."""

    def __init__(self, dtype: Any, page_tokens: int, count: int = BLOCKS, dim: int = DIM) -> None:
        pages = TOKENS // page_tokens
        self.rows = np.random.default_rng(page_tokens).permutation(count * pages + FREE)
        self.rows = self.rows[: count * pages].reshape(count, pages)
        shape = (count * pages + FREE, LAYERS, HEADS)
        self.keys = np.zeros((*shape, dim, page_tokens), dtype)
        self.values = np.zeros((*shape, page_tokens, dim), dtype)
        self.view = MemoryView(
            "layer plane head token",
            regions=("plane",),
            block_tokens=TOKENS,
            page_tokens=page_tokens,
        )
        rows = self.rows if pages > 1 else self.rows[:, 0]
        self.regions = Regions([self.keys.swapaxes(-1, -2), self.values], rows)

    def blocks(self) -> np.ndarray:
        """[block, layer, plane, head, token, dim] of what the blocks' pages hold."""
        both = np.stack([self.keys.swapaxes(-1, -2), self.values], axis=2)[self.rows]
        moved = np.moveaxis(both, 1, 4)  # block, layer, plane, head, page, token, dim
        return moved.reshape(*moved.shape[:4], TOKENS, -1)

    def fill(self, blocks: np.ndarray) -> None:
        split = blocks.reshape(*blocks.shape[:4], self.rows.shape[1], -1, blocks.shape[-1])
        pages = np.moveaxis(split, 4, 1)  # block, page, layer, plane, head, token, dim
        self.keys[self.rows] = pages[:, :, :, 0].swapaxes(-1, -2)
        self.values[self.rows] = pages[:, :, :, 1]


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize(
    ("dtype", "bits", "dim"),
    [("bfloat16", np.uint16, 64), ("float32", np.float32, 32), ("float8_e4m3fn", np.uint8, 48)],
)
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_transposed_pages(
    store_path: Path, codec: str, dtype: str, bits: Any, dim: int, page_tokens: int
) -> None:
    geometry = KVGeometry.gqa(LAYERS, HEADS, dim, dtype)
    blocks = np.random.default_rng(11).standard_normal(
        (BLOCKS, LAYERS, 2, HEADS, TOKENS, dim), np.float32
    )
    blocks = blocks if bits is np.float32 else (blocks.view(np.uint32) >> 16).astype(bits)
    keys = names(BLOCKS)
    with open_store(store_path, geometry, codec=codec) as store:
        ns = store.namespace(IDENTITY)
        source = Transposed(bits, page_tokens, dim=dim)
        source.fill(blocks)
        assert np.array_equal(source.blocks(), blocks)
        assert ns.put(keys, source.regions, view=source.view).all_ok
        plain = np.zeros_like(blocks)
        assert ns.get(keys, plain).all_ok
        assert np.array_equal(plain, blocks)
        for other in (16, 64):
            target = Transposed(bits, other, dim=dim)
            assert ns.get(keys, target.regions, view=target.view).all_ok
            assert np.array_equal(target.blocks(), blocks)
            part = Transposed(bits, other, dim=dim)
            result = ns.get(keys, part.regions, view=part.view, token_range=(7, 43))
            assert result.all_ok
            assert np.array_equal(part.blocks()[..., :36, :], blocks[..., 7:43, :])
            assert not part.blocks()[..., 36:, :].any()
        sources = [tensor[:, [1]] for tensor in source.regions.tensors]
        target = Regions(
            [np.zeros_like(tensor).swapaxes(-1, -2).copy().swapaxes(-1, -2) for tensor in sources],
            source.regions.rows,
        )
        assert ns.get(keys, target, view=source.view, layers=[1]).all_ok
        for wanted, found in zip(sources, target.tensors, strict=True):
            assert np.array_equal(found[source.rows], wanted[source.rows])


def test_memory_of_every_second_element(ns: Namespace) -> None:
    blocks, keys = logical(12), names(BLOCKS)
    wide = np.full((*blocks.shape[:-1], 2 * DIM), PAINT, np.uint16)
    wide[..., ::2] = blocks
    assert ns.put(keys, wide[..., ::2]).all_ok
    target = np.full_like(wide, PAINT)
    assert ns.get(keys, target[..., ::2]).all_ok
    assert np.array_equal(target, wide)
    with pytest.raises(MemoryViewError, match="backwards"):
        ns.put(keys, blocks[..., ::-1])
