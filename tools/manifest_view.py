"""The manifest's log entry by entry: what it holds, and whether it ends well.

Invariant: an end that a writer or a crash may have left (an entry cut short, zeros, a sector that
was not written) is `unfinished`; an entry of full length with a wrong checksum, or one with good
entries behind it, is damage.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashkv import limits
from flashkv.checksums import crc32c
from flashkv.native import ffi, lib

from .segment_view import read_whole

ENTRY_NAMES: Final = {
    lib.FKV_MANIFEST_BEGIN: "begin",
    lib.FKV_MANIFEST_OPENED: "opened",
    lib.FKV_MANIFEST_FREED: "freed",
    lib.FKV_MANIFEST_KILL: "kill",
    lib.FKV_MANIFEST_NAMESPACE: "namespace",
    lib.FKV_MANIFEST_RETIRED: "retired",
    lib.FKV_MANIFEST_PROFILE: "profile",
    lib.FKV_MANIFEST_VOID: "void",
}
PAYLOAD_BYTES_MAX: Final = 4096 * int(ffi.sizeof("fkv_manifest_kill"))
"""The longest that is written: a batch of kills; an identity is shorter."""
_SECTOR: Final = 512
_ZEROS: Final = 32
_ENTRY: Final = int(ffi.sizeof("fkv_manifest_entry"))
_KILL: Final = int(ffi.sizeof("fkv_manifest_kill"))
_FIXED: Final = {
    lib.FKV_MANIFEST_BEGIN: int(ffi.sizeof("fkv_manifest_begin")),
    lib.FKV_MANIFEST_OPENED: int(ffi.sizeof("fkv_manifest_segment")),
    lib.FKV_MANIFEST_FREED: int(ffi.sizeof("fkv_manifest_segment")),
    lib.FKV_MANIFEST_RETIRED: int(ffi.sizeof("fkv_manifest_retired")),
    lib.FKV_MANIFEST_VOID: int(ffi.sizeof("fkv_manifest_void")),
}


@dataclass(frozen=True)
class ManifestFacts:
    """damage: in words, empty where there is none. kills: blocks that its entries name."""

    name: str
    found: bool
    generation: int
    file_bytes: int
    good_bytes: int
    entries: dict[str, int]
    kills: int
    unfinished: bool
    damage: str


def manifest_facts(path: Path, store_uuid: bytes, generation: int) -> ManifestFacts:
    """Reads a log."""
    data = read_whole(path)
    if data is None:
        return ManifestFacts(
            path.name, False, generation, 0, 0, {}, 0, False, "missing or unreadable"
        )
    counts: Counter[str] = Counter()
    at = ordinal = kills = 0
    while (end := _entry_end(data, at, ordinal, store_uuid)) is not None:
        entry = ffi.from_buffer("fkv_manifest_entry *", data[at : at + _ENTRY])
        counts[ENTRY_NAMES.get(int(entry.type), str(entry.type))] += 1
        if entry.type == lib.FKV_MANIFEST_KILL:
            kills += int(entry.length_bytes) // _KILL
        at, ordinal = end, ordinal + 1
    damage = _damage(data, at, ordinal, store_uuid)
    if not damage and at:
        begin = ffi.from_buffer("fkv_manifest_begin *", data[_ENTRY:])
        if bytes(begin.store_uuid) != store_uuid or begin.generation != generation:
            damage = "it begins as another log"
    return ManifestFacts(
        name=path.name,
        found=True,
        generation=generation,
        file_bytes=len(data),
        good_bytes=at,
        entries=dict(counts),
        kills=kills,
        unfinished=at < len(data) and not damage,
        damage=damage,
    )


def _entry_end(data: bytes, at: int, ordinal: int | None, store_uuid: bytes) -> int | None:
    """Where the entry at `at` ends, padding included; None where it is none. ordinal None: any."""
    if at + _ENTRY > len(data):
        return None
    entry = ffi.from_buffer("fkv_manifest_entry *", data[at : at + _ENTRY])
    length = int(entry.length_bytes)
    end = at + _ENTRY + length
    if length > PAYLOAD_BYTES_MAX or end > len(data) or ordinal not in (None, entry.ordinal):
        return None
    if crc32c(crc32c(0, store_uuid), data[at + 4 : end]) != entry.crc:
        return None
    return at + _ENTRY + (length + 7 & ~7)


def _damage(data: bytes, at: int, ordinal: int, store_uuid: bytes) -> str:
    """What is wrong from `at` on, where the good entries end; empty for an end that may be so."""
    rest = data[at:]
    if not at:
        return "its first entry is damaged"
    if not any(rest):
        return ""
    for later in range(at + 8, min(len(data), at + limits.MIB), 8):
        if _entry_end(data, later, None, store_uuid) is not None:
            return f"entry {ordinal} at byte {at} is damaged; good entries follow and are not used"
    if len(rest) < _ENTRY or _lost_sector(data, at):
        return ""
    entry = ffi.from_buffer("fkv_manifest_entry *", rest[:_ENTRY])
    length = int(entry.length_bytes)
    plausible = not entry.reserved and entry.ordinal == ordinal and _fits(int(entry.type), length)
    if plausible and len(rest) < _ENTRY + length:
        return ""
    return f"the last entry, {ordinal} at byte {at}, is damaged"


def _lost_sector(data: bytes, at: int) -> bool:
    """Whether a sector that lies behind `at`, or its part that does, was never written.

    A crash may keep the later ones of an append. Entries have no such runs of zeros.
    """
    starts = [at, *range((at // _SECTOR + 1) * _SECTOR, len(data), _SECTOR)]
    parts = [data[a : (a // _SECTOR + 1) * _SECTOR] for a in starts]
    return any(len(part) >= _ZEROS and not any(part) for part in parts)


def _fits(kind: int, length: int) -> bool:
    """Whether a payload of that type may have that length."""
    if kind in (lib.FKV_MANIFEST_NAMESPACE, lib.FKV_MANIFEST_PROFILE):
        return limits.NAMESPACE_BYTES < length <= PAYLOAD_BYTES_MAX
    if kind == lib.FKV_MANIFEST_KILL:
        return 0 < length <= PAYLOAD_BYTES_MAX and length % _KILL == 0
    return length == _FIXED.get(kind)
