"""flashkv-bench peers: LMDB and RocksDB (blob files on).

Invariants
  - a batch is a transaction of LMDB, a write batch of RocksDB, and one call to read;
  - RocksDB writes each block once: no log, but a flush at the end, which syncs what it wrote. It
    may forget what was put after it, as a cache may; with its log it would write everything twice.
    It reads past the page cache and writes through it, each of which was the faster way.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np

from .bench_sets import MIB, page_aligned
from .peers_protocol import Blocks, Facts, FolderPeer, Peer, Plan

PAGE_BYTES: Final = 4096


class Lmdb(FolderPeer):
    """See peers_protocol.Peer."""

    name = "lmdb"
    facts = Facts(durable=True, durable_by="each transaction is synced", in_flight=1)

    def __init__(self) -> None:
        import lmdb

        self._library: Any = lmdb

    def versions(self) -> dict[str, str]:
        library = ".".join(map(str, self._library.version()))
        return {"lmdb": metadata.version("lmdb"), "liblmdb": library}

    def open(self, folder: Path, plan: Plan) -> None:
        super().open(folder, plan)
        room = plan.count * (plan.block_bytes + 2 * PAGE_BYTES) + 64 * MIB
        self._environment = self._library.open(str(folder), map_size=room, sync=True)
        self._out = page_aligned(plan.batch * plan.block_bytes).reshape(plan.batch, -1)

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, block in zip(keys, blocks, strict=True):
                transaction.put(key, memoryview(block))

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        """Copied out of the map: only that reads the disk, and the map is gone at the end."""
        got: list[Any] = []
        with self._environment.begin(buffers=True) as transaction:
            for key, row in zip(keys, self._out, strict=False):
                value = transaction.get(key)
                if value is None:
                    got.append(None)
                    continue
                row[: len(value)] = np.frombuffer(value, np.uint8)
                got.append(row[: len(value)])
        return got

    def close(self) -> None:
        self._environment.close()


class RocksDb(FolderPeer):
    """See peers_protocol.Peer."""

    name = "rocksdb"
    facts = Facts(
        durable=True, durable_by="its flush; no log", in_flight=1, flushes=True, direct_io=True
    )

    def __init__(self) -> None:
        import rocksdict

        self._library: Any = rocksdict

    def versions(self) -> dict[str, str]:
        return {"rocksdict": metadata.version("rocksdict")}

    def open(self, folder: Path, plan: Plan) -> None:
        super().open(folder, plan)
        options = self._library.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(PAGE_BYTES)
        options.set_use_direct_reads(True)
        self._unlogged = self._library.WriteOptions()
        self._unlogged.disable_wal = True
        self._database = self._library.Rdict(str(folder), options)

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        batch = self._library.WriteBatch(raw_mode=True)
        for key, block in zip(keys, blocks, strict=True):
            batch.put(key, block.tobytes())  # it takes bytes alone
        self._database.write(batch, self._unlogged)

    def flush(self) -> None:
        self._database.flush(True)

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        got: Sequence[Any] = self._database.get(list(keys))
        return got

    def close(self) -> None:
        self._database.close()


def make(variant: str) -> Peer:
    """A peer of this module."""
    return Lmdb() if variant == "lmdb" else RocksDb()
