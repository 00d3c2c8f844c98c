"""The crash images can fail: engines that leave out one step of their care are found out.

Each mutant is a store without one sync, kill or order that its promises rest on. If the images
took it for whole, they would prove nothing of the real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulation.filesystem import SimFiles
from simulation.images import ImageError, Tally
from simulation.test_crash_images import random_steps, run
from simulation.workload import Step

from flashkv import limits, recovery
from flashkv.background import When
from flashkv.blockio import BlockIO
from flashkv.manifest import Manifest
from flashkv.manifest_log import KILL
from flashkv.sealer import Sealer
from flashkv.segment_writer import SegmentWriter
from flashkv.segments import Segments, SegmentState
from flashkv.space import Space

RUNS_MAX = 20
STEPS = [
    [Step("put", 12), Step("put", 15), Step("flush", 0)]
    + [Step("overwrite", 12)] * 7  # into a second segment
    + [Step("delete", 15)],
    [
        Step(name, 6)
        for name in "reclaim put flush overwrite reclaim reclaim delete flush reopen".split()
    ],
    [
        Step(name, 6)
        for name in "put flush overwrite flush delete put flush reclaim put reopen".split()
    ],
]
"""On a few keys: what a mutant leaves out is missed sooner or later."""


def nothing(*_: Any, **__: Any) -> None:
    """In place of a step that is left out."""


def _blocks_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockIO, "sync", lambda _, fds: np.zeros(len(fds), np.int32))


def _log_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimFiles, "sync_data", nothing)


def _new_log_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimFiles, "sync", nothing)


def _folders_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimFiles, "sync_folder", nothing)


def _deletes_are_not_logged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Manifest, "kill", nothing)


def _superseded_blocks_are_not_killed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentWriter, "take_kills", lambda _: np.zeros(0, KILL))


def _epochs_are_not_logged(patch: pytest.MonkeyPatch) -> None:
    def opened(self: Manifest, segment: int, epoch: int, uuid: bytes, *, sync: bool = True) -> None:
        self.state.opened(segment, epoch, uuid)

    patch.setattr(Manifest, "segment_opened", opened)
    patch.setattr(Manifest, "segments_freed", nothing)


def _a_second_segment_is_freed(patch: pytest.MonkeyPatch) -> None:
    """The newest one, and without a word."""
    reclaim = Space.reclaim

    def freed(self: Space, wanted: int, kills: Callable[[], Any]) -> int:
        count = reclaim(self, wanted, kills)
        rest = self._segments.in_state(SegmentState.SEALED, SegmentState.CLOSED)
        for segment in rest[-1:] if count else []:
            self._index.drop_segment(segment.number)
            self._manifest.segments_freed({segment.number: segment.epoch}, kills())
            segment.state = SegmentState.FREE
        return count

    patch.setattr(Space, "reclaim", freed)


def _the_newest_are_evicted(patch: pytest.MonkeyPatch) -> None:
    in_state = Segments.in_state
    patch.setattr(Segments, "in_state", lambda self, *states: in_state(self, *states)[::-1])


def _segments_are_sealed_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    _seal_at_once(patch)
    for name in ("_begin_sync", "_end_sync"):
        patch.setattr(Sealer, name, _without_syncs(getattr(Sealer, name)))


def _without_syncs(step: Callable[[Sealer], None]) -> Callable[[Sealer], None]:
    def done(self: Sealer) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockIO, "sync", lambda _, fds: np.zeros(len(fds), np.int32))
            step(self)

    return done


def _seal_at_once(patch: pytest.MonkeyPatch) -> None:
    """A segment is sealed as soon as it is full: what that does wrong shows before a flush."""
    patch.setattr(limits, "SEALING_SYNC", 1)
    patch.setattr(SimFiles, "when", When.AT_ONCE)


def _segments_are_freed_without_the_kills(patch: pytest.MonkeyPatch) -> None:
    _seal_at_once(patch)
    freed = Manifest.segments_freed
    none = np.zeros(0, KILL)
    patch.setattr(Manifest, "segments_freed", lambda self, epochs, _: freed(self, epochs, none))


def _kills_match_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "matching_kills", lambda *_: np.zeros(0, KILL))


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _blocks_are_not_synced,
    _log_is_not_synced,
    _new_log_is_not_synced,
    _folders_are_not_synced,
    _deletes_are_not_logged,
    _superseded_blocks_are_not_killed,
    _epochs_are_not_logged,
    _a_second_segment_is_freed,
    _the_newest_are_evicted,
    _segments_are_sealed_without_a_sync,
    _segments_are_freed_without_the_kills,
    _kills_match_nothing,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_mutant_is_found(seed: int, mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        runs = [*STEPS, *(random_steps(rng) for _ in range(RUNS_MAX))]
        found = next((said for steps in runs if (said := fault_of(steps, rng))), "")
    print(f"found: {found}")
    assert found, f"{RUNS_MAX} runs took the mutant for whole"


def fault_of(steps: list[Step], rng: random.Random) -> str:
    """What a run and its images find, or an empty string."""
    try:
        run(steps, rng.getrandbits(32), Tally(), more=2, nested=0.0)
    except (ImageError, AssertionError) as error:
        return str(error)
    return ""
