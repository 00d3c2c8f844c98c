"""A store made with fixed names, times and data has these bytes, whichever backend wrote them.

A change of these digests is a change of the format, or of what is written when. Under version 0
that is allowed: say so in the commit, and take the new digests from the failure's message.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.facts import store_facts
from flashkv.tools.inspection import StoreView
from flashkv.tools.record_facts import StreamFacts, record_detail, segment_records
from fxp_reference import LEVELS
from store_support import BACKENDS, open_store, shard_of

from flashkv import Identity, KVGeometry
from flashkv.native import lib

GEOMETRY = KVGeometry.gqa(2, 2, 64, "bfloat16")
KEYS = [f"key-{n}".encode() for n in range(20)]
NOW_MS = 1_700_000_000_000
COMMON = {
    "manifest-00000002.log": "d9100693fbb8bdb6",
    "manifest-00000003.log": "47b902dd8bfad0d2",
    "superblock.a": "4cc4538fe83dc3cb",
    "superblock.b": "72efeb3db7ab9304",
}
GOLDEN = {
    "raw": {**COMMON, "segments/00000000.seg": "893ee5151c280880"},
    "lossless": {**COMMON, "segments/00000000.seg": "004703797c8e2186"},
    "fast": {**COMMON, "segments/00000000.seg": "aa68868ab14a05ad"},
}
"""By codec, of bfloat16."""
OTHERS = {
    ("bounded-2", "bfloat16"): (
        "644e9af69d64fa87",
        {"bounded by channel, bfloat16", "bounded by token, bfloat16"},
    ),
    ("bounded-4", "float16"): (
        "ab6204dc80fca011",
        {"bounded by channel, float16", "bounded by token, float16"},
    ),
    ("lossless", "float16"): ("ce9a528ff65b9e34", {"prefix code, float16"}),
    ("lossless", "float32"): ("ed00892b33c72e4f", {"prefix code, float32"}),
    ("lossless", "float8_e4m3fn"): ("20a018325cf0f55d", {"prefix code, float8_e4m3fn"}),
    ("lossless", "int8"): ("c364b4d93b56843f", {"token delta"}),
}
"""By codec and type: the segment, and how its first record's streams are coded. None that zstd
codes: those bytes are its version's."""


def fixed_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = itertools.count(1)
    monkeypatch.setattr("flashkv.opening.now_ms", lambda: NOW_MS)
    for module in ("opening", "space"):
        monkeypatch.setattr(f"flashkv.{module}.new_uuid", lambda: bytes([next(names)] * 16))


def make_other(path: Path, codec: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As make(), of values that rise and fall slowly from token to token."""
    fixed_names(monkeypatch)
    geometry = KVGeometry.gqa(2, 2, 64, dtype)
    token, dim = np.meshgrid(np.arange(320) % 199, np.arange(64) % 17, indexing="ij")
    steps = ((token * (dim + 3)) % 97 - 48).astype(np.int8)  # whole numbers: the same anywhere
    blocks = steps.reshape(len(KEYS), 1, 1, 1, 16, 64).repeat(2, 1).repeat(2, 2).repeat(2, 3)
    data = {
        "bfloat16": lambda: (blocks.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "float16": lambda: blocks.astype(np.float16),
        "float32": lambda: blocks.astype(np.float32) / np.float32(7),
        "float8_e4m3fn": lambda: (blocks & 0x7).view(np.uint8) + np.uint8(0x30),
        "int8": lambda: np.where(
            blocks > 40, blocks, dim.reshape(*blocks.shape[:1], 1, 1, 1, 16, 64)
        ).astype(np.int8),
    }[dtype]()
    with open_store(path, geometry, codec=codec) as store:
        namespace = store.namespace(Identity(model="golden", revision="1"))
        assert namespace.put(KEYS, data, position=0, parents=[b"", *KEYS[:-1]]).all_ok


def make(path: Path, codec: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of 19 live blocks, by a clock that stands and names that count."""
    fixed_names(monkeypatch)
    ramp = np.arange(len(KEYS) * 2 * 2 * 2 * 16 * 64, dtype=np.float32) % 251 - 125
    data = (ramp.view(np.uint32) >> 16).astype(np.uint16).reshape(len(KEYS), 2, 2, 2, 16, 64)
    with open_store(path, GEOMETRY, codec=codec, backend=backend) as store:
        namespace = store.namespace(Identity(model="golden", revision="1"))
        assert namespace.put(KEYS, data, position=0, parents=[b"", *KEYS[:-1]]).all_ok
        assert namespace.delete(KEYS[3:4]).all_ok


def digests(path: Path) -> dict[str, str]:
    """SHA-256 of every file, without the zeros at its end."""
    return {
        str(file.relative_to(shard_of(path))): hashlib.sha256(
            file.read_bytes().rstrip(b"\0")
        ).hexdigest()[:16]
        for file in sorted(shard_of(path).rglob("*"))
        if file.is_file() and file.name != "lock"
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", sorted(GOLDEN))
def test_golden_bytes(
    tmp_path: Path, codec: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "store", codec, backend, monkeypatch)
    assert digests(tmp_path / "store") == GOLDEN[codec]


@pytest.mark.parametrize("codec", sorted(GOLDEN))
def test_portable_code_writes_the_same(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib.fkv_use_simd(0)
    try:
        make(tmp_path / "store", codec, "auto", monkeypatch)
    finally:
        lib.fkv_use_simd(1)
    assert digests(tmp_path / "store") == GOLDEN[codec]


@pytest.mark.parametrize("simd", LEVELS)
@pytest.mark.parametrize(("codec", "dtype"), sorted(OTHERS))
def test_golden_bytes_of_other_codes(
    tmp_path: Path, codec: str, dtype: str, simd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib.fkv_use_simd(simd)
    try:
        make_other(tmp_path / "store", codec, dtype, monkeypatch)
    finally:
        lib.fkv_use_simd(1)
    found = digests(tmp_path / "store")["segments/00000000.seg"]
    modes = {stream.mode for stream in streams_of(tmp_path / "store")}
    assert (found, modes) == OTHERS[codec, dtype]


def streams_of(path: Path) -> list[StreamFacts]:
    """Of the first record with blocks."""
    view = StoreView(path)
    page = next(row.page for row in segment_records(view, view.segments[0]) if row.blocks)
    return record_detail(view, 0, page).streams


@pytest.mark.parametrize("codec", sorted(GOLDEN))
def test_structure(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in words: what lies where."""
    make(tmp_path / "store", codec, "auto", monkeypatch)
    view = StoreView(tmp_path / "store")
    facts = store_facts(view)
    assert (facts.store_uuid, facts.created_ms) == (bytes([1] * 16), NOW_MS)
    assert facts.manifest.entries == {"begin": 1, "namespace": 1, "opened": 1, "kill": 1}
    (segment,) = facts.segments
    assert (segment.state, segment.epoch, segment.uuid) == ("open", 1, bytes([2] * 16))
    rows = segment_records(view, view.segments[0])
    shapes = [(row.kind, row.page, row.header_pages, row.blocks, row.live_blocks) for row in rows]
    pages = [row.pages for row in rows]
    assert shapes[0] == ("namespace", 1, 1, 0, 0)
    assert shapes[1][:4] == ("data", 2, 1, 16)
    assert shapes[1][4] == 15
    assert shapes[2][3:] == (4, 4)
    assert [row.page for row in rows[1:]] == [2, 2 + pages[1]]
    detail = record_detail(view, 0, 2)
    assert detail.header["start_token"] == 0
    assert record_detail(view, 0, rows[2].page).header["start_token"] == 256
    assert [block.parent for block in detail.blocks] == [b"", *KEYS[:15]]
    names = [tlv.name for tlv in detail.tlvs]
    if codec == "raw":
        assert pages == [1, 1 + 64, 1 + 16]
        assert names == ["blocks", "keys", "planes", "page_crcs", "order"]
        assert (detail.header["flags"], detail.order) == ("aligned", "layer plane head token")
    else:
        assert pages[1] < 1 + 64
        assert names == ["blocks", "keys", "planes", "page_crcs", "streams", "stripes"]
        assert [(s.layer, s.plane, s.head) for s in detail.streams] == [
            (layer, plane, head) for layer in (0, 1) for plane in (0, 1) for head in (0, 1)
        ]
        assert all(stream.full_stripes for stream in detail.streams)
        prefix = codec == "lossless"
        assert {stream.mode for stream in detail.streams} == {
            "prefix code, bfloat16" if prefix else "exponent code, bfloat16"
        }
        assert {len(stream.parameters) for stream in detail.streams} == {65 if prefix else 33}
        assert (detail.header["codec"], detail.header["table_set"]) == (codec, int(prefix))
