"""numpy sees the native structures as the C compiler laid them out."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from flashkv.native import address, aligned_array, dtype_of, ffi, lib, pointer


@pytest.mark.parametrize(
    "name",
    ["fkv_superblock", "fkv_segment_footer", "fkv_record_header", "fkv_place", "fkv_read_record"],
)
def test_offsets_are_the_compilers(name: str) -> None:
    dtype = dtype_of(name)
    assert dtype.itemsize == ffi.sizeof(name)
    assert dtype.names is not None
    for field in dtype.names:
        assert dtype.fields is not None
        assert dtype.fields[field][1] == ffi.offsetof(name, field)


def test_values_cross_the_border() -> None:
    rows = np.zeros(2, dtype_of("fkv_write"))
    rows[1] = (7, 1 << 40, 4096, 0xFFFF0000FFFF, -3, -5)
    native = pointer(rows, "fkv_write *")
    assert (native[1].tag, native[1].offset, native[1].fd, native[1].result) == (7, 1 << 40, -3, -5)
    assert int(ffi.cast("uintptr_t", native[1].data)) == 0xFFFF0000FFFF
    native[0].result = -11
    assert rows["result"][0] == -11


def test_nested_structures_and_arrays() -> None:
    dtype = dtype_of("fkv_segment_footer")
    assert dtype["sections"].shape == (lib.FKV_SECTIONS_MAX,)
    assert dtype["sections"].base == dtype_of("fkv_section")
    assert dtype["magic"].shape == (8,)


def test_wrong_memory_is_refused() -> None:
    assert pointer(None, "uint8_t *") == ffi.NULL
    with pytest.raises(ValueError, match="not C-contiguous"):
        pointer(np.zeros((4, 4))[:, ::2], "uint8_t *")
    with pytest.raises(ValueError, match="items of"):
        pointer(np.zeros(1, dtype_of("fkv_section")), "fkv_write *")
    with pytest.raises(TypeError, match="no structure"):
        dtype_of("uint32_t")


@pytest.mark.parametrize("length", [1, 4096, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 4096])
def test_aligned_arrays(length: int) -> None:
    array = aligned_array(length)
    assert address(array) % 4096 == 0
    assert array.nbytes == length
    assert not array.any()
    array[:] = 1
    tail = array[-1:]
    del array
    gc.collect()
    assert tail[0] == 1, "a slice keeps the memory"


def test_no_memory_is_an_exception() -> None:
    with pytest.raises(MemoryError):
        aligned_array(1 << 62)
