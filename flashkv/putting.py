"""Putting: from checked arguments of a put to records in the writer's hands.

Invariants
  - which blocks are new is asked and answered under the writer's lock: of two puts of a key, one
    stores;
  - a block counts as stored (OK) once the writer has captured it; PRESENT ones were there before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flashkv import records
from flashkv.codec import CODECS, ENCODE_BLOCK, ENCODE_RECORD, FIDELITIES, EncodeJob
from flashkv.errors import BatchResult, BlockStatus
from flashkv.index import NONE, Keys
from flashkv.memory import BlockMemory
from flashkv.profiles import step_factors
from flashkv.segment_writer import PutRows

if TYPE_CHECKING:
    from flashkv.namespace import Namespace
    from flashkv.store import Store


@dataclass(frozen=True)
class Blocks:
    """What a put stores.

    counts: uint16[N], tokens of each block; group: its number; position: of the first block's first
    token, None: unknown.
    """

    keys: Keys
    parents: Keys | None
    memory: BlockMemory
    counts: NDArray[np.uint16]
    group: int
    position: int | None


class Putter:
    """Stores blocks of one namespace."""

    def __init__(self, store: Store, namespace: Namespace, namespace_id: int, space: bytes) -> None:
        self._store = store
        self._digest = namespace.digest
        self._identity_json = namespace.identity_json
        self._geometry = namespace.geometry
        self._layers = namespace.shard.layers
        self._shard = namespace.shard.encode()
        self._id = namespace_id
        self._space = space

    def put(self, blocks: Blocks, codec: str, worst_fidelity: int | None) -> BatchResult:
        """BlockStatus of each block.

        worst_fidelity: what is stored less exactly is superseded; None: whatever is. Raises
        ReadOnlyStoreError, ClosedError.
        """
        store, counts = self._store, blocks.counts
        sizes = counts.astype(np.int64) * self._geometry.token_bytes(blocks.group)
        digests = blocks.keys.digests(self._space)
        with store.gate, store.writer_lock:
            store.check_writable()
            statuses = self._skip(digests, blocks.keys, sizes, worst_fidelity)
            plan = records.plan(
                statuses == BlockStatus.OK,
                counts,
                sizes,
                blocks.position,
                store.record_limits(self._geometry, blocks.group),
            )
            if len(plan):
                self._store_records(self._job(blocks, plan, codec), plan, digests, statuses)
        store.counters.note_put(statuses, sizes)
        return BatchResult(statuses)

    def _skip(
        self,
        digests: NDArray[np.uint8],
        keys: Keys,
        sizes: NDArray[np.int64],
        worst_fidelity: int | None,
    ) -> NDArray[np.uint8]:
        """BlockStatus of each block before any work; OK: to be stored.

        worst_fidelity: what is stored less exactly is superseded; None: whatever is.
        """
        statuses = np.zeros(len(keys), np.uint8)  # OK
        statuses[sizes > self._store.block_bytes_max] = BlockStatus.BLOCK_TOO_LARGE
        if worst_fidelity is not None:
            places = self._store.index.lookup(digests)
            good = (places["record"] != NONE) & (places["fidelity"] <= worst_fidelity)
            statuses[good] = BlockStatus.PRESENT
        if len(keys) > 1:
            whole = np.ascontiguousarray(digests).view("V16").ravel()
            _, first = np.unique(whole, return_index=True)
            if len(first) < len(keys):
                again = np.ones(len(keys), np.bool_)
                again[first] = False
                statuses[again] = self._repeated(keys, np.flatnonzero(again), statuses)
        return statuses

    def _repeated(
        self, keys: Keys, rows: NDArray[np.int64], statuses: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """DUPLICATE for a key that came before in the batch.

        Two keys under one digest: the later wins, as ever.
        """
        seen: dict[bytes, int] = {}
        for row in range(len(keys)):
            seen.setdefault(keys[row], row)
        return np.array(
            [BlockStatus.DUPLICATE if seen[keys[row]] != row else statuses[row] for row in rows],
            np.uint8,
        )

    def _job(self, blocks: Blocks, plan: records.RecordPlan, codec: str) -> EncodeJob:
        keys, parents, memory, rows = blocks.keys, blocks.parents, blocks.memory, plan.rows
        table = np.zeros(len(rows), ENCODE_BLOCK)
        starts, lengths = keys.starts_lengths()
        table["key_offset"], table["key_bytes"] = starts[rows], lengths[rows]
        if parents is not None:
            starts, lengths = parents.starts_lengths()
            table["parent_offset"], table["parent_bytes"] = starts[rows], lengths[rows]
        table["source"] = rows
        table["tokens"] = blocks.counts[rows]
        of_records = np.zeros(len(plan), ENCODE_RECORD)
        of_records["first_block"] = plan.first
        of_records["block_count"] = plan.count
        of_records["start_token"] = plan.start_token
        of_records["codec"] = CODECS[codec]
        of_records["fidelity"] = FIDELITIES.get(codec, 0)
        factors, profile = step_factors(
            codec,
            self._store.options.profile,
            self._layers[0] if self._layers else 0,
            max(plane.layers for plane in self._geometry.groups[blocks.group].planes),
        )
        return EncodeJob(
            geometry=self._geometry.native(blocks.group),
            view=memory.view.pointer,
            namespace_digest=self._digest,
            shard=self._shard,
            keys=keys.blob,
            parents=parents.blob if parents is not None else None,
            pointers=memory.pointers,
            blocks=table,
            records=of_records,
            created_ms=self._store.clock_ms(),
            factors=factors,
            profile=profile,
            keepalive=(memory, keys, parents),
        )

    def _store_records(
        self,
        job: EncodeJob,
        plan: records.RecordPlan,
        digests: NDArray[np.uint8],
        statuses: NDArray[np.uint8],
    ) -> None:
        """Hands the job to the writer and spreads the records' statuses over their blocks."""
        self._store.registry.register(self._digest, self._identity_json, job.profile)
        put_rows = PutRows(
            digests=digests[plan.rows],
            namespace_digest=self._digest,
            namespace_json=self._identity_json,
            namespace_id=self._id,
        )
        of_record = self._store.writer.put(job, put_rows)
        statuses[plan.rows] = np.repeat(of_record, plan.count)
