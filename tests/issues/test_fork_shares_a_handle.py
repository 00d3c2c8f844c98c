"""Fault: a forked child uses its parent's handle: two processes append to one file, or the child
waits forever for threads that it doesn't have.

flashkv guarantees: in the child the handle is dead and says so, for every operation, without
waiting; the parent's handle, its lock and its tickets are unharmed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from small_stores import IDENTITY, assert_equal, make, names, payload

import flashkv
from flashkv import ForkedError, LockedError

BLOCKS = payload(1, 16)


def in_child(work: Callable[[], None], timeout_s: float = 20.0) -> None:
    """Runs work in a forked child; asserts that it ended well and in time."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:  # noqa: BLE001  (the parent asserts)
            os.write(2, f"child: {error!r}\n".encode())
        os._exit(status)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except ForkedError:
        return
    raise AssertionError(f"{call} went on in a forked child")


def test_every_operation_is_refused(folder: Path) -> None:
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        client = store.client()
        namespace.put(names(16), BLOCKS)
        assert client.submit_contains(namespace, names(16)).wait(10_000)
        match = namespace.match(names(16), lease_ms=60_000)

        def work() -> None:
            out = np.zeros_like(BLOCKS)
            for call in (
                lambda: namespace.put(names(1, "c"), BLOCKS[:1]),
                lambda: namespace.get(names(16), out),
                lambda: namespace.contains(names(1)),
                lambda: namespace.contains_one(b"x"),
                lambda: namespace.match(names(1)),
                lambda: namespace.delete(names(1)),
                namespace.rotate,
                store.flush,
                store.stats,
                store.client,
                lambda: store.namespace(IDENTITY),
                lambda: client.submit_put(namespace, names(1, "c"), BLOCKS[:1]),
                lambda: client.submit_get(namespace, names(16), out),
                lambda: client.submit_contains(namespace, names(1)),
                lambda: client.submit_delete(namespace, names(1)),
            ):
                refused(call)
            assert store.closed
            client.close()
            store.close()

        in_child(work)
        assert_equal(namespace, names(16), BLOCKS)
        assert (namespace.put(names(4, "after"), BLOCKS[:4]).statuses == 0).all()
        assert client.submit_get(namespace, names(16), np.zeros_like(BLOCKS)).wait(10_000)
        assert match.lease is not None
        assert match.lease.active
    with make(folder) as store:
        assert_equal(store.namespace(IDENTITY), names(16), BLOCKS)
        assert store.namespace(IDENTITY).contains(names(4, "after")).all()


def test_a_child_finds_the_store_locked(folder: Path) -> None:
    with make(folder) as store:
        store.namespace(IDENTITY).put(names(16), BLOCKS)
        store.flush()

        def work() -> None:
            try:
                make(folder)
            except LockedError:
                with make(folder, read_only=True) as reader:
                    assert_equal(reader.namespace(IDENTITY), names(16), BLOCKS)
                return
            raise AssertionError("the child opened the store for writing")

        in_child(work)
        with_lock = flashkv.open
        try:
            with_lock(folder)
        except LockedError:
            pass
        else:
            raise AssertionError("the child's end gave the parent's lock away")


def test_fork_in_the_middle_of_work(folder: Path) -> None:
    """Other threads are busy at the time of the fork: the child still answers."""
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        client = store.client()
        stop = threading.Event()

        def busy(number: int) -> None:
            out = np.zeros_like(BLOCKS)
            while not stop.is_set():
                namespace.put(names(16, f"t{number}-"), BLOCKS, replace=True)
                namespace.get(names(16, f"t{number}-"), out)
                client.submit_get(namespace, names(16, f"t{number}-"), out).wait(10_000)
                client.drain()

        threads = [threading.Thread(target=busy, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()

        def work() -> None:
            refused(lambda: namespace.contains(names(1)))
            refused(lambda: client.submit_contains(namespace, names(1)))
            client.close()
            store.close()

        try:
            for _ in range(10):
                in_child(work)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert_equal(namespace, names(16, "t0-"), BLOCKS)
