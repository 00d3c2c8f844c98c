"""FlashKVTier without an engine: what its calls promise vLLM's scheduler. Needs vLLM's package.

usage: vllm_tier_alone.py MODEL FOLDER; says which checks passed, by name.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from flashkv.connectors import vllm_tier
from flashkv.connectors.vllm import FlashKVTier
from flashkv.errors import FlashKVError, IdentityError, OptionsError

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 32, 4
PAGE = 2 * HEADS * DIM * BLOCK * 4
ROW = LAYERS * PAGE * BLOCKS
SMALL = {"capacity": "64MiB", "options": {"segment_bytes": "4MiB", "free_floor_bytes": 0}}
CONTEXT = ReqContext(req_id="r")


def spec_of(groups: int = 1, world: int = 1, layout: str = "LBHNC") -> Any:
    names = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
    share = LAYERS // groups
    config = OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(BLOCK, tuple(names[n * share : (n + 1) * share]), n)
            for n in range(groups)
        ),
        worker_kv_bytes_per_block=LAYERS * PAGE,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig(sys.argv[1], "float32"),
        cache=OffloadingCacheConfig(BLOCK, BLOCKS),
        parallel=OffloadingParallelConfig(
            rank=0, world_size=world, tp_size=world, pp_size=1, pcp_size=1, dcp_size=1,
            data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout=layout,
    )  # fmt: skip
    return SimpleNamespace(config=config, blocks_per_chunk=BLOCKS)


def configs() -> tuple[Any, Any]:
    """vLLM's own configuration of the model, and of its KV cache as the CPU backend has it."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    arguments = EngineArgs(
        model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=2048
    )
    vllm_config = arguments.create_engine_config()
    kind = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
    )
    names = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
    group = SimpleNamespace(layer_names=names, kv_cache_spec=kind)
    return vllm_config, SimpleNamespace(kv_cache_groups=[group])


class Bench:
    """A tier over rows of its own."""

    def __init__(
        self, path: Path, both: tuple[Any, Any], spec: Any = None, **settings: Any
    ) -> None:
        self.rows = np.zeros((16, ROW), np.uint8)
        self.jobs = 0
        vllm_config, kv_cache_config = both  # noqa: RUF059  (where the tier looks for them)
        self.tier = FlashKVTier(
            spec or spec_of(), memoryview(self.rows), "t", None, path=str(path),
            **{**SMALL, **settings},
        )  # fmt: skip

    def job(self, keys: list[bytes], chunks: list[int], *, load: bool) -> int:
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.array(chunks, np.int32), load, CONTEXT)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.jobs

    def results(self, count: int) -> dict[int, Any]:
        done: dict[int, Any] = {}
        deadline = time.monotonic() + 30
        while len(done) < count:
            assert time.monotonic() < deadline
            for result in self.tier.get_finished_jobs():
                assert result.job_id not in done
                done[result.job_id] = result
        return done

    def store(self, keys: list[bytes], seed: int = 0) -> None:
        for row in range(len(keys)):
            self.rows[row] = np.random.default_rng(seed + row).integers(0, 256, ROW, np.uint8)
        number = self.job(keys, list(range(len(keys))), load=False)
        assert self.results(1)[number].success


def names(count: int, group: int = 0) -> list[bytes]:
    return [bytes([n]) * 32 + group.to_bytes(4, "big") for n in range(count)]


def check_round_trip(path: Path, both: Any) -> None:
    bench = Bench(path, both)
    assert bench.tier._rows.reason == "", bench.tier._rows.reason
    assert bench.tier.lookup(names(1)[0], CONTEXT) is LookupResult.MISS
    bench.store(names(4))
    assert bench.tier.lookup(names(1)[0], CONTEXT) is LookupResult.HIT
    before = bench.rows[:4].copy()
    number = bench.job(names(4), [9, 8, 7, 6], load=True)
    result = bench.results(1)[number]
    assert result.success
    assert result.transfer_bytes == 4 * ROW
    assert np.array_equal(bench.rows[[9, 8, 7, 6]], before)
    bench.tier.shutdown()
    bench.tier.shutdown()


def check_groups_are_apart(path: Path, both: Any) -> None:
    bench = Bench(path, both, spec_of(groups=2))
    assert "2 KV groups" in bench.tier._rows.reason
    bench.store(names(2, group=0))
    assert bench.tier.lookup(names(1, group=1)[0], CONTEXT) is LookupResult.MISS
    bench.store(names(2, group=1), seed=50)
    bench.rows[:] = 0
    bench.job([*names(2, 0), *names(2, 1)], [4, 5, 6, 7], load=True)
    assert next(iter(bench.results(1).values())).success
    expected = [
        np.random.default_rng(seed).integers(0, 256, ROW, np.uint8) for seed in (0, 1, 50, 51)
    ]
    assert all(np.array_equal(bench.rows[4 + n], expected[n]) for n in range(4))
    bench.tier.shutdown()


def check_other_setups_do_not_meet(path: Path, both: Any) -> None:
    bench = Bench(path, both)
    bench.store(names(1))
    bench.tier.shutdown()
    for spec in (
        spec_of(groups=2),
        spec_of(world=2),
        spec_of(layout="LBNHC"),
        spec_of(layout="BLHNC"),
    ):
        other = Bench(path, both, spec)
        assert other.tier.lookup(names(1)[0], CONTEXT) is LookupResult.MISS
        other.tier.shutdown()
    salted = Bench(path, both, salt="tenant")
    assert salted.tier.lookup(names(1)[0], CONTEXT) is LookupResult.MISS
    salted.tier.shutdown()


def check_partial_loads(path: Path, both: Any) -> None:
    bench = Bench(path, both)
    bench.store(names(2))
    number = bench.job([*names(2), names(3)[2]], [4, 5, 6], load=True)
    result = bench.results(1)[number]
    assert not result.success
    assert set(result.successful_keys) == set(names(2))
    number = bench.job([names(3)[2]], [6], load=True)
    result = bench.results(1)[number]
    assert not result.success
    assert result.successful_keys is None
    assert bench.tier.report()["blocks"]["vllm:flashkv_failed_loads"] == 2
    bench.tier.shutdown()


def check_what_failed_is_a_miss_until_stored(path: Path, both: Any) -> None:
    """A block of another length under the key: found, and never to be loaded."""
    bench = Bench(path, both)
    key = names(1)[0]
    short = np.ones((1, LAYERS, 2, HEADS, 8, DIM), np.float32)
    assert bench.tier._namespace.put([key], short).all_ok
    assert bench.tier.lookup(key, CONTEXT) is LookupResult.HIT
    bench.job([key], [0], load=True)
    assert not next(iter(bench.results(1).values())).success
    assert bench.tier.lookup(key, CONTEXT) is LookupResult.MISS
    bench.store([key], seed=7)
    assert bench.tier.lookup(key, CONTEXT) is LookupResult.HIT
    bench.job([key], [3], load=True)
    assert next(iter(bench.results(1).values())).success
    assert np.array_equal(bench.rows[3], bench.rows[0])
    bench.tier.shutdown()


def check_nothing_waits_for_the_store(path: Path, both: Any) -> None:
    """While another thread holds the store's lock, the scheduler goes on."""
    bench = Bench(path, both)
    bench.store(names(2))
    store = bench.tier._shared.store
    with store.writer_lock:
        began = time.monotonic()
        for _ in range(20):
            bench.job(names(3), [1, 2, 3], load=False)
            assert bench.tier.lookup(names(1)[0], CONTEXT) is LookupResult.HIT
            assert not list(bench.tier.get_finished_jobs())
        assert bench.tier.has_pending_work()
        assert time.monotonic() - began < 1.0
        bench.job(names(2), [4, 5], load=True)
        loaded = bench.results(1)
        assert next(iter(loaded.values())).success, "a load waits for no put"
    bench.tier.drain_jobs()
    assert len(list(bench.tier.get_finished_jobs())) == 20
    assert not bench.tier.has_pending_work()
    bench.tier.shutdown()


def check_too_many_stores_are_refused(path: Path, both: Any) -> None:
    bench = Bench(path, both)
    bench.store(names(2))
    with bench.tier._shared.store.writer_lock:
        for _ in range(vllm_tier.STORES_MAX + 5):
            bench.job(names(1), [1], load=False)
        refused = bench.results(5)
        assert not any(result.success for result in refused.values())
        bench.job(names(2), [4, 5], load=True)
        assert next(iter(bench.results(1).values())).success, "loads have a queue of their own"
    bench.tier.drain_jobs()
    assert all(result.success for result in bench.results(vllm_tier.STORES_MAX).values())
    report = bench.tier.report()
    assert report["events"] == {"store_refused": 5}
    assert report["blocks"]["vllm:flashkv_refused_stores"] == 5
    bench.tier.shutdown()


def check_rows_that_are_not_there(path: Path, both: Any) -> None:
    bench = Bench(path, both)
    bench.job(names(1), [16], load=False)
    assert not next(iter(bench.results(1).values())).success
    assert bench.tier.report()["events"] == {"store_failed": 1}
    bench.tier.shutdown()


def check_metrics(path: Path, both: Any) -> None:
    bench = Bench(path, both)
    bench.store(names(2))
    bench.job([names(3)[2]], [6], load=True)
    bench.results(1)
    bench.tier._figures_at = 0.0
    told = bench.tier.get_stats().reduce()
    assert told["vllm:flashkv_blocks:('t',)"] == 2
    assert told["vllm:flashkv_failed_loads:('t',)"] == 1
    assert bench.tier.get_stats() is None
    known = FlashKVTier.build_metric_definitions({})
    assert all(name.split(":('")[0] in known for name in told)
    bench.tier.shutdown()


def refusal(make: Callable[[], Any]) -> Exception | None:
    try:
        make()
    except FlashKVError as error:
        return error
    return None


def check_bad_settings(path: Path, both: Any) -> None:
    for settings in ({"capcity": 1}, {"options": {"no": 1}}):
        told = refusal(lambda settings=settings: Bench(path, both, **settings))
        assert isinstance(told, OptionsError), told
    view = memoryview(np.zeros((2, ROW), np.uint8))
    told = refusal(lambda: FlashKVTier(spec_of(), view, "t", None, path=str(path)))
    assert isinstance(told, IdentityError), told
    assert "configuration" in str(told)


def verdict(check: Callable[[Path, Any], None], path: Path, both: Any) -> str:
    try:
        check(path, both)
    except Exception:  # noqa: BLE001  (told, and the next one goes on)
        return traceback.format_exc()
    return "passed"


def main() -> None:
    both = configs()
    checks = inspect.getmembers(sys.modules[__name__], inspect.isfunction)
    verdicts = {
        name: verdict(check, Path(sys.argv[2]) / name, both)
        for name, check in checks
        if name.startswith("check_")
    }
    print("RESULT " + json.dumps(verdicts), flush=True)


if __name__ == "__main__":
    main()
