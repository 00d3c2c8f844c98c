"""Fault: a store of another geometry or a newer format is opened as if it were one's own.

flashkv guarantees: another geometry is a GeometryError that shows both; another format version, an
unknown feature or another page size a FormatError; and a refused open changes no byte.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from small_stores import IDENTITY, assert_equal, edit, make, names, payload, segment_files

from flashkv import FormatError, GeometryError, KVGeometry
from flashkv.checksums import crc32c
from flashkv.native import ffi

BLOCKS = payload(2, 300)
SUPERBLOCKS = ("superblock.a", "superblock.b")


@pytest.fixture
def filled(folder: Path) -> Path:
    with make(folder) as store:
        store.namespace(IDENTITY).put(names(300), BLOCKS)
    return folder


def content(path: Path) -> dict[str, bytes]:
    """All bytes but those of the lock."""
    return {
        str(item.relative_to(path)): item.read_bytes()
        for item in sorted(path.rglob("*"))
        if item.is_file() and item.name != "lock"
    }


def patch(file: Path, struct_name: str, field: str, value: bytes) -> None:
    """Changes a field of a page and makes the page's checksum right again."""
    page = bytearray(file.read_bytes()[:4096])
    at = ffi.offsetof(struct_name, field)
    page[at : at + len(value)] = value
    page[8:12] = bytes(4)
    page[8:12] = struct.pack("<I", crc32c(0, bytes(page)))
    with edit(file) as fd:
        os.pwrite(fd, page, 0)


@pytest.mark.parametrize(
    "geometry",
    [
        KVGeometry.gqa(2, 2, 64, "float16"),
        KVGeometry.gqa(2, 4, 32, "bfloat16"),
        KVGeometry.gqa(3, 2, 64, "bfloat16"),
        KVGeometry.mla(2, 128, 128, "bfloat16"),
        KVGeometry.opaque(1024),
    ],
)
def test_another_geometry(filled: Path, geometry: KVGeometry) -> None:
    before = content(filled)
    with pytest.raises(GeometryError, match="another geometry"):
        make(filled, geometry=geometry)
    assert content(filled) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", struct.pack("<I", 1)),
        ("version", struct.pack("<I", 0xFFFFFFFF)),
        ("features_incompatible", struct.pack("<Q", 1 << 40)),
        ("features_read_only", struct.pack("<Q", 1)),
        ("page_shift", struct.pack("<I", 14)),
        ("checksum_id", struct.pack("<I", 2)),
    ],
)
def test_a_superblock_of_another_format(filled: Path, field: str, value: bytes) -> None:
    for name in SUPERBLOCKS:
        patch(filled / "shards" / "0" / name, "fkv_superblock", field, value)
    before = content(filled)
    for read_only in (False, True):
        with pytest.raises(FormatError):
            make(filled, read_only=read_only)
    assert content(filled) == before


def test_an_unknown_compatible_feature_is_no_obstacle(filled: Path) -> None:
    for name in SUPERBLOCKS:
        patch(
            filled / "shards" / "0" / name,
            "fkv_superblock",
            "features_compatible",
            struct.pack("<Q", 1 << 3),
        )
    with make(filled) as store:
        assert_equal(store.namespace(IDENTITY), names(300), BLOCKS)


def test_a_segment_of_another_format(filled: Path) -> None:
    patch(segment_files(filled)[0], "fkv_segment_header", "version", struct.pack("<I", 7))
    before = content(filled)
    with pytest.raises(FormatError, match="version"):
        make(filled)
    assert content(filled) == before


def test_a_segment_of_another_store(folder: Path, filled: Path) -> None:
    """A segment file that was copied in from elsewhere is never read as one's own."""
    other = folder / "other"
    with make(other) as store:
        store.namespace(IDENTITY).put(names(300), payload(99, 300))
    strange = segment_files(other)[0].read_bytes()
    target = segment_files(filled)[0]
    target.write_bytes(strange)
    with make(filled) as store:
        namespace = store.namespace(IDENTITY)
        assert not namespace.contains(names(200)).any()
        assert (namespace.put(names(300), BLOCKS).ok).all()
        assert_equal(namespace, names(300), BLOCKS)
