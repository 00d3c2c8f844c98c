"""What a crash between any two events of a recording may leave on disk.

The model, after ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018):
  - what a sync that ended well covers is durable: the data and length of its file, the entries of
    its folder; a sync of the one says nothing of the other;
  - of everything else each write is kept, lost, or torn between sectors of 512 bytes, or only the
    length that it gave the file is kept; each creation, renaming and removal is kept or lost,
    whatever became of those before it;
  - after a failed write or sync nothing that it covered ever becomes durable: the kernel may have
    thrown the pages away and forgotten them.

Invariant: writes to the same place take effect in their order, so what is kept of a later one
hides what is kept of an earlier one.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from simulation.device import NOTE, SYNC_END, WRITE, Event
from simulation.filesystem import SECTOR, Note, SimFiles

FOLDER: Final = None
Tree = dict[str, bytes | None]
"""Path -> contents, None for a folder; folders come before what is in them."""

KEPT: Final = -1
LOST: Final = -2
LENGTH_ONLY: Final = -3


@dataclass(eq=False)
class Pending:
    """Something that is not durable yet. Length 0 and data b"": a change of names."""

    position: int
    ended: int
    offset: int = 0
    data: bytes = b""
    length: int = -1  # the file is at least so long afterwards; truncation: 0 and `truncates`
    truncates: bool = False
    doubtful: bool = False  # its write or sync failed: never durable
    note: Note | None = None

    @property
    def sectors(self) -> int:
        """Sectors that it touches."""
        return -(-(self.offset % SECTOR + len(self.data)) // SECTOR)


@dataclass(eq=False)
class Inode:
    """Contents that are durable, and what came since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Pending] = field(default_factory=list)


class Replay:
    """Walks through a recording; at each position it tells what is durable and what isn't."""

    def __init__(self, files: SimFiles, events: list[Event]) -> None:
        self._notes = files.notes
        self.events = events
        self.position = 0
        self.inodes: dict[int, Inode] = {
            number: Inode(bytearray(data)) for number, data in files.inode_contents.items()
        }
        self.folders: dict[str, dict[str, int]] = copy.deepcopy(files.start_names.folders)
        self.entries: dict[str, list[Pending]] = {}

    # ---- walking ----

    def step(self) -> bool:
        """Takes the next event; whether it can change what a crash leaves."""
        event = self.events[self.position]
        self.position += 1
        if event.kind == WRITE and event.inode:
            self._inode(event.inode).pending.append(
                Pending(
                    self.position - 1,
                    event.ended,
                    event.offset,
                    event.data,
                    event.offset + len(event.data),
                    doubtful=event.result != 0,
                )
            )
        elif event.kind == SYNC_END and event.inode:
            self._synced(event.inode, event.begun, event.result == 0)
        elif event.kind == NOTE:
            self._noted(self._notes[event.inode])
        else:
            return False
        return True

    def _inode(self, number: int) -> Inode:
        return self.inodes.setdefault(number, Inode())

    def _noted(self, note: Note) -> None:
        here = self.position - 1
        if note.what == "write":
            end = note.offset + len(note.data)
            self._inode(note.inode).pending.append(
                Pending(here, here, note.offset, note.data, end, note=note)
            )
        elif note.what == "size":
            self._inode(note.inode).pending.append(
                Pending(here, here, length=note.length, note=note)
            )
        elif note.what == "truncate":
            self._inode(note.inode).pending.append(
                Pending(here, here, length=note.length, truncates=True, note=note)
            )
        elif note.what in ("synced", "sync_failed"):
            self._synced(note.inode, note.begun, note.what == "synced")
        elif note.what in ("folder_synced", "folder_sync_failed"):
            self._folder_synced(note.folder, note.begun, note.what == "folder_synced")
        elif note.what not in ("sync", "sync_folder"):
            self.entries.setdefault(note.folder, []).append(Pending(here, here, note=note))
            if note.what == "create":
                self._inode(note.inode)

    def _synced(self, number: int, begun: int, well: bool) -> None:
        inode = self._inode(number)
        rest = []
        for change in inode.pending:
            if change.ended > begun or change.doubtful:
                rest.append(change)
            elif well:
                apply(inode.durable, change, KEPT)
                # What failed there before and may be on disk all the same is overwritten.
                rest = [part for older in rest for part in _uncovered(older, change)]
            else:
                change.doubtful = True
                rest.append(change)
        inode.pending = rest

    def _folder_synced(self, folder: str, begun: int, well: bool) -> None:
        rest = []
        for change in self.entries.get(folder, []):
            if change.position > begun or change.doubtful:
                rest.append(change)
            elif well:
                apply_name(self.folders, change.note)
                # What failed with these names before, and may be on disk all the same, is undone.
                rest = [part for older in rest for part in _left(older, change)]
            else:
                change.doubtful = True
                rest.append(change)
        self.entries[folder] = rest

    # ---- images ----

    def pending(self) -> list[Pending]:
        """All that is not durable at this position, in its order."""
        everything = [change for changes in self.entries.values() for change in changes]
        for inode in self.inodes.values():
            everything += inode.pending
        return sorted(everything, key=lambda change: change.position)

    def image(self, fate: Fate) -> Tree:
        """What is on disk where the changes in `fate` met theirs, and all others were lost.

        fate: KEPT, LOST, LENGTH_ONLY or a bit set of the sectors that are kept.
        """
        folders = {name: dict(entries) for name, entries in self.folders.items()}
        for changes in self.entries.values():
            for change in changes:
                if fate.get(change, LOST) != LOST:
                    apply_name(folders, change.note)
        contents: dict[int, bytes] = {}
        tree: Tree = {}
        for folder in _reachable(folders):
            for name, number in sorted(folders[folder].items()):
                path = f"{folder}/{name}".lstrip("/")
                if number == 0:
                    tree[path] = FOLDER
                    continue
                if number not in contents:
                    contents[number] = self._contents(number, fate)
                tree[path] = contents[number]
        return tree

    def _contents(self, number: int, fate: Fate) -> bytes:
        inode = self._inode(number)
        if all(fate.get(change, LOST) == LOST for change in inode.pending):
            return bytes(inode.durable)
        data = bytearray(inode.durable)
        for change in inode.pending:
            apply(data, change, fate.get(change, LOST))
        return bytes(data)


def apply(data: bytearray, change: Pending, fate: int) -> None:
    """Does to a file's contents what is kept of a change."""
    if fate == LOST:
        return
    if change.truncates:
        del data[change.length :]
        return
    end = change.length
    if fate >= 0 and fate >> (change.sectors - 1) & 1 == 0:  # the length ends with what is kept
        last = fate.bit_length()
        end = (change.offset // SECTOR + last) * SECTOR if last else 0
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    if fate == KEPT:
        data[change.offset : change.offset + len(change.data)] = change.data
    elif fate >= 0:
        first = change.offset // SECTOR
        for sector in range(change.sectors):
            if fate >> sector & 1:
                start = max((first + sector) * SECTOR, change.offset)
                stop = min((first + sector + 1) * SECTOR, change.offset + len(change.data))
                data[start:stop] = change.data[start - change.offset : stop - change.offset]


def _uncovered(older: Pending, newer: Pending) -> list[Pending]:
    """What is left of a doubtful change to a file under one that is durable.

    A durable truncation says how long the file is: none before it is heard of again, nor what lay
    behind its end.
    """
    start, end = older.offset, older.offset + len(older.data)
    first, last = newer.offset, newer.offset + len(newer.data)
    if older.doubtful and newer.truncates:
        if older.truncates or (not older.data and older.length > newer.length):
            return []
        first, last = newer.length, max(end, newer.length)
    if not older.doubtful or last <= start or end <= first:
        return [older]
    parts = [(start, max(start, min(first, end))), (min(end, max(last, start)), end)]
    return [
        replace(older, offset=a, data=older.data[a - start : b - start], length=b)
        for a, b in parts
        if a < b
    ]


def _left(older: Pending, newer: Pending) -> list[Pending]:
    """What is left of a doubtful change of names after one that is durable."""
    note, after = older.note, newer.note
    assert note is not None
    assert after is not None
    covered = {name for name in (after.name, after.to) if name}
    names = [name for name in (note.name, note.to) if name]
    left = [name for name in names if name not in covered]
    if not older.doubtful or left == names:
        return [older]
    if not left:
        return []
    what = "create" if left == [note.to] else "unlink"  # half of a renaming
    return [replace(older, note=replace(note, what=what, name=left[0], to=""))]


def apply_name(folders: dict[str, dict[str, int]], note: Note | None) -> None:
    """Does to the folders what a note says; what a change that was lost left out stays out."""
    assert note is not None
    here = folders.setdefault(note.folder, {})
    if note.what == "create":
        here[note.name] = note.inode
    elif note.what == "unlink" or note.what == "remove":
        here.pop(note.name, None)
    elif note.what == "rename":
        here.pop(note.name, None)
        here[note.to] = note.inode
    elif note.what == "make":
        here[note.name] = 0
        folders.setdefault(f"{note.folder}/{note.name}".lstrip("/"), {})
    else:
        raise AssertionError(note.what)


def _reachable(folders: dict[str, dict[str, int]]) -> Iterator[str]:
    """Folders from the root down, parents first."""
    queue = [""]
    while queue:
        folder = queue.pop(0)
        yield folder
        for name, number in sorted(folders.get(folder, {}).items()):
            path = f"{folder}/{name}".lstrip("/")
            if number == 0 and path in folders:
                queue.append(path)


# ---- which of them -------------------------------------------------------------------------------


Fate = dict[Pending, int]


def fates(pending: list[Pending], rng: random.Random, more: int = 0) -> Iterator[Fate]:
    """Those worth a look: all kept, none, each alone lost, kept, torn; `more` at random."""
    everything = dict.fromkeys(pending, KEPT)
    yield from plain_fates(pending)
    for change in pending:
        if len(pending) > 1:
            yield {change: KEPT}
        if change.sectors > 1:
            yield {**everything, change: _torn(change, rng)}
        if change.data:
            yield {**everything, change: LENGTH_ONLY}
    for _ in range(more):
        yield at_random(pending, rng)


def plain_fates(pending: list[Pending]) -> Iterator[Fate]:
    """All kept, none, each alone lost."""
    everything = dict.fromkeys(pending, KEPT)
    yield everything
    if pending:
        yield {}
    if len(pending) > 1:
        for change in pending:
            yield {**everything, change: LOST}


def at_random(pending: list[Pending], rng: random.Random) -> Fate:
    """Any fate for each."""
    keeps = rng.choice((0.1, 0.5, 0.9))
    chosen: Fate = {}
    for change in pending:
        draw = rng.random()
        if draw < keeps:
            chosen[change] = KEPT
        elif change.data and rng.random() < 0.6:
            tears = change.sectors > 1 and rng.random() > 0.1
            chosen[change] = _torn(change, rng) if tears else LENGTH_ONLY
    return chosen


def _torn(change: Pending, rng: random.Random) -> int:
    """Some of its sectors, of which it has more than one: the first, the last, or any."""
    every = (1 << change.sectors) - 1
    first = (1 << rng.randint(1, change.sectors - 1)) - 1
    return rng.choice((first, every & ~first, rng.randrange(1, every)))


def write_tree(tree: Tree, root: Path) -> None:
    """Makes the files of an image below an empty folder."""
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir()
            continue
        with (root / path).open("wb", buffering=0) as file:
            kept = data.rstrip(b"\0")
            file.write(kept)
            file.truncate(len(data))
