"""Which record holds a block: batches of digests and keys over the native hash table.

Invariants
  - everything is a batch but contains_one, which engines call key by key;
  - the table's memory lives as long as any object made from it: a look-up can't outlive its index;
  - places that were looked up with a pin hold their segments until unpin().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import checks, limits
from flashkv.errors import KeyFormatError, OutOfMemoryError, check_native
from flashkv.native import dtype_of, ffi, lib, pointer

PLACE: Final = dtype_of("fkv_place")
DROPPED: Final = dtype_of("fkv_dropped")
USAGE: Final = dtype_of("fkv_segment_usage")
NONE: Final = 0xFFFFFFFF
"""`record` and `segment` of a place that is none."""


@dataclass(frozen=True, eq=False)
class Keys:
    """N keys, back to back. blob: uint8[total]; ends: uint64[N], where each key ends."""

    blob: NDArray[np.uint8]
    ends: NDArray[np.uint64]

    @classmethod
    def pack(
        cls,
        keys: Sequence[bytes] | NDArray[np.uint8] | Keys,
        *,
        name: str = "keys",
        allow_empty: bool = False,
    ) -> Keys:
        """Packs bytes of 1 to 255 bytes each, or uint8[N, key_bytes]. Raises KeyFormatError.

        allow_empty: a key of no bytes stands for none (parents).
        """
        if isinstance(keys, Keys):
            return keys
        _check_sequence(keys, name)
        if len(keys) > limits.BATCH_BLOCKS_MAX:
            raise KeyFormatError(
                f"too many {name} in one batch",
                value=len(keys),
                limit=limits.BATCH_BLOCKS_MAX,
                advice="split the batch",
            )
        if isinstance(keys, np.ndarray):
            return cls._pack_array(keys)
        try:
            lengths = list(map(len, keys))
            blob = b"".join(keys)
        except TypeError:
            raise KeyFormatError(
                f"key {_first_not_bytes(keys)} is not bytes",
                value=_type_name(keys),
            ) from None
        least = 0 if allow_empty else 1
        return cls(np.frombuffer(blob, np.uint8), _checked_ends(lengths, len(blob), keys, least))

    @classmethod
    def _pack_array(cls, keys: NDArray[np.uint8]) -> Keys:
        if keys.ndim != 2 or keys.dtype != np.uint8:
            raise KeyFormatError(
                "an array of keys must be uint8[N, key_bytes]",
                value=f"{keys.dtype}{list(keys.shape)}",
            )
        count, length = keys.shape
        if count and not 1 <= length <= limits.KEY_BYTES_MAX:
            raise _length_error(0, length)
        ends = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(length)
        return cls(np.ascontiguousarray(keys).reshape(-1), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, position: int) -> bytes:
        start = int(self.ends[position - 1]) if position else 0
        return self.blob[start : int(self.ends[position])].tobytes()

    def starts_lengths(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """(where each key begins in the blob, its bytes): uint64[N] each."""
        starts = np.empty_like(self.ends)
        starts[:1] = 0
        starts[1:] = self.ends[:-1]
        return starts, self.ends - starts

    def digests(self, space: Any) -> NDArray[np.uint8]:
        """uint8[N, 16]: digests in a keyspace (fkv_keyspace *)."""
        digests = np.empty((len(self), limits.DIGEST_BYTES), np.uint8)
        lib.fkv_key_digests(
            space,
            pointer(self.blob, "uint8_t *"),
            pointer(self.ends, "uint64_t *"),
            len(self),
            pointer(digests, "uint8_t *"),
        )
        return digests


def _check_sequence(keys: Any, name: str) -> None:
    """Order matters, so a set is none."""
    if isinstance(keys, (bytes, bytearray, memoryview, str)):
        raise KeyFormatError(
            f"{name} must be a sequence of bytes",
            value=f"one {type(keys).__name__}",
            advice="Put a single key into a list",
        )
    if not isinstance(keys, (list, tuple, np.ndarray, Sequence)):
        raise KeyFormatError(f"{name} must be a sequence of bytes", value=checks.shown(keys))


def _type_name(keys: Any) -> str:
    position = _first_not_bytes(keys)
    try:
        return type(keys[position]).__name__
    except (TypeError, LookupError):
        return type(keys).__name__


def _first_not_bytes(keys: Any) -> int:
    try:
        wrong = (i for i, key in enumerate(keys) if not isinstance(key, (bytes, bytearray)))
        return next(wrong, 0)
    except TypeError:
        return 0


def _length_error(position: int, length: int) -> KeyFormatError:
    return KeyFormatError(
        f"key {position} has the wrong length",
        value=f"{length} bytes",
        limit=f"1 to {limits.KEY_BYTES_MAX} bytes",
        advice="" if length == 0 else "Use a hash of longer keys",
    )


def _checked_ends(lengths: list[int], total: int, keys: Any, least: int) -> NDArray[np.uint64]:
    if lengths and not least <= min(lengths) <= max(lengths) <= limits.KEY_BYTES_MAX:
        position = next(
            i for i, size in enumerate(lengths) if not least <= size <= limits.KEY_BYTES_MAX
        )
        raise _length_error(position, lengths[position])
    ends = np.fromiter(accumulate(lengths), np.uint64, len(lengths))
    if len(ends) and int(ends[-1]) != total:  # memoryviews of wider items
        raise KeyFormatError(f"key {_first_not_bytes(keys)} is not bytes")
    return ends


@dataclass(frozen=True)
class IndexTotals:
    """live_pages: pages of records that have a live block."""

    blocks: int
    records: int
    memory_bytes: int
    live_pages: int


class Index:
    """Digest of a block's key -> place of the block, and what is alive in each segment.

    Safe to call from several threads. Digests: uint8[N, 16].
    """

    def __init__(self) -> None:
        native = lib.fkv_index_new()
        if native == ffi.NULL:
            raise OutOfMemoryError("no memory for an index")
        self._native: Any = ffi.gc(native, lib.fkv_index_free)

    # ---- coming and going ----

    def begin_segment(self, segment: int, epoch: int) -> None:
        """Sets the epoch of the next records. Raises BusyError while there are some, or pins."""
        status = lib.fkv_index_begin_segment(self._native, segment, epoch)
        check_native(status, f"segment {segment} can't begin epoch {epoch}")

    def add(
        self,
        segment: int,
        records: NDArray[Any],
        blocks: NDArray[Any],
        namespace_ids: NDArray[np.uint32],
        kills: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Adds records (fkv_directory_record[R]) and, in their order, their blocks
        (fkv_directory_block[B]).

        namespace_ids: of each namespace_ordinal. kills: fkv_manifest_kill[] by page, then ordinal.
        Of two blocks with one digest the higher sequence stays. Returns the losers: DROPPED[].
        """
        dropped = np.zeros(len(blocks), DROPPED)
        count = ffi.new("uint64_t *")
        status = lib.fkv_index_add(
            self._native,
            segment,
            pointer(np.ascontiguousarray(records), "fkv_directory_record *"),
            len(records),
            pointer(np.ascontiguousarray(blocks), "fkv_directory_block *"),
            len(blocks),
            pointer(np.ascontiguousarray(namespace_ids, np.uint32), "uint32_t *"),
            pointer(None if kills is None else np.ascontiguousarray(kills), "fkv_manifest_kill *"),
            0 if kills is None else len(kills),
            pointer(dropped, "fkv_dropped *"),
            count,
        )
        check_native(status, f"records of segment {segment} can't be added to the index")
        return dropped[: count[0]]

    def remove(
        self, digests: NDArray[np.uint8], sequences: NDArray[np.uint64] | None = None
    ) -> NDArray[Any]:
        """Takes blocks out; with `sequences` only where still in that record. Returns DROPPED[]."""
        dropped = np.zeros(len(digests), DROPPED)
        count = ffi.new("uint64_t *")
        lib.fkv_index_remove(
            self._native,
            pointer(digests, "uint8_t *"),
            pointer(sequences, "uint64_t *"),
            len(digests),
            pointer(dropped, "fkv_dropped *"),
            count,
        )
        return dropped[: count[0]]

    def drop_segment(self, segment: int) -> int:
        """Drops every block of a segment; returns how many."""
        return int(lib.fkv_index_drop_segment(self._native, segment))

    def drop_sequences(self, sequences: NDArray[np.uint64]) -> int:
        """Drops every block of the records with these sequences; returns how many."""
        wanted = np.ascontiguousarray(sequences, np.uint64)
        return int(
            lib.fkv_index_drop_sequences(self._native, pointer(wanted, "uint64_t *"), len(wanted))
        )

    def drop_namespace(self, namespace_id: int) -> int:
        """Drops every block of a namespace; returns how many."""
        return int(lib.fkv_index_drop_namespace(self._native, namespace_id))

    # ---- looking up ----

    def lookup(self, digests: NDArray[np.uint8], *, pin: bool = False) -> NDArray[Any]:
        """Places of blocks: PLACE[N]; record is NONE where there is none. pin: until unpin()."""
        places = np.empty(len(digests), PLACE)
        lib.fkv_index_lookup(
            self._native,
            pointer(digests, "uint8_t *"),
            len(digests),
            pin,
            pointer(places, "fkv_place *"),
        )
        return places

    def unpin(self, segments: NDArray[np.uint32]) -> None:
        """Gives back one pin of each segment in the array; NONE is skipped."""
        lib.fkv_index_unpin(self._native, pointer(segments, "uint32_t *"), len(segments))

    def contains(self, space: Any, keys: Keys) -> NDArray[np.bool_]:
        """bool[N]: which keys are present in a keyspace."""
        found = np.empty(len(keys), np.uint8)
        lib.fkv_index_contains(
            self._native,
            space,
            pointer(keys.blob, "uint8_t *"),
            pointer(keys.ends, "uint64_t *"),
            len(keys),
            pointer(found, "uint8_t *"),
        )
        return found.view(np.bool_)

    def contains_digests(self, digests: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """bool[N]: which digests are present."""
        present: NDArray[np.bool_] = self.lookup(digests)["record"] != NONE
        return present

    def contains_one_of(self, space: Any) -> Callable[[bytes], bool]:
        """A function that tells whether one key is present: everything but the key is bound once.

        It raises KeyFormatError where the key isn't 1 to 255 bytes.
        """
        native, call = self._native, lib.fkv_index_contains_one

        def contains_one(key: bytes) -> bool:
            if type(key) is not bytes:
                raise KeyFormatError("a key must be bytes", value=type(key).__name__)
            found: int = call(native, space, key, len(key))
            if found < 0:
                raise _length_error(0, len(key))
            return found == 1

        return contains_one

    def match(self, space: Any, keys: Keys, *, pin: bool = False) -> tuple[int, NDArray[np.uint32]]:
        """(leading keys present, segments that were pinned for them: each once)."""
        segments = np.empty(len(keys) if pin else 0, np.uint32)
        pinned = ffi.new("uint64_t *")
        count = lib.fkv_index_match(
            self._native,
            space,
            pointer(keys.blob, "uint8_t *"),
            pointer(keys.ends, "uint64_t *"),
            len(keys),
            pin,
            pointer(segments, "uint32_t *"),
            pinned,
        )
        return int(count), segments[: pinned[0]]

    # ---- figures ----

    def totals(self) -> IndexTotals:
        """Blocks, records, memory and live pages of the whole index."""
        totals = ffi.new("fkv_index_totals *")
        lib.fkv_index_totals_get(self._native, totals)
        return IndexTotals(totals.blocks, totals.records, totals.memory_bytes, totals.live_pages)

    def usage(self, segments: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """What is alive in each segment: USAGE[len(segments)]."""
        numbers = np.ascontiguousarray(segments, np.uint32)
        usage = np.zeros(len(numbers), USAGE)
        lib.fkv_index_usage(
            self._native,
            pointer(numbers, "uint32_t *"),
            len(numbers),
            pointer(usage, "fkv_segment_usage *"),
        )
        return usage

    def namespace_blocks(self, namespace_id: int) -> int:
        """Blocks of a namespace."""
        return int(lib.fkv_index_namespace_blocks(self._native, namespace_id))
