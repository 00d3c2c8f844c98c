"""vLLM's TieringOffloadingSpec on the CPU platform, which vLLM has no copy worker for.

Only the worker that copies between the model's KV cache and the primary tier is ours, and it copies
at once; manager, shared region and tiers are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies pages of the KV cache into rows of the region, and back."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self.blocks_per_chunk, self.region = blocks_per_chunk, region
        self.groups = kv_caches.group_data_refs
        self.caches, self.rows = [], []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            self.caches.append(cache.tensor.view(torch.int8).view(-1, page))
            rows = region.create_next_worker_view(page * blocks_per_chunk)
            shape, strides = (rows.shape[0], blocks_per_chunk, page), (rows.stride(0), page, 1)
            self.rows.append(rows.as_strided(shape, strides, rows.storage_offset()))
        self.finished: list[Any] = []

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, to_rows: bool) -> bool:
        moved = first_block = first_chunk = 0
        for group, (count, index) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            if not count:
                continue
            skipped = index % self.blocks_per_chunk
            places = np.arange(skipped, skipped + count)
            used = int(places[-1]) // self.blocks_per_chunk + 1
            pages = torch.as_tensor(blocks.block_ids[first_block : first_block + count]).long()
            ids = np.asarray(chunks.block_ids[first_chunk : first_chunk + used])
            rows = torch.as_tensor(ids[places // self.blocks_per_chunk]).long()
            within = torch.as_tensor(places % self.blocks_per_chunk)
            for reference in self.groups[group]:
                cache, row = self.caches[reference.tensor_idx], self.rows[reference.tensor_idx]
                if to_rows:
                    row[rows, within] = cache[pages]
                else:
                    cache[pages] = row[rows, within]
                moved += count * cache.shape[1]
            first_block, first_chunk = first_block + count, first_chunk + used
        self.finished.append(TransferResult(job_id, True, moved, 0.0))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_rows=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_rows=False)

    def get_finished(self) -> Sequence[Any]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self.caches.clear()
        self.rows.clear()
        self.region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """The stock spec with that worker."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
