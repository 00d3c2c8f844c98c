"""The counters of an opening tell damage from what an earlier use of the space left.

Found by the damage suite: in a segment that is filled again each record of its earlier epochs
counted as damaged at every opening; a header whose sizes were impossible didn't count at all.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from small_stores import IDENTITY, PAGE, edit, make, names, payload, place_of, segment_file

KEYS = names(6)
DATA = payload(1, 6)


def test_records_of_earlier_epochs(store_path: Path) -> None:
    """Behind the tail lie those of the first epoch, then those of the second."""
    with make(store_path) as store:
        namespace = store.namespace(IDENTITY)
        for count in (6, 4, 1):
            for key, block in zip(KEYS[:count], DATA[:count], strict=True):
                assert namespace.put([key], block[None], replace=True).all_ok
            if count > 1:
                store.writer.seal()
                with store.writer_lock:
                    assert store.space.reclaim(1, store.writer.take_kills) == 1
        assert [(s.number, s.epoch) for s in store.segments] == [(0, 3)]
    with make(store_path, read_only=True) as store:
        assert store.recovery.scanned_segments == 1
        assert (store.recovery.damaged_records, store.recovery.blocks) == (0, 1)


@pytest.mark.parametrize("offset", [8, 12, 16], ids=["header_bytes", "header_pages", "pages"])
def test_a_header_of_impossible_sizes(store_path: Path, offset: int) -> None:
    with make(store_path) as store:
        namespace = store.namespace(IDENTITY)
        for key, block in zip(KEYS, DATA, strict=True):
            assert namespace.put([key], block[None]).all_ok
        page = int(place_of(namespace, KEYS[2])["page"])
    with edit(segment_file(store_path, 0)) as fd:
        os.pwrite(fd, struct.pack("<H", 0) * (1 if offset == 12 else 2), page * PAGE + offset)
    with make(store_path) as store:
        assert (store.recovery.damaged_records, store.recovery.blocks) == (1, 5)
