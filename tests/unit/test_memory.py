"""Every layout of the caller's memory against numpy: a vector's address holds its bytes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkv import staging
from flashkv.errors import MemoryViewError, ReadOnlyDestinationError
from flashkv.geometry import AXES, DType, Group, GroupKind, KVGeometry, MemoryView, Plane, Role
from flashkv.layout import Selection, packed_view
from flashkv.memory import BlockMemory, Pointers, Regions, block_memory, token_counts

LAYERS, HEADS, DIM, TOKENS, BLOCKS = 3, 2, 8, 5, 4
GEOMETRY = KVGeometry.gqa(LAYERS, HEADS, DIM)
SIZES = {"layer": LAYERS, "plane": 2, "head": HEADS, "token": TOKENS}
ORDERS = [" ".join(order) for order in itertools.permutations(AXES)]


def logical() -> np.ndarray:
    """uint16[block, layer, plane, head, token, dim]: canonical order, all values distinct."""
    shape = (BLOCKS, *(SIZES[axis] for axis in AXES), DIM)
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def in_order(blocks: np.ndarray, order: str) -> np.ndarray:
    """The same blocks with their axes in another order, contiguous."""
    places = [1 + AXES.index(axis) for axis in order.split()]
    return np.ascontiguousarray(blocks.transpose(0, *places, 5))


def fetch(memory: BlockMemory, group: Group, block: int) -> dict[tuple[int, ...], bytes]:
    """Bytes of each vector (layer, plane, head, token) that the view reaches."""
    view = memory.view
    found = {}
    entry = 0
    for plane, row in enumerate(group.planes):
        for layer in range(row.layers):
            place = view.entries[entry]
            entry += 1
            if place["region"] < 0:
                continue
            base = int(memory.pointers[block, place["region"]]) + int(place["offset"])
            for head in range(row.heads):
                slot = head if view.head_slots is None else int(view.head_slots[head])
                if slot < 0:
                    continue
                for token in range(view.block_tokens):
                    at = (
                        base + slot * int(place["head_stride"]) + token * int(place["token_stride"])
                    )
                    found[layer, plane, head, token] = ctypes.string_at(at, row.vector_bytes)
    return found


def expected(blocks: np.ndarray, block: int) -> dict[tuple[int, ...], bytes]:
    return {index: blocks[(block, *index)].tobytes() for index in np.ndindex(blocks.shape[1:5])}


def check(data: Any, blocks: np.ndarray, view: MemoryView | None, **more: Any) -> BlockMemory:
    memory = block_memory(data, BLOCKS, GEOMETRY, view=view, **more)
    assert memory.block_tokens == TOKENS
    assert memory.pointers.dtype == np.uint64
    assert memory.pointers.flags.c_contiguous
    for block in range(BLOCKS):
        assert fetch(memory, GEOMETRY.groups[0], block) == expected(blocks, block)
    return memory


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_axes(order: str) -> None:
    blocks = logical()
    array = in_order(blocks, order)
    view = MemoryView(order)
    shaped = check(array, blocks, view)
    check(array, blocks, view, destination=True)
    check([array[i] for i in range(BLOCKS)], blocks, view)
    flat = check(array.reshape(BLOCKS, -1), blocks, view)
    check(array.reshape(BLOCKS, -1).view(np.uint8), blocks, view)
    check([array[i].tobytes() for i in range(BLOCKS)], blocks, view)
    check(array.tobytes(), blocks, view)
    assert (shaped.view.entries == flat.view.entries).all()
    assert flat.view.region_bytes.tolist() == [array[0].nbytes]


@pytest.mark.parametrize("order", [order for order in ORDERS if order.endswith("plane")])
def test_planes_joined_in_the_last_dimension(order: str) -> None:
    blocks = logical()
    array = in_order(blocks, order)
    check(array.reshape(*array.shape[:-2], 2 * DIM), blocks, MemoryView(order))


@pytest.mark.parametrize("regions", [("plane",), ("layer",), ("layer", "plane")])
@pytest.mark.parametrize("order", ["layer plane head token", "plane layer token head"])
def test_regions(order: str, regions: tuple[str, ...]) -> None:
    blocks = logical()
    view = MemoryView(order, regions=regions)
    array = in_order(blocks, view.order)
    depth = len(regions)
    count = int(np.prod(array.shape[1 : 1 + depth]))
    parts = np.moveaxis(array.reshape(BLOCKS, count, *array.shape[1 + depth :]), 1, 0).copy()
    check(Regions(list(parts)), blocks, view)
    check(tuple(parts), blocks, view)
    check([[part[i] for i in range(BLOCKS)] for part in parts], blocks, view)
    check([part.reshape(BLOCKS, -1) for part in parts], blocks, view)
    rows = np.array([6, 0, 3, 2])
    pools = [np.zeros((8, *part.shape[1:]), np.uint16) for part in parts]
    for pool, part in zip(pools, parts, strict=True):
        pool[rows] = part
    check(Regions(pools, rows=rows), blocks, view, destination=True)
    pointers = np.array(
        [[p.ctypes.data + int(r) * p.strides[0] for p in pools] for r in rows], np.uint64
    )
    bare = MemoryView(order, regions=regions, block_tokens=TOKENS)
    check(Pointers(pointers, keepalive=pools), blocks, bare)


def test_pool_with_the_row_axis_inside() -> None:
    """As vLLM's caches: one tensor a layer, [K|V, block, token, head, dim]."""
    blocks = logical()
    rows = [5, 1, 4, 0]
    caches = [np.zeros((2, 6, TOKENS, HEADS, DIM), np.uint16) for _ in range(LAYERS)]
    for layer, cache in enumerate(caches):
        for block, row in enumerate(rows):
            cache[:, row] = blocks[block, layer].transpose(0, 2, 1, 3)
    view = MemoryView("layer plane token head", regions=("layer",))
    check(Regions(caches, rows=rows, row_axis=1), blocks, view, destination=True)


@given(st.integers(0, 7), st.integers(0, 3), st.booleans(), st.booleans())
def test_strided_and_unaligned_memory(
    offset: int, padding: int, flipped: bool, spaced: bool
) -> None:
    blocks = logical()
    step = 2 if spaced else 1
    shape = (BLOCKS * step, LAYERS + padding, 2, HEADS + padding, TOKENS, DIM)
    raw = np.zeros(int(np.prod(shape)) * 2 + 8, np.uint8)
    whole = raw[offset : offset + int(np.prod(shape)) * 2].view(np.uint16).reshape(shape)
    array = whole[::step, :LAYERS, :, :HEADS]
    if flipped:
        array = array[::-1, :, :, :, ::-1]
    array[:] = blocks
    check(array, blocks, None)
    check(array, blocks, None, destination=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"])
def test_element_types(dtype: str) -> None:
    geometry = KVGeometry.gqa(LAYERS, HEADS, DIM, dtype)
    names = {"bfloat16": ["uint16"], "float8_e4m3fn": ["uint8"]}.get(dtype, [dtype])
    for name in names:
        array = np.zeros((1, LAYERS, 2, HEADS, TOKENS, DIM), name)
        assert block_memory(array, 1, geometry).block_tokens == TOKENS
    for name in {"uint16", "float16", "float32", "int16", "float64", ">f2"} - set(names):
        if np.dtype(name) != np.dtype(names[0]):
            with pytest.raises(MemoryViewError, match="dtype"):
                block_memory(np.zeros((1, LAYERS, 2, HEADS, TOKENS, DIM), name), 1, geometry)


def test_ml_dtypes_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    blocks = logical()
    check(blocks.view(ml_dtypes.bfloat16), blocks, None)


def test_latents() -> None:
    geometry = KVGeometry.mla(LAYERS, latent_dim=16, rope_dim=4)
    rng = np.random.default_rng(1)
    joined = rng.integers(0, 1 << 16, (BLOCKS, LAYERS, TOKENS, 20), dtype=np.uint16)
    view = MemoryView("layer head token plane")
    apart = MemoryView(regions=("plane",))
    parts = [np.ascontiguousarray(joined[..., :16]), np.ascontiguousarray(joined[..., 16:])]
    for data, how in ((joined, view), (parts, apart), (joined.reshape(BLOCKS, -1), view)):
        memory = block_memory(data, BLOCKS, geometry, view=how)
        for block in range(BLOCKS):
            for (layer, plane, _, token), got in fetch(memory, geometry.groups[0], block).items():
                part = joined[block, layer, token]
                assert got == (part[:16], part[16:])[plane].tobytes()


def test_opaque_blocks() -> None:
    geometry = KVGeometry.opaque(24)
    for data in (
        np.zeros((BLOCKS, 24), np.uint8),
        np.zeros((BLOCKS, 2, 3), np.float32),
        [bytes(24)] * BLOCKS,
        [bytearray(24) for _ in range(BLOCKS)],
        [memoryview(bytearray(24)) for _ in range(BLOCKS)],
        bytes(24 * BLOCKS),
        Pointers(np.full(BLOCKS, 4096, np.uint64)),
    ):
        memory = block_memory(data, BLOCKS, geometry)
        assert memory.block_tokens == 1
        assert memory.view.region_bytes.tolist() == [24]
    for wrong in (np.zeros((BLOCKS, 48), np.uint8), [bytes(23)] * BLOCKS):
        with pytest.raises(MemoryViewError, match=r"shape .*dim 24"):
            block_memory(wrong, BLOCKS, geometry)
    two = block_memory([bytes(48)], 1, geometry, view=MemoryView(block_tokens=2))
    assert two.block_tokens == 2


def test_planes_that_differ_lie_back_to_back() -> None:
    planes = (
        Plane(Role.K, 2, 2, 8, DType.FLOAT16),
        Plane(Role.INDEX, 3, 1, 2, DType.UINT8),
        Plane(Role.SCALE, 1, 2, 4, DType.FLOAT32),
    )
    geometry = KVGeometry((Group("kv", GroupKind.FULL, planes),))
    tokens = 3
    for order in ORDERS:
        view = MemoryView(order)
        names = order.split()
        if names.index("head") < names.index("plane"):
            with pytest.raises(MemoryViewError, match="plane before head"):
                packed_view(geometry, 0, view, tokens)
            continue
        native = packed_view(geometry, 0, view, tokens)
        entries = iter(native.entries)
        places = {(p, n): next(entries) for p, row in enumerate(planes) for n in range(row.layers)}
        sizes = {"layer": 3, "plane": 3, "head": 2, "token": tokens}
        at = 0  # walk the box in its own order: vectors must lie back to back
        for index in itertools.product(*(range(sizes[name]) for name in names)):
            where = dict(zip(names, index, strict=True))
            row = planes[where["plane"]]
            if where["layer"] >= row.layers or where["head"] >= row.heads:
                continue
            place = places[where["plane"], where["layer"]]
            offset = place["offset"] + where["head"] * place["head_stride"]
            assert offset + where["token"] * place["token_stride"] == at, order
            at += row.vector_bytes
        assert native.region_bytes.tolist() == [at]


def test_selections() -> None:
    blocks = logical()
    layers, heads = (2, 0), (1,)
    part = np.ascontiguousarray(blocks[:, layers][:, :, :, heads])
    selection = Selection(layers, heads)
    for data in (part, part.reshape(BLOCKS, -1)):
        memory = block_memory(data, BLOCKS, GEOMETRY, selection=selection, destination=True)
        for block in range(BLOCKS):
            wanted = {
                index: value
                for index, value in expected(blocks, block).items()
                if index[0] in layers and index[2] in heads
            }
            assert fetch(memory, GEOMETRY.groups[0], block) == wanted
    view = MemoryView(regions=("layer",))
    memory = block_memory(
        list(np.moveaxis(part, 1, 0).copy()), BLOCKS, GEOMETRY, view=view, selection=selection
    )
    assert memory.view.region_count == 2
    assert memory.view.entries["region"].tolist() == [1, -1, 0] * 2
    for wrong in (
        Selection(layers=()),
        Selection(layers=(0, 0)),
        Selection(layers=(3,)),
        Selection(heads=(-1,)),
    ):
        with pytest.raises(MemoryViewError):
            block_memory(part, BLOCKS, GEOMETRY, selection=wrong)


def shaped(*shape: int, dtype: Any = np.uint16) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (shaped(3, LAYERS, 2, HEADS, TOKENS, DIM), "differ in number"),
        (shaped(BLOCKS, 2, LAYERS, HEADS, TOKENS, DIM), "order"),
        (shaped(BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM + 1), "geometry"),
        (shaped(BLOCKS, LAYERS, 2, HEADS, TOKENS), "geometry"),
        (shaped(BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM, dtype=np.float16), "bfloat16"),
        (shaped(BLOCKS, LAYERS, 2, HEADS, TOKENS, 2 * DIM)[..., ::-2], "backwards"),
        (shaped(BLOCKS, LAYERS, 2, HEADS, 1025, DIM), "1024"),
        (shaped(BLOCKS, 7), "geometry"),
        (shaped(BLOCKS, 2 * LAYERS * 2 * HEADS * TOKENS * DIM)[:, ::2], "contiguous"),
        (shaped(BLOCKS, 1).astype(object), "dtype"),
        ([shaped(LAYERS, 2, HEADS, TOKENS, DIM)] * 3, "differ in number"),
        ([shaped(LAYERS, 2, HEADS, 5 - i % 2, DIM) for i in range(BLOCKS)], "block 1"),
        ([bytes(960)] * (BLOCKS - 1) + [bytes(961)], "block 3"),
        (bytes(961), "divide"),
        ([None] * BLOCKS, "NoneType"),
        ("text" * BLOCKS, "str"),
        (7, "int"),
        (Pointers(np.ones((BLOCKS, 1), np.uint64)), "block_tokens"),
        (Regions([shaped(9, LAYERS, 2, HEADS, TOKENS, DIM)], rows=[0, 1, 2, 9]), "0 to 8"),
        (Regions([shaped(9, LAYERS, 2, HEADS, TOKENS, DIM)], rows=[0, -1, 2, 3]), "-1"),
        (Regions([shaped(9, LAYERS, 2, HEADS, TOKENS, DIM)], rows=[0, 1]), "one int a block"),
        (Regions([shaped(9, LAYERS, 2, HEADS, TOKENS, DIM)], rows=[.5] * 4), "one int a block"),
        (Regions([shaped(4, LAYERS, 2, HEADS, TOKENS, DIM)], row_axis=7), "row axis"),
        (Regions([shaped(4, 4), shaped(4, 4)]), "regions"),
        (Regions([[bytes(960)] * 4], rows=[0, 1, 2, 3]), "rows"),
    ],
)  # fmt: skip
def test_memory_that_does_not_fit_is_named(data: Any, named: str) -> None:
    with pytest.raises(MemoryViewError, match=named):
        block_memory(data, BLOCKS, GEOMETRY)


def test_pointers_are_checked_as_far_as_they_can_be() -> None:
    view = MemoryView(block_tokens=TOKENS)
    for wrong in (np.ones((BLOCKS, 2), np.uint64), np.ones(3, np.uint64), np.ones((BLOCKS, 1))):
        with pytest.raises(MemoryViewError, match="addresses"):
            block_memory(Pointers(wrong), BLOCKS, GEOMETRY, view=view)
    with pytest.raises(MemoryViewError, match="zero"):
        block_memory(Pointers(np.zeros(BLOCKS, np.uint64)), BLOCKS, GEOMETRY, view=view)
    with pytest.raises(MemoryViewError, match="same destination"):
        block_memory(
            Pointers(np.ones(BLOCKS, np.uint64)), BLOCKS, GEOMETRY, view=view, destination=True
        )
    pointers = Pointers(np.arange(1, 1 + BLOCKS, dtype=np.uint64) << 20, writable=False)
    with pytest.raises(ReadOnlyDestinationError):
        block_memory(pointers, BLOCKS, GEOMETRY, view=view, destination=True)


def test_destinations_must_be_writable_and_apart() -> None:
    array = shaped(BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM)
    frozen = array.copy()
    frozen.setflags(write=False)
    block_memory(frozen, BLOCKS, GEOMETRY)
    read_only = [frozen, list(frozen), array.tobytes(), [a.tobytes() for a in array]]
    for data in read_only:
        with pytest.raises(ReadOnlyDestinationError):
            block_memory(data, BLOCKS, GEOMETRY, destination=True)
    window = np.lib.stride_tricks.as_strided(array, array.shape, (16, *array.strides[1:]))
    tokens = np.lib.stride_tricks.as_strided(array, array.shape, (*array.strides[:4], 0, 2))
    twice = Regions([array], rows=[0, 1, 1, 2])
    close = [np.ravel(array)[2 * i :][: array[0].size] for i in range(BLOCKS)]
    for data in (window, tokens, twice, [array[0]] * BLOCKS, close):
        with pytest.raises(MemoryViewError):
            block_memory(data, BLOCKS, GEOMETRY, destination=True)
        block_memory(data, BLOCKS, GEOMETRY)  # as sources they are fine


def test_memory_stays_alive() -> None:
    memory = block_memory([bytearray(960) for _ in range(2)], 2, KVGeometry.gqa(3, 2, 8))
    for block, pointer in enumerate(memory.pointers[:, 0].tolist()):
        ctypes.memset(pointer, block + 1, 960)
    gc.collect()
    trash = [bytearray(960) for _ in range(50)]
    assert [ctypes.string_at(int(p), 1)[0] for p in memory.pointers[:, 0]] == [1, 2]
    assert len(trash) == 50


def test_empty_batches() -> None:
    for data in ([], shaped(0, LAYERS, 2, HEADS, TOKENS, DIM), b"", Regions([[]])):
        memory = block_memory(data, 0, GEOMETRY)
        assert memory.pointers.shape == (0, 1)
    assert (
        block_memory([[], []], 0, GEOMETRY, view=MemoryView(regions=("plane",))).pointers.size == 0
    )


def test_token_counts() -> None:
    assert token_counts(None, 3, 16).tolist() == [16, 16, 16]
    assert token_counts(5, 3, 16).tolist() == [5, 5, 5]
    assert token_counts([16, 1, 7], 3, 16).tolist() == [16, 1, 7]
    assert token_counts(None, 3, 16).dtype == np.uint16
    for wrong in ([1, 2], [1, 2, 17], [0, 1, 2], 17, [1.5, 2, 3], [[1, 2, 3]]):
        with pytest.raises(MemoryViewError):
            token_counts(wrong, 3, 16)


def test_no_torch_is_imported() -> None:
    if "torch" not in sys.modules:
        check(logical(), logical(), None)
        assert "torch" not in sys.modules


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    blocks = logical()
    tensor = torch.from_numpy(blocks.view(np.int16)).view(torch.bfloat16)
    check(tensor, blocks, None)
    check(list(tensor), blocks, None, destination=True)
    check(tensor.transpose(3, 4), blocks, MemoryView("layer plane token head"))
    check(tensor.transpose(3, 4).contiguous(), blocks, MemoryView("layer plane token head"))
    with pytest.raises(MemoryViewError, match="bfloat16"):
        block_memory(tensor.to(torch.float16), BLOCKS, GEOMETRY)
    with pytest.raises(MemoryViewError, match="meta"):
        block_memory(tensor.to("meta"), BLOCKS, GEOMETRY)
    negated = torch._neg_view(tensor)  # reads as the negative of the memory that it has
    for data in (negated, list(negated)):
        with pytest.raises(MemoryViewError, match=r"resolve_neg\(\)"):
            block_memory(data, BLOCKS, GEOMETRY)
    check(torch._neg_view(negated), blocks, None)
    with pytest.raises(MemoryViewError):
        block_memory(
            tensor[:1].expand(BLOCKS, -1, -1, -1, -1, -1), BLOCKS, GEOMETRY, destination=True
        )


def test_staging_copies_back_what_arrived() -> None:
    """The way of CUDA tensors, walked with CPU ones."""
    torch = pytest.importorskip("torch")
    pool = torch.arange(60).reshape(2, 6, 5)
    rows = [4, 0, 3]
    source, _, finish = staging.stage(Regions([pool], rows, 1), destination=False)
    assert (source.tensors[0] == pool[:, rows].movedim(1, 0)).all()
    finish(np.ones(3, np.bool_))
    target = torch.zeros_like(pool)
    regions, _, finish = staging.stage(Regions([target], rows, 1), destination=True)
    regions.tensors[0].copy_(pool[:, rows].movedim(1, 0))
    finish(np.array([True, False, True]))
    assert (target[:, [4, 3]] == pool[:, [4, 3]]).all()
    assert (target[:, [0, 1, 2, 5]] == 0).all()
    blocks = [torch.zeros(5) for _ in range(3)]
    regions, _, finish = staging.stage(Regions([blocks]), destination=True)
    regions.tensors[0].fill_(7)
    finish(np.array([True, False, True]))
    assert [float(block.sum()) for block in blocks] == [35, 0, 35]


@pytest.mark.gpu
def test_cuda_tensors() -> None:
    torch = pytest.importorskip("torch")
    blocks = logical()
    tensor = torch.from_numpy(blocks.view(np.int16)).view(torch.bfloat16).cuda()
    check(tensor, blocks, None)
    check(list(tensor), blocks, None)
    target = torch.zeros_like(tensor)
    memory = block_memory(target, BLOCKS, GEOMETRY, destination=True)
    size = blocks[0].nbytes
    for block in range(BLOCKS):
        ctypes.memmove(int(memory.pointers[block, 0]), blocks[block].ctypes.data, size)
    memory.finish(np.array([True, True, False, True]))
    assert (target[[0, 1, 3]] == tensor[[0, 1, 3]]).all()
    assert (target[2] == 0).all()
