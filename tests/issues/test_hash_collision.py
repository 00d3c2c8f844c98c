"""Fault: a collision of hashes returns another entry.

flashkv guarantees: keys are compared in full. Of two keys that share a digest the later one wins
and the earlier becomes a miss; neither ever gets the other's bytes, through put, get, delete and
reopen.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from small_stores import IDENTITY, MIB, crash, make, names, payload, read_back

from flashkv import Store

A, B = b"key A", b"another key B"
ONE, TWO = payload(1, 1), payload(2, 1)


@pytest.fixture(params=[0, 1])
def digest_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """All keys, or every 256th, share a digest."""
    monkeypatch.setattr(Store, "digest_bytes", request.param)
    return int(request.param)


def holds(store: Store, key: bytes, block: np.ndarray) -> bool:
    """Whether the key hits; if so, with its own bytes."""
    result, out = read_back(store.namespace(IDENTITY), [key], block)
    assert not result.all_ok or np.array_equal(out, block), f"{key!r} got other bytes"
    return result.all_ok


@pytest.mark.parametrize("ending", ["close", "crash"])
def test_all_keys_collide(folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(Store, "digest_bytes", 0)
    store = make(folder)
    namespace = store.namespace(IDENTITY)
    namespace.put([A], ONE)
    assert holds(store, A, ONE)
    namespace.put([B], TWO, replace=True)
    assert not holds(store, A, ONE)
    namespace.put([B], TWO, replace=True)
    assert holds(store, B, TWO)
    store.flush()
    store.close() if ending == "close" else crash(store)
    store = make(folder)
    assert holds(store, B, TWO)
    assert not holds(store, A, ONE)
    namespace = store.namespace(IDENTITY)
    namespace.put([A], ONE, replace=True)
    namespace.delete([B])
    assert not holds(store, B, TWO)
    crash(store)
    for _ in range(2):
        with make(folder) as store:
            holds(store, A, ONE)
            assert not holds(store, B, TWO)


def test_asking_for_the_other_key_harms_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B is a miss while A is stored, however often it is asked for; A stays until B comes."""
    monkeypatch.setattr(Store, "digest_bytes", 0)
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put([A], ONE)
        for _ in range(3):
            assert not holds(store, B, TWO)
            assert holds(store, A, ONE)
        assert store.stats().damaged_blocks == 0
        assert (namespace.put([B], TWO, replace=True).statuses == 0).all()
        assert holds(store, B, TWO)
        assert not holds(store, A, ONE)


def test_in_one_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "digest_bytes", 0)
    with make(folder) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put([A, B], np.concatenate([ONE, TWO]))
        result, out = read_back(namespace, [A, B], np.concatenate([ONE, TWO]))
        assert result.ok.tolist() == [False, True]
        assert np.array_equal(out[1:], TWO)


def test_random_work(folder: Path, digest_bytes: int, seed: int) -> None:
    """Many keys, few digests, all operations and reopens: never another key's bytes."""
    rng = random.Random(seed)
    keys = names(300)
    blocks = payload(77, 300)
    last_put: dict[bytes, int] = {}
    store = make(folder, capacity=24 * MIB)
    for step in range(120):
        namespace = store.namespace(IDENTITY)
        rows = rng.sample(range(300), rng.randrange(1, 24))
        chosen = [keys[row] for row in rows]
        action = rng.random()
        if action < 0.45:
            replace = rng.random() < 0.5
            namespace.put(chosen, blocks[rows], replace=replace)
            last_put.update(dict.fromkeys(chosen, step))
        elif action < 0.8:
            result, out = read_back(namespace, chosen, blocks[rows])
            for at, row in enumerate(rows):
                assert not result.ok[at] or np.array_equal(out[at], blocks[row])
                assert not result.ok[at] or keys[row] in last_put
        elif action < 0.9:
            namespace.delete(chosen)
            for key in chosen:
                last_put.pop(key, None)
        else:
            crash(store) if rng.random() < 0.5 else store.close()
            store = make(folder)
    hits = sum(holds(store, keys[row], blocks[row : row + 1]) for row in range(300))
    assert hits <= 256**digest_bytes
    store.close()
