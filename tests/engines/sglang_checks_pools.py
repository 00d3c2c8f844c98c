"""Checks of pools that hold something else than K and V, and of several pools: see
sglang_checks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sglang_pools as pools  # first: it puts the stand-ins in place
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang_pools import (
    MHA_LAYOUTS,
    PAGE,
    PAGES,
    ROWS,
    SEEDS,
    fill,
    filled,
    holds,
    keys,
    slots,
    storage,
    untouched,
)


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
