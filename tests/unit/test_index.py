"""Packed keys, and the index' key-wise questions: contains, contains_one, match with pins."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkv.errors import KeyFormatError
from flashkv.identity import WHOLE, Shard, keyspace
from flashkv.index import NONE, Index, Keys
from flashkv.native import dtype_of

NAMESPACE = bytes(range(32))
SPACE = keyspace(NAMESPACE, WHOLE, 0)


def filled(groups: list[list[bytes]]) -> Index:
    """An index with one segment, numbered from 0, for each list of keys."""
    index = Index()
    sequence = 1
    for segment, keys in enumerate(groups):
        index.begin_segment(segment, 1)
        if not keys:
            continue
        blocks = np.zeros(len(keys), dtype_of("fkv_directory_block"))
        blocks["digest"] = Keys.pack(keys).digests(SPACE)
        records = np.zeros(len(keys), dtype_of("fkv_directory_record"))
        records["sequence"] = sequence + np.arange(len(keys))
        records["page"] = 1 + np.arange(len(keys))
        records["pages"] = records["block_count"] = 1
        sequence += len(keys)
        index.add(segment, records, blocks, np.zeros(1, np.uint32))
    return index


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=40))
def test_packing_keeps_every_key(keys: list[bytes]) -> None:
    packed = Keys.pack(keys)
    assert [packed[i] for i in range(len(packed))] == keys
    starts, lengths = packed.starts_lengths()
    assert lengths.tolist() == [len(key) for key in keys]
    assert [packed.blob[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)] == keys
    assert Keys.pack(packed) is packed


def test_packing_arrays() -> None:
    array = np.arange(60, dtype=np.uint8).reshape(10, 6)
    for keys in (array, np.asfortranarray(array), array[::2], array[:, :3]):
        packed = Keys.pack(keys)
        assert [packed[i] for i in range(len(packed))] == [row.tobytes() for row in keys]
    assert len(Keys.pack(np.zeros((0, 32), np.uint8))) == 0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ([b"a", b""], "key 1"),
        ([b"a", b"b", b"x" * 256], "key 2"),
        ([b"a", "text"], "key 1"),
        ([b"a", None], "key 1"),
        ([3, b"a"], "key 0"),
        (b"abc", "sequence"),
        ("abc", "sequence"),
        (7, "sequence of bytes, got 7"),
        (np.zeros((3, 0), np.uint8), "key 0"),
        (np.zeros((3, 256), np.uint8), "key 0"),
        (np.zeros(3, np.uint8), "uint8"),
        (np.zeros((3, 4), np.int8), "uint8"),
    ],
)
def test_wrong_keys_are_named(keys: object, named: str) -> None:
    with pytest.raises(KeyFormatError, match=named):
        Keys.pack(keys)  # type: ignore[arg-type]


def test_empty_keys_stand_for_no_parent() -> None:
    packed = Keys.pack([b"", b"abc", b""], allow_empty=True)
    assert [packed[i] for i in range(3)] == [b"", b"abc", b""]


def test_digests_bind_namespace_shard_and_key() -> None:
    keys = [b"k", b"key", b"x" * 255]
    for shard in (WHOLE, Shard(layers=(0, 2))):
        found = Keys.pack(keys).digests(keyspace(NAMESPACE, shard, 0))
        prefix = NAMESPACE + shard.encode()
        expected = [hashlib.sha256(prefix + key).digest()[:16] for key in keys]
        assert [row.tobytes() for row in found] == expected


@given(
    st.sets(st.binary(min_size=1, max_size=4), max_size=60),
    st.lists(st.binary(min_size=1, max_size=4), max_size=300),
)
def test_contains(stored: set[bytes], asked: list[bytes]) -> None:
    index = filled([list(stored)])
    expected = [key in stored for key in asked]
    packed = Keys.pack(asked)
    assert index.contains(SPACE, packed).tolist() == expected
    assert index.contains_digests(packed.digests(SPACE)).tolist() == expected
    contains_one = index.contains_one_of(SPACE)
    assert [contains_one(key) for key in asked] == expected
    other = keyspace(NAMESPACE, Shard(heads=(0, 1)), 0)
    assert not index.contains(other, packed).any()


@pytest.mark.parametrize("key", ["text", bytearray(b"a"), [1, 2], 7, None, b"", b"x" * 256])
def test_contains_one_refuses_wrong_keys(key: object) -> None:
    contains_one = Index().contains_one_of(SPACE)
    with pytest.raises(KeyFormatError):
        contains_one(key)  # type: ignore[arg-type]


def test_contains_one_outlives_the_index() -> None:
    index = filled([[b"a"]])
    contains_one = index.contains_one_of(SPACE)
    del index
    assert contains_one(b"a")


def test_contains_one_is_quick() -> None:
    keys = [bytes([n, n]) for n in range(200)]
    contains_one = filled([keys]).contains_one_of(SPACE)
    best = min(_seconds(contains_one, keys) for _ in range(20))
    assert best / len(keys) < 10e-6  # about 1 us; the bound leaves room for busy machines


def _seconds(contains_one: object, keys: list[bytes]) -> float:
    start = time.perf_counter()
    for key in keys:
        contains_one(key)  # type: ignore[operator]
    return time.perf_counter() - start


def test_match_stops_at_the_first_gap_and_pins_each_segment_once() -> None:
    chain = [bytes([n]) * 8 for n in range(1, 11)]
    index = filled([chain[0:3], chain[3:5], [], chain[7:]])
    packed = Keys.pack(chain)
    assert index.match(SPACE, packed)[0] == 5
    count, segments = index.match(SPACE, packed, pin=True)
    assert (count, segments.tolist()) == (5, [0, 1])
    assert index.usage(range(4))["pins"].tolist() == [1, 1, 0, 0]
    again = index.match(SPACE, packed, pin=True)[1]
    assert index.usage(range(4))["pins"].tolist() == [2, 2, 0, 0]
    index.unpin(segments)
    index.unpin(again)
    assert not index.usage(range(4))["pins"].any()
    assert index.match(SPACE, Keys.pack(chain[5:]), pin=True)[0] == 0
    assert index.match(SPACE, Keys.pack([]), pin=True)[0] == 0


def test_empty_batches() -> None:
    index = Index()
    nothing = np.zeros((0, 16), np.uint8)
    assert len(index.lookup(nothing)) == len(index.remove(nothing)) == 0
    assert len(index.contains(SPACE, Keys.pack([]))) == 0
    assert index.drop_sequences(np.zeros(0, np.uint64)) == 0
    assert index.lookup(np.zeros((1, 16), np.uint8))["record"][0] == NONE
    index.begin_segment(0, 1)
    records = np.zeros(0, dtype_of("fkv_directory_record"))
    blocks = np.zeros(0, dtype_of("fkv_directory_block"))
    assert len(index.add(0, records, blocks, np.zeros(0, np.uint32))) == 0
