"""Exceptions from signal handlers (Ctrl-C) inside put, get and flush.

They may cut a call between any two instructions of the main thread. Whatever was cut, later calls
work, nothing waits for ever, no bytes are wrong, and what a finished flush covered is there.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 40
CHILD = f"""
import random, signal, sys
import numpy as np
import flashkv
from flashkv import DurabilityError, Identity, KVGeometry

path, seed = sys.argv[1], int(sys.argv[2])
random.seed(seed)
rng = np.random.default_rng(seed)
store = flashkv.open(path, capacity="80MiB", geometry=KVGeometry.gqa(2, 2, 32, "bfloat16"))
blocks = store.namespace(Identity(model="m"))
versions = rng.integers(0, 65535, (2, 32, 2, 2, 2, 64, 32)).astype(np.uint16)
out = np.zeros_like(versions[0])
keys = [b"%d" % i for i in range(32)]


def check():
    got = blocks.get(keys, out).ok
    for i in np.flatnonzero(got):
        assert any((out[i] == version[i]).all() for version in versions), f"wrong bytes {{i}}"
    return got


for round_ in range({ROUNDS}):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        # Again after half a second: one that strikes inside a finaliser is swallowed by Python.
        signal.setitimer(signal.ITIMER_REAL, 0.002 + random.random() * 0.02, 0.5)
        while True:
            blocks.put(keys, versions[round_ % 2], replace=True)
            blocks.get(keys, out)
            store.flush()
    except (KeyboardInterrupt, DurabilityError):
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)  # a hang ends the child
    check()
    try:
        store.flush()
    except DurabilityError:
        pass
    assert blocks.put([b"after"], versions[0][:1], replace=True).all_ok
    try:
        store.flush()
    except DurabilityError:
        continue
    finally:
        signal.alarm(0)
    assert blocks.get([b"after"], out[:1]).all_ok
signal.alarm(20)
stats = store.stats()
assert stats.writes_inflight == 0 and stats.read_buffers_in_use == 0, stats
try:
    store.close()
except DurabilityError:
    pass
store = flashkv.open(path)
blocks = store.namespace(Identity(model="m"))
check()
assert blocks.get([b"after"], out[:1]).all_ok
store.close()
print("held")
"""


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_interrupted_calls_leave_a_working_store(store_path: Path, backend: str) -> None:
    seed = int(os.environ.get("FLASHKV_SEED", random.randrange(1 << 30)))
    print(f"FLASHKV_SEED={seed} ./run test tests/faults/test_interrupts.py")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(store_path), str(seed)],
        env={**os.environ, "FLASHKV_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert child.returncode != -signal.SIGALRM, f"hung: {child.stderr[-2000:]}"
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.strip().endswith("held")
