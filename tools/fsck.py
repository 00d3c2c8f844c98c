"""flashkv-fsck: checks a store and, asked to, mends what can be mended.

Invariants
  - without --repair, with --dry-run, and where nothing is damaged it changes nothing: not a byte,
    not a time stamp;
  - --repair holds the store's lock from before the check until after the last write;
  - what a crash leaves as a rule is no damage: tails that were not written to their end, a log that
    was being begun;
  - exit status, as of other file system checkers: 0 no damage; 1 damage, all of which was mended
    (without --repair: all of which can be); 4 damage is left (can't be mended); 8 the check or the
    repair could not be carried out; 16 a wrong command line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flashkv import opening
from flashkv.errors import FlashKVError, OptionsError, StoreError
from flashkv.filesystem import DISK, FileSystem
from flashkv.geometry import KVGeometry

from .dump_text import Output, plain
from .findings import DAMAGE, IN_FLUX, NOTE, UNFINISHED, Finding, VerifyReport
from .inspection import StoreView, shard_folder
from .repair import Plan, Step, make_plan
from .segment_hands import SegmentHands
from .verify import never_written, verify

CLEAN: Final = 0
MENDED: Final = 1
LEFT: Final = 4
FAILED: Final = 8
USAGE: Final = 16
_USAGE_OF_CLICK: Final = 2

Show = Callable[[int, int], None]
app = typer.Typer(add_completion=False)


@dataclass
class Outcome:
    """What was found and done. plan: of what was found; mended: what of it was carried out."""

    path: Path
    findings: list[Finding] = field(default_factory=list)
    plan: Plan = field(default_factory=Plan)
    mended: list[Step] = field(default_factory=list)
    after: list[Finding] = field(default_factory=list)  # damage that a check after a repair found
    checked: VerifyReport = field(default_factory=VerifyReport)
    writer_seen: bool = False
    repaired: bool = False
    view: StoreView | None = None

    @property
    def damage(self) -> list[Finding]:
        """What of the findings is damage."""
        return [finding for finding in self.findings if finding.kind == DAMAGE]

    @property
    def status(self) -> int:
        """The exit status."""
        if not self.damage:
            return CLEAN
        return LEFT if self.plan.left or self.after else MENDED


def _quiet(_done: int, _all: int) -> None:
    pass


def check(
    path: Path,
    show: Show = _quiet,
    *,
    geometry: KVGeometry | None = None,
    capacity_bytes: int | None = None,
    alone: bool = False,
) -> Outcome:
    """Checks a store and says what a repair would do. Takes no lock, changes nothing.

    alone: the caller has the lock. Raises NotAStoreError, FormatError, OSError.
    """
    outcome = Outcome(path)
    if never_written(shard_folder(path)):
        what = "no store yet: its making was cut off, the next open makes it"
        outcome.findings = [Finding(NOTE, what, str(path))]
        return outcome
    outcome.checked = verify(path, show, salvage=True, alone=alone)
    outcome.findings = outcome.checked.findings
    view = outcome.view = StoreView(path, salvage=True)
    outcome.writer_seen = not alone and view.writer_seen()
    outcome.plan = make_plan(view, outcome.damage, geometry=geometry, capacity_bytes=capacity_bytes)
    return outcome


def repair(
    path: Path,
    show: Show = _quiet,
    *,
    geometry: KVGeometry | None = None,
    capacity_bytes: int | None = None,
    files: FileSystem = DISK,
) -> Outcome:
    """Checks a store under its lock and mends what can be mended.

    Raises LockedError, NotAStoreError, FormatError, StoreError, OSError.
    """
    folder = shard_folder(path)
    if not (folder / "lock").exists():  # nobody can hold it: on a clean store it isn't made either
        first = check(path, show)
        if first.status == CLEAN:
            return first
    lock = opening.ShardLock(folder, files)
    try:
        look = partial(
            check, path, show, geometry=geometry, capacity_bytes=capacity_bytes, alone=True
        )
        outcome = look()
        if outcome.plan.steps:
            # What a killed writer left on its way may land until here: then look again.
            SegmentHands(folder, files).settle()
            outcome = look()
        if outcome.plan.steps and outcome.view is not None:
            outcome.plan.apply(outcome.view, files, outcome.mended.append)
            outcome.after = verify(path, salvage=True, alone=True).of(DAMAGE)
        outcome.repaired = True
    finally:
        lock.release()
    return outcome


# ---- the command --------------------------------------------------------------------------------


@app.command()
def fsck(
    path: Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)],
    mend: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended; needs the store's lock.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --repair: say what it would do, do nothing.")
    ] = False,
    geometry: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Where nothing else tells the store's geometry."),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="For superblocks that are both lost, as 8GiB. Default: what the files need.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Checks a store: every checksum, and whether an open would find all of it.

    Exit status: 0 no damage; 1 damage, all mended (without --repair: all of it can be); 4 damage is
    left (can't be mended); 8 could not be carried out; 16 a wrong command line.
    """
    given_geometry, given_capacity = _geometry(geometry), _capacity(capacity)
    if dry_run and not mend:
        raise typer.BadParameter("it goes with --repair", param_hint="--dry-run")
    columns = (TextColumn("checking segments"), BarColumn(), MofNCompleteColumn())
    try:
        with (
            opening.access_errors(path),
            Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        ):
            task = bar.add_task("")

            def show(done: int, count: int) -> None:
                bar.update(task, completed=done, total=count)

            act = repair if mend and not dry_run else check
            outcome = act(path, show, geometry=given_geometry, capacity_bytes=given_capacity)
    except (FlashKVError, OSError) as error:
        _complain(error, as_json=as_json)
        raise typer.Exit(FAILED) from None
    _print(outcome, as_json=as_json)
    raise typer.Exit(outcome.status)


def _geometry(text: str | None) -> KVGeometry | None:
    try:
        return None if text is None else KVGeometry.from_json(text)
    except (FlashKVError, RecursionError) as error:
        raise typer.BadParameter(str(error), param_hint="--geometry") from None


def _capacity(text: str | None) -> int | None:
    try:
        return opening.given_capacity(text)
    except (OptionsError, StoreError) as error:
        raise typer.BadParameter(str(error), param_hint="--capacity") from None


# ---- words --------------------------------------------------------------------------------------

_SEVERITY: Final = (DAMAGE, IN_FLUX, UNFINISHED, NOTE)


def _print(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(plain(_facts(outcome)), indent=2))
        return
    console = Output(as_json=False).console
    for line in _lines(outcome):
        console.print(line, markup=False, highlight=False)


def _facts(outcome: Outcome) -> dict[str, Any]:
    checked = asdict(outcome.checked)
    checked.pop("findings")
    return {
        "path": str(outcome.path),
        "status": outcome.status,
        "writer_seen": outcome.writer_seen,
        "repaired": outcome.repaired,
        "checked": checked,
        "findings": [asdict(finding) for finding in _sorted(outcome.findings)],
        "mended": [{"file": step.file, "what": step.what} for step in outcome.mended],
        "can_be_mended": [{"file": step.file, "what": step.what} for step in _not_done(outcome)],
        "left": [{**asdict(left.finding), "why": left.why} for left in outcome.plan.left],
        "damage_after_repair": [asdict(finding) for finding in outcome.after],
        "notes": outcome.plan.notes,
        "warnings": outcome.plan.warnings,
    }


def _lines(outcome: Outcome) -> list[str]:
    lines = []
    if outcome.writer_seen:
        lines.append(
            f"a process has {outcome.path} open for writing: what is found may pass; check again"
            " once it is closed"
        )
    lines += [_finding(finding) for finding in _sorted(outcome.findings)]
    reasons: dict[str, list[str]] = {}
    for left in outcome.plan.left:
        reasons.setdefault(left.why, []).append(left.finding.file)
    lines += [
        f"can't be mended: {', '.join(dict.fromkeys(names))}: {why}"
        for why, names in reasons.items()
    ]
    lines += [f"mended: {step.file}: {step.what}" for step in outcome.mended]
    lines += [f"can be mended: {step.file}: {step.what}" for step in _not_done(outcome)]
    lines += [f"note: {note}" for note in outcome.plan.notes]
    lines += [f"warning: {warning}" for warning in outcome.plan.warnings]
    lines += [f"still there: {_finding(finding)}" for finding in outcome.after]
    return [*lines, _summary(outcome)]


def _summary(outcome: Outcome) -> str:
    checked = outcome.checked
    if not outcome.damage:
        return (
            f"no damage: {checked.segments} segments, {checked.records} records,"
            f" {checked.pages} payload pages"
        )
    words = f"{len(outcome.damage)} damaged places"
    if outcome.status == LEFT:
        return f"{words}, not all of which can be mended"
    if outcome.repaired:
        return f"{words}, all mended"
    return f"{words}, all of which can be mended: flashkv-fsck --repair {outcome.path}"


def _sorted(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _SEVERITY.index(finding.kind))


def _not_done(outcome: Outcome) -> list[Step]:
    return [step for step in outcome.plan.steps if step not in outcome.mended]


def _finding(finding: Finding) -> str:
    page = "" if finding.page is None else f", page {finding.page}"
    return f"{finding.kind}: {finding.file}{page}: {finding.what}"


def _complain(error: Exception, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"status": FAILED, "error": str(error)}, indent=2))
    Console(stderr=True, soft_wrap=True).print(
        f"flashkv-fsck: {error}", style="red", markup=False, highlight=False
    )


def main() -> None:
    """Entry of the console script."""
    try:
        app()
    except SystemExit as end:
        sys.exit(USAGE if end.code == _USAGE_OF_CLICK else end.code)


if __name__ == "__main__":
    main()
