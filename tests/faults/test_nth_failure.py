"""Each call to the operating system fails once, the n-th time: no hang, no leak, no wrong byte.

What was acknowledged holds all the same: deleted blocks stay away, flushed ones stay unless they
were evicted or reported lost, and once the fault is over the store works as before.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
)

from flashkv import BlockStatus, DurabilityError, Namespace, Store, StoreError
from flashkv.blockio import BlockIO
from flashkv.filesystem import FileSystem

KIND: Kind = KINDS[4]  # 200 kB: a few puts fill a segment
KEYS = [b"key-%d" % number for number in range(70)]
ABSENT = None


class Fault:
    """Counts calls of one kind; the n-th fails while the fault is on."""

    def __init__(self, fails_at: int, code: int) -> None:
        self.calls = 0
        self.fails_at = fails_at
        self.code = code
        self.hits = 0

    def now(self) -> bool:
        self.calls += 1
        if self.calls != self.fails_at:
            return False
        self.hits += 1
        return True


def _result(fault: Fault, patch: pytest.MonkeyPatch, method: str) -> None:
    """A method of BlockIO whose result is 0 or -errno, of one item or of many."""
    original = getattr(BlockIO, method)

    def call(*arguments: Any, **named: Any) -> Any:
        if not fault.now():
            return original(*arguments, **named)
        if method == "sync":
            return np.full(len(arguments[1]), -fault.code, np.int32)
        return -fault.code

    patch.setattr(BlockIO, method, call)


def _raises(fault: Fault, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if fault.now():
            raise OSError(fault.code, os.strerror(fault.code))
        return original(*arguments, **named)

    patch.setattr(owner, name, call)


def _reaped(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """The n-th asynchronous write ends in an error."""
    original = BlockIO.write_reap

    def call(*arguments: Any, **named: Any) -> Any:
        finished = original(*arguments, **named)
        for row in range(len(finished)):
            if fault.now():
                finished["result"][row] = -fault.code
        return finished

    patch.setattr(BlockIO, "write_reap", call)


def _no_memory(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    original = BlockIO.write_submit

    def call(*arguments: Any, **named: Any) -> Any:
        if fault.now():
            raise MemoryError("no memory for writes")
        return original(*arguments, **named)

    patch.setattr(BlockIO, "write_submit", call)


FAULTS: dict[str, tuple[int, Callable[[Fault, pytest.MonkeyPatch], None]]] = {
    "write": (errno.EIO, lambda f, p: _result(f, p, "write")),
    "async write": (errno.EIO, _reaped),
    "async write, full disk": (errno.ENOSPC, _reaped),
    "write_submit": (errno.ENOMEM, _no_memory),
    "sync": (errno.EIO, lambda f, p: _result(f, p, "sync")),
    "preallocate": (errno.ENOSPC, lambda f, p: _raises(f, p, FileSystem, "preallocate")),
    "open_file": (errno.EMFILE, lambda f, p: _raises(f, p, BlockIO, "open_file")),
    "log write": (errno.ENOSPC, lambda f, p: _raises(f, p, FileSystem, "write")),
    "log fdatasync": (errno.EIO, lambda f, p: _raises(f, p, FileSystem, "sync_data")),
    "log fsync": (errno.EIO, lambda f, p: _raises(f, p, FileSystem, "sync")),
    "folder sync": (errno.EIO, lambda f, p: _raises(f, p, FileSystem, "sync_folder")),
}


class Run:
    """A fixed course of calls, and what must hold after it whichever of them failed."""

    def __init__(self, path: Path, backend: str) -> None:
        self.path = path
        self.backend = backend
        self.allowed: dict[bytes, set[int | None]] = {key: {ABSENT} for key in KEYS}
        self.evicted = 0
        self.failures = 0
        self.store: Store | None = None

    def open(self) -> Namespace:
        self.store = open_store(self.path, None, capacity=None, backend=self.backend)
        return self.store.namespace(IDENTITY)

    def put(self, ns: Namespace, keys: list[bytes], version: int) -> None:
        data = KIND.blocks(keys, [version] * len(keys))
        try:
            result = ns.put(keys, data, replace=True)
        except (StoreError, MemoryError):
            self.failures += 1
            for key in keys:
                self.allowed[key].add(version)
            return
        for key, status in zip(keys, result, strict=True):
            assert status in (BlockStatus.OK, BlockStatus.NO_SPACE, BlockStatus.BUSY), result
            self.allowed[key].add(version)

    def delete(self, ns: Namespace, keys: list[bytes]) -> None:
        try:
            ns.delete(keys)
        except StoreError:
            self.failures += 1
            for key in keys:
                self.allowed[key].add(ABSENT)
            return
        for key in keys:
            self.allowed[key] = {ABSENT}

    def flush(self, ns: Namespace) -> None:
        assert self.store
        try:
            self.store.flush()
        except DurabilityError as error:
            assert error.blocks_lost > 0  # noqa: PT017
            self.failures += 1
        except StoreError:
            self.failures += 1
            return
        for key, version in self.look(ns).items():
            self.allowed[key] = {version}
        for key, there in zip(KEYS, ns.contains(KEYS).tolist(), strict=True):
            if not there:
                self.allowed[key] = {ABSENT}

    def look(self, ns: Namespace) -> dict[bytes, int]:
        """What can be read now; each must be one of the allowed versions."""
        out = KIND.empty(len(KEYS))
        result = ns.get(KEYS, out)
        found = {}
        for row, key in enumerate(KEYS):
            if result[row] != BlockStatus.OK:
                assert result[row] == BlockStatus.MISS
                continue
            versions = [v for v in self.allowed[key] if v is not ABSENT]
            match = [v for v in versions if equal(out[row], KIND.block(key, v))]
            assert match, f"{key!r} holds none of {self.allowed[key]}"
            found[key] = match[0]
        return found

    def course(self) -> None:
        ns = self.open()
        assert self.store
        self.put(ns, KEYS[:10], 1)
        self.flush(ns)
        self.put(ns, KEYS[5:15], 2)
        self.delete(ns, KEYS[:3])
        self.look(ns)
        self.put(ns, KEYS[10:40], 3)  # seals
        self.flush(ns)
        self.put(ns, KEYS[40:], 4)  # reclaims
        self.delete(ns, KEYS[20:23])
        self.put(ns, KEYS[:30], 5)
        self.look(ns)
        self.flush(ns)
        self.put(ns, KEYS[3:5], 6)

    def afterwards(self) -> None:
        """The fault is over: the store works, and what was acknowledged is there."""
        assert self.store
        ns = self.open() if self.store.closed else self.store.namespace(IDENTITY)
        stats = check_rest(self.store)
        evicted = stats.evicted_blocks > 0
        new = [b"new-%d" % number for number in range(5)]
        for _ in range(2):  # the first put may meet what the fault left behind
            if ns.put(new, KIND.blocks(new, [9] * 5)).all_ok:
                break
        self.flush(ns)
        assert present(ns, KIND, new, 9).all()
        check_rest(self.store)
        crash(self.store)
        ns = self.open()
        found = self.look(ns)
        for key in KEYS:
            if key not in found:
                assert ABSENT in self.allowed[key] or evicted, (key, self.allowed[key])
        assert present(ns, KIND, new, 9).all()
        check_rest(self.store)
        self.store.close()


def fail_once(path: Path, backend: str, name: str, number: int) -> Fault:
    """The course with the n-th call of a kind failing."""
    code, install = FAULTS[name]
    open_store(path, KIND.geometry, capacity=21 * MIB, backend=backend).close()
    run = Run(path, backend)
    fault = Fault(number, code)
    with pytest.MonkeyPatch.context() as patch:
        install(fault, patch)
        try:
            run.course()
        except (StoreError, MemoryError):  # the open may fail, and says so
            assert run.store is None
            assert fault.hits
            patch.undo()
            run.open()
    run.afterwards()
    return fault


@pytest.mark.parametrize("name", FAULTS)
def test_nth_failure(store_path: Path, disk_path: Path, seed: int, name: str) -> None:
    """The first call of its kind, and one at random; the soak takes each."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    calls = fail_once(disk_path / "count", BACKENDS[0], name, 1 << 30).calls
    assert calls, f"the course makes no call of {name}"
    numbers = {1, rng.randint(1, calls)}
    for number in sorted(numbers):
        fault = fail_once(disk_path / str(number), rng.choice(BACKENDS), name, number)
        assert fault.hits <= 1


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAULTS)
def test_every_failure(disk_path: Path, backend: str, name: str) -> None:
    calls = fail_once(disk_path / "count", backend, name, 1 << 30).calls
    for number in range(1, calls + 1):
        fail_once(disk_path / str(number), backend, name, number)
