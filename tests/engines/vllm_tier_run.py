"""vLLM on a tiny model with flashkv as a tier of its offloading, or alone.

usage: vllm_tier_run.py MODEL JSON: {"store": folder or null, "tier": settings, "prompts": [[ids]],
"rounds": n, "chunk": tokens, "cpu_bytes": n, "engine": {}, "fail": n}

Each round empties vLLM's own prefix cache; the primary tier is too small to keep a prompt where
`cpu_bytes` says so. fail: so many loads find half of their blocks gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)


def offloading(run: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    tier = {
        "type": "FlashKVTier",
        "module_path": "flashkv.connectors.vllm",
        "path": run["store"],
        "capacity": "64MiB",
        "options": {"segment_bytes": "4MiB", "free_floor_bytes": 0},
        **run.get("tier", {}),
    }
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "vllm_cpu_spec",
            "block_size": run.get("chunk", 128),
            "cpu_bytes_to_use": run.get("cpu_bytes", 16 << 20),
            "secondary_tiers": [tier],
        },
    )


def tier_of(llm: Any) -> Any:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler.connector.connector_scheduler.manager.secondary_tiers[0]


def fail_loads(times: int) -> None:
    """The next gets find every other of their blocks missing: its memory keeps what it held."""
    import numpy as np

    from flashkv.errors import BatchResult, BlockStatus
    from flashkv.namespace import Namespace

    original, left = Namespace.get, [times]

    def get(self: Any, keys: Any, out: Any, **options: Any) -> Any:
        if left[0] <= 0:
            return original(self, keys, out, **options)
        left[0] -= 1
        wrong = [bytes(len(key)) if row % 2 else key for row, key in enumerate(keys)]
        statuses = original(self, wrong, out, **options).statuses.copy()
        statuses[np.arange(len(keys)) % 2 == 1] = BlockStatus.IO_ERROR
        return BatchResult(statuses)

    Namespace.get = get  # type: ignore[method-assign]


def main() -> None:
    model, run = sys.argv[1], json.loads(sys.argv[2])
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": True,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        **run.get("engine", {}),
    }
    if run["store"] is not None:
        arguments["kv_transfer_config"] = offloading(run)
    llm = LLM(model=model, **arguments)
    if run.get("fail"):
        fail_loads(run["fail"])
    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    rounds = []
    for _ in range(run.get("rounds", 1)):
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        )
    result: dict[str, Any] = {"rounds": rounds}
    if run["store"] is not None:
        tier = tier_of(llm)
        deadline = time.monotonic() + 20
        while tier.has_pending_work() and time.monotonic() < deadline:
            llm.llm_engine.step()
            time.sleep(0.01)
        tier._figures_at = 0.0
        stats = tier.get_stats()
        result["metrics"] = stats.reduce() if stats is not None else {}
        result["report"] = tier.report()
    llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
