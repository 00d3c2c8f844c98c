"""Checks of the SGLang connector on real host pools, without an engine.

    sglang_checks.py MODEL_FOLDER [NAME ...]

Prints which checks there are and how each ended: null, or a traceback. In the engine's environment
there is no pytest; a check is a function that begins with check_.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang_pools as pools  # first: it puts the stand-ins in place
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang_pools import MHA_LAYOUTS, MLA_LAYOUTS, PAGE, PAGES, fill, holds, keys, slots, untouched

import flashkv
from flashkv.connectors import sglang as connector
from flashkv.connectors import sglang_identity
from flashkv.connectors.sglang_identity import Engine
from flashkv.errors import FlashKVError

MODEL = Path()
ROWS = [5, 1, 6]
SEEDS = [11, 12, 13]


@contextmanager
def storage(path: Path, pool: Any, **changes: Any) -> Iterator[Any]:
    made = pools.storage(path, pool, **{"model": MODEL, **changes})
    try:
        yield made
    finally:
        made.close()


def filled(pool: Any) -> Any:
    for row, seed in zip(ROWS, SEEDS, strict=True):
        fill(pool, row, seed)
    return pool


def stored(path: Path, pool: Any, **changes: Any) -> None:
    """Lets a store hold ROWS of the pool under keys(3)."""
    with storage(path, filled(pool), **changes) as backend:
        assert backend.batch_set_v1(keys(3), slots(ROWS, pool.page_size)) == [True] * 3
        assert backend.batch_exists(keys(5)) == 3


def shapes() -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """(name, maker of a pool by layout, layouts) of each kind of pool and each type."""
    for dtype in pools.DTYPES:
        yield (
            f"mha {dtype}",
            lambda layout, d=dtype: pools.mha_pool(layout, dtype=d),
            MHA_LAYOUTS,
        )
        yield (
            f"mla {dtype}",
            lambda layout, d=dtype: pools.mla_pool(layout, dtype=d),
            MLA_LAYOUTS,
        )
    yield (
        "K and V of different width",
        lambda layout: pools.mha_pool(layout, v_dim=16),
        ("page_first", "page_first_direct"),
    )


def check_every_layout_reads_what_another_wrote(path: Path) -> None:
    for number, (name, make, layouts) in enumerate(shapes()):
        for written in layouts:
            folder = path / f"{number}-{written}"
            stored(folder, make(written))
            for read in layouts:
                pool = make(read)
                with storage(folder, pool) as backend:
                    said = backend.stats()["pools"]["kv"]
                    assert said == {"stored": True, "native": True, "reason": ""}, (name, said)
                    assert backend.batch_get_v1(keys(3), slots([2, 7, 0])) == [True] * 3
                for row, seed in zip((2, 7, 0), SEEDS, strict=True):
                    assert holds(pool, row, seed), (name, written, read)
                assert untouched(pool, [1, 3, 4, 5, 6]), (name, written, read)


def check_generic_and_zero_copy_are_one_store(path: Path) -> None:
    for number, (name, make, layouts) in enumerate(shapes()):
        if name.startswith("K and V"):  # SGLang has no flat pages of these
            continue
        for layout in layouts:
            folder = path / f"{number}-{layout}"
            pool = filled(make(layout))
            pages = [pool.get_data_page(row * PAGE) for row in ROWS]
            with storage(folder, pool) as backend:
                assert backend.batch_set(keys(3), pages)
                assert backend.set(keys(3)[0], pages[0])
                assert [backend.exists(key) for key in keys(4)] == [True] * 3 + [False]
            other = make(layout)
            with storage(folder, other) as backend:
                assert backend.batch_get_v1(keys(3), slots(ROWS)) == [True] * 3
                for row, seed in zip(ROWS, SEEDS, strict=True):
                    assert holds(other, row, seed), (name, layout)
                targets = [other.get_dummy_flat_data_page() for _ in range(4)]
                got = backend.batch_get(keys(4), targets)
                assert got[3] is None
                for page, target, found in zip(pages, targets, got, strict=False):
                    assert found is target
                    assert torch.equal(page, target)
                assert torch.equal(backend.get(keys(1)[0]), pages[0])
                assert backend.get("absent", targets[0]) is None


def check_leading_count_and_partial_answers(path: Path) -> None:
    pool = filled(pools.mha_pool("layer_first"))
    a, b, c = keys(3)
    with storage(path, pool) as backend:
        assert backend.batch_exists([]) == 0
        assert backend.batch_exists([a]) == 0
        assert backend.batch_set_v1([a, c], slots([5, 6])) == [True, True]
        assert backend.batch_exists([a, b, c]) == 1
        assert backend.batch_exists([b, a]) == 0
        assert backend.batch_exists([a, c, b]) == 2
        assert backend.batch_get_v1([a, b, c], slots([0, 2, 3])) == [True, False, True]
        assert holds(pool, 0, 11)
        assert holds(pool, 3, 13)
        assert backend.batch_set_v1([a, b, b], slots([5, 1, 1])) == [True] * 3
        assert backend.batch_exists([a, b, c]) == 3
        assert backend.batch_set_v1([], slots([0])[:0]) == []


def check_wrong_indices_are_answered(path: Path) -> None:
    pool = filled(pools.mha_pool("page_first_direct"))
    with storage(path, pool) as backend:
        assert backend.batch_set_v1(keys(3), slots(ROWS)[:-1]) == [False] * 3
        assert backend.batch_set_v1(keys(3), slots(ROWS) + 1) == [False] * 3
        assert backend.batch_set_v1(keys(1), slots([PAGES + 9])) == [False]
        assert backend.batch_exists(keys(3)) == 0
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
        assert backend.batch_get_v1(keys(3), slots(ROWS)[:5]) == [False] * 3
        assert backend.batch_get_v1(keys(2), slots([4, 4])) == [False] * 2
        assert backend.batch_get_v1(["x" * 300], slots([4])) == [False]
        assert backend.batch_exists(["x" * 300]) == 0
        assert backend.batch_get(keys(1), [torch.zeros(3)]) == [None]
        assert not backend.batch_set(["k"], [torch.zeros(3)])
        assert not backend.batch_set(["k"], None)
        events = backend.stats()["stores"][str(path)]["events"]
        assert events["indices"] == 3, events
        assert untouched(pool, [0, 2, 3, 7])


def check_other_meanings_never_meet(path: Path) -> None:
    stored(path, pools.mha_pool("layer_first"))
    other_model = path.parent / "other-model"
    other_model.mkdir()
    for file in MODEL.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-1] ^= 1  # one bit of the weights, at the end where samples are taken
        (other_model / file.name).write_bytes(data)
    make = pools.mha_pool
    others: list[tuple[str, Any, dict[str, Any]]] = [
        ("dtype", make("layer_first", dtype=torch.float16), {}),
        ("page size", make("layer_first", page=2 * PAGE), {}),
        ("layers", make("layer_first", layers=2), {}),
        ("heads", make("layer_first", heads=2), {}),
        ("width", make("page_first", v_dim=16), {}),
        ("latent", pools.mla_pool("layer_first"), {}),
        ("weights", make("layer_first"), {"model": other_model}),
        ("revision", make("layer_first"), {"extra": {"revision": "7"}}),
        ("salt", make("layer_first"), {"extra": {"salt": "tenant 2"}}),
    ]
    for name, pool, changes in others:
        with storage(path, pool, **changes) as backend:
            assert backend.batch_exists(keys(3)) == 0, name
            indices = slots(ROWS, pool.page_size)
            assert backend.batch_get_v1(keys(3), indices) == [False] * 3, name
            assert untouched(pool, list(range(PAGES))), name
    with storage(path, make("page_head")) as backend:
        assert backend.batch_exists(keys(3)) == 3


def check_engine_settings_are_identity(path: Path) -> None:
    adapter = path.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      abc")
    base = Engine(model=str(MODEL), dtype="bfloat16")
    changed = {
        "overrides": {"rope_theta": 77.0},
        "other overrides": {"sliding_window": 5},
        "kv_dtype": "fp8_e4m3",
        "settings": {"quantization": "fp8"},
        "draft": {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(MODEL)},
        "loras": {"one": str(adapter)},
    }
    seen = {}
    whole = sglang_identity.Engine.running
    try:
        for name, value in [("as it is", None), *changed.items()]:
            field = {"other overrides": "overrides", "draft": "settings"}.get(name, name)
            engine = base if value is None else dataclasses.replace(base, **{field: value})
            sglang_identity.Engine.running = staticmethod(lambda e=engine: e)
            with storage(path, filled(pools.mha_pool("layer_first"))) as backend:
                assert backend.batch_exists(keys(3)) == 0, name
                assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
                seen[name] = backend._of("kv").identity
        data = (adapter / "adapter_model.safetensors").read_bytes()
        (adapter / "adapter_model.safetensors").write_bytes(data[:-1] + b"d")
        with storage(path, pools.mha_pool("layer_first")) as backend:
            assert backend.batch_exists(keys(3)) == 0, "an adapter's weights changed"
        elsewhere = dataclasses.replace(base, loras={"one": "hub/adapter"})
        sglang_identity.Engine.running = staticmethod(lambda: elsewhere)
        assert "LoRA" in refused(path, pools.mha_pool("layer_first"))
    finally:
        sglang_identity.Engine.running = whole
    assert len({identity.digest() for identity in seen.values()}) == len(seen)
    assert seen["overrides"].rope
    assert seen["kv_dtype"].kv_dtype == "float8_e4m3fn"


def refused(path: Path, pool: Any, **changes: Any) -> str:
    """What a wrong configuration is told."""
    try:
        with storage(path, pool, **changes):
            pass
    except FlashKVError as error:
        return str(error)
    raise AssertionError(f"{changes} was not refused")


def check_bad_configuration_is_told(path: Path) -> None:
    pool = pools.mha_pool("layer_first")
    for extra, said in (
        ({"pth": "x"}, "no 'pth'"),
        ({"path": ""}, "need a path"),
        ({"path": None}, "need a path"),
        ({"capacity": "much"}, "capacity"),
        ({"capacity": 100}, "capacity"),
        ({"codec": "zip"}, "codec"),
        ({"options": {"queue": 1}}, "no such options"),
        ({"flush_ms": -1}, "flush_ms"),
        ({"lease_ms": "long"}, "lease_ms"),
        ({"lease_ms": 60_000, "options": {"max_lease_ms": 100}}, "lease_ms"),
        ({"refresh_ms": 1.5}, "refresh_ms"),
        ({"salt": 5}, "salt"),
        ({"revision": ""}, "revision"),
        ({"model": str(path / "nowhere")}, "which weights"),
    ):
        told = refused(path, pool, extra=extra)
        assert said in told, (extra, told)
    assert "which model" in refused(path, pool, model_name=None)
    with storage(path, pool, model_name="some/name", extra={"revision": "r1"}) as backend:
        assert backend.batch_exists(keys(1)) == 0


def check_mla_is_written_by_one_rank(path: Path) -> None:
    pool, extra = filled(pools.mla_pool("layer_first")), {"refresh_ms": 0, "flush_ms": 0}
    ranks = [
        pools.storage(path, pool, model=MODEL, tp_rank=rank, tp_size=2, extra=extra)
        for rank in (0, 1)
    ]
    writer, follower = ranks
    try:
        assert follower.batch_exists(keys(3)) == 0
        assert follower.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
        assert writer.batch_exists(keys(3)) == 0, "the rank that doesn't write has written"
        assert writer.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
        wait_until(lambda: follower.batch_exists(keys(4)) == 3)
        blocks = writer.stats()["stores"][str(path)]["store"].blocks
        assert blocks == 3, blocks
        assert follower.stats()["stores"][str(path)]["store"] is None
        target = pools.mla_pool("page_first")
        follower.register_mem_pool_host(target)
        wait_until(lambda: follower.batch_exists(keys(3)) == 3)
        assert follower.batch_get_v1(keys(4), slots([0, 1, 2, 3])) == [True] * 3 + [False]
        for row, seed in enumerate(SEEDS):
            assert holds(target, row, seed)
        follower.clear()
        assert writer.batch_exists(keys(3)) == 3
        writer.clear()
        assert writer.batch_exists(keys(3)) == 0
    finally:
        for rank in reversed(ranks):
            rank.close()
    assert [folder.name for folder in path.iterdir()] == ["shards"]


def wait_until(reached: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it didn't come to that"
        time.sleep(0.05)


def check_ranks_have_their_parts(path: Path) -> None:
    """Each rank has a store and a part of its own; a rank's part is that of the heads it holds."""
    ranks = [
        pools.storage(path, filled(pools.mha_pool("layer_first", heads=2)), model=MODEL, **changes)
        for changes in (
            {"tp_rank": 0, "tp_size": 2},
            {"tp_rank": 1, "tp_size": 2},
            {"attn_cp_rank": 1, "attn_cp_size": 2},
            {"dp_rank": 1},
            {"pp_rank": 1, "pp_size": 2},
        )
    ]
    try:
        for rank in ranks:
            assert rank.batch_exists(keys(3)) == 0
            assert rank.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
            assert rank.batch_exists(keys(3)) == 3
        bound = [rank._of("kv") for rank in ranks]
        assert len({(one.identity.digest(), one.shard) for one in bound[2:]}) == 3
        # The tiny model has 2 KV heads: with 2 heads a rank, both ranks hold them all.
        assert [one.shard.heads for one in bound[:2]] == [(0, 2), (0, 2)], bound[:2]
        assert bound[2].shard.context == (1, 2)
        assert bound[4].shard.layers == (0, 3)
    finally:
        for rank in ranks:
            rank.close()
    assert sorted(folder.name for folder in path.iterdir()) == [
        "cp1of2", "dp1", "pp1of2", "tp0of2", "tp1of2"
    ]  # fmt: skip
    one_head = pools.mha_pool("layer_first", heads=1)
    with storage(path / "a", one_head, tp_rank=1, tp_size=2) as second:
        bound_second = second._of("kv")
        assert bound_second.shard.heads == (1, 2)
        assert bound_second.identity.geometry.groups[0].planes[0].heads == 2
    with storage(path / "b", one_head, tp_rank=2, tp_size=4) as third:  # heads shared by two ranks
        assert third._of("kv").shard.heads == (1, 2)
    stage = pools.mha_pool("layer_first", layers=2, first_layer=2)
    with storage(path / "c", stage, pp_rank=1, pp_size=2) as last:
        assert last._of("kv").shard.layers == (2, 4)
        assert last._of("kv").identity.geometry.groups[0].planes[0].layers == 4
    drafts = pools.mha_pool("layer_first", layers=3, first_layer=2)  # more than the model has
    with storage(path / "d", drafts, pp_rank=1, pp_size=2) as last:
        assert last._of("kv").identity.extras["pp"] == "1 of 2"
        assert last._of("kv").shard.layers is None


class OtherPool(MHATokenToKVPoolHost):
    """A pool that the connector doesn't know."""


def check_unknown_pools_are_plain_bytes(path: Path) -> None:
    for layout in MHA_LAYOUTS:
        pool = filled(pools.mha_pool(layout, kind=OtherPool))
        with storage(path, pool) as backend:
            said = backend.stats()["pools"]["kv"]
            assert said["stored"], said
            assert not said["native"], said
            assert "OtherPool" in said["reason"], said
            assert backend.batch_exists(keys(1)) == 0, "another layout's bytes"
            assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
            assert backend.batch_get_v1(keys(4), slots([0, 2, 3, 4])) == [True] * 3 + [False]
            for row, seed in zip((0, 2, 3), SEEDS, strict=True):
                assert holds(pool, row, seed)
            assert untouched(pool, [4, 7])
            flat = backend.batch_get(keys(1), [pool.get_dummy_flat_data_page()])[0]
            assert torch.equal(flat, pool.get_data_page(0))
            assert backend.batch_set(["flat"], [flat])


def check_a_pool_that_lies_elsewhere_is_not_trusted(path: Path) -> None:
    """Where a known pool's addresses are not those of its tensors, the description is dropped."""
    pool = filled(pools.mha_pool("page_first"))
    told = pool.get_page_buffer_meta
    pool.get_page_buffer_meta = lambda indices: (
        [p + 64 for p in told(indices)[0]],
        told(indices)[1],
    )
    with storage(path, pool) as backend:
        said = backend.stats()["pools"]["kv"]
        assert not said["native"], said
        assert "elsewhere" in said["reason"], said
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3


def check_a_pool_without_memory(path: Path) -> None:
    pool = pools.mha_pool("layer_first")
    pool.kv_buffer = None
    with storage(path, pool) as backend:
        assert not backend.stats()["pools"]["kv"]["stored"]
        assert backend.batch_exists(keys(3)) == 0
        assert backend.batch_get_v1(keys(3), slots(ROWS)) == [False] * 3
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [False] * 3
        assert backend.batch_get(keys(2)) == [None] * 2
        assert not backend.batch_set(keys(1), [torch.zeros(1)])
        assert backend.batch_exists_v2(keys(3)).kv_hit_pages == 0


def check_an_anchor_that_holds_nothing(path: Path) -> None:
    """DeepSeek V4's pool of K and V only counts slots: the pools beside it alone decide."""
    with storage(path, LogicalHostPool(PAGES * PAGE, PAGE)) as backend:
        assert not backend.stats()["pools"]["kv"]["stored"]
        assert backend.batch_exists(keys(3)) == 0
        assert backend.batch_exists_v2(keys(3)).kv_hit_pages == 0
        window = filled(pools.mha_pool("layer_first", layers=1))
        transfer = PoolTransfer(PoolName.SWA, host_indices=slots(ROWS), keys=keys(3))
        assert backend.batch_exists_v2(keys(3), [transfer]).kv_hit_pages == 0
        backend.register_mem_host_pool_v2(window, PoolName.SWA)
        assert backend.batch_exists_v2(keys(3), [transfer]).kv_hit_pages == 0
        assert backend.batch_set_v2([transfer]) == {PoolName.SWA: [True] * 3}
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
        assert backend.batch_exists_v2(keys(5), [transfer]).kv_hit_pages == 3
        assert backend.batch_get_v1(keys(3), slots(ROWS)) == [True] * 3
        backend._stale = True
        assert backend.batch_get_v1(keys(3), slots(ROWS)) == [False] * 3


def check_several_pools(path: Path) -> None:
    kv, window, state = (
        filled(pools.mha_pool("page_first_direct")),
        filled(pools.mha_pool("page_first_direct", layers=2)),
        pools.state_pool(),
    )
    names = keys(6)
    with storage(path, kv) as backend:
        for pool, name in ((kv, PoolName.KV), (window, PoolName.SWA), (state, PoolName.MAMBA)):
            backend.register_mem_host_pool_v2(pool, name)
        said = backend.stats()["pools"]
        assert said["kv"]["native"], said
        assert said["swa"]["native"], said
        assert said["mamba"]["stored"], said
        assert "MambaPoolHost" in said["mamba"]["reason"], said
        assert backend.batch_set_v1(names, slots([5, 1, 6, 5, 1, 6])) == [True] * 6
        for tensor in (state.temporal_buffer, *state.conv_buffer):
            tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
        states = [state.get_data_page(row).clone() for row in range(3)]
        written = backend.batch_set_v2(
            [
                PoolTransfer(PoolName.SWA, host_indices=slots([5, 1, 6]), keys=names[1:4]),
                PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0, 2]), keys=names[1:5:2]),
                PoolTransfer(PoolName.DRAFT, host_indices=slots([0]), keys=names[:1]),
            ],
            HiCacheStorageExtraInfo(prefix_keys=["p0", "p1"]),
        )
        assert written == {
            PoolName.SWA: [True] * 3, PoolName.MAMBA: [True] * 2, PoolName.DRAFT: [False]
        }  # fmt: skip
        lengths_of_several_pools(backend, names)
        read = backend.batch_get_v2(
            [
                PoolTransfer(PoolName.SWA, host_indices=slots([2, 3]), keys=names[1:3]),
                PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([6, 5]), keys=names[3:5]),
                PoolTransfer(PoolName.KV, host_indices=slots([0]), keys=names[5:6]),
            ]
        )
        assert read == {
            PoolName.SWA: [True] * 2, PoolName.MAMBA: [True, False], PoolName.KV: [True]
        }  # fmt: skip
        assert torch.equal(state.get_data_page(6), states[2])
        for row, seed in ((2, 11), (3, 12)):
            assert holds(window, row, seed)
        wrong = PoolTransfer(PoolName.SWA, host_indices=None, keys=names[:2])
        assert backend.batch_get_v2([wrong]) == {PoolName.SWA: [False] * 2}


def check_pools_of_one_shape_never_meet(path: Path) -> None:
    """A draft model's pool may look like the model's own, and has pages under the same keys."""
    kv, draft = (pools.mha_pool("layer_first") for _ in range(2))
    fill(kv, 0, 1)
    fill(draft, 0, 2)
    with storage(path, kv) as backend:
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        assert backend.batch_set_v1(keys(1), slots([0])) == [True]
        of_draft = PoolTransfer(PoolName.DRAFT, host_indices=slots([3]), keys=keys(1))
        assert backend.batch_get_v2([of_draft]) == {PoolName.DRAFT: [False]}
        of_draft.host_indices = slots([0])
        assert backend.batch_set_v2([of_draft]) == {PoolName.DRAFT: [True]}
        of_draft.host_indices = slots([3])
        assert backend.batch_get_v2([of_draft]) == {PoolName.DRAFT: [True]}
        assert backend.batch_get_v1(keys(1), slots([3])) == [True]
        assert holds(kv, 3, 1)
        assert holds(draft, 3, 2)


def lengths_of_several_pools(backend: Any, names: list[str]) -> None:
    """KV has pages 0 to 5, the window 1 to 3, states 1 and 3."""

    def lengths(*asked: PoolTransfer) -> tuple[int, dict[Any, int], Any]:
        found = backend.batch_exists_v2([*names, "absent"], list(asked))
        return found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages

    kv = {PoolName.KV: 6}
    assert lengths() == (6, kv, [1, 2, 3, 4, 5, 6])
    trailing = PoolHitPolicy.TRAILING_PAGES
    last_two = PoolTransfer(PoolName.SWA, keys=names[:2], hit_policy=trailing)
    assert lengths(last_two) == (4, kv | {PoolName.SWA: 4}, [3, 4])
    last = PoolTransfer(PoolName.MAMBA, keys=names[:1], hit_policy=trailing)
    assert lengths(last) == (4, kv | {PoolName.MAMBA: 4}, [2, 4])
    both = kv | {PoolName.SWA: 4, PoolName.MAMBA: 4}
    assert lengths(last_two, last) == (4, both, [4])
    every = PoolTransfer(PoolName.SWA, keys=None)
    assert lengths(every) == (0, kv, [])
    assert lengths(PoolTransfer(PoolName.INDEXER, keys=None)) == (0, kv, [])
    assert backend.batch_exists_v2(["absent"], [every]).kv_hit_pages == 0
    told = ""
    try:
        lengths(PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS))
    except ValueError as error:
        told = str(error)
    assert "hit policy" in told


def check_the_way_back_after_damage(path: Path) -> None:
    """Pages of a damaged record are misses from then on, and can be stored again."""
    make = lambda: pools.mha_pool("layer_first")
    with storage(path, filled(make())) as backend:
        for key, row in zip(keys(3), ROWS, strict=True):  # a record each
            assert backend.batch_set_v1([key], slots([row])) == [True]
    segments = sorted((path / "shards/0/segments").iterdir())
    for number, segment in enumerate(segments):
        data = bytearray(segment.read_bytes())
        at = len(data) // 2 if number else 3 * 4096
        data[at : at + 8192] = bytes(8192)
        segment.write_bytes(data)
    pool = make()
    with storage(path, pool) as backend:
        got = backend.batch_get_v1(keys(3), slots([0, 2, 3]))
        assert not all(got), "nothing was damaged"
        for row, seed, there in zip((0, 2, 3), SEEDS, got, strict=True):
            assert not there or holds(pool, row, seed)
        assert [backend.exists(key) for key in keys(3)] == got
        filled(pool)
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
        assert backend.batch_get_v1(keys(3), slots([0, 2, 3])) == [True] * 3
        for row, seed in zip((0, 2, 3), SEEDS, strict=True):
            assert holds(pool, row, seed)


def check_a_full_store_forgets_and_never_lies(path: Path) -> None:
    make = lambda: pools.mha_pool("page_first", dtype=torch.float32, heads=16, page=64)
    pool, total = make(), 120  # 96 MB of pages, for 24 MB
    extra = {"capacity": "24MiB", "options": {"segment_bytes": "4MiB"}, "codec": "raw"}
    with storage(path, pool, extra=extra) as backend:
        answers = []
        for number in range(total):
            fill(pool, number % 4, number)
            answers += backend.batch_set_v1(keys(1, number), slots([number % 4], 64))
        assert sum(answers) > total // 2, answers
        there = [number for number in range(total) if backend.exists(keys(1, number)[0])]
        assert there
        assert len(there) < total, "it was never full"
        for number in there[-5:]:
            assert backend.batch_get_v1(keys(1, number), slots([6], 64)) == [True]
            assert holds(pool, 6, number)
    used = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    assert used <= 24 << 20, used


def check_a_store_of_another_process_is_gone_without(path: Path) -> None:
    pool = filled(pools.mha_pool("layer_first"))
    geometry = flashkv.KVGeometry.opaque(4096)
    with flashkv.open(path, capacity="64MiB", geometry=geometry):
        for _ in range(2):
            with storage(path, pool) as backend:
                assert backend.batch_set_v1(keys(3), slots(ROWS)) == [False] * 3
                assert backend.batch_exists(keys(3)) == 0
                assert backend.batch_get_v1(keys(3), slots(ROWS)) == [False] * 3
                assert not backend.batch_set(keys(1), [pool.get_data_page(0)])
                assert backend.get(keys(1)[0]) is None
                assert not backend.exists(keys(1)[0])
                assert backend.clear()
                assert "open for writing" in backend.stats()["stores"][str(path)]["reason"]
    with storage(path, pool) as backend:  # made for another geometry, and taken all the same
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3


def check_three_threads(path: Path) -> None:
    make = lambda: pools.mha_pool("page_first_direct")
    pool, faults, ended = make(), [], threading.Event()
    for row in range(4):
        fill(pool, row, row)
    want = [[view.clone() for view in pools.logical(pool, row)] for row in range(4)]

    def guarded(work: Any) -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException:  # noqa: BLE001  (it is told)
            faults.append(traceback.format_exc())
            ended.set()

    count = [0, 0, 0]
    with storage(path, pool, extra={"flush_ms": 1}) as backend:

        def write() -> None:
            first = 4 * count[0]
            assert backend.batch_set_v1(keys(4, first), slots([0, 1, 2, 3])) == [True] * 4
            count[0] += 1

        def look() -> None:
            done = count[0]
            assert backend.batch_exists(keys(4 * done)) == 4 * done
            count[1] += 1

        def read() -> None:
            if not count[0]:
                return
            first = 4 * (count[2] * 7919 % count[0])
            assert backend.batch_get_v1(keys(4, first), slots([4, 5, 6, 7])) == [True] * 4
            for row, views in enumerate(want):
                for view, expected in zip(pools.logical(pool, 4 + row), views, strict=True):
                    assert torch.equal(view, expected)
            count[2] += 1

        threads = [threading.Thread(target=guarded, args=(work,)) for work in (write, look, read)]
        for thread in threads:
            thread.start()
        ended.wait(2.0)
        ended.set()
        for thread in threads:
            thread.join()
    assert not faults, faults
    assert min(count) > 5, count


def check_flushed_soon_without_close(path: Path) -> None:
    """What was stored is on disk before the process ends: SGLang's are killed."""
    pool = filled(pools.mha_pool("layer_first"))
    with storage(path, pool, extra={"flush_ms": 20}) as backend:
        assert backend.batch_set_v1(keys(3), slots(ROWS)) == [True] * 3
        with_reader = lambda: flashkv.open(path, read_only=True)

        def durable() -> bool:
            with with_reader() as reader:
                return reader.stats().blocks == 3

        wait_until(durable)


def check_updated_weights_end_it(path: Path) -> None:
    """Pages of weights that the identity doesn't name are neither stored nor restored."""
    pool = filled(pools.mha_pool("layer_first"))
    whole = connector.weights_were_updated
    try:
        with storage(path, pool) as backend:
            assert backend.batch_set_v1(keys(2), slots(ROWS[:2])) == [True] * 2
            connector.weights_were_updated = lambda: True
            assert backend.batch_exists(keys(2)) == 0
            assert backend.batch_get_v1(keys(2), slots([0, 2])) == [False] * 2
            assert backend.batch_set_v1(keys(3), slots(ROWS)) == [False] * 3
            assert backend.get(keys(1)[0]) is None
            assert backend.batch_exists_v2(keys(2)).kv_hit_pages == 0
            connector.weights_were_updated = lambda: False
            assert backend.batch_exists(keys(2)) == 0, "once updated, never known again"
    finally:
        connector.weights_were_updated = whole
    with storage(path, pool) as backend:
        assert backend.batch_exists(keys(3)) == 2


def check_prefix_keys_metrics_and_the_end(path: Path) -> None:
    pool = filled(pools.mha_pool("layer_first"))
    backend = pools.storage(path, pool, model=MODEL)
    info = HiCacheStorageExtraInfo(prefix_keys=keys(5, 100))
    assert backend.batch_set_v1(keys(3), slots(ROWS), info) == [True] * 3
    assert backend.batch_exists(keys(3), info) == 3
    assert backend.batch_get_v1(keys(4), slots([0, 1, 2, 3]), info) == [True] * 3 + [False]
    metrics = backend.get_stats()
    assert metrics.prefetch_pgs == [3]
    assert metrics.backup_pgs == [3]
    assert metrics.prefetch_bandwidth[0] > 0
    assert backend.get_stats().prefetch_pgs == []
    assert backend.stats()["pages"]["get_pages_failed"] == 1
    injected = HiCacheStorageFailureInjector(backend, 0.0, 1.0)
    assert injected.batch_get_v1(keys(1), slots([0])) == [False]
    assert backend.clear()
    assert backend.batch_exists(keys(3)) == 0
    injected.close()
    backend.close()
    assert backend.batch_get_v1(keys(1), slots([0])) == [False]
    assert backend.batch_exists(keys(1)) == 0
    with storage(path, pool, enable_storage_metrics=False) as quiet:
        assert quiet.get_stats() is None


def main() -> None:
    global MODEL  # noqa: PLW0603
    MODEL = Path(sys.argv[1])
    checks = {name: work for name, work in globals().items() if name.startswith("check_")}
    chosen = sys.argv[2:] or list(checks)
    ended: dict[str, Any] = {}
    for name in chosen:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            begun = time.monotonic()
            try:
                checks[name](Path(folder) / "store")
                ended[name] = None
            except Exception:  # noqa: BLE001  (it is told)
                ended[name] = traceback.format_exc()
            print(f"{name}: {time.monotonic() - begun:.1f} s {ended[name] or ''}", flush=True)
    print("RESULT " + json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
