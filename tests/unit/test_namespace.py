"""Batches through a namespace: any layout in, any layout out, any part of it, the same numbers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from store_support import (
    BACKENDS,
    IDENTITY,
    KINDS,
    Kind,
    check_rest,
    crash,
    equal,
    open_store,
    present,
    put_all,
)

from flashkv import (
    BlockStatus,
    KVGeometry,
    MemoryView,
    MemoryViewError,
    Namespace,
    Pointers,
    Regions,
    Shard,
    Store,
)

KIND: Kind = KINDS[0]
KEYS = [b"key-%d" % number for number in range(20)]
AXES = ("layer", "plane", "head", "token")
DTYPES = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with open_store(store_path, KIND.geometry) as store:
        yield store
        check_rest(store)


@pytest.fixture
def ns(store: Store) -> Namespace:
    return store.namespace(IDENTITY)


# ---- layouts -----------------------------------------------------------------------------------


def laid_out(blocks: np.ndarray, view: MemoryView, unaligned: int) -> Any:
    """[N, layer, plane, head, token, dim] as memory of a view; maybe at an odd address."""
    order = view.order.split()
    count = len(blocks)
    moved = blocks.transpose(0, *(1 + AXES.index(name) for name in order), 5)
    depth = len(view.regions)
    regions = []
    for index in np.ndindex(*moved.shape[1 : 1 + depth]):
        part = moved[(slice(None), *index)]
        room = np.zeros(part.nbytes + unaligned + 64, np.uint8)
        held = room[unaligned : unaligned + part.nbytes].view(part.dtype).reshape(part.shape)
        held[:] = part
        regions.append(held)
    assert all(len(region) == count for region in regions)
    return Regions(regions) if depth else regions[0]


def read_back(data: Any, view: MemoryView, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of laid_out: [N, layer, plane, head, token, dim]."""
    order = view.order.split()
    moved_shape = (shape[0], *(shape[1 + AXES.index(name)] for name in order), shape[5])
    tensors = data.tensors if isinstance(data, Regions) else [data]
    moved = np.zeros(moved_shape, tensors[0].dtype)
    depth = len(view.regions)
    for tensor, index in zip(tensors, np.ndindex(*moved_shape[1 : 1 + depth]), strict=True):
        moved[(slice(None), *index)] = tensor
    back = np.argsort([1 + AXES.index(name) for name in order])
    return moved.transpose(0, *(1 + back), 5)


views = st.builds(
    lambda order, regions: MemoryView(" ".join(order), regions),
    st.permutations(AXES),
    st.sampled_from([(), ("plane",), ("layer",), ("layer", "plane"), ("plane", "layer")]),
)


def some(count: int) -> Any:
    return st.none() | st.lists(st.integers(0, count - 1), min_size=1, unique=True)


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_layout(data: st.DataObject) -> None:
    draw = data.draw
    layers, heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(list(DTYPES)))
    room, count = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    tokens = draw(st.lists(st.integers(1, room), min_size=count, max_size=count))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    blocks = rng.integers(0, 256, (count, layers, 2, heads, room, dim * 4), np.uint8)
    blocks = blocks.view(DTYPES[dtype])[..., :dim]
    if dtype == "bfloat16" and draw(st.booleans()):  # like activations: codes are short
        values = rng.standard_normal(blocks.shape, np.float32)
        blocks = (values.view(np.uint32) >> 16).astype(np.uint16)
    folder = Path(tempfile.mkdtemp(prefix="flashkv-"))
    try:
        with open_store(
            folder / "s",
            KVGeometry.gqa(layers, heads, dim, dtype),
            backend=draw(st.sampled_from(BACKENDS)),
            codec=draw(st.sampled_from(["raw", "lossless"])),
            growth=((0, draw(st.integers(1, 200))),),
        ) as store:
            ns = store.namespace(IDENTITY)
            view = draw(views)
            keys = [b"%d" % n for n in range(count)]
            source = laid_out(blocks, view, draw(st.sampled_from([0, 1, 2, 13])))
            assert ns.put(keys, source, view=view, tokens=tokens).all_ok
            for _ in range(3):
                part_of_it(ns, blocks, tokens, keys, draw)
            check_rest(store)
    finally:
        shutil.rmtree(folder)


def part_of_it(
    ns: Namespace, blocks: np.ndarray, tokens: list[int], keys: list[bytes], draw: Any
) -> None:
    """Reads some blocks, layers, heads and tokens into a layout of its own."""
    rows = draw(st.lists(st.integers(0, len(keys) - 1), min_size=1, max_size=15))
    some_layers, some_heads = draw(some(blocks.shape[1])), draw(some(blocks.shape[3]))
    room = blocks.shape[4]
    span = None
    if draw(st.booleans()):
        start = draw(st.integers(0, room - 1))
        span = (start, draw(st.integers(start + 1, room)))
    start, stop = span or (0, room)
    view = draw(views)
    wanted = blocks[rows][:, some_layers or slice(None)]
    wanted = wanted[:, :, :, some_heads or slice(None), start:stop]
    out = laid_out(np.zeros_like(wanted), view, draw(st.sampled_from([0, 1, 8])))
    result = ns.get(
        [keys[row] for row in rows],
        out,
        view=view,
        layers=some_layers,
        heads=some_heads,
        token_range=span,
    )
    got = read_back(out, view, wanted.shape)
    for at, row in enumerate(rows):
        if span is not None and tokens[row] < stop:
            assert result[at] == BlockStatus.MISS
            continue
        assert result[at] == BlockStatus.OK
        end = stop - start if span is not None else tokens[row]
        assert equal(got[at][..., :end, :], wanted[at][..., :end, :])


def test_joined_in_the_last_dimension(ns: Namespace) -> None:
    data = KIND.blocks(KEYS, [0] * 20)  # layer plane head token dim
    joined = np.concatenate([data[:, :, 0], data[:, :, 1]], axis=-1)  # layer head token 2*dim
    view = MemoryView("layer head token plane")
    assert ns.put(KEYS, joined, view=view).all_ok
    assert present(ns, KIND, KEYS).all()
    out = np.zeros_like(joined)
    assert ns.get(KEYS, out, view=view).all_ok
    assert equal(out, joined)


def test_rows_of_pools(ns: Namespace) -> None:
    """Blocks as rows of an engine's pools, K and V apart, rows on a later axis."""
    data = KIND.blocks(KEYS[:5], [0] * 5)
    rows = [7, 0, 3, 9, 2]
    pools = [np.zeros((2, 12, 2, 64, 64), np.uint16) for _ in range(2)]  # layer, row, head, token
    for plane, pool in enumerate(pools):
        pool[:, rows] = data[:, :, plane].transpose(1, 0, 2, 3, 4)
    view = MemoryView(regions=("plane",))
    assert ns.put(KEYS[:5], Regions(pools, rows=rows, row_axis=1), view=view).all_ok
    assert present(ns, KIND, KEYS[:5]).all()
    back = [np.full_like(pool, 0xA5A5) for pool in pools]
    assert ns.get(KEYS[:5], Regions(back, rows=rows, row_axis=1), view=view).all_ok
    for plane, pool in enumerate(back):
        assert equal(
            np.ascontiguousarray(pool[:, rows]), np.ascontiguousarray(pools[plane][:, rows])
        )
        others = [row for row in range(12) if row not in rows]
        assert (pool[:, others] == 0xA5A5).all(), "rows that nobody asked for were written"


def test_forms_of_memory(ns: Namespace) -> None:
    """Arrays, lists of arrays, flat bytes, buffers, bare addresses: the same blocks."""
    data = KIND.blocks(KEYS[:4], [0] * 4)
    flat = data.view(np.uint8).reshape(4, -1)
    addresses = (flat.ctypes.data + np.arange(4) * flat.shape[1]).astype(np.uint64)
    view = MemoryView(block_tokens=64)
    forms: list[tuple[Any, MemoryView | None]] = [
        (data, None),
        (list(data), None),
        (flat, None),
        (flat.tobytes(), None),
        (bytearray(flat.tobytes()), None),
        ([memoryview(row) for row in flat], None),
        (Regions([data]), None),
        (Pointers(addresses, flat), view),
    ]
    for form, how in forms:
        assert ns.put(KEYS[:4], form, view=how, replace=True).all_ok
        assert present(ns, KIND, KEYS[:4]).all()
    out = np.zeros_like(flat)
    addresses = (out.ctypes.data + np.arange(4) * out.shape[1]).astype(np.uint64)
    assert ns.get(KEYS[:4], Pointers(addresses, out), view=view).all_ok
    assert equal(out, flat)
    buffer = bytearray(flat.nbytes)
    assert ns.get(KEYS[:4], buffer).all_ok
    assert bytes(buffer) == flat.tobytes()


def test_torch(ns: Namespace) -> None:
    torch = pytest.importorskip("torch")
    data = torch.randn(5, 2, 2, 2, 64, 64).to(torch.bfloat16)
    assert ns.put(KEYS[:5], data).all_ok
    out = torch.zeros_like(data)
    assert ns.get(KEYS[:5], out).all_ok
    assert torch.equal(out.view(torch.int16), data.view(torch.int16))
    nhd = torch.zeros(5, 2, 2, 64, 2, 64, dtype=torch.bfloat16)
    assert ns.get(KEYS[:5], nhd, view=MemoryView("layer plane token head")).all_ok
    assert torch.equal(nhd.transpose(3, 4), data)
    some_tensors = [torch.zeros(2, 2, 2, 64, 64, dtype=torch.bfloat16) for _ in range(5)]
    assert ns.get(KEYS[:5], some_tensors).all_ok
    assert torch.equal(torch.stack(some_tensors), data)


# ---- what is written beyond a block ------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_nothing_beside_the_destination(store_path: Path, codec: str) -> None:
    """Not a byte before, behind or between the wanted vectors changes."""
    kind = KINDS[3]
    with open_store(store_path, kind.geometry, codec=codec) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, kind, KEYS)
        store.flush()
        room = np.full((len(KEYS), kind.block_bytes + 8192), 0xA5, np.uint8)
        for shift in (0, 1, 511, 4096):
            room[:] = 0xA5
            inside = room[:, shift : shift + kind.block_bytes]
            assert ns.get(KEYS, list(inside)).all_ok
            assert (room[:, :shift] == 0xA5).all()
            assert (room[:, shift + kind.block_bytes :] == 0xA5).all()
            assert equal(np.ascontiguousarray(inside), kind.blocks(KEYS, [0] * len(KEYS)))


def test_source_may_change_at_once(ns: Namespace) -> None:
    data = KIND.blocks(KEYS, [0] * 20)
    assert ns.put(KEYS, data).all_ok
    data[:] = 0
    assert present(ns, KIND, KEYS).all()


# ---- looking up --------------------------------------------------------------------------------


def test_match_is_a_prefix(ns: Namespace) -> None:
    put_all(ns, KIND, KEYS[:10])
    put_all(ns, KIND, KEYS[12:])
    assert ns.match(KEYS).count == 10
    assert ns.match(KEYS[12:]).count == 8
    assert ns.match([b"absent", *KEYS]).count == 0
    assert ns.match([]).count == 0
    assert ns.contains(KEYS).tolist() == [True] * 10 + [False] * 2 + [True] * 8
    assert ns.contains_one(KEYS[0])
    assert not ns.contains_one(KEYS[10])


def test_extended_prefix_writes_its_tail_only(store: Store, ns: Namespace) -> None:
    put_all(ns, KIND, KEYS[:10], position=0)
    store.flush()
    before = store.stats().record_bytes_written
    result = ns.put(KEYS, KIND.blocks(KEYS, [0] * 20), position=0)
    assert result.counts() == {"PRESENT": 10, "OK": 10}
    store.flush()
    assert store.stats().record_bytes_written < 2.2 * before
    assert present(ns, KIND, KEYS).all()


def test_tokens_of_a_chain(ns: Namespace) -> None:
    ids = np.arange(1000, dtype=np.int32)
    keys = ns.token_keys(ids)
    assert keys.shape == (16, 32)
    longer = ns.token_keys(np.arange(2000, dtype=np.int32))
    assert (longer[:15] == keys[:15]).all()
    assert (longer[15] != keys[15]).any(), "a shorter last granule has a key of its own"
    assert (ns.token_keys(ids, salt=b"x") != keys).any()
    data = KIND.blocks([bytes(key) for key in keys], [0] * 16)
    assert ns.put(keys, data, position=0).all_ok
    assert ns.match(longer).count == 15


def test_partial_blocks(ns: Namespace) -> None:
    data = KIND.blocks(KEYS[:3], [0] * 3)
    assert ns.put(KEYS[:3], data, tokens=[64, 5, 1]).all_ok
    out = np.zeros_like(data)
    assert ns.get(KEYS[:3], out).all_ok
    assert equal(out[0], data[0])
    assert equal(out[1][..., :5, :], data[1][..., :5, :])
    assert not out[1][..., 5:, :].any()
    assert equal(out[2][..., :1, :], data[2][..., :1, :])


def test_shards(store: Store) -> None:
    """Tensor-parallel ranks store their heads each; none sees another's."""
    ranks = [store.namespace(IDENTITY, shard=Shard(heads=(r, r + 1))) for r in range(2)]
    data = KIND.blocks(KEYS, [0] * 20)
    for rank, ns in enumerate(ranks):
        assert ns.put(KEYS, np.ascontiguousarray(data[:, :, :, rank : rank + 1])).all_ok
    assert not store.namespace(IDENTITY).contains(KEYS).any()
    for rank, ns in enumerate(ranks):
        out = np.zeros((20, 2, 2, 1, 64, 64), np.uint16)
        assert ns.get(KEYS, out).all_ok
        assert equal(out, np.ascontiguousarray(data[:, :, :, rank : rank + 1]))
    assert store.namespace(IDENTITY, shard=Shard(heads=(0, 2))) is store.namespace(IDENTITY)
    assert ranks[0].rotate() == 40, "rotate() retires every shard"


def test_keys_of_every_form(ns: Namespace) -> None:
    keys = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data = KIND.blocks([bytes(key) for key in keys], [0] * 3)
    assert ns.put(keys, data).all_ok
    assert ns.contains([bytes(key) for key in keys]).all()
    assert ns.contains(keys[::-1]).all()
    assert ns.contains(np.asfortranarray(keys)).all()
    assert ns.contains([bytearray(bytes(key)) for key in keys]).all()


def test_order_of_a_batch(ns: Namespace, seed: int) -> None:
    """Blocks come to their own places, whatever order they are asked for in, twice too."""
    put_all(ns, KIND, KEYS)
    rng = np.random.default_rng(seed)
    for _ in range(10):
        keys = [KEYS[row] for row in rng.integers(0, 20, 30)] + [b"absent"]
        out = KIND.empty(31)
        result = ns.get(keys, out)
        assert result[30] == BlockStatus.MISS
        for row, key in enumerate(keys[:30]):
            assert result[row] == BlockStatus.OK
            assert equal(out[row], KIND.block(key, 0))


def test_groups(store_path: Path) -> None:
    """Two groups of one geometry: a key belongs to one of them."""
    from flashkv import Group, GroupKind

    full, other = KIND.geometry.groups[0], KINDS[3].geometry.groups[0]
    geometry = KVGeometry(
        (full, Group("latent", GroupKind.FULL, other.planes)),
    )
    with open_store(store_path, geometry) as store:
        ns = store.namespace(IDENTITY)
        assert ns.put(KEYS[:4], KIND.blocks(KEYS[:4], [0] * 4)).all_ok
        latent = KINDS[3].blocks(KEYS[4:8], [0] * 4)
        assert ns.put(KEYS[4:8], latent, group="latent").all_ok
        out = np.zeros_like(latent)
        assert ns.get(KEYS[4:8], out, group=1).all_ok
        assert equal(out, latent)
        assert ns.get(KEYS[4:8], KIND.empty(4)).counts() == {"MISS": 4}
        crash(store)
    with open_store(store_path, None) as store:
        ns = store.namespace(IDENTITY)
        assert ns.get(KEYS[4:8], out, group="latent").counts() in ({"OK": 4}, {"MISS": 4})
        check_rest(store)


# ---- lengths, and lists of buffers ---------------------------------------------------------------


def test_lengths_are_those_stored(ns: Namespace) -> None:
    put_all(ns, KIND, KEYS[:4])
    whole = int(ns.lengths(KEYS[:1])[0])
    short = np.ascontiguousarray(KIND.blocks(KEYS[4:5], [0])[..., : whole // 2, :])
    assert ns.put(KEYS[4:5], short).all_ok
    lengths = ns.lengths([*KEYS[:5], b"other"])
    assert lengths.tolist() == [whole] * 4 + [whole // 2, 0]
    assert lengths.dtype == np.uint16
    ns.delete(KEYS[:1])
    assert ns.lengths(KEYS[:1]).tolist() == [0]
    assert ns.lengths([]).tolist() == []


def test_lists_of_memoryviews(ns: Namespace) -> None:
    blocks = KIND.blocks(KEYS[:4], [0] * 4)
    assert ns.put(KEYS[:4], [memoryview(block.tobytes()) for block in blocks]).all_ok
    memory = [bytearray(block.nbytes) for block in blocks]
    assert ns.get(KEYS[:4], [memoryview(one) for one in memory]).all_ok
    assert [bytes(one) for one in memory] == [block.tobytes() for block in blocks]
    size = blocks[0].nbytes
    for wrong in (
        [memoryview(bytearray(size)), memoryview(bytearray(size + 1))],
        [memoryview(bytearray(size)), memoryview(bytes(size))],
        [memoryview(bytearray(size)), memoryview(bytearray(2 * size))[::2]],
    ):
        with pytest.raises(MemoryViewError):
            ns.get(KEYS[:2], wrong)
    one = memoryview(bytearray(size))
    with pytest.raises(MemoryViewError, match="overlapping"):
        ns.get(KEYS[:2], [one, one])
