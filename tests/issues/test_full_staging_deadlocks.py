"""Fault: a full staging pool busy-loops or deadlocks.

flashkv guarantees: buffers are bounded, and whoever finds none waits for a finished operation,
never for itself: with the least memory that options allow and many more requests than fit, each
finishes.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from small_stores import BACKENDS, BLOCK_SHAPE, IDENTITY, MIB, make, names, payload

SHAPE = (*BLOCK_SHAPE[:3], 1024, 64)  # 1 MiB
KEYS = names(16)
BLOCKS = payload(1, 16, SHAPE)
THREADS = 16


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_gets_few_buffers(folder: Path, backend: str, codec: str) -> None:
    """64 gets of 16 MiB at once, more than there is memory for: no hang, no spinning."""
    with make(
        folder,
        capacity=64 * MIB,
        segment_bytes=8 * MIB,
        read_buffer_bytes=4 * MIB,
        header_cache_bytes=0,
        backend=backend,
        codec=codec,
    ) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(KEYS, BLOCKS).all_ok
        store.flush()
        wrong: list[str] = []

        def read() -> None:
            memory = np.zeros(BLOCKS[:4].nbytes + 64, np.uint8)[2:]
            out = memory[: BLOCKS[:4].nbytes].view(np.uint16).reshape(BLOCKS[:4].shape)
            for turn in range(4):
                first = turn * 4
                result = namespace.get(KEYS[first : first + 4], out)
                if not (result.all_ok and np.array_equal(out, BLOCKS[first : first + 4])):
                    wrong.append(repr(result))

        threads = [threading.Thread(target=read, daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "gets hang"
        assert not wrong, wrong[:3]
        assert store.stats().read_buffers_in_use == 0
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.2, "something spins while nothing is asked for"


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_puts_little_staging(folder: Path, backend: str) -> None:
    """Puts that are larger than all staging, from several threads."""
    with make(
        folder, capacity=96 * MIB, segment_bytes=8 * MIB, staging_bytes=4 * MIB, backend=backend
    ) as store:
        namespace = store.namespace(IDENTITY)

        def write(number: int) -> None:
            for first in range(0, 16, 4):
                keys = [b"%d/%d" % (number, row) for row in range(first, first + 4)]
                assert namespace.put(keys, BLOCKS[first : first + 4]).all_ok

        threads = [threading.Thread(target=write, args=(n,), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "puts hang"
        store.flush()
        stats = store.stats()
        assert (stats.staging_in_use, stats.writes_inflight) == (0, 0)
        assert stats.accepted_blocks == 64
        out = np.zeros_like(BLOCKS)
        assert namespace.get([b"3/%d" % row for row in range(16)], out).all_ok
        assert np.array_equal(out, BLOCKS)


def test_puts_and_gets_share_little_memory(folder: Path) -> None:
    """Gets of blocks whose writes wait for the staging that those gets' puts hold."""
    with make(
        folder,
        capacity=64 * MIB,
        segment_bytes=8 * MIB,
        staging_bytes=4 * MIB,
        read_buffer_bytes=4 * MIB,
    ) as store:
        namespace = store.namespace(IDENTITY)
        failed: list[str] = []

        def work(number: int) -> None:
            out = np.zeros_like(BLOCKS[:2])
            for turn in range(8):
                keys = [b"%d/%d/%d" % (number, turn, row) for row in range(2)]
                put = namespace.put(keys, BLOCKS[2 * number : 2 * number + 2])
                got = namespace.get(keys, out)
                evicted = got.missed.any() and not got.lost.any()
                good = np.array_equal(out, BLOCKS[2 * number : 2 * number + 2])
                if not put.all_ok or not (evicted or (got.all_ok and good)):
                    failed.append(f"{put} {got}")

        threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "work hangs"
        assert not failed, failed[:3]
