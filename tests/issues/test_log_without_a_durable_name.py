"""A process ended before the name of its new log was durable. The next handle, which finds no room
for a log of its own, goes by that one, and a crash takes it: what was deleted in it is back. Or the
next handle takes over the file of the log before, and the crash leaves neither.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from simulation.filesystem import SimFiles
from simulation.moments import after_power_cut, end_process, opened, put, shown, small_store
from simulation.workload import IDENTITY, KEYS, Workload

from flashkv import StoreError
from flashkv.manifest import Manifest

ALWAYS = 1 << 30


REAL_OPEN = SimFiles.open


def open_on_a_full_disk(files: SimFiles, path: Path, flags: int) -> int:
    """No new file finds room."""
    if flags & os.O_CREAT and not path.exists():
        raise OSError(errno.ENOSPC, "full", str(path))
    return REAL_OPEN(files, path, flags)


def delete_in_vain(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, *, failing_sync: bool = False
) -> None:
    """All keys but the first, which was deleted before, in a log that never got a durable name.

    failing_sync: the process doesn't end before the sync of the folder, that fails.
    """
    assert put(workload, KEYS).all_ok
    workload.store.flush()
    workload.store.namespace(IDENTITY).delete(KEYS[:1])
    workload.files.reset()
    workload.files.fail("write", 1)  # of the entry; a new log has to be written

    def refuse(files: SimFiles, path: Path) -> None:
        raise OSError(errno.ENOSPC, "the process ends here", str(path))

    with monkeypatch.context() as patch:
        if failing_sync:
            workload.files.fail("sync_folder", 1, count=ALWAYS)
        else:
            patch.setattr(SimFiles, "sync_folder", refuse)
        with pytest.raises(StoreError):
            workload.store.namespace(IDENTITY).delete(KEYS[1:])
        end_process(workload.store)
    workload.files.reset()


def check(workload: Workload) -> None:
    """A crash leaves what the handle shows."""
    found = shown(workload)
    assert after_power_cut(workload, kept=False) == found
    assert after_power_cut(workload, kept=True) == found


@pytest.mark.parametrize("kind", ["write", "rename", "sync_folder"])
def test_no_room_for_the_next_log(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nor to make the present one durable: no flush says that it is."""
    with small_store() as workload:
        delete_in_vain(workload, monkeypatch)
        workload.files.fail(kind, 1, count=ALWAYS, code=errno.ENOSPC)
        workload.store = opened(workload)
        assert not shown(workload)
        with pytest.raises(StoreError):
            workload.store.flush()
        workload.files.reset()
        workload.store.flush()
        assert not shown(workload)
        check(workload)


def test_a_sync_that_failed_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the folder, by the first handle: the next sync succeeds, whatever that one lost."""
    with small_store() as workload:
        delete_in_vain(workload, monkeypatch, failing_sync=True)
        monkeypatch.setattr(SimFiles, "open", open_on_a_full_disk)
        workload.store = opened(workload)
        check(workload)


def test_names_that_can_not_be_made_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_store() as workload:
        delete_in_vain(workload, monkeypatch)
        workload.files.fail("sync_folder", 1, count=ALWAYS)
        with pytest.raises(StoreError):
            workload.store = opened(workload)
        workload.files.reset()
        workload.store = opened(workload)
        check(workload)


def test_a_full_disk_does_not_lock_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next handle finds the file gone that its log was to take over: it has that name now."""
    with small_store() as workload:
        assert put(workload, KEYS).all_ok
        workload.store.flush()
        workload.store.close()
        workload.store = opened(workload)
        workload.files.free = 0
        end_process(workload.store)
        monkeypatch.setattr(SimFiles, "open", open_on_a_full_disk)

        def refuse(manifest: Manifest, generation: int) -> None:
            raise OSError(errno.EIO, "the process ends here")

        with monkeypatch.context() as patch:
            patch.setattr(Manifest, "_point_to", refuse)
            with pytest.raises(StoreError):
                workload.store = opened(workload)
        for _ in range(3):
            workload.store = opened(workload)
            assert workload.store.namespace(IDENTITY).delete(KEYS[:1]) is not None
            workload.store.flush()
            check(workload)
            end_process(workload.store)
        workload.store = opened(workload)


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
