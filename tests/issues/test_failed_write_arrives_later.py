"""A write fails, and the process ends before anything says that its record is dead. The next handle
doesn't find the record; what it deletes comes back once the write has reached the device after all.
"""

from __future__ import annotations

import errno

import pytest
from simulation import device as dev
from simulation.moments import after_power_cut, end_process, put, shown, small_store
from simulation.workload import IDENTITY, KEYS, Workload

from flashkv import DurabilityError, Store, StoreError


def opened(workload: Workload) -> Store:
    """The next handle's store."""
    path, files = workload.path, workload.files
    return Store(path, None, None, workload.options, read_only=False, files=files)


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
