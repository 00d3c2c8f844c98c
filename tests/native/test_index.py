"""The native index against a dict: what it holds, reports and counts after any operations."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flashkv.errors import BusyError, StoreError
from flashkv.identity import WHOLE, keyspace
from flashkv.index import NONE, Index, Keys
from flashkv.native import dtype_of, lib

RECORD = dtype_of("fkv_directory_record")
BLOCK = dtype_of("fkv_directory_block")
KILL = dtype_of("fkv_manifest_kill")
SEGMENTS = 4
NAMESPACES = 3


def digest_array(digests: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def rows(
    records: list[tuple[int, int, int, int]], digests: list[list[bytes]]
) -> tuple[np.ndarray, np.ndarray]:
    """records: (sequence, page, pages, namespace_ordinal) and the digests of their blocks."""
    table = np.zeros(len(records), RECORD)
    blocks = np.zeros(sum(map(len, digests)), BLOCK)
    at = 0
    for row, (sequence, page, pages, namespace), members in zip(
        table, records, digests, strict=True
    ):
        row["sequence"], row["page"], row["pages"] = sequence, page, pages
        row["header_pages"], row["block_count"] = 1, len(members)
        row["tokens"], row["namespace_ordinal"] = 16 * len(members), namespace
        row["group"], row["codec"], row["fidelity"], row["flags"] = 1, 2, 3, 4
        for ordinal, digest in enumerate(members):
            blocks[at]["digest"] = np.frombuffer(digest, np.uint8)
            blocks[at]["ordinal"], blocks[at]["tokens"] = ordinal, 16 + ordinal
            at += 1
    return table, blocks


@dataclass
class Entry:
    sequence: int
    segment: int
    epoch: int
    page: int
    pages: int
    ordinal: int
    namespace: int

    def dropped(self) -> tuple[int, int, int, int, int]:
        return (self.segment, self.page, self.epoch, self.sequence, self.ordinal)


@dataclass
class Model:
    blocks: dict[bytes, Entry] = field(default_factory=dict)

    def drop(self, keep: object) -> list[Entry]:
        gone = [entry for entry in self.blocks.values() if not keep(entry)]  # type: ignore[operator]
        self.blocks = {d: e for d, e in self.blocks.items() if keep(e)}  # type: ignore[operator]
        return gone


def dropped_rows(dropped: np.ndarray) -> Counter:
    names = ("segment", "page", "epoch", "sequence", "ordinal")
    return Counter(zip(*(dropped[name].tolist() for name in names), strict=True))


# Few digests, most of them neighbours in the table, some at its very ends.
digests = st.one_of(
    st.integers(0, 60).map(lambda n: bytes([n * 4]) + bytes(14) + bytes([n % 3])),
    st.integers(0, 20).map(lambda n: bytes(15) + bytes([n])),
    st.integers(0, 20).map(lambda n: b"\xff" * 15 + bytes([255 - n])),
    st.integers(0, 20).map(lambda n: b"\xff" * 8 + bytes([n]) * 8),
)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model = Model()
        self.sequence = 1
        self.page = 1
        self.epochs = [0] * SEGMENTS
        self.pins = [0] * SEGMENTS
        self.ids = np.array([5, 0, 9], np.uint32)

    @initialize()
    def begin(self) -> None:
        for segment in range(SEGMENTS):
            self.epochs[segment] = 1
            self.index.begin_segment(segment, 1)

    @rule(
        segment=st.integers(0, SEGMENTS - 1),
        batch=st.lists(
            st.tuples(
                st.lists(digests, max_size=6),
                st.integers(0, NAMESPACES - 1),
                st.integers(1, 9),
                st.integers(-20, 3),
                st.sets(st.integers(0, 7), max_size=3),
            ),
            max_size=4,
        ),
        noise=st.booleans(),
    )
    def add(self, segment: int, batch: list, noise: bool) -> None:
        records, members, kills, expected = [], [], [], []
        epoch = self.epochs[segment]
        for own, namespace, pages, shift, killed in batch:
            sequence = self.sequence
            if shift < 0:  # an older record that comes late, as at recovery
                sequence = max(1, sequence + shift)
            self.sequence += 1
            records.append((sequence, self.page, pages, namespace))
            members.append(own)
            hidden = {7: {lib.FKV_KILL_RECORD}}.get(max(killed, default=0), killed)
            kills += [(segment, self.page, epoch, sequence, ordinal) for ordinal in hidden]
            if noise:  # kills of another epoch or record must hide nothing
                kills += [
                    (segment, self.page, epoch + 1, sequence, 0),
                    (segment, self.page, epoch, sequence + 1, 1),
                ]
            for ordinal, digest in enumerate(own):
                if ordinal in hidden or lib.FKV_KILL_RECORD in hidden:
                    continue
                new = Entry(
                    sequence, segment, epoch, self.page, pages, ordinal, int(self.ids[namespace])
                )
                old = self.model.blocks.get(digest)
                if old is not None and old.sequence > sequence:
                    expected.append(new.dropped())
                    continue
                if old is not None:
                    expected.append(old.dropped())
                self.model.blocks[digest] = new
            self.page += pages
        table = np.zeros(len(kills), KILL)
        for row, kill in zip(table, sorted(kills, key=lambda k: (k[1], k[4])), strict=True):
            row["segment"], row["page"], row["epoch"], row["sequence"], row["ordinal"] = kill
        found = self.index.add(segment, *rows(records, members), self.ids, table)
        assert dropped_rows(found) == Counter(expected)

    @rule(wanted=st.lists(digests, max_size=8), how=st.sampled_from(["any", "right", "wrong"]))
    def remove(self, wanted: list[bytes], how: str) -> None:
        sequences = None
        if how != "any":
            off = 0 if how == "right" else 1
            known = [self.model.blocks.get(digest) for digest in wanted]
            sequences = np.array([e.sequence + off if e else 7 for e in known], np.uint64)
        expected = []
        for position, digest in enumerate(wanted):
            entry = self.model.blocks.get(digest)
            if entry and (sequences is None or entry.sequence == sequences[position]):
                expected.append(entry.dropped())
                del self.model.blocks[digest]
        found = self.index.remove(digest_array(wanted), sequences)
        assert dropped_rows(found) == Counter(expected)

    @rule(segment=st.integers(0, SEGMENTS))
    def drop_segment(self, segment: int) -> None:
        gone = self.model.drop(lambda entry: entry.segment != segment)
        assert self.index.drop_segment(segment) == len(gone)

    @rule(back=st.lists(st.integers(0, 30), max_size=12))
    def drop_sequences(self, back: list[int]) -> None:
        sequences = [max(1, self.sequence - step) for step in back]
        gone = self.model.drop(lambda entry: entry.sequence not in sequences)
        assert self.index.drop_sequences(np.array(sequences, np.uint64)) == len(gone)

    @rule(namespace=st.integers(0, 10))
    def drop_namespace(self, namespace: int) -> None:
        gone = self.model.drop(lambda entry: entry.namespace != namespace)
        assert self.index.drop_namespace(namespace) == len(gone)

    @rule(segment=st.integers(0, SEGMENTS - 1))
    def begin_again(self, segment: int) -> None:
        used = self.pins[segment] or any(e.segment == segment for e in self.model.blocks.values())
        if used:
            with pytest.raises(BusyError):
                self.index.begin_segment(segment, self.epochs[segment] + 1)
            return
        self.epochs[segment] += 1
        self.index.begin_segment(segment, self.epochs[segment])

    @rule(wanted=st.lists(digests, max_size=8), keep=st.booleans())
    def lookup(self, wanted: list[bytes], keep: bool) -> None:
        places = self.index.lookup(digest_array(wanted), pin=True)
        for place, digest in zip(places, wanted, strict=True):
            entry = self.model.blocks.get(digest)
            if entry is None:
                assert place["record"] == place["segment"] == NONE
                continue
            assert (place["sequence"], place["segment"]) == (entry.sequence, entry.segment)
            assert (place["page"], place["pages"]) == (entry.page, entry.pages)
            assert (place["ordinal"], place["tokens"]) == (entry.ordinal, 16 + entry.ordinal)
            assert place["record_tokens"] == 16 * place["record_blocks"]
            assert [place[n] for n in ("group", "codec", "fidelity", "flags")] == [1, 2, 3, 4]
            if keep:
                self.pins[entry.segment] += 1
        if not keep:
            self.index.unpin(np.ascontiguousarray(places["segment"]))

    @rule()
    def unpin_all(self) -> None:
        held = [s for s in range(SEGMENTS) for _ in range(self.pins[s])]
        self.index.unpin(np.array([*held, NONE], np.uint32))
        self.pins = [0] * SEGMENTS

    @invariant()
    def counts(self) -> None:
        blocks = list(self.model.blocks.values())
        records = {(e.segment, e.page): e.pages for e in blocks}
        totals = self.index.totals()
        assert (totals.blocks, totals.records) == (len(blocks), len(records))
        assert totals.live_pages == sum(records.values())
        usage = self.index.usage(range(SEGMENTS))
        for segment in range(SEGMENTS):
            row = usage[segment]
            own = {key: pages for key, pages in records.items() if key[0] == segment}
            assert row["epoch"] == self.epochs[segment]
            assert row["live_blocks"] == sum(e.segment == segment for e in blocks)
            assert (row["live_records"], row["live_pages"]) == (len(own), sum(own.values()))
            assert row["pins"] == self.pins[segment]
        for namespace in range(11):
            expected = sum(entry.namespace == namespace for entry in blocks)
            assert self.index.namespace_blocks(namespace) == expected

    def teardown(self) -> None:
        wanted = list(self.model.blocks)
        if wanted:
            found = self.index.lookup(digest_array(wanted))
            assert (found["record"] != NONE).all()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def many(count: int, per_record: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    blocks = np.zeros(count, BLOCK)
    generator = np.random.default_rng(seed)
    blocks["digest"] = generator.integers(0, 256, (count, 16), dtype=np.uint8)
    blocks["ordinal"] = np.tile(np.arange(per_record), count // per_record)
    records = np.zeros(count // per_record, RECORD)
    records["sequence"] = np.arange(len(records)) + seed * 1_000_000 + 1
    records["page"] = 1 + np.arange(len(records))
    records["pages"] = 1
    records["block_count"] = per_record
    return records, blocks


IDS = np.zeros(1, np.uint32)


def test_growth_keeps_everything_and_the_memory_budget() -> None:
    index = Index()
    worst = 0.0
    for segment in range(60):
        index.begin_segment(segment, 1)
        index.add(segment, *many(2000, 1, seed=segment), IDS)
        totals = index.totals()
        if totals.blocks >= 50_000:
            worst = max(worst, totals.memory_bytes / totals.blocks)
    for segment in range(60):
        _, blocks = many(2000, 1, seed=segment)
        places = index.lookup(np.ascontiguousarray(blocks["digest"]))
        assert (places["segment"] == segment).all()
    assert worst <= 80  # bytes a block, every block being a record of its own


def test_rows_and_slots_are_used_again() -> None:
    index = Index()
    index.begin_segment(0, 1)
    records, blocks = many(8000, 4)
    index.add(0, records, blocks, IDS)
    before = index.totals().memory_bytes
    for epoch in range(2, 12):
        assert index.drop_segment(0) == 8000
        index.begin_segment(0, epoch)
        index.add(0, records, blocks, IDS)
    assert index.totals().memory_bytes == before


@pytest.mark.slow
def test_a_million_blocks() -> None:
    records, blocks = many(1_000_000, 1)
    index = Index()
    index.begin_segment(0, 1)
    start = time.perf_counter()
    index.add(0, records, blocks, IDS)
    assert time.perf_counter() - start < 2.0  # 0.2 s on an idle machine
    assert index.totals().blocks == 1_000_000
    assert index.totals().memory_bytes <= 80_000_000


def test_a_segment_must_be_begun() -> None:
    index = Index()
    with pytest.raises(StoreError):
        index.add(3, *many(4, 1), IDS)
    index.begin_segment(5, 1)
    with pytest.raises(StoreError):
        index.add(3, *many(4, 1), IDS)
    with pytest.raises(StoreError):
        index.begin_segment(1 << 30, 1)
    assert index.totals().blocks == 0


def test_counts_that_do_not_fit_add_nothing() -> None:
    index = Index()
    index.begin_segment(0, 1)
    records, blocks = many(8, 2)
    with pytest.raises(StoreError):
        index.add(0, records, blocks[:7], IDS)
    with pytest.raises(StoreError):
        index.add(0, records, blocks, np.array([1 << 30], np.uint32))
    assert index.totals().blocks == index.totals().records == 0


def test_short_digests_collide_and_the_later_key_wins() -> None:
    space = keyspace(bytes(32), WHOLE, 0, digest_bytes=1)
    keys = Keys.pack([bytes([1, n]) for n in range(200)] + [bytes([2, n]) for n in range(200)])
    found = keys.digests(space)
    assert (found[:, 1:] == 0).all()
    assert len(np.unique(found[:, 0])) < 256
    index = Index()
    index.begin_segment(0, 1)
    records, blocks = many(400, 1)
    blocks["digest"] = found
    dropped = index.add(0, records, blocks, IDS)
    assert len(dropped) == 400 - len(np.unique(found[:, 0]))
    last = {bytes(digest): i for i, digest in enumerate(found)}
    places = index.lookup(digest_array(list(last)))
    assert places["page"].tolist() == [1 + i for i in last.values()]


def test_threads_share_an_index() -> None:
    index = Index()
    for segment in range(4):
        index.begin_segment(segment, 1)
    failures: list[BaseException] = []

    def work(segment: int) -> None:
        try:
            for turn in range(30):
                records, blocks = many(300, 3, seed=segment * 100 + turn)
                index.add(segment, records, blocks, IDS)
                wanted = np.ascontiguousarray(blocks["digest"])
                places = index.lookup(wanted, pin=True)
                assert (places["segment"] == segment).all()
                index.unpin(np.ascontiguousarray(places["segment"]))
                assert len(index.remove(wanted)) == 300
        except BaseException as error:  # noqa: BLE001  (reported by the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(segment,)) for segment in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert index.totals().blocks == 0
    assert not index.usage(range(4))["pins"].any()


@pytest.mark.parametrize("prefix", [b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7])
def test_digests_that_share_one_home(prefix: bytes) -> None:
    """More than the spare slots behind the table's range hold: it grows until they do."""
    shared = [
        prefix + n.to_bytes(8, "big") for n in np.random.default_rng(1).permutation(700).tolist()
    ]
    index = Index()
    index.begin_segment(0, 1)
    for start in range(0, 700, 7):
        index.add(0, *rows([(1 + start, 1 + start, 1, 0)], [shared[start : start + 7]]), IDS)
    assert (index.lookup(digest_array(shared))["record"] != NONE).all()
    assert len(index.remove(digest_array(shared[::2]))) == 350
    present = index.lookup(digest_array(shared))["record"] != NONE
    assert present.tolist() == [False, True] * 350
    assert index.drop_segment(0) == 350
    assert index.totals().blocks == 0
