"""The gate in front of close(): calls inside end first, later ones are refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import flashkv
from flashkv import ClosedError, Identity, KVGeometry
from flashkv.gate import Gate


def test_shut_waits_for_those_inside() -> None:
    gate = Gate(lambda: None)
    inside, leave, shut = threading.Event(), threading.Event(), threading.Event()

    def caller() -> None:
        with gate:
            inside.set()
            leave.wait(10)

    def closer() -> None:
        assert gate.shut()
        shut.set()

    threads = [threading.Thread(target=caller), threading.Thread(target=closer)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    assert not shut.wait(0.05)
    leave.set()
    assert shut.wait(10)
    for thread in threads:
        thread.join()
    assert not gate.shut()  # only one closes
    with pytest.raises(RuntimeError, match="shut"), gate:
        pass


def test_close_beside_busy_threads(store_path) -> None:
    """Four threads put and get while the handle is closed: each sees results or ClosedError."""
    block = np.arange(1 << 16, dtype=np.uint8).reshape(1, -1)
    for round_ in range(5):
        store = flashkv.open(store_path, capacity="64MiB", geometry=KVGeometry.opaque(1 << 16))
        blocks = store.namespace(Identity(model="m"))
        started, wrong = threading.Barrier(5), []

        def work(worker, round_=round_, blocks=blocks, started=started, wrong=wrong) -> None:
            started.wait(10)
            out = np.zeros_like(block)
            try:
                for i in range(10_000):
                    key = b"%d-%d-%d" % (round_, worker, i % 50)
                    blocks.put([key], block)
                    if blocks.get([key], out).all_ok and not (out == block).all():
                        wrong.append(key)
            except ClosedError:
                return
            wrong.append(b"never closed")

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        started.wait(10)
        threading.Event().wait(0.1)
        store.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not wrong
