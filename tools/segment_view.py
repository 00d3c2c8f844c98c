"""Segment files as they are: pages, records in their places, contents by directory or by a walk.

Invariants
  - files are opened read-only, without following links and where possible without touching their
    access times;
  - a record is one only if its header is right for this segment, epoch and page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import directory, limits
from flashkv.errors import FormatError
from flashkv.native import ffi, lib
from flashkv.recovery import Contents
from flashkv.segments import DIR_BLOCK, DIR_RECORD, FIRST_PAGE, SegmentHeader, decode_header

from .evidence import QUIET
from .record_view import HeaderView

WINDOW_PAGES: Final = 256


class ReadFile:
    """A file of the store, open for reading pages. Pages that the device can't read are zeros."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = QUIET.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.path = path
        self.unreadable: set[int] = set()
        self._window: tuple[int, bytes] = (0, b"")

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self._fd).st_size

    def pages(self, first: int, count: int) -> bytes:
        """`count` pages; zeros where the file ends before."""
        size = limits.PAGE_BYTES
        try:
            data = self._read(first * size, count * size)
        except OSError:
            data = b"".join(self._page_or_zeros(page) for page in range(first, first + count))
        return data.ljust(count * size, b"\0")

    def _page_or_zeros(self, page: int) -> bytes:
        size = limits.PAGE_BYTES
        try:
            return self._read(page * size, size).ljust(size, b"\0")
        except OSError:
            self.unreadable.add(page)
            return bytes(size)

    def _read(self, offset: int, length: int) -> bytes:
        parts = []
        while length:
            part = os.pread(self._fd, length, offset)
            if not part:
                break
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def page(self, number: int) -> bytes:
        """One page, read ahead for those who go on with the next."""
        first, data = self._window
        size = limits.PAGE_BYTES
        if not first <= number < first + len(data) // size:
            first, data = self._window = number, self.pages(number, WINDOW_PAGES)
        return data[(number - first) * size : (number - first + 1) * size]


def read_whole(path: Path) -> bytes | None:
    """A small file's bytes; None where it isn't there or can't be read."""
    try:
        return QUIET.read(path)
    except OSError:
        return None


@dataclass(frozen=True)
class Walked:
    """A record whose header is right; bad_pages: payload pages that aren't."""

    view: HeaderView
    bad_pages: list[int]

    @property
    def end_page(self) -> int:
        """First page behind it."""
        return self.view.page + self.view.pages


def header_at(file: ReadFile, uuid: bytes, epoch: int, page: int, end: int) -> HeaderView | None:
    """What begins at a page, if it looks like a record's header; `good` says whether it is one."""
    head = file.page(page)
    count = int(lib.fkv_header_peek(ffi.from_buffer("uint8_t[]", head)))
    if not count or count > end - page:
        return None
    return HeaderView(file.pages(page, count), uuid, epoch, page)


def walk(file: ReadFile, uuid: bytes, epoch: int, first: int, end: int) -> Iterator[Walked]:
    """Records as they lie, page by page past whatever is none, as recovery scans a segment."""
    page = first
    while page < end:
        view = header_at(file, uuid, epoch, page, end)
        if view is None or not view.good:
            page += 1
            continue
        payload = file.pages(
            page + view.header_pages, min(view.pages, end - page) - view.header_pages
        )
        walked = Walked(view, view.bad_pages(payload))
        yield walked
        page = page + 1 if walked.bad_pages else walked.end_page


@dataclass(eq=False)
class SegmentView:
    """One segment file and what it holds. Pages and bytes of the file, rows of Contents.

    state      open, closed (no directory), sealed, free, missing, in flux
    counts     its contents count: the manifest does not say that this epoch ended
    by_log     uuid and epoch come from the manifest, since the header page is damaged
    """

    number: int
    path: Path
    header: SegmentHeader | None
    uuid: bytes
    epoch: int
    end_page: int  # of records and directory: the page of the footer
    counts: bool
    by_log: bool = False
    file_bytes: int = 0
    state: str = "free"
    footer: directory.Footer | None = None
    footer_damaged: bool = False
    directory_damaged: bool = False
    contents: Contents | None = None
    walked: list[Walked] = field(default_factory=list)  # of segments without a directory

    def open(self) -> ReadFile:
        """The file, for a while: a store may have more segments than a process may have files.

        Raises OSError.
        """
        return ReadFile(self.path)

    def next_page(self) -> int:
        """First page behind the records."""
        return self.contents.next_page if self.contents is not None else FIRST_PAGE


def walk_segment(segment: SegmentView, file: ReadFile) -> list[Walked]:
    """All records of the segment's epoch, wherever they lie."""
    end = min(segment.end_page, file.size // limits.PAGE_BYTES)
    return list(walk(file, segment.uuid, segment.epoch, FIRST_PAGE, end))


def gaps(records: Any, end: int) -> list[tuple[int, int]]:
    """Page ranges [from, to) in front of `end` that none of the records covers."""
    found, at = [], FIRST_PAGE
    order = np.argsort(records["page"], kind="stable")
    for page, pages in zip(
        records["page"][order].tolist(), records["pages"][order].tolist(), strict=True
    ):
        if page > at:
            found.append((at, page))
        at = max(at, page + pages)
    if at < end:
        found.append((at, end))
    return found


def contents_of(walked: list[Walked], *, whole: bool = True) -> Contents:
    """Rows of the data records whose pages are all right; whole False: of all of them."""
    good = [w for w in walked if not (whole and w.bad_pages)]
    next_page = max((w.end_page for w in good), default=FIRST_PAGE)
    data = [w.view for w in good if w.view["kind"] == lib.FKV_KIND_DATA]
    names: dict[bytes, int] = {}
    records = np.zeros(len(data), DIR_RECORD)
    blocks: list[NDArray[Any]] = []
    for row, view in zip(records, data, strict=True):
        for name in DIR_RECORD.names or ():
            if name in (view.fixed.dtype.names or ()) and name != "reserved":
                row[name] = view.fixed[name]
        row["page"] = view.page
        row["namespace_ordinal"] = names.setdefault(view.namespace_digest, len(names))
        facts = view.blocks()
        part = np.zeros(len(facts), DIR_BLOCK)
        part["digest"] = [np.frombuffer(block.digest, np.uint8) for block in facts]
        part["tokens"] = [block.tokens for block in facts]
        part["ordinal"] = np.arange(len(facts))
        blocks.append(part)
    joined = np.concatenate(blocks) if blocks else np.zeros(0, DIR_BLOCK)
    return Contents(records, joined, list(names), next_page)


def sealed(segment: SegmentView, file: ReadFile) -> Contents | None:
    """Contents by the directory; fills footer, footer_damaged and directory_damaged."""
    size = (segment.end_page + 1) * limits.PAGE_BYTES
    page = file.pages(segment.end_page, 1)
    footer = directory.decode_footer(page, segment.uuid, segment.epoch, size)
    if footer is None:
        segment.footer_damaged = _footer_damaged(page, segment.uuid, segment.epoch, size)
        return None
    segment.footer = footer
    first, end = footer.span()
    data = file.pages(first // limits.PAGE_BYTES, (end - first) // limits.PAGE_BYTES)
    rows = directory.decode(footer, data, first)
    if rows is None:
        segment.directory_damaged = True
        return None
    return Contents(rows.records, rows.blocks, rows.namespaces, first // limits.PAGE_BYTES)


def bound_by_footer(segment: SegmentView, file: ReadFile) -> tuple[bytes, int] | None:
    """(uuid, epoch) by a footer whose directory is right and lists a record that lies there."""
    size = (segment.end_page + 1) * limits.PAGE_BYTES
    page = file.pages(segment.end_page, 1)
    row = ffi.new("fkv_segment_footer *")
    ffi.memmove(row, page, ffi.sizeof("fkv_segment_footer"))
    uuid, epoch = bytes(row.segment_uuid), int(row.epoch)
    probe = SegmentView(
        segment.number, segment.path, None, uuid, epoch, segment.end_page, counts=True
    )
    footer = directory.decode_footer(page, uuid, epoch, size)
    contents = sealed(probe, file) if footer is not None else None
    if contents is None or not len(contents.records):
        return None
    # The first record is the one that a later epoch would have overwritten first.
    first = int(contents.records[0]["page"])
    view = header_at(file, uuid, epoch, first, segment.end_page)
    return (uuid, epoch) if view is not None and view.good else None


def decoded(page: bytes) -> SegmentHeader | None:
    try:
        return decode_header(page)
    except FormatError:
        return None


def _footer_damaged(page: bytes, uuid: bytes, epoch: int, size: int) -> bool:
    """Whether this is a footer of the present epoch gone wrong, not one of an earlier epoch."""
    if page[:8] != directory.FOOTER_MAGIC:
        return False
    row = ffi.new("fkv_segment_footer *")
    ffi.memmove(row, page, ffi.sizeof("fkv_segment_footer"))
    earlier = int(row.epoch)
    if 0 < earlier < epoch:
        return directory.decode_footer(page, uuid, earlier, size) is None
    return True
