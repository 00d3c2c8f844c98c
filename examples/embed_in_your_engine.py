"""A paged toy engine with flashkv in it: real attention in torch, random weights, 150 lines.

    python examples/embed_in_your_engine.py [FOLDER]

Its second engine restores what the first one stored; so does a later run with the same folder.
What to take from it: match the longest stored prefix, hold it with a lease, read layer by layer
into your own pages while you compute, treat what doesn't arrive as not computed yet, store new
blocks with what you know of them.
"""

from __future__ import annotations

import sys
import tempfile
import time

import numpy as np
import torch

import flashkv
from flashkv import Identity, KVGeometry, MemoryView, Regions

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 4, 8, 2, 64, 1000
PAGE, BLOCK, PAGES = 16, 64, 512  # tokens of a page, tokens of a flashkv block, pages of the pool
HIDDEN = HEADS * DIM
# Each layer's pool is memory of its own: [page, K|V, kv_head, token, dim].
VIEW = MemoryView(
    "layer plane head token", regions=("layer",), block_tokens=BLOCK, page_tokens=PAGE
)


class Engine:
    """One sequence at a time; a page pool, as engines with many sequences have it."""

    def __init__(self, store: flashkv.Store, name: str = "toy") -> None:
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / shape[0] ** 0.5

        self.embedding = weight(VOCABULARY, HIDDEN) * VOCABULARY**0.5
        self.head = weight(HIDDEN, VOCABULARY)
        self.query = [weight(HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self.key_value = [weight(HIDDEN, 2 * KV_HEADS * DIM) for _ in range(LAYERS)]
        self.out = [weight(HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self.pool = [torch.zeros(PAGES, 2, KV_HEADS, PAGE, DIM) for _ in range(LAYERS)]
        # All that changes the numbers belongs into the identity; here a name and a seed do.
        self.blocks = store.namespace(Identity(model=name, revision="seed 1", kv_dtype="float32"))
        self.client = store.client()

    # ---- what flashkv does for the engine ----

    def load(self, keys: np.ndarray, pages: torch.Tensor) -> list[flashkv.Ticket]:
        """Starts reads of all layers, in the order in which they are needed."""
        rows = pages.reshape(len(keys), BLOCK // PAGE).numpy()
        return [
            self.client.submit_get(
                self.blocks, keys, Regions([self.pool[layer]], rows), view=VIEW, layers=[layer]
            )
            for layer in range(LAYERS)
        ]

    def save(self, keys: np.ndarray, pages: torch.Tensor, first: int) -> flashkv.BatchResult:
        """Stores blocks `first` on; parents and position are hints for records and eviction."""
        rows = pages.reshape(len(keys), BLOCK // PAGE).numpy()[first:]
        parents = [b"", *(key.tobytes() for key in keys[:-1])][first:]
        return self.blocks.put(
            keys[first:],
            Regions(self.pool, rows),
            view=VIEW,
            parents=parents,
            position=first * BLOCK,
        )

    def prefill(self, ids: list[int]) -> tuple[int, int]:
        """(the next token, tokens restored)."""
        keys = self.blocks.token_keys(ids, block_tokens=BLOCK)
        usable = (len(ids) - 1) // BLOCK  # the last token is computed: its logits are needed
        self.pages = torch.randperm(PAGES)[: -(-(len(ids) + 32) // PAGE)]
        match = self.blocks.match(keys[:usable], lease_ms=30_000)
        tickets: list[flashkv.Ticket] = []
        try:
            if match.count:
                held = self.pages[: match.count * BLOCK // PAGE]
                tickets = self.load(keys[: match.count], held)
            token = self.forward(ids, match.count * BLOCK, tickets)
            restored = match.count * BLOCK
        except LookupError:  # a block went missing or was damaged: the engine computes it
            token, restored = self.forward(ids, 0, []), 0
        finally:
            for ticket in tickets:
                ticket.wait()  # the pages are ours alone again
            self.client.drain()
            if match.lease is not None:
                match.lease.release()
        whole = len(ids) // BLOCK
        first = restored // BLOCK
        if whole > first:
            self.save(keys[:whole], self.pages[: whole * BLOCK // PAGE], first)
        return token, restored

    # ---- what the engine does itself ----

    def forward(self, ids: list[int], start: int, tickets: list[flashkv.Ticket]) -> int:
        """Computes tokens from `start` on, given those before; returns the next token."""
        x = self.embedding[torch.as_tensor(ids[start:])]
        positions = torch.arange(start, len(ids))
        for layer in range(LAYERS):
            if tickets:
                tickets[layer].wait()
                if tickets[layer].error or not tickets[layer].result.all_ok:
                    raise LookupError(f"layer {layer} of the prefix is not there")
            x = x + 2 * self.attention(layer, x, positions)
        return int((x[-1] @ self.head).argmax())

    def attention(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.layer_norm(x, (HIDDEN,))
        query = (normed @ self.query[layer]).view(-1, HEADS, DIM).transpose(0, 1)
        new = (normed @ self.key_value[layer]).view(-1, 2, KV_HEADS, DIM)
        pool = self.pool[layer]
        pool[self.pages[positions // PAGE], :, :, positions % PAGE] = new
        count = int(positions[-1]) + 1
        pages = pool[self.pages[: -(-count // PAGE)]]  # page, K|V, head, token, dim
        keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :count]
        mask = torch.arange(count)[None] <= positions[:, None]
        found = torch.nn.functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )
        return found[0].transpose(0, 1).flatten(1) @ self.out[layer]

    def generate(self, ids: list[int], count: int = 16) -> tuple[list[int], int, float]:
        """(tokens, tokens restored, seconds to the first)."""
        begin = time.perf_counter()
        token, restored = self.prefill(ids)
        seconds, tokens = time.perf_counter() - begin, [token]
        while len(tokens) < count:
            so_far = [*ids, *tokens]
            tokens.append(self.forward(so_far, len(so_far) - 1, []))
        return tokens, restored, seconds


@torch.inference_mode()
def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="flashkv-example-")
    geometry = KVGeometry.gqa(LAYERS, KV_HEADS, DIM, "float32")
    prompt = [(i * 7919) % VOCABULARY for i in range(3000)]
    texts = []
    for run in range(2):  # the second engine knows nothing but the store
        with flashkv.open(folder, capacity="256MiB", geometry=geometry) as store:
            tokens, restored, seconds = Engine(store).generate(prompt)
            texts.append(tokens)
            print(f"run {run}: {restored} of {len(prompt)} tokens restored, {seconds:.3f} s to the")
            print(f"       first token: {tokens[:8]} ...")
    assert texts[0] == texts[1]
    print(f"the same text; the store is in {folder}")


if __name__ == "__main__":
    main()
