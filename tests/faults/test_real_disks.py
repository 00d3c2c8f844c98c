"""Small real file systems that lose power, fill up, go read-only or fail under a store in use.

Whatever happens, a life (lives.py) goes on as far as it is let, and then the file system is well
again and the account is asked: what was flushed before is there, what was deleted stays away, what
was read was right; then all works as if nothing had been. Each test runs a few times with every
run of the tests and many times in soak.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from lives import CAPACITY, Known, Life
from small_disks import MIB, SmallDisk, small_disk
from store_support import BACKENDS, GQA, du_bytes, open_store

from flashkv import StoreError

IMAGE = 64 * MIB


class Trial:
    """A store on a small disk, its account, and what happens at random moments."""

    def __init__(
        self, disk: SmallDisk, backend: str, seed: int, *, known: Known | None = None
    ) -> None:
        print(f"seed {seed}")
        self.disk = disk
        self.backend = backend
        self.random = random.Random(seed)
        self.known = Known() if known is None else known
        self.errors: Counter[str] = Counter()
        self._fault = "none"  # then "begun" and "over"
        self._at_start = "none"
        self.path = disk.place / "s"
        open_store(self.path, GQA, capacity=CAPACITY, backend=backend).close()

    def life(self, *, steady: bool = False) -> Life:
        task = self.known.task(self.path, self.backend, self.random.randrange(1 << 30))
        self._fault = "none"
        return Life(task, self.hear, steady=steady)

    def hear(self, verb: str, numbers: Sequence[int]) -> None:
        """A call that was under way at the fault has promised nothing: ext4 drops its journal
        first, and an fdatasync that waits for it may return as if it had been written.
        """
        if verb.endswith("ing"):
            self._at_start = self._fault
        overtaken = self._fault != "none" and self._at_start != "over"
        if not (overtaken and verb in ("flushed", "deleted", "rotated")):
            self.known.hear(verb, numbers)

    def words(self, mean: float) -> int:
        return 1 + int(self.random.expovariate(1 / mean))

    @contextmanager
    def soon(self, happens: Callable[[], None]) -> Iterator[threading.Thread]:
        """In a moment it happens, whatever the life is at; it has happened when the block ends."""
        delay_s = self.random.uniform(0, 0.02)

        def later() -> None:
            time.sleep(delay_s)
            self._fault = "begun"
            happens()
            self._fault = "over"

        thread = threading.Thread(target=later)
        thread.start()
        try:
            yield thread
        finally:
            thread.join()

    def end(self, life: Life) -> None:
        """The handle is given back, however ill the file system is."""
        self.errors += life.errors
        life.abandon()

    def segments(self) -> int:
        return len(list(self.path.glob("shards/0/segments/*.seg")))

    def check(self, *, whole: bool = True) -> None:
        """The file system is well again: what is there?"""
        assert du_bytes(self.path) <= CAPACITY
        with open_store(self.path, None, capacity=None, backend=self.backend) as store:
            self.known.check(store, whole=whole)

    def all_is_well(self) -> None:
        life = self.life(steady=True)
        for _ in range(20):
            life.deed()
        life.flush()
        life.close()
        self.check()


def several(ordinary: int, soak: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`times` for every run of the tests, and for soak."""
    return pytest.mark.parametrize(
        "times",
        [
            pytest.param(ordinary, id="short"),
            pytest.param(soak, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
        ],
    )


# ---- power -------------------------------------------------------------------------------------


@several(8, 300)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts(
    kind: str, backend: str, times: int, seed: int, say: Callable[[str], None]
) -> None:
    """At any moment of any call; then the journal is replayed."""
    with small_disk(kind, IMAGE) as disk:
        trial = Trial(disk, backend, seed)
        for _ in range(times):
            life = trial.life()
            for _ in range(trial.words(15)):
                life.deed()
            with trial.soon(disk.cut_power) as cut:
                while cut.is_alive() or (not life.errors and trial.random.random() < 0.9):
                    life.deed()
            trial.end(life)
            disk.restart()
            trial.check(whole=False)
        trial.all_is_well()
        disk.unmount()
        disk.check()
        disk.mount()
    heard = {verb: trial.known.deeds[verb] for verb in ("put", "flushed", "deleted", "rotated")}
    say(f"{times} power cuts, {heard}, errors {dict(trial.errors)}")
    assert heard["flushed"]
    assert trial.errors


# ---- space -------------------------------------------------------------------------------------


@several(4, 100)
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_others_fill_and_empty_the_disk(
    kind: str, times: int, seed: int, say: Callable[[str], None]
) -> None:
    """While it puts, flushes, deletes, opens and closes."""
    with small_disk(kind, IMAGE) as disk:
        trial = Trial(disk, random.Random(seed).choice(BACKENDS), seed, known=Known(0))
        life = trial.life()
        for _ in range(times):
            spare = trial.random.choice([0, 0, 4096, 64 * 1024, MIB, 6 * MIB])
            with trial.soon(lambda spare=spare: disk.fill(spare)) as filling:
                while filling.is_alive():
                    life.deed()
            for _ in range(trial.words(20)):
                life.deed()
            life.attempt(life.reopen)
            for _ in range(trial.words(20)):
                life.deed()
            disk.empty()
            for _ in range(trial.words(5)):
                life.deed()
        life.attempt(life.flush)
        trial.end(life)
        trial.check()
        trial.all_is_well()
    say(f"{times} times full, {dict(trial.known.deeds)}, errors {dict(trial.errors)}")


@several(3, 60)
def test_writes_that_fail_late(
    times: int, seed: int, disk_path: Path, say: Callable[[str], None]
) -> None:
    """The image lies on a full file system: what was taken can't be written when it is synced."""
    with small_disk("tmpfs", 24 * MIB, folder=disk_path) as below:
        for _ in range(times):
            below.remount(f"size={24 * MIB}")
            with small_disk("ext4", IMAGE, folder=below.place) as disk:
                trial = Trial(disk, random.Random(seed).choice(BACKENDS), seed, known=Known(0))
                with disk.small_requests():
                    life = trial.life()
                    for _ in range(400):
                        life.deed()
                        if sum(life.errors.values()) > 3:
                            break
                    assert life.errors, "the file system below was meant to fill up"
                    trial.end(life)
                    below.remount(f"size={2 * IMAGE}")
                disk.unmount()
                subprocess.run(["e2fsck", "-fy", disk.image], check=False, capture_output=True)
                disk.mount()
                trial.check(whole=False)
                trial.all_is_well()
            seed += 1
    say(f"{times} times, errors {dict(trial.errors)}")


# ---- read-only ---------------------------------------------------------------------------------


@several(3, 60)
@pytest.mark.parametrize("backend", BACKENDS)
def test_goes_read_only_under_the_store(
    backend: str, times: int, seed: int, say: Callable[[str], None]
) -> None:
    """As ext4 does by itself at an error; puts end in a status or an error, reads go on."""
    with small_disk("ext4", IMAGE, options="errors=remount-ro") as disk:
        trial = Trial(disk, backend, seed)
        for _ in range(times):
            life = trial.life()
            for _ in range(trial.words(15)):
                life.deed()
            while trial.segments() < 3:  # one may go before the log is found to fail
                life.attempt(life.put)
            life.put()
            life.flush()
            with trial.soon(disk.fail) as failing:
                while failing.is_alive():
                    life.deed()
            if life.store is not None:
                hits = life.hits
                for _ in range(20):
                    life.attempt(life.read)
                assert life.hits > hits, "reads are meant to go on"
            for _ in range(20):
                life.deed()
            assert life.errors
            trial.end(life)
            with open_store(trial.path, None, read_only=True, backend=backend) as store:
                assert store.stats().blocks
            with pytest.raises(StoreError, match=r"[Rr]ead-only"):
                open_store(trial.path, None, capacity=None, backend=backend)
            disk.unmount()
            subprocess.run(["e2fsck", "-fy", disk.image], check=False, capture_output=True)
            disk.mount()
            trial.check(whole=False)
        trial.all_is_well()
    say(f"{times} times, errors {dict(trial.errors)}")
