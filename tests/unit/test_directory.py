"""Directories of sealed segments: what was written comes back, and nothing wrong is believed."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from flashkv import directory
from flashkv.native import ffi, lib, pointer
from flashkv.segments import DIR_BLOCK, DIR_RECORD

PAGE = 4096
SEGMENT = 4 << 20
UUID = bytes(range(16))


def some_directory(counts: list[int], namespaces: int, seed: int) -> directory.Directory:
    rng = np.random.default_rng(seed)
    records = np.zeros(len(counts), DIR_RECORD)
    records["sequence"] = np.arange(1, len(counts) + 1) * 3
    records["page"] = np.arange(len(counts)) * 5 + 1
    records["pages"] = 5
    records["header_pages"] = 1
    records["block_count"] = counts
    records["tokens"] = np.array(counts, np.uint32) * 16
    records["namespace_ordinal"] = rng.integers(0, namespaces, len(counts))
    blocks = np.zeros(sum(counts), DIR_BLOCK)
    blocks["digest"] = rng.integers(0, 256, (len(blocks), 16))
    blocks["tokens"] = 16
    names = [bytes(rng.integers(0, 256, 32, np.uint8)) for _ in range(namespaces)]
    last = int(records["sequence"].max()) if len(records) else 0
    return directory.Directory(records, blocks, names, last)


directories = st.builds(
    some_directory,
    st.lists(st.integers(1, 50), max_size=200),
    st.integers(1, 200),
    st.integers(0, 1 << 30),
)


@settings(deadline=None, max_examples=60)
@given(given_rows=directories, bloom=st.booleans(), first_page=st.integers(1, 800))
def test_round_trip(given_rows: directory.Directory, bloom: bool, first_page: int) -> None:
    body, page = directory.encode(given_rows, UUID, 7, first_page, bloom=bloom)
    assert len(page) == PAGE
    counts = len(given_rows.records), len(given_rows.blocks), len(given_rows.namespaces)
    assert len(body) == PAGE * directory.pages_needed(*counts, bloom=bloom)
    footer = directory.decode_footer(page, UUID, 7, SEGMENT * 4)
    assert footer is not None
    assert footer.span()[0] == first_page * PAGE
    found = directory.decode(footer, body, first_page * PAGE)
    assert found is not None
    assert (found.records == given_rows.records).all()
    assert (found.blocks == given_rows.blocks).all()
    assert found.namespaces == given_rows.namespaces
    assert found.last_sequence == given_rows.last_sequence
    assert found.next_page == given_rows.next_page


@settings(deadline=None, max_examples=100)
@given(
    given_rows=directories.filter(lambda rows: len(rows.records) > 0),
    bloom=st.booleans(),
    data=st.data(),
)
def test_any_flipped_bit_is_seen(
    given_rows: directory.Directory, bloom: bool, data: st.DataObject
) -> None:
    body, page = directory.encode(given_rows, UUID, 7, 10, bloom=bloom)
    bit = 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(page) - 1))
        bad = page[:at] + bytes([page[at] ^ bit]) + page[at + 1 :]
        assert directory.decode_footer(bad, UUID, 7, SEGMENT) is None
        return
    footer = directory.decode_footer(page, UUID, 7, SEGMENT)
    assert footer is not None
    _, offset, length, _ = data.draw(st.sampled_from([s for s in footer.sections if s[2]]))
    at = offset - 10 * PAGE + data.draw(st.integers(0, length - 1))
    bad = body[:at] + bytes([body[at] ^ bit]) + body[at + 1 :]
    assert directory.decode(footer, bad, 10 * PAGE) is None


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=600), st.booleans())
def test_garbage_is_no_footer(start: bytes, magic: bool) -> None:
    page = ((directory.FOOTER_MAGIC if magic else b"") + start).ljust(PAGE, b"\0")[:PAGE]
    assert directory.decode_footer(page, UUID, 7, SEGMENT) is None
    assert directory.decode_footer(start, UUID, 7, SEGMENT) is None


def hostile(**fields: int) -> directory.Footer | None:
    """A footer with right checksums and wrong contents."""
    rows = some_directory([2, 3], 1, 5)
    _, page = directory.encode(rows, UUID, 7, 10, bloom=False)
    row = ffi.new("fkv_segment_footer *")
    ffi.memmove(row, page, ffi.sizeof("fkv_segment_footer"))
    for name, value in fields.items():
        if name.startswith("section_") and name != "section_count":
            setattr(row.sections[1], name.removeprefix("section_"), value)
        else:
            setattr(row, name, value)
    return directory.decode_footer(directory.footer_page(row, UUID, 7), UUID, 7, SEGMENT)


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 1},
        {"section_count": 0},
        {"section_count": 17},
        {"section_count": 1 << 31},
        {"section_offset_bytes": 10 * PAGE + 1},
        {"section_offset_bytes": SEGMENT},
        {"section_offset_bytes": 1 << 63},
        {"section_length_bytes": SEGMENT},
        {"section_length_bytes": (1 << 64) - PAGE},
    ],
    ids=str,
)
def test_hostile_footer_is_refused(fields: dict[str, int]) -> None:
    assert hostile() is not None
    assert hostile(**fields) is None


def test_counts_that_disagree() -> None:
    rows = some_directory([2, 3], 1, 5)
    body, _ = directory.encode(rows, UUID, 7, 10, bloom=False)
    for fields in ({"record_count": 3}, {"block_count": 4}):
        footer = hostile(**fields)
        assert footer is not None
        assert directory.decode(footer, body, 10 * PAGE) is None
    rows.records["namespace_ordinal"] = 9
    body, page = directory.encode(rows, UUID, 7, 10, bloom=False)
    footer = directory.decode_footer(page, UUID, 7, SEGMENT)
    assert footer is not None
    assert directory.decode(footer, body, 10 * PAGE) is None


def test_bloom_section_holds_every_digest() -> None:
    rows = some_directory([50] * 20, 3, 11)
    body, page = directory.encode(rows, UUID, 7, 10, bloom=True)
    footer = directory.decode_footer(page, UUID, 7, SEGMENT)
    assert footer is not None
    kind, offset, length, _ = footer.sections[3]
    assert kind == lib.FKV_SECTION_BLOOM
    bits = np.frombuffer(body, np.uint8)[offset - 10 * PAGE :][:length].copy()
    digests = np.ascontiguousarray(rows.blocks["digest"])
    found = np.zeros(len(digests), np.uint8)
    lib.fkv_bloom_test(
        pointer(bits, "uint8_t *"),
        length,
        pointer(digests, "uint8_t *"),
        len(digests),
        pointer(found, "uint8_t *"),
    )
    assert found.all()
