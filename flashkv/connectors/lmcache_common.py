"""What flashkv's two ways into LMCache share: settings, and keys as the store takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from flashkv import limits
from flashkv.connectors.shared_store import StoreSettings

ENGINE: Final = "LMCache"
QUEUE_DEPTH: Final = 16
"""Chunks are a megabyte and more: more of them at once only arrive later, all together."""


def store_settings(given: Mapping[str, Any], others: frozenset[str]) -> StoreSettings:
    """Settings of the store, with our queue depth unless one is given. Raises OptionsError."""
    options = {"queue_depth": QUEUE_DEPTH, **(given.get("options") or {})}
    return StoreSettings.parse({**given, "options": options}, ENGINE, others=others)


def stored_key(text: str) -> bytes:
    """LMCache's key as bytes; one that is too long for the store by its digest."""
    raw = text.encode()
    return raw if len(raw) <= limits.KEY_BYTES_MAX else hashlib.sha256(raw).digest()
