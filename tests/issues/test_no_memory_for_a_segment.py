"""Memory runs out while a segment is begun: the put raises, and the segment is lost to the store
till it is opened again.
"""

from __future__ import annotations

from simulation.device import fail_allocations
from simulation.moments import get, put, small_store
from simulation.workload import FILLERS, KEYS

from flashkv import BlockStatus
from flashkv.segments import SegmentState


def test_each_allocation_of_a_put() -> None:
    number, refused, is_refused = 0, 0, True
    while is_refused or number < 10:  # some do without
        number += 1
        with small_store() as workload:
            fail_allocations(number)
            try:
                result = put(workload, KEYS)
            finally:
                fail_allocations()
            is_refused = not result.all_ok
            refused += is_refused
            assert set(result) <= {BlockStatus.OK, BlockStatus.BUSY}, result
            store = workload.store
            begun = store.segments.in_state(SegmentState.OPEN)
            assert len(begun) <= 1
            assert not begun or store.writer._open in begun
            assert put(workload, KEYS, 2).all_ok
            for first in range(0, 48, 12):
                assert put(workload, FILLERS[first : first + 12]).all_ok
            assert put(workload, KEYS, 3).all_ok
            assert get(workload, KEYS).all_ok
            assert workload.store.space.floor_refusals == 0
    assert refused > 3
