"""CUDA tensors of a batch through pinned host memory.

Invariants
  - one copy a region and direction, ordered with the current stream by torch; the pinned memory
    lives as long as the batch;
  - of a destination only blocks that arrived are copied back: the others keep their content;
  - torch is imported only where a tensor proves that it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashkv.arrays import is_array, on_gpu
from flashkv.errors import MemoryViewError

if TYPE_CHECKING:
    from flashkv.memory import Regions

Finish = Callable[[NDArray[np.bool_]], None]


def nothing_to_finish(_: NDArray[np.bool_]) -> None:
    """The destination is the caller's own memory."""


def staged(data: Regions, *, destination: bool) -> tuple[Regions, Any, Finish]:
    """(regions in host memory, what must stay alive, what to call when a destination is filled)."""
    if not any(_lies_on_gpu(tensor) for tensor in data.tensors):
        return data, data, nothing_to_finish
    return stage(data, destination=destination)


def stage(data: Regions, *, destination: bool) -> tuple[Regions, Any, Finish]:
    """As staged(), for tensors that are known to need it."""
    import torch

    axes = data.row_axes
    rows = None if data.rows is None else np.asarray(data.rows, np.int64)
    host = [_host_copy(torch, tensor, rows, axes, destination) for tensor in data.tensors]

    def finish(arrived: NDArray[np.bool_]) -> None:
        for tensor, copy in zip(data.tensors, host, strict=True):
            _copy_back(torch, tensor, copy, arrived, rows, axes)

    if rows is None:
        regions = type(data)(host, None, data.row_axis)
    else:
        shape = rows.shape[:-1] if len(axes) > 1 else rows.shape
        regions = type(data)(host, np.arange(int(np.prod(shape))).reshape(shape))
    return regions, (data, regions), finish if destination else nothing_to_finish


def _lies_on_gpu(tensor: Any) -> bool:
    if isinstance(tensor, (list, tuple)):
        return any(on_gpu(item) for item in tensor)
    return on_gpu(tensor)


def _host_copy(
    torch: Any,
    tensor: Any,
    rows: NDArray[np.int64] | None,
    axes: tuple[int, ...],
    destination: bool,
) -> Any:
    """Pinned memory of the batch's blocks, filled unless it is a destination.

    Rows of the tensor come as rows of the first axis, pages one after the other.
    """
    pinned = bool(torch.cuda.is_available())
    if isinstance(tensor, (list, tuple)):
        shape = _common_shape(tensor)
        copy = torch.empty([len(tensor), *shape], dtype=tensor[0].dtype, pin_memory=pinned)
        if not destination:
            for block, item in zip(copy, tensor, strict=True):
                block.copy_(item, non_blocking=False)
        return copy
    if not is_array(tensor) or isinstance(tensor, np.ndarray):
        raise MemoryViewError(
            "regions must be all in CUDA or all in host memory", value=type(tensor).__name__
        )
    if rows is None:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return copy if destination else copy.copy_(tensor)
    places = _places(torch, tensor, rows, axes)
    of_row = [size for axis, size in enumerate(tensor.shape) if axis not in axes]
    copy = torch.empty([len(places[0]), *of_row], dtype=tensor.dtype, pin_memory=pinned)
    return copy if destination else copy.copy_(_rows_first(tensor, axes)[places])


def _rows_first(tensor: Any, axes: tuple[int, ...]) -> Any:
    """The tensor with its row axes in front."""
    return tensor.movedim(axes, tuple(range(len(axes))))


def _places(
    torch: Any, tensor: Any, rows: NDArray[np.int64], axes: tuple[int, ...]
) -> tuple[Any, ...]:
    """Index of each row along each of its axes, on the tensor's device."""
    flat = rows.reshape(-1, len(axes))
    for place, axis in enumerate(axes):
        size, chosen = tensor.shape[axis], flat[:, place]
        if len(flat) and not 0 <= int(chosen.min()) <= int(chosen.max()) < size:
            raise MemoryViewError(
                "there is no such row", value=chosen.tolist(), limit=f"0 to {size - 1}"
            )
    return tuple(torch.from_numpy(column.copy()).to(tensor.device) for column in flat.T)


def _common_shape(tensors: Sequence[Any]) -> list[int]:
    first = tensors[0]
    for position, tensor in enumerate(tensors):
        if not hasattr(tensor, "device") or (tensor.shape, tensor.dtype) != (
            first.shape,
            first.dtype,
        ):
            raise MemoryViewError(
                f"block {position} has another shape or dtype than block 0",
                value=getattr(tensor, "shape", type(tensor).__name__),
                limit=first.shape,
            )
    return list(first.shape)


def _copy_back(
    torch: Any,
    tensor: Any,
    copy: Any,
    arrived: NDArray[np.bool_],
    rows: NDArray[np.int64] | None,
    axes: tuple[int, ...],
) -> None:
    blocks = np.flatnonzero(arrived)
    if isinstance(tensor, (list, tuple)):
        for block in blocks.tolist():
            tensor[block].copy_(copy[block])
        return
    if rows is None and len(blocks) == len(arrived):
        tensor.copy_(copy)
        return
    if rows is None:
        rows, copy = blocks, _rows_first(copy, axes)[torch.from_numpy(blocks)]
    else:
        pages = len(copy) // max(1, len(arrived))
        rows = rows[blocks]
        copy = copy[torch.from_numpy(np.flatnonzero(np.repeat(arrived, pages)))]
    _rows_first(tensor, axes)[_places(torch, tensor, rows, axes)] = copy.to(tensor.device)
