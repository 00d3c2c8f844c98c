"""A process that uses a store is killed, again and again, at random moments.

The child says what it did before each call and after it: what it said after flush() returned must
be there, what it said after delete() returned must not be, and between the two either may be.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from sigkill_child import TOKENS, block, key_of
from store_support import BACKENDS, GQA, IDENTITY, MIB, check_rest, open_store

from flashkv import BlockStatus

CHILD = Path(__file__).parent.parent / "sigkill_child.py"
CAPACITY = 64 * MIB
PUTS_A_STORE = 140
"""About 200 KiB each: below half of the capacity, so that nothing is evicted."""


@dataclass
class Known:
    """What the children said: which versions of each key may be there. None: it may be absent."""

    allowed: dict[int, set[int | None]] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)
    next_number: int = 0
    version: int = 0

    def listen(self, lines: list[bytes]) -> None:
        for line in lines:
            verb, *words = line.decode().split()
            keys = list(map(int, words))
            if verb == "putting":
                self.version, *keys = keys
                for key in keys:
                    self.allowed.setdefault(key, {None}).add(self.version)
                    self.latest[key] = self.version
                    self.next_number = max(self.next_number, key + 1)
            elif verb == "flushed":
                for key in keys:
                    self.allowed[key] = {self.latest[key]}
            elif verb == "deleting":
                for key in keys:
                    self.allowed[key].add(None)
            elif verb == "deleted":
                for key in keys:
                    self.allowed[key] = {None}

    def stored(self) -> list[int]:
        return sorted(key for key, versions in self.allowed.items() if versions != {None})

    def check(self, path: Path, backend: str) -> None:
        """Opens the store as the next process would; what it finds was made durable by that."""
        with open_store(path, None, capacity=None, backend=backend) as store:
            ns = store.namespace(IDENTITY)
            numbers = sorted(self.allowed)
            out = np.zeros((len(numbers), 2, 2, 2, TOKENS, 64), np.uint16)
            result = ns.get([key_of(n) for n in numbers], out)
            for row, number in enumerate(numbers):
                allowed = self.allowed[number]
                if result[row] == BlockStatus.MISS:
                    assert None in allowed, f"flushed block {number} is lost, of {allowed}"
                    self.allowed[number] = {None}
                    continue
                assert result[row] == BlockStatus.OK
                versions = [
                    version
                    for version in allowed
                    if version is not None and np.array_equal(out[row], block(number, version))
                ]
                assert versions, f"block {number} holds none of {allowed}"
                self.allowed[number] = {versions[0]}
                self.latest[number] = versions[0]
            stats = check_rest(store)
            assert stats.evicted_blocks == 0, "the test is meant to evict nothing"
            assert stats.damaged_blocks == 0


def environment() -> dict[str, str]:
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}


def kill_once(path: Path, backend: str, known: Known, random_: random.Random) -> str:
    """One child, killed at a random moment; returns the last thing that it said."""
    child = subprocess.Popen(
        [
            sys.executable,
            CHILD,
            path,
            backend,
            str(random_.randrange(1 << 30)),
            str(known.next_number),
            str(known.version),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert child.stdin
    assert child.stdout
    try:
        child.stdin.write((" ".join(map(str, known.stored())) + "\n").encode())
        child.stdin.flush()
        # Now and then in the middle of opening; else while it works.
        if random_.random() < 0.2:
            time.sleep(random_.uniform(0.15, 0.4))
            lines = []
        else:
            lines = [child.stdout.readline()]
            time.sleep(random_.expovariate(1 / 0.08))
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    finally:
        child.kill()
        code = child.wait()
        child.stdin.close()
        child.stdout.close()
    assert code == -signal.SIGKILL, "the child ended by itself: see its traceback above"
    whole = [line for line in lines if line.endswith(b"\n")]
    known.listen(whole)
    return whole[-1].decode().split()[0] if whole else "nothing"


def loop(path: Path, backend: str, kills: int, seed: int) -> None:
    random_ = random.Random(seed)
    known = Known()
    store_number = 0
    moments: dict[str, int] = {}
    for _ in range(kills):
        here = path / str(store_number)
        if not here.exists():
            open_store(here, GQA, capacity=CAPACITY, backend=backend).close()
        moment = kill_once(here, backend, known, random_)
        moments[moment] = moments.get(moment, 0) + 1
        known.check(here, backend)
        if known.version > PUTS_A_STORE:  # a new store before the old one has to evict
            store_number += 1
            known = Known()
    print(f"{backend}: last words {moments}")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_loop(store_path: Path, seed: int, backend: str) -> None:
    print(f"seed {seed}")
    loop(store_path, backend, 50 // len(BACKENDS), seed)


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_loop_at_length(store_path: Path, seed: int, backend: str) -> None:
    loop(store_path, backend, 1000, seed)
