"""flashkv-bench peers: files without a store around them: plain ones with O_DIRECT, safetensors.

Invariants
  - a block is a file; its name is its key in hexadecimal;
  - plain files are what the disk gives to who asks for no more: written and read past the page
    cache, as many at once as a batch has blocks, synced one by one, the folder at the flush.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .bench_sets import page_aligned
from .peers_protocol import Blocks, Facts, FolderPeer, Peer, PeerError, Plan


class PlainFiles(FolderPeer):
    """See peers_protocol.Peer."""

    name = "files"
    facts = Facts(
        durable=True,
        durable_by="fdatasync of each file, fsync of the folder at the flush",
        flushes=True,
        direct_io=True,
    )

    def open(self, folder: Path, plan: Plan) -> None:
        super().open(folder, plan)
        self._direct = _direct_flag(folder)
        self._threads = ThreadPoolExecutor(plan.batch)
        self._out = page_aligned(plan.batch * plan.block_bytes).reshape(plan.batch, -1)

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        list(self._threads.map(self._write, keys, blocks))

    def flush(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        return list(self._threads.map(self._read, keys, self._out))

    def close(self) -> None:
        self._threads.shutdown()

    def _write(self, key: bytes, block: Blocks) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | self._direct
        descriptor = os.open(self.folder / key.hex(), flags, 0o644)
        try:
            if os.write(descriptor, block.data) != block.nbytes:
                raise PeerError("a short write")
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, key: bytes, row: Blocks) -> Blocks | None:
        try:
            descriptor = os.open(self.folder / key.hex(), os.O_RDONLY | self._direct)
        except FileNotFoundError:
            return None
        try:
            if os.readv(descriptor, [row.data]) != row.nbytes:
                raise PeerError("a short read")
        finally:
            os.close(descriptor)
        return row


def _direct_flag(folder: Path) -> int:
    """O_DIRECT, or 0 where the file system refuses it."""
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT


class Safetensors(FolderPeer):
    """See peers_protocol.Peer."""

    name = "safetensors"
    facts = Facts(
        durable=False, durable_by="its files are written to the page cache, not synced", in_flight=1
    )

    def __init__(self) -> None:
        import safetensors
        import safetensors.numpy

        self._library: Any = safetensors

    def versions(self) -> dict[str, str]:
        return {"safetensors": metadata.version("safetensors")}

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self._library.numpy.save_file({"kv": block}, self._path(key))

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        return [self._read(key) for key in keys]

    def _read(self, key: bytes) -> Any:
        path = self._path(key)
        if not path.exists():
            return None
        with self._library.safe_open(path, framework="numpy") as file:
            return np.ascontiguousarray(file.get_tensor("kv"))

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.safetensors"


def make(variant: str) -> Peer:
    """A peer of this module."""
    return Safetensors() if variant == "safetensors" else PlainFiles()
