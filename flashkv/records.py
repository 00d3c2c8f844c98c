"""Blocks -> records: which consecutive blocks of a put are coded and placed together.

Invariants
  - a record holds consecutive blocks of one put; a block that is not stored (present already,
    refused) ends a record;
  - a record has at most the tokens that the growth schedule allows where it begins, at most
    RecordLimits.bytes_max bytes and BLOCKS_PER_RECORD_MAX blocks; a single block may exceed the
    schedule, never the bytes;
  - boundaries depend on positions and sizes only: the same put makes the same records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits

OPAQUE_RECORD_BYTES: Final = limits.MIB
"""Opaque blocks are gathered up to this: a larger record would only be read in parts."""


@dataclass(frozen=True, eq=False)
class RecordPlan:
    """Which blocks of a put make which record.

    rows         indices of the stored blocks, in order; record i has
                 rows[first[i] : first[i] + count[i]].
    start_token  position of each record's first token; all ones where it isn't known.
    """

    rows: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]
    start_token: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class RecordLimits:
    """What bounds a record. growth: (from token, tokens a record), ascending."""

    growth: tuple[tuple[int, int], ...]
    bytes_max: int

    def tokens_at(self, position: int) -> int:
        """Tokens that a record that begins at this position may have."""
        tokens = self.growth[0][1]
        for start, size in self.growth:
            if position >= start:
                tokens = size
        return tokens

    def stage_end(self, position: int) -> int | None:
        """Where the next stage of the schedule begins."""
        return next((start for start, _ in self.growth if start > position), None)


def plan(
    store: NDArray[np.bool_],
    tokens: NDArray[Any],
    block_bytes: NDArray[Any],
    position: int | None,
    bounds: RecordLimits,
) -> RecordPlan:
    """Cuts the blocks with store[i] into records.

    tokens, block_bytes: of all N blocks. position: of the first block's first token in its
    sequence, or None: then a run's own length drives the schedule and start_token is unknown.
    """
    rows = store.nonzero()[0]
    unknown = np.uint64(0xFFFFFFFFFFFFFFFF)
    if not len(rows):
        empty = np.zeros(0, np.int64)
        return RecordPlan(rows, empty, empty, np.zeros(0, np.uint64))
    starts = tokens.cumsum(dtype=np.int64) - tokens
    if len(rows) == rows[-1] - rows[0] + 1:  # one run: nothing in between was skipped
        run_first, run_end = [0], [len(rows)]
    else:
        cuts = (np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1).tolist()
        run_first, run_end = [0, *cuts], [*cuts, len(rows)]
    firsts: list[NDArray[np.int64]] = []
    uniform = bool((tokens == tokens[0]).all() and (block_bytes == block_bytes[0]).all())
    for first, end in zip(run_first, run_end, strict=True):
        base = position + int(starts[rows[first]]) if position is not None else 0
        if uniform:
            sizes = (int(tokens[0]), int(block_bytes[0]))
            firsts.append(first + _cut_uniform(end - first, sizes, base, bounds))
        else:
            firsts.append(_cut(rows[first:end], tokens, block_bytes, base, bounds) + first)
    record_first = np.concatenate(firsts) if len(firsts) > 1 else firsts[0]
    count = np.empty_like(record_first)
    count[:-1] = record_first[1:] - record_first[:-1]
    count[-1] = len(rows) - record_first[-1]
    if position is None:
        start_token = np.full(len(record_first), unknown, np.uint64)
    else:
        start_token = (starts[rows[record_first]] + position).astype(np.uint64)
    return RecordPlan(rows, record_first, count, start_token)


def _cut_uniform(
    blocks: int, sizes: tuple[int, int], base: int, bounds: RecordLimits
) -> NDArray[np.int64]:
    """First blocks of the records of a run of equal blocks.

    Whole stages of the schedule at a time.
    """
    tokens, size = sizes
    parts: list[NDArray[np.int64]] = []
    done = 0
    while done < blocks:
        position = base + done * tokens
        step = bounds.tokens_at(position) // tokens
        step = max(1, min(step, bounds.bytes_max // max(size, 1), limits.BLOCKS_PER_RECORD_MAX))
        stage_end = bounds.stage_end(position)
        in_stage = blocks - done
        if stage_end is not None and done + step < blocks:
            in_stage = min(in_stage, -(-(stage_end - position) // tokens))
        records = -(-in_stage // step)
        parts.append(np.arange(done, done + records * step, step, dtype=np.int64))
        done += records * step
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _cut(
    rows: NDArray[np.int64],
    tokens: NDArray[Any],
    block_bytes: NDArray[Any],
    base: int,
    bounds: RecordLimits,
) -> NDArray[np.int64]:
    """First blocks of the records of one run of unequal blocks; one step a record."""
    token_ends = np.cumsum(tokens[rows], dtype=np.int64)
    byte_ends = np.cumsum(block_bytes[rows], dtype=np.int64)
    firsts = []
    at, tokens_before, bytes_before = 0, 0, 0
    while at < len(rows):
        firsts.append(at)
        token_limit = tokens_before + bounds.tokens_at(base + tokens_before)
        end = min(
            int(np.searchsorted(token_ends, token_limit, "right")),
            int(np.searchsorted(byte_ends, bytes_before + bounds.bytes_max, "right")),
            at + limits.BLOCKS_PER_RECORD_MAX,
        )
        at = max(end, at + 1)
        tokens_before, bytes_before = int(token_ends[at - 1]), int(byte_ends[at - 1])
    return np.array(firsts, np.int64)
