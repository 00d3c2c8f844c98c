"""One record through the data plane: whole and in part, harmed, forged, on a failing device and
without memory. A read ends with a status for every block, its bytes are right where that is OK,
nothing around them is written, and nothing is kept.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from simulation import device as dev
from simulation.device import (
    Device,
    allocation_calls,
    fail_allocations,
    live_allocations,
)
from simulation.engine import PAGE, RETRIES, Engine, open_plain
from simulation.lone_record import FIRST_PAGE, POISON, SHAPES, LoneRecord, Shape, vectors

from flashkv import KVGeometry, MemoryView
from flashkv.layout import Selection, packed_view
from flashkv.native import ffi, lib, pointer

OK, MISS, DAMAGED = lib.FKV_OK, lib.FKV_MISS, lib.FKV_DAMAGED
IO_ERROR, NO_MEMORY = lib.FKV_IO_ERROR, lib.FKV_NO_MEMORY
FATES = {OK, MISS, DAMAGED}
HEADER_BYTES = 144
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
SMALL = [shape for shape in SHAPES if sum(shape.tokens) < 100]
small_shape = pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)


@pytest.fixture
def inline(device: Device) -> Iterator[Engine]:
    """An engine that carries everything out in the calling thread: the same each time."""
    device.inline()
    with Engine(device, retries=RETRIES, workers=0) as engine:
        yield engine
        counters = engine.counters()
        assert counters["inflight"] == 0
        assert counters["buffers_in_use"] == 0


def requests(record: LoneRecord) -> list[dict]:
    """Ways to read whole blocks: all of them, one, one that comes twice, each for itself."""
    last = len(record.keys) - 1
    rows = [list(range(last + 1)), [last], [0]]
    ways: list[dict] = [{"rows": some} for some in rows]
    return [*ways, {"rows": [0, 0], "apart": True}, {"rows": [last], "percent": 100_000}]


def some_pages(record: LoneRecord) -> list[int]:
    """Pages of the record; of a large one its ends, and some between."""
    pages = len(record.image) // PAGE
    return sorted({*range(min(pages, 8)), *range(0, pages, 1 + pages // 12), pages - 1})


# ---- what is there ----


@each_shape
def test_whole_blocks(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    for how in requests(record) * 2:  # the header is cached the second time
        result = record.read(**how)
        assert all(record.right(result, how["rows"])), (how, result.statuses)
    assert record.scan() == (1, len(record.keys), 0, 0, FIRST_PAGE + int(record.row["pages"]))


@each_shape
def test_parts_of_blocks(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    planes = shape.geometry.groups[0].planes
    tokens = min(shape.tokens)
    selections = [Selection()]
    if len({plane.layers for plane in planes}) == len({plane.heads for plane in planes}) == 1:
        selections += [
            Selection(layers=(planes[0].layers - 1,)),
            Selection(heads=(planes[0].heads - 1,)),
            Selection(heads=tuple(range(planes[0].heads - 1, -1, -1))),
        ]
    for selection in selections:
        for first, count in ((0, 1), (tokens - 1, 1), (tokens // 2, tokens - tokens // 2), (0, 0)):
            lib.fkv_header_cache_drop(inline.engine, 0)
            room = count or record.room
            for _ in range(2):
                part = record.read(room=room, first=first, count=count, selection=selection)
                assert part.statuses == [OK] * len(record.keys)
            assert_part(record, part.memory, room, first, count, selection)


def assert_part(
    record: LoneRecord,
    memory: np.ndarray,
    room: int,
    first: int,
    count: int,
    selection: Selection,
) -> None:
    """Every vector of a part is that of the whole block; what has no vector is poison yet."""
    shape = record.shape
    wide = packed_view(shape.geometry, 0, shape.view, room, selection)
    for row, tokens in enumerate(shape.tokens):
        tight = packed_view(shape.geometry, 0, shape.view, tokens).entries
        expected = np.full(memory.shape[1], POISON, np.uint8)
        entry, taken = 0, count or tokens - first
        for plane in shape.geometry.groups[0].planes:
            for _ in range(plane.layers):
                for head in range(plane.heads):
                    slot = head if wide.head_slots is None else int(wide.head_slots[head])
                    if wide.entries[entry]["region"] < 0 or slot < 0:
                        continue
                    size = plane.vector_bytes
                    source = vectors(record.blocks[row], tight[entry], head, first, taken, size)
                    vectors(expected, wide.entries[entry], slot, 0, taken, size)[:] = source
                entry += 1
        assert np.array_equal(memory[row], expected), row


@each_shape
def test_another_order_of_axes(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    reversed_order = MemoryView("plane token layer head")
    if len({plane.heads for plane in shape.geometry.groups[0].planes}) > 1:
        pytest.skip("such an order needs planes of equally many heads")
    for rows in ([0], list(range(len(record.keys)))):
        lib.fkv_header_cache_drop(inline.engine, 0)
        assert record.read(rows, view=reversed_order).statuses == [OK] * len(rows)


# ---- what isn't meant ----


@each_shape
def test_a_place_that_lies(inline: Engine, fd: int, shape: Shape) -> None:
    """The index says other things of the record than its header: damage, or another's block."""
    record = LoneRecord(inline, fd, shape)
    for cached in (False, True):
        for name, value in (
            ("sequence", 78),
            ("pages", int(record.row["pages"]) + 1),
            ("header_pages", int(record.row["header_pages"]) + 1),
            ("record_tokens", int(record.row["tokens"]) + 1),
            ("record_blocks", len(record.keys) + 1),
        ):
            if not cached:
                lib.fkv_header_cache_drop(inline.engine, 0)
            assert DAMAGED in record.read(**{name: value}).statuses, name
        assert all(record.right(record.read()))


@each_shape
def test_blocks_that_are_not_the_ones(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    tokens = max(shape.tokens)
    for first, count, room in ((tokens, 0, tokens), (0, tokens + 1, tokens + 1)):
        # Nobody asks for tokens that the index doesn't name, so it is wrong, or the record is.
        assert record.read([0], first=first, count=count, room=room).statuses == [DAMAGED]
    keys = record.keys
    record.keys = [b"other", *keys[1:]]
    record._blob = np.frombuffer(b"".join(record.keys), np.uint8)
    assert record.read().statuses == [MISS] + [OK] * (len(keys) - 1)
    record.keys = [keys[0], *(key[:-1] + b"?" for key in keys[1:])]
    record._blob = np.frombuffer(b"".join(record.keys), np.uint8)
    assert record.read().statuses == [OK] + [MISS] * (len(keys) - 1)
    if len(keys) > 1:  # out of order: each is found all the same, or a miss
        record.keys = keys
        record._blob = np.frombuffer(b"".join(keys), np.uint8)
        for status in record.read([1, 0]).statuses:
            assert status in (OK, MISS)


def test_no_blocks_at_all(inline: Engine, fd: int) -> None:
    record = LoneRecord(inline, fd, SHAPES[0])
    assert record.read([], apart=True).statuses == []


@each_shape
def test_a_block_that_the_record_has_not(inline: Engine, fd: int, shape: Shape) -> None:
    """Beside one that it has, and whose pages are bad."""
    record = LoneRecord(inline, fd, shape)
    assert record.read([0, 0], ordinals=[0, 99]).statuses == [OK, MISS]
    harmed = bytearray(record.image)
    harmed[-PAGE] ^= 1
    record.write(bytes(harmed))
    last = len(record.keys) - 1
    statuses = record.read([last, 0], ordinals=[last, 99]).statuses
    assert statuses[1] in (MISS, DAMAGED)
    assert statuses[0] == DAMAGED


@each_shape
def test_memory_that_is_too_small(inline: Engine, fd: int, shape: Shape) -> None:
    """The index gave less room to the caller than the header wants: one of them is wrong."""
    record = LoneRecord(inline, fd, shape)
    room = max(shape.tokens) - 1
    row = shape.tokens.index(max(shape.tokens))
    if room:
        for _ in range(2):
            assert record.read([row], room=room).statuses == [DAMAGED]


def test_streams_beyond_number(inline: Engine, fd: int) -> None:
    """The prefix code's parameters don't fit a header: such records do without it."""
    record = LoneRecord(
        inline, fd, Shape("streams", KVGeometry.gqa(256, 64, 128, "bfloat16"), "lossless", (4,))
    )
    assert record.right(record.read()) == [True]


def test_a_header_of_more_than_a_megabyte(inline: Engine, fd: int) -> None:
    """It has a buffer of its own."""
    geometry = KVGeometry.gqa(1024, 64, 8, "bfloat16")
    record = LoneRecord(inline, fd, Shape("streams", geometry, "lossless", (1,)))
    assert record.header_pages * PAGE > 1 << 20
    assert record.right(record.read()) == [True]
    for n in range(2, 40):
        lib.fkv_header_cache_drop(inline.engine, 0)
        fail_allocations(n)
        statuses = record.read().statuses
        reached = allocation_calls() >= n
        fail_allocations()
        assert set(statuses) <= {OK, NO_MEMORY}  # without memory nothing is cached
        if not reached:
            break
    assert statuses == [OK]
    lib.fkv_header_cache_drop(inline.engine, 0)


# ---- damage ----


@each_shape
def test_every_page_harmed(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    for page in some_pages(record):
        harmed = bytearray(record.image)
        harmed[page * PAGE + 17] ^= 4
        record.write(bytes(harmed))
        for how in requests(record):
            statuses = record.read(**how).statuses
            assert set(statuses) <= {OK, DAMAGED}
            record.right(record.read(**how), how["rows"])
            if page < record.header_pages:
                assert set(statuses) == {DAMAGED}
        assert DAMAGED in record.read().statuses
        verified, reported = record.scan(), record.scan(verify=False)
        assert verified[:3] == (0, 0, 1)
        assert reported[2] == 1
        assert reported[0] == int(page >= record.header_pages)


@each_shape
def test_a_file_that_ends_early(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    for page in some_pages(record):
        record.write(record.image)
        os.ftruncate(fd, (FIRST_PAGE + page) * PAGE + 100)
        assert DAMAGED in record.read().statuses
        result = record.scan()
        assert result[0] == 0
        assert result[3] >= 1


# ---- forged: the checksum is right, the contents lie ----


def forgeries(record: LoneRecord) -> Iterator[bytes]:
    """Every byte of the header in use, in turn, as other values, and signed again."""
    used = record.header_bytes
    plain = list(range(8, min(used, HEADER_BYTES + 400)))
    tail = np.random.default_rng(1).integers(8, used, 200).tolist() if used > 600 else []
    for at in [*plain, *tail]:
        old = record.image[at]
        for value in {0, 0xFF, old ^ 1, (old + 1) & 0xFF} - {old}:
            image = bytearray(record.image)
            image[at] = value
            yield record.signed(image)


@small_shape
def test_every_byte_of_a_header_forged(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    live, refused, taken = live_allocations(), 0, 0
    stripes = ffi.new("fkv_stripe[]", 4)
    for number, image in enumerate(forgeries(record)):
        status = record.check(image)
        assert status in (OK, DAMAGED)
        if struct.unpack_from("<H", image, 12)[0] == record.header_pages:
            header = image[: record.header_pages * PAGE]
            assert lib.fkv_header_stripes(header, len(header), stripes, 4) >= -1
        refused += status == DAMAGED
        taken += status == OK
        if number % 8 == 0 or (status == OK and number % 2 == 0):
            record.write(image, header_only=True)
            assert set(record.read().statuses) <= FATES
            lib.fkv_header_cache_drop(inline.engine, 0)
        if number % 64 == 0:
            for verify in (True, False):
                assert record.scan(verify=verify)[0] in (0, 1)
        assert live_allocations() == live
    assert refused > 100
    assert taken > 100


@small_shape
def test_a_header_of_nonsense(inline: Engine, fd: int, shape: Shape) -> None:
    """Lengths of pages and TLVs that no header has."""
    record = LoneRecord(inline, fd, shape)
    rng = np.random.default_rng(3)
    for _ in range(300):
        image = bytearray(record.image)
        for at in rng.integers(HEADER_BYTES, record.header_bytes, 3):
            struct.pack_into(
                "<I",
                image,
                min(int(at) // 4 * 4, record.header_bytes - 4),
                int(rng.choice([0, 1, 5, 1 << 16, 1 << 25, (1 << 32) - 1])),
            )
        image = record.signed(image)
        if record.check(image) == OK:
            record.write(image)
            assert set(record.read().statuses) <= FATES
        for kind in range(12):
            offset, length = ffi.new("uint32_t *"), ffi.new("uint32_t *")
            header = image[: record.header_pages * PAGE]
            lib.fkv_header_tlv(header, len(header), kind, offset, length)
            assert offset[0] + length[0] <= len(header)


# ---- a failing device ----


@each_shape
@pytest.mark.parametrize("result", [-errno.EIO, -errno.EAGAIN, -errno.ENOMEM, -errno.EINVAL])
def test_the_nth_read_fails(
    device: Device, inline: Engine, fd: int, shape: Shape, result: int
) -> None:
    record = LoneRecord(inline, fd, shape)
    for how in requests(record):
        for n in range(1, 100):
            lib.fkv_header_cache_drop(inline.engine, 0)
            device.reset()
            device.fault(dev.READ, dev.FAIL, first=n, count=dev.ALWAYS, result=result)
            got = record.read(**how)
            reached = device.hits() > 0
            expected = IO_ERROR if result in (-errno.EIO, -errno.EINVAL) else NO_MEMORY
            assert set(got.statuses) <= {OK, expected}
            assert (expected in got.statuses) == reached
            record.right(got, how["rows"])
            if not reached:
                break
        device.reset()
        assert all(record.right(record.read(**how), how["rows"]))
        assert n < 99


@each_shape
@pytest.mark.parametrize("amount", [0, 100, 512, PAGE, PAGE + 512, 2 * PAGE, 5 * PAGE])
def test_short_reads_are_resumed(
    device: Device, inline: Engine, fd: int, shape: Shape, amount: int
) -> None:
    record = LoneRecord(inline, fd, shape)
    for how in requests(record):
        for n in range(1, 4):
            lib.fkv_header_cache_drop(inline.engine, 0)
            device.reset()
            device.fault(dev.READ, dev.SHORT, first=n, amount=amount)
            got = record.read(**how)
            record.right(got, how["rows"])
            # Nothing at all means that the file ends there.
            assert set(got.statuses) <= ({OK, DAMAGED} if amount == 0 else {OK})
            device.reset()
            assert all(record.right(record.read(**how), how["rows"]))


@each_shape
def test_a_flipped_bit_is_damage(device: Device, inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    for how in requests(record):
        for n in range(1, 100):
            lib.fkv_header_cache_drop(inline.engine, 0)
            device.reset()
            device.fault(dev.READ, dev.FLIP, first=n, amount=8 * 33)
            got = record.read(**how)
            assert set(got.statuses) <= {OK, DAMAGED}
            record.right(got, how["rows"])
            if not device.hits():
                break
    device.reset()


@each_shape
def test_a_scan_passes_over_what_cant_be_read(
    device: Device, inline: Engine, fd: int, shape: Shape
) -> None:
    record = LoneRecord(inline, fd, shape)
    pages = FIRST_PAGE + len(record.image) // PAGE
    device.fault(dev.READ, dev.FAIL, count=dev.ALWAYS, result=-errno.EIO)
    assert record.scan(first=0) == (0, 0, 0, pages, 0)
    device.reset()
    parts = -(-pages * PAGE // (1 << 20))  # of the read of all
    for page in range(FIRST_PAGE):
        device.reset()
        device.fault(dev.READ, dev.FAIL, first=1, result=-errno.EIO)
        device.fault(dev.READ, dev.FAIL, first=1 + parts + page, result=-errno.EIO)
        assert record.scan(first=0)[3] == 1
    device.reset()
    assert record.scan(first=0)[:4] == (1, len(record.keys), 0, 0)


def test_a_scan_of_an_end_too_near(inline: Engine, fd: int) -> None:
    record = LoneRecord(inline, fd, SHAPES[0])
    for pages in range(FIRST_PAGE, FIRST_PAGE + len(record.image) // PAGE):
        found = record.scan(pages=pages)
        assert found[0] == 0
        assert found[2] == int(pages > FIRST_PAGE)


# ---- no memory ----


@each_shape
@pytest.mark.parametrize("count", [1, 1 << 62], ids=["once", "from there on"])
def test_the_nth_allocation_of_a_read_fails(
    inline: Engine, fd: int, shape: Shape, count: int
) -> None:
    record = LoneRecord(inline, fd, shape)
    ways = [*requests(record), {"rows": [0], "room": 1, "first": 0, "count": 1}]
    for how in ways:
        for cached in (False, True):
            for n in range(2, 200):  # the first is the test's own memory
                lib.fkv_header_cache_drop(inline.engine, 0)
                if cached:
                    record.read(**how)
                fail_allocations(n, count)
                got = record.read(**how)
                reached = allocation_calls() >= n
                fail_allocations()
                assert set(got.statuses) <= {OK, NO_MEMORY}, (how, n)
                if "count" not in how:
                    record.right(got, how["rows"])
                if not reached:
                    break
    lib.fkv_header_cache_drop(inline.engine, 0)


@each_shape
def test_the_nth_allocation_of_a_scan_fails(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    live = live_allocations()
    for n in range(1, 200):
        fail_allocations(n)
        found = record.scan()
        reached = allocation_calls() >= n
        fail_allocations()
        assert live_allocations() == live
        assert found == (-errno.ENOMEM if reached else record.scan())
        if not reached:
            break
    assert n > 4


@each_shape
def test_the_nth_allocation_of_coding_fails(inline: Engine, fd: int, shape: Shape) -> None:
    record = LoneRecord(inline, fd, shape)
    whole = record.image
    for n in range(1, 200):
        # Two are the test's own: what is coded, and the buffer that it goes into.
        fail_allocations(n + 2)
        status = record.encode()
        reached = allocation_calls() >= n + 2
        fail_allocations()
        assert status == (NO_MEMORY if reached else OK)
        if not reached:
            break
    assert record.image == whole


def test_a_namespace_that_has_no_room() -> None:
    """Nothing is written where the text doesn't fit."""
    buffer = np.full(2 * PAGE, POISON, np.uint8)
    text, digest = b"x" * 5000, b"n" * 32
    data = pointer(buffer, "uint8_t *")
    assert lib.fkv_encode_namespace(digest, text, len(text), 0, 1, data, PAGE) == 0
    assert (buffer == POISON).all()
    large = bytes(5 << 20)
    room = np.zeros(6 << 20, np.uint8)
    assert (
        lib.fkv_encode_namespace(
            digest, large, len(large), 0, 1, pointer(room, "uint8_t *"), len(room)
        )
        == 0
    )
    assert lib.fkv_encode_namespace(digest, text, len(text), 0, 1, data, 2 * PAGE) == 2 * PAGE


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with open_plain(tmp_path / "segment") as fd:
        yield fd
