"""What the halves of the vLLM connector tell each other: a step's plan, and what came of it.

Invariant: plain data that pickle copies: the halves may live in different processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass
class Load:
    """Tokens of one request to be read from the store into vLLM's blocks.

    keys         uint8[N, 32] of consecutive granules.
    first_token  where vLLM's own computed tokens end: in the first of these granules.
    start_token  of the first granule.
    blocks       vLLM's blocks of these granules, from the one that holds start_token on.
    between      read between steps; the request waits for it outside of batches.
    """

    request_id: str
    keys: NDArray[np.uint8]
    first_token: int
    start_token: int
    blocks: NDArray[np.int64]
    between: bool = False


@dataclass
class Save:
    """Granules of one request that are computed once this step is over.

    parent    key of the granule before, empty for the first.
    rests_on  all blocks that the request has up to the last of these granules, where loads of this
            step may fail and spoil what is computed; else None.
    """

    request_id: str
    keys: NDArray[np.uint8]
    parent: bytes
    start_token: int
    blocks: NDArray[np.int64]
    rests_on: NDArray[np.int64] | None = None


@dataclass
class Plan:
    """One step.

    released  requests that have given their blocks back since the step before: what is still being
              stored of them must be captured before anything is written.
    idle      no tokens are computed in this step.
    forget    what is stored of the model is to be retired first.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    idle: bool = False
    forget: bool = False


@dataclass
class Heard:
    """What workers tell the scheduler where it can't look into their stores itself.

    stored  keys that were stored, or found stored, with a bit for each rank that did.
    lost    keys that failed to load on any rank.
    """

    stored: dict[bytes, int] = field(default_factory=dict)
    lost: set[bytes] = field(default_factory=set)

    def add(self, other: Heard) -> None:
        """Takes another rank's words as well."""
        for key, ranks in other.stored.items():
            self.stored[key] = self.stored.get(key, 0) | ranks
        self.lost |= other.lost

    def __bool__(self) -> bool:
        return bool(self.stored or self.lost)


def block_span(start_token: int, end_token: int, block_tokens: int) -> slice:
    """Which of a request's blocks hold these tokens."""
    return slice(start_token // block_tokens, -(-end_token // block_tokens))
