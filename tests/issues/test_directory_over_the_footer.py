"""Fault: a segment that one handle filled without room for a Bloom section was sealed by another
that wanted one: its directory ran over the footer, or past the segment's end.

flashkv leaves the filter out where it has no room, and the directory where that has none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from flashkv.tools.fsck import CLEAN, check
from small_stores import IDENTITY, make, names, payload

from flashkv.segments import SegmentState


@pytest.mark.parametrize("spare", range(1, 5))
def test_directory_over_the_footer(store_path: Path, spare: int) -> None:
    """spare: pages between the last record and the footer."""
    with make(store_path, codec="raw", bloom=True) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(names(20), payload(1, 20)).all_ok
        store.flush()
        segment = next(one for one in store.segments if one.state == SegmentState.OPEN)
        segment.next_page = segment.end_page - spare
        with store.writer_lock:
            store.writer.seal()
    files = list((store_path / "shards" / "0" / "segments").iterdir())
    assert all(file.stat().st_size == 4 << 20 for file in files)
    assert check(store_path).status == CLEAN
    with make(store_path) as store:
        assert store.stats().recovery["damaged_directories"] == 0
        assert store.namespace(IDENTITY).contains(names(20)).all()
