"""Calls on a small simulated store, one after the other, and the check of a crash image.

The seven operations: put (new keys), overwrite, delete, get, flush, reopen, reclaim (puts until
segments are evicted). Invariant: the same operations with the same seed make the same calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from simulation.account import Account
from simulation.device import Device
from simulation.evictions import Layout, Place, evicted, layout_of
from simulation.filesystem import InlineFiles, SimFiles

from flashkv import BlockStatus, Identity, KVGeometry, Options, Store, limits
from flashkv.background import When
from flashkv.filesystem import DISK
from flashkv.folder import is_own_file
from flashkv.namespace import Namespace
from flashkv.segments import SegmentState

OPERATIONS: Final = ("put", "overwrite", "delete", "get", "flush", "reopen", "reclaim")
SEGMENT_BYTES: Final = 64 << 10
"""Smaller than any real store's; see options()."""
SEGMENTS: Final = 4
CAPACITY: Final = limits.MIB + SEGMENTS * SEGMENT_BYTES
GEOMETRY: Final = KVGeometry.gqa(1, 2, 16, "bfloat16")
TOKENS: Final = 16
BLOCK_SHAPE: Final = (1, 2, 2, TOKENS, 16)  # layer, plane, head, token, dim: 2 KiB
FILL_BYTES: Final = 12
IDENTITY: Final = Identity(model="test/model", revision="1")
KEYS: Final = tuple(b"key-%d" % number for number in range(6))
FILLERS: Final = tuple(b"filler-%d" % number for number in range(64))
ALL_KEYS: Final = (*KEYS, *FILLERS)
NEW: Final = b"new"
"""Put into a store that a crash left."""
OTHER: Final = Identity(model="test/other", revision="1")
OTHER_KEYS: Final = tuple(b"other-%d" % number for number in range(3))
"""Keys of another namespace."""


def options(**changes: Any) -> Options:
    """Small, and with few threads."""
    given: dict[str, Any] = {
        "backend": "threads",
        "segment_bytes": SEGMENT_BYTES,
        "free_floor_bytes": 0,
        "staging_bytes": 4 << 20,
        "read_buffer_bytes": 4 << 20,
        "header_cache_bytes": 1 << 20,
        "queue_depth": 4,
        "workers": 1,
        "io_threads": 1,
    }
    with mock.patch.object(limits, "SEGMENT_BYTES_MIN", SEGMENT_BYTES):
        return Options(**{**given, **changes})


@lru_cache(maxsize=4096)
def block(key: bytes, version: int) -> np.ndarray:
    """What a key holds in a version: uint16[BLOCK_SHAPE], no two alike."""
    rng = np.random.default_rng([version, *key])
    values = rng.standard_normal(BLOCK_SHAPE, np.float32)
    made: np.ndarray = (values.view(np.uint32) >> 16).astype(np.uint16)
    return made


@lru_cache(maxsize=4096)
def block_bytes(key: bytes, version: int) -> bytes:
    """The same as bytes."""
    return block(key, version).tobytes()


def blocks(keys: Sequence[bytes], version: int) -> np.ndarray:
    """uint16[N, *BLOCK_SHAPE]"""
    return np.stack([block(key, version) for key in keys])


def read_versions(store: Store, versions: dict[bytes, set[int]]) -> dict[bytes, int]:
    """Which version each key shows. A status that is neither OK nor MISS, or bytes of none of the
    versions that were ever put under the key, fail.
    """
    found = {}
    for keys in by_namespace(list(versions)):
        out = np.full((len(keys), *BLOCK_SHAPE), 0xA5A5, np.uint16)
        result = namespace_of(store, keys[0]).get(keys, out)
        for row, key in enumerate(keys):
            if result[row] == BlockStatus.MISS:
                continue
            assert result[row] == BlockStatus.OK, f"{key!r}: {result[row].name}"
            found[key] = version_of(key, out[row].tobytes(), versions[key])
    return found


def version_of(key: bytes, data: bytes, versions: set[int]) -> int:
    """Which of the versions it is; bytes of none fail."""
    equal = [v for v in versions if block(key, v).tobytes() == data]
    assert equal, f"{key!r} holds bytes that were never put under it"
    return equal[0]


def namespace_of(store: Store, key: bytes) -> Namespace:
    """Where the key lies."""
    return store.namespace(OTHER if key in OTHER_KEYS else IDENTITY)


def by_namespace(keys: Sequence[bytes]) -> list[list[bytes]]:
    """The keys of each namespace, none without keys."""
    split = [[k for k in keys if k not in OTHER_KEYS], [k for k in keys if k in OTHER_KEYS]]
    return [part for part in split if part]


def layout(store: Store, keys: Sequence[bytes]) -> Layout:
    """Where these keys lie."""
    return layout_of(store, [(namespace_of(store, part[0]), part) for part in by_namespace(keys)])


@dataclass(frozen=True)
class Step:
    """One operation and the number that its choices follow from."""

    name: str
    choice: int

    def __str__(self) -> str:
        return f"{self.name}({self.choice})"


class Workload:
    """A store on a simulated device, with the account of what was done to it."""

    def __init__(
        self, root: Path, seed: int, *, codec: str = "lossless", bloom: bool = False
    ) -> None:
        """root: an empty folder. The store is made in it, with everything recorded."""
        self.device = Device(seed)
        self.device.record()
        self.files = SimFiles(root, self.device)
        self.eager = seed % 3 == 0
        if self.eager:
            self.files.when = When.AT_ONCE
        self.path = root / "store"
        self.options = options(codec=codec, bloom=bloom)
        self.account = Account()
        self.versions: dict[bytes, set[int]] = {key: set() for key in ALL_KEYS}
        self.version = 0
        self._lain: dict[tuple[bytes, int], Place] = {}  # versions of keys, those of old too
        self.store = self._open(CAPACITY, GEOMETRY)

    def _open(self, capacity: int | None = None, geometry: KVGeometry | None = None) -> Store:
        store = Store(
            self.path, capacity, geometry, self.options, read_only=False, files=self.files
        )
        if self.eager:
            store.writer.sealer.together = 1
        return store

    @property
    def position(self) -> int:
        """Events so far."""
        return self.device.event_count()

    def close(self) -> None:
        """Ends all; nothing is checked."""
        with suppress(Exception):
            self.store.close()
        self.device.close()

    # ---- operations ----

    def run(self, step: Step) -> None:
        """Carries an operation out."""
        if step.name in ("flush", "reopen", "reclaim"):
            getattr(self, f"_{step.name}")()
        else:
            getattr(self, f"_{step.name}")(self._some(step.choice))

    def _some(self, choice: int) -> list[bytes]:
        first, count = choice % len(KEYS), 1 + choice // len(KEYS) % 3
        return [KEYS[(first + number) % len(KEYS)] for number in range(count)]

    def _put(self, keys: list[bytes]) -> None:
        self.put(keys, replace=False)

    def _overwrite(self, keys: list[bytes]) -> None:
        self.put(keys, replace=True)

    def put(self, keys: list[bytes], *, replace: bool) -> None:
        """Stores a new version of each."""
        self.version += 1
        version = self.version
        for key in keys:
            self.versions[key].add(version)
        before = dict(self.account.live)
        wanted = {key: version for key in keys if replace or key not in before}
        with self._call(wanted) as begun:
            self.account.may_become(dict(wanted), begun)
            namespace = self.store.namespace(IDENTITY)
            result = namespace.put(keys, blocks(keys, version), replace=replace)
            for key, status in zip(keys, result, strict=True):
                stored = BlockStatus.OK if key in wanted else BlockStatus.PRESENT
                assert status == stored, f"{key!r}: {status.name}"
            self.account.is_stored(wanted)

    @contextmanager
    def _call(self, put: dict[bytes, int] | None = None) -> Iterator[int]:
        """Around a call that puts these versions: takes notice of what it evicted, and of nothing
        else that vanished. Gives the position where it begins.
        """
        put = put or {}
        begun, before = self.position, layout(self.store, ALL_KEYS)
        self.account.mark(begun)
        yield begun
        after = layout(self.store, ALL_KEYS)
        victims = evicted(before, after, put)
        self._lain.update({(key, version): after.places[key] for key, version in put.items()})
        if victims:
            shown = [key for key, place in before.places.items() if place in victims]
            lain = [version for version, place in self._lain.items() if place in victims]
            self.account.evicted(shown, lain, begun, self.position)
        there = self.account.live.keys()
        assert after.places.keys() == there, f"{after.places.keys() ^ there} there or not"

    def _delete(self, keys: list[bytes]) -> None:
        self.account.may_become(dict.fromkeys(keys), self.position)
        self.store.namespace(IDENTITY).delete(keys)
        self.account.is_gone(keys, self.position)

    def _get(self, keys: list[bytes]) -> None:
        found = read_versions(self.store, {key: self.versions[key] for key in keys})
        assert found == {key: v for key, v in self.account.live.items() if key in keys}

    def _flush(self) -> None:
        with self._call():
            self.store.flush()
        self.account.is_durable(self.position)

    def _reopen(self) -> None:
        self.store.close()
        self.account.is_durable(self.position)
        self.store = self._open()
        found = read_versions(self.store, self.versions)
        assert found == self.account.live, "after closing and opening"

    def _reclaim(self) -> None:
        evicted = self.store.space.evicted_segments
        for _ in range(4 * SEGMENTS):
            first = self.version % len(FILLERS)
            keys = [FILLERS[(first + n) % len(FILLERS)] for n in range(FILL_BYTES)]
            self.put(keys, replace=True)
            if self.store.space.evicted_segments > evicted:
                return
        raise AssertionError("nothing was evicted")


# ---- images --------------------------------------------------------------------------------------


def check_image(
    path: Path,
    versions: dict[bytes, set[int]],
    files: SimFiles | None = None,
    *,
    again: bool = False,
) -> dict[bytes, int]:
    """Opens the store that a crash left, holds it to its promises, and tells what it shows.

    again: it is closed, opened once more and must show the same, with a new block besides.
    """
    if files is None:
        plain = InlineFiles()
        try:
            return _check_image(path, versions, plain, again)
        finally:
            plain.close_device()
    return _check_image(path, versions, files, again)


def _check_image(
    path: Path, versions: dict[bytes, set[int]], files: InlineFiles | SimFiles, again: bool
) -> dict[bytes, int]:
    store = Store(path, CAPACITY, GEOMETRY, options(), read_only=False, files=files)
    kept = {}
    try:
        found = read_versions(store, versions)
        check_space(store)
        if again:
            kept = {**_put_another(store, found), NEW: 0}
    finally:
        store.close()
    if again:
        with Store(path, None, None, options(), read_only=False, files=files) as store:
            more = read_versions(store, {**versions, NEW: {0}})
            assert not store.space.evicted_segments, "opening evicted"
            assert more == kept, f"it showed {kept}, and shows {more} when it is opened again"
            check_space(store)
    return found


def _put_another(store: Store, found: dict[bytes, int]) -> dict[bytes, int]:
    """Puts a new block, and flushes; which of what was found are still there."""
    keys = [*found, NEW]
    before = layout(store, keys)
    assert before.places.keys() == found.keys()
    result = store.namespace(IDENTITY).put([NEW], blocks([NEW], 0))
    assert result.all_ok, result
    store.flush()
    victims = evicted(before, layout(store, keys), [NEW])
    return {key: v for key, v in found.items() if before.places[key] not in victims}


def check_space(store: Store) -> None:
    """Free and used segments are the files that are there, within the capacity; no orphans."""
    folder = store.segments.folder
    segment_names = set(DISK.names(folder / "segments"))
    expected = {f"{s.number:08d}.seg" for s in store.segments if s.has_file()}
    if store.space.next_number is not None:
        expected.add(f"{store.space.next_number:08d}.seg")
    assert segment_names <= expected
    assert len(segment_names) >= sum(s.has_file() for s in store.segments)
    assert all(isinstance(segment.state, SegmentState) for segment in store.segments)
    usage = store.index.usage([segment.number for segment in store.segments])
    totals = store.index.totals()
    assert int(usage["live_blocks"].sum()) == totals.blocks
    assert int(usage["live_pages"].sum()) == totals.live_pages
    for segment, row in zip(store.segments, usage, strict=True):
        assert segment.state != SegmentState.FREE or not row["live_blocks"]
        assert row["live_pages"] * 4096 <= store.segments.segment_bytes
    own = [name for name in DISK.names(folder) if name != "segments"]
    strange = [name for name in own if not is_own_file(folder, folder, name)]
    assert not strange, f"orphans: {strange}"
    assert sum(name.startswith("manifest-") for name in own) <= 2, own
    assert "manifest.new" not in own
    used = sum(
        (entry.stat().st_blocks * 512)
        for place in (folder, folder / "segments")
        for entry in os.scandir(place)
        if entry.is_file()
    )
    assert used <= store.capacity_bytes, f"{used} bytes of {store.capacity_bytes}"
    assert store.segments.count_files() * store.segments.segment_bytes <= store.capacity_bytes
