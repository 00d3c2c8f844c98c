"""Fault: a ticket that had been waited for was missing from the drain() that followed.

flashkv guarantees: once wait() says that a ticket is done, drain() hands it out.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from small_stores import IDENTITY, make, names, payload

from flashkv.tickets import Ticket


def test_drain_has_what_was_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that finishes a ticket is held up right after those who wait have been told."""
    finish = Ticket.finish

    def slow(ticket: Ticket, error: BaseException | None) -> None:
        finish(ticket, error)
        time.sleep(0.05)

    monkeypatch.setattr(Ticket, "finish", slow)
    with make(folder) as store, store.client() as client:
        namespace = store.namespace(IDENTITY)
        keys, blocks = names(1), payload(1, 1)
        namespace.put(keys, blocks)
        ticket = client.submit_get(namespace, keys, np.zeros_like(blocks))
        assert ticket.wait(10_000)
        assert client.drain() == [ticket]
