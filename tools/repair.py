"""What of a damaged store can be mended, and the mending.

Invariants
  - a plan is made of what was read; nothing is written before apply(), and then only under the
    store's lock;
  - the log and the superblocks come first, by the same way as at every opening: what follows in
    segments is known to the log, so that a crash in between leaves what opens, or can be repaired;
  - nothing that holds a live record is ever overwritten; deletes that a log still has hold;
  - what can't be believed is left as it is, and named.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from flashkv import limits, opening
from flashkv.budget import choose_segment_bytes, disk_usage
from flashkv.errors import CapacityError, FlashKVError, StoreError
from flashkv.filesystem import DISK, FileSystem
from flashkv.folder import NEW_LOG, SUPERBLOCKS, manifest_name, reserve_of
from flashkv.geometry import KVGeometry
from flashkv.manifest import Manifest, new_uuid
from flashkv.options import Options
from flashkv.recovery import RecoveryReport
from flashkv.segment_writer import kill_rows
from flashkv.superblock import Superblock

from .evidence import agreed_by_damaged, choose_geometry, log_generations
from .findings import Finding
from .inspection import StoreView
from .repair_segment import SegmentPlan, identities, plan_segment
from .segment_hands import SegmentHands

HOW_TO_SAY_A_GEOMETRY: Final = (
    "give it as --geometry JSON, as KVGeometry.to_json() writes it, for instance by\n"
    '  python3 -c "import flashkv; print('
    'flashkv.KVGeometry.gqa(layers=32, kv_heads=8, head_dim=128).to_json().decode())"'
)


@dataclass(frozen=True)
class Step:
    """Something that is mended, in words, and how."""

    what: str
    file: str
    act: Callable[[SegmentHands], None]


@dataclass(frozen=True)
class Left:
    """Damage that stays, and why."""

    finding: Finding
    why: str


@dataclass
class Plan:
    """All of a repair. notes: what was chosen; warnings: what may be lost by it."""

    steps: list[Step] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def apply(
        self,
        view: StoreView,
        files: FileSystem = DISK,
        done: Callable[[Step], None] = lambda _step: None,
    ) -> None:
        """Carries the steps out, in their order. Under the lock. Raises StoreError, OSError."""
        hands = SegmentHands(view.folder, files)
        try:
            for step in self.steps:
                step.act(hands)
                done(step)
        finally:
            hands.close()


def make_plan(
    view: StoreView,
    findings: Iterable[Finding],
    *,
    geometry: KVGeometry | None = None,
    capacity_bytes: int | None = None,
) -> Plan:
    """What can be done about findings of damage. view: with salvage.

    geometry, capacity_bytes: for superblocks that are both lost, in place of what the traces tell.
    """
    found = list(findings)
    plan = Plan()
    if not found:
        return plan
    of_segment: dict[int, list[Finding]] = {}
    of_store: list[Finding] = []
    for finding in found:
        if finding.segment is None:
            of_store.append(finding)
        elif finding.segment in view.segments:  # beside a writer it may be gone again
            of_segment.setdefault(finding.segment, []).append(finding)
    try:
        if view.superblocks_lost:
            block = _new_block(view, geometry, capacity_bytes, plan)
        else:
            block = _ruling_block(view)
    except FlashKVError as error:
        plan.left = [Left(finding, str(error)) for finding in found]
        return plan
    parts = [
        plan_segment(view, view.segments[number], faults, block)
        for number, faults in sorted(of_segment.items())
    ]
    log = _LogPlan(view, block, of_store, parts)
    hindrance = log.hindrance()
    if hindrance:
        plan.left = [Left(finding, hindrance) for finding in found]
        return plan
    plan.left = [Left(finding, why) for part in parts for finding, why in part.left]
    steps = [Step(what, part.file, act) for part in parts for what, act in part.steps]
    if steps or of_store or any(part.for_log for part in parts):
        plan.steps = [Step(log.what(), manifest_name(log.generation), log.act), *steps]
        plan.warnings += log.warnings()
    return plan


# ---- superblocks --------------------------------------------------------------------------------


def _ruling_block(view: StoreView) -> Superblock:
    """The one that is right, so that the lost one is the first to be written."""
    block = view.block
    right = next((n for n, b in view.superblocks.items() if b and b.store_uuid == block.store_uuid))
    lost = len([b for b in view.superblocks.values() if b and b.store_uuid == block.store_uuid]) < 2
    if lost and SUPERBLOCKS[(block.generation + 1) % 2] == right:
        return replace(block, generation=block.generation + 1)
    return block


def _new_block(
    view: StoreView, geometry: KVGeometry | None, capacity_bytes: int | None, plan: Plan
) -> Superblock:
    """What new superblocks are to say. Raises StoreError in words where the traces don't tell."""
    known = identities(view)
    chosen, possible = choose_geometry(view.folder, known.values())
    if geometry is not None:
        chosen = geometry.to_json()
    if chosen is None:
        names = "".join(f"\n  {text.decode()}" for text in possible)
        which = f"which of these is the store's geometry:{names}\n" * bool(possible)
        raise StoreError(f"nothing tells {which or 'the geometry; '}{HOW_TO_SAY_A_GEOMETRY}")
    store_uuid = view.block.store_uuid if any(view.block.store_uuid) else new_uuid()
    least = least_capacity(view, view.block.segment_bytes)
    capacity = capacity_bytes or agreed_by_damaged(view.folder, "capacity_bytes") or least
    segment_bytes = view.block.segment_bytes
    if not segment_bytes:
        if view.segments:
            raise StoreError("nothing tells how long segments are: no file has a length of theirs")
        largest = max(tokens for _, tokens in Options().growth)
        capacity = capacity_bytes or agreed_by_damaged(view.folder, "capacity_bytes") or limits.GIB
        segment_bytes = choose_segment_bytes(capacity, KVGeometry.from_json(chosen), None, largest)
    elif capacity < least:
        raise CapacityError(
            "the capacity is too small for what the store holds: an open would drop segments",
            value=f"{capacity} bytes",
            limit=f"at least {least} bytes",
            advice="give a larger --capacity; a smaller one can be given when the store is opened",
        )
    plan.notes.append(f"the geometry is {chosen.decode()}")
    plan.notes.append(f"the capacity is {capacity} bytes; flashkv.open(capacity=...) sets another")
    return replace(
        view.block,
        store_uuid=store_uuid,
        segment_bytes=segment_bytes,
        capacity_bytes=capacity,
        geometry_json=chosen,
        created_ms=view.block.created_ms or opening.now_ms(),
    )


def least_capacity(view: StoreView, segment_bytes: int) -> int:
    """The smallest capacity with which an open drops nothing: all files, and the reserve."""
    files = max(len(view.segments), limits.SEGMENT_COUNT_MIN)
    logs = sum(_size(view.folder / manifest_name(g)) for g in log_generations(view.folder))
    others = disk_usage(view.path, view.folder)
    need = files * segment_bytes + others
    capacity = need + limits.MIB
    while capacity - max(reserve_of(capacity), 2 * logs + limits.MIB) < need:
        capacity += max(limits.MIB, capacity // 256)
    return capacity


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


# ---- the log ------------------------------------------------------------------------------------


class _LogPlan:
    """The log, begun anew twice, so that both superblocks are written: as at every open."""

    def __init__(
        self,
        view: StoreView,
        block: Superblock,
        of_store: list[Finding],
        parts: list[SegmentPlan],
    ) -> None:
        self._view = view
        self._block = block
        self._of_store = of_store
        self._parts = parts
        self.generation = block.manifest_generation + 2

    def hindrance(self) -> str:
        """In words: what has the name of a file that must be written, and is none."""
        names = [*SUPERBLOCKS, NEW_LOG]
        names += [manifest_name(self.generation - back) for back in (0, 1)]
        for name in names:
            path = self._view.folder / name
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
                return f"{path} is a link or folder: move it out of the way first"
        return ""

    def what(self) -> str:
        """In words."""
        lost = [finding.file for finding in self._of_store if finding.fault == "superblock"]
        words = [f"{' and '.join(lost)} written anew"] if lost else []
        source = self._view.log_used
        if self._view.manifest_found:
            words.append("the log begun anew")
        elif source is None:
            words.append("a log made from the segments")
        else:
            words.append(f"a log made from {manifest_name(source)} and the segments")
        kills = sum(len(part.kills) for part in self._parts)
        if kills:
            words.append(f"{kills} blocks or records forgotten, whose bytes are lost")
        words += [part.freed_because for part in self._parts if part.freed_because]
        return "; ".join(words)

    def warnings(self) -> list[str]:
        """What deletes may be lost."""
        view = self._view
        if view.state.damaged_entries:
            return ["the log was damaged inside: blocks that only lost entries deleted may be back"]
        if view.manifest_found and not view.superblocks_lost:
            return []
        if view.log_used is None:
            return ["no log was whole: blocks that were deleted or replaced may be back"]
        newest = log_generations(view.folder)[0]
        before = manifest_name(view.log_used - 1)
        # A log and the one before it are kept: alone, it may be that one.
        alone = view.log_used > 1 and not (view.folder / before).is_file()
        if newest != view.log_used or not view.manifest_found or alone:
            return [
                f"{manifest_name(view.log_used)} was used, which may not be the last one: blocks"
                " that were deleted or replaced since may be back"
            ]
        return []

    def act(self, hands: SegmentHands) -> None:
        """Writes log and superblocks."""
        view, state = self._view, self._view.state
        index = view.index()
        for dropped in view.dropped:
            state.add_kills(kill_rows(dropped))
        for part in self._parts:
            state.add_kills(part.kills)
            if part.freed_because:
                state.free(part.number, max(1, state.epochs.get(part.number, 0)))
        report = RecoveryReport(last_sequence=self._last_sequence())
        opening.settle_state(state, report, index, view.namespace_ids)
        self._add_namespaces()
        manifest = Manifest(view.folder, self._block, state, hands.files)
        try:
            manifest.checkpoint()
            manifest.checkpoint()
        finally:
            manifest.close()

    def _last_sequence(self) -> int:
        """The highest that any record had."""
        seen = [0]
        for segment in self._view.segments.values():
            if segment.header is not None and segment.counts:
                seen.append(segment.header.first_sequence - 1)
            if segment.footer is not None:
                seen.append(segment.footer.last_sequence)
            if segment.contents is not None and len(segment.contents.records):
                seen.append(int(np.max(segment.contents.records["sequence"])))
        return max(seen)

    def _add_namespaces(self) -> None:
        """Identities that the log lost and segments tell, as far as it has room for them."""
        state, view = self._view.state, self._view
        room = reserve_of(self._block.capacity_bytes) // limits.NAMESPACE_TEXT_SHARE
        for digest, text in identities(view).items():
            number = view.namespace_ids.get(digest)
            if digest in state.namespaces or number is None:
                continue
            lives = view.index().namespace_blocks(number)
            if lives and state.namespace_bytes() + len(text) <= room:
                state.namespaces[digest] = text
