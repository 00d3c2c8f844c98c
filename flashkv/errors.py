"""Errors of flashkv and the per-block statuses of its batches.

Invariants
  - every exception of the package derives from FlashKVError and from the builtin that fits it, so
    a caller may catch either;
  - a message says what is wrong, which value, which limit, and what to do about it;
  - damage on flash is never an exception: it is the status MISS and a counter;
  - this is the only module that knows the status numbers of the native data plane.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


class FlashKVError(Exception):
    """Base of all errors. `what` names the fault; value, limit and advice complete the message."""

    def __init__(
        self, what: str, *, value: object = None, limit: object = None, advice: str = ""
    ) -> None:
        self.what = what
        self.value = value
        self.limit = limit
        self.advice = advice
        parts = [what]
        if value is not None:
            parts.append(f", got {value}")
        if limit is not None:
            parts.append(f"; the limit is {limit}")
        if advice:
            parts.append(f". {advice[0].upper()}{advice[1:]}")
        self.message = "".join(parts)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


class StoreError(FlashKVError):
    """A store as a whole can't be opened or used."""


class LockedError(StoreError, BlockingIOError):
    """Another handle, in this process or another one, writes this store."""


class NotAStoreError(StoreError, OSError):
    """The path is no folder, or one without a store that was to be opened read-only."""


class StoreAccessError(StoreError, PermissionError):
    """The operating system denies access to the store's folder or files."""


class FormatError(StoreError, ValueError):
    """The store was written in a format, or with a feature, that this build doesn't know."""


class SuperblockError(FormatError):
    """Both superblocks are unreadable; the segments may still be whole."""

    def __init__(
        self, what: str, *, value: object = None, limit: object = None, advice: str = ""
    ) -> None:
        super().__init__(
            what,
            value=value,
            limit=limit,
            advice=advice or "The segments tell what they said: flashkv-fsck --repair PATH",
        )


class CapacityError(StoreError, ValueError):
    """The capacity is too small for the geometry, or smaller than what the store may shrink to."""


class DurabilityError(StoreError, OSError):
    """Writes or a sync failed; `blocks_lost` captured blocks are gone, the store stays usable."""

    def __init__(
        self,
        what: str,
        *,
        value: object = None,
        limit: object = None,
        advice: str = "",
        blocks_lost: int = 0,
    ) -> None:
        self.blocks_lost = blocks_lost
        super().__init__(what, value=value, limit=limit, advice=advice)


class ClosedError(StoreError, ValueError):
    """The handle was closed."""


class ForkedError(StoreError, RuntimeError):
    """The handle was inherited through fork(): its threads and locks belong to the parent."""


class ReadOnlyStoreError(StoreError, PermissionError):
    """A write was asked of a store that was opened read-only."""


class GeometryError(FlashKVError, ValueError):
    """A geometry is invalid, or is not the store's."""


class IdentityError(FlashKVError, ValueError):
    """An identity or shard is incomplete or can't be encoded."""


class KeyFormatError(FlashKVError, ValueError):
    """A key is not bytes, or too short or long, or a batch of keys has the wrong shape."""


class MemoryViewError(FlashKVError, ValueError):
    """The caller's memory doesn't fit the geometry or the view: shape, dtype, stride, length."""


class ReadOnlyDestinationError(MemoryViewError):
    """A destination of `get` can't be written."""


class OptionsError(FlashKVError, ValueError):
    """An option has an impossible value."""


class BackendError(FlashKVError, OSError):
    """No I/O backend, or not the one asked for, works here."""


class BusyError(FlashKVError, BlockingIOError):
    """A limit on work in flight was reached; the call may be repeated later."""


class CancelledError(FlashKVError, RuntimeError):
    """The operation was cancelled before it began."""


class TimedOutError(FlashKVError, TimeoutError):
    """The operation's deadline came before it began."""


class OutOfMemoryError(FlashKVError, MemoryError):
    """The native side could not allocate memory; nothing was changed."""


class BlockStatus(IntEnum):
    """What became of one block of a batch."""

    OK = 0
    MISS = 1
    IO_ERROR = 3
    BLOCK_TOO_LARGE = 4
    NO_SPACE = 6
    PRESENT = 7  # put: stored already, skipped
    DUPLICATE = 8  # put: the key came earlier in this batch, the first one wins
    BUSY = 9  # a limit on memory or work in flight was reached
    TIMED_OUT = 10  # its deadline came first
    CANCELLED = 11  # given up by who asked for it


@dataclass(frozen=True, eq=False)
class BatchResult:
    """Statuses of a batch, in the order of its keys. statuses: uint8[N] of BlockStatus.

    failed_layers: of a get with progress: int32[N], the first layer of each block that isn't in
    place; -1: all are.
    held: of a get that was given up: set once the device writes no more to the caller's memory;
    None: it doesn't by now.
    """

    statuses: NDArray[np.uint8]
    failed_layers: NDArray[np.int32] | None = None
    held: threading.Event | None = None

    def given_up(self, status: BlockStatus, held: threading.Event | None) -> BatchResult:
        """The same, where blocks that were CANCELLED have this status."""
        statuses = np.where(self.statuses == BlockStatus.CANCELLED, status, self.statuses)
        return replace(self, statuses=statuses.astype(np.uint8), held=held)

    def _have(self, status: BlockStatus) -> NDArray[np.bool_]:
        have: NDArray[np.bool_] = self.statuses == status
        return have

    @property
    def ok(self) -> NDArray[np.bool_]:
        """bool[N]: the block is where it should be: done, or (put) present already."""
        return self._have(BlockStatus.OK) | self._have(BlockStatus.PRESENT)

    @property
    def missed(self) -> NDArray[np.bool_]:
        """bool[N]: the block is not in the store."""
        return self._have(BlockStatus.MISS)

    @property
    def lost(self) -> NDArray[np.bool_]:
        """bool[N]: the block was refused, failed or given up: I/O error, too large, no space, busy,
        timed out, cancelled.
        """
        return ~(self.ok | self.missed | self._have(BlockStatus.DUPLICATE))

    @property
    def all_ok(self) -> bool:
        """True if every block of the batch is ok (an empty batch is)."""
        return bool(self.ok.all())

    def counts(self) -> dict[str, int]:
        """How many blocks have each status, by name; statuses that no block has are left out."""
        values, counts = np.unique(self.statuses, return_counts=True)
        return {BlockStatus(int(v)).name: int(c) for v, c in zip(values, counts, strict=True)}

    def __len__(self) -> int:
        return len(self.statuses)

    def __getitem__(self, index: int) -> BlockStatus:
        return BlockStatus(int(self.statuses[index]))

    def __iter__(self) -> Iterator[BlockStatus]:
        return (BlockStatus(value) for value in self.statuses.tolist())

    def __repr__(self) -> str:
        return f"BatchResult({len(self)} blocks: {self.counts()})"


# ---- native status numbers ---------------------------------------------------------------------


@cache
def _status_table() -> NDArray[np.uint8]:
    """BlockStatus of each FKV_* status. Made late: native code that fails to load raises ours."""
    from flashkv.native import lib

    pairs = {
        lib.FKV_OK: BlockStatus.OK,
        lib.FKV_MISS: BlockStatus.MISS,
        lib.FKV_DAMAGED: BlockStatus.MISS,
        lib.FKV_IO_ERROR: BlockStatus.IO_ERROR,
        lib.FKV_TOO_LARGE: BlockStatus.BLOCK_TOO_LARGE,
        lib.FKV_NO_MEMORY: BlockStatus.BUSY,
        lib.FKV_CANCELLED: BlockStatus.CANCELLED,
    }
    table = np.full(256, BlockStatus.IO_ERROR, np.uint8)  # an unknown number is never a success
    table[list(pairs)] = [int(status) for status in pairs.values()]
    table.setflags(write=False)
    return table


def block_statuses(native: NDArray[Any]) -> NDArray[np.uint8]:
    """Native statuses (FKV_*, or a negative errno) as uint8[N] of BlockStatus."""
    if not native.any():  # nearly always
        return np.zeros(len(native), np.uint8)
    signed = native.view(np.int32) if native.dtype == np.uint32 else native.astype(np.int64)
    statuses: NDArray[np.uint8] = _status_table()[np.clip(signed, 0, 255)]
    for code in np.unique(signed[signed < 0]).tolist():
        statuses[signed == code] = errno_status(code)
    return statuses


def begun(status: int) -> bool:
    """Whether a native call that begins something did; False: no memory."""
    from flashkv.native import lib

    assert status in (lib.FKV_OK, lib.FKV_NO_MEMORY), status
    return bool(status == lib.FKV_OK)


def native_ok(status: int) -> bool:
    """Whether a native status of a single thing says that it is right.

    Raises OutOfMemoryError where it says neither.
    """
    from flashkv.native import lib

    if status == lib.FKV_NO_MEMORY:
        raise OutOfMemoryError("no memory to check what the store holds")
    return status == 0


def damaged_mask(native: NDArray[Any]) -> NDArray[np.bool_]:
    """Which native statuses say that stored bytes were wrong: bool[N]."""
    from flashkv.native import lib

    mask: NDArray[np.bool_] = native == lib.FKV_DAMAGED
    return mask


def missed_statuses(count: int) -> NDArray[np.uint32]:
    """Native statuses of blocks that nothing was read for yet: uint32[count], all FKV_MISS."""
    from flashkv.native import lib

    return np.full(count, lib.FKV_MISS, np.uint32)


def errno_status(result: int) -> BlockStatus:
    """BlockStatus of a native result: 0 or -errno."""
    if result == 0:
        return BlockStatus.OK
    if -result in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return BlockStatus.NO_SPACE
    if -result in (errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOBUFS):
        return BlockStatus.BUSY
    return BlockStatus.IO_ERROR


def check_native(result: int, what: str) -> None:
    """Raises the exception of a result (0 or -errno) of a call that concerns no single block."""
    if result >= 0:
        return
    number = -result
    text = f"{what}: {os.strerror(number)} (errno {number})"
    if number == errno.ENOMEM:
        raise OutOfMemoryError(text)
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        raise StoreAccessError(text)
    if number in (errno.EAGAIN, errno.EINTR, errno.EBUSY):
        raise BusyError(text)
    raise StoreError(text)
