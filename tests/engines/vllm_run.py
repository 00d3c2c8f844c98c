"""vLLM on a tiny model, with flashkv's connector or alone: a list of steps in, results out.

usage: vllm_run.py MODEL JSON

The JSON is an object: "store" (folder, or null for vLLM alone), "settings" (of the connector),
"engine" (arguments of LLM), "transfer" (of KVTransferConfig), "steps": a list of
  {"do": "generate", "prompts": [{"ids": [...], "salt": "..."}], "tokens": 16, "keep": false}
      all prompts at once; unless "keep", vLLM's own prefix cache is emptied first
  {"do": "fail", "rows": [3], "times": 1}   the next so many gets find these blocks unreadable
  {"do": "damage"}                          flips a bit in every fourth page of the store's segments
  {"do": "wait", "seconds": 3}
  {"do": "report"}                          what the connector's halves say
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)
PAGE = 4096


def engine(model: str, run: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 4096,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
        **run.get("engine", {}),
    }
    if run["store"] is not None:
        transfer = {
            "kv_connector": "FlashKVConnector",
            "kv_connector_module_path": "flashkv.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            **run.get("transfer", {}),
        }
        settings = {"path": run["store"], "capacity": "256MiB", **run.get("settings", {})}
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector_extra_config=settings, **transfer
        )
    return LLM(model=model, **arguments)


class Steps:
    """Carries out steps with an engine."""

    def __init__(self, llm: Any, store: str | None) -> None:
        self.llm, self.store = llm, store

    def generate(self, step: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        emptied = True if step.get("keep") else self.llm.reset_prefix_cache()
        prompts = [
            {"prompt_token_ids": prompt["ids"], **salt_of(prompt)} for prompt in step["prompts"]
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=step.get("tokens", 16), detokenize=False, ignore_eos=True
        )
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return {
            "emptied": bool(emptied),
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def fail(self, step: dict[str, Any]) -> dict[str, Any]:
        """Blocks of the next gets stay unread: their memory keeps what it held."""
        import numpy as np

        from flashkv.errors import BatchResult, BlockStatus
        from flashkv.getting import PendingGet
        from flashkv.namespace import Namespace

        ask, end, left = Namespace.ask, PendingGet.end, [step.get("times", 1)]
        failing: list[Any] = []

        def asked(self: Any, keys: Any, out: Any, options: Any) -> Any:
            if left[0] <= 0:
                return ask(self, keys, out, options)
            left[0] -= 1
            keys = np.array(keys)
            keys[[row for row in step["rows"] if row < len(keys)]] ^= 0xFF  # keys of nothing
            failing.append(ask(self, keys, out, options))
            return failing[-1]

        def ended(self: Any) -> Any:
            result = end(self)
            if not any(self._asked is one for one in failing):
                return result
            statuses = result.statuses.copy()
            statuses[[row for row in step["rows"] if row < len(statuses)]] = BlockStatus.IO_ERROR
            return BatchResult(statuses)

        Namespace.ask = asked  # type: ignore[method-assign]
        PendingGet.end = ended  # type: ignore[method-assign]
        return {}

    def damage(self, _: dict[str, Any]) -> dict[str, Any]:
        assert self.store is not None
        return {"flipped": flip_pages(Path(self.store))}

    def wait(self, step: dict[str, Any]) -> dict[str, Any]:
        time.sleep(step["seconds"])
        return {}

    def report(self, _: dict[str, Any]) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        core = self.llm.llm_engine.engine_core.engine_core
        return {
            "scheduler": core.scheduler.connector.report(),
            "worker": get_kv_transfer_group().report() if has_kv_transfer_group() else None,
            "preemptions": self.metric("vllm:num_preemptions"),
            "drafts": self.metric("vllm:spec_decode_num_draft_tokens"),
        }

    def metric(self, name: str) -> float:
        found = [metric for metric in self.llm.get_metrics() if metric.name == name]
        return sum(getattr(metric, "value", 0) for metric in found)


def salt_of(prompt: dict[str, Any]) -> dict[str, str]:
    return {"cache_salt": prompt["salt"]} if prompt.get("salt") else {}


def flip_pages(store: Path) -> int:
    """Flips a bit in every fourth page of all segments, from the second page on."""
    flipped = 0
    for path in sorted(store.glob("shards/*/segments/*.seg")):
        with path.open("r+b") as file:
            for place in range(PAGE + 100, path.stat().st_size, 4 * PAGE):
                file.seek(place)
                old = file.read(1)
                file.seek(place)
                file.write(bytes([old[0] ^ 1]))
                flipped += 1
    return flipped


def main() -> None:
    run = json.loads(sys.argv[2])
    llm = engine(sys.argv[1], run)
    steps = Steps(llm, run["store"])
    results = [getattr(steps, step["do"])(step) for step in run["steps"]]
    llm.llm_engine.engine_core.shutdown()
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
