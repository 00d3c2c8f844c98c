"""A record's header as readable facts: keys, planes, streams, stripe table, checksums.

Invariants
  - only bytes that fkv_header_check accepted are taken apart; of others no more than the fixed
    fields is shown;
  - nothing here reads files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.codec import FIDELITIES
from flashkv.errors import native_ok
from flashkv.geometry import AXES, Role
from flashkv.identity import Shard
from flashkv.native import dtype_of, ffi, lib, pointer

HEADER: Final = dtype_of("fkv_record_header")
BLOCK_ROW: Final = dtype_of("fkv_block_row")
PLANE_ROW: Final = dtype_of("fkv_plane_row")
ORDER_ROW: Final = dtype_of("fkv_order_row")
STRIPE: Final = dtype_of("fkv_stripe")
STREAM_ROW: Final = struct.Struct("<BBH")  # mode, packed, full stripes; parameters follow

CODEC_NAMES: Final = {
    lib.FKV_CODEC_RAW: "raw",
    lib.FKV_CODEC_LOSSLESS: "lossless",
    lib.FKV_CODEC_FAST: "fast",
    lib.FKV_CODEC_ZSTD: "zstd",
    lib.FKV_CODEC_BOUNDED: "bounded",
    lib.FKV_CODEC_COLD: "cold",
}
KIND_NAMES: Final = {lib.FKV_KIND_DATA: "data", lib.FKV_KIND_NAMESPACE: "namespace"}
FIDELITY_NAMES: Final = {number: name for name, number in FIDELITIES.items()}
DTYPE_NAMES: Final = {
    lib.FKV_DTYPE_OPAQUE: "opaque",
    lib.FKV_DTYPE_BF16: "bfloat16",
    lib.FKV_DTYPE_FP16: "float16",
    lib.FKV_DTYPE_FP32: "float32",
    lib.FKV_DTYPE_BYTES: "one byte",
    lib.FKV_DTYPE_E4M3: "float8_e4m3fn",
    lib.FKV_DTYPE_E5M2: "float8_e5m2",
}
MODE_NAMES: Final = {
    lib.FKV_STREAM_PLAIN: "plain",
    lib.FKV_STREAM_FXP_BF16: "exponent code, bfloat16",
    lib.FKV_STREAM_FXP_FP16: "exponent code, float16",
    lib.FKV_STREAM_PREFIX_BF16: "prefix code, bfloat16",
    lib.FKV_STREAM_PREFIX_FP16: "prefix code, float16",
    lib.FKV_STREAM_FXP_FP32: "exponent code, float32",
    lib.FKV_STREAM_FXP_FP32_SHORT: "exponent code, float32 of 16 bits",
    lib.FKV_STREAM_PREFIX_FP32: "prefix code, float32",
    lib.FKV_STREAM_PREFIX_FP32_SHORT: "prefix code, float32 of 16 bits",
    lib.FKV_STREAM_PREFIX_E4M3: "prefix code, float8_e4m3fn",
    lib.FKV_STREAM_PREFIX_E5M2: "prefix code, float8_e5m2",
    lib.FKV_STREAM_DELTA: "token delta",
    lib.FKV_STREAM_CHANNELS_BF16: "bounded by channel, bfloat16",
    lib.FKV_STREAM_CHANNELS_FP16: "bounded by channel, float16",
    lib.FKV_STREAM_CHANNELS_FP32: "bounded by channel, float32",
    lib.FKV_STREAM_TOKENS_BF16: "bounded by token, bfloat16",
    lib.FKV_STREAM_TOKENS_FP16: "bounded by token, float16",
    lib.FKV_STREAM_TOKENS_FP32: "bounded by token, float32",
}
TLV_NAMES: Final = {
    getattr(lib, f"FKV_TLV_{name}"): name.lower()
    for name in (
        "BLOCKS KEYS PLANES PAGE_CRCS STREAMS STRIPES ORDER INLINE NAMESPACE PROFILE CHUNKS".split()
    )
}
_ROLES: Final = {role.native: role.value for role in Role}


@dataclass(frozen=True)
class TlvFacts:
    """offset_bytes: of the payload, from the header's first byte."""

    name: str
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class BlockFacts:
    """One block of a record. first_token: in the record. live: None where it was not looked up."""

    ordinal: int
    key: bytes
    parent: bytes
    first_token: int
    tokens: int
    digest: bytes
    live: bool | None = None


@dataclass(frozen=True)
class PlaneFacts:
    """One plane of the record's geometry."""

    role: str
    dtype: str
    layers: int
    heads: int
    vector_bytes: int


@dataclass(frozen=True)
class StreamFacts:
    """One (layer, plane, head). parameters: of its code, by mode, unpacked: see docs/format.md."""

    stream: int
    layer: int
    plane: int
    role: str
    head: int
    mode: str
    full_stripes: int
    parameters: bytes


@dataclass(frozen=True)
class StripeFacts:
    """Where tokens [first_token, first_token + tokens) of a stream lie. page: of the payload."""

    stream: int
    layer: int
    plane: int
    head: int
    page: int
    offset_bytes: int
    length_bytes: int
    first_token: int
    tokens: int


class HeaderView:
    """Header pages of a record. good: fkv_header_check accepted them in their place."""

    def __init__(self, data: bytes, uuid: bytes, epoch: int, page: int) -> None:
        self.data = data
        self.page = page
        self.fixed: Any = np.frombuffer(data, HEADER, 1)[0]
        place = ffi.from_buffer("uint8_t[]", uuid)
        self.good = native_ok(lib.fkv_header_check(data, len(data), place, epoch, page))

    def __getitem__(self, name: str) -> int:
        return int(self.fixed[name])

    @property
    def namespace_digest(self) -> bytes:
        return bytes(self.fixed["namespace_digest"])

    @property
    def shard(self) -> bytes:
        return bytes(self.fixed["shard"])

    @property
    def header_pages(self) -> int:
        return self["header_pages"]

    @property
    def pages(self) -> int:
        """Header and payload."""
        return self["pages"]

    def tlv(self, kind: int) -> bytes:
        """A TLV's payload; empty where it isn't there."""
        offset, length = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        lib.fkv_header_tlv(self.data, len(self.data), kind, offset, length)
        return self.data[offset[0] : offset[0] + length[0]]

    def tlvs(self) -> list[TlvFacts]:
        """Every TLV that this build knows and the header holds."""
        found = []
        for kind, name in TLV_NAMES.items():
            offset, length = ffi.new("uint32_t *"), ffi.new("uint32_t *")
            lib.fkv_header_tlv(self.data, len(self.data), kind, offset, length)
            if offset[0]:
                found.append(TlvFacts(name, offset[0], length[0]))
        return sorted(found, key=lambda tlv: tlv.offset_bytes)

    def keys(self) -> list[bytes]:
        """The blocks' keys, in order."""
        rows = np.frombuffer(self.tlv(lib.FKV_TLV_BLOCKS), BLOCK_ROW)
        return self._cut(rows["key_bytes"], 0)

    def _cut(self, lengths: NDArray[Any], start: int) -> list[bytes]:
        data = self.tlv(lib.FKV_TLV_KEYS)
        ends = start + np.cumsum(lengths, dtype=np.int64)
        starts = ends - lengths
        return [data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def blocks(self) -> list[BlockFacts]:
        """All blocks; their digests are computed from the keys, as the index has them."""
        rows = np.frombuffer(self.tlv(lib.FKV_TLV_BLOCKS), BLOCK_ROW)
        parents = self._cut(rows["parent_bytes"], int(rows["key_bytes"].sum(dtype=np.int64)))
        return [
            BlockFacts(
                ordinal,
                key,
                parent,
                int(row["first_token"]),
                int(row["tokens"]),
                self.digest(key),
            )
            for ordinal, (row, key, parent) in enumerate(
                zip(rows, self.keys(), parents, strict=True)
            )
        ]

    def digest(self, key: bytes) -> bytes:
        """The index's digest of a key of this namespace and shard."""
        whole = hashlib.sha256(self.namespace_digest + self.shard + key).digest()
        return whole[: limits.DIGEST_BYTES]

    def planes(self) -> list[PlaneFacts]:
        """The geometry of the stored streams."""
        return [
            PlaneFacts(
                _ROLES.get(int(row["role"]), str(row["role"])),
                DTYPE_NAMES.get(int(row["dtype"]), str(row["dtype"])),
                int(row["layers"]),
                int(row["heads"]),
                int(row["vector_bytes"]),
            )
            for row in np.frombuffer(self.tlv(lib.FKV_TLV_PLANES), PLANE_ROW)
        ]

    def order(self) -> tuple[str, int] | None:
        """The caller's axes, outermost first, and the tokens of a block's strides; raw only."""
        data = self.tlv(lib.FKV_TLV_ORDER)
        if not data:
            return None
        row = np.frombuffer(data, ORDER_ROW, 1)[0]
        return " ".join(AXES[axis] for axis in row["axes"].tolist()), int(row["block_tokens"])

    def page_crcs(self) -> NDArray[np.uint32]:
        """CRC-32C of each payload page."""
        return np.frombuffer(self.tlv(lib.FKV_TLV_PAGE_CRCS), "<u4")

    def streams(self) -> list[StreamFacts]:
        """Coded records: what the pages of each stream share."""
        data, at = self.tlv(lib.FKV_TLV_STREAMS), 0
        found = []
        for stream, (layer, plane, head, row) in enumerate(self._stream_places()):
            if not data:
                break
            mode, packed, full = STREAM_ROW.unpack_from(data, at)
            at += STREAM_ROW.size
            parameters, taken = _parameters(data[at:], int(row["vector_bytes"]), mode, packed)
            role = _ROLES.get(int(row["role"]), str(row["role"]))
            name = MODE_NAMES.get(mode, str(mode))
            found.append(StreamFacts(stream, layer, plane, role, head, name, full, parameters))
            at += taken
        return found

    def stripes(self) -> list[StripeFacts]:
        """Coded records: the stripe table."""
        count = int(lib.fkv_header_stripes(self.data, len(self.data), ffi.NULL, 0))
        if count <= 0:
            return []
        rows = np.zeros(count, STRIPE)
        lib.fkv_header_stripes(self.data, len(self.data), pointer(rows, "fkv_stripe *"), count)
        places = [(layer, plane, head) for layer, plane, head, _ in self._stream_places()]
        return [
            StripeFacts(int(row[0]), *places[int(row[0])], *(int(value) for value in list(row)[1:]))
            for row in rows.tolist()
        ]

    def _stream_places(self) -> Iterator[tuple[int, int, int, Any]]:
        """(layer, plane, head, plane row) in the order of the streams' numbers."""
        rows = np.frombuffer(self.tlv(lib.FKV_TLV_PLANES), PLANE_ROW)
        for layer in range(int(rows["layers"].max(initial=0))):
            for plane, row in enumerate(rows):
                if layer < row["layers"]:
                    for head in range(int(row["heads"])):
                        yield layer, plane, head, row

    def blocks_in(self, page: int) -> set[int]:
        """Ordinals of the blocks that have bytes in a payload page."""
        facts = self.blocks()
        if self["codec"] not in (lib.FKV_CODEC_RAW, lib.FKV_CODEC_ZSTD):
            here = [stripe for stripe in self.stripes() if stripe.page == page]
            return {
                block.ordinal
                for block in facts
                if any(
                    stripe.first_token < block.first_token + block.tokens
                    and block.first_token < stripe.first_token + stripe.tokens
                    for stripe in here
                )
            }
        rows = np.frombuffer(self.tlv(lib.FKV_TLV_PLANES), PLANE_ROW)
        token_bytes = sum(
            int(row["layers"]) * int(row["heads"]) * int(row["vector_bytes"]) for row in rows
        )
        unit = limits.PAGE_BYTES if self["flags"] & lib.FKV_RECORD_ALIGNED else 1
        found, at = set(), 0
        chunks = iter(np.frombuffer(self.tlv(lib.FKV_TLV_CHUNKS), "<u4").tolist())
        for block in facts:
            end = at + block.tokens * token_bytes
            if self["codec"] == lib.FKV_CODEC_ZSTD:
                count = -(-block.tokens * token_bytes // lib.FKV_CHUNK_BYTES)
                stored = (row & lib.FKV_CHUNK_LENGTH_MASK for row in islice(chunks, count))
                pages = sum(-(-length // limits.PAGE_BYTES) for length in stored)
                end = at + pages * limits.PAGE_BYTES
            if at < (page + 1) * limits.PAGE_BYTES and end > page * limits.PAGE_BYTES:
                found.add(block.ordinal)
            at = -(-end // unit) * unit
        return found

    def bad_pages(self, payload: bytes) -> list[int]:
        """Payload pages whose checksum is wrong, or that are missing from `payload`."""
        crcs = self.page_crcs()
        have = min(len(payload) // limits.PAGE_BYTES, len(crcs))
        sequence = self["sequence"]
        base = ffi.from_buffer("uint8_t[]", payload)
        wrong = [
            page
            for page in range(have)
            if lib.fkv_page_crc(sequence, page, base + page * limits.PAGE_BYTES) != crcs[page]
        ]
        return wrong + list(range(have, len(crcs)))

    def header_fields(self) -> dict[str, Any]:
        """The fixed fields, by their names in engine_native/format.h."""
        fields: dict[str, Any] = {}
        for name in HEADER.names or ():
            value = self.fixed[name]
            if name == "magic":
                fields[name] = bytes(value).decode("latin-1")
            elif name == "reserved":
                continue
            else:
                fields[name] = bytes(value).hex() if np.ndim(value) else int(value)
        fields["kind"] = KIND_NAMES.get(fields["kind"], fields["kind"])
        fields["codec"] = CODEC_NAMES.get(fields["codec"], fields["codec"])
        fields["fidelity"] = FIDELITY_NAMES.get(fields["fidelity"], fields["fidelity"])
        fields["flags"] = flag_names(fields["flags"])
        if fields["start_token"] == lib.FKV_POSITION_UNKNOWN:
            fields["start_token"] = None
        if self.good and self.tlv(lib.FKV_TLV_PROFILE):
            fields["profile"] = self.tlv(lib.FKV_TLV_PROFILE).hex()
        return fields

    def shard_text(self) -> str:
        """The shard in words."""
        if not any(self.shard):
            return "whole model"
        try:
            shard = Shard.decode(self.shard)
        except ValueError as error:
            return f"unreadable: {error}"
        parts = {"layers": shard.layers, "heads": shard.heads, "context": shard.context}
        return ", ".join(f"{name} {pair[0]}:{pair[1]}" for name, pair in parts.items() if pair)


def flag_names(flags: int) -> str:
    """FKV_RECORD_* in words."""
    names = [
        name
        for name, bit in (("inline", lib.FKV_RECORD_INLINE), ("aligned", lib.FKV_RECORD_ALIGNED))
        if flags & bit
    ]
    return " ".join(names)


def _parameters(data: bytes, vector_bytes: int, mode: int, packed: int) -> tuple[bytes, int]:
    """A stream's parameters, unpacked, and the bytes that they take at the start of data."""
    count = int(lib.fkv_stream_parameter_bytes(vector_bytes, mode))
    if not packed:
        return data[:count], count
    unpacked = ffi.new("uint8_t[]", count)
    lib.fkv_prefix_unpack(data, count - 1, unpacked)
    return bytes(unpacked), int(lib.fkv_prefix_packed_bytes(data, len(data), count - 1))
