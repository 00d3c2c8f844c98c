"""Exact blocks -> blocks of a lossy codec, without the model.

Invariants
  - only what is stored exactly is converted: a lossy record is never coded again, it would lose
    twice;
  - what no bound makes smaller stays as it is: nothing is written anew for nothing;
  - a block is there at any time, exact or converted: the new one supersedes the old one;
  - memory is bounded: a batch at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import checks, limits
from flashkv.codec import FIDELITIES, fidelity_number
from flashkv.errors import BatchResult, BlockStatus, KeyFormatError, MemoryViewError, OptionsError
from flashkv.index import NONE, Keys

if TYPE_CHECKING:
    from flashkv.namespace import KeyBatch, Namespace

BATCH_BYTES: Final = 64 * limits.MIB
"""A record's worth and more; a batch's blocks lie in memory once."""


def convert(
    namespace: Namespace,
    keys: KeyBatch,
    codec: str,
    *,
    group: int | str = 0,
    parents: KeyBatch | None = None,
    position: int | None = None,
) -> BatchResult:
    """See Namespace.convert."""
    if fidelity_number("codec", codec) == FIDELITIES["exact"]:
        raise OptionsError("blocks are converted to a lossy codec only", value=codec)
    packed = Keys.pack(keys)
    above = None if parents is None else Keys.pack(parents, name="parents", allow_empty=True)
    if above is not None and len(above) != len(packed):
        raise KeyFormatError("parents must name one key a block", value=len(above))
    if position is not None:
        position = checks.whole(MemoryViewError, "position", position, 0, (1 << 62) - 1)
    places = namespace.places(packed)
    found, tokens = places["record"] != NONE, places["tokens"].astype(np.int64)
    statuses = np.where(found, BlockStatus.PRESENT, BlockStatus.MISS).astype(np.uint8)
    number = namespace.geometry.group_index(group)
    exact = found & (places["fidelity"] == FIDELITIES["exact"])
    exact &= any(plane.may_be_lossy for plane in namespace.geometry.groups[number].planes)
    known = np.concatenate([[True], np.logical_and.accumulate(found)])  # all before are there
    starts = np.concatenate([[0], tokens.cumsum()])
    for rows in _batches(exact, tokens, namespace.geometry.token_bytes(number)):
        first = int(rows[0])
        at = position + int(starts[first]) if position is not None and known[first] else None
        statuses[rows] = _convert_run(namespace, packed, above, rows, tokens, codec, group, at)
    return BatchResult(statuses)


def _batches(
    exact: NDArray[np.bool_], tokens: NDArray[np.int64], token_bytes: int
) -> list[NDArray[np.int64]]:
    """Runs of neighbouring exact blocks, none larger than a batch (but for one block)."""
    rows = np.flatnonzero(exact)
    batches = []
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    for first, end in pairwise(cuts):
        most = int(tokens[rows[first:end]].max(initial=1)) * token_bytes
        step = max(1, BATCH_BYTES // max(most, 1))
        batches += [rows[at : min(at + step, end)] for at in range(first, end, step)]
    return batches


def _convert_run(
    namespace: Namespace,
    keys: Keys,
    parents: Keys | None,
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    codec: str,
    group: int | str,
    position: int | None,
) -> NDArray[np.uint8]:
    """Reads a run and puts it again; statuses of its blocks."""
    number = namespace.geometry.group_index(group)
    own = [keys[row] for row in rows.tolist()]
    room = int(tokens[rows].max())
    memory = np.empty((len(rows), namespace.geometry.token_bytes(number) * room), np.uint8)
    counts = tokens[rows]
    with namespace.alone():  # or what is deleted or replaced in between comes back
        read = namespace.get(own, memory, group=group, tokens=counts, min_fidelity="exact").statuses
        ok = read == BlockStatus.OK
        if len(rows) == 1 and not ok[0]:
            here = namespace.contains(own)[0]  # converted meanwhile
            return np.array([BlockStatus.PRESENT if here else read[0]], np.uint8)
        if ok.all():
            written = namespace.put(
                own,
                memory,
                group=group,
                tokens=counts,
                parents=None if parents is None else [parents[row] for row in rows.tolist()],
                position=position,
                replace=True,
                codec=codec,
            )
            return np.array(written.statuses, np.uint8)
    # Evicted, damaged or converted meanwhile: the others go on their own.
    starts = [None] * len(rows) if position is None else position + counts.cumsum() - counts
    single = [
        _convert_run(namespace, keys, parents, row[None], tokens, codec, group, start)
        for row, start in zip(rows, starts, strict=True)
    ]
    return np.concatenate(single)
