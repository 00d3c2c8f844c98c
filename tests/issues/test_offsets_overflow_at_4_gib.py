"""Fault: size or offset arithmetic overflows at 4 GiB.

flashkv guarantees: offsets are 64 bits wide everywhere: a record beyond 4 GiB of a segment goes
there and comes back, through directories and scans; what is larger than the limits is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from small_stores import (
    BACKENDS,
    BLOCK_SHAPE,
    GEOMETRY,
    IDENTITY,
    MIB,
    PAGE,
    assert_equal,
    make,
    names,
    payload,
    place_of,
    segment_file,
)

from flashkv import BlockStatus, GeometryError, KVGeometry, OptionsError, limits, options
from flashkv.blockio import WRITE_DTYPE, BlockIO
from flashkv.filesystem import FileSystem
from flashkv.native import address, aligned_array

GIB = 1 << 30
FAR = 4 * GIB + 5 * PAGE


@pytest.mark.parametrize("backend", BACKENDS)
def test_io_beyond_4_gib(folder: Path, backend: str) -> None:
    with BlockIO(folder, backend=backend) as io:
        fd = io.open_file(folder / "sparse", create=True, writable=True)
        data = aligned_array(2 * MIB)
        data[:] = np.random.default_rng(0).integers(0, 256, 2 * MIB, np.uint8)
        row = np.zeros(1, WRITE_DTYPE)
        row[0] = (1, FAR, data.nbytes, address(data), fd, 0)
        io.write_submit(row, data)
        assert io.write_reap(1, 10_000)["result"].tolist() == [0]
        assert io.write(fd, data[:PAGE], 2**33) == 0
        back = aligned_array(2 * MIB)
        assert io.read(fd, back, FAR) == 0
        assert np.array_equal(back, data)
        assert io.read(fd, back[:PAGE], 2**33) == 0
        assert np.array_equal(back[:PAGE], data[:PAGE])
        assert io.read(fd, back[:PAGE], FAR - 2**32) == 0
        assert not back[:PAGE].any(), "nothing wrapped around"
        assert (folder / "sparse").stat().st_size == 2**33 + PAGE
        os.close(fd)


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 5 GiB that take no space: beyond what options allow."""
    monkeypatch.setattr(limits, "SEGMENT_BYTES_MAX", 8 * GIB)
    monkeypatch.setattr(
        FileSystem,
        "preallocate",
        lambda _, fd, length_bytes: os.ftruncate(fd, length_bytes) is not None,
    )
    monkeypatch.setattr(FileSystem, "free_bytes", lambda *_: 1 << 50)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["lossless", "raw"])
def test_a_segment_beyond_4_gib(folder: Path, sparse: None, backend: str, codec: str) -> None:
    """Records behind the 4 GiB line of a segment: read, partly read, sealed, found by a reopen."""
    blocks = payload(3, 200)
    keys = names(200)
    how = {"backend": backend, "codec": codec}
    with make(folder, capacity=32 * GIB, segment_bytes=5 * GIB, **how) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(keys[:50], blocks[:50]).all_ok
        store.flush()
        segment = store.segments[0]
        segment.next_page = FAR // PAGE  # as if 4 GiB had been written
        assert namespace.put(keys[50:], blocks[50:]).all_ok
        place = place_of(namespace, keys[50])
        assert int(place["page"]) * PAGE >= FAR
        assert_equal(namespace, keys, blocks)
        some = np.zeros((150, 1, 2, 1, 3, 64), np.uint16)
        assert namespace.get(keys[50:], some, layers=[1], heads=[0], token_range=(5, 8)).all_ok
        assert np.array_equal(some, blocks[50:, 1:2, :, 0:1, 5:8])
        with store.writer_lock:
            store.writer.seal()
        store.flush()
    assert segment_file(folder, 0).stat().st_size == 5 * GIB
    assert segment_file(folder, 0).stat().st_blocks * 512 < 64 * MIB
    with make(folder, **how) as store:
        assert store.stats().recovery["sealed_segments"] == 1
        assert_equal(store.namespace(IDENTITY), keys, blocks)


def test_oversize_is_refused(folder: Path) -> None:
    with pytest.raises(OptionsError, match="segment_bytes"):
        make(folder, segment_bytes=4 * GIB)
    for vector_bytes in (GIB + 1, 4 * GIB, 2**63):
        with pytest.raises(GeometryError):
            KVGeometry.opaque(vector_bytes)
    assert options.parse_bytes("5GiB") == 5 * GIB


def test_a_block_beyond_the_limit(folder: Path) -> None:
    """A block larger than a quarter of a segment is refused by status; the rest of its batch is
    stored.
    """
    small, large = payload(1, 1), payload(2, 1, (*BLOCK_SHAPE[:3], 1024, 64))
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        assert large[0].nbytes >= store.block_bytes_max
        assert namespace.put([b"large"], large)[0] == BlockStatus.BLOCK_TOO_LARGE
        assert namespace.put([b"small"], small)[0] == BlockStatus.OK
        assert namespace.contains([b"large", b"small"]).tolist() == [False, True]
        both = np.zeros((2, *BLOCK_SHAPE[:3], 1024, 64), np.uint16)
        both[:, :, :, :, :16] = payload(4, 2)
        result = namespace.put([b"l2", b"s2"], both, tokens=[1024, 16])
        assert list(result) == [BlockStatus.BLOCK_TOO_LARGE, BlockStatus.OK]
        assert GEOMETRY.block_bytes(0, 1024) == large[0].nbytes


def test_sizes_of_a_batch_beyond_4_gib(folder: Path) -> None:
    """Counting doesn't wrap: 5 GiB of blocks are refused one by one, in the right number."""
    geometry = KVGeometry.opaque(GIB)
    block = np.zeros(GIB, np.uint8)
    capacity = 40 * MIB
    with make(folder, geometry=geometry, capacity=capacity) as store:
        namespace = store.namespace(IDENTITY)
        result = namespace.put(names(5), [block] * 5)
        assert (result.statuses == BlockStatus.BLOCK_TOO_LARGE).all()
        stats = store.stats()
        assert stats.put_bytes == 5 * GIB
        assert stats.refused_blocks == 5
