"""What a recording says a crash may leave: writes, lengths and names, after syncs and failed ones.

Each test does a few calls on real files through SimFiles and looks at images after the last.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.device import Device
from simulation.filesystem import SimFiles
from simulation.recording import (
    KEPT,
    LENGTH_ONLY,
    Fate,
    Pending,
    Replay,
    at_random,
    fates,
)

SECTOR = 512
NEW = os.O_RDWR | os.O_CREAT
OLD = b"o" * 3 * SECTOR


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SimFiles]:
    """Files of a root in which "old" is durable."""
    (tmp_path / "old").write_bytes(OLD)
    with Device(1) as device:
        device.record()
        yield SimFiles(tmp_path, device)


def replay_of(files: SimFiles) -> Replay:
    """At its end."""
    replay = Replay(files, files.simulated.events())
    while replay.position < len(replay.events):
        replay.step()
    return replay


def written(files: SimFiles, data: bytes, name: str = "old", *, sync: bool = False) -> int:
    """The descriptor of a file to which this was written from its beginning."""
    fd = files.open(files.root / name, NEW)
    files.write(fd, data)
    if sync:
        files.sync(fd)
    return fd


def failing_sync(files: SimFiles, fd: int) -> None:
    """A sync that fails."""
    files.fail("sync", files.calls["sync"] + 1)
    with pytest.raises(OSError, match="simulated"):
        files.sync(fd)


def failing_sync_of_root(files: SimFiles) -> None:
    """The same of the root folder."""
    files.fail("sync_folder", files.calls["sync_folder"] + 1)
    with pytest.raises(OSError, match="simulated"):
        files.sync_folder(files.root)


def test_a_write_is_torn_between_sectors(files: SimFiles) -> None:
    files.close(written(files, b"n" * 3 * SECTOR))
    replay = replay_of(files)
    (change,) = replay.pending()
    assert replay.image({})["old"] == OLD
    assert replay.image({change: KEPT})["old"] == b"n" * 3 * SECTOR
    middle = b"o" * SECTOR + b"n" * SECTOR + b"o" * SECTOR
    assert replay.image({change: 0b010})["old"] == middle


def test_what_is_kept_gives_the_length(files: SimFiles) -> None:
    files.close(written(files, b"n" * 5 * SECTOR))
    replay = replay_of(files)
    (change,) = replay.pending()
    assert replay.image({change: LENGTH_ONLY})["old"] == OLD + bytes(2 * SECTOR)
    tail = bytes(SECTOR) + b"n" * SECTOR
    assert replay.image({change: 0b10000})["old"] == OLD + tail
    assert replay.image({change: 0b00001})["old"] == b"n" * SECTOR + OLD[SECTOR:]


def test_a_tear_keeps_some_sectors_and_loses_some() -> None:
    rng = random.Random(1)
    for sectors in (2, 3, 8):
        change = Pending(0, 0, 0, bytes(sectors * SECTOR), sectors * SECTOR)
        kept = {fate for _ in range(200) for fate in _of(change, rng) if fate >= 0}
        assert kept
        assert all(0 < bits < (1 << sectors) - 1 for bits in kept)
    one = Pending(0, 0, 100, bytes(64), 164)
    assert all(fate < 0 for _ in range(200) for fate in _of(one, rng))


def _of(change: Pending, rng: random.Random) -> list[int]:
    chosen: list[Fate] = [*fates([change], rng), at_random([change], rng)]
    return [fate[change] for fate in chosen if change in fate]


def test_a_rename_is_kept_or_lost_till_its_folder_is_synced(files: SimFiles) -> None:
    files.close(written(files, b"new", "new", sync=True))
    files.sync_folder(files.root)
    files.rename(files.root / "new", files.root / "old")
    replay = replay_of(files)
    (change,) = replay.pending()
    assert replay.image({}) == {"new": b"new", "old": OLD}
    assert replay.image({change: KEPT}) == {"old": b"new"}
    files.sync_folder(files.root)
    replay = replay_of(files)
    assert not replay.pending()
    assert replay.image({}) == {"old": b"new"}


def test_a_sync_of_a_file_says_nothing_of_its_name(files: SimFiles) -> None:
    files.close(written(files, b"new", "new", sync=True))
    replay = replay_of(files)
    (change,) = replay.pending()
    assert replay.image({}) == {"old": OLD}
    assert replay.image({change: KEPT})["new"] == b"new"


def test_what_a_failed_sync_covered_is_doubtful_for_ever(files: SimFiles) -> None:
    fd = written(files, b"n" * SECTOR)
    failing_sync(files, fd)
    files.write(fd, b"m" * SECTOR)
    files.sync(fd)
    files.close(fd)
    replay = replay_of(files)
    (change,) = replay.pending()
    assert change.doubtful
    assert replay.image({})["old"] == b"o" * SECTOR + b"m" * SECTOR + b"o" * SECTOR
    assert replay.image({change: KEPT})["old"] == b"n" * SECTOR + b"m" * SECTOR + b"o" * SECTOR


def test_names_that_a_failed_sync_covered_are_doubtful_for_ever(files: SimFiles) -> None:
    files.close(written(files, b"1", "first", sync=True))
    failing_sync_of_root(files)
    files.close(written(files, b"2", "second", sync=True))
    files.sync_folder(files.root)
    replay = replay_of(files)
    (change,) = replay.pending()
    assert change.doubtful
    assert replay.image({}) == {"old": OLD, "second": b"2"}
    assert replay.image({change: KEPT}) == {"first": b"1", "old": OLD, "second": b"2"}


def test_a_name_that_is_made_anew_rules_over_a_doubtful_one(files: SimFiles) -> None:
    files.unlink(files.root / "old")
    failing_sync_of_root(files)
    files.close(written(files, b"new", sync=True))
    files.sync_folder(files.root)
    replay = replay_of(files)
    assert not replay.pending()
    assert replay.image({}) == {"old": b"new"}


def test_half_of_a_doubtful_rename_is_left(files: SimFiles) -> None:
    files.rename(files.root / "old", files.root / "other")
    failing_sync_of_root(files)
    files.close(written(files, b"new", sync=True))
    files.sync_folder(files.root)
    replay = replay_of(files)
    (change,) = replay.pending()
    assert replay.image({}) == {"old": b"new"}
    assert replay.image({change: KEPT}) == {"old": b"new", "other": OLD}


def test_a_durable_truncation_ends_what_is_doubtful_of_a_file(files: SimFiles) -> None:
    """Neither an earlier truncation nor bytes behind the new end come back over what follows."""
    for data in (b"n" * SECTOR, b"m" * 2 * SECTOR):
        fd = files.open(files.root / "old", NEW | os.O_TRUNC)
        files.write(fd, data)
        failing_sync(files, fd)
        files.close(fd)
    replay = replay_of(files)
    assert [change.doubtful for change in replay.pending()] == [True] * 4
    images = [
        replay.image(fate)["old"] or b"" for fate in fates(replay.pending(), random.Random(1))
    ]
    assert {len(image) // SECTOR for image in images} == {0, 2, 3}
    fd = files.open(files.root / "old", NEW | os.O_TRUNC)
    files.write(fd, b"new")
    files.sync(fd)
    files.close(fd)
    replay = replay_of(files)
    assert not replay.pending()
    assert replay.image({}) == {"old": b"new"}
