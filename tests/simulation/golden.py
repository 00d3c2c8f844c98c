"""A store that damage is done to: small, the same at every run, and with all that the format has.

It holds segments with a directory (one with a Bloom section) and one without, raw and lossless
records, gathered small blocks, blocks that were deleted, superseded and stored again, a used-again
segment with its earlier epoch behind its tail, and, in the larger size, a retired namespace and
packed raw records.

Invariant: what is where, and which entry of the log keeps which block away, is told by the places
that the store gave the blocks and by the bytes of the log, not by reading anything back.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from simulation.filesystem import InlineFiles
from simulation.images import scratch

from flashkv import Identity, KVGeometry, Options, Store, limits, manifest, opening
from flashkv.index import Keys

PAGE: Final = 4096
GEOMETRY: Final = KVGeometry.gqa(1, 1, 8, "bfloat16")
TOKENS: Final = 16
BLOCK_SHAPE: Final = (1, 2, 1, TOKENS, 8)  # layer, plane, head, token, dim: 512 bytes
MAIN: Final = Identity(model="golden")
ROTATED: Final = Identity(model="rotated")
IDENTITIES: Final = {"main": MAIN, "rotated": ROTATED}
CAPACITY: Final = 4 * limits.MIB
SHARD: Final = "shards/0"
Name = tuple[str, bytes]
"""Namespace and key."""
Tree = dict[str, bytes]
"""Path below the store's folder -> contents."""

BEGIN: Final = 1
FREED: Final = 3
KILL: Final = 4
RETIRED: Final = 6


@contextmanager
def small_segments() -> Iterator[None]:
    """Segments of a few pages, which no real store may have, and blocks that fit them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SEGMENT_BYTES_MIN", PAGE)
        patch.setattr(limits, "RECORDS_PER_SEGMENT_MIN", 1)
        yield


def options(**changes: Any) -> Options:
    """Small buffers; codec and Bloom as asked."""
    given: dict[str, Any] = {
        "free_floor_bytes": 0,
        "staging_bytes": 4 << 20,
        "read_buffer_bytes": 4 << 20,
        "header_cache_bytes": 1 << 20,
        "queue_depth": 4,
    }
    return Options(**{**given, **changes})


@lru_cache(maxsize=4096)
def block(name: Name, version: int) -> np.ndarray:
    """What a name holds in a version: uint16[BLOCK_SHAPE], no two alike."""
    space, key = name
    rng = np.random.default_rng([version, *space.encode(), *key])
    values = rng.standard_normal(BLOCK_SHAPE, np.float32)
    made: np.ndarray = (values.view(np.uint32) >> 16).astype(np.uint16)
    return made


# ---- the log, byte by byte -----------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """An entry of a log: data is that of [offset, offset + len(data)), without padding."""

    offset: int
    kind: int
    data: bytes

    @property
    def payload(self) -> bytes:
        return self.data[16:]


def entries_of(log: bytes) -> list[Entry]:
    """The entries of a log in order."""
    found, at = [], 0
    while at < len(log):
        _, kind, _, length, ordinal = struct.unpack_from("<IHHII", log, at)
        assert ordinal == len(found)
        found.append(Entry(at, kind, log[at : at + 16 + length]))
        at += 16 + length + -length % 8
    return found


# ---- the store -----------------------------------------------------------------------------------


@dataclass
class Golden:
    """A store's files and what they must show.

    live: name -> version. places: where every version was ever put, as (segment, epoch, page,
    ordinal). kept_away: the versions that each entry of the log keeps away.
    """

    segment_bytes: int
    files: Tree = field(default_factory=dict)
    earlier: list[Tree] = field(default_factory=list)  # its files before, oldest first
    live: dict[Name, int] = field(default_factory=dict)
    versions: dict[Name, set[int]] = field(default_factory=dict)
    places: dict[tuple[int, int, int, int], tuple[Name, int]] = field(default_factory=dict)
    pages: dict[tuple[int, int, int], int] = field(default_factory=dict)  # of records: their pages
    epochs: dict[int, int] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    generation: int = 0  # of the log that rules
    entries: list[Entry] = field(default_factory=list)

    @property
    def log(self) -> str:
        """Path of the log that rules."""
        return log_path(self.generation)

    @property
    def segments(self) -> list[int]:
        """Numbers of the segments."""
        return sorted(self.epochs)

    def kept_away(self, entry: Entry) -> set[tuple[Name, int]]:
        """(name, version) of what is dead by this entry."""
        found = set()
        if entry.kind == KILL:
            for row in struct.iter_unpack("<IIQQHH4x", entry.payload):
                segment, page, epoch, _, ordinal, _ = row
                if epoch == self.epochs[segment]:
                    found.add(self.places[segment, epoch, page, ordinal])
        elif entry.kind == RETIRED:
            found = {(n, v) for n, vs in self.versions.items() if n[0] == "rotated" for v in vs}
        elif entry.kind == FREED:
            segment, _, epoch = struct.unpack_from("<IIQ", entry.payload)
            for place, put in self.places.items():
                if place[:2] == (segment, epoch) and epoch == self.epochs[segment]:
                    found.add(put)
        return found

    def may_be_back(self, log: bytes | None, entries: list[Entry] | None = None) -> set[Any]:
        """(name, version) of the dead that a log in place of the right one keeps away no more.

        An entry that lies unharmed where it lay holds, if the log begins as it did.
        """
        entries = self.entries if entries is None else entries
        held = [
            entry
            for entry in entries
            if log is not None and log[entry.offset :].startswith(entry.data)
        ]
        kept: set[Any] = set()
        if held and held[0].kind == BEGIN:
            kept = set().union(*map(self.kept_away, held))
        dead = set().union(*map(self.kept_away, self.entries))
        return {(n, v) for n, v in dead - kept if n not in self.live}

    def record_at(self, segment: int, page: int) -> set[Name]:
        """Live names of the record of the segment's epoch that takes this page."""
        epoch, names = self.epochs[segment], set()
        for (number, its_epoch, first, _), (name, version) in self.places.items():
            mine = number == segment and its_epoch == epoch
            if mine and first <= page < first + self.pages[number, its_epoch, first]:
                names |= {name} if self.live.get(name) == version else set()
        return names

    def of_segment(self, segment: int) -> set[Name]:
        """Live names of a segment."""
        pages = range(self.segment_bytes // PAGE)
        return set().union(*(self.record_at(segment, page) for page in pages))


def log_path(generation: int) -> str:
    return f"{SHARD}/manifest-{generation:08d}.log"


def segment_path(number: int) -> str:
    return f"{SHARD}/segments/{number:08d}.seg"


def tree_of(path: Path) -> Tree:
    """All files below a store's folder."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


class _Maker:
    """Makes a golden store, one opening after the other."""

    def __init__(self, path: Path, pages: int, salt: int) -> None:
        self.path = path
        self.golden = Golden(pages * PAGE)
        self.files = InlineFiles()
        self.version = salt

    @contextmanager
    def session(self, codec: str, *, bloom: bool = False) -> Iterator[Store]:
        size = self.golden.segment_bytes
        new = not self.golden.earlier
        how = options(codec=codec, bloom=bloom, segment_bytes=size if new else None)
        capacity = CAPACITY if new else None
        geometry = GEOMETRY if new else None
        with Store(self.path, capacity, geometry, how, read_only=False, files=self.files) as store:
            yield store
            store.flush()
            self.golden.epochs = {s.number: s.epoch for s in store.segments}
            self.golden.sealed = {s.number for s in store.segments if s.state.value == "sealed"}
            self.golden.generation = store.manifest.superblock.manifest_generation
        self.golden.earlier.append(tree_of(self.path))

    def put(self, store: Store, space: str, keys: str) -> None:
        """A new version of each key, which are words."""
        self.version += 1
        names = [(space, key.encode()) for key in keys.split()]
        namespace = store.namespace(IDENTITIES[space])
        data = np.stack([block(name, self.version) for name in names])
        packed = [key for _, key in names]
        assert namespace.put(packed, data, replace=True).all_ok
        golden = self.golden
        rows = store.index.lookup(Keys.pack(packed).digests(namespace._space))
        for name, row in zip(names, rows, strict=True):
            segment = store.segments[int(row["segment"])]
            place = (segment.number, segment.epoch, int(row["page"]), int(row["ordinal"]))
            golden.places[place] = (name, self.version)
            golden.versions.setdefault(name, set()).add(self.version)
            golden.live[name] = self.version
        for record in store.segments[int(rows[0]["segment"])].rows()[0]:
            golden.pages[segment.number, segment.epoch, int(record["page"])] = int(record["pages"])

    def delete(self, store: Store, keys: str) -> None:
        packed = [key.encode() for key in keys.split()]
        assert store.namespace(MAIN).delete(packed).all_ok
        for key in packed:
            del self.golden.live["main", key]

    def drop(self, space: str, keys: str) -> None:
        """What is gone without a kill: evicted, retired."""
        for key in keys.split():
            del self.golden.live[space, key.encode()]

    def small(self) -> None:
        """Two segments of nine pages."""
        with self.session("raw") as store:  # segment 0: to be reclaimed
            self.put(store, "main", "a0 a1 a2 a3")
            self.put(store, "main", "k2 a4")
            store.writer.seal()
            self.delete(store, "a1")
        with self.session("raw", bloom=True) as store:  # segment 1: packed into a page
            self.put(store, "main", "k0 k1 k2 k3 l0 l1")
            store.writer.seal()
            self.delete(store, "k1 k3")
        with self.session("lossless") as store:  # segment 0 again: two pages
            assert store.space.reclaim(1, store.writer.take_kills) == 1
            self.drop("main", "a0 a2 a3 a4")
            self.put(store, "main", "k2 k3 k4 k5 k6 k7 k8 a0")
            store.flush()
            self.delete(store, "k5")
        with self.session("raw") as store:  # one page more: gathered, inline
            self.put(store, "main", "m0 m1 k4")
            store.flush()
            self.delete(store, "m1")

    def large(self) -> None:
        """Five segments of thirteen pages."""
        a, b, c, d, e, g, h = (" ".join(f"{letter}{n}" for n in range(8)) for letter in "abcdegh")
        with self.session("raw") as store:  # segment 0: to be reclaimed
            for keys in (a, b, a, "b0 b1"):
                self.put(store, "main", keys)
            store.writer.seal()
            self.delete(store, "a1 b7")
        with self.session("raw", bloom=True) as store:  # segment 1: two namespaces
            self.put(store, "rotated", "r0 r1 r2")
            for keys in ("c0 c1 c2 c3", d, "c4"):
                self.put(store, "main", keys)
            store.writer.seal()
            self.delete(store, "c1 c3 d0")
        with self.session("lossless", bloom=True) as store:  # segment 2
            for keys in (e, "e0 e1 c0", g):
                self.put(store, "main", keys)
            store.writer.seal()
            store.namespace(ROTATED).rotate()
            self.drop("rotated", "r0 r1 r2")
        with self.session("lossless", bloom=True) as store:  # segments 3 and 4
            self.put(store, "rotated", "r0")
            self.put(store, "main", f"{c} x4")
            store.writer.seal()
            self.put(store, "main", "x0 x1 x2 x3 x4")
            store.writer.seal()
            self.delete(store, "x0 x1 x4")
        with self.session("lossless") as store:  # segment 0 again
            assert store.space.reclaim(1, store.writer.take_kills) == 1
            self.drop("main", "a0 a2 a3 a4 a5 a6 a7 b0 b1 b2 b3 b4 b5 b6")
            self.put(store, "main", "a0 b7 d0 d1")
            self.put(store, "main", h)
            store.flush()
            self.delete(store, "h5 e2")
        with self.session("raw") as store:
            self.put(store, "main", "h0 g1 a0 h6 x2 x3")
            store.flush()
            self.delete(store, "h6 h7 g2")
            assert store.space.reclaim(1, store.writer.take_kills) == 1  # segment 4: all dead
        with self.session("raw") as store:
            self.put(store, "main", "h7")
            store.flush()
            self.delete(store, "e3")

    def finish(self) -> Golden:
        golden = self.golden
        golden.files = golden.earlier.pop()
        golden.entries = entries_of(golden.files[golden.log])
        self.files.close_device()
        return golden


@lru_cache
def golden(size: str, salt: int = 0) -> Golden:
    """The store of a size, "small" (64 KiB) or "large" (256 KiB); another salt: another store of
    the same shape.
    """
    numbers, times = random.Random(salt), count(1_700_000_000_000)
    with pytest.MonkeyPatch.context() as patch, small_segments(), scratch() as folder:
        made = SimpleNamespace(uuid4=lambda: SimpleNamespace(bytes=numbers.randbytes(16)))
        patch.setattr(manifest, "uuid", made)
        patch.setattr(opening, "now_ms", lambda: next(times))
        maker = _Maker(folder / "store", 9 if size == "small" else 13, 1000 * salt)
        maker.small() if size == "small" else maker.large()
        return maker.finish()
