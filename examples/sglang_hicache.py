"""SGLang with flashkv behind its hierarchical cache: a prompt is computed once, then restored, also
by an engine that was started anew.

    python examples/sglang_hicache.py [MODEL] [FOLDER]

MODEL: a folder; without one a tiny random model is made. FOLDER: of the store. On a machine without
a GPU it runs with the stand-ins of tests/engines/sglang_stubs (see there).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    STUBS = Path(__file__).resolve().parent.parent / "tests" / "engines" / "sglang_stubs"
    sys.path.insert(0, str(STUBS))
    os.environ["PYTHONPATH"] = os.pathsep.join((str(STUBS), os.environ.get("PYTHONPATH", "")))
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGLANG_CPU_OMP_THREADS_BIND="0")
    import cpu_transfers

    cpu_transfers.install()  # here: SGLang's own processes import this file


def engine(model: str, folder: str) -> Any:
    """An engine that keeps its KV cache in a store in `folder`."""
    import sglang

    here: dict[str, Any] = {}
    if ON_CPU:
        here = {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "max_total_tokens": 8192,
        }
    return sglang.Engine(
        model_path=model,
        skip_tokenizer_init=True,
        grammar_backend="none",
        page_size=64,
        enable_hierarchical_cache=True,
        hicache_size=1,
        hicache_write_policy="write_through",
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(
            {
                "backend_name": "flashkv",
                "module_path": "flashkv.connectors.sglang",
                "class_name": "FlashKVStorage",
                "interface_v1": 1,
                "path": folder,
                "capacity": "4GiB",
            }
        ),
        log_level="error",
        **here,
    )


def tiny_model() -> str:
    """Folder of a random Llama."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
        )
    )
    for weight in model.parameters():
        if weight.ndim == 2:  # wide enough that the answer depends on the whole prompt
            torch.nn.init.normal_(weight, std=0.25)
    folder = tempfile.mkdtemp(prefix="flashkv-example-model-")
    model.save_pretrained(folder)
    return folder


def main() -> None:
    given = sys.argv[1:]
    model = given[0] if given else tiny_model()
    folder = given[1] if len(given) > 1 else tempfile.mkdtemp(prefix="flashkv-example-")
    prompt = [(number * 7919) % 500 + 2 for number in range(2000)]
    said = []
    for run in range(2):
        running = engine(model, folder)
        begun = time.perf_counter()
        answer = running.generate(
            input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 8}
        )
        seconds = time.perf_counter() - begun
        time.sleep(2)  # pages are stored in the background
        running.shutdown()
        said.append(answer["output_ids"])
        restored = answer["meta_info"]["cached_tokens"]
        print(f"run {run}: {restored} of {len(prompt)} tokens restored,")
        print(f"       answer after {seconds:.3f} s: {said[-1]}")
    assert said[0] == said[1]


if __name__ == "__main__":
    main()
