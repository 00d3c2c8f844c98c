"""A write fails, and the process ends before anything says that its record is dead. The next handle
doesn't find the record; what it deletes comes back once the write has reached the device after all.
"""

from __future__ import annotations

import errno
from itertools import product

import pytest
from simulation import device as dev
from simulation.moments import after_power_cut, end_process, opened, put, shown, small_store
from simulation.workload import FILLERS, IDENTITY, KEYS, Workload

from flashkv import BlockStatus, DurabilityError, StoreError


def heal(workload: Workload) -> None:
    """Nothing fails any more."""
    workload.device.reset()
    workload.files.reset()


def check_deleted(workload: Workload, count: int = 2) -> None:
    """The next handle deletes the first keys; however much of the rest arrives, they stay away."""
    workload.store = opened(workload)
    workload.store.namespace(IDENTITY).delete(KEYS[:count])
    workload.store.flush()
    found = shown(workload)
    assert not set(found) & set(KEYS[:count])
    for kept, failed in product((True, False), repeat=2):
        assert after_power_cut(workload, kept=kept, failed=failed) == found


@pytest.mark.parametrize("first", [1, 2, 3])
def test_the_records_that_began_a_segment(first: int) -> None:
    """first: write of the process that fails, and all behind it."""
    with small_store() as workload:
        workload.device.fault(dev.WRITE, dev.FAIL, first=first, result=-errno.EIO, count=1 << 30)
        put(workload, KEYS)
        end_process(workload.store)
        heal(workload)
        check_deleted(workload, len(KEYS))


@pytest.mark.parametrize("fillers", [1, 4])
def test_a_segment_whose_directory_leaves_it_out(fillers: int) -> None:
    """And isn't durable: a crash takes it, and a scan finds what arrived. fillers: put behind."""
    with small_store() as workload:
        put(workload, KEYS)
        put(workload, FILLERS[:1])
        workload.store.flush()
        workload.device.reset()
        workload.device.fault(dev.WRITE, dev.FAIL, result=-errno.EIO)
        put(workload, KEYS[:2], 2)
        workload.store.writer.flights.wait_written()
        workload.device.reset()
        put(workload, FILLERS[1 : 1 + fillers])
        workload.store.writer.seal()
        end_process(workload.store)
        check_deleted(workload)


def test_a_handle_without_a_log_fills_nothing_on() -> None:
    """Its sequences would be given again, and what it wrote in vain could not be told apart."""
    with small_store() as workload:
        put(workload, KEYS)
        workload.store.flush()
        end_process(workload.store)
        workload.files.fail("write", 1, count=1 << 30, code=errno.ENOSPC)
        workload.store = opened(workload)
        workload.device.fault(dev.WRITE, dev.FAIL, result=-errno.EIO, count=1 << 30)
        assert put(workload, KEYS[:2], 2).statuses.tolist() == [BlockStatus.NO_SPACE] * 2
        end_process(workload.store)
        heal(workload)
        check_deleted(workload)


@pytest.mark.parametrize("seals", [False, True])
def test_many_sequences_that_no_record_has(seals: bool) -> None:
    """Records without room use them up as well: more than 2^24 in a process's life."""
    with small_store() as workload:
        put(workload, KEYS)
        workload.store.flush()
        workload.store.writer.next_sequence += (1 << 24) + 100
        if seals:
            workload.store.writer.seal()
        workload.device.reset()
        first = 3 if seals else 1
        workload.device.fault(dev.WRITE, dev.FAIL, first=first, result=-errno.EIO, count=1 << 30)
        put(workload, KEYS[:2], 2)
        end_process(workload.store)
        heal(workload)
        check_deleted(workload)


@pytest.mark.parametrize("handles", [1, 2])
def test_a_record_that_no_kill_names(handles: int) -> None:
    """handles: that come after the one whose write failed."""
    with small_store() as workload:
        assert put(workload, KEYS).all_ok
        workload.store.flush()
        workload.device.fault(dev.WRITE, dev.FAIL, result=-errno.EIO, count=1 << 30)
        workload.files.fail("write", 1, count=1 << 30)  # the log can't say that it is dead
        put(workload, KEYS[:2], 2)
        with pytest.raises((DurabilityError, StoreError)):
            workload.store.flush()
        end_process(workload.store)
        workload.device.reset()
        workload.files.reset()
        for _ in range(handles):
            workload.store = opened(workload)
            workload.store.namespace(IDENTITY).delete(KEYS[:1])
            workload.store.flush()
            assert shown(workload) == dict.fromkeys(KEYS[1:], 1)
            assert after_power_cut(workload, kept=True) == dict.fromkeys(KEYS[1:], 1)
            assert after_power_cut(workload, kept=False) == dict.fromkeys(KEYS[1:], 1)
            end_process(workload.store)
        workload.store = opened(workload)
        assert put(workload, KEYS, 3).all_ok
        workload.store.flush()
        assert after_power_cut(workload, kept=True) == dict.fromkeys(KEYS, 3)
