"""What goes on beside puts: full segments on their way to a directory, the next segment's file."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_support import IDENTITY, KINDS, MIB, ROOT, check_rest, open_store, shard_of

from flashkv import DurabilityError, Namespace, Store, opening
from flashkv.background import When
from flashkv.blockio import BlockIO
from flashkv.filesystem import DISK, FileSystem
from flashkv.segments import SegmentState
from flashkv.space import Space

LARGE = KINDS[4]  # 20 blocks a segment
PATTERN = LARGE.blocks([b"%d" % n for n in range(25)], [0] * 25)
CUT_IN = ("sealer.py", "space.py", "segment_writer.py", "blockio.py", "manifest.py", "thread.py")
AT_EXIT = f"""
import atexit, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests")!r})
from store_support import IDENTITY, KINDS, MIB, open_store

LARGE, path = KINDS[4], Path(sys.argv[1])
store = open_store(path, LARGE.geometry, capacity=60 * MIB)
keys = [b"%d" % n for n in range(80)]

def put(first, last):
    values = LARGE.blocks(keys[first:last], [0] * (last - first))
    assert store.namespace(IDENTITY).put(keys[first:last], values).all_ok

def end():
    put(30, 80)
    store.close()
    with open_store(path, LARGE.geometry, capacity=None) as again:
        assert again.namespace(IDENTITY).contains(keys).all()
    print("held")

atexit.register(end)
put(0, 30)
"""


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with open_store(store_path, LARGE.geometry, capacity=40 * MIB) as store:
        yield store


def fill(blocks: Namespace, first: int, count: int) -> None:
    keys = [b"fill-%d" % n for n in range(first, first + count)]
    assert blocks.put(keys, PATTERN[:count]).all_ok


# ---- threads


def test_put_and_close_at_exit(store_path: Path) -> None:
    """The interpreter starts no thread and takes no task any more when atexit's turn comes."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, str(store_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "held", done.stderr[-2000:]


def test_no_thread_to_be_had(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for round_ in range(6):
            fill(store.namespace(IDENTITY), 20 * round_, 20)
        store.flush()
    assert store.io.later(threading.current_thread).result() is not threading.current_thread()
    assert store.namespace(IDENTITY).contains([b"fill-%d" % n for n in range(120)]).all()
    check_rest(store)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_forgotten_handle_is_collected_on_its_own_thread(store_path: Path) -> None:
    """The collector runs on any thread: also on the one that the end of a handle waits for."""
    store = open_store(store_path, LARGE.geometry, capacity=40 * MIB)
    fill(store.namespace(IDENTITY), 0, 5)
    go, io = threading.Event(), store.io

    def collect() -> None:
        go.wait()
        gc.collect()

    gc.collect()
    gc.disable()
    try:
        io.later(collect)
        fill(store.namespace(IDENTITY), 5, 10)
        assert store.space.next_number is not None  # waits behind collect()
        store.itself = store  # type: ignore[attr-defined]
        del store
        go.set()
        end = time.monotonic() + 10
        while not io.closed and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert io.closed
    end = time.monotonic() + 10
    while opening._open_shards and time.monotonic() < end:
        time.sleep(0.01)
    open_store(store_path, LARGE.geometry, capacity=None).close()


# ---- signals


def _cut(blocks: Namespace, keys: list[bytes], turn: int) -> bool:
    """A put that Ctrl-C cuts at the n-th place where the interpreter looks for signals.

    False: it has fewer.
    """
    left = turn

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(CUT_IN):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    try:
        sys.setprofile(look)
        blocks.put(keys, PATTERN)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


# A cut may fall into a generator that Python is just throwing away, which can't raise it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_signal_leaks_a_file_or_a_segment(store_path: Path) -> None:
    """What is on disk counts, and what is full gets its directory, wherever a put is cut."""
    turn, cut = 1, True
    while cut:
        path = store_path / str(turn)
        path.parent.mkdir(exist_ok=True)
        store = open_store(path, LARGE.geometry, capacity=40 * MIB)
        blocks = store.namespace(IDENTITY)
        for _ in range(12):
            cut = _cut(blocks, [b"%d-%d" % (turn, n) for n in range(25)], turn)
            turn += 2
            with suppress(DurabilityError):
                store.flush()
            states = [segment.state for segment in store.segments]
            assert SegmentState.SEALING not in states
            assert states.count(SegmentState.OPEN) <= 1
            there = {int(name[:8]) for name in DISK.names(shard_of(path) / "segments")}
            known = {each.number for each in store.segments if each.has_file()}
            assert there <= known | {store.space.next_number}, f"cut at {turn - 2}"
            assert len(there) <= store.segments_max
            if not cut:
                break
        with suppress(DurabilityError):
            store.close()
        shutil.rmtree(path)
    assert turn > 100


# ---- segments at rest that are reclaimed while a sync holds them


def _in_flight(store: Store, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """(a segment whose directory a sync covers, the writer): the store has no open segment."""
    patch.setattr(store.io._background, "_when", When.AT_LAST)
    writer, blocks = store.writer, store.namespace(IDENTITY)
    fill(blocks, 0, 20)
    fill(blocks, 20, 5)
    with store.writer_lock:
        writer.sealer.finish()
    victim = store.segments.in_state(SegmentState.SEALED)[0]
    assert victim.unsynced
    writer.sealer.together = 1
    with store.writer_lock:
        writer._retire_open()
        writer.flights.wait_written()
        writer.sealer.advance()
    assert victim in writer.sealer._syncing
    assert writer.sealer._sync is not None
    with store.writer_lock:
        assert store.space.reclaim(1, writer.take_kills) == 1
    assert victim.state is SegmentState.FREE
    return victim, writer


def test_a_segment_filled_anew_is_not_durable_by_the_sync_before(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, writer = _in_flight(store, monkeypatch)
    writer.sealer.together = 9
    fill(store.namespace(IDENTITY), 100, 10)
    assert writer._open is victim
    with store.writer_lock:
        writer._retire_open()
        writer.sealer._end_sync()
        assert victim.state is SegmentState.SEALING
        assert writer.sealer.durable_sequence < writer._last_appended
        writer.sealer.finish()
    assert victim.state is SegmentState.SEALED
    assert writer.sealer.durable_sequence == writer._last_appended


def test_a_failed_sync_leaves_what_was_reclaimed_free(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, writer = _in_flight(store, monkeypatch)
    with monkeypatch.context() as patch, store.writer_lock:
        patch.setattr(BlockIO, "sync", lambda _, fds: np.full(len(fds), -5, np.int32))
        writer.sealer._end_sync()
    assert victim.state is SegmentState.FREE
    with pytest.raises(DurabilityError):
        store.flush()


# ---- the next file


def test_a_file_system_that_does_not_tell_its_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the next file yet: a put that has its place doesn't fail for it."""

    def fails(_: Space) -> int:
        raise OSError(5, "Input/output error")

    fill(store.namespace(IDENTITY), 0, 1)
    monkeypatch.setattr(Space, "_spare_bytes", fails)
    fill(store.namespace(IDENTITY), 1, 15)
    assert store.space.next_number is None


def test_a_file_that_stays_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store.namespace(IDENTITY), 0, 15)
    number = store.space.next_number
    assert number is not None

    def stays(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "unlink", stays)
        store.space.close()
    assert store.space.next_number == number
    fill(store.namespace(IDENTITY), 15, 15)
    assert store.segments[number].state is SegmentState.OPEN
