"""One process of flashkv-bench ttft: SGLang, alone or with a storage behind its hierarchical cache.

Sides and their sources: "alone" (computed), "flashkv", "file" (SGLang's own storage, and "host
memory": the host pool of its hierarchical cache).

Invariants
  - before each answer the device's cache is emptied, before one from a disk the host's too;
  - on a CPU SGLang lacks kernels for its copies, and its attention computes too much: the tests'
    stand-ins (sglang_stubs) and one of this file do these, alike for every source. SGLang's own
    processes import this file, which puts them in place there.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

from .ttft_protocol import Answer, SideError, serve

GRANULE: Final = 64
SETTLE_S: Final = 60.0


def _install() -> None:
    """What an engine's process needs before the engine is there."""
    import cpu_transfers
    from sglang.srt.managers.scheduler import Scheduler

    cpu_transfers.install()
    _compute_new_tokens_only()
    Scheduler.bench_empty_device = _empty_device
    Scheduler.bench_check_stored = _check_stored


def _compute_new_tokens_only() -> None:
    """SGLang's attention in plain torch computes that of a restored prefix again and drops it: it
    would be nearly all of what is timed here.
    """
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def extend(
        _backend: Any,
        query: Any,
        output: Any,
        k_cache: Any,
        v_cache: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        extend_prefix_lens: Any,
        extend_seq_lens: Any,
        encoder_lens: Any = None,
        **more: Any,
    ) -> Any:
        """As the original: query and output are [token, head, element]."""
        if not more.get("causal") or encoder_lens is not None:
            raise NotImplementedError("a model of this kind has no stand-in here")
        if (more.get("sliding_window_size") or -1) > -1:
            raise NotImplementedError("sliding windows have no stand-in here")
        first = 0
        for row in range(len(seq_lens)):
            new, length = int(extend_seq_lens[row]), int(seq_lens[row])
            before = int(extend_prefix_lens[row])
            slots = req_to_token[req_pool_indices[row], :length]
            mask = torch.ones(new, length, dtype=torch.bool).tril(before) if before else None
            part = torch.nn.functional.scaled_dot_product_attention(
                query[first : first + new].movedim(0, 1)[None],
                k_cache[slots].movedim(0, 1)[None],
                v_cache[slots].movedim(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=more.get("scaling"),
                enable_gqa=more.get("enable_gqa", False),
            )
            output[first : first + new] = part[0].movedim(1, 0)
            first += new
        return output

    TorchNativeAttnBackend._run_sdpa_forward_extend = extend


def _empty_device(scheduler: Any) -> None:
    """Drops what the device's pool keeps of finished requests; the host's pool keeps it."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = scheduler.tree_cache
    cache.evict(EvictParams(num_tokens=cache.evictable_size()))
    if cache.evictable_size():
        raise RuntimeError(f"{cache.evictable_size()} tokens stayed on the device")


def _check_stored(scheduler: Any) -> None:
    """Raises while pages are on their way to the host or the storage."""
    cache = scheduler.tree_cache
    if cache.ongoing_write_through or cache.ongoing_backup:
        raise RuntimeError("pages are being stored")


_install()


class SglangSide:
    """See ttft_protocol.Side."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import sglang

        self.settings = settings
        self.longest = max(map(len, settings["prompts"].values()))
        self.stores = settings["side"] != "alone"
        self.engine = sglang.Engine(**self.arguments())
        self._ask(next(iter(settings["prompts"].values()))[:GRANULE])  # the first use is slow

    def arguments(self) -> dict[str, Any]:
        """The engine's."""
        settings = self.settings
        given: dict[str, Any] = {
            "model_path": settings["model"],
            "skip_tokenizer_init": True,
            "dtype": settings["dtype"],
            "device": "cpu",
            "attention_backend": "torch_native",
            "grammar_backend": "none",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "skip_server_warmup": True,
            "max_total_tokens": self.longest + 4 * GRANULE,
            "context_length": self.longest + 2 * GRANULE,
            "page_size": GRANULE,
            "chunked_prefill_size": 2048,
            # Several engines wait in turn here: none may spin meanwhile.
            "sleep_on_idle": True,
            "disable_radix_cache": not self.stores,
            "log_level": "error",
        }
        if self.stores:
            given |= self._storage()
        return given

    def _storage(self) -> dict[str, Any]:
        settings = self.settings
        if settings["side"] == "flashkv":
            kind, extra = "dynamic", {
                "backend_name": "flashkv",
                "module_path": "flashkv.connectors.sglang",
                "class_name": "FlashKVStorage",
                "interface_v1": 1,
                "path": settings["folder"],
                "capacity": settings["capacity"],
            }  # fmt: skip
        else:
            kind, extra = "file", {"file_storage_path": settings["folder"]}
        tokens = self.longest + 4 * GRANULE
        return {
            "enable_hierarchical_cache": True,
            "hicache_size": max(1, -(-5 * tokens * settings["bytes_per_token"] // (4 * 10**9))),
            "hicache_write_policy": "write_through",
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            "hicache_storage_backend": kind,
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(extra),
        }

    def facts(self) -> dict[str, Any]:
        import sglang

        return {
            "version": sglang.__version__,
            "granule": GRANULE,
            "dtype": self.settings["dtype"],
            "direct_io": False if self.settings["side"] == "file" else None,
        }

    def answer(self, tokens: list[int], source: str) -> Answer:
        if source == "host memory":
            self.engine.collective_rpc("bench_empty_device")
        elif self.stores:
            self._empty_all()
        return self._ask(tokens)

    def _empty_all(self) -> None:
        """Refused while pages are stored, which happens behind the requests."""
        deadline = time.monotonic() + SETTLE_S
        while not self.engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise SideError("SGLang did not empty its caches")
            time.sleep(0.05)

    def settle(self) -> None:
        """Pages are stored behind the requests, and only while the scheduler turns."""
        if not self.stores:
            return
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                self.engine.collective_rpc("bench_check_stored")
                break
            except AssertionError as waits:
                if time.monotonic() > deadline:
                    raise SideError(f"after {SETTLE_S:.0f} s: {waits}") from None
                time.sleep(0.05)
        time.sleep(1.0)  # flashkv makes them durable half a second later

    def close(self) -> None:
        self.engine.shutdown()

    def _ask(self, tokens: list[int]) -> Answer:
        began = time.perf_counter()
        said = self.engine.generate(
            input_ids=tokens,
            sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        )
        seconds = time.perf_counter() - began
        return Answer(seconds, int(said["output_ids"][0]), int(said["meta_info"]["cached_tokens"]))


if __name__ == "__main__":
    serve(SglangSide)
