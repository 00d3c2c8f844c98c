"""Fault: two writers of one key mix their bytes.

flashkv guarantees: a reader sees one whole payload, of one of the writers, at any time, while they
write, afterwards and after a reopen.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from small_stores import IDENTITY, make, names

WRITERS = 3
ROUNDS = 30
KEYS = names(12)
SHAPE = (12, 2, 2, 2, 16, 64)


def marked(writer: int, round_number: int) -> np.ndarray:
    """Blocks whose every element tells who wrote them, and when."""
    return np.full(SHAPE, 0x3C00 + 64 * writer + round_number, np.uint16)


def whole(block: np.ndarray) -> bool:
    return bool((block == block.flat[0]).all()) and 0x3C00 <= int(block.flat[0]) < 0x3D00


@pytest.mark.parametrize("codec", ["lossless", "raw"])
def test_readers_see_whole_payloads(folder: Path, codec: str) -> None:
    with make(folder, codec=codec) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEYS, marked(0, 0))
        wrong: list[str] = []
        finished = threading.Event()

        def write(writer: int) -> None:
            for round_number in range(ROUNDS):
                result = namespace.put(KEYS, marked(writer, round_number), replace=True)
                if not result.all_ok:
                    wrong.append(f"put {result}")

        def read() -> None:
            out = np.zeros(SHAPE, np.uint16)
            while not finished.is_set():
                result = namespace.get(KEYS, out)
                wrong.extend(f"block {i}" for i in range(12) if result.ok[i] and not whole(out[i]))
                if not result.all_ok:
                    wrong.append(f"get {result}")

        writers = [threading.Thread(target=write, args=(w,)) for w in range(WRITERS)]
        readers = [threading.Thread(target=read) for _ in range(2)]
        for thread in writers + readers:
            thread.start()
        for thread in writers:
            thread.join()
        finished.set()
        for thread in readers:
            thread.join()
        assert not wrong, wrong[:5]
    with make(folder) as store:
        out = np.zeros(SHAPE, np.uint16)
        assert store.namespace(IDENTITY).get(KEYS, out).all_ok
        assert all(whole(block) for block in out)
        last = {int(block.flat[0]) for block in out}
        assert last <= {0x3C00 + 64 * writer + ROUNDS - 1 for writer in range(WRITERS)}


def test_without_replace_the_first_stays(folder: Path) -> None:
    """All write the same keys at once: one stores each key, the others find it present."""
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        start = threading.Barrier(WRITERS)
        statuses: list[np.ndarray] = [np.zeros(0)] * WRITERS

        def write(writer: int) -> None:
            start.wait()
            statuses[writer] = namespace.put(KEYS, marked(writer, 0)).statuses

        threads = [threading.Thread(target=write, args=(w,)) for w in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stored = np.stack(statuses) == 0
        assert (stored.sum(axis=0) == 1).all()
        out = np.zeros(SHAPE, np.uint16)
        assert namespace.get(KEYS, out).all_ok
        for row, block in enumerate(out):
            assert whole(block)
            assert int(block.flat[0]) == 0x3C00 + 64 * int(np.argmax(stored[:, row]))
