"""Every sequence of up to three of the seven operations, cut by a crash at every I/O boundary of
the last one: those of the others belong to the sequences that they end.

Bounded-exhaustive as CrashMonkey's ACE (Mohan et al., OSDI 2018) is: most crash faults that file
systems and stores have had need no more than three operations.
"""

from __future__ import annotations

import itertools
import random

import pytest
from simulation.images import ImageError, Tally, look, scratch
from simulation.workload import OPERATIONS, Step, Workload

SEQUENCES = [names for count in (1, 2, 3) for names in itertools.product(OPERATIONS, repeat=count)]
PARTS = 27  # no multiple of 7: each has its share of every last operation


def run(names: tuple[str, ...], seed: int, tally: Tally) -> None:
    """A store with flushed keys and others; the operations; all images of the last one."""
    rng = random.Random(f"{seed} {names}")
    with scratch() as folder:
        root = folder / "made"
        root.mkdir()
        workload = Workload(root, seed, codec=rng.choice(["raw", "lossless"]))
        try:
            for step in (Step("put", 6), Step("flush", 0), Step("overwrite", 1), Step("put", 3)):
                workload.run(step)
            # Keys 0 to 2: flushed, superseded, captured ones and one that isn't there meet.
            steps = [Step(name, 6 * rng.randrange(3) + rng.randrange(4)) for name in names]
            for step in steps:
                first = workload.position
                workload.run(step)
            look(workload, folder, rng, tally, first=first)
        except (ImageError, AssertionError) as error:
            said = ", ".join(map(str, steps))
            raise AssertionError(f"seed {seed}: {said}: {error}") from error
        finally:
            workload.close()


def test_there_are_as_many_as_there_should_be() -> None:
    assert len(SEQUENCES) == len(set(SEQUENCES)) == 7 + 7**2 + 7**3


@pytest.mark.parametrize("part", range(PARTS))
def test_every_sequence_at_every_boundary(seed: int, part: int) -> None:
    print(f"seed {seed}")
    tally = Tally()
    for names in SEQUENCES[part::PARTS]:
        tally.seen.clear()
        run(names, seed, tally)
    print(tally)
    assert tally.boundaries > len(SEQUENCES) // PARTS
