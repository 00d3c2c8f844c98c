"""What flashkv-dump shows, as plain dataclasses: the store, its segments, namespaces, records.

Invariants
  - everything is computed from a StoreView; nothing is written, nothing is guessed;
  - a segment's live, dead, free and directory bytes add up to its size. directory: the segment's
    header, namespace records, directory and footer.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from flashkv import limits
from flashkv.budget import disk_usage
from flashkv.native import lib

from .inspection import StoreView
from .manifest_view import ManifestFacts, manifest_facts
from .record_view import HeaderView
from .segment_view import SegmentView, gaps, header_at


@dataclass(frozen=True)
class Space:
    """Bytes by state."""

    live: int = 0
    dead: int = 0
    free: int = 0
    directory: int = 0


@dataclass(frozen=True)
class SegmentFacts:
    """One segment. age_s: since its epoch began. problem: in words, empty where there is none."""

    number: int
    state: str
    epoch: int
    uuid: bytes
    first_sequence: int
    created_ms: int
    age_s: float
    file_bytes: int
    records: int
    blocks: int
    live_records: int
    live_blocks: int
    killed_blocks: int
    space: Space
    problem: str


@dataclass(frozen=True)
class NamespaceFacts:
    """source: where the readable identity was found. blocks, records: live blocks, all records."""

    digest: bytes
    identity: dict[str, Any] | None
    source: str
    blocks: int
    records: int
    retired_up_to: int | None


@dataclass(frozen=True)
class StoreFacts:
    """The whole store."""

    path: str
    store_uuid: bytes
    format_version: int
    page_bytes: int
    segment_bytes: int
    capacity_bytes: int
    created_ms: int
    geometry: Any
    writer_seen: bool
    superblocks: dict[str, str]
    manifest: ManifestFacts
    disk_bytes: int
    space: Space
    records: int
    blocks: int
    live_records: int
    live_blocks: int
    segments: list[SegmentFacts]
    namespaces: list[NamespaceFacts]


# ---- the store ----------------------------------------------------------------------------------


def store_facts(view: StoreView) -> StoreFacts:
    """Facts of all of it."""
    block = view.block
    segments = [segment_facts(view, segment) for segment in view.segments.values()]
    totals = view.index().totals()
    states = {
        name: view.superblock_faults.get(name)
        or (f"generation {found.generation}" if found is not None else "damaged")
        for name, found in view.superblocks.items()
    }
    return StoreFacts(
        path=str(view.path),
        store_uuid=block.store_uuid,
        format_version=int(lib.FKV_FORMAT_VERSION),
        page_bytes=limits.PAGE_BYTES,
        segment_bytes=block.segment_bytes,
        capacity_bytes=block.capacity_bytes,
        created_ms=block.created_ms,
        geometry=as_json(block.geometry_json),
        writer_seen=view.writer_seen(),
        superblocks=states,
        manifest=manifest_facts(view.manifest_path, block.store_uuid, block.manifest_generation),
        disk_bytes=disk_usage(view.path),
        space=_sum([segment.space for segment in segments]),
        records=sum(segment.records for segment in segments),
        blocks=sum(segment.blocks for segment in segments),
        live_records=totals.records,
        live_blocks=totals.blocks,
        segments=segments,
        namespaces=namespace_facts(view),
    )


def segment_facts(view: StoreView, segment: SegmentView) -> SegmentFacts:
    """Facts of one segment."""
    header = segment.header
    usage = view.index().usage([segment.number])[0] if segment.counts else None
    contents = segment.contents
    created_ms = header.created_ms if header is not None else 0
    return SegmentFacts(
        number=segment.number,
        state=segment.state,
        epoch=segment.epoch,
        uuid=segment.uuid,
        first_sequence=header.first_sequence if header is not None else 0,
        created_ms=created_ms,
        age_s=round(max(0.0, time.time() - created_ms / 1000), 3) if created_ms else 0.0,
        file_bytes=segment.file_bytes,
        records=len(contents.records) if contents is not None else 0,
        blocks=len(contents.blocks) if contents is not None else 0,
        live_records=int(usage["live_records"]) if usage is not None else 0,
        live_blocks=int(usage["live_blocks"]) if usage is not None else 0,
        killed_blocks=len(view.state.kills_of(segment.number)),
        space=_space(segment, int(usage["live_pages"]) if usage is not None else 0),
        problem=_problem(view, segment),
    )


def _space(segment: SegmentView, live_pages: int) -> Space:
    pages = segment.end_page + 1
    if segment.contents is None or not segment.counts:
        return Space(free=0 if segment.state == "missing" else pages * limits.PAGE_BYTES)
    used = segment.next_page()
    of_records = int(segment.contents.records["pages"].sum(dtype=int))
    directory_pages = used - of_records  # header page, namespace records
    if segment.state == "sealed" and segment.footer is not None:
        first, end = segment.footer.span()
        directory_pages += (end - first) // limits.PAGE_BYTES
    directory_pages += 1  # the footer's page, or its reserve
    dead = of_records - live_pages
    free = pages - directory_pages - of_records
    return Space(
        *(count * limits.PAGE_BYTES for count in (live_pages, dead, free, directory_pages))
    )


def _sum(parts: list[Space]) -> Space:
    return Space(
        *(sum(getattr(part, name) for part in parts) for name in Space.__dataclass_fields__)
    )


def _problem(view: StoreView, segment: SegmentView) -> str:
    if segment.state == "missing":
        return "the file is missing or unreadable"
    if segment.by_log:
        return "header damaged; uuid and epoch by the manifest"
    if segment.footer_damaged:
        return "footer damaged; contents by a scan"
    if segment.directory_damaged:
        return "directory damaged; contents by a scan"
    size = view.block.segment_bytes
    if size and segment.file_bytes != size and segment.counts:
        return f"the file has {segment.file_bytes} bytes"
    if sum(bool(walked.bad_pages) for walked in segment.walked):
        return "records with wrong pages"
    return ""


# ---- namespaces ---------------------------------------------------------------------------------


def namespace_facts(view: StoreView) -> list[NamespaceFacts]:
    """All namespaces that the manifest or a segment knows."""
    index = view.index()
    records: Counter[bytes] = Counter()
    for segment in view.segments.values():
        if segment.contents is not None and segment.counts:
            names = segment.contents.namespaces
            for ordinal in segment.contents.records["namespace_ordinal"].tolist():
                records[names[ordinal]] += 1
    known = view.state.namespaces
    lost = set(records) - set(known)
    of_segments = _identities_in_segments(view, lost) if lost else {}
    facts = []
    for digest in [*known, *sorted(lost)]:
        text, source = known.get(digest), "manifest"
        if text is None:
            text, source = of_segments.get(digest, (None, "not found"))
        number = view.namespace_ids.get(digest)
        facts.append(
            NamespaceFacts(
                digest=digest,
                identity=as_json(text) if text is not None else None,
                source=source,
                blocks=index.namespace_blocks(number) if number is not None else 0,
                records=records[digest],
                retired_up_to=view.state.retired.get(digest),
            )
        )
    return facts


def _identities_in_segments(view: StoreView, digests: set[bytes]) -> dict[bytes, tuple[bytes, str]]:
    found: dict[bytes, tuple[bytes, str]] = {}
    for segment in view.segments.values():
        if segment.contents is None or not digests - set(found):
            continue
        for record in namespace_records(segment):
            text = record.tlv(lib.FKV_TLV_NAMESPACE)
            found[record.namespace_digest] = (text, f"segment {segment.number}")
    return found


def namespace_records(segment: SegmentView) -> list[HeaderView]:
    """The segment's own records of the namespaces in it."""
    if segment.state != "sealed" or segment.contents is None:
        views = [walked.view for walked in segment.walked]
        return [view for view in views if view["kind"] == lib.FKV_KIND_NAMESPACE]
    found = []
    with segment.open() as file:
        for first, end in gaps(segment.contents.records, segment.contents.next_page):
            view = header_at(file, segment.uuid, segment.epoch, first, end)
            if view is not None and view.good and view["kind"] == lib.FKV_KIND_NAMESPACE:
                found.append(view)
    return found


def as_json(text: bytes) -> Any:
    """Parsed JSON; what is none comes as hexadecimal."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return {"unreadable": text.hex()}
