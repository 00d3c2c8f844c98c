"""Whatever the backend, the same calls give the same files, results and errors, byte for byte."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import count
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
    open_store,
    segment_file,
    shard_of,
)

from flashkv import FlashKVError, Identity
from flashkv.background import When
from flashkv.blockio import BlockIO
from flashkv.filesystem import FileSystem

needs_both = pytest.mark.skipif(len(BACKENDS) < 2, reason="only one backend works here")
KEYS = [b"key-%d" % number for number in range(60)]


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """reset(): uuids and the clock begin anew, so that two runs write the same bytes.

    Nothing goes on in the background: what a directory says doesn't depend on the time it takes.
    """
    state: dict[str, Iterator[int]] = {}

    def reset() -> None:
        state["uuid"], state["clock"] = count(1), count(1_700_000_000_000)

    def uuid() -> bytes:
        return next(state["uuid"]).to_bytes(16, "big")

    for module in ("manifest", "space", "opening"):
        monkeypatch.setattr(f"flashkv.{module}.new_uuid", uuid)
    monkeypatch.setattr(FileSystem, "when", When.AT_ONCE)
    monkeypatch.setattr("flashkv.opening.now_ms", lambda: next(state["clock"]))
    return reset


def files(path: Path) -> dict[str, str]:
    """Digest of every file of the store."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def trace(path: Path, kind: Kind, backend: str, codec: str, seed: int) -> list[Any]:
    """A course of random calls; everything that they answered."""
    rng = random.Random(seed)
    said: list[Any] = []
    store = open_store(path, kind.geometry, capacity=21 * MIB, backend=backend, codec=codec)
    ns = store.namespace(IDENTITY)
    for step in range(50):
        keys = rng.sample(KEYS, rng.randrange(1, 20))
        action = rng.random()
        try:
            if action < 0.5:
                data = kind.blocks(keys, [step] * len(keys))
                how = {"replace": rng.random() < 0.6, "position": rng.choice([None, 0, 4096])}
                said.append(list(ns.put(keys, data, **how)))  # type: ignore[arg-type]
            elif action < 0.7:
                out = np.zeros((len(keys), *kind.shape()), kind.numpy_dtype())
                result = ns.get(keys, out)
                out[~result.ok] = 0  # undefined
                said.append((list(result), hashlib.sha256(out.tobytes()).hexdigest()))
            elif action < 0.8:
                said.append(list(ns.delete(keys[:4])))
            elif action < 0.85:
                said.append(store.flush())
            elif action < 0.9:
                other = store.namespace(Identity(model=f"other-{step}"))
                said.append(list(other.put(keys, kind.blocks(keys, [step] * len(keys)))))
            elif action < 0.93:
                said.append(ns.rotate())
            elif action < 0.96:
                store.close()
                store = open_store(path, None, capacity=None, backend=backend, codec=codec)
                ns = store.namespace(IDENTITY)
            else:
                said.append(list(ns.put(keys, b"wrong")))
        except FlashKVError as error:
            said.append((type(error).__name__, str(error)))
    stats = check_rest(store)
    said.append((stats.blocks, stats.records, stats.segments, stats.evicted_blocks))
    store.close()
    return said


@needs_both
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_same_trace_same_files(disk_path: Path, fixed: Any, seed: int, kind: Kind) -> None:
    print(f"seed {seed}")
    codec = random.Random(seed).choice(["raw", "lossless"])
    runs = {}
    for backend in BACKENDS:
        fixed()
        path = disk_path / "here" / backend
        path.parent.mkdir(exist_ok=True)
        said = trace(path, kind, backend, codec, seed)
        runs[backend] = ([str(answer).replace(backend, "BACKEND") for answer in said], files(path))
    (one, one_files), (two, two_files) = runs.values()
    assert one == two
    assert one_files == two_files


@needs_both
def test_same_errors(disk_path: Path, fixed: Any) -> None:
    """Segments cut short, syncs and writes that fail: the same statuses and exceptions."""
    kind = KINDS[0]
    runs = []
    for backend in BACKENDS:
        fixed()
        path = disk_path / backend
        said: list[Any] = []
        with open_store(path, kind.geometry, backend=backend) as store:
            ns = store.namespace(IDENTITY)
            assert ns.put(KEYS, kind.blocks(KEYS, [0] * 60)).all_ok
            store.flush()
            with segment_file(path, 0).open("r+b") as file:
                file.truncate(1 * MIB)
            said.append(list(ns.get(KEYS, kind.empty(60))))
            said.append(ns.contains(KEYS).tolist())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BlockIO, "sync", lambda _, fds: np.full(len(fds), -5, np.int32))
                ns.put(KEYS, kind.blocks(KEYS, [1] * 60), replace=True)
                with pytest.raises(FlashKVError) as caught:
                    store.flush()
                said.append(str(caught.value))
            said.append(list(ns.put(KEYS, kind.blocks(KEYS, [2] * 60))))
            stats = store.stats()
            said.append((stats.damaged_blocks, stats.failed_reads, stats.lost_blocks, stats.blocks))
        runs.append((said, files(path)))
    assert runs[0] == runs[1]


@needs_both
def test_each_reads_what_the_other_wrote(store_path: Path) -> None:
    kind = KINDS[0]
    for number, backend in enumerate([*BACKENDS, *BACKENDS]):
        with open_store(store_path, kind.geometry, backend=backend) as store:
            ns = store.namespace(IDENTITY)
            for before in range(number):
                out = kind.empty(1)
                key = b"written-%d" % before
                assert ns.get([key], out).all_ok
                assert out[0].tobytes() == kind.block(key, before).tobytes()
            key = b"written-%d" % number
            assert ns.put([key], kind.blocks([key], [number])).all_ok
    assert (shard_of(store_path) / "lock").exists()
