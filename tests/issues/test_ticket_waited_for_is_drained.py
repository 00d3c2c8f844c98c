"""Fault: a ticket that has been waited for was missing from the drain() that followed.

flashkv guarantees: once wait() says that a ticket is done, drain() hands it out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_stores import IDENTITY, make, names, payload


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Threads take turns every few microseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("many_switches")
def test_drain_has_what_was_waited_for(folder: Path) -> None:
    with make(folder) as store, store.client() as client:
        namespace = store.namespace(IDENTITY)
        keys, blocks = names(1), payload(1, 1)
        namespace.put(keys, blocks)
        out = np.zeros_like(blocks)
        for _ in range(1000):
            ticket = client.submit_get(namespace, keys, out)
            assert ticket.wait(10_000)
            assert client.drain() == [ticket]
