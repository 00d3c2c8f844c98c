"""Disks that are full, fail, shrink or lack direct I/O: statuses and counters, never a surprise."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from io_support import SECCOMP, run_child
from small_disks import small_disk
from store_support import (
    BACKENDS,
    IDENTITY,
    KINDS,
    MIB,
    Kind,
    check_rest,
    crash,
    open_store,
    present,
    put_all,
    segment_file,
)

from flashkv import BlockStatus, DurabilityError, Namespace, Store, StoreError
from flashkv.blockio import BlockIO
from flashkv.index import Keys

KIND: Kind = KINDS[0]
LARGE: Kind = KINDS[4]
KEYS = [b"key-%d" % number for number in range(20)]


def put_some(ns: Namespace, kind: Kind, first: int, count: int) -> dict[str, int]:
    """Puts blocks one batch at a time; how many ended how."""
    counts: dict[str, int] = {}
    for number in range(first, first + count, 4):
        keys = [b"some-%d" % n for n in range(number, number + 4)]
        for status in ns.put(keys, kind.blocks(keys, [0] * 4)):
            counts[status.name] = counts.get(status.name, 0) + 1
    return counts


# ---- full disks --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_disk_smaller_than_the_capacity(kind: str, backend: str) -> None:
    """The floor holds; the store works within what there is, by eviction."""
    with small_disk(kind, 48 * MIB) as disk:
        floor = 8 * MIB
        with open_store(
            disk.place / "s",
            LARGE.geometry,
            capacity=512 * MIB,
            free_floor_bytes=floor,
            backend=backend,
        ) as store:
            ns = store.namespace(IDENTITY)
            assert put_some(ns, LARGE, 0, 320) == {"OK": 320}
            stats = check_rest(store)
            assert disk.free_bytes() >= floor - 64 * 1024
            assert stats.evicted_segments > 3
            assert stats.floor_refusals or stats.evicted_blocks
            store.flush()
            there = [key for key in (b"some-%d" % n for n in range(320)) if ns.contains_one(key)]
            assert len(there) > 40
            assert present(ns, LARGE, there).all()
            crash(store)
        with open_store(disk.place / "s", None, capacity=None, free_floor_bytes=floor) as store:
            assert present(store.namespace(IDENTITY), LARGE, there).all()
            check_rest(store)


@pytest.mark.parametrize("backend", BACKENDS)
def test_others_fill_the_disk(backend: str) -> None:
    """Not a byte free: puts evict or end in NO_SPACE, reads go on, and later all is as before."""
    with small_disk("ext4", 64 * MIB) as disk:
        path = disk.place / "s"
        with open_store(path, LARGE.geometry, capacity=40 * MIB, backend=backend) as store:
            ns = store.namespace(IDENTITY)
            assert put_some(ns, LARGE, 0, 60) == {"OK": 60}
            store.flush()
            disk.fill()
            assert disk.free_bytes() < 64 * 1024
            keys = [b"some-%d" % number for number in range(60)]
            assert present(ns, LARGE, keys).all()
            counts = put_some(ns, LARGE, 100, 200)
            assert set(counts) <= {"OK", "NO_SPACE"}, counts
            with suppress(StoreError):
                store.flush()
            there = [key for key in keys if ns.contains_one(key)]
            assert present(ns, LARGE, there).all()
            disk.empty()
            counts = put_some(ns, LARGE, 400, 80)
            assert counts.get("OK", 0) >= 76, counts
            store.flush()
            check_rest(store)
            keys = [b"some-%d" % number for number in range(460, 480)]
            assert present(ns, LARGE, keys).all()
        with open_store(path, None, capacity=None, backend=backend) as store:
            assert present(store.namespace(IDENTITY), LARGE, keys).all()


def test_deletes_on_a_full_disk() -> None:
    """A delete that can't be logged says so; one that succeeded holds after a crash."""
    with small_disk("tmpfs", 24 * MIB) as disk:
        store = open_store(disk.place / "s", LARGE.geometry, capacity=17 * MIB)
        ns = store.namespace(IDENTITY)
        put_all(ns, LARGE, KEYS)
        store.flush()
        disk.fill()
        gone = []
        for key in KEYS:
            try:
                assert ns.delete([key]).all_ok
                gone.append(key)
            except StoreError:  # noqa: PERF203
                assert not ns.contains_one(key)
        disk.empty()
        for key in KEYS[:10]:
            ns.delete([key])
            gone.append(key)
        crash(store)
        with open_store(disk.place / "s", None, capacity=None) as store:
            assert not store.namespace(IDENTITY).contains(gone).any()


def test_no_room_for_a_store() -> None:
    with small_disk("tmpfs", 1 * MIB) as disk:
        disk.filler.write_bytes(bytes(disk.free_bytes()))
        with pytest.raises(StoreError):
            open_store(disk.place / "s", LARGE.geometry)
        disk.empty()
        with open_store(disk.place / "s", LARGE.geometry) as store:
            counts = put_some(store.namespace(IDENTITY), LARGE, 0, 8)
            assert counts == {"NO_SPACE": 8}
            check_rest(store)


# ---- short writes ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_short_writes(disk_path: Path, backend: str) -> None:
    """RLIMIT_FSIZE cuts writes in the middle: lost blocks are told of, the rest stays."""
    said = run_child(
        """
        import resource, signal, sys
        from pathlib import Path
        import flashkv
        from store_support import *
        kind = KINDS[0]
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = open_store(Path(sys.argv[1]), kind.geometry, backend=sys.argv[2], codec="raw")
        ns = store.namespace(IDENTITY)
        first = [b"first-%d" % n for n in range(10)]
        put_all(ns, kind, first)
        store.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))
        second = [b"second-%d" % n for n in range(30)]
        result = ns.put(second, kind.blocks(second, [0] * 30))
        assert result.all_ok, result
        try:
            store.flush()
            raise SystemExit("nothing was lost?")
        except flashkv.DurabilityError as error:
            lost = error.blocks_lost
            print(error)
        assert 0 < lost <= 30, lost
        there = ns.contains(second)
        assert (~there).sum() == lost
        assert present(ns, kind, first).all()
        assert (present(ns, kind, second) == there).all()
        stats = check_rest(store)
        assert stats.lost_blocks == lost and stats.failed_writes > 0, stats
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        again = [key for key, t in zip(second, there) if not t]
        put_all(ns, kind, again)
        store.flush()
        assert present(ns, kind, second).all()
        crash(store)
        store = open_store(Path(sys.argv[1]), None, capacity=None, backend=sys.argv[2])
        ns = store.namespace(IDENTITY)
        assert present(ns, kind, first + second).all()
        check_rest(store)
        store.close()
        print("fine")
        """,
        disk_path / "s",
        backend,
    )
    assert "fine" in said
    assert "captured blocks could not be made durable" in said


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_write_works_for_long(disk_path: Path, backend: str) -> None:
    """Many segments' worth of failing writes; then the disk is well again and so is the store."""
    with open_store(disk_path / "s", LARGE.geometry, backend=backend) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, LARGE, KEYS)
        store.flush()
        with pytest.MonkeyPatch.context() as patch:
            original = BlockIO.write_reap

            def failing(*arguments: object, **named: object) -> object:
                rows = original(*arguments, **named)  # type: ignore[arg-type]
                rows["result"] = -5
                return rows

            patch.setattr(BlockIO, "write_reap", failing)
            for number in range(0, 100, 10):
                keys = [b"lost-%d" % n for n in range(number, number + 10)]
                result = ns.put(keys, LARGE.blocks(keys, [0] * 10))
                assert not (result.statuses == BlockStatus.BLOCK_TOO_LARGE).any(), result
            with pytest.raises(DurabilityError):
                store.flush()
        assert not ns.contains([b"lost-%d" % n for n in range(100)]).any()
        put_all(ns, LARGE, [b"well"])
        store.flush()
        assert present(ns, LARGE, [b"well"]).all()
        there = [key for key in KEYS if ns.contains_one(key)]
        assert present(ns, LARGE, there).all()
        check_rest(store)
    with open_store(disk_path / "s", None) as store:
        ns = store.namespace(IDENTITY)
        assert not ns.contains([b"lost-%d" % n for n in range(100)]).any()
        assert present(ns, LARGE, [*there, b"well"]).all()


# ---- reads that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_segment_cut_under_the_store(store_path: Path, backend: str, codec: str) -> None:
    """Blocks beyond the cut are a miss, the others come; the next look-up is a plain miss."""
    with open_store(
        store_path, KIND.geometry, backend=backend, codec=codec, growth=((0, 64),)
    ) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, KIND, KEYS)
        store.flush()
        pages = store.index.lookup(Keys.pack(KEYS).digests(ns._space))["page"]
        os.truncate(segment_file(store_path, 0), int(pages[12]) * 4096 + 4096)
        out = KIND.empty(len(KEYS))
        result = ns.get(KEYS, out)
        assert result.ok.tolist() == [True] * 12 + [False] * 8
        assert set(result.counts()) <= {"OK", "MISS", "IO_ERROR"}
        assert present(ns, KIND, KEYS[:12]).all()
        assert not ns.contains(KEYS[12:]).any()
        stats = check_rest(store)
        assert stats.damaged_blocks + stats.failed_reads >= 8
        put_all(ns, KIND, KEYS[12:])
        store.flush()
        assert present(ns, KIND, KEYS).all()


def test_loop_device_that_loses_its_end() -> None:
    """EIO from below the file system: IO_ERROR or MISS for what is hit, no exception, no hang."""
    with small_disk("ext4", 64 * MIB) as disk:  # noqa: SIM117
        with open_store(disk.place / "s", LARGE.geometry, capacity=40 * MIB) as store:
            ns = store.namespace(IDENTITY)
            keys = [b"some-%d" % n for n in range(120)]
            assert put_some(ns, LARGE, 0, 120) == {"OK": 120}
            store.flush()
            os.sync()
            os.truncate(disk.image, 20 * MIB)
            seen: dict[str, int] = {}
            out = LARGE.empty(1)
            for key in keys:
                status = ns.get([key], out)[0]
                seen[status.name] = seen.get(status.name, 0) + 1
                if status == BlockStatus.OK:
                    assert out[0].tobytes() == LARGE.block(key, 0).tobytes()
            assert seen.get("OK", 0) < 120
            assert set(seen) <= {"OK", "MISS", "IO_ERROR"}, seen
            assert check_rest(store).failed_reads == seen.get("IO_ERROR", 0)
            os.truncate(disk.image, 64 * MIB)
            with suppress(StoreError):
                store.close()


# ---- syncs that fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_failing_sync(store_path: Path, backend: str) -> None:
    """Never repeated: the segment ends at its last durable point, what came since is dropped."""
    store = open_store(store_path, KIND.geometry, backend=backend)
    ns = store.namespace(IDENTITY)
    put_all(ns, KIND, KEYS[:8])
    store.flush()
    put_all(ns, KIND, KEYS[8:])
    put_all(ns, KIND, KEYS[:2], 1, replace=True)
    synced: list[int] = []
    with pytest.MonkeyPatch.context() as patch:

        def failing(_: BlockIO, fds: list[int]) -> np.ndarray:
            synced.extend(fds)
            return np.full(len(fds), -5, np.int32)

        patch.setattr(BlockIO, "sync", failing)
        with pytest.raises(DurabilityError, match="14 captured blocks") as caught:
            store.flush()
    assert caught.value.blocks_lost == 14
    assert len(synced) == len(set(synced)) == 1, "a failed sync was repeated"
    assert ns.contains(KEYS).tolist() == [False] * 2 + [True] * 6 + [False] * 12
    assert present(ns, KIND, KEYS[2:8]).all()
    stats = check_rest(store)
    assert (stats.failed_syncs, stats.lost_blocks) == (1, 14)
    assert stats.segments["closed"] == 1
    store.flush()  # told once
    put_all(ns, KIND, KEYS[8:], 3)
    store.flush()
    crash(store)
    with open_store(store_path, None, backend=backend) as store:
        ns = store.namespace(IDENTITY)
        assert present(ns, KIND, KEYS[2:8]).all()
        assert present(ns, KIND, KEYS[8:], 3).all()
        assert not ns.contains(KEYS[:2]).any(), "what was reported lost came back"


def test_failing_sync_at_close(store_path: Path) -> None:
    store = open_store(store_path, KIND.geometry)
    put_all(store.namespace(IDENTITY), KIND, KEYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockIO, "sync", lambda _, fds: np.full(len(fds), -5, np.int32))
        with pytest.raises(DurabilityError, match="20 captured"):
            store.close()
    assert store.closed
    store.close()
    with open_store(store_path, None) as store:
        assert not store.namespace(IDENTITY).contains(KEYS).any()


def test_failing_sync_while_sealing(store_path: Path) -> None:
    """put() leaves full segments to be sealed; a failing sync costs those segments' new blocks."""
    with open_store(store_path, LARGE.geometry) as store:
        ns = store.namespace(IDENTITY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockIO, "sync", lambda _, fds: np.full(len(fds), -5, np.int32))
            keys = [b"seal-%d" % n for n in range(30)]
            assert ns.put(keys, LARGE.blocks(keys, [0] * 30)).all_ok
            with store.writer_lock:
                assert store.writer.sealer.finish()
        with pytest.raises(DurabilityError) as caught:
            store.flush()
        there = ns.contains(keys)
        assert caught.value.blocks_lost == (~there).sum() > 0
        assert (present(ns, LARGE, keys) == there).all()
        put_all(ns, LARGE, [b"after"])
        store.flush()
        check_rest(store)


# ---- what the kernel refuses -------------------------------------------------------------------


def test_without_direct_io(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffered I/O where the file system has no direct I/O; stats() says so, all else is equal."""
    monkeypatch.setattr("flashkv.blockio._direct_alignment", lambda *_: None)
    with open_store(store_path, KIND.geometry) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, KIND, KEYS)
        store.flush()
        assert present(ns, KIND, KEYS).all()
        assert store.stats().direct_io is False
        check_rest(store)
    monkeypatch.undo()
    with open_store(store_path, None) as store:
        assert present(store.namespace(IDENTITY), KIND, KEYS).all()
    with open_store(store_path, None, direct_io=False) as store:
        assert store.stats().direct_io is False
        assert present(store.namespace(IDENTITY), KIND, KEYS).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tmpfs(backend: str) -> None:
    with small_disk("tmpfs", 64 * MIB) as disk:
        with open_store(disk.place / "s", KIND.geometry, backend=backend) as store:
            put_all(store.namespace(IDENTITY), KIND, KEYS)
            store.flush()
            crash(store)
        with open_store(disk.place / "s", None, backend=backend) as store:
            assert present(store.namespace(IDENTITY), KIND, KEYS).all()
            check_rest(store)


def test_memlock_limit(disk_path: Path) -> None:
    """A user who may lock 64 KiB only: the store works without registered memory."""
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    for parent in [disk_path, *disk_path.parents]:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o001)
    (disk_path / "theirs").mkdir()
    os.chown(disk_path / "theirs", 65534, 65534)
    said = run_child(
        """
        import os, resource, sys
        from pathlib import Path
        from store_support import *
        kind = KINDS[0]
        kind.block(b"first", 0)  # imports what another user may not read
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        keys = [b"%d" % n for n in range(30)]
        for backend in BACKENDS:
            with open_store(Path(sys.argv[1]) / backend, kind.geometry, backend=backend) as store:
                ns = store.namespace(IDENTITY)
                put_all(ns, kind, keys)
                store.flush()
                assert present(ns, kind, keys).all()
                print(backend, check_rest(store).io["registered_bytes"])
        """,
        disk_path / "theirs",
    )
    assert len(said.split()) == 2 * len(BACKENDS)
    assert set(said.split()[1::2]) == {"0"}


def test_io_uring_denied(disk_path: Path) -> None:
    """A container's seccomp profile: the store is the same one on the threads backend."""
    with open_store(disk_path / "s", KIND.geometry) as store:
        put_all(store.namespace(IDENTITY), KIND, KEYS)
    said = run_child(
        SECCOMP
        + """
import sys
from pathlib import Path
deny()
from store_support import *
kind = KINDS[0]
with open_store(Path(sys.argv[1]), None, backend="auto") as store:
    ns = store.namespace(IDENTITY)
    assert present(ns, kind, [b"key-%d" % n for n in range(20)]).all()
    put_all(ns, kind, [b"more"])
    print(store.stats().backend)
try:
    open_store(Path(sys.argv[1]), None, backend="io_uring")
except Exception as error:
    print(type(error).__name__)
""",
        disk_path / "s",
    )
    assert said.split() == ["threads", "BackendError"]


def test_no_descriptors_left(disk_path: Path) -> None:
    """EMFILE: an open store goes on with the files that it has."""
    said = run_child(
        """
        import os, resource, sys
        import flashkv
        from pathlib import Path
        from store_support import *
        kind = KINDS[4]
        store = open_store(Path(sys.argv[1]), kind.geometry, capacity=40 * MIB)
        ns = store.namespace(IDENTITY)
        first = [b"first-%d" % n for n in range(10)]
        put_all(ns, kind, first)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, 4096))
        spare = []
        try:
            while True:
                spare.append(os.dup(0))
        except OSError:
            pass
        counts = {}
        for number in range(0, 60, 5):
            keys = [b"some-%d" % n for n in range(number, number + 5)]
            try:
                result = ns.put(keys, kind.blocks(keys, [0] * 5))
                for status in result:
                    counts[status.name] = counts.get(status.name, 0) + 1
            except flashkv.StoreError as error:
                counts["raised"] = counts.get("raised", 0) + 1
        assert present(ns, kind, [k for k in first if ns.contains_one(k)]).all()
        for fd in spare:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        put_all(ns, kind, [b"after-%d" % n for n in range(40)])
        store.flush()
        check_rest(store)
        store.close()
        print(counts)
        """,
        disk_path / "s",
    )
    assert "raised" not in said, said


def test_store_object_after_faults_is_plain(store_path: Path) -> None:
    """A put that meets a full log raises nothing but the package's own errors."""
    with open_store(store_path, LARGE.geometry, capacity=21 * MIB) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, LARGE, KEYS)
        with pytest.MonkeyPatch.context() as patch:

            def full(*_: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr("flashkv.filesystem.FileSystem.write", full)
            outcome: set[str] = set()
            for number in range(0, 60, 5):
                keys = [b"some-%d" % n for n in range(number, number + 5)]
                outcome |= {status.name for status in ns.put(keys, LARGE.blocks(keys, [0] * 5))}
            assert outcome <= {"OK", "NO_SPACE"}
            assert "NO_SPACE" in outcome
        assert isinstance(store, Store)
        put_all(ns, LARGE, [b"after-%d" % n for n in range(20)])
        store.flush()
        check_rest(store)
