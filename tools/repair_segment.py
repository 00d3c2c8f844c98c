"""What of one damaged segment can be mended, and how.

Invariants
  - a directory is written behind the last record that is kept, and lists what a walk over the pages
    bears out; blocks that lost pages are killed by the log before;
  - a header is written only where log, footer or records bound to them tell uuid and epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import directory, limits
from flashkv.manifest_log import KILL
from flashkv.native import aligned_array, lib, pointer
from flashkv.options import Options
from flashkv.recovery import Contents
from flashkv.segments import Segment, encode_header
from flashkv.superblock import Superblock

from .facts import namespace_records
from .findings import Finding
from .inspection import StoreView
from .record_view import HeaderView
from .segment_hands import SegmentHands
from .segment_view import SegmentView, Walked, contents_of, gaps, header_at, walk_segment

Act = Callable[[SegmentHands], None]
OTHERS: Final = (
    "it is no segment of this store, which takes its space for free: move the file away if it is"
    " wanted"
)


@dataclass
class SegmentPlan:
    """Steps as (in words, what to do). kills: rows for the log, of what lost its bytes.

    freed_because: in words; the log is to say that the present epoch is dead.
    """

    number: int
    file: str
    steps: list[tuple[str, Act]] = field(default_factory=list)
    left: list[tuple[Finding, str]] = field(default_factory=list)
    kills: NDArray[Any] = field(default_factory=lambda: np.zeros(0, KILL))
    freed_because: str = ""

    @property
    def for_log(self) -> bool:
        """The log has to say something of it."""
        return bool(len(self.kills) or self.freed_because)


def plan_segment(
    view: StoreView, segment: SegmentView, findings: list[Finding], block: Superblock
) -> SegmentPlan:
    """What can be done about findings of damage in a segment. block: the store's, to be."""
    return _Planner(view, segment, findings, block).plan


def identities(view: StoreView) -> dict[bytes, bytes]:
    """Readable identities by digest: the log's, and what segments tell."""
    found = dict(view.state.namespaces)
    for segment in view.segments.values():
        if segment.contents is None or all(d in found for d in segment.contents.namespaces):
            continue
        try:
            records = namespace_records(segment)
        except OSError:
            continue
        for record in records:
            found.setdefault(record.namespace_digest, record.tlv(lib.FKV_TLV_NAMESPACE))
    return found


class _Planner:
    """Makes the plan of one segment."""

    def __init__(
        self, view: StoreView, segment: SegmentView, findings: list[Finding], block: Superblock
    ) -> None:
        self._view = view
        self._segment = segment
        self._block = block
        self._size = block.segment_bytes
        self._of: dict[str, list[Finding]] = {}
        for finding in findings:
            self._of.setdefault(finding.fault, []).append(finding)
        self.plan = SegmentPlan(segment.number, segment.path.name)
        self._contents = segment.contents
        self._walked: list[Walked] = list(segment.walked)
        try:
            self._plan()
        except OSError as error:
            why = f"it can't be read: {error.strerror}"
            self.plan = SegmentPlan(segment.number, segment.path.name)
            self.plan.left = [(finding, why) for finding in findings]

    def _plan(self) -> None:
        if self._missing():
            return
        self._leave("unreadable", "the device can't read it")
        if self._has("length"):
            cut = self._segment.file_bytes > self._size
            what = "cut to its length" if cut else "given its length"
            self._step(what, partial(_set_length, self._segment.number, self._size))
        if self._has("header", "other"):
            self._header()
        rebuild = self._has("directory", "scanned")
        cut_short = self._has("length") and self._segment.state in ("open", "closed")
        if self._segment.counts and (rebuild or cut_short):
            self._directory()
        elif self._has("record"):
            self._kill_damaged()
        if self._segment.counts and (rebuild or cut_short or self._has("namespace")):
            self._namespaces()

    def _has(self, *faults: str) -> bool:
        return any(fault in self._of for fault in faults)

    def _leave(self, fault: str, why: str) -> None:
        self.plan.left += [(finding, why) for finding in self._of.get(fault, [])]

    def _step(self, what: str, act: Act) -> None:
        self.plan.steps.append((what, act))

    def _missing(self) -> bool:
        if not self._has("missing"):
            return False
        path = self._segment.path
        if path.is_symlink() or path.exists():
            self._leave("missing", "something else than a readable file has its name: move it away")
        else:
            self.plan.freed_because = f"{path.name} is gone: the log forgets what it held"
        return True

    # ---- the header ----

    def _header(self) -> None:
        segment, state = self._segment, self._view.state
        known = self._contents is not None and len(self._contents.records) > 0
        if (segment.counts and known) or not (segment.header is None or self._has("other")):
            self._step("its header written anew", partial(_write_header, self._block, segment))
            return
        self._leave("other", OTHERS)
        began = segment.number in state.epochs and segment.number not in state.freed
        if began or not self._has("other"):
            lost = began or not self._view.manifest_found
            why = "nothing tells what it held" if lost else "no part of the store"
            self.plan.freed_because = f"{segment.path.name} ({why}) counts as free"

    # ---- records and the directory ----

    def _walk(self) -> list[Walked]:
        if not self._walked:
            with self._segment.open() as file:
                self._walked = walk_segment(self._segment, file)
        return self._walked

    def _directory(self) -> None:
        """A directory over what the walk finds, for a damaged one or an open end."""
        segment = self._segment
        contents = _kept(self._walk(), segment.end_page)
        self._kill_hit(self._walk(), contents)
        room = segment.end_page - contents.next_page
        bloom = segment.footer is None or any(
            kind == lib.FKV_SECTION_BLOOM for kind, *_ in segment.footer.sections
        )
        counts = (len(contents.records), len(contents.blocks), len(contents.namespaces))
        for with_bloom in (bloom and Options().bloom, False):
            if directory.pages_needed(*counts, bloom=with_bloom) <= room:
                write = partial(_write_directory, segment, contents, self._size, bloom=with_bloom)
                self._step(f"its directory made anew, over {counts[0]} records", write)
                self._contents = contents
                return
        why = "no room for a directory: an open reads all of it, and finds what is whole"
        for fault in ("directory", "scanned"):
            self._leave(fault, why)

    def _kill_hit(self, walked: list[Walked], contents: Contents) -> None:
        """Kills for the blocks that lost pages, of records that are kept."""
        kept = set(contents.records["page"].tolist())
        rows = [
            (one.view.page, one.view["sequence"], ordinal)
            for one in walked
            if one.bad_pages and one.view.page in kept
            for ordinal in _hit(one.view, one.bad_pages)
        ]
        self._add_kills(rows)

    def _kill_damaged(self) -> None:
        """Kills in a segment whose directory is right: what lost its header, or pages."""
        assert self._contents is not None
        pages = {finding.page for finding in self._of["record"]}
        rows = []
        with self._segment.open() as file:
            for row in self._contents.records:
                first, end = int(row["page"]), int(row["page"]) + int(row["pages"])
                if not any(first <= page < end for page in pages if page is not None):
                    continue
                view = header_at(
                    file, self._segment.uuid, self._segment.epoch, first, self._segment.end_page
                )
                if view is None or not view.good:
                    rows.append((first, int(row["sequence"]), int(lib.FKV_KILL_RECORD)))
                    continue
                at = first + view.header_pages
                bad = view.bad_pages(file.pages(at, end - at))
                rows += [(first, view["sequence"], ordinal) for ordinal in _hit(view, bad)]
        self._add_kills(rows)

    def _add_kills(self, rows: list[tuple[int, int, int]]) -> None:
        kills = np.zeros(len(rows), KILL)
        kills["segment"], kills["epoch"] = self._segment.number, self._segment.epoch
        for kill, (page, sequence, ordinal) in zip(kills, rows, strict=True):
            kill["page"], kill["sequence"], kill["ordinal"] = page, sequence, ordinal
        self.plan.kills = np.concatenate([self.plan.kills, kills])

    # ---- namespaces ----

    def _namespaces(self) -> None:
        """Identity records that are damaged, written again where they stood."""
        contents, segment = self._contents, self._segment
        assert contents is not None
        known = identities(self._view)
        for ordinal, digest in enumerate(contents.namespaces):
            if self._stands(digest, contents):
                continue
            mine = contents.records[contents.records["namespace_ordinal"] == ordinal]
            text = known.get(digest)
            place = None
            if text is not None and len(mine):
                data = _namespace_data(segment, digest, text)
                place = self._place_before(int(mine["page"].min()), data, contents)
            if place is None:
                why = "nothing else has the identity, or there is no room for it in front"
                self._leave("namespace", why)
                continue
            what = f"the identity of namespace {digest.hex()[:16]} written anew"
            self._step(what, partial(_write_namespace, segment, data, place))

    def _stands(self, digest: bytes, contents: Contents) -> bool:
        return any(view.namespace_digest == digest for view in self._identity_views(contents))

    def _identity_views(self, contents: Contents) -> list[HeaderView]:
        found = []
        segment = self._segment
        with segment.open() as file:
            for first, end in gaps(contents.records, contents.next_page):
                for page in range(first, end):
                    view = header_at(file, segment.uuid, segment.epoch, page, end)
                    if view is not None and view.good:
                        found.append(view)
        return [view for view in found if view["kind"] == lib.FKV_KIND_NAMESPACE]

    def _place_before(self, end: int, data: bytes, contents: Contents) -> int | None:
        """Where the pages fit in front of a record, on pages that nothing else has."""
        first = end - len(data) // limits.PAGE_BYTES
        free = any(a <= first and end <= b for a, b in gaps(contents.records, contents.next_page))
        taken = any(
            view.page < end and first < view.page + view.pages
            for view in self._identity_views(contents)
        )
        return first if free and not taken else None


# ---- the rows and bytes -------------------------------------------------------------------------


def _hit(view: HeaderView, bad_pages: list[int]) -> list[int]:
    """Blocks of a record that have bytes in these payload pages."""
    return sorted(set().union(*(view.blocks_in(page) for page in bad_pages)))


def _kept(walked: list[Walked], end_page: int) -> Contents:
    """Rows of the records that are to stay: a record of which some block is whole is."""
    starts = [one.view.page for one in walked[1:]] + [end_page] * bool(walked)
    kept = [
        one
        for one, end in zip(walked, starts, strict=True)
        if one.end_page <= end and (not one.bad_pages or _some_whole(one))
    ]
    return contents_of(kept, whole=False)


def _some_whole(one: Walked) -> bool:
    if one.view["kind"] != lib.FKV_KIND_DATA:
        return False
    return len(_hit(one.view, one.bad_pages)) < one.view["block_count"]


def _namespace_data(segment: SegmentView, digest: bytes, text: bytes) -> bytes:
    """The pages of an identity record, not bound to a place yet."""
    room = -(-(len(text) + 256) // limits.PAGE_BYTES) * limits.PAGE_BYTES
    pages = aligned_array(room)
    pages[:] = 0
    created_ms = segment.header.created_ms if segment.header is not None else 0
    size = int(
        lib.fkv_encode_namespace(
            digest, text, len(text), 0, created_ms, pointer(pages, "uint8_t *"), room
        )
    )
    return pages[:size].tobytes()


def _write_namespace(segment: SegmentView, data: bytes, page: int, hands: SegmentHands) -> None:
    bound = aligned_array(len(data))
    bound[:] = np.frombuffer(data, np.uint8)
    lib.fkv_record_bind(pointer(bound, "uint8_t *"), segment.uuid, segment.epoch, page)
    hands.write(segment.number, [(page, bound.tobytes())])


def _write_directory(
    segment: SegmentView, contents: Contents, size: int, hands: SegmentHands, *, bloom: bool
) -> None:
    last = int(contents.records["sequence"].max()) if len(contents.records) else 0
    rows = directory.Directory(contents.records, contents.blocks, contents.namespaces, last)
    body, footer = directory.encode(
        rows, segment.uuid, segment.epoch, contents.next_page, bloom=bloom
    )
    end_page = size // limits.PAGE_BYTES - 1
    parts = [(contents.next_page, body)] if body else []
    hands.write(segment.number, [*parts, (end_page, footer)])


def _write_header(block: Superblock, segment: SegmentView, hands: SegmentHands) -> None:
    row = Segment(segment.number, epoch=segment.epoch, uuid=segment.uuid)
    if segment.header is not None and not segment.by_log:
        row.first_sequence = segment.header.first_sequence
        row.created_ms = segment.header.created_ms
    elif segment.contents is not None and len(segment.contents.records):
        # As recovery takes it from the records.
        row.first_sequence = int(segment.contents.records["sequence"].min())
        row.created_ms = max((one["created_ms"] for one in namespace_records(segment)), default=0)
    page = encode_header(row, block.store_uuid, block.segment_bytes)
    hands.write(segment.number, [(0, page)])


def _set_length(number: int, length_bytes: int, hands: SegmentHands) -> None:
    hands.set_length(number, length_bytes)
