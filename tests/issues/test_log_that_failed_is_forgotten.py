"""The log can't be written for a while: the deletes, and the ends of lost records, that it should
have taken are forgotten, and a later flush says that all is well.
"""

from __future__ import annotations

import errno

import pytest
from simulation import device as dev
from simulation.moments import after_power_cut, put, shown, small_store
from simulation.workload import IDENTITY, KEYS, Workload

from flashkv import DurabilityError, StoreError
from flashkv.space import Space


def break_log(workload: Workload) -> None:
    """No write of it succeeds any more."""
    workload.files.reset()
    workload.files.fail("write", 1, count=1 << 30, code=errno.EIO)


@pytest.mark.parametrize("how", ["delete", "rotate"])
def test_blocks_that_were_taken_away(how: str) -> None:
    with small_store() as workload:
        namespace = workload.store.namespace(IDENTITY)
        assert put(workload, KEYS).all_ok
        workload.store.flush()
        break_log(workload)
        with pytest.raises(StoreError):
            namespace.delete(KEYS) if how == "delete" else namespace.rotate()
        workload.files.reset()
        assert not shown(workload)
        workload.store.flush()
        assert not after_power_cut(workload, kept=True)
        assert not after_power_cut(workload, kept=False)


def test_blocks_whose_sync_failed() -> None:
    with small_store() as workload:
        assert put(workload, KEYS[:1]).all_ok
        workload.store.flush()
        assert put(workload, KEYS[1:]).all_ok
        workload.device.reset()
        workload.device.fault(dev.SYNC, dev.FAIL, result=-errno.EIO)
        break_log(workload)
        with pytest.raises(StoreError):
            workload.store.flush()
        workload.files.reset()
        with pytest.raises(DurabilityError):
            workload.store.flush()
        workload.store.flush()
        assert shown(workload) == {KEYS[0]: 1}
        assert after_power_cut(workload, kept=True) == {KEYS[0]: 1}


def test_no_room_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes room for the log fails before the delete comes to it."""
    with small_store() as workload:
        assert put(workload, KEYS).all_ok
        workload.store.flush()
        assert put(workload, KEYS[:2], 2).all_ok

        def refuse(*_: object) -> None:
            raise StoreError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(Space, "shrink", refuse)
            with pytest.raises(StoreError):
                workload.store.namespace(IDENTITY).delete(KEYS[:3])
        workload.store.flush()
        rest = dict.fromkeys(KEYS[3:], 1)
        assert shown(workload) == rest
        assert after_power_cut(workload, kept=True) == rest
        workload.store.namespace(IDENTITY).delete(KEYS[3:])
        assert not after_power_cut(workload, kept=True)
