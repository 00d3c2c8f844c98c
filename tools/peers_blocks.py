"""flashkv-bench peers: the blocks that every peer stores, known by their numbers.

Invariants
  - a block's bytes and key follow from (kind, size, number) alone, so that a process knows them
    without having put them;
  - a block begins with its number: what comes back under another key is seen.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flashkv.data import load_sample
from flashkv.geometry import DType, KVGeometry

from .bench_sets import keys, page_aligned
from .peers_protocol import Blocks, Plan

LAYERS: Final = 16
HEADS: Final = 4
DIM: Final = 64
TOKEN_BYTES: Final = LAYERS * 2 * HEADS * DIM * 2
"""Of a token's K and V in bfloat16: blocks are whole tokens."""
TOKENS_MIN: Final = 16
TOKENS_MAX: Final = 1024
KINDS: Final = ("opaque", "bf16")
NUMBER_BYTES: Final = 8
PAYLOAD_BYTES: Final = 64
"""Of a block's beginning, by which it is found on the disk."""


def tokens_of(block_bytes: int) -> int:
    """Tokens of a block. Raises ValueError where a block of that size can't be made."""
    tokens, rest = divmod(block_bytes, TOKEN_BYTES)
    if rest or not TOKENS_MIN <= tokens <= TOKENS_MAX:
        raise ValueError(
            f"a block of {block_bytes} bytes: must be a multiple of {TOKEN_BYTES}, from"
            f" {TOKENS_MIN * TOKEN_BYTES} to {TOKENS_MAX * TOKEN_BYTES}"
        )
    return tokens


def geometry_of(plan: Plan) -> KVGeometry:
    """What flashkv is told of the blocks."""
    if plan.kind == "opaque":
        return KVGeometry.opaque(plan.block_bytes)
    return KVGeometry.gqa(LAYERS, HEADS, DIM, DType.BFLOAT16)


def shape_of(plan: Plan) -> tuple[int, ...]:
    """Of a block of bfloat16: layer, K|V, head, token, dim."""
    return (LAYERS, 2, HEADS, tokens_of(plan.block_bytes), DIM)


def key_of(number: int) -> bytes:
    """A block's key, 32 bytes."""
    return keys("peers", number, 1).tobytes()


class BlockSource:
    """Makes the blocks of a plan, a batch at a time, in memory that is used again."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        memory = page_aligned(plan.batch * plan.block_bytes)
        self._rows = memory.reshape(plan.batch, plan.block_bytes)
        self._rows[:] = (_random if plan.kind == "opaque" else _real)(plan)

    def batch(self, first: int, count: int) -> tuple[list[bytes], Blocks]:
        """Keys and blocks of numbers first, first + 1, ...; good until the next call."""
        rows = self._rows[:count]
        numbers = np.arange(first, first + count, dtype="<u8")
        rows[:, :NUMBER_BYTES] = numbers.view(np.uint8).reshape(count, NUMBER_BYTES)
        return [key_of(first + row) for row in range(count)], rows

    def is_right(self, number: int, got: Any) -> bool:
        """Whether a buffer holds what was put under a number: a batch begins at its multiples."""
        given = np.frombuffer(got, np.uint8)
        row = self._rows[number % self.plan.batch]
        return (
            given.size == row.size
            and int(given[:NUMBER_BYTES].view("<u8")[0]) == number
            and np.array_equal(given[NUMBER_BYTES:], row[NUMBER_BYTES:])
        )

    def payload(self, number: int) -> bytes:
        """The first bytes of a block."""
        row = self._rows[number % self.plan.batch]
        return number.to_bytes(NUMBER_BYTES, "little") + bytes(row[NUMBER_BYTES:PAYLOAD_BYTES])


def _random(plan: Plan) -> Blocks:
    size = (plan.batch, plan.block_bytes)
    return np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)


def _real(plan: Plan) -> Blocks:
    """K and V of a real model: the package's sample, repeated to the blocks' layers and heads.

    The repeating gains no codec anything: each page is coded by itself.
    """
    sample = load_sample().tensors
    kv = np.stack([sample["K"], sample["V"]], axis=1)  # [layer, plane, head, token, dim]
    layers, _, heads, have, _ = kv.shape
    kv = kv[np.arange(LAYERS) % layers][:, :, np.arange(HEADS) % heads]
    tokens = tokens_of(plan.block_bytes)
    made: list[npt.NDArray[Any]] = []
    for row in range(plan.batch):
        # Another place to begin for every block: no two of a batch are the same.
        picked = (row * tokens + 7 * row + np.arange(tokens)) % have
        made.append(np.ascontiguousarray(kv[:, :, :, picked]).view(np.uint8).reshape(-1))
    return np.stack(made)
