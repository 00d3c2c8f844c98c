"""One record on a simulated device, and reads of it, without a store around them.

Invariants
 - the record is coded by the data plane from `blocks`, and lies from FIRST_PAGE on in a file of its
   own; `image` is what is there when nothing was harmed;
 - a read goes into poisoned memory with a guard behind it, and asserts that the guard stays.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from simulation.engine import PAGE, Engine

from flashkv import KVGeometry, MemoryView
from flashkv.codec import CODECS, ENCODE_BLOCK, ENCODE_RECORD, EncodeJob
from flashkv.layout import ALL, Selection, packed_view
from flashkv.native import address, aligned_array, ffi, lib, pointer
from flashkv.segment_reader import READ_RECORD, READ_WANT

UUID: Final = bytes(range(16))
EPOCH: Final = 5
FIRST_PAGE: Final = 3
SEQUENCE: Final = 77
NAMESPACE: Final = b"n" * 32
SHARD: Final = b"s" * 16
POISON: Final = 0xA5
GUARD_BYTES: Final = PAGE


@dataclass(frozen=True)
class Shape:
    """What a record is made of."""

    name: str
    geometry: KVGeometry
    codec: str
    tokens: tuple[int, ...]  # of each block
    order: str = "layer plane head token"
    plain: bool = False  # contents that the code can't shorten

    @property
    def view(self) -> MemoryView:
        return MemoryView(self.order)


SHAPES: Final = (
    Shape("coded", KVGeometry.gqa(3, 2, 64, "bfloat16"), "lossless", (16, 16, 5)),
    Shape("coded fp16", KVGeometry.gqa(1, 2, 48, "float16"), "lossless", (40, 30)),
    Shape("coded mla", KVGeometry.mla(2, 100, 20, "float16"), "lossless", (7, 9)),
    Shape("coded long", KVGeometry.gqa(2, 1, 128, "bfloat16"), "lossless", (200, 200)),
    Shape("coded plain", KVGeometry.gqa(1, 3, 20, "float32"), "lossless", (40,)),
    Shape("coded noise", KVGeometry.gqa(1, 2, 64, "bfloat16"), "lossless", (30, 30), plain=True),
    Shape("raw", KVGeometry.gqa(2, 2, 64, "bfloat16"), "raw", (16, 16, 16)),
    Shape("raw uneven", KVGeometry.gqa(2, 2, 50, "bfloat16"), "raw", (7, 11, 3)),
    Shape("raw alone", KVGeometry.gqa(1, 2, 128, "bfloat16"), "raw", (31,)),
    Shape("raw alone, uneven", KVGeometry.gqa(1, 2, 128, "bfloat16"), "raw", (33,)),
    Shape("raw large", KVGeometry.gqa(4, 4, 126, "bfloat16"), "raw", (140, 30)),
    Shape("raw large alone", KVGeometry.gqa(4, 4, 126, "bfloat16"), "raw", (140,)),
    Shape(
        *("raw tokens first", KVGeometry.gqa(2, 2, 64, "bfloat16"), "raw", (16, 9)),
        order="token layer plane head",
    ),
    Shape("inline", KVGeometry.gqa(1, 1, 32, "bfloat16"), "raw", (3, 4)),
    Shape("opaque", KVGeometry.opaque(12_000), "raw", (1, 1)),
)


def vectors(
    memory: np.ndarray, place: Any, head: int, first: int, count: int, vector_bytes: int
) -> np.ndarray:
    """uint8[count, vector_bytes]: a stream's vectors in a block's memory, from token `first` on."""
    stride = int(place["token_stride"])
    start = int(place["offset"]) + head * int(place["head_stride"]) + first * stride
    return np.lib.stride_tricks.as_strided(
        memory[start:], (count, vector_bytes), (stride, 1), writeable=True
    )


@dataclass
class Result:
    """statuses: FKV_* of each want; memory: uint8[wants, room], what was read."""

    statuses: list[int]
    memory: np.ndarray


@dataclass
class LoneRecord:
    """A coded record. write() puts an image of it into the file."""

    engine: Engine
    fd: int
    shape: Shape
    seed: int = 1
    keys: list[bytes] = field(init=False)
    blocks: list[np.ndarray] = field(init=False)
    row: Any = field(init=False)
    image: bytes = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.shape.tokens)
        self.keys = [b"key-%d" % i * (1 + i) for i in range(count)]
        rng = np.random.default_rng(self.seed)
        self.room = max(self.shape.tokens)
        self.blocks = []
        for tokens in self.shape.tokens:
            size = self.shape.geometry.block_bytes(0, tokens)
            noise = rng.integers(0, 256, size, np.uint8)
            if not self.shape.plain:
                numbers = rng.standard_normal(-(-size // 2), np.float32).view(np.uint32) >> 16
                noise = numbers.astype(np.uint16).view(np.uint8)[:size].copy()
            self.blocks.append(noise)
        status = self.encode()
        assert status == lib.FKV_OK, status
        self.write(self.image)

    # ---- making ----

    def encode(self) -> int:
        """Codes the record: its status; sets `row` and `image` where that is FKV_OK."""
        shape, count = self.shape, len(self.keys)
        sources = aligned_array(count * self.block_room(self.room))
        pointers = np.zeros((count, 1), np.uint64)
        for i, block in enumerate(self.blocks):
            at = i * self.block_room(self.room)
            self.scatter(sources[at:], block, shape.tokens[i])
            pointers[i] = address(sources) + at
        blocks = np.zeros(count, ENCODE_BLOCK)
        ends = np.cumsum([len(key) for key in self.keys])
        blocks["key_bytes"] = [len(key) for key in self.keys]
        blocks["key_offset"] = ends - blocks["key_bytes"]
        blocks["source"] = np.arange(count)
        blocks["tokens"] = shape.tokens
        records = np.zeros(1, ENCODE_RECORD)
        records["block_count"], records["sequence"] = count, SEQUENCE
        records["codec"] = CODECS[shape.codec]
        self._view = packed_view(shape.geometry, 0, shape.view, self.room)
        self._native = shape.geometry.native(0)
        self._blob = np.frombuffer(b"".join(self.keys), np.uint8)
        job = EncodeJob(
            geometry=self._native,
            view=self._view.pointer,
            namespace_digest=NAMESPACE,
            shard=SHARD,
            keys=self._blob,
            parents=None,
            pointers=pointers,
            blocks=blocks,
            records=records,
            created_ms=1,
            keepalive=sources,
        )
        bound = int(job.bounds()[0])
        buffer = aligned_array(bound)
        batch = job._with(records)
        batch.buffer = pointer(buffer, "uint8_t *")
        lib.fkv_encode(self.engine.engine, batch)
        status = int(records["status"][0])
        if status == lib.FKV_OK:
            self.row = records[0]
            begin = int(self.row["buffer_offset"])
            data = buffer[begin : begin + int(self.row["pages"]) * PAGE]
            lib.fkv_record_bind(pointer(data, "uint8_t *"), UUID, EPOCH, FIRST_PAGE)
            self.image = data.tobytes()
        return status

    def block_room(self, tokens: int) -> int:
        return -(-self.shape.geometry.block_bytes(0, tokens) // PAGE) * PAGE

    def scatter(self, memory: np.ndarray, block: np.ndarray, tokens: int) -> None:
        """A packed block into memory with room for more tokens."""
        for spread, packed in self._streams(memory, block, tokens, self.room):
            spread[:] = packed

    def gather(self, memory: np.ndarray, tokens: int, room: int) -> np.ndarray:
        """A block's bytes, packed, out of memory with room for more tokens."""
        block = np.zeros(self.shape.geometry.block_bytes(0, tokens), np.uint8)
        for spread, packed in self._streams(memory, block, tokens, room):
            packed[:] = spread
        return block

    def _streams(
        self, memory: np.ndarray, block: np.ndarray, tokens: int, room: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """uint8[tokens, vector bytes] of each (plane, layer, head), in the memory and packed."""
        wide = packed_view(self.shape.geometry, 0, self.shape.view, room).entries
        tight = packed_view(self.shape.geometry, 0, self.shape.view, tokens).entries
        entry = 0
        for plane in self.shape.geometry.groups[0].planes:
            for _ in range(plane.layers):
                for head in range(plane.heads):
                    yield (
                        vectors(memory, wide[entry], head, 0, tokens, plane.vector_bytes),
                        vectors(block, tight[entry], head, 0, tokens, plane.vector_bytes),
                    )
                entry += 1

    # ---- harming ----

    def write(self, image: bytes, *, header_only: bool = False) -> None:
        """The file holds this record; its header is forgotten."""
        part = image[: self.header_pages * PAGE] if header_only else image
        os.pwrite(self.fd, part, FIRST_PAGE * PAGE)
        if not header_only:
            os.ftruncate(self.fd, FIRST_PAGE * PAGE + len(image))
        lib.fkv_header_cache_drop(self.engine.engine, 0)

    @property
    def header_pages(self) -> int:
        return int(self.row["header_pages"])

    @property
    def header_bytes(self) -> int:
        """Of the header's pages, what is used."""
        return int(struct.unpack_from("<I", self.image, 8)[0])

    def signed(self, image: bytes | bytearray, pages: int | None = None) -> bytes:
        """The image with the checksum that its header would have, were it meant so."""
        header = np.frombuffer(bytes(image), np.uint8).copy()
        length = (pages or self.header_pages) * PAGE
        struct.pack_into("<I", header, 4, 0)
        seed = UUID + struct.pack("<QI", EPOCH, FIRST_PAGE)
        crc = lib.fkv_crc32c(0, seed, len(seed))
        crc = lib.fkv_crc32c(crc, pointer(header, "uint8_t *"), length)
        struct.pack_into("<I", header, 4, crc)
        return header.tobytes()

    def check(self, image: bytes) -> int:
        """fkv_header_check of the image's header."""
        length = self.header_pages * PAGE
        return int(lib.fkv_header_check(image[:length], length, UUID, EPOCH, FIRST_PAGE))

    # ---- reading ----

    def read(
        self,
        rows: Sequence[int] | None = None,
        *,
        room: int | None = None,
        first: int = 0,
        count: int = 0,
        selection: Selection = ALL,
        view: MemoryView | None = None,
        apart: bool = False,
        ordinals: Sequence[int] | None = None,
        percent: int = 125,
        **changes: Any,
    ) -> Result:
        """fkv_read of some blocks. room: tokens of their memory; first, count: tokens of each.

        apart: a record row for each want. ordinals: instead of the blocks' own.
        changes: of the record's row, as the index would have it.
        """
        rows = range(len(self.keys)) if rows is None else rows
        room = self.room if room is None else room
        geometry, group = self.shape.geometry, 0
        native = packed_view(geometry, group, view or self.shape.view, room, selection)
        size = int(native.region_bytes.sum())
        span = -(-size // PAGE) * PAGE + GUARD_BYTES
        memory = aligned_array(span * max(len(rows), 1))
        memory[:] = POISON
        pointers = address(memory) + span * np.arange(len(rows), dtype=np.uint64)
        wants = np.zeros(len(rows), READ_WANT)
        ends = np.cumsum([len(key) for key in self.keys])
        for i, row in enumerate(rows):
            wants[i]["key_bytes"] = len(self.keys[row])
            wants[i]["key_offset"] = ends[row] - len(self.keys[row])
            wants[i]["target"], wants[i]["ordinal"] = i, row
            wants[i]["first_token"], wants[i]["token_count"] = first, count
        if ordinals is not None:
            wants["ordinal"] = ordinals
        records = np.zeros(len(rows) if apart else 1, READ_RECORD)
        uuid = np.frombuffer(UUID, np.uint8)
        for name in ("sequence", "pages", "header_pages", "codec", "flags"):
            records[name] = self.row[name]
        records["record_tokens"], records["record_blocks"] = self.row["tokens"], len(self.keys)
        records["epoch"], records["fd"], records["page"] = EPOCH, self.fd, FIRST_PAGE
        records["segment_uuid"] = address(uuid)
        records["first_want"] = np.arange(len(records))
        records["want_count"] = 1 if apart else len(rows)
        for name, value in changes.items():
            records[name] = value
        batch = ffi.new("fkv_read_batch *")
        held = (ffi.from_buffer("uint8_t[]", NAMESPACE), ffi.from_buffer("uint8_t[]", SHARD))
        batch.geometry, batch.view = geometry.native(group), native.pointer
        batch.namespace_digest, batch.shard = held
        batch.keys = pointer(self._blob, "uint8_t *")
        batch.pointers = pointer(pointers, "uint64_t *")
        batch.records, batch.record_count = pointer(records, "fkv_read_record *"), len(records)
        batch.wants, batch.want_count = pointer(wants, "fkv_read_want *"), len(wants)
        batch.gap_pages, batch.amplification_percent = 16, percent
        lib.fkv_read(self.engine.engine, batch)
        for i in range(len(rows)):
            guard = memory[i * span + size : (i + 1) * span]
            assert (guard == POISON).all(), "written behind a block"
        return Result(
            wants["status"].tolist(), memory.reshape(max(len(rows), 1), span)[:, :size].copy()
        )

    def right(self, result: Result, rows: Sequence[int] | None = None) -> list[bool]:
        """Which blocks of a whole read are OK; asserts that those are equal in every byte."""
        rows = range(len(self.keys)) if rows is None else rows
        ok = []
        for i, row in enumerate(rows):
            ok.append(result.statuses[i] == lib.FKV_OK)
            if ok[-1]:
                got = self.gather(result.memory[i], self.shape.tokens[row], self.room)
                assert np.array_equal(got, self.blocks[row]), f"wrong bytes of block {row}"
        return ok

    def scan(self, *, verify: bool = True, first: int = 1, pages: int | None = None) -> Any:
        """(records, blocks, damaged, unreadable, end page), or the negative status."""
        status = ffi.new("int32_t *")
        end = FIRST_PAGE + len(self.image) // PAGE if pages is None else pages
        flags = lib.FKV_SCAN_VERIFY_PAGES if verify else 0
        scan = lib.fkv_scan_segment(
            self.engine.engine, self.fd, UUID, EPOCH, first, end, flags, status
        )
        if scan == ffi.NULL:
            return int(status[0])
        found = (
            lib.fkv_scan_record_count(scan),
            lib.fkv_scan_block_count(scan),
            lib.fkv_scan_damaged(scan),
            lib.fkv_scan_unreadable(scan),
            lib.fkv_scan_end_page(scan),
        )
        lib.fkv_scan_free(scan)
        return tuple(int(number) for number in found)
