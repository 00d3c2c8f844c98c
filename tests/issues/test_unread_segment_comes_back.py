"""A device can't read a segment while a store is opened, and can again later: what was deleted or
stored anew meanwhile comes back in its old version.
"""

from __future__ import annotations

import errno

import pytest
from simulation import device as dev
from simulation.device import ALWAYS
from simulation.moments import put, shown, small_store
from simulation.workload import FILLERS, IDENTITY, KEYS

FLIPS = [(dev.FLIP, 1, 8 * (4096 * page + 100)) for page in (0, 1, 3)]
FAULTS = [*FLIPS, *((dev.FAIL, count, 0) for count in (1, 2, 3, ALWAYS))]


@pytest.mark.parametrize(("action", "count", "amount"), FAULTS)
@pytest.mark.parametrize("sealed", [True, False])
def test_every_read_of_an_opening(action: int, count: int, amount: int, sealed: bool) -> None:
    number = 0
    while number < 100:
        number += 1
        with small_store() as workload:
            assert put(workload, KEYS).all_ok
            if sealed:
                assert put(workload, FILLERS[:24]).all_ok
            workload.store.close()
            device = workload.device
            device.reset()
            device.fault(
                dev.READ, action, first=number, count=count, result=-errno.EIO, amount=amount
            )
            try:
                workload.store = workload._open()
                hits = device.hits()
                device.reset()
            except OSError:  # in the trial of the device
                hits = device.hits()
                device.reset()
                workload.store = workload._open()
            workload.store.namespace(IDENTITY).delete(KEYS[:3])
            assert put(workload, KEYS[3:], 2).all_ok
            workload.store.flush()
            workload.store.namespace(IDENTITY).delete(KEYS[4:])
            workload.store.close()
            workload.store = workload._open()
            found = {key: version for key, version in shown(workload).items() if key in KEYS}
            assert found == {KEYS[3]: 2}, f"n = {number}"
            if not hits:
                break
    assert 2 < number < 100
