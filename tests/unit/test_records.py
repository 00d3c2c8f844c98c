"""records.plan against a reference that looks at one block after the other."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from flashkv import limits, records
from flashkv.records import RecordLimits

GROWTH = ((0, 256), (4096, 512), (16384, 1024))


def reference(
    store: list[bool], tokens: list[int], sizes: list[int], position: int | None, bounds: Any
) -> list[tuple[list[int], int | None]]:
    """[(blocks of the record, its start token)], decided block by block."""
    made: list[tuple[list[int], int | None]] = []
    record: list[int] = []
    start = allowed = used_tokens = used_bytes = run_start = 0
    at = 0  # tokens before this block in the batch
    for row, wanted in enumerate(store):
        if not wanted:
            record = []
        else:
            here = at + (position or 0)
            fits = (
                record
                and used_tokens + tokens[row] <= allowed
                and used_bytes + sizes[row] <= bounds.bytes_max
                and len(record) < limits.BLOCKS_PER_RECORD_MAX
            )
            if not fits:
                if row == 0 or not store[row - 1]:
                    run_start = at
                where = here if position is not None else at - run_start
                allowed = max(size for begin, size in bounds.growth if where >= begin)
                record, used_tokens, used_bytes, start = [], 0, 0, here
                made.append((record, start if position is not None else None))
            record.append(row)
            used_tokens += tokens[row]
            used_bytes += sizes[row]
        at += tokens[row]
    return made


def planned(plan: records.RecordPlan) -> list[tuple[list[int], int | None]]:
    out = []
    for first, number, start in zip(plan.first, plan.count, plan.start_token, strict=True):
        rows = plan.rows[first : first + number].tolist()
        out.append((rows, None if start == np.uint64(0xFFFFFFFFFFFFFFFF) else int(start)))
    return out


growths = st.lists(
    st.tuples(st.integers(1, 200), st.integers(0, 100)), min_size=0, max_size=3
).flatmap(
    lambda steps: st.integers(1, 64).map(
        lambda first: _ascending(first, steps),
    )
)


def _ascending(first: int, steps: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    pairs = [(0, first)]
    for step, more in steps:
        pairs.append((pairs[-1][0] + step, pairs[-1][1] + more))
    return tuple(pairs)


@settings(deadline=None, max_examples=150)
@given(
    blocks=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60),
    uniform=st.none() | st.integers(1, 40),
    position=st.none() | st.integers(0, 500),
    growth=growths,
    bytes_max=st.integers(40, 2000),
    token_bytes=st.integers(1, 30),
)
def test_plan(
    blocks: list[tuple[bool, int]],
    uniform: int | None,
    position: int | None,
    growth: tuple[tuple[int, int], ...],
    bytes_max: int,
    token_bytes: int,
) -> None:
    bounds = RecordLimits(growth, bytes_max)
    tokens = [uniform or count for _, count in blocks]
    sizes = [count * token_bytes for count in tokens]
    store = [wanted and size <= bytes_max for (wanted, _), size in zip(blocks, sizes, strict=True)]
    plan = records.plan(
        np.array(store, np.bool_),
        np.array(tokens, np.uint16),
        np.array(sizes, np.int64),
        position,
        bounds,
    )
    assert planned(plan) == reference(store, tokens, sizes, position, bounds)
    assert plan.rows.tolist() == [row for row, wanted in enumerate(store) if wanted]
    assert int(plan.count.sum()) == len(plan.rows)


@pytest.mark.parametrize(
    ("tokens", "position", "counts"),
    [
        (16, 0, [16] * 16 + [32] * 24 + [64] * 4),
        (64, 0, [4] * 16 + [8] * 24 + [16] * 5),
        (256, 0, [1] * 16 + [2] * 24 + [4] * 4),
        (1024, 0, [1] * 20),
        (64, 16384, [16] * 5),
        (64, None, [4] * 16 + [8] * 24 + [16] * 5),
        (100, 0, [2] * 21 + [5] * 25 + [10] * 4),
    ],
)
def test_growth_schedule(tokens: int, position: int | None, counts: list[int]) -> None:
    """256 tokens a record at first, 512 from token 4,096, 1,024 from 16,384."""
    number = sum(counts)
    plan = records.plan(
        np.ones(number, np.bool_),
        np.full(number, tokens, np.uint16),
        np.full(number, tokens * 100, np.int64),
        position,
        RecordLimits(GROWTH, 1 << 40),
    )
    assert plan.count.tolist() == counts


def test_a_hole_ends_a_record() -> None:
    store = np.array([True] * 5 + [False] + [True] * 6)
    plan = records.plan(
        store, np.full(12, 16, np.uint16), np.full(12, 100), 160, RecordLimits(GROWTH, 1 << 30)
    )
    assert plan.first.tolist() == [0, 5]
    assert plan.count.tolist() == [5, 6]
    assert plan.start_token.tolist() == [160, 160 + 6 * 16]


def test_nothing_to_store() -> None:
    for store in (np.zeros(0, np.bool_), np.zeros(4, np.bool_)):
        tokens = np.full(len(store), 16, np.uint16)
        plan = records.plan(store, tokens, tokens, None, RecordLimits(GROWTH, 100))
        assert len(plan) == 0
        assert len(plan.rows) == 0


def test_blocks_per_record() -> None:
    number = 3 * limits.BLOCKS_PER_RECORD_MAX + 5
    for tokens in (np.ones(number, np.uint16), np.r_[np.ones(number - 1, np.uint16), 2]):
        plan = records.plan(
            np.ones(number, np.bool_),
            tokens.astype(np.uint16),
            tokens.astype(np.int64),
            None,
            RecordLimits(((0, 1 << 20),), 1 << 30),
        )
        assert plan.count.tolist() == [limits.BLOCKS_PER_RECORD_MAX] * 3 + [5]


def test_a_large_batch_is_quick() -> None:
    """A step a record, not a block: 64 Ki blocks in milliseconds."""
    import time

    number = 1 << 16
    before = time.process_time()
    records.plan(
        np.ones(number, np.bool_),
        np.full(number, 16, np.uint16),
        np.full(number, 1 << 14, np.int64),
        0,
        RecordLimits(GROWTH, 1 << 24),
    )
    assert time.process_time() - before < 0.2
