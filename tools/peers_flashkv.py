"""flashkv-bench peers: flashkv itself, with the codec that its name says.

Invariant: opened as an engine would open it, but for segments: few large ones, as a store of some
hundred GB has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import flashkv

from .bench_sets import StoreSettings, page_aligned
from .peers_blocks import geometry_of, shape_of
from .peers_protocol import Blocks, Facts, FolderPeer, Peer, PeerError, Plan


class FlashKv(FolderPeer):
    """See peers_protocol.Peer."""

    facts = Facts(
        durable=True, durable_by="its flush: fdatasync of segments", flushes=True, direct_io=True
    )

    def __init__(self, codec: str) -> None:
        self.name = f"flashkv-{codec}"
        self._codec = codec

    def versions(self) -> dict[str, str]:
        return {"flashkv": flashkv.__version__}

    def open(self, folder: Path, plan: Plan) -> None:
        super().open(folder, plan)
        settings = StoreSettings(folder, plan.count * plan.block_bytes)
        self._store = flashkv.open(
            folder / "store",
            capacity=settings.capacity_bytes,
            geometry=geometry_of(plan),
            options=settings.options(self._codec),
        )
        self._namespace = self._store.namespace(flashkv.Identity(model="flashkv-bench"))
        self._out = page_aligned(plan.batch * plan.block_bytes).reshape(plan.batch, -1)

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        result = self._namespace.put(keys, self._formed(blocks))
        if not result.all_ok:
            raise PeerError(f"{int((~result.ok).sum())} of {len(result)} blocks were refused")

    def flush(self) -> None:
        self._store.flush()

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        rows = self._out[: len(keys)]
        result = self._namespace.get(keys, self._formed(rows))
        return [row if ok else None for row, ok in zip(rows, result.ok.tolist(), strict=True)]

    def close(self) -> None:
        self._store.close()

    def _formed(self, blocks: Blocks) -> Any:
        """The blocks as their geometry says."""
        if self.plan.kind == "opaque":
            return blocks
        return blocks.view(np.uint16).reshape(len(blocks), *shape_of(self.plan))


def make(variant: str) -> Peer:
    """A peer of this module; the variant is the codec."""
    return FlashKv(variant)
