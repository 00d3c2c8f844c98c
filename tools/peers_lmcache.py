"""flashkv-bench peers: LMCache's own storages: its L2 adapters raw_block (posix, io_uring) and
fs_native, and its local disk. Runs in LMCache's environment.

Invariants
  - blocks go from and to memory as LMCache holds it (an L1 arena; its allocator's objects), so
    nothing is copied that LMCache itself would not copy;
  - a batch's blocks are in flight together: as many workers, or entries of the ring, as it has
    blocks. Of its posix engine that takes a task a block, as a task writes one after another.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np

from .bench_sets import MIB, page_aligned
from .peers_blocks import DIM, HEADS, LAYERS, tokens_of
from .peers_protocol import Blocks, Facts, FolderPeer, Peer, PeerError, Plan

os.environ.update(
    LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="ERROR"
)

PAGE_BYTES: Final = 4096
META_BYTES: Final = 16 * MIB
ANSWER_S: Final = 120.0
GIB: Final = 1 << 30


def _versions(*packages: str) -> dict[str, str]:
    return {name: metadata.version(name) for name in packages}


class L2Adapter(FolderPeer):
    """An L2 adapter of LMCache's server, over an arena like its L1. See peers_protocol.Peer."""

    packages: tuple[str, ...] = ("lmcache",)
    blocks_a_task = 0  # all of the batch

    def configuration(self) -> dict[str, Any]:
        """As the server takes it in --l2-adapter."""
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        return _versions(*self.packages)

    def open(self, folder: Path, plan: Plan) -> None:
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        super().open(folder, plan)
        arena = page_aligned(2 * plan.batch * plan.block_bytes)
        self._in, self._out = arena.reshape(2, plan.batch, plan.block_bytes)
        memory = L1MemoryDesc(
            ptr=arena.ctypes.data,
            size=arena.nbytes,
            align_bytes=PAGE_BYTES,
            stable_registration_size=arena.nbytes,
        )
        configuration = parse_args_to_l2_adapters_config(_Arguments(self.configuration()))
        self._adapter = create_l2_adapter(configuration.adapters[0], l1_memory_desc=memory)
        self._from, self._to = _objects(self._in), _objects(self._out)

    def stage(self, blocks: Blocks) -> None:
        self._in[: len(blocks)] = blocks

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        adapter = self._adapter
        done: dict[int, Any] = {}

        def collect(_: set[int]) -> set[int]:
            done.update(adapter.pop_completed_store_tasks())
            return set(done)

        names = _object_keys(keys)
        tasks = {
            adapter.submit_store_task(names[part], self._from[: len(blocks)][part])
            for part in self._parts(len(keys))
        }
        _wait(adapter.get_store_event_fd(), tasks, collect)
        if not all(done[task].is_successful() for task in tasks):
            raise PeerError("blocks were not stored")

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        adapter = self._adapter
        found: dict[int, Any] = {}

        def collect(pending: set[int]) -> set[int]:
            for task in pending:
                bits = adapter.query_load_result(task)
                if bits is not None:
                    found[task] = bits
            return set(found)

        names = _object_keys(keys)
        parts = self._parts(len(keys))
        tasks = [
            adapter.submit_load_task(names[part], self._to[: len(keys)][part]) for part in parts
        ]
        _wait(adapter.get_load_event_fd(), set(tasks), collect)
        got: list[Any] = []
        for task, part in zip(tasks, parts, strict=True):
            rows = self._out[: len(keys)][part]
            got += [row if found[task].test(i) else None for i, row in enumerate(rows)]
        return got

    def close(self) -> None:
        self._adapter.close()

    def _parts(self, count: int) -> list[slice]:
        step = self.blocks_a_task or count
        return [slice(first, first + step) for first in range(0, count, step)]


class _Arguments:
    """What LMCache's own parser of its command line would have made."""

    def __init__(self, adapter: dict[str, Any]) -> None:
        import json

        self.l2_adapter = [json.dumps(adapter)]


def _objects(rows: Blocks) -> list[Any]:
    """The rows of an arena as objects of LMCache's memory."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    return [
        TensorMemoryObj(
            raw_data=torch.from_numpy(row),
            metadata=MemoryObjMetadata(
                shape=torch.Size([row.nbytes]),
                dtype=torch.uint8,
                address=0,
                phy_size=row.nbytes,
                fmt=MemoryFormat.KV_2LTD,
                ref_count=1,
            ),
            parent_allocator=None,
        )
        for row in rows
    ]


def _object_keys(keys: Sequence[bytes]) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(chunk_hash=key, model_name="flashkv-bench", kv_rank=0) for key in keys]


def _wait(descriptor: int, tasks: set[int], collect: Callable[[set[int]], set[int]]) -> None:
    """Until all tasks are done. collect(pending) asks, and gives those that are."""
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    pending = set(tasks)
    while pending:
        if not poller.poll(ANSWER_S * 1000):
            raise PeerError(f"no answer in {ANSWER_S:.0f} s")
        consume_fd(descriptor)
        pending -= collect(pending)


class RawBlock(L2Adapter):
    """Slots in one file, which is as long as the blocks need."""

    packages = ("lmcache", "lmcache-rust-raw-block-io")

    def __init__(self, engine: str) -> None:
        self.name = f"lmcache-raw_block-{engine}"
        self._engine = engine
        self.blocks_a_task = 1 if engine == "posix" else 0
        self.facts = Facts(
            durable=False,
            durable_by="O_DIRECT and a checkpoint of its index; nothing is synced",
            flushes=True,
            direct_io=True,
        )

    def configuration(self) -> dict[str, Any]:
        plan = self.plan
        slot_bytes = plan.block_bytes + PAGE_BYTES
        capacity = META_BYTES + (plan.count + 1) * slot_bytes
        file = self.folder / "raw.img"
        with file.open("ab") as opened:
            if opened.tell() < capacity:
                os.posix_fallocate(opened.fileno(), 0, capacity)
        return {
            "type": "raw_block",
            "device_path": str(file),
            "capacity_bytes": capacity,
            "slot_bytes": slot_bytes,
            "meta_total_bytes": META_BYTES,
            "use_odirect": True,
            "io_engine": self._engine,
            "num_store_workers": plan.batch,
            "num_load_workers": plan.batch,
        }

    def flush(self) -> None:
        """Without a checkpoint it knows nothing of its blocks after a kill. It writes one every
        minute while nothing else goes on, and when it is closed.
        """
        self._adapter._core.checkpoint_now()


class FsNative(L2Adapter):
    """A file a block, by LMCache's threads in C++."""

    name = "lmcache-fs_native"
    facts = Facts(durable=False, durable_by="O_DIRECT and a rename; nothing is synced",
                  direct_io=True)  # fmt: skip

    def configuration(self) -> dict[str, Any]:
        return {
            "type": "fs_native",
            "base_path": str(self.folder),
            "num_workers": self.plan.batch,
            "use_odirect": True,
        }


class LocalDisk(FolderPeer):
    """The disk behind LMCache's engine inside vLLM. See peers_protocol.Peer."""

    name = "lmcache-local_disk"
    facts = Facts(durable=False, durable_by="O_DIRECT; nothing is synced", index_in_memory=True,
                  direct_io=True)  # fmt: skip

    def __init__(self) -> None:
        self._staged: list[Any] = []
        self._lent: list[Any] = []

    def versions(self) -> dict[str, str]:
        return _versions("lmcache")

    def open(self, folder: Path, plan: Plan) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        super().open(folder, plan)
        tokens = tokens_of(plan.block_bytes)
        staging = 3 * plan.batch * plan.block_bytes + 64 * MIB
        configuration = LMCacheEngineConfig.from_defaults(
            chunk_size=tokens,
            local_cpu=False,
            max_local_cpu_size=staging / GIB,
            local_disk=str(folder),
            max_local_disk_size=2 * plan.count * plan.block_bytes / GIB,
            extra_config={"use_odirect": True, "disk_io_threads": plan.batch},
        )
        self._metadata = LMCacheMetadata(
            model_name="flashkv-bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, tokens, HEADS, DIM),
            chunk_size=tokens,
            role="worker",
        )
        self._dtype = torch.bfloat16
        self._manager = StorageManager(configuration, self._metadata, EventManager())
        self._disk = self._manager.storage_backends["LocalDiskBackend"]

    def stage(self, blocks: Blocks) -> None:
        """Into memory of its own allocator, where an engine's blocks would come to as well."""
        from lmcache.v1.memory_management import MemoryFormat

        shape = self._metadata.get_shapes(tokens_of(self.plan.block_bytes))[0]
        for block in blocks:
            one = self._manager.allocate(shape, self._dtype, MemoryFormat.KV_2LTD)
            if one is None:
                raise PeerError("its allocator has no memory")
            np.frombuffer(one.byte_array, np.uint8)[:] = block
            self._staged.append(one)

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        left = threading.Semaphore(0)
        objects, self._staged = self._staged, []
        self._disk.batched_submit_put_task(
            self._keys(keys), objects, on_complete_callback=lambda _: left.release()
        )
        for one in objects:
            one.ref_count_down()
        for _ in blocks:
            if not left.acquire(timeout=ANSWER_S):
                raise PeerError("blocks were not stored")

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        self._give_back()
        names = self._keys(keys)
        got = self._disk.batched_get_blocking(names)
        self._lent = [one for one in got if one is not None]
        return [None if one is None else one.byte_array for one in got]

    def close(self) -> None:
        self._give_back()
        self._manager.close()

    def _give_back(self) -> None:
        for one in self._lent:
            one.ref_count_down()
        self._lent = []

    def _keys(self, keys: Sequence[bytes]) -> list[Any]:
        """Its hashes are whole numbers: the last bytes of a key are the block's number."""
        from lmcache.utils import CacheEngineKey

        return [
            CacheEngineKey(
                "flashkv-bench", 1, 0, 1 + int.from_bytes(key[-8:], "little"), self._dtype
            )
            for key in keys
        ]


def make(variant: str) -> Peer:
    """A peer of this module."""
    if variant == "fs_native":
        return FsNative()
    return LocalDisk() if variant == "local_disk" else RawBlock(variant)
