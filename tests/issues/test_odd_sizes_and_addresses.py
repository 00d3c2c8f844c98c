"""Fault: O_DIRECT with odd sizes or addresses gives EINVAL, and the tier is silently dead.

flashkv guarantees: blocks of any size at any address round-trip, on file systems with and without
direct I/O; what could not go straight is counted in stats().
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_disks import small_disk
from small_stores import BACKENDS, MIB, make, names

from flashkv import Identity, KVGeometry, Pointers
from flashkv.native import aligned_array

SIZES = [1, 28, 511, 4095, 4096, 4097, 1_000_003]
OFFSETS = [0, 1, 8, 64, 512, 4095]
IDENTITY = Identity(model="m")


def round_trip(folder: Path, size: int, **how: object) -> dict[str, int]:
    """Puts and gets blocks from and to all offsets; the counters of I/O."""
    geometry = KVGeometry.opaque(size)
    source = aligned_array(MIB + 8192)
    source[:] = np.random.default_rng(size).integers(0, 256, len(source), np.uint8)
    with make(folder, geometry=geometry, segment_bytes=8 * MIB, **how) as store:
        namespace = store.namespace(IDENTITY)
        keys = names(len(OFFSETS))
        address = source.ctypes.data
        starts = np.array([address + offset for offset in OFFSETS], np.uint64)
        assert (namespace.put(keys, Pointers(starts, source)).statuses == 0).all()
        store.flush()
        for shift in OFFSETS:
            memory = aligned_array((size + 8192) * len(keys) // 4096 * 4096 + 16384)
            memory[:] = 0xEE
            step = size + 37 if shift else -(-size // 4096) * 4096
            places = np.array(
                [memory.ctypes.data + shift + step * row for row in range(len(keys))], np.uint64
            )
            assert namespace.get(keys, Pointers(places, memory)).all_ok
            for row, offset in enumerate(OFFSETS):
                at = shift + step * row
                assert np.array_equal(memory[at : at + size], source[offset : offset + size])
                assert (memory[at + size : at + min(step, size + 32)] == 0xEE).all(), "beyond it"
        counters = store.stats().io
    with make(folder, **how) as store:
        out = np.zeros((len(OFFSETS), size), np.uint8)
        assert store.namespace(IDENTITY).get(names(len(OFFSETS)), out).all_ok
        for row, offset in enumerate(OFFSETS):
            assert np.array_equal(out[row], source[offset : offset + size])
    return counters


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_sizes(folder: Path, backend: str, direct_io: bool, size: int) -> None:
    counters = round_trip(folder, size, backend=backend, direct_io=direct_io, codec="raw")
    if size >= 4096 and direct_io:
        assert counters["bounced_reads"] > 0
    if size == 4096:
        assert counters["direct_reads"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_system_that_refuses_direct_io(backend: str) -> None:
    with small_disk("ramfs") as disk:
        with make(disk.place, backend=backend, geometry=KVGeometry.opaque(4097)) as store:
            assert store.stats().direct_io is False
        for size in (28, 4097):
            round_trip(disk.place / str(size), size, backend=backend)


@pytest.mark.parametrize("offset", [2, 8, 64, 512])
def test_kv_at_odd_addresses(folder: Path, offset: int) -> None:
    """bf16 blocks whose array begins anywhere, through the lossless codec."""
    count = 9 * 2 * 2 * 2 * 16 * 64
    memory = aligned_array(2 * count + 4096)
    view = memory[offset : offset + 2 * count].view(np.uint16).reshape(9, 2, 2, 2, 16, 64)
    view[:] = np.random.default_rng(offset).integers(0, 1 << 16, view.shape, np.uint16)
    before = view.copy()
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(names(9), view).all_ok
        store.flush()
        view[:] = 0
        assert namespace.get(names(9), view).all_ok
        assert np.array_equal(view, before)
