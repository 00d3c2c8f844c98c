"""flashkv-bench peers: what a store is asked for, whoever made it, and what stands for all of them.

Runs in the environments of the engines too: it needs Python, numpy and flashkv's own files alone.

Invariants
  - a block that a peer doesn't have is None, never an exception; bytes that it gives are compared
    by who asked, so a peer checks nothing for this bench;
  - what a peer does beyond its own code is stated in its facts, and costs it no time in a figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .peers_damage import flip_payload
from .ttft_session import drop_cached_pages

Blocks = npt.NDArray[np.uint8]
"""[block, byte]"""


class PeerError(Exception):
    """A peer did not do what it was asked; the message says what."""


@dataclass(frozen=True)
class Plan:
    """What a peer will hold.

    kind         "opaque" (random bytes) or "bf16" (real keys and values).
    block_bytes  of each block.
    batch        blocks in a call, and in flight where the peer can have several.
    count        blocks in all.
    """

    kind: str
    block_bytes: int
    batch: int
    count: int


@dataclass(frozen=True)
class Facts:
    """What figures of a peer belong to.

    durable          whether blocks are on the device once flush() has returned, power cut or not.
    durable_by       by which means of its own, or what is missing.
    in_flight        blocks that it works on at once, of a batch; 0: all of it.
    flushes          whether it has a flush of its own.
    index_in_memory  whether it knows nothing of its files once it is closed.
    direct_io        whether its gets go past the page cache.
    """

    durable: bool
    durable_by: str
    in_flight: int = 0
    flushes: bool = False
    index_in_memory: bool = False
    direct_io: bool = False


class Peer(Protocol):
    """A store of blocks in a folder of its own. Keys are 32 bytes."""

    name: str
    facts: Facts

    def versions(self) -> dict[str, str]:
        """By package: what was measured."""

    def open(self, folder: Path, plan: Plan) -> None:
        """Makes the store, or opens what an earlier life left."""

    def stage(self, blocks: Blocks) -> None:
        """Brings the blocks to where put() takes them from. Not timed."""

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        """Stores blocks; returns when all are stored as well as the peer's put stores."""

    def flush(self) -> None:
        """Makes what was put durable, by the peer's own means."""

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        """A buffer with the bytes of each block, or None; good until the next call."""

    def close(self) -> None:
        """Ends the store as its users would."""

    def drop_cache(self) -> None:
        """Takes its files out of the page cache, and empties its own caches."""

    def damage(self, folder: Path, plan: Plan, payload: bytes) -> str:
        """Flips a bit on the disk, in the middle of the block that begins with `payload`.

        The store in the folder is closed, but where its index is in memory alone. Tells where.
        """


class FolderPeer:
    """What most peers have in common: files in a folder, nothing cached but by the kernel."""

    name = ""
    facts = Facts(durable=False, durable_by="")
    folder: Path
    plan: Plan

    def versions(self) -> dict[str, str]:
        return {}

    def stage(self, blocks: Blocks) -> None:
        """put() takes them as they are."""

    def flush(self) -> None:
        """Nothing to do."""

    def drop_cache(self) -> None:
        drop_cached_pages(self.folder)

    def damage(self, folder: Path, plan: Plan, payload: bytes) -> str:
        return flip_payload(folder, payload, plan.block_bytes // 2)

    def open(self, folder: Path, plan: Plan) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan = folder, plan

    def close(self) -> None:
        """Nothing is open."""
