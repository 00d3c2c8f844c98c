"""Opaque bytes and long vectors in chunks that zstd made smaller.

Only where that pays, exact, and each block by itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.inspection import StoreView
from flashkv.tools.record_facts import record_detail, segment_records
from flashkv.tools.verify import DAMAGE, verify
from store_support import BACKENDS, open_store, shard_of

from flashkv import BlockStatus, Identity, KVGeometry
from flashkv.limits import PAGE_BYTES
from flashkv.native import lib

pytestmark = pytest.mark.skipif(not lib.fkv_zstd_there(), reason="no libzstd on this system")
IDENTITY = Identity(model="opaque")
BLOCKS = 5
BYTES = 3 * int(lib.FKV_CHUNK_BYTES) // 2  # two chunks, the second one half


def half_floats(blocks: int, size: int, seed: int = 1) -> np.ndarray:
    """uint8[blocks, size]: bfloat16 numbers, whose lower bytes are noise."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(blocks, size // 2 + 1)).astype(np.float32).view(np.uint32) >> 16
    return np.ascontiguousarray(made.astype(np.uint16).view(np.uint8)[:, :size])


def keys(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def codecs_of(path: Path) -> set[str]:
    view = StoreView(path)
    rows = [row for segment in view.segments.values() for row in segment_records(view, segment)]
    return {row.codec for row in rows if row.kind == "data"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [BYTES, 20001, 3 << 20])
def test_round_trip(tmp_path: Path, backend: str, size: int) -> None:
    data = half_floats(BLOCKS, size)
    data[1, : size // 2] = 0
    how = {"backend": backend, "capacity": "256MiB", "segment_bytes": "16MiB"}
    with open_store(tmp_path / "store", KVGeometry.opaque(size), **how) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(keys(BLOCKS), data).all_ok
        store.flush()
        assert store.stats().compression > 1.15
    assert codecs_of(tmp_path / "store") == {"zstd"}
    with open_store(tmp_path / "store", None, capacity=None, backend=backend) as store:
        namespace = store.namespace(IDENTITY)
        back = np.empty_like(data)
        assert namespace.get(keys(BLOCKS), back).all_ok
        assert (back == data).all()
        for chosen in ([3], [0, 4], [1, 2]):
            some = np.zeros_like(data[chosen])
            assert namespace.get([keys(BLOCKS)[i] for i in chosen], some).all_ok
            assert (some == data[chosen]).all()
    assert not verify(tmp_path / "store").of(DAMAGE)


def test_a_block_is_read_without_the_others(tmp_path: Path) -> None:
    data = half_floats(BLOCKS, BYTES)
    with open_store(tmp_path / "store", KVGeometry.opaque(BYTES)) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(keys(BLOCKS), data).all_ok
        store.flush()
        one = np.zeros_like(data[:1])
        assert namespace.get(keys(1), one).all_ok  # the header is known from here on
        before = store.stats().io["read_bytes"]
        assert namespace.get([b"3"], one).all_ok
        assert (one[0] == data[3]).all()
        assert 0 < store.stats().io["read_bytes"] - before < BYTES


@pytest.mark.parametrize("content", ["random", "small", "fast", "raw", "no zstd"])
def test_where_it_does_not_pay_blocks_stay_raw(tmp_path: Path, content: str) -> None:
    size = 300 if content == "small" else BYTES
    data = half_floats(BLOCKS, size)
    if content == "random":
        data = np.random.default_rng(1).integers(0, 256, data.shape).astype(np.uint8)
    codec = content if content in ("fast", "raw") else "lossless"
    lib.fkv_use_zstd(int(content != "no zstd"))
    try:
        with open_store(tmp_path / "store", KVGeometry.opaque(size), codec=codec) as store:
            namespace = store.namespace(IDENTITY)
            assert namespace.put(keys(BLOCKS), data).all_ok
            back = np.empty_like(data)
            assert namespace.get(keys(BLOCKS), back).all_ok
            assert (back == data).all()
        assert codecs_of(tmp_path / "store") == {"raw"}
    finally:
        lib.fkv_use_zstd(1)


def test_long_vectors_and_token_ranges(tmp_path: Path) -> None:
    geometry = KVGeometry.mla(2, 1500, 64, "bfloat16")
    assert max(plane.vector_bytes for plane in geometry.groups[0].planes) > 2048
    rng = np.random.default_rng(3)
    made = rng.normal(size=(2, 2, 64, 1564)).astype(np.float32).view(np.uint32) >> 16
    data = made.astype(np.uint16)
    with open_store(tmp_path / "store", geometry, capacity="64MiB") as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(keys(2), data.reshape(2, -1), position=0).all_ok
        store.flush()
        back = np.zeros_like(data)
        assert namespace.get(keys(2), back.reshape(2, -1)).all_ok
        assert (back == data).all()
    assert codecs_of(tmp_path / "store") == {"zstd"}


def test_damage_is_a_miss_of_its_block_alone(tmp_path: Path) -> None:
    data = half_floats(BLOCKS, BYTES)
    with open_store(tmp_path / "store", KVGeometry.opaque(BYTES)) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(keys(BLOCKS), data).all_ok
    view = StoreView(tmp_path / "store")
    record = next(r for r in segment_records(view, view.segments[0]) if r.kind == "data")
    detail = record_detail(view, 0, record.page)
    assert [tlv.name for tlv in detail.tlvs][-2:] == ["order", "chunks"]
    path = shard_of(tmp_path / "store") / "segments" / "00000000.seg"
    with open_store(tmp_path / "store", None, capacity=None) as store:
        namespace = store.namespace(IDENTITY)
        with path.open("r+b", buffering=0) as file:  # not before: an open looks at every page
            file.seek((record.page + record.header_pages + 40) * PAGE_BYTES + 77)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        back = np.zeros_like(data)
        statuses = namespace.get(keys(BLOCKS), back).statuses.tolist()
        good = [status == BlockStatus.OK for status in statuses]
        assert sum(good) == BLOCKS - 1
        assert (back[good] == data[good]).all()


def test_a_store_without_the_library_keeps_its_blocks(tmp_path: Path) -> None:
    data = half_floats(BLOCKS, BYTES)
    with open_store(tmp_path / "store", KVGeometry.opaque(BYTES)) as store:
        assert store.namespace(IDENTITY).put(keys(BLOCKS), data).all_ok
    with open_store(tmp_path / "store", None, capacity=None) as store:
        namespace = store.namespace(IDENTITY)
        back = np.zeros_like(data)
        lib.fkv_use_zstd(0)
        try:
            statuses = namespace.get(keys(BLOCKS), back).statuses
        finally:
            lib.fkv_use_zstd(1)
        assert set(statuses.tolist()) == {BlockStatus.BUSY}
        assert namespace.get(keys(BLOCKS), back).all_ok
        assert (back == data).all()
