"""Namespace: the batch operations of one identity and shard.

Invariants
  - arguments are checked before anything changes: a call that raises has stored, deleted and read
    nothing;
  - a block counts as stored (OK) once it is captured; PRESENT ones were there before;
  - the work per block is array arithmetic and a handful of native calls, however many blocks a
    batch has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashkv import checks, limits, records
from flashkv.codec import CODECS, ENCODE_BLOCK, ENCODE_RECORD, FIDELITIES, EncodeJob
from flashkv.conversion import convert, fidelity_number
from flashkv.errors import BatchResult, BlockStatus, KeyFormatError, MemoryViewError, OptionsError
from flashkv.estimate import LoadPlan, flash_bytes, plan_load
from flashkv.geometry import KVGeometry, MemoryView
from flashkv.identity import CHAIN_TOKENS, Identity, Shard, keyspace, token_keys
from flashkv.index import NONE, Keys
from flashkv.layout import Selection, packed_view
from flashkv.leases import Lease
from flashkv.memory import DEFAULT_VIEW, BlockMemory, block_memory, token_counts
from flashkv.options import check_codec
from flashkv.profiles import step_factors
from flashkv.progress import LayerProgress, following
from flashkv.segment_reader import ReadRequest
from flashkv.segment_writer import PutRows

if TYPE_CHECKING:
    from flashkv.store import Store

KeyBatch = Sequence[bytes] | NDArray[np.uint8]


@dataclass(frozen=True)
class Match:
    """How many leading keys are present, and the lease that holds them, if one was asked for and
    granted.
    """

    count: int
    lease: Lease | None = None


@dataclass(frozen=True)
class _Wanted:
    """What of each block a get wants.

    lengths: uint16[N], tokens that they must have; worst: the least exact FKV_FIDELITY_*.
    """

    group: int
    first_token: int
    token_count: int  # 0: to the block's end
    lengths: NDArray[np.uint16] | None
    worst: int | None
    whole: bool  # all of each block


class Namespace:
    """Blocks of one identity (and shard). Made by Store.namespace(); safe for all threads."""

    def __init__(
        self, store: Store, identity: Identity, shard: Shard, namespace_id: int, digest: bytes
    ) -> None:
        assert identity.geometry is not None
        self.identity = identity
        self.shard = shard
        self.digest = digest
        self.geometry: KVGeometry = identity.geometry.slice(shard)
        self.identity_json = identity.to_json()
        self._store = store
        self._shard_bytes = shard.encode()
        self._id = namespace_id
        self._space = keyspace(digest, shard, namespace_id, store.digest_bytes)
        self._has = store.index.contains_one_of(self._space)

    # ---- looking ----

    def contains(self, keys: KeyBatch) -> NDArray[np.bool_]:
        """Which keys are present.

        Bool[N]. A promise only under a lease: eviction may come between.
        """
        self._store.check_open()
        packed = Keys.pack(keys)
        self._store.counters.lookups += len(packed)
        return self._store.index.contains(self._space, packed)

    def contains_one(self, key: bytes) -> bool:
        """Whether one key is present; for engines that ask key by key."""
        self._store.check_open()
        return self._has(key)

    def lengths(self, keys: KeyBatch) -> NDArray[np.uint16]:
        """Tokens of each block as it is stored; 0: not present. To give memory of the right size.

        Uint16[N]. As contains(), a promise only under a lease.
        """
        self._store.check_open()
        places = self._store.index.lookup(Keys.pack(keys).digests(self._space))
        tokens: NDArray[np.uint16] = np.where(places["record"] == NONE, 0, places["tokens"])
        return tokens.astype(np.uint16)

    def places(self, keys: Keys) -> NDArray[Any]:
        """Places of blocks as the index has them, not pinned: fkv_place[N]."""
        self._store.check_open()
        return self._store.index.lookup(keys.digests(self._space))

    def match(
        self, keys: KeyBatch, *, lease_ms: int | None = None, min_fidelity: str | None = None
    ) -> Match:
        """How many leading keys are present.

        min_fidelity: "exact", "bounded-1" ... "cold": what is stored less exactly doesn't count.
        A lease doesn't keep convert() from making it so: give get() the same.

        lease_ms: hold them for so long, or until the lease is released; Match.lease is None where
        nothing matched or a limit on leases was reached. Raises OptionsError for a time beyond
        Options.max_lease_ms.
        """
        self._store.check_open()
        longest = self._store.options.max_lease_ms
        if lease_ms is not None:
            lease_ms = checks.whole(OptionsError, "lease_ms", lease_ms, 1, longest)
        packed = Keys.pack(keys)
        self._store.counters.lookups += len(packed)
        if min_fidelity is not None:
            places = self.places(packed)
            worst = fidelity_number("min_fidelity", min_fidelity)
            good = (places["record"] != NONE) & (places["fidelity"] <= worst)
            packed = Keys.pack([packed[row] for row in range(int(good.cumprod().sum()))])
            if not len(packed):
                return Match(0)
        if lease_ms is None:
            return Match(self._store.index.match(self._space, packed)[0])
        most = self._store.segments_max
        return Match(*self._store.leases.match(self._space, packed, lease_ms, most))

    def estimate(self, keys: KeyBatch) -> float:
        """Expected milliseconds of a get of those keys that are present, by recent gets of this
        handle; 0.0: none is.
        """
        places = self.places(Keys.pack(keys))
        size = flash_bytes(places[places["record"] != NONE]).sum()
        return 1e3 * float(self._store.load_model.seconds(np.array([size]))[0])

    def plan(self, keys: KeyBatch, prefill_tokens_per_s: float) -> LoadPlan:
        """What to load of a prefix's leading keys that are present, and what to compute meanwhile.

        prefill_tokens_per_s: what the engine computes of this prompt. Raises OptionsError.
        """
        speed = checks.positive(OptionsError, "prefill_tokens_per_s", prefill_tokens_per_s)
        places = self.places(Keys.pack(keys))
        count = int((places["record"] != NONE).cumprod().sum())
        return plan_load(self._store.load_model, places[:count], speed)

    # ---- putting ----

    def put(
        self,
        keys: KeyBatch,
        data: Any,
        *,
        view: MemoryView | None = None,
        group: int | str = 0,
        tokens: Any = None,
        parents: KeyBatch | None = None,
        position: int | None = None,
        replace: bool = False,
        codec: str | None = None,
    ) -> BatchResult:
        """Stores blocks; returns once they are captured: the source is free, and this process sees
        them.

        keys      N keys of 1 to 255 bytes: bytes, or uint8[N, length]. A key belongs to one group:
                  keys are one space for all groups.
        data      the blocks' memory, see flashkv.memory.block_memory; view: its axes, default
                  [layer, plane, head, token, dim].
        tokens    tokens of each block where not all are full: an int, or int[N].
        parents   key of the block before each (empty for none); position: of the first block's
                  first token.
        replace   store blocks whose keys are present too, in place of what was there. Else they
                  are PRESENT and skipped, whatever group and length the stored block has; but not
                  where it is stored less exactly than the codec would.
        codec     another one than the store's option for these blocks.
        Statuses: OK, PRESENT, DUPLICATE, BLOCK_TOO_LARGE, NO_SPACE, BUSY. Raises KeyFormatError,
        MemoryViewError, ReadOnlyStoreError, ClosedError.
        """
        store = self._store
        store.check_writable()
        packed = Keys.pack(keys)
        packed_parents = _parents(parents, len(packed))
        codec = store.codec_choice.current() if codec is None else check_codec(codec)
        if position is not None:
            position = checks.whole(MemoryViewError, "position", position, 0, (1 << 62) - 1)
        number = self.geometry.group_index(group)
        memory = block_memory(
            data, len(packed), self.geometry, group=number, view=view, block_tokens=_room(tokens)
        )
        counts = token_counts(tokens, len(packed), memory.block_tokens)
        if not len(packed):
            return BatchResult(np.zeros(0, np.uint8))
        sizes = counts.astype(np.int64) * self.geometry.token_bytes(number)
        digests = packed.digests(self._space)
        with store.gate, store.writer_lock:
            store.check_writable()
            worst = None if replace else FIDELITIES.get(codec, 0)
            statuses = self._skip(digests, packed, sizes, worst)
            plan = records.plan(
                statuses == BlockStatus.OK,
                counts,
                sizes,
                position,
                store.record_limits(self.geometry, number),
            )
            if len(plan):
                job = self._job(packed, packed_parents, memory, counts, plan, number, codec)
                self._store_records(job, plan, digests, statuses)
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

    def _job(
        self,
        keys: Keys,
        parents: Keys | None,
        memory: BlockMemory,
        counts: NDArray[np.uint16],
        plan: records.RecordPlan,
        group: int,
        codec: str,
    ) -> EncodeJob:
        rows = plan.rows
        blocks = np.zeros(len(rows), ENCODE_BLOCK)
        starts, lengths = keys.starts_lengths()
        blocks["key_offset"], blocks["key_bytes"] = starts[rows], lengths[rows]
        if parents is not None:
            starts, lengths = parents.starts_lengths()
            blocks["parent_offset"], blocks["parent_bytes"] = starts[rows], lengths[rows]
        blocks["source"] = rows
        blocks["tokens"] = counts[rows]
        table = np.zeros(len(plan), ENCODE_RECORD)
        table["first_block"] = plan.first
        table["block_count"] = plan.count
        table["start_token"] = plan.start_token
        table["codec"] = CODECS[codec]
        table["fidelity"] = FIDELITIES.get(codec, 0)
        factors, profile = step_factors(
            codec,
            self._store.options.profile,
            self.shard.layers[0] if self.shard.layers else 0,
            max(plane.layers for plane in self.geometry.groups[group].planes),
        )
        return EncodeJob(
            geometry=self.geometry.native(group),
            view=memory.view.pointer,
            namespace_digest=self.digest,
            shard=self._shard_bytes,
            keys=keys.blob,
            parents=parents.blob if parents is not None else None,
            pointers=memory.pointers,
            blocks=blocks,
            records=table,
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
        self._store.register(self, job.profile)
        put_rows = PutRows(
            digests=digests[plan.rows],
            namespace_digest=self.digest,
            namespace_json=self.identity_json,
            namespace_id=self._id,
        )
        of_record = self._store.writer.put(job, put_rows)
        statuses[plan.rows] = np.repeat(of_record, plan.count)

    # ---- getting ----

    def get(
        self,
        keys: KeyBatch,
        out: Any,
        *,
        view: MemoryView | None = None,
        group: int | str = 0,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        token_range: tuple[int, int] | None = None,
        tokens: Any = None,
        min_fidelity: str | None = None,
        progress: LayerProgress | None = None,
    ) -> BatchResult:
        """Reads blocks into the caller's memory; only the pages that are needed.

        out          N blocks of memory, as data of put; where a status isn't OK its content is
                     undefined, but see progress.
        layers, heads  numbers of those that are wanted; the memory then holds just these, in this
                       order.
        token_range  (start, stop) within each block; the memory's token axis begins at start.
        tokens       tokens that each block must have, as in put: an int, or int[N]; a block of
                     another length is a MISS. None: as many as it has, if there is room for them.
        min_fidelity  "exact", "bounded-1" ... "cold": what is stored less exactly is a MISS.
        progress     lower layers are read first, and it tells when each is in place; a block that
                     isn't OK has all layers below its failed_layers. A new one for each get.
                     Memory of a GPU gets all layers at the end.
        Statuses: OK, MISS, IO_ERROR, BUSY. Raises KeyFormatError, MemoryViewError,
        ReadOnlyDestinationError, OptionsError, ClosedError.
        """
        with following(progress):
            self._store.check_open()
            packed = Keys.pack(keys)
            number = self.geometry.group_index(group)
            if progress is not None:
                progress.check_group(self.geometry, number)
            first, count = _token_range(token_range)
            memory = block_memory(
                out,
                len(packed),
                self.geometry,
                group=number,
                view=view,
                block_tokens=count or _room(tokens),
                selection=Selection(_numbers("layers", layers), _numbers("heads", heads)),
                destination=True,
                partial=tokens is not None,
            )
            worst = None if min_fidelity is None else fidelity_number("min_fidelity", min_fidelity)
            wanted = _Wanted(
                group=number,
                first_token=first,
                token_count=count,
                lengths=_lengths(tokens, count, len(packed), memory.block_tokens),
                worst=worst,
                whole=layers is None and heads is None and token_range is None,
            )
            return self._read(packed, memory, wanted, progress)

    def _read(
        self,
        keys: Keys,
        memory: BlockMemory,
        wanted: _Wanted,
        progress: LayerProgress | None,
    ) -> BatchResult:
        """get() of checked arguments."""
        store = self._store
        if not len(keys):
            return BatchResult(
                np.zeros(0, np.uint8), None if progress is None else np.zeros(0, np.int32)
            )
        first, count = wanted.first_token, wanted.token_count
        if count > memory.block_tokens:
            raise MemoryViewError(
                "the destination has no room for the token_range",
                value=f"{memory.block_tokens} tokens a block",
                limit=f"at least {count}",
            )
        digests = keys.digests(self._space)
        with store.gate:
            places = store.index.lookup(digests, pin=True)
            if wanted.worst is not None:
                self._drop_places(places, places["fidelity"] > wanted.worst)
            if wanted.lengths is not None:
                self._drop_places(places, places["tokens"] != wanted.lengths)
            self._refuse(places, keys, digests, memory.block_tokens, wanted)
            request = ReadRequest(
                geometry=self.geometry.native(wanted.group),
                view=memory.view.pointer,
                namespace_digest=self.digest,
                shard=self._shard_bytes,
                keys=keys,
                places=places,
                pointers=memory.pointers,
                first_token=first,
                token_count=count,
                progress=progress if memory.in_place else None,
            )
            began = time.perf_counter()
            statuses = store.reader.read(request, digests)
        ok = statuses == BlockStatus.OK
        memory.finish(ok)
        taken = time.perf_counter() - began
        tokens = np.full(int(ok.sum()), count) if count else places["tokens"][ok]
        store.counters.note_get(statuses, tokens, memory.view.group.token_bytes)
        if wanted.whole and ok.all():
            store.load_model.note(float(flash_bytes(places).sum()), taken)
        if progress is None:
            return BatchResult(statuses)
        # Of what failed, a copy that finish() spreads has nothing.
        failed = request.failed_layers
        if failed is None:
            failed = np.zeros(len(ok), np.int32)
        if not ok.all():
            progress.fail(int(failed[~ok].min()))
        return BatchResult(statuses, np.where(ok, -1, failed).astype(np.int32))

    def _refuse(
        self,
        places: NDArray[Any],
        keys: Keys,
        digests: NDArray[np.uint8],
        room: int,
        wanted: _Wanted,
    ) -> None:
        """Places that can't be read into this memory become absent, or are an error of the
        caller's.
        """
        group, first, count = wanted.group, wanted.first_token, wanted.token_count
        found = places["record"] != NONE
        tokens = places["tokens"].astype(np.int64)
        taken = np.full(len(places), count) if count else tokens - first
        other = found & ((places["group"] != group) | (taken < 1) | (first + taken > tokens))
        small = found & ~other & (taken > room)
        for row in np.flatnonzero(small).tolist():
            if not self._has_last_token(row, keys, digests, group):
                continue
            self._store.index.unpin(np.ascontiguousarray(places["segment"]))
            raise MemoryViewError(
                f"block {row} of the batch doesn't fit the destination",
                value=f"{int(taken[row])} tokens",
                limit=f"{room} tokens a block",
                advice="give memory for the block's tokens, or a token_range",
            )
        self._drop_places(places, other | small)

    def _has_last_token(self, row: int, keys: Keys, digests: NDArray[np.uint8], group: int) -> bool:
        """Whether a block's record bears out how long the index says it is.

        A directory that says too much is damage, not an error of the caller's: the reader counts
        and drops it.
        """
        view = packed_view(self.geometry, group, DEFAULT_VIEW, 1)
        memory = np.empty(int(view.region_bytes[0]), np.uint8)
        place = self._store.index.lookup(digests[row : row + 1], pin=True)
        request = ReadRequest(
            geometry=self.geometry.native(group),
            view=view.pointer,
            namespace_digest=self.digest,
            shard=self._shard_bytes,
            keys=Keys.pack([keys[row]]),
            places=place,
            pointers=np.array([[memory.ctypes.data]], np.uint64),
            first_token=max(int(place["tokens"][0]) - 1, 0),
            token_count=1,
        )
        statuses = self._store.reader.read(request, digests[row : row + 1])
        return bool(statuses[0] != BlockStatus.MISS)

    def _drop_places(self, places: NDArray[Any], rows: NDArray[np.bool_]) -> None:
        """Makes these rows absent, and gives back their pins."""
        if rows.any():
            self._store.index.unpin(np.ascontiguousarray(places["segment"][rows]))
            places["record"][rows] = NONE
            places["segment"][rows] = NONE

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else writes to the store meanwhile."""
        with self._store.gate, self._store.writer_lock:
            yield

    def convert(
        self,
        keys: KeyBatch,
        codec: str,
        *,
        group: int | str = 0,
        parents: KeyBatch | None = None,
        position: int | None = None,
    ) -> BatchResult:
        """Stores exact blocks anew in a lossy codec; what is lossy already stays as it is.

        parents, position  as in put: records know them anew. Where neither is given, each record
                           counts as a sequence's beginning, whose first tokens stay exact.
        Statuses: as put has them; PRESENT: lossy already, or of types that no codec makes lossy;
        MISS. Raises OptionsError for a codec
        that is not lossy, and what put and get do.
        """
        return convert(self, keys, codec, group=group, parents=parents, position=position)

    # ---- ending ----

    def delete(self, keys: KeyBatch) -> BatchResult:
        """Deletes blocks, durably.

        OK or MISS of each. Raises KeyFormatError, ReadOnlyStoreError, StoreError.
        """
        store = self._store
        store.check_writable()
        packed = Keys.pack(keys)
        digests = packed.digests(self._space)
        with store.gate, store.writer_lock:
            store.check_writable()
            found = store.index.contains_digests(digests)
            dropped = store.index.remove(digests)
            store.kill(dropped)
        store.counters.deleted_blocks += len(dropped)
        return BatchResult(np.where(found, BlockStatus.OK, BlockStatus.MISS).astype(np.uint8))

    def rotate(self) -> int:
        """Retires all that was stored under this identity, in every shard, durably; returns the
        blocks dropped.

        For weights that were updated in place: what is stored from now on counts again.
        """
        return self._store.retire(self)

    def token_keys(
        self,
        token_ids: Sequence[int] | NDArray[Any],
        *,
        block_tokens: int = CHAIN_TOKENS,
        salt: bytes = b"",
        extra: bytes = b"",
        parent: bytes = b"",
    ) -> NDArray[np.uint8]:
        """Keys of a token sequence's blocks, flashkv's own chain.

        Uint8[ceil(tokens / block_tokens), 32]. parent: key of the block before, to go on from.
        """
        return token_keys(self.digest, token_ids, block_tokens, salt, extra, parent)

    def __repr__(self) -> str:
        return f"Namespace({self.identity.model!r}, {self.digest.hex()[:16]})"


def _room(tokens: Any) -> int | None:
    """Tokens that a block has room for, where only the counts tell."""
    if tokens is None:
        return None
    counts = checks.array(MemoryViewError, "token counts", tokens)
    return int(counts.max()) if counts.size and counts.dtype.kind in "iu" else None


def _lengths(tokens: Any, count: int, blocks: int, room: int) -> NDArray[np.uint16] | None:
    """Tokens that each block must have, where the caller says: uint16[blocks]."""
    if tokens is None:
        return None
    return token_counts(tokens, blocks, limits.BLOCK_TOKENS_MAX if count else room)


def _parents(parents: KeyBatch | None, count: int) -> Keys | None:
    """The blocks' parents, one each. Raises KeyFormatError."""
    if parents is None:
        return None
    packed = Keys.pack(parents, name="parents", allow_empty=True)
    if len(packed) != count:
        raise KeyFormatError("parents must name one key a block", value=len(packed), limit=count)
    return packed


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
