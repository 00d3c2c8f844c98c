"""flashkv in LMCache: `FlashKVClient` for its multi-process server, `FlashKVBackend` in-process.

See docs/engines/lmcache.md for how to configure each.
"""

from __future__ import annotations

from flashkv.connectors.lmcache_client import FlashKVClient

__all__ = ["FlashKVClient"]
