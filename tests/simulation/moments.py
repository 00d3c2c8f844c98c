"""Single faults on the small simulated store of workload.py: for tests of one moment each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from simulation.images import fresh, scratch
from simulation.recording import KEPT, Replay, write_tree
from simulation.workload import (
    BLOCK_SHAPE,
    IDENTITY,
    Workload,
    blocks,
    check_image,
    read_versions,
)

from flashkv import BatchResult, Milestone, Store


@contextmanager
def small_store(seed: int = 0) -> Iterator[Workload]:
    """An open store on a simulated device; what is recorded stays till the end."""
    with scratch() as folder:
        workload = Workload(Path(tempfile.mkdtemp(dir=folder)), seed)
        try:
            yield workload
        finally:
            workload.close()


def put(workload: Workload, keys: Sequence[bytes], version: int = 1) -> BatchResult:
    """Stores that version of each."""
    for key in keys:
        workload.versions[key].add(version)
    return workload.store.namespace(IDENTITY).put(keys, blocks(keys, version), replace=True)


def get(workload: Workload, keys: Sequence[bytes]) -> BatchResult:
    """Reads them."""
    out = np.zeros((len(keys), *BLOCK_SHAPE), np.uint16)
    return workload.store.namespace(IDENTITY).get(keys, out)


def shown(workload: Workload) -> dict[bytes, int]:
    """Version of each key that the handle shows."""
    return read_versions(workload.store, workload.versions)


def end_process(store: Store) -> None:
    """Nothing is flushed; what is on its way arrives."""
    with store.writer_lock:
        store._reach(Milestone.WRITTEN)
        store._stop()


def opened(workload: Workload) -> Store:
    """The next handle's store."""
    path, files = workload.path, workload.files
    return Store(path, None, None, workload.options, read_only=False, files=files)


def after_power_cut(
    workload: Workload, *, kept: bool, failed: bool | None = None
) -> dict[bytes, int]:
    """What the store shows if power fails now. kept: all that isn't durable is there; or none.

    failed: the same of what failed before; as `kept` where it isn't given.
    """
    replay = Replay(workload.files, workload.device.events())
    while replay.position < len(replay.events):
        replay.step()
    with scratch() as folder, fresh(folder) as root:
        failed = kept if failed is None else failed
        there = [each for each in replay.pending() if (failed if each.doubtful else kept)]
        write_tree(replay.image(dict.fromkeys(there, KEPT)), root)
        return check_image(root / "store", workload.versions)
