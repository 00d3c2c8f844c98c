"""flashkv-bench peers: the file storage behind SGLang's hierarchical cache. Runs in SGLang's
environment.

Invariant: its own class, asked as its cache controller asks it: a list of keys and of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .bench_sets import page_aligned
from .peers_protocol import Blocks, Facts, FolderPeer, Peer, PeerError, Plan


class HiCacheFiles(FolderPeer):
    """See peers_protocol.Peer."""

    name = "sglang-file"
    facts = Facts(
        durable=False, durable_by="its files are written to the page cache, not synced", in_flight=1
    )

    def __init__(self) -> None:
        import torch
        from sglang.srt.mem_cache import hicache_storage

        self._torch: Any = torch
        self._library: Any = hicache_storage

    def versions(self) -> dict[str, str]:
        return {"sglang": metadata.version("sglang")}

    def open(self, folder: Path, plan: Plan) -> None:
        super().open(folder, plan)
        configuration = self._library.HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="flashkv-bench",
        )
        self._files = self._library.HiCacheFile(configuration, str(folder))
        self._out = page_aligned(plan.batch * plan.block_bytes).reshape(plan.batch, -1)
        self._pages = [self._torch.from_numpy(row) for row in self._out]

    def put(self, keys: Sequence[bytes], blocks: Blocks) -> None:
        pages = [self._torch.from_numpy(block) for block in blocks]
        if not self._files.batch_set([key.hex() for key in keys], pages):
            raise PeerError("blocks were not stored")

    def get(self, keys: Sequence[bytes]) -> Sequence[Any]:
        got = self._files.batch_get([key.hex() for key in keys], self._pages[: len(keys)])
        return [None if page is None else row for page, row in zip(got, self._out, strict=False)]


def make(_variant: str) -> Peer:
    """The peer of this module."""
    return HiCacheFiles()
