"""Checks every checksum of a store, beside a live writer too.

Invariants
  - damage is reported only if it is there again after a wait, in the same epoch: what a writer
    changes meanwhile is `in flux`;
  - what an interrupted write may leave behind the last good record of a segment without a directory
    is `unfinished`, not damage;
  - damage of a record in which nothing lives any more is a note: no read can meet it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from flashkv import limits
from flashkv.errors import FormatError
from flashkv.folder import (
    NEW_LOG,
    SEGMENTS,
    SUPERBLOCKS,
    is_log,
    is_own_file,
    manifest_name,
)
from flashkv.opening import is_new

from .evidence import QUIET
from .findings import DAMAGE, IN_FLUX, NOTE, UNFINISHED, Finding, VerifyReport
from .inspection import StoreView
from .manifest_view import manifest_facts
from .segment_view import read_whole
from .verify_segment import SegmentCheck

__all__ = ["DAMAGE", "IN_FLUX", "NOTE", "UNFINISHED", "Finding", "VerifyReport", "verify"]

WAITS_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses before damage is believed while a writer is seen; without one the first is enough."""
_SECTOR_BYTES: Final = 512  # what a disk writes whole or not at all


def verify(
    path: Path,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    salvage: bool = False,
    alone: bool = False,
) -> VerifyReport:
    """Checks a whole store. progress(segments done, segments); salvage: see StoreView, which
    says what is raised. alone: the caller has the lock, nobody else changes anything.
    """
    view = StoreView(path, salvage=salvage)
    report = VerifyReport()
    _check(view, report, None, progress)
    waits = WAITS_S if not alone and view.writer_seen() else WAITS_S[:1]
    suspects = report.of(DAMAGE, IN_FLUX)
    for wait in waits:
        if not suspects:
            break
        time.sleep(wait)
        again = VerifyReport()
        numbers = {finding.segment for finding in suspects if finding.segment is not None}
        _check(StoreView(path, salvage=salvage), again, numbers, lambda _done, _all: None)
        suspects = [finding for finding in suspects if finding in again.findings]
    report.findings = [
        _moved(finding) if finding.kind == DAMAGE and finding not in suspects else finding
        for finding in report.findings
    ]
    return report


def _moved(finding: Finding) -> Finding:
    return replace(finding, kind=IN_FLUX, what=f"changed while it was read: {finding.what}")


def _check(
    view: StoreView,
    report: VerifyReport,
    numbers: set[int] | None,
    progress: Callable[[int, int], None],
) -> None:
    """One pass. numbers: only these segments."""
    _check_superblocks(view, report)
    _check_manifest(view, report)
    _check_names(view, report)
    chosen = [s for s in view.segments.values() if numbers is None or s.number in numbers]
    for done, segment in enumerate(chosen):
        progress(done, len(chosen))
        SegmentCheck(view, segment, report).run()
    progress(len(chosen), len(chosen))


def _check_superblocks(view: StoreView, report: VerifyReport) -> None:
    for name, block in view.superblocks.items():
        report.superblocks += 1
        found = partial(Finding, file=name, fault="superblock")
        if block is None or name in view.superblock_faults:
            if _being_made(view, name):
                what = "not written: the making of the store was cut off, it is complete without"
                report.findings.append(found(NOTE, what))
            else:
                report.findings.append(found(DAMAGE, view.superblock_faults[name]))
        elif block.store_uuid != view.block.store_uuid:
            report.findings.append(found(DAMAGE, "it belongs to another store"))


def never_written(folder: Path) -> bool:
    """Whether this is what the making of a store leaves that was cut off before its first
    superblock: the next open makes it anew.
    """
    try:
        new = is_new(folder, QUIET)
    except FormatError:
        return False
    return new and all(_unwritten(folder / name) for name in SUPERBLOCKS)


def _unwritten(path: Path) -> bool:
    """Whether a superblock isn't there, or lacks what is written of it first."""
    page = read_whole(path)
    if page is None:
        return not os.path.lexists(path)
    return len(page) < limits.PAGE_BYTES or not any(page[:_SECTOR_BYTES])


def _being_made(view: StoreView, name: str) -> bool:
    """Whether the second superblock of a store in which nothing ever was is not written yet."""
    state = view.state
    if view.superblocks_lost or view.block.generation != 1 or view.segments:
        return False
    known = state.epochs or state.namespaces or state.retired
    return not known and _unwritten(view.folder / name)


def _check_manifest(view: StoreView, report: VerifyReport) -> None:
    block = view.block
    facts = manifest_facts(view.manifest_path, block.store_uuid, block.manifest_generation)
    report.manifest_entries += sum(facts.entries.values())
    if facts.damage:
        report.findings.append(Finding(DAMAGE, facts.damage, facts.name, fault="log"))
    elif facts.unfinished:
        what = f"bytes {facts.good_bytes} to {facts.file_bytes} are an unfinished entry"
        report.findings.append(Finding(UNFINISHED, what, facts.name))


def _check_names(view: StoreView, report: VerifyReport) -> None:
    """What lies there besides: left by a crash, or with the name of a file and none."""
    generation = view.block.manifest_generation
    needed = {manifest_name(generation), manifest_name(generation - 1)}
    for folder in (view.folder, view.folder / SEGMENTS):
        for name in _names(folder):
            if not is_own_file(view.folder, folder, name):
                continue
            path = folder / name
            if not path.is_file() or path.is_symlink():
                report.findings.append(Finding(NOTE, "a link or folder has this name", name))
            elif name == NEW_LOG:
                report.findings.append(Finding(NOTE, "left of a log that was being begun", name))
            elif is_log(name) and name not in needed:
                report.findings.append(Finding(NOTE, "a log that nothing needs any more", name))


def _names(folder: Path) -> list[str]:
    try:
        return QUIET.names(folder)
    except OSError:
        return []
