"""Segments in memory and their header page."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from flashkv import FormatError
from flashkv.native import ffi, lib
from flashkv.segments import (
    DIR_BLOCK,
    DIR_RECORD,
    Segment,
    Segments,
    SegmentState,
    decode_header,
    encode_header,
)

PAGE = 4096
STORE = bytes(range(16, 32))


def some_segment(number: int = 3, epoch: int = 9) -> Segment:
    return Segment(
        number, epoch=epoch, uuid=bytes(range(16)), first_sequence=77, created_ms=1_700_000_000_000
    )


@given(
    number=st.integers(0, (1 << 20) - 1),
    epoch=st.integers(1, lib.FKV_COUNT_END - 1),
    sequence=st.integers(0, lib.FKV_COUNT_END - 1),
    uuid=st.binary(min_size=16, max_size=16),
)
def test_header_round_trip(number: int, epoch: int, sequence: int, uuid: bytes) -> None:
    segment = Segment(number, epoch=epoch, uuid=uuid, first_sequence=sequence)
    page = encode_header(segment, STORE, 4 << 20)
    assert len(page) == PAGE
    header = decode_header(page)
    assert header is not None
    assert (header.segment, header.epoch, header.first_sequence) == (number, epoch, sequence)
    assert (header.segment_uuid, header.store_uuid) == (uuid, STORE)
    assert header.segment_bytes == 4 << 20


@settings(max_examples=200)
@given(at=st.integers(0, PAGE - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_seen(at: int, bit: int) -> None:
    page = encode_header(some_segment(), STORE, 4 << 20)
    bad = page[:at] + bytes([page[at] ^ 1 << bit]) + page[at + 1 :]
    assert decode_header(bad) is None


@pytest.mark.parametrize("page", [b"", b"FKVSEGMT", bytes(PAGE), b"FKVSEGMT".ljust(PAGE, b"\0")])
def test_no_header(page: bytes) -> None:
    assert decode_header(page) is None


def test_header_of_another_version() -> None:
    from flashkv.checksums import with_crc

    page = encode_header(some_segment(), STORE, 4 << 20)
    at = ffi.offsetof("fkv_segment_header", "version")
    with pytest.raises(FormatError, match="version"):
        decode_header(with_crc(page[:at] + struct.pack("<I", 5) + page[at + 4 :]))


class NoIO:
    """open_file and close_file only."""

    def open_file(self, path: Path, *, create: bool, writable: bool) -> int:  # noqa: ARG002
        return os.open(path, os.O_RDWR if writable else os.O_RDONLY)

    def close_file(self, fd: int) -> None:
        os.close(fd)


def make(folder: Path) -> Segments:
    (folder / "segments").mkdir()
    return Segments(folder, NoIO(), 4 << 20, STORE)  # type: ignore[arg-type]


def test_readers_keep_what_they_hold(tmp_path: Path) -> None:
    """publish() replaces the arrays: who holds the old ones sees one state."""
    segments = make(tmp_path)
    first = segments.add(0)
    first.epoch, first.fd, first.uuid = 4, 11, b"a" * 16
    segments.publish(first)
    held = segments.fds, segments.epochs, segments.uuids
    first.epoch, first.fd = 5, 12
    segments.publish(first)
    third = segments.add(3)
    third.epoch, third.fd, third.uuid = 1, 13, b"c" * 16
    segments.publish(third)
    assert (held[0].tolist(), held[1].tolist()) == ([11], [4])
    assert segments.fds.tolist() == [12, -1, -1, 13]
    assert segments.epochs.tolist() == [5, 0, 0, 1]
    assert bytes(segments.uuids[3]) == b"c" * 16
    first.fd = third.fd = -1
    segments.close()


def test_order_by_age(tmp_path: Path) -> None:
    segments = make(tmp_path)
    for number, sequence in ((0, 50), (1, 10), (2, 30), (3, 10)):
        segment = segments.add(number)
        segment.state, segment.first_sequence = SegmentState.SEALED, sequence
    segments[2].state = SegmentState.CLOSED
    assert [s.number for s in segments.in_state(SegmentState.SEALED)] == [1, 3, 0]
    both = segments.in_state(SegmentState.SEALED, SegmentState.CLOSED)
    assert [s.number for s in both] == [1, 3, 2, 0]
    assert segments.in_state(SegmentState.OPEN) == []
    assert len(segments) == 4
    assert segments.get(9) is None


def test_files(tmp_path: Path) -> None:
    segments = make(tmp_path)
    segment = segments.add(0)
    assert not segment.has_file()
    with pytest.raises(FileNotFoundError):
        segments.open_file(segment, writable=True)
    (tmp_path / "segments" / "00000000.seg").write_bytes(b"")
    segments.open_file(segment, writable=True)
    fd = segment.fd
    segments.open_file(segment, writable=True)
    assert segment.fd == fd
    assert segments.count_files() == 1
    segments.close()
    segments.close()
    assert segments.count_files() == 0


rows = st.lists(st.integers(1, 9), min_size=0, max_size=8)


@given(batches=st.lists(rows, max_size=6), data=st.data())
def test_directory_rows(batches: list[list[int]], data: Any) -> None:
    """Rows come out in order; dropped records take their own blocks and no others."""
    segment = Segment(0)
    sequence = 0
    kept: list[tuple[int, int]] = []
    for counts in batches:
        records = np.zeros(len(counts), DIR_RECORD)
        records["block_count"] = counts
        records["sequence"] = np.arange(sequence, sequence + len(counts))
        blocks = np.zeros(sum(counts), DIR_BLOCK)
        blocks["tokens"] = np.repeat(records["sequence"], counts)
        segment.add_rows(records, blocks)
        kept += [(sequence + i, count) for i, count in enumerate(counts)]
        sequence += len(counts)
        if kept and data.draw(st.booleans()):
            gone = data.draw(st.sets(st.sampled_from([s for s, _ in kept])))
            dropped = segment.drop_rows(np.array(sorted(gone), np.uint64))
            assert dropped["sequence"].tolist() == sorted(gone)
            kept = [(s, count) for s, count in kept if s not in gone]
        assert (segment.record_count, segment.block_count) == (
            len(kept),
            sum(count for _, count in kept),
        )
    records, blocks = segment.rows()
    assert records["sequence"].tolist() == [s for s, _ in kept]
    assert blocks["tokens"].tolist() == [s for s, count in kept for _ in range(count)]
    segment.clear_rows()
    assert (segment.record_count, segment.block_count) == (0, 0)
    assert len(segment.rows()[0]) == 0
