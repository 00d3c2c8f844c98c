"""Runs SGLang on a CPU with a tiny model, with or without flashkv behind its hierarchical cache.

    sglang_run.py '{"model": FOLDER, "prompts": [[ids], ...], "layout": ..., "extra": {...}}'

extra: HiCache's extra configuration, with flashkv's settings; null: the engine alone. Between
prompts the device's and the host's cache are emptied, so that what a request finds cached came from
the storage.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STUBS = Path(__file__).resolve().parent / "sglang_stubs"
sys.path.insert(0, str(STUBS))  # SGLang's own processes inherit the path

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "0")
os.environ["PYTHONPATH"] = os.pathsep.join((str(STUBS), os.environ.get("PYTHONPATH", "")))

import cpu_transfers  # noqa: E402

cpu_transfers.install()  # here as in the scheduler's process, which imports this file


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """The engine's arguments."""
    arguments: dict[str, Any] = {
        "model_path": job["model"],
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": job.get("dtype", "float32"),
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "skip_server_warmup": True,
        "max_total_tokens": 8192,
        "page_size": job.get("page_size", 64),
        "chunked_prefill_size": 2048,
        "log_level": "warning",
    }
    if job.get("extra") is not None:
        arguments |= {
            "enable_hierarchical_cache": True,
            "hicache_size": 1,
            "hicache_write_policy": "write_through",
            "hicache_io_backend": "direct",
            "hicache_mem_layout": job.get("layout", "page_first_direct"),
            "hicache_storage_backend": job.get("backend", "dynamic"),
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps(
                {
                    "backend_name": "flashkv",
                    "module_path": "flashkv.connectors.sglang",
                    "class_name": "FlashKVStorage",
                    **job["extra"],
                }
            ),
        }
    return arguments | job.get("arguments", {})


def main() -> None:
    import sglang

    job = json.loads(sys.argv[1])
    engine = sglang.Engine(**settings(job))
    answers = []
    for prompt in job["prompts"]:
        given = prompt if isinstance(prompt, dict) else {"input_ids": prompt}
        begun = time.monotonic()
        said = engine.generate(
            sampling_params={"temperature": 0, "max_new_tokens": job.get("tokens", 16)}, **given
        )
        meta = said["meta_info"]
        answers.append(
            {
                "tokens": said["output_ids"],
                "cached": meta["cached_tokens"],
                "details": meta.get("cached_tokens_details"),
                "seconds": round(time.monotonic() - begun, 3),
            }
        )
        time.sleep(job.get("settle_s", 1.0))  # write-through goes on in the background
        if job.get("extra") is not None:
            engine.flush_cache()
    engine.shutdown()
    print("RESULT " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
