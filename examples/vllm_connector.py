"""vLLM with flashkv: a prompt's KV outlives vLLM's own prefix cache, and the process.

    python examples/vllm_connector.py MODEL [STORE]

MODEL is a folder or a name of the hub. Run it twice with a STORE: the second process computes only
the last tokens of the prompt.
"""

from __future__ import annotations

import sys
import tempfile
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    model = sys.argv[1]
    store = sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="flashkv-example-")
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FlashKVConnector",
            kv_connector_module_path="flashkv.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"path": store, "capacity": "1GiB"},
        ),
    )
    vocabulary = llm.model_config.get_vocab_size()
    prompt = [place * 7919 % (vocabulary - 2) + 1 for place in range(1900)]
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    texts = []
    for run in range(2):
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        texts.append(list(output.outputs[0].token_ids))
        print(f"run {run}: {output.num_cached_tokens} of {len(prompt)} tokens restored,")
        print(f"       8 tokens after {seconds:.3f} s: {texts[-1]}")
    assert texts[0] == texts[1]


if __name__ == "__main__":
    main()
