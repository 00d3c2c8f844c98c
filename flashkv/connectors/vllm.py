"""What vLLM loads flashkv by: kv_connector_module_path and a tier's module_path name this module.

    FlashKVConnector  vLLM's KV connector, see vllm_connector
    FlashKVTier       a secondary tier of vLLM's OffloadingConnector, see vllm_tier

Each is imported when it is asked for: one doesn't need what the other does.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_MODULES: Final = {"FlashKVConnector": "vllm_connector", "FlashKVTier": "vllm_tier"}

__all__ = ["FlashKVConnector", "FlashKVTier"]  # noqa: F822  (see __getattr__)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"flashkv.connectors.{_MODULES[name]}")
    return getattr(module, name)
