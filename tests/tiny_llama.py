"""Tiny random Llamas for tests of the transformers connector, and greedy continuations of them.

Needs torch and transformers: import it after pytest.importorskip of both.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import flashkv
from flashkv.connectors.transformers import kv_geometry


def config(**changes):
    values = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "eos_token_id": None,
        "bos_token_id": None,
        **changes,
    }
    return transformers.LlamaConfig(**values)


def make_model(seed=0, dtype=None, **changes):
    """Weights wide enough that greedy text depends on all of the context."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config(**changes))
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.25)
    return model.to(dtype or torch.float32).eval()


def open_store(path: Path, model, kv_dtype=None, **options):
    return flashkv.open(path, capacity="64MiB", geometry=kv_geometry(model, kv_dtype), **options)


def feed(model, ids, cache):
    return int(model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1].argmax())


def go_on(model, ids, cache, count=24):
    """Greedy tokens after `ids`, which are computed on top of the cache."""
    tokens = [feed(model, ids, cache)]
    while len(tokens) < count:
        tokens.append(feed(model, torch.tensor([[tokens[-1]]]), cache))
    return tokens
