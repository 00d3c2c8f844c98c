"""A fixed course of calls with the n-th call of one kind failing, n = 1, 2, 3, ... till none does.

After each: no error but the package's own, no hang, no leak; what was acknowledged holds, in the
handle, after opening again and in crash images; the next operation works once the fault is gone.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import threading
from pathlib import Path

import pytest
from simulation.course import NEW_KEYS, Course
from simulation.device import SYNC_END, WRITE, live_allocations
from simulation.faults import ALLOCATION, DEVICE, KINDS, Fault, Faults, Nth, faults_of, times_of
from simulation.filesystem import CALLS
from simulation.images import describe, fresh, scratch
from simulation.recording import KEPT, Fate, Replay, at_random, write_tree
from simulation.workload import check_image, check_space

WATCHDOG_S = 60
IMAGES_BETWEEN = 2


# ---- after the course ----------------------------------------------------------------------------


def check_rest(course: Course) -> None:
    """Nothing is held, and figures fit together."""
    store = course.store
    store.writer.flights.wait_written()
    stats = store.stats()
    assert stats.staging_in_use == stats.read_buffers_in_use == stats.writes_inflight == 0
    assert stats.io["inflight"] == stats.leases == stats.tickets_inflight == 0
    usage = store.index.usage([segment.number for segment in store.segments])
    assert not usage["pins"].any()
    assert int(usage["live_blocks"].sum()) == stats.blocks
    assert int(usage["live_records"].sum()) == stats.records


def check_failed_syncs(course: Course) -> None:
    """After a failed sync a handle writes no more to that segment, but to begin it anew."""
    events = course.device.events()
    failed: dict[int, int] = {}  # inode -> position
    for position, event in enumerate(events):
        if event.kind == SYNC_END and event.inode and event.result != 0:
            failed[event.inode] = position
        elif event.kind == WRITE and event.inode in failed:
            since = failed.pop(event.inode)
            opened = any(since < at <= position for at in course.opened)
            assert event.offset == 0 or opened, f"event {position} writes behind a failed sync"


def look_at_images(course: Course, folder: Path, rng: random.Random) -> None:
    """Crashes at the end, with all that isn't durable kept, lost and in part, and some before."""
    replay = Replay(course.files, course.device.events())
    positions = sorted(rng.randrange(len(replay.events)) for _ in range(IMAGES_BETWEEN))
    for position in (*positions, len(replay.events)):
        while replay.position < position:
            replay.step()
        pending = replay.pending()
        fates: list[Fate] = [at_random(pending, rng)]
        if position == len(replay.events):
            fates += [{}, dict.fromkeys(pending, KEPT)]
        for fate in fates:
            _look_at(course, replay, fate, folder)


def _look_at(course: Course, replay: Replay, fate: Fate, folder: Path) -> None:
    try:
        with fresh(folder) as root:
            write_tree(replay.image(fate), root)
            found = check_image(root / "store", course.versions)
        rots = course.faults.rots
        wrong = course.account.verdict(found, replay.position, may_miss=rots)
        assert not wrong or course.faults.revives, wrong
    except BaseException as error:
        where = f"before event {replay.position} of {len(replay.events)}"
        error.add_note(f"{where}, with {describe(fate, replay.pending())}")
        raise


def afterwards(course: Course, folder: Path, rng: random.Random) -> None:
    """The fault is over."""
    course.faults.end()
    check_rest(course)
    assert course.put(NEW_KEYS), "no put works any more"
    course.flush()
    assert course.get(NEW_KEYS) == len(NEW_KEYS)
    check_rest(course)
    check_failed_syncs(course)
    course.close()
    course.open()
    check_space(course.store)
    if not course.faults.rots:
        assert course.get(NEW_KEYS) == len(NEW_KEYS)
    course.close()
    look_at_images(course, folder, rng)


# ---- one run -------------------------------------------------------------------------------------


def run(faults: Faults, seed: int, *, inline: bool = True, window: int = 1) -> Course:
    """The course and what comes after it. Leaks nothing."""
    with scratch() as folder:
        root = folder / "made"
        root.mkdir()
        course = Course(root, seed, faults, inline=inline)
        course.device.order(window)
        try:
            course.run()
            afterwards(course, folder, random.Random(seed))
        finally:
            faults.end()
        course.end()
    return course


def descriptors() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def watched(faults: Faults, seed: int, **how: int) -> Course:
    """run() on a thread of its own, which may not hang."""
    ended: list[Course | BaseException] = []

    def work() -> None:
        try:
            ended.append(run(faults, seed, **how))
        except BaseException as error:  # noqa: BLE001  (it is raised by who waits)
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WATCHDOG_S)
    if not ended:
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError(f"it hangs since {WATCHDOG_S} s: see the tracebacks")
    thread.join()
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def fail_at(fault: Fault, number: int, seed: int, **how: int) -> int:
    """The n-th call of a kind fails, and what comes after. Returns how many calls it met."""
    before = descriptors(), live_allocations()
    faults = Nth(fault, number)
    try:
        watched(faults, seed, **how)
        gc.collect()
        after = descriptors(), live_allocations()
        # What a test that failed before held may go meanwhile.
        assert all(now <= then for now, then in zip(after, before, strict=True)), (
            f"something was not given back: {before} descriptors and allocations, {after} then"
        )
    except BaseException as error:
        error.add_note(f"seed {seed}, n = {number}: {fault}")
        raise
    return faults.hits()


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """Only what a course makes is looked at when garbage is collected."""
    watched(Faults(), 0)  # what is made once and stays
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_by_others() -> None:
    """Stores of other tests are gone."""
    gc.collect()


# ---- all of them ---------------------------------------------------------------------------------

APART = ("truncate", "remove_folder")
"""Calls that no course makes: of repairs, and of creations that failed before."""
PARTS = {"device write": 4, "device read": 2, ALLOCATION: 5}
STRIDES = {ALLOCATION: 7}
"""So far apart at most are the calls that the ordinary run lets fail; else each does."""
SPLIT = [(kind, part) for kind in KINDS if kind not in APART for part in range(PARTS.get(kind, 1))]


def test_the_course_makes_every_call() -> None:
    """And seals, reclaims and reopens, while nothing fails."""
    course = watched(Faults(), 1)
    assert {kind for kind in CALLS if not course.files.calls[kind]} == set(APART)
    assert not course.errors
    assert course.failed_syncs == 0
    assert course.evicted_blocks > 0
    assert course.sealed_segments > 8


@pytest.mark.parametrize(("kind", "part"), SPLIT)
def test_nth_call(seed: int, kind: str, part: int) -> None:
    """Each call of a kind fails in one way, drawn at random."""
    rng = random.Random(seed)
    parts, stride = PARTS.get(kind, 1), STRIDES.get(kind, 1)
    number = 1 + part
    while fail_at(rng.choice(faults_of(kind)), number, rng.getrandbits(32)):
        number += parts * rng.randint(1, stride)
    assert number > 1 + part, "no call failed"


@pytest.mark.parametrize("kind", DEVICE)
def test_nth_call_out_of_order(seed: int, kind: str) -> None:
    """On a device with a thread of its own that answers late, slowly, not at all, out of order."""
    rng = random.Random(seed)
    for fault in (*times_of(kind), *rng.choices(faults_of(kind), k=6)):
        number = rng.randint(1, 30)
        while not fail_at(fault, number, rng.getrandbits(32), inline=False, window=4):
            number //= 2  # so many calls there were not: syncs serve several segments
            assert number


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in APART])
def test_every_fault_of_every_call(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    for fault in faults_of(kind):
        number = 1
        while fail_at(fault, number, rng.getrandbits(32)):
            number += 1


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", DEVICE)
def test_every_fault_out_of_order(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    for fault in (*times_of(kind), *faults_of(kind)):
        number = 1
        while fail_at(fault, number, rng.getrandbits(32), inline=False, window=rng.choice([1, 4])):
            number += 1
