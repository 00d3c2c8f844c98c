"""A process ended before the name of its new log was durable. The next handle, which finds no room
for a log of its own, goes by that one, and a crash takes it: what was deleted in it is back. Or the
next handle takes over the file of the log before, and the crash leaves neither.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from simulation.filesystem import SimFiles
from simulation.moments import after_power_cut, end_process, put, shown, small_store
from simulation.workload import IDENTITY, KEYS, Workload

from flashkv import Store, StoreError

ALWAYS = 1 << 30


def delete_in_vain(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys but the first, which was deleted before, in a log that never got a durable name."""
    assert put(workload, KEYS).all_ok
    workload.store.flush()
    workload.store.namespace(IDENTITY).delete(KEYS[:1])
    workload.files.reset()
    workload.files.fail("write", 1)  # of the entry; a new log has to be written

    def refuse(files: SimFiles, path: Path) -> None:
        raise OSError(errno.ENOSPC, "the process ends here", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(SimFiles, "sync_folder", refuse)
        with pytest.raises(StoreError):
            workload.store.namespace(IDENTITY).delete(KEYS[1:])
        end_process(workload.store)
    workload.files.reset()


def opened(workload: Workload) -> Store:
    """The next handle's store."""
    path, files = workload.path, workload.files
    return Store(path, None, None, workload.options, read_only=False, files=files)


def check(workload: Workload) -> None:
    """A crash leaves what the handle shows."""
    found = shown(workload)
    assert after_power_cut(workload, kept=False) == found
    assert after_power_cut(workload, kept=True) == found


@pytest.mark.parametrize("kind", ["write", "rename"])
def test_no_room_for_the_next_log(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with small_store() as workload:
        delete_in_vain(workload, monkeypatch)
        workload.files.fail(kind, 1, count=ALWAYS, code=errno.ENOSPC)
        workload.store = opened(workload)
        check(workload)
        workload.files.reset()


def test_names_that_can_not_be_made_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_store() as workload:
        delete_in_vain(workload, monkeypatch)
        workload.files.fail("sync_folder", 1, count=ALWAYS, code=errno.ENOSPC)
        with pytest.raises(StoreError, match="durable"):
            workload.store = opened(workload)
        workload.files.reset()
        workload.store = opened(workload)
        check(workload)


def test_the_next_log_takes_over_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes no further than the one before did."""
    with small_store() as workload:
        delete_in_vain(workload, monkeypatch)
        monkeypatch.setattr(SimFiles, "free_bytes", lambda *_: 0)
        workload.files.fail("sync_folder", 1, count=ALWAYS, code=errno.EIO)
        with pytest.raises(StoreError):
            workload.store = opened(workload)
        assert after_power_cut(workload, kept=False) == dict.fromkeys(KEYS[1:], 1)
        workload.files.reset()
