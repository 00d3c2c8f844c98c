"""Fault: the index lives in memory only, so after a restart the files are there and nothing hits.

flashkv guarantees: whatever flush() or close() returned for is found, with its bytes, by any later
process, also when the writer was killed. The index is derived from what lies on flash, never stored
apart from it.
"""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from small_stores import IDENTITY, assert_equal, child, make, names, payload, start_child

BLOCKS = 1000

WRITE = """
store = make(path)
blocks = payload(7, 1000)
result = store.namespace(IDENTITY).put(names(1000), blocks)
assert result.all_ok and (result.statuses == 0).all()
"""
CHECK = """
store = make(path)
result, out = read_back(store.namespace(IDENTITY), names(1000), payload(7, 1000))
print(int(result.ok.sum()), bool((out == payload(7, 1000)).all()))
store.close()
"""


@pytest.fixture
def written(folder: Path, request: pytest.FixtureRequest) -> Path:
    """1,000 blocks of another process, which closed or was killed after a flush."""
    if request.param == "closed":
        child(WRITE + "store.close()", folder)
        return folder
    writer = start_child(
        WRITE + "store.flush(); print('flushed', flush=True); sys.stdin.read()", folder
    )
    assert writer.stdout is not None
    with writer:
        assert writer.stdout.readline() == "flushed\n"
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    return folder


@pytest.mark.parametrize("written", ["closed", "killed"], indirect=True)
def test_a_new_process_finds_everything(written: Path) -> None:
    assert child(CHECK, written).split() == [str(BLOCKS), "True"]
    assert child(CHECK, written).split() == [str(BLOCKS), "True"]


@pytest.mark.parametrize("written", ["killed"], indirect=True)
def test_a_store_that_was_killed_goes_on(written: Path) -> None:
    """What comes after the crash neither hides nor harms what was flushed before."""
    more = payload(8, 100)
    for round_number in range(3):
        with make(written) as store:
            namespace = store.namespace(IDENTITY)
            result = namespace.put(names(100, f"r{round_number}-"), more)
            assert (result.statuses == 0).all()
            assert_equal(namespace, names(BLOCKS), payload(7, BLOCKS))
    with make(written) as store:
        namespace = store.namespace(IDENTITY)
        assert store.stats().blocks == BLOCKS + 300
        for round_number in range(3):
            assert_equal(namespace, names(100, f"r{round_number}-"), more)


def test_a_read_only_open_finds_what_was_flushed(folder: Path) -> None:
    blocks = payload(1, 64)
    with make(folder) as store:
        store.namespace(IDENTITY).put(names(64), blocks)
        store.flush()
        with make(folder, read_only=True) as reader:
            assert_equal(reader.namespace(IDENTITY), names(64), blocks)
            assert np.array_equal(
                reader.namespace(IDENTITY).contains(names(65)), [True] * 64 + [False]
            )
