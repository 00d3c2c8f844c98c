"""Errors say what, which value, which limit and what to do; native statuses map in one place."""

from __future__ import annotations

import errno
import inspect
import pickle

import numpy as np
import pytest

from flashkv import errors
from flashkv.errors import BatchResult, BlockStatus
from flashkv.native import lib

EXCEPTIONS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.FlashKVError)
]


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_message_names_value_limit_and_remedy_and_survives_pickling(kind: type) -> None:
    error = kind("the frobs are too many", value=7, limit=5, advice="take fewer")
    text = "the frobs are too many, got 7; the limit is 5. Take fewer"
    assert str(error) == text
    assert (error.value, error.limit) == (7, 5)
    assert str(pickle.loads(pickle.dumps(error))) == text


@pytest.mark.parametrize("kind", [kind for kind in EXCEPTIONS if not kind.__subclasses__()])
def test_every_error_is_also_a_builtin_one(kind: type) -> None:
    builtin = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert builtin[0] not in (Exception, BaseException, object)


def test_superblock_error_names_the_repair_tool() -> None:
    assert "flashkv-fsck --repair" in str(errors.SuperblockError("both superblocks are unreadable"))


def test_durability_error_counts_what_is_lost() -> None:
    assert errors.DurabilityError("a sync failed", blocks_lost=12).blocks_lost == 12


def test_native_statuses() -> None:
    native = np.array(
        [
            lib.FKV_OK,
            lib.FKV_MISS,
            lib.FKV_DAMAGED,
            lib.FKV_IO_ERROR,
            lib.FKV_TOO_LARGE,
            lib.FKV_NO_MEMORY,
            200,
            100_000,
        ],
        np.uint32,
    )
    statuses = errors.block_statuses(native)
    assert statuses.dtype == np.uint8
    assert [BlockStatus(status) for status in statuses] == [
        BlockStatus.OK,
        BlockStatus.MISS,
        BlockStatus.MISS,
        BlockStatus.IO_ERROR,
        BlockStatus.BLOCK_TOO_LARGE,
        BlockStatus.BUSY,
        BlockStatus.IO_ERROR,  # an unknown number is never a success
        BlockStatus.IO_ERROR,
    ]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_native_errno_in_status_fields(dtype: type) -> None:
    codes = np.array([0, -errno.ENOSPC, -errno.EIO, -errno.ENOMEM], np.int64)
    statuses = errors.block_statuses(codes.astype(dtype))
    expected = [BlockStatus.OK, BlockStatus.NO_SPACE, BlockStatus.IO_ERROR, BlockStatus.BUSY]
    assert statuses.tolist() == expected


def test_batch_result() -> None:
    result = BatchResult(np.array(list(BlockStatus), np.uint8))
    assert len(result) == len(BlockStatus)
    assert result[0] is BlockStatus.OK
    assert list(result) == list(BlockStatus)
    by_name = {status.name: i for i, status in enumerate(BlockStatus)}
    assert set(np.flatnonzero(result.ok)) == {by_name["OK"], by_name["PRESENT"]}
    assert np.flatnonzero(result.missed).tolist() == [by_name["MISS"]]
    assert not (result.lost & (result.ok | result.missed)).any()
    assert not result.all_ok
    assert "MISS" in repr(result)
    assert BatchResult(np.zeros(0, np.uint8)).all_ok


def test_check_native_raises_what_fits() -> None:
    errors.check_native(0, "nothing")
    for code, kind in (
        (errno.ENOMEM, MemoryError),
        (errno.EACCES, PermissionError),
        (errno.EBUSY, errors.BusyError),
        (errno.EINVAL, errors.StoreError),
    ):
        with pytest.raises(kind, match="opening the thing"):
            errors.check_native(-code, "opening the thing")
