"""How long a prefix SGLang can restore where several pools must have their part of it.

Invariant: a length is only told if every pool has the pages that its policy asks for at that
length; ranks that intersect these lengths agree on one that all of them can restore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashkv.connectors.sglang_blocks import Pages
from flashkv.connectors.sglang_interface import PoolHitPolicy, PoolName


def pool_hits(
    keys: Sequence[bytes],
    kv_pages: int,
    transfers: Sequence[Any],
    pages_of: Callable[[Any], Pages | None],
) -> tuple[dict[Any, int], list[int]]:
    """(pages found of each pool, lengths of prefix that all pools can restore, ascending).

    kv_pages: leading pages of the pool of K and V. Raises ValueError for a policy that isn't known.
    """
    found: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
    lengths = np.ones(kv_pages, np.bool_)  # [i]: a prefix of i + 1 pages
    for transfer in transfers:
        if not lengths.any():
            break
        pages = pages_of(transfer.name)
        there = np.zeros(kv_pages, np.bool_) if pages is None else pages.contains(keys[:kv_pages])
        fits = _fitting(there, transfer)
        if fits.any():
            found[transfer.name] = int(np.flatnonzero(fits)[-1]) + 1
        lengths &= fits
    return found, (np.flatnonzero(lengths) + 1).tolist()


def _fitting(there: NDArray[np.bool_], transfer: Any) -> NDArray[np.bool_]:
    """At which lengths a pool has what its policy asks for. there: bool of each page."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return np.logical_and.accumulate(there)
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        counted = np.concatenate(([0], np.cumsum(there)))
        ends = np.arange(1, len(there) + 1)
        begins = np.maximum(ends - window, 0)
        return np.asarray(counted[ends] - counted[begins] == ends - begins)
    raise ValueError(f"flashkv doesn't know the hit policy {transfer.hit_policy}")
