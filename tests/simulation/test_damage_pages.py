"""Damage in pieces: pages in each other's place, pages and files of earlier times or of another
store, files cut, grown and gone, reads that are wrong once.

The store is the one of 256 KiB: five segments of thirteen pages.
"""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from simulation.damage import Allowed, Bench, bench
from simulation.golden import PAGE, SHARD, Golden, Tree, golden, segment_path

SWAP_PARTS = 4
SECTOR = 512


def pages_of(made: Golden) -> list[tuple[str, int]]:
    """(file, page) of all pages of the segments."""
    count = made.segment_bytes // PAGE
    return [(segment_path(s), page) for s in made.segments for page in range(count)]


def page_at(tree: Tree, place: tuple[str, int]) -> bytes:
    name, page = place
    return tree[name][page * PAGE : (page + 1) * PAGE]


def with_page(data: bytes, page: int, new: bytes) -> bytes:
    return data[: page * PAGE] + new + data[(page + 1) * PAGE :]


def test_nothing_counts_where_nothing_is_damaged() -> None:
    for size in ("small", "large"):
        with bench(golden(size)) as place:
            for writable in (False, True):
                place.look("no damage", Allowed(), writable=writable, again=True)
                place.restore()
                with place.open(writable=writable) as store:
                    assert place.read(store) == place.golden.live
                    assert place.counted(store) == 0, size
                place.restore()


def test_a_wrong_claim_is_seen() -> None:
    """What the other tests rest on: a dead block, a lost one and strange bytes don't pass."""
    made = golden("small")
    with bench(made) as place:
        dead = next((n, v) for n, vs in made.versions.items() for v in vs if n not in made.live)
        found = dict(made.live)
        assert place.judge(found, Allowed()) == set()
        name = next(iter(found))
        with pytest.raises(AssertionError, match="which is dead"):
            place.judge({**found, dead[0]: dead[1]}, Allowed())
        del found[name]
        with pytest.raises(AssertionError, match="are lost"):
            place.judge(found, Allowed())
        assert place.judge(found, Allowed(lost={name})) == {name}


# ---- pages in each other's place -----------------------------------------------------------------


@pytest.mark.parametrize("part", range(SWAP_PARTS))
def test_pages_in_each_others_place(seed: int, part: int) -> None:
    """All pairs of pages exchanged, and each page copied over each other one."""
    print(f"seed {seed}")
    made = golden("large")
    pairs = list(permutations(pages_of(made), 2))[part::SWAP_PARTS]
    with bench(made) as place:
        for number, (one, other) in enumerate(pairs):
            first, second = page_at(made.files, one), page_at(made.files, other)
            if first == second:
                continue
            writable = (number + seed) % 4 == 0
            what = f"{one} over {other}"
            change = {other[0]: with_page(made.files[other[0]], other[1], first)}
            place.damage(what, change, writable=writable)
            if one < other:
                data = change.get(one[0], made.files[one[0]])
                change[one[0]] = with_page(data, one[1], second)
                place.damage(f"{what} and back", change, writable=writable)
        print(place)


@pytest.mark.parametrize("size", ["small", "large"])
def test_pages_without_what_they_held(seed: int, size: str) -> None:
    """Zeros, ones, noise; and pages of which the second half never came, or the first."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = golden(size)
    with bench(made) as place:
        for name, data in made.files.items():
            for page in range(-(-len(data) // PAGE)):
                old = page_at(made.files, (name, page))
                length = len(old)
                for new in (
                    *(bytes(length), b"\xff" * length, rng.randbytes(length)),
                    *(old[: length // 2] + bytes(length - length // 2),),
                    *(bytes(length // 2) + old[length // 2 :],),
                ):
                    if new != old:
                        what = f"page {page} of {name}: {new[:4].hex()}...{new[-4:].hex()}"
                        change = {name: with_page(data, page, new)}
                        place.damage(what, change, writable=rng.random() < 0.4)
        print(place)


# ---- earlier times, other stores -----------------------------------------------------------------


def test_pages_of_earlier_times(seed: int) -> None:
    """Each page as it was in an earlier state of the same file, and where another page lies now."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    for size in ("small", "large"):
        made = golden(size)
        states: dict[tuple[str, int], set[bytes]] = {}
        for tree in made.earlier:
            for where in pages_of(made):
                if where[0] in tree and page_at(tree, where) != page_at(made.files, where):
                    states.setdefault(where, set()).add(page_at(tree, where))
        assert len(states) >= 4
        sealed = {segment_path(number) for number in made.sealed}
        with bench(made) as place:
            for (name, page), olds in states.items():
                for number, old in enumerate(sorted(olds)):
                    others = rng.sample(range(len(made.files[name]) // PAGE), 3)
                    for at in {page, *others}:
                        what = f"{name}: earlier page {page}, {number}, at {at}"
                        change = {name: with_page(made.files[name], at, old)}
                        if change[name] == made.files[name]:
                            continue
                        # Without a directory an old page is taken for a write that a crash cut off.
                        counted, writable = name in sealed, rng.random() < 0.4
                        place.damage(what, change, writable=writable, again=True, counted=counted)
            print(place)


def test_files_of_earlier_times(seed: int) -> None:
    """Each file as it was at the end of each opening before."""
    print(f"seed {seed}")
    for size in ("small", "large"):
        made = golden(size)
        with bench(made) as place:
            for number, tree in enumerate(made.earlier):
                for name, data in tree.items():
                    for target in _targets(made, name):
                        if made.files.get(target, b"") != data:
                            what = f"{target} is {name} of state {number}"
                            for writable in (False, True):
                                # A whole segment of another time has nothing that is wrong.
                                place.damage(what, {target: data}, writable=writable, counted=False)
            print(place)


def _targets(made: Golden, name: str) -> list[str]:
    """Which files of the store an earlier file may be put in place of."""
    if name.endswith(".log"):
        return [name, *(log for log in made.files if log.endswith(".log") and log != name)]
    return [name]


def test_segments_in_each_others_place(seed: int) -> None:
    """Files exchanged, copied over each other, and those of another store of the same shape."""
    print(f"seed {seed}")
    made, other = golden("large"), golden("large", salt=1)
    names = [segment_path(number) for number in made.segments]
    assert all(made.files[name] != other.files[name] for name in names)
    with bench(made) as place:
        for writable in (False, True):
            for one, two in permutations(names, 2):
                change = {one: made.files[two]}
                place.damage(f"{two} over {one}", change, writable=writable, counted=False)
                change[two] = made.files[one]
                place.damage(f"{one} and {two}", change, writable=writable, counted=False)
            for name in names:
                for strange in names:
                    change = {name: other.files[strange]}
                    place.damage(f"another's {strange}", change, writable=writable, counted=False)
        print(place)


# ---- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["small", "large"])
def test_files_cut_and_grown(seed: int, size: str) -> None:
    """At every sector. What lies behind a cut is gone as if it had never been written."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = golden(size)
    with bench(made) as place:
        for name, data in made.files.items():
            cuts = [data[:at] for at in range(0, len(data), SECTOR)]
            grown = [data + rng.randbytes(SECTOR * count) for count in range(1, 17)]
            grown += [data + bytes(SECTOR * count) for count in (1, 8, 16)]
            for new in (*cuts, *grown):
                what = f"{name}: {len(new)} bytes of {len(data)}"
                writable = rng.random() < 0.4
                place.damage(what, {name: new}, writable=writable, counted=False)
        print(place)


@pytest.mark.parametrize("size", ["small", "large"])
def test_files_that_are_gone(size: str) -> None:
    made = golden(size)
    with bench(made) as place:
        for name in made.files:
            for writable in (False, True):
                place.damage(f"{name} is gone", {name: None}, writable=writable, counted=False)
        logs = [name for name in made.files if name.endswith(".log")]
        for writable in (False, True):
            place.damage("no log", dict.fromkeys(logs), writable=writable, counted=False)
        assert place.looks == 2 * len(made.files) + 2


def test_a_log_that_was_being_begun(seed: int) -> None:
    """Whatever lies there as the next log, or as the one after it, rules only if it is whole."""
    made = golden("large")
    rng = random.Random(seed)
    with bench(made) as place:
        for generation in (made.generation + 1, made.generation + 2):
            name = f"{SHARD}/manifest-{generation:08d}.log"
            for data in (b"", rng.randbytes(3000), made.files[made.log], made.earlier[0][_log(0)]):
                for writable in (False, True):
                    place.write({name: data})
                    place.look(f"{name} is there", Allowed(), writable=writable, again=True)
                    place.restore()


def _log(state: int) -> str:
    return max(name for name in golden("large").earlier[state] if name.endswith(".log"))


# ---- reads that are wrong once -------------------------------------------------------------------


@pytest.mark.parametrize("size", ["small", "large"])
def test_reads_that_are_wrong_once(seed: int, size: str) -> None:
    """Damage that comes and goes: what it costs is not foreseen, but it is a miss, and is counted;
    and dead blocks stay away then, and when the store is opened again.
    """
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = golden(size)
    with bench(made) as place:
        for writable in (False, True):
            reads = _reads_of(place, writable=writable)
            assert reads > 5
            # The first read for writing is a trial of the device: one that fails it is refused.
            for number in range(1 + writable, reads + 1):
                for _ in range(4):
                    bit = rng.randrange(8 * made.segment_bytes)
                    place.flip_read(number, bit, writable=writable)
        print(place)


def _reads_of(place: Bench, *, writable: bool) -> int:
    """Reads of an opening and a look."""
    place.device.reset()
    place.look("to count its reads", Allowed(), writable=writable)
    count = place.reads
    place.restore()
    return count
