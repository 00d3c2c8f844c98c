"""flashkv-bench peers: vLLM's `fs` tier below its offloading. Runs in vLLM's environment.

Invariant: its own manager, over memory as its primary tier is; a block is a job, so that its
threads work on all of a batch at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from .bench_sets import page_aligned
from .peers_blocks import LAYERS, tokens_of
from .peers_protocol import Blocks, Facts, FolderPeer, Peer, PeerError, Plan

os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR")

ANSWER_S: Final = 120.0


class FsTier(FolderPeer):
    """See peers_protocol.Peer."""

    name = "vllm-fs"
    facts = Facts(durable=False, durable_by="O_DIRECT and a rename; nothing is synced",
                  direct_io=True)  # fmt: skip

    def __init__(self) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._manager_class: Any = FileSystemTierManager
        self._job_class: Any = TransferJob
        self._context = ReqContext(req_id="flashkv-bench")
        self._jobs = 0

    def versions(self) -> dict[str, str]:
        import vllm

        return {"vllm": str(vllm.__version__)}

    def open(self, folder: Path, plan: Plan) -> None:
        super().open(folder, plan)
        self._rows = page_aligned(2 * plan.batch * plan.block_bytes).reshape(2 * plan.batch, -1)
        self._tier = self._manager_class(
            _spec(plan),
            self._rows.data,
            "fs",
            root_dir=str(folder),
            n_read_threads=plan.batch,
            n_write_threads=plan.batch,
        )

    def stage(self, blocks: Blocks) -> None:
        self._rows[: len(blocks)] = blocks

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        if not all(self._run(keys, 0, load=False)):
            raise PeerError(f"some of {len(blocks)} blocks were not stored")

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        first = self.plan.batch
        done = self._run(keys, first, load=True)
        return [self._rows[first + i] if ok else None for i, ok in enumerate(done)]

    def close(self) -> None:
        self._tier.shutdown()

    def _run(self, keys: Sequence[bytes], first: int, *, load: bool) -> list[bool]:
        """A job a block, from or into the rows from `first` on; whether each succeeded."""
        submit = self._tier.submit_load if load else self._tier.submit_store
        begin = self._jobs
        for i, key in enumerate(keys):
            # Its keys end with the number of a KV group.
            rows = np.array([first + i], np.int32)
            submit(self._job_class(begin + i, [key + bytes(4)], rows, load, self._context))
        self._jobs += len(keys)
        done: dict[int, bool] = {}
        deadline = time.monotonic() + ANSWER_S
        while len(done) < len(keys):
            self._tier.drain_jobs()
            done.update(
                (result.job_id, result.success) for result in self._tier.get_finished_jobs()
            )
            if time.monotonic() > deadline:
                raise PeerError(f"no answer in {ANSWER_S:.0f} s")
        return [done[begin + i] for i in range(len(keys))]


def _spec(plan: Plan) -> Any:
    """What vLLM's own configuration of a model with such blocks comes to, as far as fs reads it."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    tokens = tokens_of(plan.block_bytes)
    layers = tuple(f"model.layers.{n}.self_attn.attn" for n in range(LAYERS))
    configuration = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens, layers, 0),),
        worker_kv_bytes_per_block=plan.block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="flashkv-bench",
        model=OffloadingModelConfig("flashkv-bench", "bfloat16"),
        cache=OffloadingCacheConfig(tokens, 1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=configuration, blocks_per_chunk=1)


def make(_variant: str) -> Peer:
    """The peer of this module."""
    return FsTier()
