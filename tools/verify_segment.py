"""Checks one segment file: its header, directory, records and payload pages.

Invariants: see verify.py.
"""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from flashkv import limits
from flashkv.native import lib, pointer
from flashkv.segments import DIR_RECORD

from .findings import DAMAGE, IN_FLUX, NOTE, UNFINISHED, Finding, VerifyReport
from .inspection import StoreView
from .record_view import HeaderView
from .segment_view import ReadFile, SegmentView, gaps, header_at

_STALE_EPOCHS: Final = 64
_DEAD: Final = " (nothing in it lives)"


class SegmentCheck:
    """The checks of one segment."""

    def __init__(self, view: StoreView, segment: SegmentView, report: VerifyReport) -> None:
        self.view = view
        self.segment = segment
        self.report = report

    def _add(self, kind: str, what: str, page: int | None = None, fault: str = "") -> None:
        segment = self.segment
        self.report.findings.append(
            Finding(kind, what, segment.path.name, segment.number, segment.epoch, page, fault)
        )

    def run(self) -> None:
        segment = self.segment
        self.report.segments += 1
        if segment.state == "missing":
            self._add(DAMAGE, "the file is missing or unreadable", fault="missing")
            return
        if segment.state == "in flux":
            self._add(IN_FLUX, "the writer uses its space again; not checked")
            return
        try:
            with segment.open() as file:
                self._file(file)
                if segment.counts and segment.contents is not None:
                    self._contents(file)
                for page in sorted(file.unreadable):
                    self._add(DAMAGE, "the device can't read this page", page, "unreadable")
        except OSError as error:
            self._add(DAMAGE, f"can't be read: {error.strerror}", fault="unreadable")

    # ---- the file and its header ----

    def _file(self, file: ReadFile) -> None:
        segment, size = self.segment, self.view.block.segment_bytes
        known = self.view.state.epochs.get(segment.number, 0)
        begun = segment.counts or (known and segment.number not in self.view.state.freed)
        if size and file.size != size:
            what = f"the file has {file.size} of {size} bytes"
            self._add(DAMAGE if begun else NOTE, what, fault="length")
        header = segment.header
        if header is None:
            empty = not any(file.pages(0, 1))
            if segment.counts or (not empty and segment.number not in self.view.state.freed):
                self._add(DAMAGE, "the segment header is damaged", 0, "header")
            elif not empty:
                self._add(NOTE, "the header of a free segment is damaged", 0)
            return
        if header.segment != segment.number:
            self._add(DAMAGE, f"the header is that of segment {header.segment}", 0, "other")
        if header.store_uuid != self.view.block.store_uuid:
            self._add(DAMAGE, "the segment belongs to another store", 0, "other")
        if size and header.segment_bytes != size:
            what = f"the header gives the segment {header.segment_bytes} bytes"
            self._add(DAMAGE, what, 0, "header")
        if header.epoch < known and segment.number not in self.view.state.freed:
            if segment.by_log and header.segment == segment.number:
                what = f"the header is that of epoch {header.epoch}; what lies there is {known}"
                self._add(DAMAGE, what, 0, "header")
            else:
                self._add(NOTE, f"epoch {known} was begun, its header was not written", 0)

    # ---- what it holds ----

    def _contents(self, file: ReadFile) -> None:
        segment = self.segment
        if segment.footer_damaged:
            self._add(DAMAGE, "the footer is damaged", segment.end_page, "directory")
        if segment.directory_damaged and segment.footer is not None:
            self._bad_sections(file)
        if segment.state == "sealed":
            self._sealed(file)
        else:
            self._walked(file)

    def _bad_sections(self, file: ReadFile) -> None:
        footer = self.segment.footer
        assert footer is not None
        wrong = []
        for kind, offset, length, crc in footer.sections:
            data = file.pages(offset // limits.PAGE_BYTES, -(-length // limits.PAGE_BYTES))
            if int(lib.fkv_crc32c(0, data[:length], length)) != crc:
                wrong.append(kind)
                what = f"section {kind} of the directory is damaged"
                self._add(DAMAGE, what, offset // limits.PAGE_BYTES, "directory")
        if not wrong:
            what = "the directory's sections contradict each other"
            self._add(DAMAGE, what, fault="directory")

    def _sealed(self, file: ReadFile) -> None:
        contents = self.segment.contents
        assert contents is not None
        self.report.directories += 1
        records = contents.records
        starts = np.cumsum(records["block_count"], dtype=np.int64) - records["block_count"]
        for row, start in zip(records, starts.tolist(), strict=True):
            blocks = contents.blocks[start : start + int(row["block_count"])]
            self._record(file, row, blocks, contents.namespaces[int(row["namespace_ordinal"])])
        found = set()
        for first, end in gaps(records, contents.next_page):
            view = header_at(file, self.segment.uuid, self.segment.epoch, first, end)
            if view is not None and view.good and view["kind"] == lib.FKV_KIND_NAMESPACE:
                found.add(view.namespace_digest)
                self._namespace(view)
        for digest in contents.namespaces:
            if digest not in found:
                what = f"the record of namespace {digest.hex()[:16]} is damaged or gone"
                self._add(DAMAGE, what, fault="namespace")
        self._bloom(file)

    def _bloom(self, file: ReadFile) -> None:
        footer, contents = self.segment.footer, self.segment.contents
        assert footer is not None
        assert contents is not None
        for kind, offset, length, _ in footer.sections:
            if kind != lib.FKV_SECTION_BLOOM:
                continue
            page = offset // limits.PAGE_BYTES
            data = file.pages(page, -(-length // limits.PAGE_BYTES))
            digests = np.ascontiguousarray(contents.blocks["digest"])
            hits = np.zeros(len(digests), np.uint8)
            lib.fkv_bloom_test(
                data,
                length,
                pointer(digests, "uint8_t *"),
                len(digests),
                pointer(hits, "uint8_t *"),
            )
            if not hits.all():
                what = "the Bloom section lacks blocks of the segment"
                self._add(DAMAGE, what, page, "directory")

    def _record(self, file: ReadFile, row: Any, blocks: Any, namespace: bytes) -> None:
        page, segment = int(row["page"]), self.segment
        self.report.records += 1
        digests = [bytes(digest) for digest in blocks["digest"]]
        live = self.view.live_blocks(segment, page, digests)
        kind, suffix = (DAMAGE, "") if any(live) else (NOTE, _DEAD)
        view = header_at(file, segment.uuid, segment.epoch, page, segment.next_page())
        if view is None or not view.good:
            self._add(kind, f"the record header is damaged{suffix}", page, "record")
            return
        wrong = [
            name
            for name in DIR_RECORD.names or ()
            if name not in ("page", "namespace_ordinal", "reserved") and view[name] != row[name]
        ]
        if view.namespace_digest != namespace or [b.digest for b in view.blocks()] != digests:
            wrong.append("keys")
        if wrong:
            what = f"record and directory differ in {', '.join(wrong)}{suffix}"
            self._add(kind, what, page, "directory")
            return
        self._payload(file, view, live)

    def _payload(self, file: ReadFile, view: HeaderView, live: list[bool]) -> None:
        """Pages that hold live blocks; what lies in others no read can meet."""
        first = view.page + view.header_pages
        payload = file.pages(first, view.pages - view.header_pages)
        self.report.pages += view.pages - view.header_pages
        for bad in view.bad_pages(payload):
            hit = any(live[ordinal] for ordinal in view.blocks_in(bad))
            kind, suffix = (DAMAGE, "") if hit else (NOTE, _DEAD)
            what = f"payload page {bad} of the record at page {view.page} is damaged{suffix}"
            self._add(kind, what, first + bad, "record")

    def _namespace(self, view: HeaderView) -> None:
        self.report.namespace_records += 1
        try:
            json.loads(view.tlv(lib.FKV_TLV_NAMESPACE))
        except ValueError:
            what = "the namespace record holds no JSON"
            self._add(DAMAGE, what, view.page, "namespace")

    # ---- segments without a directory ----

    def _walked(self, file: ReadFile) -> None:
        end = self.segment.next_page()
        spans = []
        for walked in self.segment.walked:
            view = walked.view
            self.report.records += view["kind"] == lib.FKV_KIND_DATA
            self.report.pages += view.pages - view.header_pages
            if view["kind"] == lib.FKV_KIND_NAMESPACE:
                self._namespace(view)
            spans.append((view.page, view.pages))
            for bad in walked.bad_pages:
                page = view.page + view.header_pages + bad
                if view.page >= end:
                    what = f"the record at page {view.page} was not written to its end"
                    self._add(UNFINISHED, what, page)
                    break
                what = f"payload page {bad} of the record at page {view.page} is damaged"
                self._add(DAMAGE, what, page, "scanned")
        rows = np.array(spans, [("page", np.int64), ("pages", np.int64)])
        for first, stop in gaps(rows, end):
            self._gap(file, first, stop)
        self._lost_footer(file, end)

    def _gap(self, file: ReadFile, first: int, stop: int) -> None:
        """Pages in front of a good record that belong to none: damage, or a write that was lost."""
        segment = self.segment
        for page in range(first, stop):
            view = header_at(file, segment.uuid, segment.epoch, page, segment.end_page)
            if view is None:
                continue
            if self._is_stale(view):
                self._add(NOTE, f"pages {first} to {stop - 1} were never written", first)
            else:
                self._add(DAMAGE, "the record header is damaged", page, "scanned")
            return
        if not any(file.pages(first, stop - first)):
            self._add(NOTE, f"pages {first} to {stop - 1} were never written", first)
            return
        kind = DAMAGE if segment.epoch == 1 else NOTE
        self._add(kind, f"pages {first} to {stop - 1} belong to no record", first, "scanned")

    def _is_stale(self, view: HeaderView) -> bool:
        """Whether it is a record of an earlier epoch."""
        segment = self.segment
        earlier = range(segment.epoch - 1, max(0, segment.epoch - 1 - _STALE_EPOCHS), -1)
        return any(HeaderView(view.data, segment.uuid, e, view.page).good for e in earlier)

    def _lost_footer(self, file: ReadFile, end: int) -> None:
        """A directory is written just in front of its footer: alone it tells of a lost one.

        In the newest segment the writer may be about to write it, or have ended there.
        """
        segment, contents = self.segment, self.segment.contents
        assert contents is not None
        if segment.footer_damaged or segment.directory_damaged or not len(contents.records):
            return
        row = contents.records[0].tobytes()
        if end < segment.end_page and file.page(end)[: len(row)] == row:
            kind = UNFINISHED if segment.state == "open" and self._is_newest() else DAMAGE
            self._add(kind, "the directory has no footer", segment.end_page, "directory")

    def _is_newest(self) -> bool:
        """Whether no segment began later."""
        headers = [one.header for one in self.view.segments.values() if one.counts]
        mine = self.segment.header
        return mine is not None and mine.first_sequence == max(
            header.first_sequence for header in headers if header is not None
        )
