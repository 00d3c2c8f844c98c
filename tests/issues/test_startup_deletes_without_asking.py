"""Fault: a start-up scan deletes files that it takes for garbage.

flashkv guarantees: opening deletes no block that fits the capacity, and never a file that isn't a
store's own; blocks go at an open only where a smaller capacity was asked for.
"""

from __future__ import annotations

from pathlib import Path

from small_stores import IDENTITY, assert_equal, make, names, payload, segment_files

BLOCKS = payload(9, 700)
KEYS = names(700)


def test_foreign_files_stay(folder: Path) -> None:
    foreign = {
        folder / "README": b"mine",
        folder / "shards.bak" / "0.seg": b"backup",
        folder / "shards" / "notes.txt": b"notes",
    }
    for path, text in foreign.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    for _ in range(3):
        with make(folder) as store:
            store.namespace(IDENTITY).put(KEYS, BLOCKS)
        for path, text in foreign.items():
            assert path.read_bytes() == text


def test_files_in_the_segments_folder_stay(folder: Path) -> None:
    """Names that aren't a segment's, and numbers that none can have, are left alone."""
    with make(folder) as store:
        store.namespace(IDENTITY).put(KEYS, BLOCKS)
    segments = folder / "shards" / "0" / "segments"
    foreign = [segments / "00000000.seg.bak", segments / "x.tmp", segments / "99999999.seg"]
    for path in foreign:
        path.write_bytes(b"mine")
    for _ in range(2):
        with make(folder) as store:
            assert_equal(store.namespace(IDENTITY), KEYS, BLOCKS)
    assert all(path.read_bytes() == b"mine" for path in foreign)


def test_an_open_drops_nothing(folder: Path) -> None:
    with make(folder) as store:
        store.namespace(IDENTITY).put(KEYS, BLOCKS)
    before = [path.stat().st_size for path in segment_files(folder)]
    for _ in range(3):
        with make(folder) as store:
            assert_equal(store.namespace(IDENTITY), KEYS, BLOCKS)
            assert store.stats().evicted_blocks == 0
        assert [path.stat().st_size for path in segment_files(folder)] == before
