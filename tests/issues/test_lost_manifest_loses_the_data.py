"""Fault: losing the index or checkpoint file makes the data useless.

flashkv guarantees: a lost or damaged manifest is rebuilt from the segments, which describe
themselves; one lost superblock costs nothing, deletes included; only when both are gone open()
refuses, and names the repair tool.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_stores import IDENTITY, assert_equal, edit, make, names, payload

from flashkv import Identity, SuperblockError

BLOCKS = payload(5, 600)
KEYS = names(600)


def shard(path: Path) -> Path:
    return path / "shards" / "0"


@pytest.fixture
def filled(folder: Path) -> Path:
    with make(folder) as store:
        store.namespace(IDENTITY).put(KEYS, BLOCKS)
        store.namespace(Identity(model="other")).put(KEYS[:50], BLOCKS[50:100])
    return folder


def check(path: Path) -> None:
    for _ in range(2):
        with make(path) as store:
            assert_equal(store.namespace(IDENTITY), KEYS, BLOCKS)
            other = store.namespace(Identity(model="other"))
            assert_equal(other, KEYS[:50], BLOCKS[50:100])
            assert other.match(KEYS).count == 50


def test_the_log_is_deleted(filled: Path) -> None:
    for log in shard(filled).glob("manifest-*.log"):
        log.unlink()
    with make(filled) as store:
        assert store.stats().recovery["manifest_rebuilt"] is True
    check(filled)


@pytest.mark.parametrize("keep", [0, 1, 40, 100])
def test_the_log_is_cut(filled: Path, keep: int) -> None:
    for log in shard(filled).glob("manifest-*.log"):
        with log.open("r+b") as file:
            file.truncate(keep)
    check(filled)


def test_the_log_is_zeroed(filled: Path) -> None:
    for log in shard(filled).glob("manifest-*.log"):
        log.write_bytes(bytes(log.stat().st_size))
    check(filled)


def test_a_rebuilt_store_goes_on(filled: Path) -> None:
    """After a rebuild nothing gets a sequence or an epoch twice: new blocks and deletes last."""
    for log in shard(filled).glob("manifest-*.log"):
        log.unlink()
    with make(filled) as store:
        namespace = store.namespace(IDENTITY)
        assert (namespace.put(names(600, "new"), BLOCKS).statuses == 0).all()
        namespace.delete(KEYS[:10])
        namespace.put(KEYS[20:30], BLOCKS[:10], replace=True)
    with make(filled) as store:
        namespace = store.namespace(IDENTITY)
        assert not namespace.contains(KEYS[:10]).any()
        assert_equal(namespace, names(600, "new"), BLOCKS)
        assert_equal(namespace, KEYS[20:30], BLOCKS[:10])
        assert_equal(namespace, KEYS[30:], BLOCKS[30:])


@pytest.mark.parametrize("harm", ["delete", "flip"])
@pytest.mark.parametrize("name", ["superblock.a", "superblock.b"])
def test_one_superblock_is_lost(filled: Path, name: str, harm: str) -> None:
    """Neither blocks nor deletes depend on which of the two it is."""
    with make(filled) as store:
        store.namespace(IDENTITY).delete(KEYS[:100])
    if harm == "delete":
        (shard(filled) / name).unlink()
    else:
        page = bytearray((shard(filled) / name).read_bytes())
        page[60] ^= 4
        (shard(filled) / name).write_bytes(page)
    for _ in range(2):
        with make(filled) as store:
            namespace = store.namespace(IDENTITY)
            assert not namespace.contains(KEYS[:100]).any(), "deleted blocks came back"
            assert_equal(namespace, KEYS[100:], BLOCKS[100:])


def test_both_superblocks_are_lost(filled: Path) -> None:
    for name in ("superblock.a", "superblock.b"):
        with edit(shard(filled) / name) as fd:
            os.pwrite(fd, bytes(4096), 0)
    before = sorted(path.name for path in shard(filled).rglob("*"))
    with pytest.raises(SuperblockError, match="flashkv-fsck --repair"):
        make(filled)
    assert sorted(path.name for path in shard(filled).rglob("*")) == before
