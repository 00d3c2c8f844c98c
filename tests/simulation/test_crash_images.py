"""Crash images by the hundred thousand: random operations, random fates of what was not durable.

Counted are images that differ. FLASHKV_IMAGES=N looks at N in all.
"""

from __future__ import annotations

import os
import random

import pytest
from simulation.images import ImageError, Tally, look, scratch, shortest
from simulation.workload import OPERATIONS, Step, Workload

IMAGES = int(os.environ.get("FLASHKV_IMAGES", "20000"))
IMAGES_OF_SOAK = 10_000_000
PARTS = 20
STEPS_MAX = 9


def random_steps(rng: random.Random) -> list[Step]:
    """Operations with what they take; puts are the most frequent."""
    weights = [4, 3, 2, 1, 3, 1, 1]
    names = rng.choices(OPERATIONS, weights, k=rng.randint(2, STEPS_MAX))
    return [Step(name, rng.randrange(18)) for name in names]


def run(steps: list[Step], seed: int, tally: Tally, *, more: int, nested: float) -> None:
    """The steps on a new store, and its images, those of its creation too. Raises ImageError."""
    rng = random.Random(seed)
    with scratch() as folder:
        root = folder / "made"
        root.mkdir()
        workload = Workload(root, seed, codec=rng.choice(["raw", "lossless"]), bloom=seed % 2 == 0)
        workload.device.order(rng.choice([1, 4]))
        created = workload.position
        try:
            for step in steps:
                workload.run(step)
            first = 0 if rng.random() < 0.02 else created
            look(workload, folder, rng, tally, first=first, more=more, nested=nested)
        finally:
            workload.close()


def run_many(seed: int, images: int) -> Tally:
    """Looks at so many images; a failure is told with the shortest steps that have it."""
    rng = random.Random(seed)
    tally = Tally()
    while tally.different + tally.nested < images:
        steps, number = random_steps(rng), rng.getrandbits(32)
        tally.seen.clear()
        try:
            run(steps, number, tally, more=6, nested=0.004)
        except (ImageError, AssertionError) as error:
            said = str(error)
        else:
            continue

        def fails(fewer: list[Step], number: int = number) -> str:
            try:
                run(fewer, number, Tally(), more=6, nested=0.004)
            except (ImageError, AssertionError) as error:
                return str(error)
            return ""

        few, how = shortest(steps, fails)
        listed = ", ".join(map(str, few))
        raise AssertionError(f"seed {number}, steps [{listed}]: {how or said}")
    return tally


@pytest.mark.parametrize("part", range(PARTS))
def test_crash_images(seed: int, part: int) -> None:
    print(f"seed {seed}")
    tally = run_many(seed, IMAGES // PARTS)
    print(tally)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_crash_images_at_length(seed: int, part: int) -> None:
    print(f"seed {seed}")
    print(run_many(seed, IMAGES_OF_SOAK // PARTS))
