"""A segment's records, one record in full, pages, and where a key lies.

Invariant: a header that is not right is shown by its fixed fields alone and marked as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flashkv import limits
from flashkv.errors import NotAStoreError
from flashkv.native import lib

from .facts import as_json, namespace_records
from .inspection import StoreView
from .record_view import (
    CODEC_NAMES,
    FIDELITY_NAMES,
    KIND_NAMES,
    BlockFacts,
    HeaderView,
    PlaneFacts,
    StreamFacts,
    StripeFacts,
    TlvFacts,
    flag_names,
)
from .segment_view import ReadFile, SegmentView, header_at, walk_segment


@dataclass(frozen=True)
class RecordFacts:
    """One record of a segment. problem: empty where its header and pages are right."""

    segment: int
    page: int
    pages: int
    header_pages: int
    kind: str
    sequence: int
    namespace: bytes
    group: int
    codec: str
    fidelity: str
    flags: str
    tokens: int
    blocks: int
    live_blocks: int
    problem: str = ""


@dataclass(frozen=True)
class PageCrc:
    """Checksum of a payload page. page: of the payload."""

    page: int
    crc: int
    good: bool


@dataclass(frozen=True)
class RecordDetail:
    """Everything that a record's header says, and whether header and pages are right."""

    segment: int
    page: int
    epoch: int
    segment_uuid: bytes
    header_good: bool
    header: dict[str, Any]
    shard: str
    identity: dict[str, Any] | None
    tlvs: list[TlvFacts]
    blocks: list[BlockFacts]
    planes: list[PlaneFacts]
    order: str | None
    order_block_tokens: int | None
    streams: list[StreamFacts]
    stripes: list[StripeFacts]
    page_crcs: list[PageCrc]


def segment_of(view: StoreView, number: int) -> SegmentView:
    """The segment of that number. Raises NotAStoreError."""
    segment = view.segments.get(number)
    if segment is None or segment.state == "missing":
        known = ", ".join(str(s.number) for s in view.segments.values() if s.state != "missing")
        raise NotAStoreError(f"{view.path} has no segment {number}", limit=known or "none")
    return segment


def segment_records(view: StoreView, segment: SegmentView) -> list[RecordFacts]:
    """All records of the segment's epoch in the order of their pages, those of namespaces too."""
    if segment.state == "sealed":
        found = [*_rows(view, segment)]
        views = [(record, "") for record in namespace_records(segment)]
    else:
        found = []
        walked = segment.walked
        if not walked and segment.header is not None:  # of an epoch that ended: what is left of it
            with segment.open() as file:
                walked = walk_segment(segment, file)
        views = [(w.view, f"{len(w.bad_pages)} bad pages" if w.bad_pages else "") for w in walked]
    found += [_fact_of(view, segment, record, problem) for record, problem in views]
    return sorted(found, key=lambda record: record.page)


def _rows(view: StoreView, segment: SegmentView) -> Iterator[RecordFacts]:
    contents = segment.contents
    assert contents is not None
    start = 0
    for row in contents.records:
        digests = contents.blocks["digest"][start : start + int(row["block_count"])]
        start += int(row["block_count"])
        page = int(row["page"])
        yield RecordFacts(
            segment=segment.number,
            page=page,
            pages=int(row["pages"]),
            header_pages=int(row["header_pages"]),
            kind="data",
            sequence=int(row["sequence"]),
            namespace=contents.namespaces[int(row["namespace_ordinal"])],
            group=int(row["group"]),
            codec=CODEC_NAMES.get(int(row["codec"]), str(row["codec"])),
            fidelity=FIDELITY_NAMES.get(int(row["fidelity"]), str(row["fidelity"])),
            flags=flag_names(int(row["flags"])),
            tokens=int(row["tokens"]),
            blocks=int(row["block_count"]),
            live_blocks=sum(view.live_blocks(segment, page, [bytes(d) for d in digests])),
        )


def _fact_of(
    view: StoreView, segment: SegmentView, record: HeaderView, problem: str
) -> RecordFacts:
    data = record["kind"] == lib.FKV_KIND_DATA
    digests = [block.digest for block in record.blocks()] if data else []
    return RecordFacts(
        segment=segment.number,
        page=record.page,
        pages=record.pages,
        header_pages=record.header_pages,
        kind=KIND_NAMES.get(record["kind"], str(record["kind"])),
        sequence=record["sequence"],
        namespace=record.namespace_digest,
        group=record["group"],
        codec=CODEC_NAMES.get(record["codec"], "") if data else "",
        fidelity=FIDELITY_NAMES.get(record["fidelity"], "") if data else "",
        flags=flag_names(record["flags"]),
        tokens=record["tokens"],
        blocks=record["block_count"],
        live_blocks=sum(view.live_blocks(segment, record.page, digests)),
        problem=problem,
    )


# ---- one record ---------------------------------------------------------------------------------


def check_page(view: StoreView, segment: SegmentView, page: int) -> None:
    """Raises NotAStoreError for a page beyond the segment's end."""
    pages = max(segment.file_bytes // limits.PAGE_BYTES, segment.end_page + 1)
    if not 0 <= page < pages:
        raise NotAStoreError(
            f"segment {segment.number} of {view.path} has no page {page}", limit=f"0 to {pages - 1}"
        )


def page_bytes(view: StoreView, number: int, page: int) -> bytes:
    """One page as it is. Raises NotAStoreError, OSError."""
    segment = segment_of(view, number)
    check_page(view, segment, page)
    with segment.open() as file:
        return file.pages(page, 1)


def record_detail(view: StoreView, number: int, page: int) -> RecordDetail:
    """The record whose header is at a page. Raises NotAStoreError where nothing looks like one."""
    segment = segment_of(view, number)
    check_page(view, segment, page)
    with segment.open() as file:
        header = header_at(file, segment.uuid, segment.epoch, page, segment.end_page)
        if header is None:
            raise NotAStoreError(
                f"page {page} of segment {number} begins no record",
                advice=f"see --segment {number} for the records' pages",
            )
        return _detail(view, segment, header, file)


def _detail(
    view: StoreView, segment: SegmentView, header: HeaderView, file: ReadFile
) -> RecordDetail:
    good = header.good
    data = good and header["kind"] == lib.FKV_KIND_DATA
    order = header.order() if data else None
    crcs = header.page_crcs().tolist() if data else []
    payload = file.pages(header.page + header.header_pages, len(crcs)) if len(crcs) else b""
    bad = set(header.bad_pages(payload)) if data else set()
    own = header.tlv(lib.FKV_TLV_NAMESPACE) if good else b""
    text = own or view.state.namespaces.get(header.namespace_digest, b"")
    return RecordDetail(
        segment=segment.number,
        page=header.page,
        epoch=segment.epoch,
        segment_uuid=segment.uuid,
        header_good=good,
        header=header.header_fields(),
        shard=header.shard_text(),
        identity=as_json(text),
        tlvs=header.tlvs() if good else [],
        blocks=_blocks(view, segment, header) if data else [],
        planes=header.planes() if data else [],
        order=order[0] if order else None,
        order_block_tokens=order[1] if order else None,
        streams=header.streams() if data else [],
        stripes=header.stripes() if data else [],
        page_crcs=[PageCrc(n, crc, n not in bad) for n, crc in enumerate(crcs)],
    )


def _blocks(view: StoreView, segment: SegmentView, header: HeaderView) -> list[BlockFacts]:
    blocks = header.blocks()
    live = view.live_blocks(segment, header.page, [block.digest for block in blocks])
    return [replace(block, live=alive) for block, alive in zip(blocks, live, strict=True)]


# ---- keys ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyPlace:
    """A block that has the key. live: reads find this one."""

    segment: int
    page: int
    sequence: int
    ordinal: int
    first_token: int
    tokens: int
    namespace: bytes
    shard: str
    key: bytes
    live: bool


def key_candidates(text: str) -> list[bytes]:
    """What a key on the command line may mean: hex:..., text:..., else both where it is both.

    Raises ValueError for hex: with what is no hexadecimal.
    """
    if text.startswith("hex:"):
        return [bytes.fromhex(text[4:])]
    if text.startswith("text:"):
        return [text[5:].encode()]
    found = [text.encode()] if text else []
    with suppress(ValueError):
        found.append(bytes.fromhex(text))
    return [key for key in found if 0 < len(key) <= limits.KEY_BYTES_MAX]


def find_key(view: StoreView, keys: list[bytes]) -> list[KeyPlace]:
    """Every block with one of the keys, by a scan of all record headers; the live ones first."""
    wanted = set(keys)
    found: list[KeyPlace] = []
    for segment in view.segments.values():
        for header in _headers(segment):
            if wanted.isdisjoint(header.keys()):
                continue
            found += [
                KeyPlace(
                    segment=segment.number,
                    page=header.page,
                    sequence=header["sequence"],
                    ordinal=block.ordinal,
                    first_token=block.first_token,
                    tokens=block.tokens,
                    namespace=header.namespace_digest,
                    shard=header.shard_text(),
                    key=block.key,
                    live=bool(block.live),
                )
                for block in _blocks(view, segment, header)
                if block.key in wanted
            ]
    return sorted(found, key=lambda place: (not place.live, -place.sequence))


def _headers(segment: SegmentView) -> Iterator[HeaderView]:
    """Headers of the data records that count."""
    if segment.contents is None or not segment.counts:
        return
    if segment.state != "sealed":
        views = [walked.view for walked in segment.walked]
        yield from (view for view in views if view["kind"] == lib.FKV_KIND_DATA)
        return
    with segment.open() as file:
        for page in segment.contents.records["page"].tolist():
            view = header_at(file, segment.uuid, segment.epoch, page, segment.end_page)
            if view is not None and view.good:
                yield view
