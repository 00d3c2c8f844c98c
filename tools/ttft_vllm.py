"""One process of flashkv-bench ttft: vLLM, alone or with one way to keep its KV.

Sides and their sources: "alone" (computed), "flashkv" (FlashKVConnector), "flashkv tier"
(FlashKVTier below vLLM's host memory), "fs" (vLLM's own tier there, and "host memory": the tier
above it).

Invariants
  - before each answer vLLM's prefix cache is emptied, before one from a disk its host memory too;
    loads of a tier are counted, so that an answer comes from where its source's name says;
  - on a CPU vLLM has no copy worker for its offloading: the tests' one does that (vllm_cpu_spec),
    alike for both tiers and host memory.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

from .ttft_protocol import Answer, SideError, serve

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",  # a prompt as long as the model's context, and a token
    DO_NOT_TRACK="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

GRANULE: Final = 64
SETTLE_S: Final = 60.0
GIB: Final = 1 << 30


class VllmSide:
    """See ttft_protocol.Side."""

    granule = GRANULE

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        longest = max(map(len, settings["prompts"].values()))
        self.kv_bytes = settings["bytes_per_token"] * longest
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-3 * self.kv_bytes // (2 * GIB)))
        import torch
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        torch.set_num_threads(settings["threads"])
        given = self.transfer()
        self.llm = LLM(
            model=settings["model"],
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            max_model_len=longest + GRANULE,
            block_size=GRANULE,
            enforce_eager=True,
            max_num_seqs=2,
            max_num_batched_tokens=2048,
            enable_prefix_caching=given is not None,
            distributed_executor_backend="uni",
            kv_transfer_config=KVTransferConfig(**given) if given else None,
        )
        self.sampling = SamplingParams(
            temperature=0, max_tokens=1, detokenize=False, ignore_eos=True
        )
        self.tier = self._tier()
        self.loads = 0
        if self.tier is not None:
            self._count_loads(self.tier)
        self._ask(next(iter(settings["prompts"].values()))[:GRANULE])  # the first use is slow

    def transfer(self) -> dict[str, Any] | None:
        """KVTransferConfig's fields."""
        side, folder = self.settings["side"], self.settings["folder"]
        ours = {"path": folder, "capacity": self.settings["capacity"]}
        if side == "flashkv":
            return {
                "kv_connector": "FlashKVConnector",
                "kv_connector_module_path": "flashkv.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": ours,
            }
        if side == "flashkv tier":
            tier = {"type": "FlashKVTier", "module_path": "flashkv.connectors.vllm", **ours}
        elif side == "fs":
            tier = {"type": "fs", "root_dir": folder}
        else:
            return None
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "vllm_cpu_spec",
                "block_size": GRANULE,
                "cpu_bytes_to_use": 5 * self.kv_bytes // 4 + (64 << 20),
                "secondary_tiers": [tier],
            },
        }

    def facts(self) -> dict[str, Any]:
        import vllm

        config = self.llm.llm_engine.vllm_config
        return {
            "version": vllm.__version__,
            "granule": self.granule,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "direct_io": getattr(self.tier, "_use_o_direct", None),
        }

    def answer(self, tokens: list[int], source: str) -> Answer:
        from_disk = source in ("flashkv tier", "fs")
        self.empty(reset_connector=from_disk)
        self.loads = 0
        answer = self._ask(tokens)
        if from_disk != (self.loads > 0) and source != "fill" and self.tier is not None:
            raise SideError(f"{source}: the tier was asked for KV {self.loads} times")
        return answer

    def empty(self, **how: Any) -> None:
        """Empties vLLM's prefix cache. Refused while blocks are stored, as its steps find out."""
        deadline = time.monotonic() + SETTLE_S
        while not self.llm.reset_prefix_cache(**how):
            if time.monotonic() > deadline:
                raise SideError("vLLM did not empty its prefix cache")
            self.llm.llm_engine.step()
            time.sleep(0.01)

    def settle(self) -> None:
        """Blocks are stored by the steps that follow: one more of these, until nothing is due."""
        deadline = time.monotonic() + SETTLE_S
        self._ask([7] * (GRANULE // 2))
        while self.tier is not None and self.tier.has_pending_work():
            if time.monotonic() > deadline:
                raise SideError(f"the tier had still work to do after {SETTLE_S:.0f} s")
            self.llm.llm_engine.step()
            time.sleep(0.01)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def _ask(self, tokens: list[int]) -> Answer:
        began = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], self.sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        return Answer(seconds, int(output.outputs[0].token_ids[0]), output.num_cached_tokens or 0)

    def _tier(self) -> Any:
        """The tier below the host memory, where there is one."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        half = getattr(scheduler.connector, "connector_scheduler", None)
        tiers = getattr(getattr(half, "manager", None), "secondary_tiers", None)
        return tiers[0] if tiers else None

    def _count_loads(self, tier: Any) -> None:
        submit = tier.submit_load

        def counting(job: Any) -> None:
            self.loads += 1
            submit(job)

        tier.submit_load = counting


if __name__ == "__main__":
    serve(VllmSide)
