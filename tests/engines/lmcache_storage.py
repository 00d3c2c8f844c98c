"""LMCache's StorageManager over flashkv's plugin: stores or loads chunks, and says what it saw.

One argument, JSON: action "put" or "get", path, and what Scene's fields name.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

os.environ.update(
    LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="WARNING"
)

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager


@dataclass
class Scene:
    action: str
    path: str
    chunks: int = 24
    batch: int = 8
    layers: int = 4
    heads: int = 2
    dimension: int = 64
    chunk: int = 64
    last: int = 37  # tokens of the last chunk
    dtype: str = "bfloat16"
    mla: bool = False
    capacity: str = "1GiB"
    settings: dict[str, Any] = field(default_factory=dict)
    wrong_form: bool = False


class Engine:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.dtype = getattr(torch, scene.dtype)
        planes = 1 if scene.mla else 2
        extra = {
            "storage_plugin.kv.module_path": "flashkv.connectors.lmcache",
            "storage_plugin.kv.class_name": "FlashKVBackend",
            "flashkv.path": scene.path,
            "flashkv.capacity": scene.capacity,
            **{f"flashkv.{name}": value for name, value in scene.settings.items()},
        }
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=scene.chunk,
            local_cpu=False,
            max_local_cpu_size=0.25,
            storage_plugins=["kv"],
            extra_config=extra,
        )
        metadata = LMCacheMetadata(
            model_name="tiny",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self.dtype,
            kv_shape=(scene.layers, planes, scene.chunk, scene.heads, scene.dimension),
            use_mla=scene.mla,
            chunk_size=scene.chunk,
            role="worker",
        )
        self.metadata = metadata
        self.format = MemoryFormat.KV_MLA_FMT if scene.mla else MemoryFormat.KV_2LTD
        self.manager = StorageManager(config, metadata, EventManager())
        self.backend = self.manager.storage_backends.get("kv")
        self.keys = [
            CacheEngineKey("tiny", 1, 0, (i + 1) * 0x9E3779B97F4A7C15 % (1 << 63), self.dtype)
            for i in range(scene.chunks)
        ]

    def tokens(self, chunk: int) -> int:
        return self.scene.last if chunk == self.scene.chunks - 1 else self.scene.chunk

    def content(self, chunk: int) -> Any:
        """The bytes of a chunk, as any process makes them."""
        shape = self.metadata.get_shapes(self.tokens(chunk))[0]
        count = int(np.prod(shape))
        numbers = np.random.default_rng(chunk).standard_normal(count, np.float32)
        if self.dtype is torch.uint8:
            return (numbers * 16).astype(np.int8).view(np.uint8)
        return torch.from_numpy(numbers).to(self.dtype).view(torch.uint8).numpy()

    def settle(self) -> None:
        deadline = time.monotonic() + 60
        while any(self.backend.exists_in_put_tasks(key) for key in self.keys):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def put(self) -> None:
        step = self.scene.batch
        for first in range(0, len(self.keys), step):
            chunks = range(first, min(first + step, len(self.keys)))
            objects = []
            for chunk in chunks:
                shape = self.metadata.get_shapes(self.tokens(chunk))[0]
                if self.scene.wrong_form:
                    shape = torch.Size([2, self.scene.layers + 1, 8, shape[-1]])
                one = self.manager.allocate(shape, self.dtype, self.format)
                data = np.frombuffer(one.byte_array, np.uint8)
                data[:] = np.resize(self.content(chunk), data.size)
                objects.append(one)
            self.manager.batched_put([self.keys[c] for c in chunks], objects)
            self.settle()
            assert all(one.get_ref_count() == 0 for one in objects), "a put holds its memory"

    def get(self) -> dict[str, Any]:
        right, wrong, absent = [], [], []
        step = self.scene.batch
        present = self.manager.batched_contains(self.keys)[0]
        for first in range(0, len(self.keys), step):
            chunks = range(first, min(first + step, len(self.keys)))
            objects = self.manager.batched_get([self.keys[c] for c in chunks], location="kv")
            for chunk, one in zip(chunks, objects, strict=True):
                if one is None:
                    absent.append(chunk)
                    continue
                same = np.array_equal(np.frombuffer(one.byte_array, np.uint8), self.content(chunk))
                (right if same else wrong).append(chunk)
                one.ref_count_down()
        return {"present": present, "right": right, "wrong": wrong, "absent": absent}

    def pins(self) -> dict[str, Any]:
        """What pins do: held, counted, given back."""
        backend, keys = self.backend, self.keys[:4]
        first = backend.batched_contains(keys, pin=True)
        again = backend.contains(keys[0], pin=True)
        leases = backend.stats()["store"]["leases"]
        kept = backend.remove(keys[0], force=False)
        for key in keys:
            backend.unpin(key)
        once = backend.remove(keys[0], force=False)
        backend.unpin(keys[0])
        left = backend.stats()["store"]["leases"]
        gone = backend.remove(keys[0], force=False)
        return {
            "found": [first, again], "leases": [leases, left], "removed": [kept, once, gone],
            "there": backend.contains(keys[0]),
        }  # fmt: skip


def main() -> None:
    scene = Scene(**json.loads(sys.argv[1]))
    engine = Engine(scene)
    result: dict[str, Any] = {"backend": type(engine.backend).__name__}
    if engine.backend is not None:
        if scene.action == "put":
            engine.put()
        elif scene.action == "get":
            result.update(engine.get())
        elif scene.action == "pins":
            result.update(engine.pins())
        free = engine.backend.get_allocator_backend().get_memory_allocator()
        result["memory_whole"] = bool(free.memcheck())
        result["stats"] = engine.backend.stats()
    engine.manager.close()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except BaseException:  # noqa: BLE001  (said, and then ended)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # LMCache's own threads don't end by themselves
