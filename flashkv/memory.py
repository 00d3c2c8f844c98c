"""The caller's memory: whatever holds the blocks of a batch, as addresses and an fkv_view.

Invariants
  - no address is handed out that was not checked: shape, dtype, strides, length, and for
    destinations that they can be written and don't overlap;
  - a BlockMemory keeps alive all memory that its addresses name;
  - work per block is array arithmetic; only lists of separate buffers are walked, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import checks, limits
from flashkv.arrays import (
    ArrayInfo,
    array_info,
    contiguous,
    is_array,
    is_buffer,
    overlaps,
    same_layout,
)
from flashkv.errors import MemoryViewError, ReadOnlyDestinationError
from flashkv.geometry import DType, KVGeometry, MemoryView
from flashkv.layout import (
    ALL,
    NativeView,
    Selection,
    opaque_or_packed_view,
    packed_view,
    view_of_arrays,
    view_regions,
)
from flashkv.staging import nothing_to_finish, staged

DEFAULT_VIEW: Final = MemoryView()


@dataclass(frozen=True, eq=False)
class Regions:
    """Memory of a batch, region by region: `tensors[r]` holds region r of every block.

    rows      block i of the batch is row rows[i] of each tensor; None: row i. Of paged memory
              int[N, pages]: the rows of its pages. With several row axes a row is as many ints,
              along a last axis of their own.
    row_axis  axis of the tensors that counts rows, or the axes that do so together; the remaining
              axes are those of the view.
    """

    tensors: Sequence[Any]
    rows: Any = None
    row_axis: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        if not isinstance(self.tensors, (list, tuple)):
            raise MemoryViewError(
                "Regions needs a list of tensors, one a region", value=checks.shown(self.tensors)
            )
        for axis in self.row_axes:
            checks.whole(MemoryViewError, "row_axis", axis, 0, limits.AXES_MAX)
        if not self.row_axes or len(set(self.row_axes)) != len(self.row_axes):
            raise MemoryViewError("row axes must be different, at least one", value=self.row_axis)

    @property
    def row_axes(self) -> tuple[int, ...]:
        """The axes that count rows."""
        return self.row_axis if isinstance(self.row_axis, tuple) else (self.row_axis,)


@dataclass(frozen=True, eq=False)
class Pointers:
    """Bare addresses, uint64[N, regions], of contiguous regions. flashkv can't check them.

    Of paged memory uint64[N, pages * regions]: those of the first page, then of the second.
    keepalive  is held until the batch is done: give what owns the memory.
    """

    addresses: NDArray[np.uint64]
    keepalive: Any = None
    writable: bool = True


@dataclass(frozen=True, eq=False)
class BlockMemory:
    """Checked memory of N blocks.

    pointers  uint64[N, regions], C-contiguous.
    view      what lies where, from those addresses on; view.block_tokens tokens fit a block.
    finish    for destinations: to be called with bool[N], which blocks arrived, when all is read
              (copies staged blocks to the GPU); for sources nothing.
    """

    pointers: NDArray[np.uint64]
    view: NativeView
    keepalive: Any = None
    finish: Callable[[NDArray[np.bool_]], None] = nothing_to_finish

    @property
    def in_place(self) -> bool:
        """Whether bytes arrive in the caller's own memory, not in a copy that finish() spreads."""
        return self.finish is nothing_to_finish

    @property
    def block_tokens(self) -> int:
        return self.view.block_tokens


def block_memory(
    data: Any,
    count: int,
    geometry: KVGeometry,
    *,
    group: int = 0,
    view: MemoryView | None = None,
    block_tokens: int | None = None,
    selection: Selection = ALL,
    destination: bool = False,
    partial: bool = False,
) -> BlockMemory:
    """Memory of `count` blocks of a group.

    data: a tensor or array with a leading axis of `count` blocks, a sequence of `count` of them, a
    buffer with all blocks back to back, Regions (or a sequence of one a region), or Pointers.
    block_tokens: room of a block where neither shape nor view tells. A block's shape is the view's
    axes and the vector; axes of size 1 may be left out; uint8 memory may be flat.
    partial: blocks may be shorter than that room; addresses then need only differ.
    Raises MemoryViewError, ReadOnlyDestinationError.
    """
    view = DEFAULT_VIEW if view is None else view
    checks.instance(MemoryViewError, "view", view, MemoryView)
    room = view.block_tokens or block_tokens
    region_count = view_regions(geometry, group, view, selection)
    if view.pages > 1 and not isinstance(data, (Regions, Pointers)):
        raise MemoryViewError(
            "paged memory needs Regions with a row for each page, or Pointers",
            value=type(data).__name__,
        )
    if isinstance(data, Pointers):
        packed = opaque_or_packed_view(geometry, group, view, room, selection)
        return _from_pointers(data, count, packed, destination=destination, partial=partial)
    if not any(plane.dtype is DType.OPAQUE for plane in geometry.groups[group].planes):
        room = view.block_tokens  # shapes and lengths tell
    data, keepalive, finish = staged(_as_regions(data, region_count), destination=destination)
    infos, pointers, held = _addresses(data, count, view.pages, region_count, destination)
    if count == 0:
        native = packed_view(geometry, group, view, room or 1, selection)
    else:
        native = view_of_arrays(
            geometry, group, view, infos=tuple(infos), block_tokens=room, selection=selection
        )
    return BlockMemory(pointers, native, (keepalive, held), finish)


def room_for(tokens: Any) -> int | None:
    """Tokens that a block has room for, where only the counts tell."""
    if tokens is None:
        return None
    counts = checks.array(MemoryViewError, "token counts", tokens)
    return int(counts.max()) if counts.size and counts.dtype.kind in "iu" else None


def memory_bytes(data: Any, count: int) -> int:
    """About how much memory `count` blocks of it take, told from its outermost shape; 0: who knows.

    Looks at no block, so that it costs the same however many there are.
    """
    if isinstance(data, Regions):
        try:
            share = 1.0 if data.rows is None else _share_of_rows(data, count)
        except (IndexError, AttributeError, TypeError):  # block_memory() says what is wrong
            return 0
        return int(share * sum(memory_bytes(tensor, count) for tensor in data.tensors))
    if isinstance(data, (list, tuple)):
        return len(data) * memory_bytes(data[0], 1) if data else 0
    size = getattr(data, "nbytes", None)
    if isinstance(size, int):
        return size
    return len(data) if isinstance(data, (bytes, bytearray)) else 0


def _share_of_rows(data: Regions, count: int) -> float:
    """Of the rows of its tensors, those that are meant; of a list of rows: one a block."""
    sizes = [data.tensors[0].shape[axis] for axis in data.row_axes]
    rows = data.rows.size / len(sizes) if isinstance(data.rows, np.ndarray) else count
    return float(rows / max(1, math.prod(sizes)))


def token_counts(tokens: Any, count: int, block_tokens: int) -> NDArray[np.uint16]:
    """Tokens of each block: uint16[count]. tokens: None (all full), an int, or one int a block."""
    if tokens is None:
        return np.full(count, block_tokens, np.uint16)
    if type(tokens) is int and 1 <= tokens <= block_tokens:
        return np.full(count, tokens, np.uint16)
    array = checks.array(MemoryViewError, "token counts", tokens)
    if array.dtype.kind not in "iu" and array.size:
        raise MemoryViewError("token counts must be ints", value=array.dtype)
    if array.ndim > 1 or (array.ndim == 1 and array.size != count):
        raise MemoryViewError(
            "token counts must be one int, or one a block", value=list(array.shape), limit=count
        )
    if array.size and not 1 <= int(array.min()) <= int(array.max()) <= block_tokens:
        wrong = array[(array < 1) | (array > block_tokens)] if array.ndim else array
        raise MemoryViewError(
            "a block's token count is out of range",
            value=np.ravel(wrong)[0],
            limit=f"1 to {block_tokens}, the room of a block",
        )
    return np.ascontiguousarray(np.broadcast_to(array, (count,)), np.uint16)


def _as_regions(data: Any, region_count: int) -> Regions:
    """Any form of `data` as Regions; a region may still be a list of blocks."""
    if isinstance(data, Regions):
        regions = data
    elif region_count == 1:
        regions = Regions([data])
    elif isinstance(data, (list, tuple)):
        regions = Regions(data)
    else:
        regions = Regions([data])
    if len(regions.tensors) != region_count:
        raise MemoryViewError(
            "the view splits a block into regions: give Regions, one tensor a region",
            value=f"{len(regions.tensors)} regions",
            limit=region_count,
        )
    if regions.row_axes != (0,) or regions.rows is not None:
        for tensor in regions.tensors:
            if not is_array(tensor):
                raise MemoryViewError(
                    "rows and row_axis need tensors or arrays", value=type(tensor).__name__
                )
    return regions


def _from_pointers(
    data: Pointers, count: int, view: NativeView, *, destination: bool, partial: bool
) -> BlockMemory:
    addresses = checks.array(MemoryViewError, "addresses", data.addresses)
    if addresses.ndim == 1 and view.region_count == 1:
        addresses = addresses[:, None]
    if addresses.dtype.kind not in "iu" or addresses.shape != (count, view.region_count):
        raise MemoryViewError(
            "addresses must be ints of shape [blocks, regions]",
            value=f"{addresses.dtype}{list(addresses.shape)}",
            limit=[count, view.region_count],
        )
    if not addresses.all():
        raise MemoryViewError("an address is zero", value=np.argwhere(addresses == 0)[0].tolist())
    if destination and not data.writable:
        raise ReadOnlyDestinationError("the destination's addresses are marked read-only")
    pointers = np.ascontiguousarray(addresses).astype(np.uint64, copy=False)
    if destination:
        for region, region_bytes in enumerate(view.region_bytes.tolist()):
            _check_apart(pointers[:, region], 1 if partial else region_bytes)
    return BlockMemory(pointers, view, (data, pointers))


def _addresses(
    data: Regions, count: int, pages: int, region_count: int, destination: bool
) -> tuple[list[ArrayInfo], NDArray[np.uint64], list[Any]]:
    """(layout of a row in each region without the row axes, addresses, what to keep alive)."""
    rows = _checked_rows(data, count, pages, destination=destination)
    pointers = np.empty((count, pages, region_count), np.int64)
    infos = []
    held: list[Any] = list(data.tensors)
    for region, tensor in enumerate(held[:]):
        if isinstance(tensor, (list, tuple)):
            blocks = tuple(tensor)  # the caller's list may change
            addresses = pointers[:, 0, region]
            info, buffers = _listed(blocks, count, addresses, destination=destination)
            held += [blocks, buffers]
        elif is_array(tensor):
            whole = array_info(tensor)
            info = _stacked(whole, data.row_axes, rows, count, pointers[:, :, region])
            if destination and overlaps(whole.shape, whole.strides, whole.item_bytes):
                raise MemoryViewError(
                    "elements of the destination share memory",
                    value=f"{whole.describe()}, strides {whole.strides}",
                )
        else:
            info = _buffer(tensor, count, pointers[:, 0, region])
        if info is None:
            continue
        if destination and not info.writable:
            raise ReadOnlyDestinationError(
                "the destination can't be written", value=f"a read-only {info.describe()}"
            )
        infos.append(info._replace(address=0))  # layouts are equal wherever they lie
    return infos, pointers.view(np.uint64).reshape(count, pages * region_count), held


def _checked_rows(
    data: Regions, count: int, pages: int, *, destination: bool
) -> NDArray[np.int64] | None:
    """Rows as int64[count, pages, row axes]; None: row i is block i."""
    axes = len(data.row_axes)
    if data.rows is None:
        if pages > 1 or axes > 1:
            raise MemoryViewError("paged memory, and several row axes, need rows")
        return None
    array = checks.array(MemoryViewError, "rows", data.rows)
    shape = [count] + [pages] * (pages > 1) + [axes] * (axes > 1)
    if list(array.shape) != shape or (array.dtype.kind not in "iu" and count):
        raise MemoryViewError(
            f"rows must be {'one int' if axes == 1 else f'{axes} ints'} a"
            f" {'block' if pages == 1 else 'page'}",
            value=f"{array.dtype}{list(array.shape)}",
            limit=shape,
        )
    array = array.astype(np.int64).reshape(count, pages, axes)
    if destination:
        flat = array.reshape(-1, axes)
        different = np.unique(flat) if axes == 1 else np.unique(flat, axis=0)
        if len(different) != len(flat):
            raise MemoryViewError("two blocks, or pages, have the same row as destination")
    return array


def _check_apart(addresses: NDArray[Any], block_bytes: int) -> None:
    """Blocks of so many contiguous bytes (1: not contiguous) must not share any as destinations."""
    gaps = np.diff(np.sort(addresses))
    if gaps.size and int(gaps.min()) < block_bytes:
        raise MemoryViewError(
            "two blocks have the same destination, or overlapping ones",
            value=f"{int(gaps.min())} bytes from one to the next",
            limit=f"at least {block_bytes}",
        )


def _listed(
    items: Sequence[Any], count: int, addresses: NDArray[np.int64], *, destination: bool
) -> tuple[ArrayInfo | None, list[Any]]:
    """(layout of a block, what holds the buffers in place)."""
    if len(items) != count:
        raise MemoryViewError("keys and blocks differ in number", value=len(items), limit=count)
    if count == 0:
        return None, []
    info, addresses[:], held = same_layout(items)
    if destination:
        packed = contiguous(info.shape, info.strides, info.item_bytes)
        _check_apart(addresses, info.nbytes if packed else 1)
        if overlaps(info.shape, info.strides, info.item_bytes):
            raise MemoryViewError("elements of a destination share memory", value=info.strides)
    return info, held


def _stacked(
    info: ArrayInfo,
    row_axes: tuple[int, ...],
    rows: NDArray[np.int64] | None,
    count: int,
    addresses: NDArray[np.int64],
) -> ArrayInfo:
    """Layout of a row of the array, the addresses of those wanted: int64[count, pages]."""
    if not 0 <= max(row_axes) < len(info.shape):
        raise MemoryViewError("there is no such row axis", value=row_axes, limit=info.describe())
    if rows is None:
        row_axis = row_axes[0]
        size = info.shape[row_axis]
        if size != count:
            raise MemoryViewError(
                f"keys and blocks differ in number: axis {row_axis} of {info.describe()}",
                value=size,
                limit=count,
            )
        rows = np.arange(count).reshape(count, 1, 1)
    for place, axis in enumerate(row_axes):
        chosen, size = rows[:, :, place], info.shape[axis]
        if count and not 0 <= int(chosen.min()) <= int(chosen.max()) < size:
            wrong = chosen[(chosen < 0) | (chosen >= size)][0]
            raise MemoryViewError("there is no such row", value=wrong, limit=f"0 to {size - 1}")
    strides = np.array([info.strides[axis] for axis in row_axes], np.int64)
    addresses[:] = info.address + rows @ strides
    return info._replace(
        shape=tuple(n for axis, n in enumerate(info.shape) if axis not in row_axes),
        strides=tuple(n for axis, n in enumerate(info.strides) if axis not in row_axes),
    )


def _buffer(buffer: Any, count: int, addresses: NDArray[np.int64]) -> ArrayInfo:
    """A plain buffer that holds all blocks back to back."""
    if not is_buffer(buffer):
        array_info(buffer)  # raises: it is nothing that has memory
    info = array_info(buffer)
    block_bytes = info.nbytes // max(count, 1)
    if block_bytes * count != info.nbytes:
        raise MemoryViewError(f"a buffer of {info.nbytes} bytes doesn't divide into {count} blocks")
    addresses[:] = info.address + np.arange(count) * block_bytes
    return info._replace(shape=(block_bytes,), strides=(1,))
