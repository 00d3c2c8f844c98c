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

from flashkv.blockio import BlockIO
from flashkv.manifest import Manifest
from flashkv.manifest_log import KILL
from flashkv.segment_writer import SegmentWriter

RUNS_MAX = 20
STEPS = [
    Step(name, 6)
    for name in "put flush overwrite flush delete put flush reclaim put reopen".split()
]
"""On one pair of keys: what a mutant leaves out is missed sooner or later."""


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


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _blocks_are_not_synced,
    _log_is_not_synced,
    _new_log_is_not_synced,
    _folders_are_not_synced,
    _deletes_are_not_logged,
    _superseded_blocks_are_not_killed,
    _epochs_are_not_logged,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_mutant_is_found(seed: int, mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        runs = [STEPS, *(random_steps(rng) for _ in range(RUNS_MAX))]
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
