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
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sglang_checks_pools
import sglang_checks_store
import sglang_pools as pools  # first: it puts the stand-ins in place
import torch
from sglang_pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    MODEL,
    PAGE,
    PAGES,
    ROWS,
    SEEDS,
    filled,
    holds,
    keys,
    slots,
    storage,
    stored,
    untouched,
    wait_until,
)

from flashkv.connectors import sglang_identity
from flashkv.connectors.sglang_identity import Engine
from flashkv.errors import FlashKVError


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
    ranks = [pools.bind(path, pool, tp_rank=rank, tp_size=2, extra=extra) for rank in (0, 1)]
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


def check_ranks_have_their_parts(path: Path) -> None:
    """Each rank has a store and a part of its own; a rank's part is that of the heads it holds."""
    ranks = [
        pools.bind(path, filled(pools.mha_pool("layer_first", heads=2)), **changes)
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


def main() -> None:
    modules = (globals(), vars(sglang_checks_pools), vars(sglang_checks_store))
    checks = {
        name: work
        for content in modules
        for name, work in content.items()
        if name.startswith("check_")
    }
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
