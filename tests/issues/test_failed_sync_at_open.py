"""A sync fails while a store is opened: what a killed process had written, and not synced, is
shown, and a flush reports it durable, which the system may have dropped.
"""

from __future__ import annotations

import errno

import pytest
from simulation import device as dev
from simulation.moments import after_power_cut, end_process, put, shown, small_store
from simulation.workload import KEYS


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_what_is_shown_after_a_flush_is_durable(code: int, kept: bool) -> None:
    with small_store() as workload:
        assert put(workload, KEYS[:2]).all_ok
        workload.store.flush()
        assert put(workload, KEYS[1:4], 2).all_ok
        end_process(workload.store)
        workload.device.reset()
        workload.device.fault(dev.SYNC, dev.FAIL, first=2, result=-code)  # the first tries the disk
        workload.store = workload._open()
        assert workload.device.hits() == 1
        assert put(workload, KEYS[4:]).all_ok
        workload.store.flush()
        now = shown(workload)
        assert now.keys() >= set(KEYS[4:])
        assert after_power_cut(workload, kept=kept) == now
        workload.store.close()
