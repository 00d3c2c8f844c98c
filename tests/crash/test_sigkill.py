"""A process that uses a store is killed, again and again, at random moments.

The child says what it did before each call and after it; this process keeps the account (lives.py)
and opens the store after each kill. Then the store takes no more of the disk than its capacity, and
it opens about as fast as a store that was closed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest
from lives import CAPACITY, Known
from sigkill_child import Nursery
from store_support import BACKENDS, GQA, MIB, Store, du_bytes, open_store

OPENING_SLACK_S = 0.005
"""Two medians of some 10 ms each on a machine that does other things too."""


@dataclass
class Opening:
    """Times of the first open after a kill and of one after a close, of the same store."""

    killed_s: list[float] = field(default_factory=list)
    clean_s: list[float] = field(default_factory=list)
    tail_bytes: list[int] = field(default_factory=list)

    def verdict(self) -> tuple[bool, str]:
        """Whether it was swift enough, and the figures."""
        killed, clean = median(self.killed_s), median(self.clean_s)
        tail = median(self.tail_bytes)
        said = (
            f"open after a kill {1e3 * killed:.1f} ms, after a close {1e3 * clean:.1f} ms "
            f"(x {killed / clean:.2f}), tail {tail / MIB:.1f} MiB, medians of {len(self.clean_s)}"
        )
        return killed <= 2 * clean + tail / 1e9 + OPENING_SLACK_S, said


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    path = os.pathsep.join(folder for folder in sys.path if folder)
    nursery = Nursery({**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"})
    yield nursery
    nursery.close()


def kill_once(
    nursery: Nursery, path: Path, backend: str, known: Known, random_: random.Random
) -> str:
    """One child, killed at a random moment; returns the last thing that it said."""
    pid, fd = nursery.start(known.task(path, backend, random_.randrange(1 << 30)))
    with os.fdopen(fd, "rb") as pipe:
        lines = []
        try:
            # Now and then in the middle of opening; else so many words later, whatever time they
            # take on a busy machine.
            if random_.random() < 0.2:
                time.sleep(random_.uniform(0, 0.03))
            else:
                words = 1 + int(random_.expovariate(1 / 30))
                lines += [pipe.readline() for _ in range(words)]
                time.sleep(random_.uniform(0, 0.01))
        finally:
            os.kill(pid, signal.SIGKILL)
            lines += pipe.readlines()
            code = nursery.bury(pid)
    assert code == -signal.SIGKILL, "the child ended by itself: see its traceback above"
    last = "nothing"
    for line in lines:
        if line.endswith(b"\n"):
            last, *words = line.decode().split()
            known.hear(last, [int(word) for word in words])
    return last


def timed_open(path: Path, backend: str) -> tuple[Store, float]:
    begun = time.perf_counter()
    store = open_store(path, None, capacity=None, backend=backend)
    return store, time.perf_counter() - begun


def loop(
    nursery: Nursery,
    path: Path,
    backend: str,
    kills: int,
    seed: int,
    say: Callable[[str], None],
) -> None:
    print(f"seed {seed}")
    random_ = random.Random(seed)
    known, opening = Known(), Opening()
    last_words: Counter[str] = Counter()
    open_store(path, GQA, capacity=CAPACITY, backend=backend).close()
    for _ in range(kills):
        last_words[kill_once(nursery, path, backend, known, random_)] += 1
        assert du_bytes(path) <= CAPACITY
        store, killed_s = timed_open(path, backend)
        tail = store.recovery.scanned_bytes
        with store:
            known.check(store)
        store, clean_s = timed_open(path, backend)
        store.close()
        opening.killed_s.append(killed_s)
        opening.clean_s.append(clean_s)
        opening.tail_bytes.append(tail)
    swift, said = opening.verdict()
    say(f"{kills} kills: {said}")
    print(f"last words {dict(last_words)}")
    print(f"deeds {dict(known.deeds)}; {known.blocks_put} blocks put, {known.evicted} evicted")
    assert swift, said
    assert known.evicted, "the test is meant to evict"
    for verb in ("put", "flushed", "deleted", "rotated"):
        assert known.deeds[verb], f"the test is meant to see {verb}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_loop(
    nursery: Nursery, store_path: Path, seed: int, backend: str, say: Callable[[str], None]
) -> None:
    loop(nursery, store_path, backend, 100 // len(BACKENDS), seed, say)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_loop_at_length(
    nursery: Nursery, store_path: Path, seed: int, backend: str, say: Callable[[str], None]
) -> None:
    loop(nursery, store_path, backend, 1000, seed, say)
