"""The SGLang connector where SGLang is not: what its import says; and what it is made of that needs
no engine.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from small_stores import IDENTITY, names
from store_support import GQA, open_store

from flashkv import IdentityError, Namespace, Options, StoreError
from flashkv.connectors import engines
from flashkv.connectors.checkpoint import Checkpoint
from flashkv.connectors.engines import Engine, EngineInterfaceError, EngineMissingError
from flashkv.connectors.flusher import Flusher
from flashkv.connectors.follower import Follower
from flashkv.identity import WHOLE

CONNECTOR = "flashkv.connectors.sglang"
INTERFACE = "flashkv.connectors.sglang_interface"


@pytest.fixture
def _no_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(CONNECTOR)]:
        monkeypatch.delitem(sys.modules, name)


def _pretend(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module of SGLang's, with the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("_no_connector")
def test_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Engine("SGLang", ("no-such-distribution",), ("0.5.23",), "sglang==0.5.23")
    monkeypatch.setitem(engines.ENGINES, "sglang", absent)
    with pytest.raises(EngineMissingError, match=r"flashkv\.connectors\.sglang needs SGLang") as e:
        importlib.import_module(CONNECTOR)
    assert "pip install 'sglang==0.5.23'" in str(e.value)


@pytest.mark.usefixtures("_no_connector")
def test_another_interface_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Engine("SGLang", ("pytest",), (pytest.__version__,), "sglang")
    monkeypatch.setitem(engines.ENGINES, "sglang", here)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    _pretend(monkeypatch, "sglang.srt.mem_cache.hicache_storage", HiCacheStorage=object)
    with pytest.raises(EngineInterfaceError, match="HiCacheStorageConfig"):
        importlib.import_module(CONNECTOR)

    class Storage:
        """A storage whose zero-copy get takes addresses."""

        def register_mem_pool_host(self, mem_pool_host: Any) -> None: ...

        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None: ...

        def batch_exists(self, keys: Any, extra_info: Any = None) -> None: ...

        def batch_get_v1(self, keys: Any, addresses: Any) -> None: ...

    content = dict.fromkeys(
        """HiCacheStorageConfig HiCacheStorageExtraInfo PoolHitPolicy PoolName PoolTransfer
        PoolTransferResult MHATokenToKVPoolHost AsymmetricMHATokenToKVPoolHost
        MLATokenToKVPoolHost LogicalHostPool StorageMetrics get_context""".split(),
        object,
    )
    for name in (
        "mem_cache.hicache_storage",
        "mem_cache.memory_pool_host",
        "mem_cache.pool_host.mha",
        "mem_cache.pool_host.mla",
        "observability.metrics_collector",
        "runtime_context",
    ):
        _pretend(monkeypatch, f"sglang.srt.{name}", **{**content, "HiCacheStorage": Storage})
    with pytest.raises(EngineInterfaceError, match=r"batch_get_v1\(self, keys, addresses\)"):
        importlib.import_module(INTERFACE)


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    """A path is no name that the hub could have: that, too, is told in words."""
    with pytest.raises(IdentityError, match=r"neither a folder|not installed"):
        Checkpoint.read(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert Checkpoint.read(tmp_path).config == {"num_hidden_layers": 3}


# ---- a store that another handle writes ----


def _blocks(count: int) -> np.ndarray:
    planes = GQA.groups[0].planes
    shape = (count, planes[0].layers, len(planes), planes[0].heads, 64, planes[0].elements)
    return np.random.default_rng(count).integers(0, 1 << 15, shape, np.uint16)


@pytest.fixture
def notes() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def follower(store_path: Path, notes: list[tuple[str, str]]) -> Iterator[Follower]:
    made = Follower(store_path, Options(), 0, lambda word, said: notes.append((word, said)))
    yield made
    made.close()


def _found(follower: Follower) -> int:
    blocks = follower.namespace(IDENTITY, WHOLE)
    return 0 if blocks is None else blocks.match(names(5)).count


def _looked(follower: Follower) -> int:
    """As _found(), with a look whether more has come."""
    follower.soon()
    return _found(follower)


def _wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end, "it didn't come to that"
        time.sleep(0.005)


def test_a_follower_sees_what_was_flushed(
    store_path: Path, follower: Follower, notes: list[tuple[str, str]]
) -> None:
    assert _found(follower) == 0
    assert not follower.refresh()
    with open_store(store_path, GQA) as store:
        writer = store.namespace(IDENTITY)
        assert writer.put(names(3), _blocks(3)).all_ok
        store.flush()
        _wait_until(follower.refresh)
        assert _found(follower) == 3
        before = follower.namespace(IDENTITY, WHOLE)
        assert isinstance(before, Namespace)
        assert not follower.refresh(), "nothing has changed"
        assert writer.put(names(4), _blocks(4)).all_ok
        store.flush()
        _wait_until(lambda: _looked(follower) == 4)
        with pytest.raises(StoreError):
            before.match(names(1))
        out = np.zeros_like(_blocks(3))
        blocks = follower.namespace(IDENTITY, WHOLE)
        assert blocks is not None
        assert blocks.get(names(3), out).all_ok
        assert np.array_equal(out, _blocks(3))
    follower.close()
    follower.close()
    assert not follower.refresh()
    assert _found(follower) == 0
    assert not notes


def test_a_follower_waits_between_looks(store_path: Path) -> None:
    seldom = Follower(store_path, Options(), 3_600_000, lambda *_: None)
    with open_store(store_path, GQA) as store:
        assert store.namespace(IDENTITY).put(names(3), _blocks(3)).all_ok
        store.flush()
        assert not seldom.refresh()
    seldom.close()


def test_a_follower_of_what_is_no_store(
    store_path: Path, follower: Follower, notes: list[tuple[str, str]]
) -> None:
    segments = store_path / "shards/0/segments"
    segments.mkdir(parents=True)
    (segments / "00000000.seg").write_bytes(b"nothing")
    assert not follower.refresh()
    assert follower.namespace(IDENTITY, WHOLE) is None
    assert [word for word, _ in notes] == ["follow"]


def _blocks_on_disk(store_path: Path) -> int:
    with open_store(store_path, None, read_only=True) as reader:
        return reader.stats().blocks


def test_flushed_soon(store_path: Path) -> None:
    with open_store(store_path, GQA) as store:
        flusher = Flusher(store, 5, lambda *_: pytest.fail("nothing goes wrong"))
        assert store.namespace(IDENTITY).put(names(3), _blocks(3)).all_ok
        flusher.soon()
        flusher.soon()
        _wait_until(lambda: _blocks_on_disk(store_path) == 3)
        assert store.namespace(IDENTITY).put(names(4), _blocks(4)).all_ok
        flusher.soon()
        flusher.close()
        assert _blocks_on_disk(store_path) == 4
        flusher.close()
        flusher.soon()


def test_what_a_flush_says_is_noted(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[tuple[str, str]]
) -> None:
    with open_store(store_path, GQA) as store:

        def broken() -> None:
            raise StoreError("the device is gone")

        monkeypatch.setattr(store, "flush", broken)
        flusher = Flusher(store, 0, lambda word, said: notes.append((word, said)))
        flusher.soon()
        flusher.close()
        monkeypatch.undo()
    assert notes
    assert notes[0] == ("flush", "the device is gone")
