"""Real KV tensors through the store: bit-equal through every layout, codec and backend, in parts,
and with shared prefixes stored once.

The packaged sample (flashkv.data) is always there. The larger set may lie beside the project
(../shared/data/realkv, see tests/realkv.py); what needs it is skipped without.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import realkv
from small_stores import BACKENDS, MIB, OPTIONS

import flashkv
from flashkv import BlockStatus, Identity, KVGeometry, MemoryView, Namespace, Regions, Store
from flashkv.data import load_sample

BLOCK_TOKENS = 64
CODECS = ("lossless", "raw")
AXES = "layer plane head token".split()

LAYOUTS = [
    MemoryView("layer plane head token"),
    MemoryView("layer plane token head"),
    MemoryView("layer head token plane"),
    MemoryView("token layer plane head"),
    MemoryView("head layer token plane"),
    MemoryView("layer plane head token", regions=("plane",)),
    MemoryView("token layer head plane", regions=("plane",)),
    MemoryView("layer plane token head", regions=("layer",)),
    MemoryView("layer plane token head", regions=("layer", "plane")),
]


def blocks_of(k: np.ndarray, v: np.ndarray, tokens: int = BLOCK_TOKENS) -> np.ndarray:
    """[block, layer, K|V, head, token, dim] of K and V [layer, head, token, dim]; bits of bf16."""
    both = np.stack([k, v], axis=1)
    layers, planes, heads, count, dim = both.shape
    cut = both.reshape(layers, planes, heads, count // tokens, tokens, dim)
    return np.ascontiguousarray(cut.transpose(3, 0, 1, 2, 4, 5))


def sample_blocks(names: tuple[str, str]) -> tuple[np.ndarray, str]:
    """Blocks of the packaged sample, and their dtype."""
    sample = load_sample()
    blocks = blocks_of(*(sample.tensors[name] for name in names))
    return blocks, sample.dtypes[names[0]]


def full_tensors(name: str) -> dict[str, np.ndarray]:
    """Tensors of the larger set; skips where it isn't there."""
    found = [path for path in realkv.full_set() if path.stem == name]
    if not found:
        pytest.skip(f"{realkv.FULL_SET} with {name}.safetensors is not here")
    return realkv.read_tensors(found[0])


def arranged(blocks: np.ndarray, view: MemoryView) -> list[np.ndarray]:
    """The same blocks in memory of the view: one array a region."""
    named = dict(zip(AXES, blocks.shape[1:5], strict=True))
    order = view.order.split()
    moved = blocks.transpose(0, *(1 + AXES.index(axis) for axis in order), 5)
    count = int(np.prod([named[axis] for axis in view.regions], dtype=int))
    flat = moved.reshape(len(blocks), count, *moved.shape[1 + len(view.regions) :])
    return [np.ascontiguousarray(flat[:, region]) for region in range(count)]


def open_store(path: Path, geometry: KVGeometry | None = None, **how: Any) -> Store:
    capacity = 96 * MIB if geometry is not None else None
    return flashkv.open(path, capacity=capacity, geometry=geometry, options=replace(OPTIONS, **how))


def space(store: Store) -> Namespace:
    return store.namespace(Identity(model="SmolLM2-135M-Instruct"))


def keys_of(count: int) -> list[bytes]:
    return [b"block %d" % number for number in range(count)]


def geometry_of(blocks: np.ndarray, dtype: str = "bfloat16") -> KVGeometry:
    return KVGeometry.gqa(blocks.shape[1], blocks.shape[3], blocks.shape[5], dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("names", [("K", "V"), ("K_fp16", "V_fp16")])
def test_every_layout(store_path: Path, names: tuple[str, str], codec: str, backend: str) -> None:
    """Put in each layout, got in each other one: the bits of the model's own tensors."""
    blocks, dtype = sample_blocks(names)
    blocks = blocks[:4]
    count = len(blocks)
    with open_store(store_path, geometry_of(blocks, dtype), codec=codec, backend=backend) as store:
        namespace = space(store)
        for number, view in enumerate(LAYOUTS):
            keys = [b"%d " % number + key for key in keys_of(count)]
            assert (
                namespace.put(keys, Regions(arranged(blocks, view)), view=view).statuses == 0
            ).all()
        store.flush()
        for number in range(len(LAYOUTS)):
            keys = [b"%d " % number + key for key in keys_of(count)]
            for view in LAYOUTS:
                expected = arranged(blocks, view)
                out = [np.zeros_like(part) for part in expected]
                assert namespace.get(keys, Regions(out), view=view).all_ok
                for got, wanted in zip(out, expected, strict=True):
                    assert got.tobytes() == wanted.tobytes(), (LAYOUTS[number], view)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
def test_parts(store_path: Path, codec: str, backend: str) -> None:
    """Chosen layers, heads and tokens, in the order asked for, from a store that was closed
    between.
    """
    blocks, _ = sample_blocks(("K", "V"))
    keys = keys_of(len(blocks))
    with open_store(store_path, geometry_of(blocks), codec=codec, backend=backend) as store:
        assert space(store).put(keys, blocks, position=0).all_ok
    with open_store(store_path, codec=codec, backend=backend) as store:
        namespace = space(store)
        for layers, heads, tokens in (
            ([3], None, None),
            ([2, 0], [1], None),
            (None, [2, 0], (0, 1)),
            ([1], [0], (63, 64)),
            (None, None, (17, 41)),
            ([3, 1, 0], [2, 1, 0], (5, 64)),
        ):
            expected = blocks[:, layers or slice(None)][:, :, :, heads or slice(None)]
            expected = expected[:, :, :, :, slice(*tokens) if tokens else slice(None)]
            for rows in (slice(None), slice(5, 6), slice(None, None, -3)):
                wanted = np.ascontiguousarray(expected[rows])
                out = np.zeros_like(wanted)
                result = namespace.get(
                    keys[rows], out, layers=layers, heads=heads, token_range=tokens
                )
                assert result.all_ok
                assert np.array_equal(out, wanted)


def test_a_part_reads_less(store_path: Path) -> None:
    """One layer and head of a long prefix costs a part of the reads of the whole."""
    blocks, _ = sample_blocks(("K", "V"))
    keys = keys_of(len(blocks))
    with open_store(store_path, geometry_of(blocks), header_cache_bytes=16 * MIB) as store:
        namespace = space(store)
        namespace.put(keys, blocks, position=0)
        store.flush()
        whole, some = np.zeros_like(blocks), np.zeros_like(blocks[:, :1, :, :1])
        namespace.get(keys, whole)
        before = store.stats().io["read_bytes"]
        namespace.get(keys, whole)
        between = store.stats().io["read_bytes"]
        assert namespace.get(keys, some, layers=[2], heads=[1]).all_ok
        after = store.stats().io["read_bytes"]
        assert np.array_equal(some, blocks[:, 2:3, :, 1:2])
        assert after - between < (between - before) / 3


@pytest.mark.parametrize("block_tokens", [16, 32, 128, 256])
def test_the_ratio(store_path: Path, block_tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 shrinks by more than 1.3, whatever the engine's block size."""
    sample = load_sample()
    blocks = blocks_of(sample.tensors["K"], sample.tensors["V"], block_tokens)
    with open_store(store_path, geometry_of(blocks)) as store:
        assert space(store).put(keys_of(len(blocks)), blocks, position=0).all_ok
        store.flush()
        stats = store.stats()
        out = np.zeros_like(blocks)
        assert space(store).get(keys_of(len(blocks)), out).all_ok
        assert np.array_equal(out, blocks)
    with capsys.disabled():
        print(f" [{block_tokens} tokens a block: {stats.compression:.3f}]", end="")
    assert stats.accepted_bytes == blocks.nbytes
    assert stats.compression > 1.3
    assert stats.compression == pytest.approx(blocks.nbytes / stats.record_bytes_written)


@pytest.mark.parametrize("name", ["austen", "code", "chat_a", "chat_b", "austen_fp16"])
def test_the_larger_set(store_path: Path, name: str) -> None:
    """Every text of the larger set, K before the rotary embedding too, through a restart."""
    tensors = full_tensors(name)
    dtype = "float16" if name.endswith("fp16") else "bfloat16"
    pairs = [(tensors["K"], tensors["V"])]
    if "K_prerope" in tensors:
        pairs.append((tensors["K_prerope"], tensors["K_prerope"]))
    for number, (k, v) in enumerate(pairs):
        blocks = blocks_of(k, v)
        path = store_path / str(number)
        with open_store(path, geometry_of(blocks, dtype), segment_bytes=12 * MIB) as store:
            result = space(store).put(keys_of(len(blocks)), blocks, position=0)
            assert (result.statuses == BlockStatus.OK).all()
            store.flush()
            assert store.stats().compression > (1.05 if dtype == "float16" else 1.3)
        with open_store(path) as store:
            out = np.zeros_like(blocks)
            assert space(store).get(keys_of(len(blocks)), out).all_ok
            assert out.tobytes() == blocks.tobytes()


def test_a_shared_prefix_is_stored_once(store_path: Path) -> None:
    """Two chats that begin alike: the second put writes its tail only, and both come back whole."""
    first, second = full_tensors("chat_a"), full_tensors("chat_b")
    blocks = [blocks_of(t["K"], t["V"]) for t in (first, second)]
    ids = [t["token_ids"] for t in (first, second)]
    common = int(np.argmax(ids[0] != ids[1]))
    shared = common // BLOCK_TOKENS
    assert 0 < shared < len(blocks[1])
    assert np.array_equal(blocks[0][:shared], blocks[1][:shared]), "the prefix is bit-equal"
    with open_store(store_path, geometry_of(blocks[0])) as store:
        namespace = space(store)
        keys = [namespace.token_keys(tokens, block_tokens=BLOCK_TOKENS) for tokens in ids]
        assert namespace.put(keys[0], blocks[0], position=0).all_ok
        store.flush()
        before = store.stats()
        assert namespace.match(keys[1]).count == shared
        result = namespace.put(keys[1], blocks[1], position=0)
        store.flush()
        after = store.stats()
        present = result.statuses == BlockStatus.PRESENT
        assert np.array_equal(present, np.arange(len(present)) < shared)
        tail = blocks[1][shared:]
        assert after.accepted_bytes - before.accepted_bytes == tail.nbytes
        assert after.present_blocks - before.present_blocks == shared
        written = after.record_bytes_written - before.record_bytes_written
        assert tail.nbytes / 2 < written < tail.nbytes / 1.3
        assert written < before.record_bytes_written * len(tail) / len(blocks[0]) * 1.1
    with open_store(store_path) as store:
        for chain, expected in zip(keys, blocks, strict=True):
            out = np.zeros_like(expected)
            assert space(store).get(chain, out).all_ok
            assert np.array_equal(out, expected)


def test_a_longer_prompt_writes_its_tail(store_path: Path) -> None:
    """The same with the packaged sample: a conversation that grows turn by turn is written once."""
    blocks, _ = sample_blocks(("K", "V"))
    ids = load_sample().tensors["token_ids"]
    with open_store(store_path, geometry_of(blocks)) as store:
        namespace = space(store)
        keys = namespace.token_keys(ids, block_tokens=BLOCK_TOKENS)
        assert len(keys) == len(blocks)
        accepted = []
        for end in (3, 4, 9, 16):
            assert namespace.put(keys[:end], blocks[:end], position=0).all_ok
            accepted.append(store.stats().accepted_bytes // blocks[0].nbytes)
        assert accepted == [3, 4, 9, 16]
        store.flush()
        assert store.stats().compression > 1.3
        out = np.zeros_like(blocks)
        assert namespace.get(keys, out).all_ok
        assert np.array_equal(out, blocks)


@pytest.mark.parametrize("codec", CODECS)
def test_torch_tensors(store_path: Path, codec: str) -> None:
    """bfloat16 tensors as they are, strided ones too."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    blocks, _ = sample_blocks(("K", "V"))
    tensor = torch.from_numpy(blocks.copy()).view(torch.bfloat16)
    strided = tensor.transpose(3, 4).contiguous().transpose(3, 4)
    assert not strided.is_contiguous()
    keys = keys_of(len(blocks))
    with open_store(store_path, geometry_of(blocks), codec=codec) as store:
        namespace = space(store)
        assert namespace.put(keys, strided).all_ok
        out = torch.zeros_like(tensor)
        assert namespace.get(keys, out).all_ok
        assert torch.equal(out.view(torch.int16), tensor.view(torch.int16))
        by_head = torch.zeros(tensor.transpose(3, 4).shape, dtype=torch.bfloat16)
        view = MemoryView("layer plane token head")
        assert namespace.get(keys, by_head, view=view).all_ok
        assert torch.equal(by_head.transpose(3, 4).view(torch.int16), tensor.view(torch.int16))
