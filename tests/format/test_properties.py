"""Random stores and random damage: what is read is what was stored, or nothing.

Invariants under test
  - a tool that reads the files finds the keys and blocks that an open of the store finds;
  - whatever bytes of the segments change, a get gives the right bytes or a miss, never raises;
  - no header leads a parser astray, not even one whose checksum was made to fit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flashkv.tools.facts import store_facts
from flashkv.tools.inspection import StoreView
from flashkv.tools.record_facts import find_key, record_detail, segment_records
from flashkv.tools.verify import DAMAGE, verify
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import open_store, shard_of

import flashkv
from flashkv import BlockStatus, Identity, KVGeometry, MemoryView
from flashkv.native import dtype_of, ffi, lib, pointer

Puts = list[tuple[list[bytes], list[int], int]]  # keys, tokens of each, seed
PAGE = 4096
ROOM = 48  # tokens
IDENTITY = Identity(model="properties")
few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
many = settings(few, max_examples=150)


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder for one example."""
    with tempfile.TemporaryDirectory(prefix="flashkv-test-") as name:
        yield Path(name)


ELEMENTS = ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"]
dtypes = st.sampled_from(ELEMENTS)
geometries = st.one_of(
    st.builds(
        KVGeometry.gqa, st.integers(1, 4), st.integers(1, 3), st.sampled_from([8, 20, 64]), dtypes
    ),
    st.builds(
        KVGeometry.mla, st.integers(1, 4), st.sampled_from([32, 100]), st.integers(4, 20), dtypes
    ),
    st.builds(KVGeometry.opaque, st.sampled_from([1, 500, 2048, 5000, 40_000])),
)


@st.composite
def batches(draw: Any) -> Puts:
    """Puts; keys may come again in a later one."""
    names = st.integers(0, 60).map(lambda n: f"key-{n}".encode() * (1 + n % 3))
    puts = []
    for _ in range(draw(st.integers(1, 4))):
        keys = draw(st.lists(names, min_size=1, max_size=20, unique=True))
        tokens = draw(st.lists(st.integers(1, ROOM), min_size=len(keys), max_size=len(keys)))
        puts.append((keys, tokens, draw(st.integers(0, 1 << 30))))
    return puts


def view_of(geometry: KVGeometry) -> MemoryView:
    """Tokens outermost: a shorter block is the beginning of its row."""
    opaque = geometry.groups[0].planes[0].role.value == "opaque"
    return MemoryView("token layer plane head", block_tokens=1 if opaque else ROOM)


def blocks_of(geometry: KVGeometry, count: int, seed: int) -> np.ndarray:
    """uint8[count, room]: numbers around 0 in most blocks, any bits in some."""
    rng = np.random.default_rng(seed)
    size = geometry.block_bytes(0, view_of(geometry).block_tokens or 1)
    numbers = rng.standard_normal((count, size // 2 + 1), np.float32).view(np.uint32) >> 16
    data = numbers.astype(np.uint16).view(np.uint8)[:, :size].copy()
    wild = rng.integers(0, 4, count) == 0
    data[wild] = rng.integers(0, 256, (int(wild.sum()), size))
    return data


def put_all(path: Path, geometry: KVGeometry, puts: Puts, codec: str) -> dict[bytes, np.ndarray]:
    """Makes a store; returns what it must hold."""
    expected: dict[bytes, np.ndarray] = {}
    view = view_of(geometry)
    token_bytes = geometry.token_bytes(0)
    with open_store(path, geometry, codec=codec) as store:
        namespace = store.namespace(IDENTITY)
        for keys, counts, seed in puts:
            tokens = [min(count, view.block_tokens or 1) for count in counts]
            data = blocks_of(geometry, len(keys), seed)
            parents = [b"", *keys[:-1]]
            result = namespace.put(keys, data, view=view, tokens=tokens, parents=parents)
            for key, block, count, status in zip(keys, data, tokens, result.statuses, strict=True):
                assert status in (BlockStatus.OK, BlockStatus.PRESENT)
                if status == BlockStatus.OK:
                    expected[key] = block[: count * token_bytes]
    return expected


def check_reads(store: flashkv.Store, expected: dict[bytes, np.ndarray]) -> int:
    """Every key gives its bytes or a miss; returns the hits."""
    view = view_of(store.geometry)
    room = store.geometry.block_bytes(0, view.block_tokens or 1)
    out = np.full((len(expected), room), 0xA5, np.uint8)
    result = store.namespace(IDENTITY).get(list(expected), out, view=view)
    for (key, wanted), block, status in zip(expected.items(), out, result.statuses, strict=True):
        assert status in (BlockStatus.OK, BlockStatus.MISS)
        if status == BlockStatus.OK:
            assert np.array_equal(block[: len(wanted)], wanted), key
    return int(result.ok.sum())


# ---- what the tools see -------------------------------------------------------------------------


@few
@given(geometry=geometries, puts=batches(), codec=st.sampled_from(["lossless", "raw"]))
def test_the_tools_see_what_was_put(geometry: KVGeometry, puts: Puts, codec: str) -> None:
    with folder() as path:
        expected = put_all(path, geometry, puts, codec)
        with open_store(path, None) as store:
            assert check_reads(store, expected) == len(expected)
            totals = store.index.totals()
        view = StoreView(path)
        facts = store_facts(view)
        assert (facts.live_blocks, facts.live_records) == (totals.blocks, totals.records)
        assert facts.space.live == totals.live_pages * PAGE
        live: dict[bytes, int] = {}
        for segment in view.segments.values():
            for row in segment_records(view, segment):
                detail = record_detail(view, segment.number, row.page)
                assert detail.header_good
                assert all(crc.good for crc in detail.page_crcs)
                assert (row.tokens, row.blocks) == (detail.header["tokens"], len(detail.blocks))
                live |= {block.key: block.tokens for block in detail.blocks if block.live}
        token_bytes = geometry.token_bytes(0)
        assert live == {key: len(block) // token_bytes for key, block in expected.items()}
        key = next(iter(expected))
        assert find_key(view, [key])[0].live
        assert not verify(path).of(DAMAGE)


# ---- random damage ------------------------------------------------------------------------------


@st.composite
def mutations(draw: Any) -> list[tuple[str, float, int]]:
    """(how, where as a share of the used bytes, a number)."""
    hows = st.sampled_from(["flip", "byte", "zero page", "copy page", "move page", "cut", "noise"])
    places = st.floats(0, 1, exclude_max=True)
    return draw(st.lists(st.tuples(hows, places, st.integers(0, 1 << 30)), min_size=1, max_size=8))


def mutate(path: Path, how: str, share: float, number: int) -> None:
    """Harms one segment file."""
    file = min((shard_of(path) / "segments").glob("*.seg"))
    data = bytearray(file.read_bytes())
    used = max(len(bytes(data).rstrip(b"\0")), 2 * PAGE)
    at, other = int(share * used), number % used // PAGE * PAGE
    page = at // PAGE * PAGE
    if at >= len(data) or other + PAGE > len(data):
        return
    if how == "flip":
        data[at] ^= 1 << number % 8
    elif how == "byte":
        data[at] = number % 256
    elif how == "zero page":
        data[page : page + PAGE] = bytes(PAGE)
    elif how == "copy page":
        data[page : page + PAGE] = data[other : other + PAGE]
    elif how == "move page":
        data[page : page + PAGE], data[other : other + PAGE] = (
            data[other : other + PAGE],
            data[page : page + PAGE],
        )
    elif how == "noise":
        noise = np.random.default_rng(number).integers(0, 256, min(200, len(data) - at))
        data[at : at + len(noise)] = noise.astype(np.uint8).tobytes()
    elif how == "cut":
        del data[at:]
    with file.open("r+b") as target:
        target.write(data)
        if how == "cut":
            target.truncate(len(data))


@few
@given(
    geometry=geometries,
    puts=batches(),
    codec=st.sampled_from(["lossless", "raw"]),
    harms=mutations(),
    reopen=st.booleans(),
)
def test_damaged_segments_give_right_bytes_or_a_miss(
    geometry: KVGeometry,
    puts: Puts,
    codec: str,
    harms: list[tuple[str, float, int]],
    reopen: bool,
) -> None:
    with folder() as path:
        expected = put_all(path, geometry, puts, codec)
        if reopen:
            for harm in harms:
                mutate(path, *harm)
            verify(path)
            store_facts(StoreView(path))
        with open_store(path, None, direct_io=False) as store:
            if not reopen:
                for harm in harms:
                    mutate(path, *harm)
            check_reads(store, expected)
            first = check_reads(store, expected)
            assert check_reads(store, expected) == first, "damage is met once, then it is a miss"
            fresh = blocks_of(geometry, 1, 7)
            namespace = store.namespace(IDENTITY)
            assert namespace.put([b"later"], fresh, view=view_of(geometry)).all_ok
            assert check_reads(store, {b"later": fresh[0]}) == 1


# ---- hostile headers ----------------------------------------------------------------------------


def headers(seed: int) -> list[bytes]:
    """Headers of real records of several geometries and codecs, with their uuid, epoch and page."""
    found = []
    shapes = [
        (KVGeometry.gqa(2, 2, 64, "bfloat16"), "lossless"),
        (KVGeometry.mla(3, 100, 20, "float16"), "lossless"),
        (KVGeometry.gqa(2, 1, 20, "float32"), "lossless"),
        (KVGeometry.gqa(2, 2, 64, "bfloat16"), "raw"),
        (KVGeometry.opaque(500), "raw"),
    ]
    for number, (geometry, codec) in enumerate(shapes):
        keys = [f"{number}-{i}".encode() for i in range(12)]
        with folder() as path:
            put_all(path, geometry, [(keys, [16] * 11 + [5], seed)], codec)
            view = StoreView(path)
            (segment,) = view.segments.values()
            found += [walked.view.data for walked in segment.walked]
    return found


HEADERS = headers(1)
UUID = bytes(range(16))
FIXED = int(ffi.sizeof("fkv_record_header"))
EDGES = [0, 1, 2, 7, 8, 127, 128, 254, 255]


@st.composite
def hostile(draw: Any) -> bytes:
    """A header with bytes, fields or TLVs changed; its length stays."""
    data = bytearray(draw(st.sampled_from(HEADERS)))
    used = int.from_bytes(data[8:12], "little")
    row = np.frombuffer(bytes(data[:FIXED]), dtype_of("fkv_record_header"))
    names = [name for name in row.dtype.names or () if name not in ("magic", "crc")]
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["field", "tlv head", "byte", "word"]))
        if kind == "field":
            dtype, at = row.dtype.fields[draw(st.sampled_from(names))]  # type: ignore[index]
            size = dtype.itemsize
        elif kind == "tlv head":
            at, size = draw(st.sampled_from(tlv_heads(bytes(data)))), draw(st.sampled_from([2, 8]))
        else:
            at = draw(st.integers(FIXED, max(used - 1, FIXED)))
            size = 1 if kind == "byte" else 4
        value = draw(st.one_of(st.sampled_from(EDGES), st.integers(0, (1 << 8 * size) - 1)))
        data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")[: len(data) - at]
    return bytes(data[: len(data) // PAGE * PAGE])


def tlv_heads(data: bytes) -> list[int]:
    """Offsets of the TLVs' heads, as far as they can be followed."""
    at, found = FIXED, []
    while at + 8 <= len(data) and len(found) < 12:
        found.append(at)
        at += 8 + (int.from_bytes(data[at + 4 : at + 8], "little") + 7 & ~7)
    return found


def sealed(data: bytes) -> np.ndarray:
    """The header, its checksum made to fit where its length allows."""
    array = np.frombuffer(data, np.uint8).copy()
    pages = int.from_bytes(data[12:14], "little")
    if 0 < pages * PAGE <= len(data):
        lib.fkv_record_bind(pointer(array, "uint8_t *"), UUID, 3, 17)
    return array


def test_headers_are_there_and_good() -> None:
    assert len(HEADERS) >= 10
    for data in HEADERS:
        assert lib.fkv_header_check(sealed(data).tobytes(), len(data), UUID, 3, 17) == lib.FKV_OK
        assert lib.fkv_header_check(data, len(data), UUID, 3, 17) == lib.FKV_DAMAGED
        for place in ((UUID, 4, 17), (UUID, 3, 18), (bytes(16), 3, 17)):
            bound = sealed(data).tobytes()
            assert lib.fkv_header_check(bound, len(bound), *place) == lib.FKV_DAMAGED


@many
@given(data=hostile(), length=st.integers(0, 3))
def test_hostile_headers(data: bytes, length: int) -> None:
    array = sealed(data)
    count = max(len(array) - length * PAGE, 0)
    bound = array[:count].tobytes()
    status = lib.fkv_header_check(bound, count, UUID, 3, 17)
    assert status in (lib.FKV_OK, lib.FKV_DAMAGED)
    room = np.zeros(4096, dtype_of("fkv_stripe"))
    stripes = lib.fkv_header_stripes(bound, count, pointer(room, "fkv_stripe *"), len(room))
    assert stripes >= 0 or status == lib.FKV_DAMAGED
    offset, size = ffi.new("uint32_t *"), ffi.new("uint32_t *")
    for kind in range(12):
        lib.fkv_header_tlv(bound, count, kind, offset, size)
        assert offset[0] + size[0] <= count
    if status == lib.FKV_OK:
        fixed = np.frombuffer(bound, dtype_of("fkv_record_header"), 1)[0]
        assert fixed["pages"] >= fixed["header_pages"] > 0
        payload_pages = int(fixed["pages"]) - int(fixed["header_pages"])
        for stripe in room[: max(0, stripes)]:
            assert int(stripe["offset"]) + int(stripe["length"]) <= PAGE
            assert stripe["page"] < payload_pages
            assert int(stripe["first_token"]) + int(stripe["tokens"]) <= fixed["tokens"]


def test_what_a_later_version_may_mean_is_refused() -> None:
    row = dtype_of("fkv_record_header")
    for data in HEADERS:
        for name in (
            "codec_version",
            "table_set",
            "fidelity",
            "flags",
            "reserved",
            "kind",
            "codec",
        ):
            dtype, at = row.fields[name]  # type: ignore[index]
            changed = bytearray(data)
            changed[at] ^= 0x40
            bound = sealed(bytes(changed)).tobytes()
            kind = int.from_bytes(data[14:15], "little")
            if name == "codec" and kind == lib.FKV_KIND_NAMESPACE:
                continue
            assert lib.fkv_header_check(bound, len(bound), UUID, 3, 17) == lib.FKV_DAMAGED, name
            assert dtype.itemsize > 0


@few
@given(data=hostile(), which=st.integers(0, 100))
def test_hostile_headers_in_a_store(data: bytes, which: int) -> None:
    """Bound to their place, as only a forger makes them: whatever comes, nothing breaks."""
    geometry = KVGeometry.gqa(2, 2, 64, "bfloat16")
    keys = [f"0-{i}".encode() for i in range(12)]
    with folder() as path:
        expected = put_all(path, geometry, [(keys, [16] * 12, which)], "lossless")
        view = StoreView(path)
        (segment,) = view.segments.values()
        pages = int.from_bytes(data[12:14], "little")
        if not 0 < pages * PAGE <= len(data):
            return
        page = segment.walked[-1].view.page
        array = np.frombuffer(data, np.uint8).copy()
        lib.fkv_record_bind(pointer(array, "uint8_t *"), segment.uuid, segment.epoch, page)

        def forge() -> None:
            with segment.path.open("r+b") as file:
                file.seek(page * PAGE)
                file.write(array[: pages * PAGE].tobytes())

        with open_store(path, None, direct_io=False) as store:
            forge()
            read_forged(store, expected)
        verify(path)
        with open_store(path, None) as store:
            read_forged(store, expected)
        again = StoreView(path)
        for one in again.segments.values():
            for record in segment_records(again, one):
                record_detail(again, one.number, record.page)


def read_forged(store: flashkv.Store, expected: dict[bytes, np.ndarray]) -> None:
    out = np.zeros((len(expected), len(next(iter(expected.values()))) * ROOM // 16), np.uint8)
    result = store.namespace(IDENTITY).get(list(expected), out, view=view_of(store.geometry))
    assert set(result.statuses.tolist()) <= {BlockStatus.OK, BlockStatus.MISS}
