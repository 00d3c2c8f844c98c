"""The compiled data plane as Python sees it: cffi's `ffi` and `lib`, numpy views of its structures.

Invariants
 - no layout is written down in Python: numpy dtypes are made from the offsets that the C compiler
   gave to cffi;
 - a pointer made here does not keep its array alive: the caller holds the array for as long as C
   uses it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flashkv import _native

ffi: Final[Any] = _native.ffi
lib: Final[Any] = _native.lib

# Kinds of C integers that the headers use, by size and signedness.
_UNSIGNED: Final = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_SIGNED: Final = {1: "<i1", 2: "<i2", 4: "<i4", 8: "<i8"}


def _field_dtype(ctype: Any) -> np.dtype[Any] | tuple[np.dtype[Any], tuple[int, ...]]:
    shape: list[int] = []
    while ctype.kind == "array":
        shape.append(int(ctype.length))
        ctype = ctype.item
    size = int(ffi.sizeof(ctype))
    if ctype.kind == "struct":
        element = dtype_of(str(ctype.cname))
    elif ctype.kind == "pointer":
        element = np.dtype(_UNSIGNED[size])  # an address
    elif ctype.kind == "primitive":
        signed = int(ffi.cast(ctype, -1)) < 0
        element = np.dtype((_SIGNED if signed else _UNSIGNED)[size])
    else:
        raise TypeError(f"no numpy type for {ctype.cname}")
    return (element, tuple(shape)) if shape else element


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Structured dtype of the C structure `name`; pointers become uint64 addresses.

    Raises TypeError where `name` is no structure.
    """
    ctype = ffi.typeof(name)
    if ctype.kind != "struct":
        raise TypeError(f"{name} is no structure")
    fields = ctype.fields
    return np.dtype(
        {
            "names": [field for field, _ in fields],
            "formats": [_field_dtype(field.type) for _, field in fields],
            "offsets": [int(field.offset) for _, field in fields],
            "itemsize": int(ffi.sizeof(ctype)),
        }
    )


def address(array: npt.NDArray[Any]) -> int:
    """Address of the first byte of a C-contiguous array."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer(array)))


@cache
def _array_type(ctype: str) -> tuple[Any, int]:
    """("fkv_place[]", size of its items; 0 where any array may be seen as such)."""
    item = ffi.typeof(ctype).item
    size = int(ffi.sizeof(item)) if item.kind == "struct" else 0
    return ffi.typeof(ffi.getctype(item, "[]")), size


def pointer(array: npt.NDArray[Any] | None, ctype: str) -> Any:
    """cffi pointer of type `ctype` ("fkv_place *") to a C-contiguous array; None becomes NULL.

    Raises ValueError where the array is not contiguous, or where its items are structures of
    another size.
    """
    if array is None:
        return ffi.NULL
    kind, size = _array_type(ctype)
    if size and array.dtype.itemsize != size and array.dtype.names is not None:
        raise ValueError(f"items of {array.dtype.itemsize} bytes, {ctype} needs {size}")
    return ffi.from_buffer(kind, array)  # some ten times faster than array.ctypes


def aligned_array(length_bytes: int) -> npt.NDArray[np.uint8]:
    """uint8 array [length_bytes] of zeros that begins on a page, on huge pages where to be had.

    The memory goes back to the system with the last array that refers to it. Raises
    OutOfMemoryError.
    """
    base = lib.fkv_buffer_alloc(length_bytes)
    if base == ffi.NULL:
        from flashkv.errors import OutOfMemoryError

        raise OutOfMemoryError(f"no {length_bytes} bytes of page-aligned memory")
    owner = ffi.gc(base, lambda memory: lib.fkv_buffer_free(memory, length_bytes), length_bytes)
    return np.frombuffer(ffi.buffer(owner, length_bytes), dtype=np.uint8)


def aligned_copy(data: bytes) -> npt.NDArray[np.uint8]:
    """A copy of the bytes that begins on a page, for direct I/O."""
    array = aligned_array(max(len(data), 1))
    array[: len(data)] = np.frombuffer(data, np.uint8)
    return array[: len(data)]
