"""Fault: a segment all of whose blocks were superseded is freed before what superseded them is
durable: a power cut leaves neither version.

flashkv guarantees: what was flushed is there after a power cut, in its old or its new version, or
was evicted: before a segment is freed, what superseded blocks of it is made durable.
"""

from __future__ import annotations

import random

from simulation.images import look, scratch
from simulation.test_crash_images import Tally
from simulation.workload import Step, Workload

SEED = 430584204
STEPS = (
    *(Step("overwrite", 11), Step("overwrite", 8), Step("delete", 15), Step("reclaim", 3)),
    *(Step("overwrite", 0), Step("reopen", 15), Step("overwrite", 2), Step("put", 9)),
)


def test_old_or_new_after_a_power_cut() -> None:
    rng = random.Random(SEED)
    with scratch() as folder:
        root = folder / "made"
        root.mkdir()
        codec = rng.choice(["raw", "lossless"])
        workload = Workload(root, SEED, codec=codec, bloom=True)
        workload.device.order(rng.choice([1, 4]))
        begun = workload.position
        try:
            for step in STEPS:
                workload.run(step)
            rng.random()
            look(workload, folder, rng, Tally(), first=begun, more=6, nested=0.0)
        finally:
            workload.close()
