"""What a get is asked for: its options, and the checked arguments that come of them.

Invariant: nothing is looked up, pinned or read here; who raises has changed nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import checks, limits
from flashkv.codec import fidelity_number
from flashkv.errors import MemoryViewError, OptionsError
from flashkv.geometry import KVGeometry, MemoryView
from flashkv.index import Keys
from flashkv.layout import Selection
from flashkv.memory import BlockMemory, block_memory, room_for, token_counts
from flashkv.progress import LayerProgress

REALTIME: Final = "realtime"
BACKGROUND: Final = "background"


@dataclass(frozen=True, eq=False)
class GetOptions:
    """How a get is asked for, as Namespace.get takes it; a deadline is its caller's to keep."""

    view: MemoryView | None = None
    group: int | str = 0
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    token_range: tuple[int, int] | None = None
    tokens: Any = None
    min_fidelity: str | None = None
    progress: LayerProgress | None = None
    priority: str = REALTIME
    bounce: bool = False

    @property
    def background(self) -> bool:
        """Raises OptionsError where the priority is none."""
        if self.priority not in (REALTIME, BACKGROUND):
            raise OptionsError(
                f"priority must be {REALTIME} or {BACKGROUND}", value=checks.shown(self.priority)
            )
        return self.priority == BACKGROUND


def deadline(deadline_ms: float | None) -> float | None:
    """Its time of time.monotonic(); None: there is none. Raises OptionsError."""
    if deadline_ms is None:
        return None
    return time.monotonic() + checks.seconds(OptionsError, "deadline_ms", deadline_ms)


@dataclass(frozen=True)
class Wanted:
    """What of each block a get wants.

    lengths: uint16[N], tokens that they must have; worst: the least exact FKV_FIDELITY_*.
    """

    group: int
    first_token: int
    token_count: int  # 0: to the block's end
    lengths: NDArray[np.uint16] | None
    worst: int | None
    whole: bool  # all of each block


@dataclass(frozen=True, eq=False)
class Asked:
    """A get's checked arguments."""

    keys: Keys
    memory: BlockMemory
    wanted: Wanted
    progress: LayerProgress | None = None
    background: bool = False
    bounce: bool = False


def ask(geometry: KVGeometry, keys: Keys, out: Any, options: GetOptions) -> Asked:
    """Checks what a get is asked for. Raises MemoryViewError, OptionsError."""
    background = options.background
    bounce = checks.flag(OptionsError, "bounce", options.bounce)
    number = geometry.group_index(options.group)
    if options.progress is not None:
        options.progress.check_group(geometry, number)
    first, count = _token_range(options.token_range)
    layers, heads, tokens = options.layers, options.heads, options.tokens
    memory = block_memory(
        out,
        len(keys),
        geometry,
        group=number,
        view=options.view,
        block_tokens=count or room_for(tokens),
        selection=Selection(_numbers("layers", layers), _numbers("heads", heads)),
        destination=True,
        partial=tokens is not None,
    )
    least = options.min_fidelity
    wanted = Wanted(
        group=number,
        first_token=first,
        token_count=count,
        lengths=_lengths(tokens, count, len(keys), memory.block_tokens),
        worst=None if least is None else fidelity_number("min_fidelity", least),
        whole=layers is None and heads is None and options.token_range is None,
    )
    return Asked(keys, memory, wanted, options.progress, background, bounce)


def _lengths(tokens: Any, count: int, blocks: int, room: int) -> NDArray[np.uint16] | None:
    """Tokens that each block must have, where the caller says: uint16[blocks]."""
    if tokens is None:
        return None
    return token_counts(tokens, blocks, limits.BLOCK_TOKENS_MAX if count else room)


def _numbers(name: str, numbers: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else checks.whole_numbers(MemoryViewError, name, numbers)


def _token_range(token_range: tuple[int, int] | None) -> tuple[int, int]:
    """(first token, count); count 0: to the end."""
    if token_range is None:
        return 0, 0
    start, stop = checks.pair(MemoryViewError, "token_range", token_range)
    if not 0 <= start < stop <= limits.BLOCK_TOKENS_MAX:
        raise MemoryViewError(
            "token_range is no range",
            value=token_range,
            limit=f"0 <= start < stop <= {limits.BLOCK_TOKENS_MAX}",
        )
    return start, stop - start
