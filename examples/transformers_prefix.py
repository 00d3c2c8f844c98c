"""transformers with flashkv: a prompt is computed once, then restored by whoever has its beginning.

    python examples/transformers_prefix.py [MODEL] [FOLDER]

MODEL: a folder or a name on the hub; without one a tiny random model is made. FOLDER: of the store.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
import transformers

import flashkv
from flashkv.connectors.transformers import PrefixCache, kv_geometry


def tiny_model() -> Any:
    torch.manual_seed(0)
    settings = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, **heads))


@torch.inference_mode()
def main() -> None:
    given = sys.argv[1:]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(given[0]) if given else tiny_model()
    model = loaded.eval()
    folder = given[1] if len(given) > 1 else tempfile.mkdtemp(prefix="flashkv-example-")
    prompt = torch.arange(2, 2002)[None] * 7919 % (model.config.vocab_size - 2) + 2
    texts = []
    for run in range(2):
        # A store is closed and opened again, as by another process.
        with flashkv.open(folder, capacity="1GiB", geometry=kv_geometry(model)) as store:
            prefix = PrefixCache(store, model, salt=b"tenant 1")
            begin = time.perf_counter()
            done = prefix.prefill(prompt, logits_to_keep=1)
            seconds = time.perf_counter() - begin
            tokens = model.generate(
                prompt, cache=prefix.restore(prompt)[0], max_new_tokens=16, do_sample=False
            )
            texts.append(tokens[0, prompt.shape[1] :].tolist())
            print(f"run {run}: {done.restored} of {prompt.shape[1]} tokens restored,")
            print(f"       first token after {seconds:.3f} s: {texts[-1][:8]} ...")
    assert texts[0] == texts[1]


if __name__ == "__main__":
    main()
