"""Namespace: the batch operations of one identity and shard.

Invariants
  - arguments are checked before anything changes: a call that raises has stored, deleted and read
    nothing;
  - a block counts as stored (OK) once it is captured; PRESENT ones were there before;
  - the work per block is array arithmetic and a handful of native calls, however many blocks a
    batch has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashkv import checks
from flashkv.asking import REALTIME, Asked, GetOptions, ask, deadline
from flashkv.codec import FIDELITIES, fidelity_number
from flashkv.conversion import convert
from flashkv.errors import BatchResult, BlockStatus, KeyFormatError, MemoryViewError, OptionsError
from flashkv.estimate import LoadPlan, flash_bytes, plan_load
from flashkv.geometry import KVGeometry, MemoryView
from flashkv.getting import Getter, PendingGet
from flashkv.identity import CHAIN_TOKENS, Identity, Shard, keyspace, token_keys
from flashkv.index import NONE, Keys
from flashkv.leases import Lease
from flashkv.memory import block_memory, room_for, token_counts
from flashkv.options import check_codec
from flashkv.progress import LayerProgress, following
from flashkv.putting import Blocks, Putter

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
        self._space = keyspace(digest, shard, namespace_id, store.digest_bytes)
        self._putter = Putter(store, self, namespace_id, self._space)
        self._getter = Getter(store, self, self._space)
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
            data, len(packed), self.geometry, group=number, view=view, block_tokens=room_for(tokens)
        )
        counts = token_counts(tokens, len(packed), memory.block_tokens)
        if not len(packed):
            return BatchResult(np.zeros(0, np.uint8))
        return self._putter.put(
            Blocks(packed, packed_parents, memory, counts, number, position),
            codec,
            None if replace else FIDELITIES.get(codec, 0),
        )

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
        priority: str = REALTIME,
        deadline_ms: float | None = None,
        bounce: bool = False,
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
        priority     "realtime", or "background": behind all that is realtime, with part of the
                     device's queue and of the buffers.
        deadline_ms  from now on: blocks that aren't in place by then are TIMED_OUT. The device may
                     still write to their memory: BatchResult.held tells until when.
        bounce       the device never writes to the memory itself, so that it is never held; costs
                     a copy.
        Statuses: OK, MISS, IO_ERROR, BUSY, TIMED_OUT. Raises KeyFormatError, MemoryViewError,
        ReadOnlyDestinationError, OptionsError, ClosedError.
        """
        end = deadline(deadline_ms)
        with following(progress):
            self._store.check_open()
            asked = self.ask(
                keys,
                out,
                GetOptions(
                    view, group, layers, heads, token_range, tokens, min_fidelity, progress,
                    priority, bounce,
                ),
            )  # fmt: skip
            return self._getter.read(asked) if end is None else self._getter.read_until(asked, end)

    def ask(self, keys: KeyBatch, out: Any, options: GetOptions) -> Asked:
        """What get() would read, its arguments checked. Raises what get() does."""
        return ask(self.geometry, Keys.pack(keys), out, options)

    def begin(self, asked: Asked, wait_ms: float) -> PendingGet | None:
        """Begins a get, which goes on by itself; None where blocks are still on their way to the
        device after wait_ms: ask again. Raises what get() does.
        """
        return self._getter.begin(asked, wait_ms)

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
        return self._store.registry.retire(self.digest)

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


def _parents(parents: KeyBatch | None, count: int) -> Keys | None:
    """The blocks' parents, one each. Raises KeyFormatError."""
    if parents is None:
        return None
    packed = Keys.pack(parents, name="parents", allow_empty=True)
    if len(packed) != count:
        raise KeyFormatError("parents must name one key a block", value=len(packed), limit=count)
    return packed
