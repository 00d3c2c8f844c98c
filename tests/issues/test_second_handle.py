"""Fault: a second process or a second handle opens the store, and both write it.

flashkv guarantees: one handle writes a store. Any other attempt is a LockedError at once, in this
process, in another one or in a child; the lock ends with the handle, also when its process is
killed. Read-only handles are always welcome.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from small_stores import IDENTITY, assert_equal, child, make, names, payload, start_child

from flashkv import GeometryError, KVGeometry, LockedError

TRY = """
from flashkv import LockedError
try:
    make(path).close()
    print("opened")
except LockedError as error:
    assert isinstance(error, BlockingIOError)
    print("locked")
"""


def test_a_second_handle(folder: Path) -> None:
    with make(folder):
        for path in (folder, folder / "." / "..", Path(os.path.relpath(folder))):
            other = path / folder.name if path.name == ".." else path
            with pytest.raises(LockedError, match="this process"):
                make(other)
        link = folder.parent / "link"
        link.symlink_to(folder)
        with pytest.raises(LockedError):
            make(link)
        link.unlink()
    make(folder).close()


def test_a_second_process(folder: Path) -> None:
    with make(folder):
        assert child(TRY, folder) == "locked\n"
    assert child(TRY, folder) == "opened\n"


def test_a_killed_owner(folder: Path) -> None:
    owner = start_child("store = make(path)\nprint('open', flush=True)\nsys.stdin.read()", folder)
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with pytest.raises(LockedError, match="another process"):
            make(folder)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        make(folder).close()


def test_an_open_that_failed_leaves_no_lock(folder: Path) -> None:
    make(folder).close()
    with pytest.raises(GeometryError):
        make(folder, geometry=KVGeometry.opaque(7))
    make(folder).close()


def test_readers_beside_a_writer(folder: Path) -> None:
    blocks = payload(1, 40)
    with make(folder) as writer:
        writer.namespace(IDENTITY).put(names(40), blocks)
        writer.flush()
        with make(folder, read_only=True) as one, make(folder, read_only=True) as two:
            for reader in (one, two):
                assert_equal(reader.namespace(IDENTITY), names(40), blocks)
        assert "40 True" in child(
            """
            with make(path, read_only=True) as store:
                result, out = read_back(store.namespace(IDENTITY), names(40), payload(1, 40))
                print(int(result.ok.sum()), bool((out == payload(1, 40)).all()))
            """,
            folder,
        )
        assert (writer.namespace(IDENTITY).put(names(9, "n"), blocks[:9]).statuses == 0).all()
