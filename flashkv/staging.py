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


def _nothing(_: NDArray[np.bool_]) -> None:
    return None


def staged(data: Regions, *, destination: bool) -> tuple[Regions, Any, Finish]:
    """(regions in host memory, what must stay alive, what to call when a destination is filled)."""
    if not any(_lies_on_gpu(tensor) for tensor in data.tensors):
        return data, data, _nothing
    return stage(data, destination=destination)


def stage(data: Regions, *, destination: bool) -> tuple[Regions, Any, Finish]:
    """As staged(), for tensors that are known to need it."""
    import torch

    rows = None if data.rows is None else torch.as_tensor(np.asarray(data.rows, np.int64))
    host = [_host_copy(torch, tensor, rows, data.row_axis, destination) for tensor in data.tensors]

    def finish(arrived: NDArray[np.bool_]) -> None:
        blocks = torch.from_numpy(np.flatnonzero(arrived))
        for tensor, copy in zip(data.tensors, host, strict=True):
            _copy_back(tensor, copy, blocks, rows, data.row_axis)

    regions = type(data)(host, None, data.row_axis)
    return regions, (data, regions), finish if destination else _nothing


def _lies_on_gpu(tensor: Any) -> bool:
    if isinstance(tensor, (list, tuple)):
        return any(on_gpu(item) for item in tensor)
    return on_gpu(tensor)


def _host_copy(torch: Any, tensor: Any, rows: Any, row_axis: int, destination: bool) -> Any:
    """Pinned memory of the batch's blocks, filled unless it is a destination."""
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
    shape = list(tensor.shape)
    if rows is not None:
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < shape[row_axis]:
            raise MemoryViewError(
                "there is no such row", value=rows.tolist(), limit=f"0 to {shape[row_axis] - 1}"
            )
        shape[row_axis] = len(rows)
    copy = torch.empty(shape, dtype=tensor.dtype, pin_memory=pinned)
    if not destination:
        wanted = tensor if rows is None else tensor.index_select(row_axis, rows.to(tensor.device))
        copy.copy_(wanted)
    return copy


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


def _copy_back(tensor: Any, copy: Any, blocks: Any, rows: Any, row_axis: int) -> None:
    if isinstance(tensor, (list, tuple)):
        for block in blocks.tolist():
            tensor[block].copy_(copy[block])
        return
    if rows is None and len(blocks) == copy.shape[row_axis]:
        tensor.copy_(copy)
        return
    places = blocks if rows is None else rows[blocks]
    arrived = copy.index_select(row_axis, blocks).to(tensor.device)
    tensor.index_copy_(row_axis, places.to(tensor.device), arrived)
