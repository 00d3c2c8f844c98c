"""The entry of a new folder can't be synced: the next try takes the folder for durable, and a power
cut takes the whole store, with all that was flushed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from simulation.device import Device
from simulation.filesystem import SimFiles
from simulation.images import fresh, scratch
from simulation.recording import Replay, write_tree
from simulation.workload import (
    CAPACITY,
    GEOMETRY,
    IDENTITY,
    KEYS,
    blocks,
    check_image,
    options,
)

from flashkv import Store, StoreError


@pytest.mark.parametrize(
    ("number", "ends"), [*((n, False) for n in range(1, 6)), *((n, True) for n in (1, 2, 3))]
)
def test_a_store_in_new_folders(number: int, ends: bool) -> None:
    """ends: not a sync fails, but the process ends before it."""
    with scratch() as folder, fresh(folder) as root, Device() as device:
        device.record()
        files = SimFiles(root, device)
        made = root / "store" if ends else root / "above" / "more" / "store"
        if ends:
            for path in [made, made / "shards", made / "shards" / "0"][:number]:
                files.make_folder(path)
        else:
            files.fail("sync_folder", number)
            with pytest.raises(StoreError):
                open_store(made, files)
        with open_store(made, files) as store:
            assert store.namespace(IDENTITY).put(KEYS, blocks(KEYS, 1)).all_ok
            store.flush()
            replay = Replay(files, device.events())
            while replay.position < len(replay.events):
                replay.step()
            with fresh(folder) as image:
                write_tree(replay.image({}), image)
                found = check_image(image / made.relative_to(root), {key: {1} for key in KEYS})
        assert found == dict.fromkeys(KEYS, 1)


def open_store(path: Path, files: SimFiles) -> Store:
    return Store(path, CAPACITY, GEOMETRY, options(), read_only=False, files=files)
