"""The handle: one writer, many readers, threads, forks, readers beside a writer, the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from io_support import process_counts, run_child, settled_counts
from store_support import (
    BACKENDS,
    IDENTITY,
    KINDS,
    MIB,
    Kind,
    check_rest,
    crash,
    equal,
    open_store,
    present,
    put_all,
    shard_of,
)

from flashkv import (
    BlockStatus,
    ClosedError,
    ForkedError,
    Identity,
    LockedError,
    Namespace,
    Shard,
    Store,
)

KIND: Kind = KINDS[0]
LARGE: Kind = KINDS[4]
KEYS = [b"key-%d" % number for number in range(20)]


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with open_store(store_path, KIND.geometry) as store:
        yield store


@pytest.fixture
def ns(store: Store) -> Namespace:
    ns = store.namespace(IDENTITY)
    put_all(ns, KIND, KEYS)
    return ns


# ---- one writer --------------------------------------------------------------------------------


def test_second_open_in_this_process(store: Store, store_path: Path, disk_path: Path) -> None:
    with pytest.raises(LockedError, match="in this process"):
        open_store(store_path, None)
    (disk_path / "link").symlink_to(store_path)
    for other_name in (disk_path / "link", store_path / ".." / store_path.name):
        with pytest.raises(LockedError):
            open_store(other_name, None)
    store.close()
    open_store(store_path, None).close()


def test_second_open_in_another_process(store: Store, ns: Namespace, store_path: Path) -> None:
    said = run_child(
        """
        import sys
        from pathlib import Path
        import flashkv
        from store_support import open_store
        try:
            open_store(Path(sys.argv[1]), None)
        except flashkv.LockedError as error:
            print(error)
        """,
        store_path,
    )
    assert "in another process" in said
    assert present(ns, KIND, KEYS).all()


def test_lock_ends_with_the_process(store_path: Path) -> None:
    run_child(
        """
        import os, sys
        from pathlib import Path
        from store_support import *
        kind = KINDS[0]
        store = open_store(Path(sys.argv[1]), kind.geometry)
        put_all(store.namespace(IDENTITY), kind, [b"a"])
        store.flush()
        os._exit(0)
        """,
        store_path,
    )
    with open_store(store_path, None) as store:
        assert present(store.namespace(IDENTITY), KIND, [b"a"]).all()


def test_failed_open_gives_the_lock_back(disk_path: Path) -> None:
    from flashkv import CapacityError, GeometryError

    before = process_counts()
    for _ in range(3):
        with pytest.raises(GeometryError):
            open_store(disk_path / "s", None)
        with pytest.raises(CapacityError):
            open_store(disk_path / "s", KIND.geometry, capacity=MIB)
    open_store(disk_path / "s", KIND.geometry).close()
    with pytest.raises(CapacityError):
        open_store(disk_path / "s", None, capacity=MIB)
    with pytest.raises(GeometryError):
        open_store(disk_path / "s", LARGE.geometry)
    open_store(disk_path / "s", None).close()
    assert settled_counts(before) <= before


def test_forgotten_handle(store_path: Path) -> None:
    """A handle that nobody holds gives its lock, threads and files back."""
    before = process_counts()
    store = open_store(store_path, KIND.geometry)
    put_all(store.namespace(IDENTITY), KIND, KEYS)
    store.flush()
    del store
    with pytest.warns(ResourceWarning, match="not closed"):
        gc.collect()
    with open_store(store_path, None) as again:
        assert present(again.namespace(IDENTITY), KIND, KEYS).all()
    del again
    gc.collect()
    after = settled_counts(before)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


# ---- closing -----------------------------------------------------------------------------------


def test_closed_handle(store: Store, ns: Namespace) -> None:
    out = KIND.empty(1)
    store.close()
    store.close()
    assert store.closed
    for call in (
        store.flush,
        store.stats,
        store.client,
        lambda: store.namespace(IDENTITY),
        lambda: ns.put(KEYS[:1], out),
        lambda: ns.get(KEYS[:1], out),
        lambda: ns.contains(KEYS),
        lambda: ns.contains_one(KEYS[0]),
        lambda: ns.match(KEYS),
        lambda: ns.delete(KEYS),
        ns.rotate,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert "closed" in repr(store)


def test_everything_is_given_back(store_path: Path) -> None:
    before = process_counts()
    for backend in BACKENDS:
        for _ in range(3):
            with open_store(store_path, KIND.geometry, backend=backend) as store:
                put_all(store.namespace(IDENTITY), KIND, KEYS, replace=True)
                with store.client() as client:
                    client.submit_contains(store.namespace(IDENTITY), KEYS).wait(5000)
            with open_store(store_path, None, read_only=True, backend=backend) as reader:
                assert present(reader.namespace(IDENTITY), KIND, KEYS).all()
    assert settled_counts(before) <= before


def errors_of(calls: list[Callable[[], None]], meanwhile: Callable[[], None]) -> list[Any]:
    """Runs each call in a thread, and one thing meanwhile; what the calls raised. None may hang."""
    raised: list[Any] = []
    started = threading.Barrier(len(calls) + 1)

    def run(call: Callable[[], None]) -> None:
        started.wait()
        try:
            call()
        except BaseException as error:  # noqa: BLE001  (the test compares it)
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    started.wait()
    meanwhile()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a call hangs"
    return raised


def close_under_load(store: Store) -> list[Any]:
    """What threads in the middle of gets, puts and look-ups get when the store closes."""
    ns = store.namespace(IDENTITY)
    put_all(ns, LARGE, KEYS, replace=True)
    store.flush()

    def get() -> None:
        out = LARGE.empty(len(KEYS))
        while True:
            assert ns.get(KEYS, out).all_ok
            assert equal(out[7], LARGE.block(KEYS[7], 0))

    def put() -> None:
        data = LARGE.blocks(KEYS[:3], [0] * 3)
        while True:
            assert ns.put(KEYS[:3], data, replace=True).all_ok

    def look() -> None:
        while True:
            assert ns.contains(KEYS).all()
            store.stats()

    def close() -> None:
        time.sleep(0.05)
        store.close()

    return errors_of([get, get, get, put, look], close)


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_while_others_work(store_path: Path, backend: str) -> None:
    for _ in range(4):
        store = open_store(store_path, LARGE.geometry, backend=backend)
        raised = close_under_load(store)
        assert [type(error) for error in raised] == [ClosedError] * 5, raised


def test_two_threads_close(store_path: Path) -> None:
    for _ in range(5):
        store = open_store(store_path, KIND.geometry)
        put_all(store.namespace(IDENTITY), KIND, KEYS, replace=True)
        assert errors_of([store.close] * 4, store.close) == []
        assert store.closed
    with open_store(store_path, None) as store:
        assert present(store.namespace(IDENTITY), KIND, KEYS).all()


# ---- forks -------------------------------------------------------------------------------------


def test_forked_child(store_path: Path) -> None:
    """The child's handle is dead and says so; the parent's goes on; the lock stays the parent's."""
    said = run_child(
        """
        import os, sys
        from pathlib import Path
        import flashkv
        from store_support import *
        kind = KINDS[0]
        path = Path(sys.argv[1])
        store = open_store(path, kind.geometry)
        ns = store.namespace(IDENTITY)
        keys = [b"a", b"b"]
        put_all(ns, kind, keys)
        out = kind.empty(2)
        if os.fork() == 0:
            calls = [
                store.flush, store.stats, store.client, ns.rotate,
                lambda: ns.put(keys, out), lambda: ns.get(keys, out), lambda: ns.delete(keys),
                lambda: ns.contains(keys), lambda: ns.contains_one(b"a"), lambda: ns.match(keys),
            ]
            for call in calls:
                try:
                    call()
                    os._exit(1)
                except flashkv.ForkedError as error:
                    assert "fork" in str(error)
            try:
                open_store(path, None)
                os._exit(2)
            except flashkv.LockedError:
                pass
            store.close()
            os._exit(0)
        assert os.wait()[1] == 0
        assert present(ns, kind, keys).all()
        put_all(ns, kind, [b"c"])
        store.flush()
        if os.fork() == 0:
            with open_store(path, None, read_only=True) as reader:
                good = present(reader.namespace(IDENTITY), kind, [*keys, b"c"]).all()
            os._exit(0 if good else 1)
        assert os.wait()[1] == 0
        store.close()
        if os.fork() == 0:
            with open_store(path, None) as again:
                good = present(again.namespace(IDENTITY), kind, keys).all()
            os._exit(0 if good else 1)
        assert os.wait()[1] == 0
        print("fine")
        """,
        store_path,
    )
    assert "fine" in said


def test_forked_pool(store_path: Path) -> None:
    """multiprocessing's fork while other threads use the store."""
    said = run_child(
        """
        import multiprocessing, sys, threading
        from pathlib import Path
        import flashkv
        from store_support import *
        kind = KINDS[0]
        store = open_store(Path(sys.argv[1]), kind.geometry)
        ns = store.namespace(IDENTITY)
        keys = [b"%d" % n for n in range(10)]
        put_all(ns, kind, keys)
        stop = threading.Event()
        def read():
            while not stop.is_set():
                assert present(ns, kind, keys).all()
        def child(queue):
            try:
                ns.contains(keys)
            except flashkv.ForkedError:
                queue.put("forked")
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads: thread.start()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        children = [context.Process(target=child, args=(queue,)) for _ in range(4)]
        for process in children: process.start()
        for process in children:
            process.join(20)
            assert process.exitcode == 0, process.exitcode
        assert [queue.get(timeout=5) for _ in children] == ["forked"] * 4
        stop.set()
        for thread in threads: thread.join()
        store.close()
        print("fine")
        """,
        store_path,
    )
    assert "fine" in said


def test_forked_error_is_plain() -> None:
    assert issubclass(ForkedError, RuntimeError)


# ---- read-only beside a writer -----------------------------------------------------------------


def test_reader_sees_what_was_written(store: Store, ns: Namespace, store_path: Path) -> None:
    store.flush()
    with open_store(store_path, None, read_only=True) as reader:
        there = reader.namespace(IDENTITY)
        assert present(there, KIND, KEYS).all()
        put_all(ns, KIND, [b"later"])
        store.flush()
        assert not there.contains_one(b"later")
        stats = check_rest(reader)
        assert stats.read_only
        assert stats.damaged_blocks == 0
        with open_store(store_path, None, read_only=True) as second:
            assert second.namespace(IDENTITY).contains_one(b"later")
    files = sorted(p.name for p in shard_of(store_path).iterdir())
    assert "lock" in files


def test_reader_changes_nothing(store: Store, ns: Namespace, store_path: Path) -> None:
    store.flush()
    before = {
        p: (p.stat().st_mtime_ns, p.stat().st_size, p.read_bytes())
        for p in store_path.rglob("*")
        if p.is_file()
    }
    names = sorted(store_path.rglob("*"))
    with open_store(store_path, None, read_only=True) as reader:
        assert present(reader.namespace(IDENTITY), KIND, KEYS).all()
    assert sorted(store_path.rglob("*")) == names
    for path, (mtime, size, data) in before.items():
        assert (path.stat().st_mtime_ns, path.stat().st_size) == (mtime, size)
        assert path.read_bytes() == data


def test_reclaim_under_a_reader(store_path: Path) -> None:
    """What the writer used again is a miss for the reader: no damage, never other bytes."""
    with open_store(store_path, LARGE.geometry, capacity=21 * MIB) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, LARGE, KEYS)
        store.flush()
        with open_store(store_path, None, read_only=True) as reader:
            there = reader.namespace(IDENTITY)
            assert present(there, LARGE, KEYS[:10]).all()  # their headers are cached
            for number in range(0, 200, 10):
                put_all(ns, LARGE, [b"new-%d" % n for n in range(number, number + 10)])
            store.flush()
            assert not ns.contains(KEYS).any()
            assert there.contains(KEYS).all()
            assert not present(there, LARGE, KEYS).any()
            stats = check_rest(reader)
            assert stats.damaged_blocks == 0
            assert stats.stale_blocks > 0
            assert not there.contains(KEYS).any(), "a second look-up is a plain miss"
            out = LARGE.empty(1)
            assert there.get([b"new-199"], out)[0] == BlockStatus.MISS


@pytest.mark.parametrize("backend", BACKENDS)
def test_readers_while_a_writer_churns(store_path: Path, backend: str) -> None:
    """Opens and reads in another process, all the time: right bytes or a miss, no damage."""
    script = """
    import sys, time
    from pathlib import Path
    from store_support import *
    kind = KINDS[4]
    end = time.monotonic() + 2.5
    hits = opens = 0
    while time.monotonic() < end or opens < 4:
        with open_store(Path(sys.argv[1]), None, read_only=True, backend=sys.argv[2]) as store:
            ns = store.namespace(IDENTITY)
            opens += 1
            for _ in range(4):
                hits += int(present(ns, kind, [b"churn-%d" % n for n in range(400)]).sum())
            stats = store.stats()
            assert stats.damaged_blocks == 0, stats
            assert stats.failed_reads == 0, stats
    print(opens, hits)
    """
    with open_store(store_path, LARGE.geometry, capacity=21 * MIB, backend=backend) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, LARGE, [b"churn-0"])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        import textwrap

        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(store_path), backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        number = 0
        while child.poll() is None:
            keys = [b"churn-%d" % (n % 400) for n in range(number, number + 8)]
            put_all(ns, LARGE, keys, replace=True)
            number += 8
            if number % 40 == 0:
                store.flush()
                ns.delete(keys[:1])
        said = child.communicate()[0]
        assert child.returncode == 0, said
        opens, hits = map(int, said.split()[-2:])
        assert opens > 2
        assert hits > 0
        assert store.stats().evicted_segments > 3


def test_reader_of_a_store_that_never_was(disk_path: Path) -> None:
    from flashkv import NotAStoreError

    with pytest.raises(NotAStoreError):
        open_store(disk_path / "s", None, read_only=True)
    assert list(disk_path.iterdir()) == []


# ---- threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_that_do_everything(store_path: Path, seed: int, backend: str) -> None:
    """Puts, gets, deletes, look-ups, flushes at once, with reclaim: right bytes or a miss."""
    store = open_store(store_path, LARGE.geometry, capacity=25 * MIB, backend=backend)
    ns = store.namespace(IDENTITY)
    end = time.monotonic() + 2

    def act(rng: np.random.Generator) -> None:
        keys = [b"shared-%d" % n for n in rng.integers(0, 120, int(rng.integers(1, 6)))]
        action = rng.random()
        if action < 0.4:
            data = LARGE.blocks(keys, [0] * len(keys))
            result = ns.put(keys, data, replace=bool(rng.random() < 0.3))
            assert not result.lost.any(), result
        elif action < 0.8:
            present(ns, LARGE, keys)
        elif action < 0.9:
            ns.contains(keys)
            match = ns.match(keys, lease_ms=50)
            if match.lease is not None:
                match.lease.release()
        elif action < 0.97:
            ns.delete(keys)
        else:
            store.flush()

    def work(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        while time.monotonic() < end:
            act(rng)

    calls = [partial(work, number) for number in range(6)]
    assert errors_of(calls, lambda: None) == []
    stats = check_rest(store)
    assert stats.damaged_blocks == stats.lost_blocks == 0
    there = {key for key in (b"shared-%d" % n for n in range(120)) if ns.contains_one(key)}
    store.flush()
    crash(store)
    with open_store(store_path, None) as store:
        ns = store.namespace(IDENTITY)
        found = {key for key in (b"shared-%d" % n for n in range(120)) if ns.contains_one(key)}
        assert found == there
        assert present(ns, LARGE, sorted(there)).all()


# ---- namespaces in a store ---------------------------------------------------------------------


def test_namespaces_are_apart(store: Store, ns: Namespace, store_path: Path) -> None:
    others = [
        store.namespace(Identity(model="test/model", revision="2")),
        store.namespace(Identity(model="test/model", revision="1", adapter="lora")),
        store.namespace(IDENTITY, shard=Shard(heads=(0, 1))),
    ]
    assert store.namespace(IDENTITY) is ns
    assert len({other.digest for other in others[:2]} | {ns.digest}) == 3
    for other in others:
        assert not other.contains(KEYS).any()
    put_all(others[0], KIND, KEYS, 1)
    assert present(ns, KIND, KEYS, 0).all()
    assert present(others[0], KIND, KEYS, 1).all()
    assert others[0].delete(KEYS[:3]).all_ok
    assert present(ns, KIND, KEYS).all()
    assert others[0].rotate() == len(KEYS) - 3
    assert not others[0].contains(KEYS).any()
    assert present(ns, KIND, KEYS).all()
    put_all(others[0], KIND, KEYS[:2], 2)
    crash(store)
    with open_store(store_path, None) as again:
        assert not present(
            again.namespace(Identity(model="test/model", revision="2")), KIND, KEYS[2:], 1
        ).any()


def test_many_namespaces(store_path: Path) -> None:
    """More identities than a segment has room for beside data; each is found again."""
    small: Kind = KINDS[5]
    with open_store(store_path, small.geometry) as store:
        for number in range(300):
            ns = store.namespace(Identity(model=f"model-{number}", extras={"x": "y" * 3000}))
            put_all(ns, small, [b"key"], number)
        check_rest(store)
    with open_store(store_path, None) as store:
        assert store.stats().namespaces == 300
        for number in range(0, 300, 7):
            ns = store.namespace(Identity(model=f"model-{number}", extras={"x": "y" * 3000}))
            assert present(ns, small, [b"key"], number).all()


def test_rotate_is_durable(store: Store, ns: Namespace, store_path: Path) -> None:
    store.flush()
    assert ns.rotate() == len(KEYS)
    put_all(ns, KIND, KEYS[:4], 1)
    store.flush()
    crash(store)
    for _ in range(2):
        with open_store(store_path, None) as store:
            found = present(store.namespace(IDENTITY), KIND, KEYS, 1)
            assert found.tolist() == [True] * 4 + [False] * 16


def test_replaced_then_deleted_stays_away(store: Store, ns: Namespace, store_path: Path) -> None:
    """Older versions lie in the same and in other segments; a delete reaches them all."""
    store.flush()
    for version in range(1, 4):
        put_all(ns, KIND, KEYS, version, replace=True)
        if version == 2:
            store.flush()
    assert ns.delete(KEYS[:10]).all_ok
    crash(store)
    with open_store(store_path, None) as store:
        ns = store.namespace(IDENTITY)
        assert not ns.contains(KEYS[:10]).any()
        assert ns.contains(KEYS[10:]).all()


def test_stats_are_plain(store: Store, ns: Namespace) -> None:
    import json

    present(ns, KIND, [*KEYS, b"absent"])
    stats = store.stats()
    figures = json.loads(json.dumps(stats.as_dict()))
    assert figures["put_blocks"] == figures["accepted_blocks"] == len(KEYS)
    assert figures["hit_blocks"] == len(KEYS)
    assert figures["missed_blocks"] == 1
    assert figures["accepted_bytes"] == figures["hit_bytes"] == len(KEYS) * KIND.block_bytes
    assert figures["namespaces"] == 1
    assert sum(figures["segments"].values()) == len(store.segments)


def test_digests_that_meet(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys under one digest: the later wins, the earlier is a miss, never the other's bytes."""
    monkeypatch.setattr(Store, "digest_bytes", 1)
    keys = [b"meet-%d" % number for number in range(600)]
    small: Kind = KINDS[1]
    with open_store(store_path, small.geometry) as store:
        ns = store.namespace(IDENTITY)
        for at in range(0, len(keys), 50):
            ns.put(keys[at : at + 50], small.blocks(keys[at : at + 50], [0] * 50), replace=True)
        found = present(ns, small, keys)
        assert 0 < found.sum() <= 256
        assert store.stats().blocks <= 256
        out = small.empty(1)
        for key in keys[:100]:
            result: Any = ns.get([key], out)
            assert not result.all_ok or equal(out[0], small.block(key, 0))
        crash(store)
    with open_store(store_path, None) as store:
        again = present(store.namespace(IDENTITY), small, keys)
        assert again.sum() <= 256
