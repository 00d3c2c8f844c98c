"""What connectors share: versions and interfaces told in words, one store a process, identities
from checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import OPTIONS, names, payload, segment_file

from flashkv import (
    BatchResult,
    CapacityError,
    Identity,
    IdentityError,
    KVGeometry,
    OptionsError,
)
from flashkv.connectors import engines
from flashkv.connectors.checkpoint import Checkpoint, differences
from flashkv.connectors.engines import (
    Engine,
    EngineInterfaceError,
    EngineMissingError,
    check_fields,
    check_methods,
    engine_imports,
)
from flashkv.connectors.shared_store import _HANDLES, SharedStore, StoreSettings

GEOMETRY = KVGeometry.gqa(2, 2, 64, "bfloat16")


@pytest.fixture
def folder(disk_path: Path) -> Path:
    """Where a store may be made."""
    return disk_path / "store"


SMALL = {"segment_bytes": OPTIONS.segment_bytes, "staging_bytes": OPTIONS.staging_bytes}


# ---- engines and their interfaces ----


@pytest.fixture
def pytest_as_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is installed: pytest itself."""
    version = pytest.__version__
    known = Engine("Pytest", ("no-such-thing", "pytest"), (version,), f"pytest=={version}")
    monkeypatch.setitem(engines.ENGINES, "pytest", known)


def test_a_missing_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Engine("Nothing", ("no-such-distribution",), ("1.0",), "nothing==1.0")
    monkeypatch.setitem(engines.ENGINES, "nothing", nothing)
    with pytest.raises(EngineMissingError) as caught, engine_imports("nothing"):
        pytest.fail("its imports are not tried")
    assert isinstance(caught.value, ImportError)
    assert "needs Nothing, which is not installed" in str(caught.value)
    assert "pip install 'nothing==1.0'" in str(caught.value)


@pytest.mark.usefixtures("pytest_as_engine")
def test_imports_that_fail_are_told_in_words() -> None:
    with engine_imports("pytest"):
        from pytest import fixture  # noqa: F401, PT013
    for broken in ("from pytest import no_such_name", "import pytest; pytest.no_such_name"):
        with (
            pytest.raises(EngineInterfaceError, match="no_such_name") as caught,
            engine_imports("pytest"),
        ):
            exec(broken)
        assert pytest.__version__ in str(caught.value)
    with pytest.raises(ZeroDivisionError), engine_imports("pytest"):
        exec("1 / 0")


@pytest.mark.usefixtures("pytest_as_engine")
def test_another_version_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_imports("pytest"):
        assert not caplog.records
    known = Engine("Pytest", ("pytest",), ("0.1", "0.2"), "pytest")
    monkeypatch.setitem(engines.ENGINES, "pytest", known)
    with engine_imports("pytest"):
        pass
    assert "tested with Pytest 0.1 and 0.2" in caplog.text


class Plugin(ABC):
    """An engine's interface."""

    size: int = 3

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def load(self, keys: list[bytes], out: Any, extra: Any = None) -> None: ...

    def done(self) -> None:
        self.config = None


@pytest.mark.usefixtures("pytest_as_engine")
def test_interfaces_are_compared() -> None:
    check_methods("pytest", Plugin, {"load": ["keys", "out"], "done": []})
    check_methods("pytest", Plugin, {"load": ["keys", "extra"]})
    for methods, said in (
        ({"load": ["out", "keys"]}, r"load\(self, keys, out, extra\)"),
        ({"load": ["keys", "stream"]}, "keys, stream"),
        ({"load": ["keys"], "store": []}, r"no Plugin\.store"),
        ({"done": []}, r"asks for Plugin\.load"),
    ):
        with pytest.raises(EngineInterfaceError, match=said):
            check_methods("pytest", Plugin, methods)
    check_fields("pytest", Plugin, ["size", "load", "config"])
    with pytest.raises(EngineInterfaceError, match=r"no Plugin\.weight"):
        check_fields("pytest", Plugin, ["size", "weight"])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lmcache"])
def test_a_connector_without_its_engine(engine: str) -> None:
    """In this environment none of them is installed."""
    if engines.ENGINES[engine].version() is not None:
        pytest.skip("installed here")
    module = Path(engines.__file__).with_name(f"{engine}.py")
    if not module.exists():
        pytest.skip("not written yet")
    name = "FlashKVConnector" if engine == "vllm" else "*"
    done = subprocess.run(
        [sys.executable, "-c", f"from flashkv.connectors.{engine} import {name}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"needs {engines.ENGINES[engine].name}, which is not installed" in done.stderr
    assert "pip install" in done.stderr


# ---- settings ----


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "need a path"),
        ({"path": ""}, "need a path"),
        ({"path": 3}, "need a path"),
        ({"path": "x", "pth": 1}, "no 'pth'"),
        ({"path": "x", "salt": b"bytes"}, "salt must be text"),
        ({"path": "x", "codec": "zip"}, "codec"),
        ({"path": "x", "options": {"no_such": 1}}, "no_such"),
        ({"path": "x", "options": {"queue_depth": 0}}, "queue_depth"),
    ],
)
def test_wrong_settings_are_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionsError, match=said):
        StoreSettings.parse(given, "Engine")


def test_settings() -> None:
    given = {"path": "/x", "codec": "raw", "options": SMALL, "module_path": "flashkv"}
    settings = StoreSettings.parse(given, "Engine", others=frozenset({"module_path"}))
    assert settings.path == "/x"
    assert settings.store_options().codec == "raw"
    assert settings.store_options().segment_bytes == OPTIONS.segment_bytes


# ---- one store a process ----


def acquire(path: Path, geometry: KVGeometry = GEOMETRY, capacity: Any = "48MiB") -> SharedStore:
    settings = StoreSettings(str(path), capacity=capacity, options=SMALL)
    return SharedStore.acquire(settings, geometry, engine="Engine")


def test_a_path_is_one_handle(folder: Path) -> None:
    first, second = acquire(folder), acquire(folder)
    assert first.store is second.store is not None
    first.release()
    first.release()
    assert not second.store.closed
    second.release()
    assert second.store.closed
    assert _HANDLES.users(folder) == 0
    third = acquire(folder)
    assert third.store is not None
    third.release()


def test_a_store_of_another_model_takes_this_one(folder: Path) -> None:
    acquire(folder).release()
    other = KVGeometry.gqa(3, 1, 32, "bfloat16")
    shared = acquire(folder, other)
    namespace = shared.namespace(Identity(model="b", geometry=other))
    assert namespace is not None
    data = payload(1, 2, (3, 2, 1, 16, 32))
    assert namespace.put(names(2), data).all_ok
    shared.release()


def test_a_locked_store_is_gone_without(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from test_engines import acquire
from unittest.mock import Mock
shared = acquire(Path({str(folder)!r}))
print("holds", flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "holds\n"
    shared = acquire(folder)
    assert shared.store is None
    assert "goes on without the flashkv store" in caplog.text
    assert shared.namespace(Identity(model="a", geometry=GEOMETRY)) is None
    shared.release()
    child.communicate("", 20)
    again = acquire(folder)
    assert again.store is not None
    again.release()


def test_a_store_damaged_beyond_opening_is_gone_without(folder: Path) -> None:
    shared = acquire(folder)
    namespace = shared.namespace(Identity(model="a", geometry=GEOMETRY))
    assert namespace is not None
    assert namespace.put(names(2), payload(1, 2)).all_ok
    shared.release()
    for name in ("a", "b"):
        (segment_file(folder, 0).parent.parent / f"superblock.{name}").write_bytes(bytes(4096))
    shared = acquire(folder)
    assert shared.store is None
    assert "flashkv-fsck --repair" in shared.reason


def test_what_the_operator_must_change_is_raised(folder: Path) -> None:
    with pytest.raises(CapacityError):
        acquire(folder, capacity="1MiB")
    with pytest.raises(OptionsError):
        acquire(folder, capacity="much")


def test_failures_are_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = acquire(folder)
    statuses = np.array([0, 1, 6, 6, 3], np.uint8)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            shared.note_statuses("put", BatchResult(statuses))
        shared.note_statuses("get", BatchResult(statuses[:2]))
    assert shared.events == {"put_no_space": 3, "put_io_error": 3}
    assert len(caplog.records) == 2
    assert "no space" in caplog.text
    shared.release()


def test_a_child_opens_its_own(folder: Path) -> None:
    shared = acquire(folder)
    child = os.fork()
    if child == 0:
        mine = _HANDLES.users(folder)
        os._exit(mine)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _HANDLES.users(folder) == 1
    shared.release()


# ---- identities ----


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    settings = {"model_type": "llama", "hidden_size": 64, "rope_theta": 1e4, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings))
    header = b'{"w":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(range(64))
    (folder / "model.safetensors").write_bytes(content)
    return folder


def identity_of(folder: Path, running: dict[str, Any] | None = None, **more: Any) -> Identity:
    own = json.loads((folder / "config.json").read_text())
    return Checkpoint.read(folder).identity(
        GEOMETRY, kv_dtype="bfloat16", running=own if running is None else running, own=own, **more
    )


def test_identities_of_a_folder(checkpoint: Path) -> None:
    own = json.loads((checkpoint / "config.json").read_text())
    first = identity_of(checkpoint)
    assert first.model == "tiny"
    assert first.rope == ""
    assert identity_of(checkpoint, {**own, "use_cache": False, "dtype": "bfloat16"}) == first
    different = [
        first,
        identity_of(checkpoint, {**own, "hidden_size": 65}),
        identity_of(checkpoint, {**own, "rope_theta": 2e4}),
        identity_of(checkpoint, {**own, "new": {"a": ["long"] * 300}}),
        identity_of(checkpoint, {**own, "new": {"a": ["long"] * 301}}),
        identity_of(checkpoint, adapter="lora"),
        identity_of(checkpoint, extras={"tower": "b"}),
    ]
    assert different[2].rope
    assert "overrides" not in different[2].extras
    (checkpoint / "config.json").write_text(json.dumps({**own, "hidden_size": 66}))
    different.append(identity_of(checkpoint))
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[:-1] + b"!")
    different.append(identity_of(checkpoint))
    assert len({identity.digest() for identity in different}) == len(different)
    assert differences({"a": 1, "use_cache": 1}, {"b": 2}) == {"a": 1, "b": None}


def test_identity_of_a_cached_hub_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    found = {"revision": None}

    def cached(name: str, file: str, revision: str | None = None) -> str | None:
        found["revision"] = revision
        return str(snapshot / file) if name == "some/model" else None

    monkeypatch.setattr(hub, "try_to_load_from_cache", cached)
    read = Checkpoint.read("some/model", "main")
    assert (read.name, read.revision, read.weights_fingerprint) == ("some/model", commit, "")
    assert found["revision"] == "main"
    with pytest.raises(IdentityError, match="neither a folder nor in the hub's cache"):
        Checkpoint.read("other/model")


def test_what_is_no_checkpoint(checkpoint: Path) -> None:
    for content, said in (("{", "no JSON"), ("[]", "no object")):
        (checkpoint / "config.json").write_text(content)
        with pytest.raises(IdentityError, match=said):
            Checkpoint.read(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(IdentityError, match=r"no readable config\.json"):
        Checkpoint.read(checkpoint)
