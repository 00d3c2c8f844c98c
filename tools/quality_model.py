"""A model whose cache is changed: KV of a prefix, and what the next tokens' distributions become.

Invariants
  - the exact run and the one compared with it compute the same tokens in the same pieces, in
    float32, on a cache of bfloat16 numbers: what differs is the cache's numbers alone;
  - the tokens are given (teacher forcing): a wrong guess doesn't change what comes after it;
  - this file imports torch: it is imported where a model is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from flashkv.connectors.transformers import kv_geometry
from flashkv.geometry import KVGeometry

from .bench_sets import BenchError
from .demo_model import load_model, quiet
from .quality_texts import Text

Bits = NDArray[np.uint16]

MEAN, P99, TOP1 = "kl_mean", "kl_p99", "top1"
_FULL: Final = "full_attention"


@dataclass(frozen=True)
class Divergence:
    """kl: nats, of each position; kept: whether the most likely token is the same."""

    kl: NDArray[np.float64]
    kept: NDArray[np.bool_]

    @staticmethod
    def joined(parts: list[Divergence]) -> Divergence:
        return Divergence(
            np.concatenate([part.kl for part in parts]),
            np.concatenate([part.kept for part in parts]),
        )

    def figures(self) -> dict[str, float]:
        return {
            MEAN: float(self.kl.mean()),
            P99: float(np.quantile(self.kl, 0.99)),
            TOP1: float(self.kept.mean()),
        }


class Subject:
    """A causal language model with full attention in all layers.

    prefix     tokens whose KV is stored.
    positions  tokens after them, computed on the stored KV.
    """

    def __init__(self, model: Any, prefix: int, positions: int) -> None:
        kinds = getattr(model.config, "layer_types", None) or [_FULL]
        if set(kinds) != {_FULL}:
            raise BenchError(f"only full attention can be measured, not {sorted(set(kinds))}")
        self.model, self.prefix, self.positions = model, prefix, positions
        self.geometry: KVGeometry = kv_geometry(model, torch.bfloat16)

    @property
    def tokens(self) -> int:
        return self.prefix + self.positions

    def prefill(self, tokens: list[int]) -> Bits:
        """KV of the prefix, as bfloat16's bits: [layer, K|V, head, token, dim]."""
        cache = DynamicCache()
        ids = torch.tensor([tokens[: self.prefix]])
        self.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        joined = torch.stack(layers).to(torch.bfloat16).contiguous()
        return np.asarray(joined.view(torch.int16).numpy().view(np.uint16))

    def go_on(self, tokens: list[int], kv: Bits) -> Any:
        """Log-probabilities of the token after each of the positions: [position, vocabulary]."""
        given = torch.from_numpy(np.ascontiguousarray(kv).view(np.int16)).view(torch.bfloat16)
        cache = DynamicCache()
        for number, (keys, values) in enumerate(given.to(self.model.dtype)):
            cache.update(keys[None], values[None], number)
        ids = torch.tensor([tokens[self.prefix : self.tokens]])
        logits = self.model(input_ids=ids, cache=cache, use_cache=True).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def compare(self, exact: Any, tokens: list[int], kv: Bits) -> Divergence:
        """How far the distributions are with this KV from `exact`, those of go_on()."""
        other = self.go_on(tokens, kv)
        kl = torch.sum(exact.exp() * (exact - other), dim=-1)
        return Divergence(
            kl.double().numpy(), (exact.argmax(dim=-1) == other.argmax(dim=-1)).numpy()
        )


def load_subject(folder: Path, prefix: int, positions: int, threads: int) -> Subject:
    quiet()
    torch.set_num_threads(threads)
    return Subject(load_model(folder, torch.float32).cpu(), prefix, positions)


def tokenize(folder: Path, texts: dict[str, Text], tokens: int) -> dict[str, list[int]]:
    """The first tokens of each text. Raises BenchError where one is too short."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = {}
    for name, text in texts.items():
        plain = text if isinstance(text, str) else _conversation(tokenizer, text)
        ids = [int(token) for token in tokenizer(plain).input_ids[:tokens]]
        if len(ids) < tokens:
            raise BenchError(f"the text {name!r} has {len(ids)} tokens, {tokens} are needed")
        found[name] = ids
    return found


def _conversation(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    """Questions and answers in the model's own form, where it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n".join(f"{turn['q']}\n{turn['a']}" for turn in turns)
    roles = (("user", "q"), ("assistant", "a"))
    messages = [{"role": role, "content": turn[key]} for turn in turns for role, key in roles]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))
