"""What flashkv-dump prints: tables for people, or the same facts as JSON.

Invariant: with JSON, standard output holds one JSON document and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .facts import NamespaceFacts, SegmentFacts, Space, StoreFacts
from .record_facts import KeyPlace, RecordDetail, RecordFacts
from .verify import DAMAGE, IN_FLUX, VerifyReport

_KEY_SHOWN: Final = 48
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(value: Any) -> Any:
    """Values for JSON: bytes as hexadecimal; a key also as text where it is some."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        found = {str(name): plain(item) for name, item in value.items()}
        key = value.get("key")
        if isinstance(key, bytes) and key.isascii() and key.decode("ascii").isprintable():
            found["key_text"] = key.decode("ascii")
        return found
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def size(count: float) -> str:
    """Bytes in the unit that fits."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def key_text(key: bytes) -> str:
    """A key as people read it."""
    text = key.decode("ascii") if key.isascii() else ""
    if text and text.isprintable():
        return text if len(text) <= _KEY_SHOWN else f"{text[:_KEY_SHOWN]}..."
    hexadecimal = key.hex()
    return hexadecimal if len(key) <= _KEY_SHOWN else f"{hexadecimal[: 2 * _KEY_SHOWN]}..."


def moment(milliseconds: int) -> str:
    """Milliseconds since 1970 as a date in UTC."""
    if not milliseconds:
        return "unknown"
    try:
        when = datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms"
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def age(seconds: float) -> str:
    """A span of time in one unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def identity_text(identity: dict[str, Any] | None) -> str:
    """The fields that are set, without the geometry."""
    if identity is None:
        return "unknown"
    return ", ".join(
        f"{name}={value}" for name, value in identity.items() if value and name != "geometry"
    )


def hex_lines(data: bytes) -> list[str]:
    """Lines of 16 bytes; equal lines that follow one another are one "*"."""
    lines: list[str] = []
    last, skipping = b"", False
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        if part == last and at + 16 < len(data):
            if not skipping:
                lines.append("*")
            skipping = True
            continue
        last, skipping = part, False
        left, right = part[:8].hex(" "), part[8:].hex(" ")
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:04x}  {left:23}  {right:23}  |{text}|")
    return lines


class Output:
    """Prints facts on standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        # Nothing is cut to a terminal's width: keys and digests are there to be copied.
        self.console = Console(highlight=False, soft_wrap=True, width=4096)

    def _json(self, value: Any) -> bool:
        if self.as_json:
            print(json.dumps(plain(value), indent=2))
        return self.as_json

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def _table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Columns that begin with "<" are text, the others numbers."""
        self._line(f"\n{title}")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            left = column.startswith("<")
            table.add_column(column.lstrip("<"), justify="left" if left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(escape(str(value)) for value in row))
        self.console.print(table)

    # ---- the store ----

    def store(self, facts: StoreFacts) -> None:
        """Store, segments, namespaces."""
        if self._json(facts):
            return
        log = facts.manifest
        entries = ", ".join(f"{count} {name}" for name, count in log.entries.items())
        state = log.damage or ("ends in an unfinished entry" if log.unfinished else "whole")
        writer = "a writer has it open" if facts.writer_seen else "no writer seen"
        for line in (
            f"store       {facts.path}",
            f"uuid        {facts.store_uuid.hex()}",
            f"format      version {facts.format_version}, pages of {facts.page_bytes} bytes",
            f"made        {moment(facts.created_ms)}; {writer}",
            f"capacity    {size(facts.capacity_bytes)}, segments of {size(facts.segment_bytes)};"
            f" on disk {size(facts.disk_bytes)}",
            f"geometry    {_geometry(facts.geometry)}",
            *(f"{name} {state}" for name, state in facts.superblocks.items()),
            f"manifest    {log.name}: {state}; {entries}; {log.kills} kills",
            f"space       {_space(facts.space)}",
            f"records     {facts.records}, {facts.live_records} with a live block",
            f"blocks      {facts.blocks}, {facts.live_blocks} live",
        ):
            self._line(line)
        self._segments(facts.segments)
        self._namespaces(facts.namespaces)

    def _segments(self, segments: list[SegmentFacts]) -> None:
        columns = "segment <state epoch age records blocks live killed".split()
        columns += ["live bytes", "dead", "free", "directory", "<"]
        rows = [
            (
                s.number,
                s.state,
                s.epoch,
                age(s.age_s) if s.created_ms else "",
                s.records,
                s.blocks,
                s.live_blocks,
                s.killed_blocks,
                *(size(count) for count in asdict(s.space).values()),
                s.problem,
            )
            for s in segments
        ]
        self._table(f"{len(segments)} segments", columns, rows)

    def _namespaces(self, namespaces: list[NamespaceFacts]) -> None:
        rows = [
            (
                n.digest.hex()[:16],
                n.records,
                n.blocks,
                n.retired_up_to or "",
                n.source,
                identity_text(n.identity),
            )
            for n in namespaces
        ]
        columns = ["<digest", "records", "live blocks", "retired to", "<source", "<identity"]
        self._table(f"{len(namespaces)} namespaces", columns, rows)

    # ---- records, pages, keys ----

    def records(self, records: list[RecordFacts]) -> None:
        """The records of a segment."""
        if self._json(records):
            return
        columns = (
            "page pages header sequence <kind <namespace group <codec <fidelity <flags".split()
        )
        columns += ["tokens", "blocks", "live", "<"]
        rows = [
            (
                r.page,
                r.pages,
                r.header_pages,
                r.sequence,
                r.kind,
                r.namespace.hex()[:16],
                r.group,
                r.codec,
                r.fidelity,
                r.flags,
                r.tokens,
                r.blocks,
                r.live_blocks,
                r.problem,
            )
            for r in records
        ]
        self._table(f"{len(records)} records", columns, rows)

    def record(self, detail: RecordDetail) -> None:
        """One record in full."""
        if self._json(detail):
            return
        state = "right" if detail.header_good else "DAMAGED: only the fixed fields are shown"
        self._line(f"record at segment {detail.segment}, page {detail.page}; epoch {detail.epoch}")
        self._line(f"header checksum and structure: {state}")
        for name, value in detail.header.items():
            self._line(f"  {name:17} {value}")
        self._line(f"  {'shard':17} {detail.shard}")
        self._line(f"  {'identity':17} {identity_text(detail.identity)}")
        if detail.order is not None:
            self._line(f"  {'order':17} {detail.order}")
        self._detail_tables(detail)

    def _detail_tables(self, detail: RecordDetail) -> None:
        tlvs = [(t.name, t.offset_bytes, t.length_bytes) for t in detail.tlvs]
        self._table("TLVs", ["<name", "offset", "bytes"], tlvs)
        blocks = [
            (
                b.ordinal,
                b.first_token,
                b.tokens,
                "live" if b.live else "dead",
                key_text(b.key),
                key_text(b.parent),
            )
            for b in detail.blocks
        ]
        columns = ["block", "first token", "tokens", "<", "<key", "<parent"]
        self._table(f"{len(blocks)} blocks", columns, blocks)
        planes = [
            (n, p.role, p.dtype, p.layers, p.heads, p.vector_bytes)
            for n, p in enumerate(detail.planes)
        ]
        columns = ["plane", "<role", "<dtype", "layers", "heads", "vector bytes"]
        self._table(f"{len(planes)} planes", columns, planes)
        if detail.streams:
            streams = [
                (
                    s.stream,
                    s.layer,
                    s.plane,
                    s.role,
                    s.head,
                    s.full_stripes,
                    s.mode,
                    s.parameters.hex(),
                )
                for s in detail.streams
            ]
            columns = "stream layer plane <role head".split()
            columns += ["full pages", "<mode", "<parameters"]
            self._table(f"{len(streams)} streams", columns, streams)
            stripes = [
                (
                    *(s.stream, s.layer, s.plane, s.head, s.page, s.offset_bytes, s.length_bytes),
                    *(s.first_token, s.tokens),
                )
                for s in detail.stripes
            ]
            columns = "stream layer plane head page offset length".split()
            self._table(f"{len(stripes)} stripes", [*columns, "first token", "tokens"], stripes)
        crcs = [(c.page, f"{c.crc:08x}", "" if c.good else "WRONG") for c in detail.page_crcs]
        self._table(f"{len(crcs)} payload pages", ["page", "CRC-32C", "<"], crcs)

    def page(self, segment: int, number: int, data: bytes) -> None:
        """A page in hexadecimal."""
        if self._json({"segment": segment, "page": number, "bytes": data}):
            return
        self._line(f"segment {segment}, page {number}, byte {number * len(data)} of the file")
        for line in hex_lines(data):
            self._line(line)

    def places(self, places: list[KeyPlace]) -> None:
        """Blocks of a key."""
        if self._json(places):
            return
        rows = [
            (
                f"{p.segment}:{p.page}",
                p.sequence,
                p.ordinal,
                p.first_token,
                p.tokens,
                "live" if p.live else "dead",
                p.namespace.hex()[:16],
                p.shard,
                key_text(p.key),
            )
            for p in places
        ]
        columns = ["<record", "sequence", "block", "first token", "tokens", "<"]
        self._table(f"{len(places)} blocks", [*columns, "<namespace", "<shard", "<key"], rows)

    # ---- verify ----

    def report(self, report: VerifyReport) -> int:
        """What a check found; returns the exit status."""
        status = 1 if report.of(DAMAGE) else 0
        if self._json({"damaged": bool(status), **asdict(report)}):
            return status
        for finding in report.findings:
            page = "" if finding.page is None else f", page {finding.page}"
            self._line(f"{finding.kind}: {finding.file}{page}: {finding.what}")
        self._line(
            f"checked {report.superblocks} superblocks, {report.manifest_entries} manifest entries,"
            f" {report.segments} segments, {report.directories} directories, {report.records}"
            f" records, {report.namespace_records} namespace records, {report.pages} payload pages"
        )
        moved = len(report.of(IN_FLUX))
        if moved:
            self._line(f"{moved} findings in flux: a writer changed the place meanwhile")
        self._line(f"{len(report.of(DAMAGE))} damaged places" if status else "no damage")
        return status


def _space(space: Space) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in asdict(space).items())


def _geometry(geometry: Any) -> str:
    try:
        return "; ".join(
            f"{group['name']} ({group['kind']}): "
            + ", ".join(
                f"{p['role']} {p['layers']} x {p['heads']} x {p['vector_bytes']} B {p['dtype']}"
                for p in group["planes"]
            )
            for group in geometry["groups"]
        )
    except (TypeError, KeyError):
        return "unknown"
