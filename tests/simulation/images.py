"""Looks at the crash images of a workload: opens them, and holds what they show to the account.

Invariants
  - images that are equal, of equal demands, are looked at once;
  - a failure names the seed, the steps, the position and what became of each pending change, so
    that it can be had again.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flashkv.tools.fsck import CLEAN, check, repair
from simulation.device import Device
from simulation.filesystem import SimFiles
from simulation.recording import (
    KEPT,
    LENGTH_ONLY,
    LOST,
    Fate,
    Pending,
    Replay,
    Tree,
    fates,
    plain_fates,
    write_tree,
)
from simulation.workload import Step, Workload, check_image

MEMORY_FOLDER = Path("/dev/shm")
FSCK_SHARE = 0.02
"""Of the images that are also given to flashkv-fsck."""


class ImageError(AssertionError):
    """A crash image that breaks a promise."""


@dataclass
class Tally:
    """What was looked at."""

    boundaries: int = 0
    images: int = 0
    different: int = 0
    nested: int = 0
    checked: int = 0
    seen: set[bytes] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.images} crash images at {self.boundaries} boundaries, {self.different} of them "
            f"different, {self.nested} of crashes in a recovery, {self.checked} checked by fsck"
        )


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder, in memory where the machine has room there; gone afterwards."""
    usable = MEMORY_FOLDER.is_dir() and os.access(MEMORY_FOLDER, os.W_OK)
    folder = Path(tempfile.mkdtemp(dir=MEMORY_FOLDER if usable else None, prefix="flashkv-sim-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def look(
    workload: Workload,
    folder: Path,
    rng: random.Random,
    tally: Tally,
    *,
    first: int = 0,
    more: int | None = None,
    nested: float = 0.0,
) -> None:
    """Looks at images at every position from `first` on.

    more: images at random besides those of fates(), at each; None: plain_fates() only. nested:
    share of the images whose opening is itself cut by a crash, at every position of it. Raises
    ImageError.
    """
    replay = Replay(workload.files, workload.device.events())
    changed = True
    while True:
        if replay.position >= first and changed:
            tally.boundaries += 1
            pending = replay.pending()
            chosen = plain_fates(pending) if more is None else fates(pending, rng, more)
            for fate in chosen:
                _look_at(replay, fate, workload, folder, rng, tally, nested)
        if replay.position == len(replay.events):
            return
        changed = replay.step() or replay.position == first


def _look_at(
    replay: Replay,
    fate: Fate,
    workload: Workload,
    folder: Path,
    rng: random.Random,
    tally: Tally,
    nested: float,
) -> None:
    tally.images += 1
    tree = replay.image(fate)
    allowed = workload.account.at(replay.position)
    name = digest_of(tree, repr(sorted(allowed.items())))
    if name in tally.seen:
        return
    tally.seen.add(name)
    tally.different += 1
    try:
        with fresh(folder) as root:
            write_tree(tree, root)
            if rng.random() < nested:
                _look_inside(root, workload, replay.position, folder, rng, tally)
            else:
                again = tally.different % 16 == 0
                _hold(root, workload, replay.position, again=again)
        if rng.random() < FSCK_SHARE and "store/shards/0/segments" in tree:
            tally.checked += 1
            with fresh(folder) as root:
                write_tree(tree, root)
                _mend(root, tree)
                _hold(root, workload, replay.position)
    except Exception as error:
        where = f"before event {replay.position} of {len(replay.events)}"
        raise ImageError(f"{where}, with {describe(fate, replay.pending())}: {error}") from error


def _hold(root: Path, workload: Workload, position: int, *, again: bool = False) -> None:
    """Opens an image, and holds what it shows to the account. Raises ImageError."""
    found = check_image(root / "store", workload.versions, again=again)
    wrong = workload.account.verdict(found, position)
    if wrong:
        raise ImageError(wrong)


def _look_inside(
    root: Path,
    workload: Workload,
    position: int,
    folder: Path,
    rng: random.Random,
    tally: Tally,
) -> None:
    """Opens an image with everything recorded, and looks at what a crash in that opening leaves."""
    with Device(rng.getrandbits(32)) as device:
        device.record()
        files = SimFiles(root, device)
        found = check_image(root / "store", workload.versions, files)
        assert files.open_descriptors() == 0, "descriptors are left open"
        replay = Replay(files, device.events())
        while True:
            for fate in plain_fates(replay.pending()):
                tally.nested += 1
                with fresh(folder) as inner:
                    write_tree(replay.image(fate), inner)
                    again = check_image(inner / "store", workload.versions)
                wrong = workload.account.verdict(again, position)
                if not wrong and replay.position == len(replay.events) and again != found:
                    wrong = f"it showed {found}, and shows {again} when it is opened again"
                if wrong:
                    inside = f"event {replay.position} of its recovery"
                    raise ImageError(f"{inside}, {describe(fate, replay.pending())}: {wrong}")
            if replay.position == len(replay.events):
                return
            replay.step()


def _mend(root: Path, tree: Tree) -> None:
    """A check changes no byte; a repair mends what it finds, nothing where all is well.

    A header or directory that a power cut tore is damage to it. What the store shows after the
    repair is held to the same account: no block is lost with them.
    """
    outcome = check(root / "store")
    for act in (check, repair) if outcome.status == CLEAN else (check,):
        assert act(root / "store").status == outcome.status
        for path, data in tree.items():
            assert data is None or (root / path).read_bytes() == data, f"fsck changed {path}"
    if outcome.status != CLEAN:
        # What the first mends may bring to light what only the next can. An identity record that
        # never reached the disk stays lacking in its segment: the log has it.
        outcomes = [repair(root / "store") for _ in range(3)]
        assert {finding.fault for finding in outcomes[-1].damage} <= {"namespace"}, outcomes[-1]


@contextmanager
def fresh(folder: Path) -> Iterator[Path]:
    """An empty folder below `folder`."""
    root = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def digest_of(tree: Tree, demands: str) -> bytes:
    """A name that only equal images of equal demands share."""
    state = hashlib.blake2b(demands.encode(), digest_size=16)
    for path, data in tree.items():
        state.update(f"\0{path}\0{-1 if data is None else len(data)}\0".encode())
        state.update(data or b"")
    return state.digest()


def describe(fate: Fate, pending: Sequence[Pending]) -> str:
    """What became of each pending change."""
    said = []
    for change in pending:
        what = change.note.what if change.note else "write"
        where = f" {change.note.folder}/{change.note.name}" if change.note else ""
        chosen = fate.get(change, LOST)
        names = {KEPT: "kept", LOST: "lost", LENGTH_ONLY: "length only"}
        became = names.get(chosen, f"sectors {chosen:#x} of {change.sectors}")
        said.append(f"{what}{where}@{change.position}+{len(change.data)} {became}")
    return "; ".join(said) or "nothing pending"


# ---- the shortest list of operations -------------------------------------------------------------


def shortest(steps: list[Step], fails: Callable[[list[Step]], str]) -> tuple[list[Step], str]:
    """Leaves out what it fails without: (steps, how it fails). fails: "" where it doesn't."""
    said = fails(steps)
    position = 0
    while position < len(steps):
        fewer = steps[:position] + steps[position + 1 :]
        how = fails(fewer)
        if how:
            steps, said = fewer, how
        else:
            position += 1
    return steps, said
