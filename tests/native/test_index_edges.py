"""The native index at its limits: arguments that fit nothing, answers nobody wants, no memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from simulation.device import allocation_calls, fail_allocations, live_allocations

from flashkv.native import dtype_of, ffi, lib, pointer

RECORD = dtype_of("fkv_directory_record")
BLOCK = dtype_of("fkv_directory_block")
KILL = dtype_of("fkv_manifest_kill")
NONE = lib.FKV_NONE
NULL = ffi.NULL


def made(index: Any) -> Any:
    assert index != NULL
    return index


@pytest.fixture
def index() -> Iterator[Any]:
    index = made(lib.fkv_index_new())
    yield index
    lib.fkv_index_free(index)


def records(sequences: list[int], blocks_each: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Rows of records at pages 10, 20 ..., and their blocks; digests follow from the sequence."""
    rows, blocks = np.zeros(len(sequences), RECORD), np.zeros(len(sequences) * blocks_each, BLOCK)
    rows["sequence"] = sequences
    rows["page"] = 10 * (1 + np.arange(len(rows)))
    rows["pages"], rows["header_pages"] = 3, 1
    rows["block_count"], rows["tokens"] = blocks_each, 16 * blocks_each
    blocks["tokens"] = 16
    for i, sequence in enumerate(np.repeat(sequences, blocks_each)):
        blocks[i]["ordinal"] = i % blocks_each
        rng = np.random.default_rng([sequence, i % blocks_each])
        blocks[i]["digest"] = rng.integers(0, 256, 16, np.uint8)
    return rows, blocks


def add(
    index: Any,
    segment: int,
    rows: np.ndarray,
    blocks: np.ndarray,
    *,
    ids: np.ndarray | None = None,
    kills: np.ndarray | None = None,
    block_count: int | None = None,
) -> int:
    """fkv_index_add without asking what was dropped."""
    return int(
        lib.fkv_index_add(
            *(index, segment, pointer(rows, "fkv_directory_record *"), len(rows)),
            pointer(blocks, "fkv_directory_block *"),
            len(blocks) if block_count is None else block_count,
            pointer(ids, "uint32_t *"),
            pointer(kills, "fkv_manifest_kill *"),
            0 if kills is None else len(kills),
            *(NULL, NULL),
        )
    )


def totals(index: Any) -> tuple[int, int]:
    """(blocks, records)"""
    found = ffi.new("fkv_index_totals *")
    lib.fkv_index_totals_get(index, found)
    return found.blocks, found.records


def digests_of(blocks: np.ndarray) -> Any:
    return pointer(np.ascontiguousarray(blocks["digest"]), "uint8_t *")


def test_no_index_is_freed() -> None:
    lib.fkv_index_free(NULL)


def test_numbers_out_of_range(index: Any) -> None:
    rows, blocks = records([1])
    assert lib.fkv_index_begin_segment(index, 1 << 20, 1) == -errno.EINVAL
    assert add(index, 0, rows, blocks) == -errno.EINVAL  # there is none
    assert lib.fkv_index_begin_segment(index, 3, 1) == 0
    assert add(index, 2, rows, blocks) == -errno.EINVAL  # known, not begun
    assert add(index, 3, rows, blocks, block_count=1) == -errno.EINVAL
    ids = np.array([1 << 24], np.uint32)
    assert add(index, 3, rows, blocks, ids=ids) == -errno.EINVAL
    assert totals(index) == (0, 0)
    assert add(index, 3, rows, blocks) == 0
    assert totals(index) == (2, 1)
    assert lib.fkv_index_begin_segment(index, 3, 2) == -errno.EBUSY


def test_what_isnt_there(index: Any) -> None:
    assert lib.fkv_index_drop_segment(index, 5) == 0
    assert lib.fkv_index_drop_namespace(index, 5) == 0
    assert lib.fkv_index_namespace_blocks(index, 5) == 0
    assert lib.fkv_index_drop_sequences(index, NULL, 0) == 0
    usage = ffi.new("fkv_segment_usage *")
    lib.fkv_index_usage(index, ffi.new("uint32_t *", 7), 1, usage)
    assert (usage.epoch, usage.live_blocks, usage.pins) == (0, 0, 0)
    lib.fkv_index_unpin(index, ffi.new("uint32_t *", NONE), 1)
    rows, blocks = records([1, 2])
    lib.fkv_index_remove(index, digests_of(blocks), NULL, len(blocks), NULL, NULL)
    lib.fkv_index_begin_segment(index, 0, 1)
    assert lib.fkv_index_drop_segment(index, 0) == 0
    assert add(index, 0, rows, blocks) == 0
    assert lib.fkv_index_drop_namespace(index, 1) == 0
    assert totals(index) == (4, 2)


def test_keys_of_no_length(index: Any) -> None:
    space = ffi.new("fkv_keyspace *", {"digest_bytes": 16})
    assert lib.fkv_index_contains_one(index, space, b"", 0) == -errno.EINVAL
    assert lib.fkv_index_contains_one(index, space, bytes(256), 256) == -errno.EINVAL
    assert lib.fkv_index_contains_one(index, space, bytes(255), 255) == 0
    ends = ffi.new("uint64_t *", 3)
    assert lib.fkv_index_match(index, space, b"abc", ends, 1, 0, NULL, NULL) == 0


def test_nobody_asks_what_was_dropped(index: Any) -> None:
    lib.fkv_index_begin_segment(index, 0, 1)
    rows, blocks = records([5])
    assert add(index, 0, rows, blocks) == 0
    older, same = rows.copy(), blocks.copy()
    older["sequence"], older["page"] = 4, 50
    assert add(index, 0, older, same) == 0  # loses
    newer = rows.copy()
    newer["sequence"], newer["page"] = 6, 60
    assert add(index, 0, newer, same) == 0  # wins
    place = np.zeros(2, dtype_of("fkv_place"))
    lib.fkv_index_lookup(index, digests_of(blocks), 2, 0, pointer(place, "fkv_place *"))
    assert place["sequence"].tolist() == [6, 6]
    wrong = np.array([6, 5], np.uint64)
    lib.fkv_index_remove(index, digests_of(blocks), pointer(wrong, "uint64_t *"), 2, NULL, NULL)
    assert totals(index) == (1, 1)


def test_kills_of_others_kill_nothing(index: Any) -> None:
    """Another segment's, epoch's, sequence's, page's or ordinal's."""
    lib.fkv_index_begin_segment(index, 0, 7)
    rows, blocks = records([5, 6, 8])
    right = {"segment": 0, "epoch": 7, "sequence": 6, "page": 20, "ordinal": 1}
    for name, value in (
        ("segment", 1),
        ("epoch", 6),
        ("sequence", 5),
        ("page", 21),
        ("ordinal", 9),
    ):
        kills = np.zeros(3, KILL)
        for field, known in right.items():
            kills[field] = known
        kills[name] = value
        kills["page"][2] = 500
        assert add(index, 0, rows, blocks, kills=kills) == 0
        assert totals(index) == (6, 3), name
    kills = np.zeros(4, KILL)
    for field, known in right.items():
        kills[field] = known
    kills["sequence"][:2] = 1, 2  # earlier records of the same place
    kills["ordinal"][3] = lib.FKV_KILL_RECORD
    kills["page"][3], kills["sequence"][3] = 30, 8
    assert lib.fkv_index_drop_segment(index, 0) == 6
    assert add(index, 0, rows, blocks, kills=kills) == 0
    assert totals(index) == (3, 2)


def test_many_sequences_at_once(index: Any) -> None:
    lib.fkv_index_begin_segment(index, 0, 1)
    rows, blocks = records(list(range(1, 41)))
    assert add(index, 0, rows, blocks) == 0
    gone = np.array([40, 3, 7, 9, 999, 22, 1, 5, 30, 5], np.uint64)
    assert lib.fkv_index_drop_sequences(index, pointer(gone, "uint64_t *"), len(gone)) == 16
    fail_allocations(1)  # without memory to sort them
    gone += 1
    dropped = lib.fkv_index_drop_sequences(index, pointer(gone, "uint64_t *"), len(gone))
    fail_allocations()
    assert dropped == 2 * len({4, 8, 10, 23, 2, 6, 31})
    few = np.array([12, 1], np.uint64)
    assert lib.fkv_index_drop_sequences(index, pointer(few, "uint64_t *"), 2) == 2


def course(index: Any) -> int:
    """Begins two segments and adds more than one block of rows; the first status that isn't 0."""
    for segment in (0, 100):
        status = lib.fkv_index_begin_segment(index, segment, 1)
        if status != 0:
            return status
    for part in range(3):
        rows, blocks = BATCHES[part]
        before = totals(index)
        status = add(index, 100, rows, blocks, ids=np.array([part * 40], np.uint32))
        if status != 0:
            assert totals(index) == before
            return status
    return 0


BATCHES = [records(list(range(1 + 5000 * part, 5001 + 5000 * part)), 1) for part in range(3)]


def test_every_allocation_fails_once() -> None:
    live = live_allocations()
    for n in range(1, 200):
        fail_allocations(n)
        index = lib.fkv_index_new()
        status = course(index) if index != NULL else -errno.ENOMEM
        reached = allocation_calls() >= n
        fail_allocations()
        assert status == (-errno.ENOMEM if reached else 0)
        if index != NULL:
            assert course(index) in (0, -errno.EBUSY)
            lib.fkv_index_free(index)
        assert live_allocations() == live
        if not reached:
            break
    assert n > 8
