"""What an array is, whoever made it: numpy arrays, torch tensors, buffers.

Invariants
  - torch is never imported: an object that is a tensor proves that it is loaded;
  - an ArrayInfo keeps nothing alive: who uses its address holds the object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashkv.errors import MemoryViewError
from flashkv.native import ffi

_ADDRESS: Final = ffi.typeof("uintptr_t")


class ArrayInfo(NamedTuple):
    """Strides are in bytes; flat: it came as a plain buffer, without dtype or shape of its own."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    writable: bool
    flat: bool = False

    @property
    def nbytes(self) -> int:
        total = self.item_bytes
        for size in self.shape:
            total *= size
        return total

    def describe(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def is_tensor(value: object) -> bool:
    """Whether the object is a torch tensor."""
    return bool(_is_tensor_type(type(value)))  # type: ignore[arg-type]  # types are hashable


@lru_cache(maxsize=256)
def _is_tensor_type(kind: type) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__)


def on_gpu(value: object) -> bool:
    """Whether the object is a torch tensor in CUDA memory."""
    return is_tensor(value) and str(value.device.type) == "cuda"  # type: ignore[attr-defined]


def is_array(value: object) -> bool:
    """Whether the object has a shape: a numpy array or a torch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_buffer(value: object) -> bool:
    """Whether the object is a plain buffer of bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return True
    if is_array(value) or isinstance(value, (list, tuple, str)):
        return False
    try:
        memoryview(value).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def array_info(value: Any) -> ArrayInfo:
    """Describes an array, tensor or buffer. Raises MemoryViewError where it can't."""
    if isinstance(value, np.ndarray):
        return _numpy_info(value)
    if is_tensor(value):
        return _torch_info(value)
    try:
        view = memoryview(value)
    except TypeError:
        raise MemoryViewError(
            "memory must be a torch tensor, a numpy array or a buffer",
            value=type(value).__name__,
        ) from None
    if not view.c_contiguous:
        raise MemoryViewError(
            "a buffer must be contiguous",
            value=f"strides {view.strides}",
            advice="Pass it as a numpy array",
        )
    return _numpy_info(np.frombuffer(view, np.uint8))._replace(flat=True)


def _numpy_info(array: NDArray[Any]) -> ArrayInfo:
    name, item_bytes = _numpy_dtype(array.dtype)
    address, read_only = array.__array_interface__["data"]
    return ArrayInfo(address, array.shape, array.strides, name, item_bytes, not read_only)


@lru_cache(maxsize=64)
def _numpy_dtype(dtype: np.dtype[Any]) -> tuple[str, int]:
    if dtype.hasobject or not dtype.isnative:
        raise MemoryViewError(
            "an array's dtype must be plain and in native byte order", value=dtype
        )
    return dtype.name, dtype.itemsize


def _torch_info(tensor: Any) -> ArrayInfo:
    if tensor.device.type != "cpu":
        raise MemoryViewError("a tensor must be in CPU or CUDA memory", value=tensor.device)
    if str(tensor.layout) != "torch.strided":
        raise MemoryViewError("a tensor must be strided", value=tensor.layout)
    if tensor.is_neg() or tensor.is_conj():
        raise MemoryViewError(
            "a tensor with its negative or conjugate bit set doesn't hold its own numbers",
            value=f"{tensor.dtype}{list(tensor.shape)}",
            advice="Materialise it with .resolve_neg() or .resolve_conj()",
        )
    item = tensor.element_size()
    return ArrayInfo(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(stride * item for stride in tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        item,
        True,
    )


def same_layout(items: Sequence[Any]) -> tuple[ArrayInfo, NDArray[np.int64], list[Any]]:
    """(layout that all items share, their addresses, what holds buffers in place).

    Raises MemoryViewError where one differs.
    """
    first = array_info(items[0])
    addresses = np.empty(len(items), np.int64)
    alike = _likeness(items[0])
    held = []
    for position, item in enumerate(items):
        if alike is not None and alike(item):
            buffer = ffi.from_buffer(item)
            addresses[position] = int(ffi.cast(_ADDRESS, buffer))
            # CPython's collector can't take a cycle apart in which a memoryview is something
            # else's buffer: of those a second view is held.
            held.append(memoryview(item) if type(item) is memoryview else buffer)
            continue
        info = array_info(item)
        if info[1:] != first[1:]:
            raise MemoryViewError(
                f"block {position} has another shape, stride, dtype or access than block 0",
                value=f"{info.describe()}, strides {info.strides}",
                limit=f"{first.describe()}, strides {first.strides}",
            )
        addresses[position] = info.address
    return first, addresses, held


def _likeness(first: Any) -> Callable[[Any], bool] | None:
    """A quick test for "laid out as the first item" where it and an address come cheaply."""
    kind = type(first)
    if kind in (bytes, bytearray):
        size = len(first)
        return lambda item: type(item) is kind and len(item) == size
    if kind is memoryview and first.ndim == 1 and first.c_contiguous:
        span, writes = first.nbytes, not first.readonly
        return lambda item: (
            type(item) is memoryview
            and item.nbytes == span
            and item.c_contiguous
            and item.readonly is not writes
        )
    if kind is np.ndarray and first.dtype.isbuiltin == 1 and first.flags.c_contiguous:
        shape, strides, dtype = first.shape, first.strides, first.dtype
        writable = first.flags.writeable
        return lambda item: (
            type(item) is np.ndarray
            and item.shape == shape
            and item.strides == strides
            and item.dtype == dtype
            and item.flags.writeable == writable
        )
    return None


def contiguous(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Whether elements lie in C order without gaps."""
    expected = item_bytes
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def overlaps(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Whether elements may share memory: some axis steps by less than what lies inside it."""
    if 0 in shape:
        return False  # NumPy gives empty arrays strides of zero
    span = item_bytes
    axes = sorted(
        (abs(stride), size) for size, stride in zip(shape, strides, strict=True) if size > 1
    )
    for stride, size in axes:
        if stride < span:
            return True
        span += (size - 1) * stride
    return False
