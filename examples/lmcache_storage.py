"""LMCache's storage manager over flashkv: chunks of KV are stored, and found again after a restart.

    python examples/lmcache_storage.py [FOLDER]

Needs LMCache (pip install lmcache==0.5.6). FOLDER: of the store. Run it twice with one FOLDER: the
second time the chunks come from flash. For LMCache's server see docs/engines/lmcache.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

LAYERS, HEADS, DIMENSION, CHUNK, CHUNKS = 32, 8, 128, 256, 8


def make_manager(folder: str) -> StorageManager:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        local_cpu=False,
        max_local_cpu_size=1,
        storage_plugins=["flashkv"],
        extra_config={
            "storage_plugin.flashkv.module_path": "flashkv.connectors.lmcache",
            "storage_plugin.flashkv.class_name": "FlashKVBackend",
            "flashkv.path": folder,
            "flashkv.capacity": "4GiB",
        },
    )
    metadata = LMCacheMetadata(
        model_name="example/model", world_size=1, local_world_size=1, worker_id=0,
        local_worker_id=0, kv_dtype=torch.bfloat16, chunk_size=CHUNK, role="worker",
        kv_shape=(LAYERS, 2, CHUNK, HEADS, DIMENSION),
    )  # fmt: skip
    return StorageManager(config, metadata, EventManager())


def content(chunk: int) -> torch.Tensor:
    """What a model would have computed."""
    shape = (2, LAYERS, CHUNK, HEADS * DIMENSION)
    return torch.randn(shape, generator=torch.Generator().manual_seed(chunk)).bfloat16()


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="flashkv-example-")
    keys = [CacheEngineKey("example/model", 1, 0, 1000 + n, torch.bfloat16) for n in range(CHUNKS)]
    for _ in range(2):
        manager = make_manager(folder)
        backend = manager.storage_backends["flashkv"]
        begin = time.perf_counter()
        found = manager.batched_contains(keys)[0]
        objects = manager.batched_get(keys[:found], location="flashkv") if found else []
        seconds = time.perf_counter() - begin
        for chunk, one in enumerate(objects):
            assert torch.equal(one.tensor, content(chunk))
            one.ref_count_down()
        print(f"{found * CHUNK} of {CHUNKS * CHUNK} tokens restored in {seconds:.3f} s")
        for chunk in range(found, CHUNKS):
            one = manager.allocate(content(chunk).shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            one.tensor.copy_(content(chunk))
            manager.batched_put([keys[chunk]], [one])
        while any(backend.exists_in_put_tasks(key) for key in keys):
            time.sleep(0.001)
        manager.close()  # and with it the store; the next round is as another process
    sys.stdout.flush()
    os._exit(0)  # LMCache's own threads don't end by themselves


if __name__ == "__main__":
    main()
