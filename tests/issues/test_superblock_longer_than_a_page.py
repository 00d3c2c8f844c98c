"""A superblock's file that is longer than a page: what is written to its first page counts.

A file that was too long was refused for its length, and writing the page anew left the length as it
was: that superblock never counted again, and a store with two of them could not be mended.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_stores import IDENTITY, make, names, payload, read_back

from flashkv.manifest_log import whole_superblocks

HELD = [False] + [True] * 7


@pytest.mark.parametrize("longer", [["superblock.a"], ["superblock.b"], None])
def test_what_is_written_anew_counts(store_path: Path, longer: list[str] | None) -> None:
    data = payload(1, 8)
    with make(store_path) as store:
        assert store.namespace(IDENTITY).put(names(8), data).all_ok
        store.namespace(IDENTITY).delete(names(1))
    folder = store_path / "shards" / "0"
    for name in longer or ["superblock.a", "superblock.b"]:
        with (folder / name).open("ab") as file:
            file.write(b"behind")
    for _ in range(3):
        with make(store_path, geometry=None, capacity=None) as store:
            assert read_back(store.namespace(IDENTITY), names(8), data)[0].ok.tolist() == HELD
            ruling = store.manifest.superblock.generation
        found, present = whole_superblocks(folder)
        assert (len(found), present) == (2, 2)
        assert max(block.generation for block in found) == ruling
