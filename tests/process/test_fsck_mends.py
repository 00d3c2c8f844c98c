"""flashkv-fsck --repair brings back what the segments hold, whatever of the store was damaged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.fsck import CLEAN, LEFT, MENDED, check, repair
from flashkv.tools.inspection import StoreView
from fsck_support import (
    ALIVE,
    KEYS,
    Cut,
    Power,
    build,
    copy,
    cut_block_io,
    flip,
    held,
    logs,
    mended,
    remove,
    segments,
    shard,
    snapshot,
    superblocks,
    zero,
)
from small_stores import GEOMETRY, IDENTITY, PAGE, make, names, payload

from flashkv import KVGeometry
from flashkv.errors import FlashKVError


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fsck") / "store")


@pytest.fixture
def store(template: Path, disk_path: Path) -> Path:
    return copy(template, disk_path / "store")


# ---- superblocks --------------------------------------------------------------------------------


def _torn(offset: int) -> Callable[[Path], None]:
    """What was there up to a sector, and other bytes behind, to the first page's end."""

    def tear(path: Path) -> None:
        data = path.read_bytes()
        end = min(len(data), PAGE)
        path.write_bytes(data[:offset] + b"\x5a" * (end - offset) + data[end:])

    return tear


LOSSES: dict[str, Callable[[Path], None]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
    "garbage": lambda path: path.write_bytes(random.Random(5).randbytes(4096)),
    "a bit": lambda path: flip(path, min(100, path.stat().st_size // 2), 3),
    "torn at 0": _torn(0),
    "torn at 512": _torn(512),
    "torn at 3584": _torn(3584),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_both_superblocks(store: Path, loss: str) -> None:
    for path in superblocks(store):
        LOSSES[loss](path)
    outcome = mended(store)
    assert not outcome.plan.warnings
    assert held(store) == ALIVE, "deletes hold: the log was whole"


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["superblock.a", "superblock.b"])
def test_one_superblock(store: Path, name: str, loss: str) -> None:
    LOSSES[loss](shard(store) / name)
    before = StoreView(store).block
    mended(store)
    after = StoreView(store)
    assert not after.superblock_faults
    assert (after.block.store_uuid, after.block.geometry_json) == (
        before.store_uuid,
        before.geometry_json,
    )
    assert after.block.capacity_bytes == before.capacity_bytes
    assert held(store) == ALIVE


def test_the_superblock_that_is_left_is_not_the_first_to_be_written(store: Path) -> None:
    """Not even where it has the other's name: cut off anywhere, one of them is right."""
    blocks = StoreView(store).superblocks
    ruling = max(superblocks(store), key=lambda path: blocks[path.name].generation)
    other = next(path for path in superblocks(store) if path != ruling)
    ruling.replace(other)
    for count in range(100):
        path = copy(store, store.parent / str(count))
        try:
            repair(path, files=Cut(count, torn=50))
        except Power:
            assert not StoreView(path).superblocks_lost, count
            shutil.rmtree(path)
            continue
        assert count > 10
        return
    pytest.fail("it never came to an end")


def test_the_rebuilt_superblocks_say_what_the_lost_ones_said(store: Path) -> None:
    before = StoreView(store).block
    for path in superblocks(store):
        path.unlink()
    mended(store)
    after = StoreView(store).block
    same = ("store_uuid", "segment_bytes", "geometry_json")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
    with make(store) as opened:
        assert len(opened.segments) == 3, "no segment was dropped"
        assert opened.segments_max >= 4
        assert opened.geometry == GEOMETRY


def test_the_capacity_that_is_given_or_that_both_damaged_ones_name(store: Path) -> None:
    capacity = StoreView(store).block.capacity_bytes
    other = copy(store, store.parent / "other")
    for path in superblocks(store):
        flip(path, 3000)
    mended(store)
    assert StoreView(store).block.capacity_bytes == capacity
    for path in superblocks(other):
        path.unlink()
    small = repair(other, capacity_bytes=13 << 20)
    assert small.status == LEFT
    assert "too small" in small.plan.left[0].why
    mended(other, capacity_bytes=1 << 30)
    assert StoreView(other).block.capacity_bytes == 1 << 30


def test_a_superblock_of_another_store(store: Path, disk_path: Path) -> None:
    """The segments tell whose store it is, whichever superblock is the newer."""
    make(disk_path / "other").close()
    for _ in range(4):
        make(disk_path / "other", geometry=None, capacity=None).close()
    for name in ("superblock.a", "superblock.b"):
        path = copy(store, disk_path / name)
        shutil.copyfile(shard(disk_path / "other") / name, shard(path) / name)
        mended(path)
        assert held(path) == ALIVE


def test_bytes_behind_a_superblock_are_no_part_of_it(store: Path) -> None:
    for path in superblocks(store):
        path.write_bytes(path.read_bytes() + b"more")
    assert check(store).findings == []
    assert held(store) == ALIVE


# ---- geometry -----------------------------------------------------------------------------------


def _forget_identities(path: Path) -> None:
    """No superblock, no log, no namespace record."""
    for file in [*superblocks(path), *logs(path)]:
        file.unlink()
    for file in segments(path):
        flip(file, PAGE + 200)


def test_a_geometry_that_nothing_tells_is_asked_for(store: Path) -> None:
    _forget_identities(store)
    outcome = repair(store)
    assert outcome.status == LEFT
    assert all("--geometry" in left.why for left in outcome.plan.left)
    assert not superblocks(store), "nothing was written"
    before = snapshot(store)
    assert repair(store).status == LEFT
    assert snapshot(store) == before
    given = repair(store, geometry=GEOMETRY)
    # What nobody knows any more is the identity in words; the blocks are there.
    assert {left.finding.fault for left in given.plan.left} <= {"namespace", "scanned"}
    assert held(store, back=True) == set(KEYS)


def test_a_geometry_of_one_of_several_namespaces(store: Path) -> None:
    other = KVGeometry.gqa(3, 1, 32, "bfloat16")
    with make(store) as opened:
        namespace = opened.namespace(replace(IDENTITY, model="another", geometry=other))
        data = payload(4, 4, (3, 2, 1, 16, 32))
        assert namespace.put(names(4), data).all_ok
    damaged = copy(store, store.parent / "damaged")
    for path in superblocks(store):
        path.unlink()
    outcome = repair(store)
    assert outcome.status == LEFT
    for geometry in (other, GEOMETRY):
        assert geometry.to_json().decode() in outcome.plan.left[0].why
    mended(store, geometry=GEOMETRY)
    assert held(store) == ALIVE
    flip(superblocks(damaged)[0], 30)
    superblocks(damaged)[1].unlink()
    mended(damaged)
    assert StoreView(damaged).block.geometry_json == GEOMETRY.to_json(), "two traces agree"


def test_a_store_in_which_nothing_is_yet(disk_path: Path) -> None:
    make(disk_path / "store").close()
    path = disk_path / "store"
    for block in superblocks(path):
        flip(block, 20)
    mended(path)
    block = StoreView(path).block
    assert (block.geometry_json, block.capacity_bytes) == (GEOMETRY.to_json(), 48 << 20)
    with make(path) as opened:
        assert opened.namespace(IDENTITY).put(names(2), payload(1, 2)).all_ok


# ---- logs ---------------------------------------------------------------------------------------


def test_the_log_that_rules_is_lost_and_the_one_before_is_there(store: Path) -> None:
    """Deletes that it has hold: the second one began with them."""
    make(store).close()
    make(store).close()
    with make(store) as opened:
        assert opened.namespace(IDENTITY).put(names(10, "late"), payload(3, 10)).all_ok
    for loss in ("gone", "empty", "zeros", "garbage"):
        path = copy(store, store.parent / loss)
        LOSSES[loss](logs(path)[-1])
        outcome = mended(path)
        assert "may not be the last one" in outcome.plan.warnings[0]
        assert held(path) == ALIVE


@pytest.mark.parametrize("loss", ["gone", "empty", "zeros", "garbage"])
def test_no_log_is_left(store: Path, loss: str) -> None:
    for path in logs(store):
        LOSSES[loss](path)
    outcome = mended(store)
    assert "may be back" in outcome.plan.warnings[0]
    assert held(store, back=True) == set(KEYS)


def test_every_byte_of_the_log(store: Path, seed: int) -> None:
    """Whatever is damaged inside, the kills behind it hold."""
    log = logs(store)[-1]
    data = log.read_bytes()
    rng = random.Random(seed)
    for at in sorted(rng.sample(range(len(data)), 12)):
        path = copy(store, store.parent / str(at))
        flip(logs(path)[-1], at, rng.randrange(8))
        outcome = check(path)
        assert outcome.status in (CLEAN, MENDED)
        if outcome.damage:
            mended(path)
        assert held(path, back=True) >= ALIVE


def test_superblocks_logs_and_a_header(store: Path) -> None:
    """A footer tells uuid and epoch of a sealed segment where nothing else does."""
    for path in [*superblocks(store), *logs(store)]:
        path.unlink()
    zero(segments(store)[0], 0)
    mended(store)
    assert held(store, back=True) == set(KEYS)


def test_a_newer_log_that_is_none(store: Path) -> None:
    for path in superblocks(store):
        path.unlink()
    (shard(store) / "manifest-00000099.log").write_bytes(b"garbage" * 100)
    (shard(store) / f"manifest-{'9' * 30}.log").write_bytes(b"")
    outcome = mended(store)
    assert "may not be the last one" in outcome.plan.warnings[0]
    assert held(store) == ALIVE
    assert len(logs(store)) == 2, "what nothing needs is gone"


def test_leftovers_go_with_a_repair(store: Path) -> None:
    (shard(store) / "manifest.new").write_bytes(b"left")
    shutil.copyfile(logs(store)[0], shard(store) / "manifest-00000001.log")
    superblocks(store)[0].unlink()
    mended(store)
    own = ["lock", *(path.name for path in logs(store)), "segments", "superblock.a", "superblock.b"]
    assert sorted(path.name for path in shard(store).iterdir()) == own
    assert len(logs(store)) == 2


# ---- segments -----------------------------------------------------------------------------------


def places(path: Path) -> dict[str, tuple[Path, int]]:
    """(file, page) of what is in the first segment, which has a directory, and in the open one."""
    view = StoreView(path)
    one, last = view.segments[0], view.segments[2]
    assert one.contents is not None
    assert one.footer is not None
    assert last.contents is not None
    sections = {kind: offset // PAGE for kind, offset, _, _ in one.footer.sections}
    row, tail = one.contents.records[2], last.contents.records[1]
    pages = {
        "segment header": 0,
        "namespace record": 1,
        "record header": int(row["page"]),
        "payload": int(row["page"]) + int(row["header_pages"]) + 3,
        "directory records": sections[1],
        "directory blocks": sections[2],
        "directory namespaces": sections[3],
        "bloom": sections[4],
        "footer": one.end_page,
    }
    found = {name: (segments(path)[0], page) for name, page in pages.items()}
    tail_pages = {
        "open: segment header": 0,
        "open: namespace record": 1,
        "open: record header": int(tail["page"]),
        "open: payload": int(tail["page"]) + int(tail["header_pages"]) + 3,
    }
    return found | {name: (segments(path)[2], page) for name, page in tail_pages.items()}


PLACES = [
    *("segment header", "namespace record", "record header", "payload", "directory records"),
    *("directory blocks", "directory namespaces", "bloom", "footer"),
    *("open: segment header", "open: namespace record", "open: record header", "open: payload"),
]


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("how", ["bit", "zeroed page"])
@pytest.mark.parametrize("without", ["", "superblocks"])
def test_damage_in_a_segment(store: Path, what: str, how: str, without: str) -> None:
    if (how, what) == ("zeroed page", "open: namespace record"):
        pytest.skip("that is what a write that never came leaves, too")
    path, page = places(store)[what]
    if how == "zeroed page":
        zero(path, page)
    else:
        flip(path, page * PAGE + 20, 3)
    if without:
        for block in superblocks(store):
            block.unlink()
    mended(store)
    lost = ALIVE - held(store)
    # A record has 20 blocks or fewer; a page holds bytes of some of them.
    if what.endswith("record header"):
        assert 0 < len(lost) <= 20
    elif what.endswith("payload"):
        assert 0 < len(lost) < 20
    else:
        assert not lost


def test_raw_records(disk_path: Path) -> None:
    path = disk_path / "store"
    data = payload(2, 40)
    with make(path, codec="raw") as opened:
        assert opened.namespace(IDENTITY).put(names(40), data).all_ok
        opened.writer.seal()
    view = StoreView(path)
    contents = view.segments[0].contents
    assert contents is not None
    row = contents.records[0]
    first = int(row["page"]) + int(row["header_pages"])
    flip(segments(path)[0], (first + 5) * PAGE + 7)
    mended(path)
    with make(path) as opened:
        result = opened.namespace(IDENTITY).get(names(40), out := np.zeros_like(data))
        good = result.ok
        assert (~good).sum() == 1, "a page of a block of four"
        assert not good[5 * PAGE // data[0].nbytes]
        assert np.array_equal(out[good], data[good])


def test_what_is_behind_a_place_never_reached_the_disk(store: Path, seed: int) -> None:
    """A segment of which the beginning is there, at sector boundaries: what is whole comes back."""
    rng = random.Random(seed)
    for number in (0, 2):
        file = segments(store)[number]
        contents = StoreView(store).segments[number].contents
        assert contents is not None
        for _ in range(3):
            at = 512 * rng.randrange(PAGE // 512, contents.next_page * PAGE // 512)
            path = copy(store, store.parent / f"{number}-{at}")
            data = file.read_bytes()
            segments(path)[number].write_bytes(data[:at].ljust(len(data), b"\0"))
            outcome = repair(path)
            assert outcome.status in (CLEAN, MENDED), (at, outcome)
            assert check(path).status == CLEAN
            ends = (contents.records["page"] + contents.records["pages"]) * PAGE
            whole = int(contents.records["block_count"][ends <= at].sum())
            first = 80 * number
            there = {key for key in KEYS[first : first + whole] if key in ALIVE}
            assert there <= held(path) <= ALIVE, at
            shutil.rmtree(path)


def test_lengths(store: Path, seed: int) -> None:
    size = segments(store)[0].stat().st_size
    rng = random.Random(seed)
    cuts = [0, 1, PAGE - 1, PAGE, size // 2 + 1, size - PAGE, size - 1, rng.randrange(size)]
    others = [(2, size // 3), (0, size + 1), (1, 2 * size)]
    for number, length in [*((0, cut) for cut in cuts), *others]:
        path = copy(store, store.parent / f"{number}-{length}")
        with segments(path)[number].open("r+b") as file:
            file.truncate(length)
        mended(path)
        assert segments(path)[number].stat().st_size == size
        assert held(path) <= ALIVE
        if length > size or length >= size - PAGE:
            assert held(path) == ALIVE
        shutil.rmtree(path)


def test_a_segment_that_is_gone(store: Path) -> None:
    segments(store)[1].unlink()
    outcome = mended(store)
    assert "is gone" in outcome.mended[0].what
    found = held(store)
    assert found < ALIVE
    assert len(found) > 100


def test_segments_in_each_others_place(store: Path) -> None:
    """Their headers tell: neither is taken for the other, and both come back with their names."""
    first, second = segments(store)[:2]
    data = first.read_bytes()
    page = second.read_bytes()[:PAGE]
    with first.open("r+b") as file:
        file.write(page)
    mended(store)
    assert held(store) == ALIVE
    assert first.read_bytes()[:PAGE] != page
    first.write_bytes(data)


def test_a_segment_of_another_store(store: Path, template: Path, disk_path: Path) -> None:
    other = build(disk_path / "other")
    shutil.copyfile(segments(other)[0], shard(store) / "segments" / "00000003.seg")
    outcome = repair(store)
    assert outcome.status == LEFT
    assert "move the file away" in outcome.plan.left[0].why
    shutil.copyfile(segments(other)[0], segments(store)[0])
    outcome = repair(store)
    assert {left.finding.file for left in outcome.plan.left} == {"00000000.seg", "00000003.seg"}
    assert held(store) < ALIVE


def test_a_file_that_is_no_segment(store: Path) -> None:
    """The log is whole and doesn't know it: it counts as free from here on."""
    (shard(store) / "segments" / "00000007.seg").write_bytes(random.Random(1).randbytes(100_000))
    outcome = mended(store)
    assert "counts as free" in outcome.mended[0].what
    assert held(store) == ALIVE


# ---- hostile files ------------------------------------------------------------------------------


def _folder(path: Path) -> None:
    remove(path)
    path.mkdir()
    (path / "inside").touch()


def _link(path: Path) -> None:
    remove(path)
    path.symlink_to("/etc/passwd")


def _loop(path: Path) -> None:
    remove(path)
    path.symlink_to(path.name)


def _fifo(path: Path) -> None:
    import os

    remove(path)
    os.mkfifo(path)


HOSTILE = {"folder": _folder, "link": _link, "loop": _loop, "fifo": _fifo}
HOSTILE |= {how: LOSSES[how] for how in ("gone", "empty", "cut", "garbage", "a bit", "torn at 0")}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("what", ["superblocks", "logs", "segments", "one of each", "the folder"])
def test_whatever_lies_there(store: Path, what: str, how: str) -> None:
    """No exception but ours, an honest status, and after 0 or 1 the store opens."""
    chosen = {
        "superblocks": superblocks(store),
        "logs": logs(store),
        "segments": segments(store),
        "one of each": [superblocks(store)[1], logs(store)[-1], segments(store)[0]],
        "the folder": [shard(store) / "segments"],
    }[what]
    if what == "the folder" and how not in ("folder", "link", "loop", "fifo", "gone"):
        pytest.skip("for files")
    for path in chosen:
        if path.is_dir() and how in LOSSES:
            remove(path)
        else:
            HOSTILE[how](path)
    try:
        looked = check(store)
        outcome = repair(store)
    except (FlashKVError, OSError):
        if what != "the folder":
            raise
        return
    assert outcome.status in (CLEAN, MENDED, LEFT)
    assert (looked.status == CLEAN) == (outcome.status == CLEAN)
    if outcome.status in (CLEAN, MENDED):
        assert check(store).status == CLEAN
        assert held(store, back=True) <= set(KEYS)


def test_random_damage_of_all_files(template: Path, disk_path: Path, seed: int) -> None:
    """Some files cut, some flipped, some gone: no exception, and never other bytes."""
    rng = random.Random(seed)
    for turn in range(12):
        path = copy(template, disk_path / str(turn))
        for file in [*superblocks(path), *logs(path), *segments(path)]:
            act = rng.randrange(8)
            size = file.stat().st_size
            if act == 0:
                file.unlink()
            elif act == 1:
                with file.open("r+b") as opened:
                    opened.truncate(rng.randrange(size))
            elif act < 5:
                for _ in range(rng.randrange(1, 6)):
                    flip(file, rng.randrange(size), rng.randrange(8))
        outcome = repair(path, geometry=GEOMETRY)
        again = check(path)
        if outcome.status == MENDED:
            assert again.status == CLEAN, (seed, turn, again.findings)
        assert held(path, back=True) <= set(KEYS)
        shutil.rmtree(path)


# ---- a repair that is cut off -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["superblocks", "the ruling log", "segments"])
def test_a_repair_may_be_cut_off_anywhere(
    store: Path, monkeypatch: pytest.MonkeyPatch, lost: str, seed: int
) -> None:
    """What it leaves can be repaired again, to the same blocks; what opens, opens."""
    spots = places(store)
    for what in ("open: payload", "record header", "footer", "namespace record"):
        file, page = spots[what]
        flip(file, page * PAGE + 20, 3)
    flip(segments(store)[1], 30)
    if lost == "superblocks":
        for block in superblocks(store):
            block.unlink()
    elif lost == "the ruling log":
        logs(store)[-1].unlink()
    whole = copy(store, store.parent / "whole")
    mended(whole)
    expected = held(whole, back=lost == "the ruling log")
    assert len(expected) > 180
    rng = random.Random(seed)
    count = rng.randrange(3)
    while count < 200:
        path = copy(store, store.parent / str(count))
        files = Cut(count, torn=rng.choice((0, 50, 512)))
        with monkeypatch.context() as patch:
            cut_block_io(patch, files)
            try:
                repair(path, files=files)
            except Power:
                went = True
            else:
                went = False
        after = repair(path)
        assert after.status in (CLEAN, MENDED), (count, after)
        assert held(path, back=lost == "the ruling log") == expected, count
        shutil.rmtree(path)
        if not went:
            assert count > 20
            return
        count += rng.randrange(1, 4)
    pytest.fail("it never came to an end")
