"""Fault: a read-only handle beside a writer can't be opened where the writer removes a segment just
then.

flashkv guarantees: a segment file that is gone between the listing and the opening is passed over
by a read-only handle; a writer, beside which nobody removes files, tells of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_stores import IDENTITY, OPTIONS, assert_equal, make, names, payload, segment_files

from flashkv import Store, StoreError
from flashkv.filesystem import FileSystem

COUNT = 600
KEYS = names(COUNT)
BLOCKS = payload(3, COUNT)


class Removing(FileSystem):
    """Segment 0 goes away just before it is opened."""

    def __init__(self) -> None:
        self.removed = False

    def open(self, path: Path, flags: int) -> int:
        if path.name == "00000000.seg" and not self.removed:
            self.removed = True
            path.unlink()
        return super().open(path, flags)


def open_removing(folder: Path, *, read_only: bool) -> Store:
    files = Removing()
    try:
        return Store(folder, None, None, OPTIONS.resolved(), read_only=read_only, files=files)
    finally:
        assert files.removed


def fill(folder: Path) -> Store:
    store = make(folder, codec="raw")
    namespace = store.namespace(IDENTITY)
    for at in range(0, COUNT, 16):
        namespace.put(KEYS[at : at + 16], BLOCKS[at : at + 16])
    store.flush()
    assert len(segment_files(folder)) > 1
    return store


def test_a_reader_passes_over_it(folder: Path) -> None:
    with fill(folder), open_removing(folder, read_only=True) as reader:
        namespace = reader.namespace(IDENTITY)
        present = namespace.contains(KEYS)
        assert 0 < present.sum() < COUNT
        rows = present.nonzero()[0]
        assert_equal(namespace, [KEYS[row] for row in rows], BLOCKS[rows])


def test_a_writer_tells(folder: Path) -> None:
    fill(folder).close()
    with pytest.raises(StoreError, match="can't open"):
        open_removing(folder, read_only=False)
