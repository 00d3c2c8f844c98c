"""What the SGLang connector uses of SGLang: imported, and checked, here alone.

Invariant: a name that SGLang no longer has, or a method that takes other parameters, is told in
words when the connector is imported.
"""

from __future__ import annotations

from flashkv.connectors.engines import check_fields, check_methods, engine_imports

__all__ = [
    "AsymmetricMHATokenToKVPoolHost",
    "HiCacheStorage",
    "LogicalHostPool",
    "MHATokenToKVPoolHost",
    "MLATokenToKVPoolHost",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "StorageMetrics",
    "get_context",
    "torch",
]

with engine_imports("sglang"):
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
    from sglang.srt.mem_cache.pool_host.mha import (
        AsymmetricMHATokenToKVPoolHost,
        MHATokenToKVPoolHost,
    )
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_context

    check_methods(
        "sglang",
        HiCacheStorage,
        {
            "register_mem_pool_host": ["mem_pool_host"],
            "register_mem_host_pool_v2": ["host_pool", "host_pool_name"],
            "batch_exists": ["keys", "extra_info"],
            "batch_get_v1": ["keys", "host_indices", "extra_info"],
            "batch_set_v1": ["keys", "host_indices", "extra_info"],
            "batch_exists_v2": ["keys", "pool_transfers", "extra_info"],
            "batch_get_v2": ["transfers", "extra_info"],
            "batch_set_v2": ["transfers", "extra_info"],
            "get": ["key", "target_location"],
            "batch_get": ["keys", "target_locations"],
            "set": ["key", "value"],
            "batch_set": ["keys", "values"],
            "exists": ["key"],
            "clear": [],
            "get_stats": [],
        },
    )
    check_fields(
        "sglang",
        HiCacheStorageConfig,
        """tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size is_mla_model dp_rank
        enable_storage_metrics model_name extra_config is_storage_writer""".split(),
    )
    check_fields("sglang", PoolTransfer, ["name", "host_indices", "keys", "hit_policy"])
    check_fields(
        "sglang",
        PoolTransferResult,
        ["kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"],
    )
    check_fields("sglang", HiCacheStorageExtraInfo, ["prefix_keys"])
    for pool in (MHATokenToKVPoolHost, MLATokenToKVPoolHost):
        check_methods(
            "sglang",
            pool,
            {
                "get_page_buffer_meta": ["indices"],
                "get_data_page": ["index"],
                "get_dummy_flat_data_page": [],
                "set_from_flat_data_page": ["index", "data_page"],
            },
        )
