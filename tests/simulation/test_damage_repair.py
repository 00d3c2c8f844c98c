"""Damage and flashkv-fsck: superblocks that are both lost, and samples of all other damage.

Exit statuses as tools/fsck.py has them: 0 no damage, 1 damage that can be mended, 4 damage is left.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from flashkv.tools import verify
from flashkv.tools.fsck import CLEAN, LEFT, MENDED, check, repair
from simulation.damage import Allowed, Bench, bench, flipped
from simulation.golden import CAPACITY, PAGE, SHARD, Golden, golden, segment_path, tree_of
from simulation.test_damage import header_bytes
from simulation.test_damage_pages import page_at, pages_of, with_page

from flashkv import SuperblockError

SUPERBLOCKS = (f"{SHARD}/superblock.a", f"{SHARD}/superblock.b")
SAMPLES = 40


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else writes these stores: what is damaged stays so."""
    monkeypatch.setattr(verify, "WAITS_S", (0.0,))


def clean(path: Path) -> None:
    """Neither a check nor a repair finds anything, or changes a byte."""
    before = tree_of(path)
    assert check(path).status == CLEAN
    assert repair(path).status == CLEAN
    assert tree_of(path) == before


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_store_in_order_stays_as_it_is(size: str) -> None:
    with bench(golden(size)) as place:
        clean(place.path)


# ---- both superblocks ----------------------------------------------------------------------------


def lost_both(made: Golden, rng: random.Random) -> list[dict[str, bytes | None]]:
    """Both superblocks damaged, cut, of noise, gone."""
    files = made.files
    return [
        dict.fromkeys(SUPERBLOCKS),
        dict.fromkeys(SUPERBLOCKS, b""),
        {name: files[name][:512] for name in SUPERBLOCKS},
        {SUPERBLOCKS[0]: None, SUPERBLOCKS[1]: rng.randbytes(PAGE)},
        *(
            {
                name: flipped(files[name], rng.randrange(8, 112), rng.randrange(1, 256))
                for name in SUPERBLOCKS
            }
            for _ in range(6)
        ),
    ]


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("logs", ["with the log", "without logs"])
def test_both_superblocks(seed: int, size: str, logs: str) -> None:
    """Opening refuses and says how to go on; the repair brings back all that the segments hold.

    Without a log that is what was deleted, too: nothing else knew of the deletes.
    """
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = golden(size)
    with bench(made) as place:
        for change in lost_both(made, rng):
            allowed = Allowed()
            if logs == "without logs":
                change |= {name: None for name in made.files if name.endswith(".log")}
                allowed.back = made.may_be_back(None)
            place.write(change)
            for writable in (False, True):
                with pytest.raises(SuperblockError, match="flashkv-fsck --repair"):
                    place.open(writable=writable)
            outcome = repair(place.path, capacity_bytes=CAPACITY, files=place.files)
            assert outcome.status == MENDED, outcome.findings
            clean(place.path)
            place.look("after the repair", allowed, writable=False)
            place.look("after the repair", allowed, writable=True, again=True)
            place.restore()


# ---- samples of all other damage -----------------------------------------------------------------


def samples(made: Golden, rng: random.Random) -> list[tuple[str, dict[str, bytes | None]]]:
    """Changes of every kind, drawn at random."""
    found: list[tuple[str, dict[str, bytes | None]]] = []
    headers, names = header_bytes(made), [name for name, data in made.files.items() if data]
    pages = pages_of(made)
    for _ in range(SAMPLES):
        name, at = rng.choice(headers)
        bad = flipped(made.files[name], at, 1 << rng.randrange(8))
        found.append((f"{name}: a bit of byte {at}", {name: bad}))
        name = rng.choice(names)
        at = rng.randrange(len(made.files[name]))
        bad = flipped(made.files[name], at, rng.randrange(1, 256))
        found.append((f"{name}: byte {at}", {name: bad}))
    for _ in range(SAMPLES // 2):
        name, page = rng.choice(pages)
        new = rng.choice([bytes(PAGE), b"\xff" * PAGE, page_at(made.files, rng.choice(pages))])
        change = {name: with_page(made.files[name], page, new)}
        found.append((f"{name}: page {page} is {new[:8].hex()}...", dict(change)))
    for name in names:
        length = len(made.files[name])
        cut = made.files[name][: 512 * rng.randrange(-(-length // 512))]
        found.append((f"{name}: {len(cut)} bytes of {length}", {name: cut}))
        found.append((f"{name} is gone", {name: None}))
    for tree in made.earlier:
        for name, data in tree.items():
            if name in made.files and made.files[name] != data:
                found.append((f"{name} of an earlier time", {name: data}))
    return found


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_repair_leaves_nothing_wrong(seed: int, size: str) -> None:
    """What costs an opening blocks is seen by the check; what is mended stays so."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = golden(size)
    statuses = {CLEAN: 0, MENDED: 0, LEFT: 0}
    with bench(made) as place:
        for what, change in samples(made, rng):
            place.write(change)
            allowed = place.allowed_of(change)
            allowed.counted = False
            try:
                statuses[_mend(place, what, change, allowed)] += 1
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
            place.restore()
    print(statuses)
    assert statuses[MENDED] > 2 * SAMPLES // 3


def _mend(place: Bench, what: str, change: Mapping[str, bytes | None], allowed: Allowed) -> int:
    """Checks and repairs; the status."""
    damaged = tree_of(place.path)
    lossy = place.lossy
    looked = check(place.path)
    assert tree_of(place.path) == damaged, "a check changes nothing"
    place.look(what, allowed, writable=False)
    if place.lossy > lossy and looked.status == CLEAN:
        assert not _is_seen(place.golden, change), "what was lost is no damage to the check"
    outcome = repair(place.path, files=place.files)
    assert outcome.status == looked.status
    if outcome.status == MENDED:
        clean(place.path)
    place.look(f"{what}, repaired", allowed, writable=False)
    place.look(f"{what}, repaired", allowed, writable=True, again=True)
    return outcome.status


def _is_seen(made: Golden, change: Mapping[str, bytes | None]) -> bool:
    """Not what a crash may leave as well: records of a segment without a directory that are no
    more, and a segment as it was before.
    """
    return any(segment_path(number) in change and number in made.sealed for number in made.segments)
