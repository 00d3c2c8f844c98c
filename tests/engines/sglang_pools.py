"""Host pools of SGLang, made without an engine, and storages bound to them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "sglang_stubs"))
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import cpu_transfers

cpu_transfers.install()

import torch  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

from flashkv.connectors.sglang import FlashKVStorage  # noqa: E402

LAYERS, HEADS, DIM, LATENT, ROPE = 3, 4, 32, 48, 16
PAGES, PAGE = 8, 16
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
MODEL = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
ROWS = [5, 1, 6]
SEEDS = [11, 12, 13]
CPU = torch.device("cpu")


def mha_pool(
    layout: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page: int = PAGE,
    layers: int = LAYERS,
    heads: int = HEADS,
    v_dim: int = DIM,
    first_layer: int = 0,
    kind: type | None = None,
) -> Any:
    """K and V of a few heads; kind: another class than SGLang would choose."""
    tokens = PAGES * page
    k, v = (
        tuple(torch.zeros(tokens, heads, dim, dtype=dtype) for _ in range(layers))
        for dim in (DIM, v_dim)
    )
    pointers = torch.zeros(layers, dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
        ),
        page_size=page,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=v_dim,
        dtype=dtype,
        device=CPU,
    )
    pool = (kind or get_mha_host_pool_cls(info))(
        info,
        1.0,
        0,
        page,
        layout,
        device_capacity_tokens=tokens,
        start_layer=first_layer,
        end_layer=first_layer + layers,
    )
    return paint(pool)


def mla_pool(layout: str, *, dtype: torch.dtype = torch.bfloat16, page: int = PAGE) -> Any:
    """Latent rows."""
    tokens, width = PAGES * page, LATENT + ROPE
    info = MLABufferInfo(
        buffers=tuple(torch.zeros(tokens, 1, width, dtype=dtype) for _ in range(LAYERS)),
        data_ptrs=torch.zeros(LAYERS, dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        kv_cache_dim=width,
        dtype=dtype,
        device=CPU,
    )
    pool = MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )
    return paint(pool)


def state_pool() -> Any:
    """States of Mamba layers: a page is one checkpoint."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, PAGES, 4, 8, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, PAGES, 6, 2, dtype=torch.bfloat16),),
    )
    pool = MambaPoolHost(info, 1.0, 0, device_capacity=PAGES, layout="page_first", pin_memory=False)
    for tensor in (pool.temporal_buffer, *pool.conv_buffer):
        tensor.fill_(-3)
    return pool


def buffers(pool: Any) -> list[torch.Tensor]:
    kept = pool.kv_buffer
    return list(kept) if isinstance(kept, (list, tuple)) else [kept]


def paint(pool: Any) -> Any:
    """Fills the pool with what no test stores."""
    for tensor in buffers(pool):
        tensor.view(torch.uint8).fill_(0x5A)
    return pool


def slots(rows: list[int], page: int = PAGE) -> torch.Tensor:
    """host_indices of these pages."""
    return torch.cat([torch.arange(row * page, (row + 1) * page) for row in rows])


def logical(pool: Any, row: int) -> list[torch.Tensor]:
    """A page by [plane,] layer, token, head, dim, whatever the layout."""
    page, found = pool.page_size, []
    for tensor in buffers(pool):
        joined = len(buffers(pool)) == 1 and tensor.shape[0] == 2 and not is_mla(pool)
        parts = list(tensor) if joined else [tensor]
        for part in parts:
            if pool.layout == "layer_first":
                found.append(part[:, row * page : (row + 1) * page])
            elif pool.layout == "page_first":
                found.append(part[row * page : (row + 1) * page].transpose(0, 1))
            elif pool.layout == "page_first_direct":
                found.append(part[row])
            else:
                found.append(part[row].permute(2, 1, 0, 3))
    return found


def is_mla(pool: Any) -> bool:
    return isinstance(pool, MLATokenToKVPoolHost)


def content(pool: Any, row: int, seed: int) -> list[torch.Tensor]:
    """Random bits for a page, as logical(); they depend on the seed alone, not on the layout."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for view in logical(pool, row):
        if view.dtype == torch.uint8:
            found.append(torch.randint(0, 255, view.shape, generator=generator, dtype=view.dtype))
        else:
            found.append(torch.randn(view.shape, generator=generator).to(view.dtype))
    return found


def fill(pool: Any, row: int, seed: int) -> None:
    """Lets a page hold content()."""
    for view, numbers in zip(logical(pool, row), content(pool, row, seed), strict=True):
        view.copy_(numbers)


def holds(pool: Any, row: int, seed: int) -> bool:
    """Whether a page holds content()."""
    pairs = zip(logical(pool, row), content(pool, row, seed), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def untouched(pool: Any, rows: list[int]) -> bool:
    """Whether these pages still hold the paint."""
    return all(
        bool((view.contiguous().view(torch.uint8) == 0x5A).all())
        for row in rows
        for view in logical(pool, row)
    )


def bind(path: Path, pool: Any, *, model: Path | None = None, **changes: Any) -> FlashKVStorage:
    """A storage on a store at `path`, bound to the pool. changes: of its configuration."""
    extra = {"path": str(path), "capacity": "64MiB", **changes.pop("extra", {})}
    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": pool is not None and is_mla(pool),
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": str(model or MODEL),
        "extra_config": {
            "backend_name": "flashkv",
            "module_path": "flashkv.connectors.sglang",
            "class_name": "FlashKVStorage",
            **extra,
        },
        **changes,
    }
    made = FlashKVStorage(HiCacheStorageConfig(**values), {})
    if pool is not None:
        made.register_mem_pool_host(pool)
    return made


def keys(count: int, first: int = 0) -> list[str]:
    """As SGLang's: SHA-256 as hex."""
    return [f"{first + number:064x}" for number in range(count)]


@contextmanager
def storage(path: Path, pool: Any, **changes: Any) -> Iterator[Any]:
    """bind(), closed at the end."""
    made = bind(path, pool, **changes)
    try:
        yield made
    finally:
        made.close()


def filled(pool: Any) -> Any:
    """The pool with content() of SEEDS in ROWS."""
    for row, seed in zip(ROWS, SEEDS, strict=True):
        fill(pool, row, seed)
    return pool


def stored(path: Path, pool: Any, **changes: Any) -> None:
    """Lets a store hold ROWS of the pool under keys(3)."""
    with storage(path, filled(pool), **changes) as backend:
        assert backend.batch_set_v1(keys(3), slots(ROWS, pool.page_size)) == [True] * 3
        assert backend.batch_exists(keys(5)) == 3


def wait_until(reached: Any, seconds: float = 20.0) -> None:
    """Returns once reached() is true; fails where it never is."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it didn't come to that"
        time.sleep(0.05)
