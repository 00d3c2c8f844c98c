"""Fault: what an interrupted delete or reclaim took out of the index was never logged; a later
delete found nothing to log, and the block, or an older version of it, came back at an opening.

flashkv queues kills and ends before it waits for anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_stores import IDENTITY, make, names, payload

KEY = names(1)
FIRST, SECOND = payload(1, 1), payload(2, 1)


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_delete(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(store_path) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEY, FIRST)
        store.flush()
        namespace.put(KEY, SECOND, replace=True)  # the kill of the first waits for it
        with monkeypatch.context() as patch:
            patch.setattr(store.writer, "_make_durable", interrupted)
            with pytest.raises(KeyboardInterrupt):
                namespace.delete(KEY)
        assert not namespace.delete(KEY).all_ok
        store.flush()
    with make(store_path) as store:
        assert not store.namespace(IDENTITY).contains(KEY).any()


def test_an_interrupted_reclaim(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(store_path) as store:
        namespace = store.namespace(IDENTITY)
        namespace.put(KEY, FIRST)
        store.flush()
        with store.writer_lock:
            store.writer.seal()
            with monkeypatch.context() as patch:
                patch.setattr(store.space, "_wait_unpinned", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    store.space.reclaim(1, store.writer.take_kills)
        assert not namespace.contains(KEY).any()
        namespace.put(KEY, SECOND)
        store.flush()
        assert namespace.delete(KEY).all_ok
    with make(store_path) as store:
        assert not store.namespace(IDENTITY).contains(KEY).any()
