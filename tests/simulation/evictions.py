"""Which blocks an eviction took: told by where they lay, not by the store's word.

Invariants
  - a segment that was in use and is free, or begun anew, was evicted, and counted as such;
  - what vanished lay in those, and the store counts every block of it;
  - of segments in which something lives the oldest go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from flashkv import Store
from flashkv.index import NONE, Keys
from flashkv.namespace import Namespace
from flashkv.segments import SegmentState

Place = tuple[int, int]
"""Segment and epoch."""


@dataclass(frozen=True)
class Layout:
    """What lies where, and how many segments and blocks the store says it evicted so far."""

    used: dict[Place, int]  # -> first sequence of the contents
    places: dict[bytes, Place]  # of the keys that are there
    segments: int
    blocks: int


def layout_of(store: Store, parts: Iterable[tuple[Namespace, list[bytes]]]) -> Layout:
    """Of some keys by namespace; no I/O."""
    used = {
        (segment.number, segment.epoch): segment.first_sequence
        for segment in store.segments
        if segment.state != SegmentState.FREE
    }
    places = {}
    for namespace, keys in parts:
        found = store.index.lookup(Keys.pack(keys).digests(namespace._space))
        for key, is_there, segment in zip(
            keys, (found["record"] != NONE).tolist(), found["segment"].tolist(), strict=True
        ):
            if is_there:
                places[key] = segment, store.segments[segment].epoch
    return Layout(used, places, store.space.evicted_segments, store.space.evicted_blocks)


def evicted(before: Layout, after: Layout, put: Collection[bytes] = ()) -> set[Place]:
    """The segments that went between the two, in a call that put some of the keys.

    Whatever else vanished, moved or appeared fails.
    """
    gone = before.used.keys() - after.used.keys()
    counted = after.segments - before.segments
    assert len(gone) == counted, f"segments {gone} went, of which {counted} are counted"
    lost: Counter[Place] = Counter()
    perhaps = 0  # put by the call, before the older version's segment went, or after
    for key, place in before.places.items():
        now = after.places.get(key)
        if key not in put:
            assert now == place or (now is None and place in gone), f"{key!r}: {place}, now {now}"
            lost[place] += now is None
        else:
            perhaps += place in gone
    new = after.places.keys() - before.places.keys() - set(put)
    assert not new, f"{new} are there, which nobody put"
    counted = after.blocks - before.blocks
    most = lost.total() + perhaps
    assert lost.total() <= counted <= most, f"{lost} went, of which {counted} blocks are counted"
    for victim in +lost:
        older = {place for place, first in before.used.items() if first < before.used[victim]}
        assert older <= gone, f"{victim} went before {older - gone}"
    return gone
