"""Connectors without their engine, or beside one that has changed, say so in words."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from flashkv.connectors import engines
from flashkv.connectors.engines import Engine, EngineInterfaceError, EngineMissingError

CONNECTORS = ["flashkv.connectors.lmcache", "flashkv.connectors.vllm_tier"]
NAMES = {"flashkv.connectors.lmcache": "lmcache", "flashkv.connectors.vllm_tier": "vllm"}


@pytest.fixture(autouse=True)
def _imported_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("flashkv.connectors.lmcache", "flashkv.connectors.vllm")):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_an_engine_that_is_missing(connector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = engines.ENGINES[NAMES[connector]]
    gone = Engine(known.name, ("no-such-distribution",), known.tested, known.install)
    monkeypatch.setitem(engines.ENGINES, NAMES[connector], gone)
    with pytest.raises(EngineMissingError) as caught:
        importlib.import_module(connector)
    assert f"needs {known.name}, which is not installed" in str(caught.value)
    assert known.install in str(caught.value)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines seem to be installed, in a version that is known."""
    for name, known in list(engines.ENGINES.items()):
        stand_in = Engine(known.name, ("pytest",), (pytest.__version__,), known.install)
        monkeypatch.setitem(engines.ENGINES, name, stand_in)


def modules(monkeypatch: pytest.MonkeyPatch, **contents: dict[str, Any]) -> None:
    """Modules by name, dots as two underlines, with their parents."""
    for name, values in contents.items():
        parts = name.split("__")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                module = ModuleType(path)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, path, module)
        for key, value in values.items():
            setattr(sys.modules[".".join(parts)], key, value)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("connector", CONNECTORS)
def test_an_engine_without_the_plug_in_point(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules(monkeypatch, lmcache__v1={}, vllm__v1={})
    with pytest.raises(EngineInterfaceError, match="can't be imported as known"):
        importlib.import_module(connector)


@pytest.mark.usefixtures("installed")
def test_a_plug_in_interface_with_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    class StoragePluginInterface:
        def __init__(self, dst_device, config, metadata, local_cpu_backend, loop):
            pass

        def contains(self, name, pinned):
            pass

    modules(
        monkeypatch,
        lmcache__v1__storage_backend__abstract_backend={
            "StoragePluginInterface": StoragePluginInterface
        },
        lmcache__v1__memory_management={"MemoryFormat": type("MemoryFormat", (), {})},
    )
    with pytest.raises(EngineInterfaceError) as caught:
        importlib.import_module("flashkv.connectors.lmcache")
    assert "StoragePluginInterface.contains" in str(caught.value)
    assert "(key, pin) is known" in str(caught.value)
