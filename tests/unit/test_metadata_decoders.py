"""The data plane's decoders of manifest logs, footers and directories beside models in Python."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from typing import Any

import crc32c as independent
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from flashkv import directory
from flashkv.manifest_log import _entries, encode_entry
from flashkv.native import dtype_of, ffi, lib, pointer
from flashkv.segments import DIR_BLOCK, DIR_RECORD

UUID = bytes(range(16))
PAGE = 4096
HEAD = struct.Struct("<IHHII")  # crc, type, reserved, length, ordinal
Row = tuple[int, bytes, bool]

# ---- manifest logs ------------------------------------------------------------------------------

FITS: dict[int, Callable[[int], bool]] = {
    lib.FKV_MANIFEST_BEGIN: lambda n: n == 32,
    lib.FKV_MANIFEST_OPENED: lambda n: n == 32,
    lib.FKV_MANIFEST_FREED: lambda n: n == 32,
    lib.FKV_MANIFEST_KILL: lambda n: n > 0 and n % 32 == 0,
    lib.FKV_MANIFEST_NAMESPACE: lambda n: n > 32,
    lib.FKV_MANIFEST_RETIRED: lambda n: n == 40,
    lib.FKV_MANIFEST_PROFILE: lambda n: n > 32,
    lib.FKV_MANIFEST_VOID: lambda n: n == 32,
}


def model(log: bytes) -> list[Row]:
    """The entries that count, by the words of docs/format.md."""
    found: list[Row] = []
    at = least = 0
    damaged = False
    while at + HEAD.size <= len(log):
        crc, kind, reserved, length, ordinal = HEAD.unpack_from(log, at)
        end = at + HEAD.size + length
        good = not reserved and least <= ordinal < least + len(log) and end <= len(log)
        good = good and FITS.get(kind, lambda _: True)(length)
        if not good or independent.crc32c(log[at + 4 : end], independent.crc32c(UUID)) != crc:
            damaged = True
            at += 8
            continue
        payload = log[at + HEAD.size : end]
        offsets = {1: (16, 24), 2: (8,), 3: (8,), 6: (32,), 8: (8, 24)}.get(kind, ())
        if kind == 4:
            offsets = tuple(row + to for row in range(0, length, 32) for to in (8, 16))
        if any(int.from_bytes(payload[to : to + 8], "little") >> 62 for to in offsets):
            damaged = True  # numbers that can't have been given: passed over whole
        else:
            found.append((kind, payload, damaged))
        least = ordinal + 1
        at = end + -end % 8
    return found


def walked(log: bytes) -> list[Row]:
    # A copy of exactly its size, so that a checking allocator sees what is read behind it.
    return list(_entries(bytes(bytearray(log)), UUID))


payloads = st.one_of(
    st.tuples(st.sampled_from([1, 2, 3]), st.binary(min_size=32, max_size=32)),
    st.tuples(st.just(4), st.integers(1, 5).map(lambda n: bytes(32 * n))),
    st.tuples(st.sampled_from([5, 7]), st.binary(min_size=33, max_size=90)),
    st.tuples(st.just(6), st.binary(min_size=40, max_size=40)),
    st.tuples(st.just(8), st.binary(min_size=32, max_size=32)),
    st.tuples(st.integers(0, 9), st.binary(max_size=70)),  # some of them with a wrong length
)


@given(
    entries=st.lists(st.tuples(payloads, st.integers(0, 2)), max_size=12),
    harm=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), max_size=4),
    cut=st.integers(0, 40),
    tail=st.binary(max_size=60),
)
def test_walk_is_the_model(
    entries: list[tuple[tuple[int, bytes], int]],
    harm: list[tuple[int, int]],
    cut: int,
    tail: bytes,
) -> None:
    log, ordinal = bytearray(), 0
    for (kind, payload), skipped in entries:
        ordinal += skipped
        log += encode_entry(kind, payload, ordinal, UUID)
        ordinal += 1
    for at, value in harm:
        if log:
            log[at % len(log)] ^= value
    whole = bytes(log[: len(log) - cut] if cut < 20 else log) + tail
    assert walked(whole) == model(whole)


@settings(max_examples=60)
@given(
    words=st.lists(st.sampled_from([0, 1, 4, 5, 32, 64, 600, 0x10000]), min_size=4, max_size=12),
    count=st.integers(1, 300),
    entry_at=st.integers(0, 300),
    payload=st.binary(min_size=33, max_size=200),
)
def test_walk_of_what_looks_like_heads(
    words: list[int], count: int, entry_at: int, payload: bytes
) -> None:
    """Most 8 bytes look like a head here, so checksums are joined; good entries are still found."""
    filler = struct.pack(f"<{len(words)}I", *words) * count
    filler = filler[: len(filler) // 8 * 8]
    at = min(entry_at * 8, len(filler))
    good = encode_entry(lib.FKV_MANIFEST_NAMESPACE, payload, 3, UUID)
    log = filler[:at] + good + filler[at:] + encode_entry(9, payload, 4, UUID)
    assert walked(log) == model(log)


def test_entries_without_payload_may_be_more_than_usual() -> None:
    log = b"".join(encode_entry(77, b"", number, UUID) for number in range(500))
    assert walked(log) == [(77, b"", False)] * 500


@pytest.mark.parametrize("kind", sorted(FITS))
def test_an_entry_of_an_impossible_length_is_damage(kind: int) -> None:
    """Its checksum is right: it is passed over, not believed and not tripped over."""
    for length in (0, 1, 31, 33, 41, 4096 + 1):
        log = encode_entry(kind, bytes(length), 0, UUID)
        log += encode_entry(lib.FKV_MANIFEST_RETIRED, bytes(40), 1, UUID)
        assert walked(log) == model(log)
        assert len(walked(log)) == 1 + FITS[kind](length)
        assert walked(log)[-1] == (lib.FKV_MANIFEST_RETIRED, bytes(40), not FITS[kind](length))


def test_lengths_that_overflow() -> None:
    for length in (0xFFFFFFFF, 0xFFFFFFF0, 0x7FFFFFFF, 41):
        for ordinal in (0, 0xFFFFFFFF):
            log = HEAD.pack(0, 9, 0, length, ordinal) + bytes(24)
            assert walked(log) == model(log)
    stray = encode_entry(9, b"", 16, UUID)  # a whole log of its length could not come to there
    assert walked(stray) == model(stray) == []
    last = encode_entry(9, b"", 7, UUID)
    assert walked(last + bytes(8)) == model(last + bytes(8)) == [(9, b"", False)]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("noise", b""),
        ("zeros", bytes(16)),
        ("heads of nearly all of it", struct.pack("<4I", 9 << 20, 9, 9 << 20, 9)),
        ("heads of unlike lengths", struct.pack("<4I", 9 << 20 | 1, 9, 9 << 20, 9)),
        ("kills", struct.pack("<4I", 65504, 4, 65504, 1)),
    ],
)
def test_a_long_log_of_garbage_takes_seconds(name: str, unit: bytes, seed: int) -> None:
    """64 MiB in about a second; without joined checksums, days. The bound leaves room for a slow
    machine that does something else.
    """
    size = 64 << 20
    log = random.Random(seed).randbytes(size) if not unit else unit * (size // len(unit))
    begin = encode_entry(lib.FKV_MANIFEST_BEGIN, bytes(32), 0, UUID)
    end = encode_entry(lib.FKV_MANIFEST_RETIRED, bytes(40), 5, UUID)
    started = time.process_time()
    found = walked(begin + log + end)
    took = time.process_time() - started
    print(f"{name}: {took:.2f} s")
    assert found == [(1, bytes(32), False), (6, bytes(40), True)]
    assert took < 20


# ---- directories ---------------------------------------------------------------------------------

SEGMENT = 64 * PAGE


def build(records: Any, blocks: Any, names: list[bytes]) -> tuple[bytes, bytes]:
    rows = directory.Directory(records, blocks, names, 9)
    return directory.encode(rows, UUID, 7, 40, bloom=True)


def decoded(body: bytes, page: bytes) -> directory.Directory | None:
    footer = directory.decode_footer(page, UUID, 7, SEGMENT)
    return footer and directory.decode(footer, body, 40 * PAGE)


def good_rows() -> tuple[Any, Any, list[bytes]]:
    records, blocks = np.zeros(3, DIR_RECORD), np.zeros(6, DIR_BLOCK)
    records["sequence"] = [4, 5, 6]
    records["page"], records["pages"] = [1, 4, 10], [3, 5, 30]
    records["header_pages"], records["block_count"] = 1, [1, 2, 3]
    records["tokens"], records["namespace_ordinal"] = [16, 32, 40], [0, 1, 1]
    blocks["digest"] = np.arange(96).reshape(6, 16)
    blocks["tokens"], blocks["ordinal"] = [16, 16, 16, 16, 16, 8], [0, 0, 1, 0, 1, 2]
    return records, blocks, [b"a" * 32, b"b" * 32]


def believed(records: Any, blocks: Any, names: list[bytes], pages: int) -> bool:
    """By the words of docs/format.md: rows in page order, their blocks in their order."""
    at, block = 1, 0
    for r in records.tolist():
        row = dict(zip(DIR_RECORD.names or (), r, strict=True))
        mine = blocks[block : block + row["block_count"]]
        block += row["block_count"]
        if not (
            at <= row["page"]
            and row["page"] + row["pages"] <= pages - 1
            and 1 <= row["header_pages"] <= min(row["pages"], 1024)
            and 1 <= row["block_count"] <= 1024
            and len(mine) == row["block_count"]
            and (mine["ordinal"] < row["block_count"]).all()
            and mine["tokens"].all()
            and int(mine["tokens"].sum(dtype=np.int64)) == row["tokens"]
            and row["namespace_ordinal"] < len(names)
            and not row["reserved"]
        ):
            return False
        at = row["page"] + row["pages"]
    return block == len(blocks)


FIELDS = ["page", "pages", "header_pages", "block_count", "tokens", "namespace_ordinal", "reserved"]
changes = st.tuples(
    st.sampled_from([*FIELDS, "block.tokens", "block.ordinal"]),
    st.integers(0, 5),
    st.one_of(st.integers(0, 70), st.sampled_from([1024, 1025, 0xFFFF, 0xFFFFFFFF, 0x80000000])),
)


@settings(max_examples=300)
@given(st.lists(changes, max_size=3))
def test_rows_are_believed_as_the_model_says(harm: list[tuple[str, int, int]]) -> None:
    """Right checksums, any contents."""
    records, blocks, names = good_rows()
    for field, row, value in harm:
        table, name = (blocks, field[6:]) if field.startswith("block.") else (records, field)
        table[name][row % len(table)] = value & np.iinfo(table[name].dtype).max
    found = decoded(*build(records, blocks, names))
    assert (found is not None) == believed(records, blocks, names, SEGMENT // PAGE)
    if found is not None:
        assert (found.records == records).all()
        assert (found.blocks == blocks).all()


def test_a_header_of_no_pages_is_never_read() -> None:
    """A row with header_pages 0 would have a read begin without a header."""
    records, blocks, names = good_rows()
    assert decoded(*build(records, blocks, names)) is not None
    records["header_pages"][1] = 0
    assert decoded(*build(records, blocks, names)) is None


@settings(max_examples=300)
@given(
    first=st.integers(0, 1 << 64 - 1),
    cut=st.integers(0, 5 * PAGE),
    where=st.integers(0, 3),
    field=st.sampled_from(["offset_bytes", "length_bytes"]),
    value=st.one_of(
        st.integers(0, 64).map(lambda n: n * PAGE),
        st.integers(0, (1 << 64) - 1),
        st.integers((1 << 64) - 2 * PAGE, (1 << 64) - 1),
    ),
)
def test_sections_outside_the_data(
    first: int, cut: int, where: int, field: str, value: int
) -> None:
    """Whatever a footer with a right checksum says, decoding stays within what was read."""
    records, blocks, names = good_rows()
    body, page = build(records, blocks, names)
    row = ffi.new("fkv_segment_footer *")
    ffi.memmove(row, page, ffi.sizeof("fkv_segment_footer"))
    setattr(row.sections[where], field, value)
    changed = directory.decode_footer(directory.footer_page(row, UUID, 7), UUID, 7, SEGMENT)
    if changed is not None:
        section = changed.sections[where]
        assert section[1] >= PAGE
        assert section[1] + section[2] <= SEGMENT - PAGE
        found = directory.decode(changed, body[: len(body) - cut], first)
        assert found is None or len(found.records) == 3


def test_sections_twice_or_of_another_version() -> None:
    _, page = build(*good_rows())
    for name, value in (("type", 1), ("version", 1)):
        row = ffi.new("fkv_segment_footer *")
        ffi.memmove(row, page, ffi.sizeof("fkv_segment_footer"))
        setattr(row.sections[2], name, value)
        other = directory.footer_page(row, UUID, 7)
        assert directory.decode_footer(other, UUID, 7, SEGMENT) is None
    row.sections[2].type = 99  # unknown: passed over, whatever its version
    other = directory.footer_page(row, UUID, 7)
    assert directory.decode_footer(other, UUID, 7, SEGMENT) is not None


def test_reads_refuse_impossible_places() -> None:
    """What an index could only have of a wrong directory: damage, not a crash."""
    options = ffi.new("fkv_engine_options *")
    options.backend, options.queue_depth, options.workers, options.io_threads = 2, 4, 1, 1
    options.memory_alignment, options.read_buffer_bytes = 4096, 1 << 20
    error = ffi.new("char[]", 200)
    engine = lib.fkv_engine_open(options, error, 200)
    assert engine != ffi.NULL, ffi.string(error)
    geometry = ffi.new("fkv_geometry *", {"plane_count": 1})
    geometry.planes[0] = {"role": 9, "layers": 1, "heads": 1, "vector_bytes": 64}
    order = {"axes": [0, 1, 2, 3], "block_tokens": 1}
    entries = ffi.new("fkv_place_in_memory[1]")
    view = ffi.new(
        "fkv_view *",
        {"region_count": 1, "entry_count": 1, "entries": entries, "order": order},
    )
    zeros, target = ffi.new("uint8_t[64]"), ffi.new("uint8_t[64]")
    pointers = ffi.new("uint64_t[1]", [int(ffi.cast("uintptr_t", target))])
    places = np.zeros(3, dtype_of("fkv_read_record"))
    places["fd"], places["want_count"], places["first_want"] = -1, 1, [0, 1, 2]
    places["segment_uuid"] = int(ffi.cast("uintptr_t", zeros))
    places["pages"], places["record_tokens"] = 2, 1
    places["header_pages"], places["record_blocks"] = [0, 3, 1], [1, 1, 0]
    wants = np.zeros(3, dtype_of("fkv_read_want"))
    batch = ffi.new(
        "fkv_read_batch *",
        {
            "geometry": geometry,
            "view": view,
            "namespace_digest": zeros,
            "shard": zeros,
            "keys": zeros,
            "pointers": pointers,
            "records": pointer(places, "fkv_read_record *"),
            "record_count": 3,
            "wants": pointer(wants, "fkv_read_want *"),
            "want_count": 3,
            "amplification_percent": 125,
        },
    )
    lib.fkv_read(engine, batch)
    lib.fkv_engine_close(engine)
    assert wants["status"].tolist() == [lib.FKV_DAMAGED] * 3
