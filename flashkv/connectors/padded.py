"""Blocks of a size that no unit of opaque.py fits: stored as whole units, and how long they are.

    the caller's buffer           [unit][unit] ... [unit][rest]
    what is stored                [unit][unit] ... [unit][rest, zeros][length, zeros]

Nothing but the rest is copied: a block is paged memory, one unit a page, and only the last two
pages lie in memory of our own.

Invariants
  - these blocks have a namespace of their own: no plain block is ever taken for one;
  - a block whose length is not that of the caller's buffer is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.arrays import array_info
from flashkv.connectors.opaque import UNITS
from flashkv.errors import BatchResult, BlockStatus, MemoryViewError
from flashkv.geometry import MemoryView
from flashkv.memory import Pointers
from flashkv.namespace import Namespace

LENGTH_BYTES: Final = 8


@dataclass(frozen=True)
class PaddedForm:
    """group: of the unit; whole: units within the buffer; rest: bytes behind; pages: in all."""

    group: int
    unit: int
    whole: int
    rest: int

    @property
    def pages(self) -> int:
        return self.whole + bool(self.rest) + 1

    @property
    def view(self) -> MemoryView:
        return MemoryView(block_tokens=self.pages, page_tokens=1)


def padded_form(size: int) -> PaddedForm | None:
    """The form with the smallest unit; None for no bytes, or more than the units reach."""
    for group, unit in enumerate(UNITS):
        form = PaddedForm(group, unit, size // unit, size % unit)
        if size > 0 and form.pages <= limits.BLOCK_TOKENS_MAX:
            return form
    return None


def put_padded(
    namespace: Namespace, keys: Sequence[bytes], buffers: Sequence[Any], form: PaddedForm
) -> BatchResult:
    """As Namespace.put, of buffers of the form's size."""
    ends, pointers, infos = _memory(buffers, form, writable=False)
    if form.rest:
        for row, buffer in enumerate(infos):
            ends[row, 0, : form.rest] = buffer[form.whole * form.unit :]
    size = form.whole * form.unit + form.rest
    ends[:, -1, :LENGTH_BYTES] = np.frombuffer(size.to_bytes(LENGTH_BYTES, "little"), np.uint8)
    return namespace.put(keys, pointers, view=form.view, group=form.group, tokens=form.pages)


def get_padded(
    namespace: Namespace, keys: Sequence[bytes], buffers: Sequence[Any], form: PaddedForm
) -> BatchResult:
    """As Namespace.get, into buffers of the form's size."""
    ends, pointers, infos = _memory(buffers, form, writable=True)
    result = namespace.get(keys, pointers, view=form.view, group=form.group, tokens=form.pages)
    size = form.whole * form.unit + form.rest
    lengths = np.ascontiguousarray(ends[:, -1, :LENGTH_BYTES]).view("<u8")[:, 0]
    right = result.ok & (lengths == size)
    if form.rest:
        for row in np.flatnonzero(right).tolist():
            infos[row][form.whole * form.unit :] = ends[row, 0, : form.rest]
    statuses = result.statuses.copy()
    statuses[result.ok & ~right] = BlockStatus.MISS
    return BatchResult(statuses)


def _memory(
    buffers: Sequence[Any], form: PaddedForm, *, writable: bool
) -> tuple[NDArray[np.uint8], Pointers, list[NDArray[np.uint8]]]:
    """(the last pages of each block, addresses of all pages, the buffers as arrays)."""
    ends = np.zeros((len(buffers), form.pages - form.whole, form.unit), np.uint8)
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    if writable and not all(array.flags.writeable for array in arrays):
        raise MemoryViewError("a buffer can't be written")
    addresses = np.empty((len(buffers), form.pages), np.uint64)
    first = np.array([array_info(array).address for array in arrays], np.uint64)
    steps = np.arange(form.pages, dtype=np.uint64) * np.uint64(form.unit)
    addresses[:, : form.whole] = first[:, None] + steps[None, : form.whole]
    block_bytes = np.uint64(ends[0].nbytes if len(ends) else 0)
    own = np.uint64(ends.ctypes.data) + np.arange(len(ends), dtype=np.uint64) * block_bytes
    addresses[:, form.whole :] = own[:, None] + steps[None, : form.pages - form.whole]
    return ends, Pointers(addresses, (ends, arrays, buffers)), arrays
