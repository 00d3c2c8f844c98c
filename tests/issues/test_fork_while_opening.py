"""Fault: a process that forked while another thread opened a store left a child that hung at its
own first open, or held the store's lock for as long as it lived.

flashkv forks only between two steps of taking a lock, and a child gives all of them up.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from small_stores import make

from flashkv import opening


def in_a_child(work: Any) -> int:
    """Forks; the child's pid. It ends with 0, or 1 where `work` raises; by a signal if it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            work()
        except BaseException:  # noqa: BLE001  (the child must not go on as a second test run)
            os._exit(1)
        os._exit(0)
    return pid


@pytest.mark.parametrize("where", ["fcntl.flock", "load_manifest"])
def test_fork_while_opening(
    store_path: Path, disk_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    make(store_path).close()
    reached, go_on = threading.Event(), threading.Event()
    owner, name = (opening.fcntl, "flock") if "flock" in where else (opening, "load_manifest")
    real = getattr(owner, name)

    def slow(*arguments: Any, **named: Any) -> Any:
        reached.set()
        go_on.wait(0.5)
        return real(*arguments, **named)

    stores = []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, slow)
        thread = threading.Thread(target=lambda: stores.append(make(store_path)))
        thread.start()
        reached.wait()
        opens = in_a_child(lambda: make(disk_path / "another").close())
        stays = in_a_child(lambda: time.sleep(20))
        go_on.set()
        thread.join()
    try:
        assert os.waitpid(opens, 0)[1] == 0
        stores.pop().close()
        make(store_path).close()  # the child that lives on holds no lock
    finally:
        os.kill(stays, signal.SIGKILL)
        os.waitpid(stays, 0)
