"""A superblock that the disk never wrote, though it said so, brings no deleted block back.

Found by the damage suite: with the superblock of an earlier opening in place of the newest one the
log before the present one ruled, which doesn't know of the deletes since.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_stores import IDENTITY, edit, make, names, payload, read_back

from flashkv.manifest_log import read_superblock

KEYS = names(4)
DATA = payload(1, 4)


@pytest.mark.parametrize("read_only", [True, False])
def test_an_earlier_superblock_in_its_place(store_path: Path, read_only: bool) -> None:
    folder = store_path / "shards" / "0"
    with make(store_path) as store:
        assert store.namespace(IDENTITY).put(KEYS, DATA).all_ok
    before = {name: (folder / f"superblock.{name}").read_bytes() for name in "ab"}
    with make(store_path) as store:
        assert store.namespace(IDENTITY).delete(KEYS[:2]).all_ok
        generation = store.manifest.superblock.manifest_generation
    changed = [n for n in "ab" if (folder / f"superblock.{n}").read_bytes() != before[n]]
    assert len(changed) == 1
    with edit(folder / f"superblock.{changed[0]}") as fd:
        os.pwrite(fd, before[changed[0]], 0)
    assert read_superblock(folder).manifest_generation == generation
    with make(store_path, read_only=read_only) as store:
        result, _ = read_back(store.namespace(IDENTITY), KEYS, DATA)
        assert result.ok.tolist() == [False, False, True, True]
        assert not store.recovery.manifest_rebuilt
