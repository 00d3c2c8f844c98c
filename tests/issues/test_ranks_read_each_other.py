"""Fault: tensor-parallel ranks use different rules for the key that is looked up and the key that
is stored; a prefix counts though one rank lacks it, or a rank reads another one's bytes.

flashkv guarantees: every rank stores under the same keys, in a shard of the namespace; a shard sees
only its own blocks, so the prefix that all ranks have is the least of their matches; the whole
model and its shards are different things, in every layout of ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_stores import IDENTITY, assert_equal, make, names, payload

from flashkv import KVGeometry, Namespace, Shard, Store

GEOMETRY = KVGeometry.gqa(4, 4, 64, "bfloat16")
KEYS = names(12)
SHARDS = [
    None,
    *(Shard(heads=(head, head + 1)) for head in range(4)),
    *(Shard(heads=(head, head + 2)) for head in (0, 2)),
    *(Shard(layers=(layer, layer + 2)) for layer in (0, 2)),
    Shard(layers=(0, 2), heads=(0, 2)),
    Shard(layers=(2, 4), heads=(0, 2)),
    Shard(context=(0, 2)),
    Shard(context=(1, 2)),
    Shard(heads=(0, 2), context=(1, 2)),
]


def ranks_of(store: Store, count: int) -> list[Namespace]:
    """The namespaces of `count` tensor-parallel ranks."""
    heads = 4 // count
    return [
        store.namespace(IDENTITY, shard=Shard(heads=(rank * heads, (rank + 1) * heads)))
        for rank in range(count)
    ]


def shape_of(namespace: Namespace, tokens: int = 16) -> tuple[int, ...]:
    plane = namespace.geometry.groups[0].planes[0]
    return (plane.layers, 2, plane.heads, tokens, 64)


@pytest.mark.parametrize("count", [2, 4])
def test_a_prefix_counts_when_every_rank_has_it(folder: Path, count: int) -> None:
    with make(folder, geometry=GEOMETRY) as store:
        ranks = ranks_of(store, count)
        have = [12, 7, 9, 8][:count]
        for rank, namespace in enumerate(ranks):
            assert namespace.match(KEYS).count == 0
            blocks = payload(rank, have[rank], shape_of(namespace))
            assert (namespace.put(KEYS[: have[rank]], blocks).statuses == 0).all()
        matches = [namespace.match(KEYS, lease_ms=1000) for namespace in ranks]
        assert [match.count for match in matches] == have
        common = min(match.count for match in matches)
        assert common == 7
        for rank, namespace in enumerate(ranks):
            blocks = payload(rank, have[rank], shape_of(namespace))[:common]
            assert_equal(namespace, KEYS[:common], blocks)
            result = namespace.get(KEYS, np.zeros((12, *shape_of(namespace)), np.uint16))
            assert int(result.ok.sum()) == have[rank]
        ranks[0].delete(KEYS[:1])
        assert [namespace.match(KEYS).count for namespace in ranks] == [0, *have[1:]]


def test_no_rank_reads_another_ones_bytes(folder: Path) -> None:
    """The same keys in every shard that there can be: each holds what was put through it."""
    with make(folder, geometry=GEOMETRY) as store:
        for number, shard in enumerate(SHARDS):
            namespace = store.namespace(IDENTITY, shard=shard)
            assert not namespace.contains(KEYS).any(), shard
            result = namespace.put(KEYS, payload(number, 12, shape_of(namespace)))
            assert (result.statuses == 0).all()
    with make(folder) as store:
        digests = {store.namespace(IDENTITY, shard=shard).digest for shard in SHARDS}
        assert len(digests) == 1, "the identity is the same for all ranks"
        for number, shard in enumerate(SHARDS):
            namespace = store.namespace(IDENTITY, shard=shard)
            assert_equal(namespace, KEYS, payload(number, 12, shape_of(namespace)))
        assert store.stats().blocks == len(SHARDS) * len(KEYS)


def test_ways_to_write_the_whole(folder: Path) -> None:
    """A shard that covers everything is the whole model: ranks of one find what no rank stored."""
    with make(folder, geometry=GEOMETRY) as store:
        whole = store.namespace(IDENTITY)
        blocks = payload(1, 12, shape_of(whole))
        whole.put(KEYS, blocks)
        for shard in (Shard(), Shard(heads=(0, 4)), Shard(layers=(0, 4)), Shard(context=(0, 1))):
            assert_equal(
                store.namespace(IDENTITY, shard=shard), KEYS, payload(1, 12, shape_of(whole))
            )


def test_rotating_retires_all_ranks(folder: Path) -> None:
    with make(folder, geometry=GEOMETRY) as store:
        ranks = ranks_of(store, 4)
        for rank, namespace in enumerate(ranks):
            namespace.put(KEYS, payload(rank, 12, shape_of(namespace)))
        assert ranks[2].rotate() == 4 * len(KEYS)
        assert not any(namespace.contains(KEYS).any() for namespace in ranks)
    with make(folder) as store:
        assert not any(namespace.contains(KEYS).any() for namespace in ranks_of(store, 4))
