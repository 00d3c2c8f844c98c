"""In which order vLLM's attention kernels for CPUs keep a page: the kernel that writes it is asked.

Invariant: an order that isn't seen to be one of those known is "opaque": pages then move whole.
"""

from __future__ import annotations

from typing import Any


def kernel_form(spec: Any, cache_dtype: str) -> str:
    """Form of a page of a full-attention spec, see PagedLayout: "split", "transposed", "opaque"."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, dim = int(spec.block_size), int(spec.head_size)
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "opaque"
    isa = _get_attn_isa(spec.dtype, tokens, dim, cache_dtype)
    # Numbers that every dtype holds exactly: those of a token's place and of an element's, apart.
    of_token = torch.arange(tokens, dtype=torch.float32)[:, None].expand(tokens, dim)
    of_element = torch.arange(dim, dtype=torch.float32)[None, :].expand(tokens, dim)
    found = {"split", "transposed"}
    for numbers in (of_token % 251, of_token // 251, of_element % 251, of_element // 251):
        cache = torch.full((1, 1, 2 * tokens, dim), -1.0, dtype=spec.dtype)
        keys, values = cache.chunk(2, dim=2)
        given = numbers[:, None, :].to(spec.dtype).contiguous()
        slots = torch.arange(tokens, dtype=torch.int64)
        ops.cpu_attn_reshape_and_cache(given, given.clone(), keys, values, slots, isa)
        page = cache.float().reshape(2, -1)
        if not torch.equal(page[1], numbers.reshape(-1)):
            return "opaque"
        if not torch.equal(page[0], numbers.reshape(-1)):
            found.discard("split")
        if not torch.equal(page[0], numbers.T.reshape(-1)):
            found.discard("transposed")
    return found.pop() if len(found) == 1 else "opaque"
