"""flashkv in LMCache: `FlashKVClient` for its multi-process server, `FlashKVBackend` in-process.

See docs/engines/lmcache.md for how to configure each.

Invariant: importing this without LMCache, or beside one whose plug-in interface is another, says so
in words.
"""

from __future__ import annotations

from flashkv.connectors.engines import check_methods, engine_imports

with engine_imports("lmcache"):
    from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

    from flashkv.connectors.lmcache_backend import FlashKVBackend
    from flashkv.connectors.lmcache_client import FlashKVClient

    check_methods(
        "lmcache",
        StoragePluginInterface,
        {
            "__init__": ("dst_device", "config", "metadata", "local_cpu_backend", "loop"),
            "contains": ("key", "pin"),
            "batched_contains": ("keys", "pin"),
            "batched_async_contains": ("lookup_id", "keys", "pin"),
            "exists_in_put_tasks": ("key",),
            "batched_submit_put_task": ("keys", "objs", "transfer_spec", "on_complete_callback"),
            "get_blocking": ("key",),
            "batched_get_blocking": ("keys",),
            "batched_get_non_blocking": ("lookup_id", "keys", "transfer_spec"),
            "pin": ("key",),
            "unpin": ("key",),
            "remove": ("key", "force"),
            "batched_remove": ("keys", "force"),
            "touch_cache": (),
            "get_allocator_backend": (),
            "close": (),
        },
    )

__all__ = ["FlashKVBackend", "FlashKVClient"]
