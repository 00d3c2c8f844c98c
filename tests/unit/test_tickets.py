"""Tickets: one completion queue and eventfd a client, each ticket out of it exactly once."""

from __future__ import annotations

import gc
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from io_support import run_child
from store_support import IDENTITY, KINDS, Kind, check_rest, equal, open_store, present

from flashkv import (
    BusyError,
    ClosedError,
    DurabilityError,
    MemoryViewError,
    Milestone,
    Namespace,
    ReadOnlyStoreError,
    Store,
)
from flashkv.blockio import BlockIO

KIND: Kind = KINDS[0]


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with open_store(store_path, KIND.geometry) as store:
        yield store
        if not store.closed:
            assert check_rest(store).tickets_inflight == 0


@pytest.fixture
def ns(store: Store) -> Namespace:
    return store.namespace(IDENTITY)


def readable(fd: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def keys_of(count: int, name: str = "t") -> list[bytes]:
    return [f"{name}-{number}".encode() for number in range(count)]


class Gate:
    """Makes a method of the I/O layer wait until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.event = threading.Event()
        original = getattr(BlockIO, method)

        def gated(*arguments: Any, **named: Any) -> Any:
            assert self.event.wait(20)
            return original(*arguments, **named)

        monkeypatch.setattr(BlockIO, method, gated)


def test_each_ticket_once_through_the_eventfd(store: Store, ns: Namespace) -> None:
    keys = keys_of(40)
    data = KIND.blocks(keys, [0] * 40)
    with store.client() as client:
        assert not readable(client.fileno())
        assert client.drain() == []
        submitted = [
            client.submit_put(ns, keys[at : at + 4], data[at : at + 4]) for at in range(0, 40, 4)
        ]
        seen: list[Any] = []
        while len(seen) < len(submitted):
            assert readable(client.fileno(), 10), "no event for a finished ticket"
            drained = client.drain()
            assert all(ticket.done for ticket in drained)
            seen += drained
        assert sorted(t.id for t in seen) == [t.id for t in submitted]
        assert not readable(client.fileno())
        assert client.drain() == []
        assert client.open_tickets == 0
        assert all(ticket.result.all_ok and ticket.error is None for ticket in seen)
        outs = [KIND.empty(4) for _ in submitted]
        gets = [
            client.submit_get(ns, keys[at : at + 4], out)
            for at, out in zip(range(0, 40, 4), outs, strict=True)
        ]
        for ticket, out, at in zip(gets, outs, range(0, 40, 4), strict=True):
            assert ticket.wait(10_000)
            assert ticket.result.all_ok
            assert equal(out, data[at : at + 4])
        assert len(client.drain()) == len(gets)
        assert not readable(client.fileno())


def test_kinds_and_results(store: Store, ns: Namespace) -> None:
    keys = keys_of(3)
    with store.client() as client:
        put = client.submit_put(ns, keys, KIND.blocks(keys, [0] * 3))
        assert put.wait(10_000)
        contains = client.submit_contains(ns, [*keys, b"absent"])
        assert contains.wait(10_000)
        assert contains.result.tolist() == [True] * 3 + [False]
        delete = client.submit_delete(ns, [*keys[:1], b"absent"])
        assert delete.wait(10_000)
        assert delete.result.counts() == {"OK": 1, "MISS": 1}
        assert [t.kind for t in client.drain()] == ["put", "contains", "delete"]
        assert "put" in repr(put)


def test_milestones_in_order(store: Store, ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """captured before written before durable, each at its time: the sync is held back."""
    keys = keys_of(5)
    ns.put([b"first"], KIND.blocks([b"first"], [0]))
    gate = Gate(monkeypatch, "sync")
    with store.client() as client:
        ticket = client.submit_put(ns, keys, KIND.blocks(keys, [0] * 5), notify=Milestone.DURABLE)
        assert ticket.wait(10_000, Milestone.CAPTURED)
        assert ns.contains(keys).all(), "captured is visible in this process"
        assert ticket.wait(10_000, Milestone.WRITTEN)
        assert not ticket.wait(50)
        assert not ticket.done
        assert not readable(client.fileno())
        assert ticket.milestone == Milestone.WRITTEN
        gate.event.set()
        assert ticket.wait(10_000)
        assert ticket.milestone == Milestone.DURABLE
        assert client.drain() == [ticket]
        written = client.submit_put(
            ns, keys, KIND.blocks(keys, [1] * 5), notify=Milestone.WRITTEN, replace=True
        )
        assert written.wait(10_000)
        assert written.milestone == Milestone.WRITTEN
        captured = client.submit_put(ns, keys, KIND.blocks(keys, [2] * 5), replace=True)
        assert captured.wait(10_000)
        assert captured.milestone == Milestone.CAPTURED


def test_source_is_free_at_captured(store: Store, ns: Namespace) -> None:
    keys = keys_of(8)
    data = KIND.blocks(keys, [0] * 8)
    with store.client() as client:
        ticket = client.submit_put(ns, keys, data, notify=Milestone.DURABLE)
        assert ticket.wait(10_000, Milestone.CAPTURED)
        data[:] = 0
        assert ticket.wait(10_000)
    assert present(ns, KIND, keys).all()


def test_busy_at_the_limit(store: Store, ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(1)
    data = KIND.blocks(keys, [0])
    gate = Gate(monkeypatch, "sync")
    with store.client(max_tickets=3) as client:
        for _ in range(3):
            client.submit_put(ns, keys, data, notify=Milestone.DURABLE)
        with pytest.raises(BusyError, match=r"3.*limit is 3.*[Dd]rain"):
            client.submit_put(ns, keys, data)
        gate.event.set()
        for _ in range(100):
            if len(client.drain()) and client.open_tickets < 3:
                break
            readable(client.fileno(), 1)
        assert client.submit_contains(ns, keys).wait(10_000)


def test_too_many_clients(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashkv.limits.CLIENTS_MAX", 3)
    clients = [store.client() for _ in range(3)]
    with pytest.raises(BusyError, match="3"):
        store.client()
    clients[0].close()
    store.client().close()
    for client in clients:
        client.close()


def test_clients_do_not_mix(store: Store, ns: Namespace) -> None:
    keys = keys_of(1)
    with store.client() as one, store.client() as two:
        assert one.fileno() != two.fileno()
        ticket = one.submit_put(ns, keys, KIND.blocks(keys, [0]))
        assert ticket.wait(10_000)
        assert two.drain() == []
        assert not readable(two.fileno())
        assert readable(one.fileno(), 5)
        assert one.drain() == [ticket]


def test_close_with_open_tickets(
    store: Store, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() waits for what was submitted; finished tickets can be drained afterwards."""
    keys = keys_of(12)
    gate = Gate(monkeypatch, "sync")
    client = store.client()
    tickets = [
        client.submit_put(ns, [key], KIND.blocks([key], [0]), notify=Milestone.DURABLE)
        for key in keys
    ]
    threading.Timer(0.1, gate.event.set).start()
    store.close()
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    assert len(client.drain()) == len(tickets)
    assert client.drain() == []
    with pytest.raises(ClosedError):
        client.submit_contains(ns, keys)
    client.close()


def test_submitting_while_closing(store: Store, ns: Namespace) -> None:
    """Threads that submit all the time don't keep close() from ending; each ticket ends."""
    client = store.client()
    tickets: list[Any] = []
    refused = threading.Event()

    def submit(number: int) -> None:
        keys = keys_of(2, f"s{number}")
        data = KIND.blocks(keys, [0] * 2)
        while True:
            try:
                tickets.append(client.submit_put(ns, keys, data, replace=True))
            except (ClosedError, BusyError) as error:  # noqa: PERF203
                if isinstance(error, ClosedError):
                    refused.set()
                    return
                client.drain()

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while len(tickets) < 20:
        threading.Event().wait(0.005)
    store.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert refused.is_set()
    assert all(ticket.done for ticket in tickets)


def test_wait_times_out(store: Store, ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "sync")
    with store.client() as client:
        keys = keys_of(1)
        ticket = client.submit_put(ns, keys, KIND.blocks(keys, [0]), notify=Milestone.DURABLE)
        assert not ticket.wait(30)
        assert "put" in repr(ticket)
        gate.event.set()
        assert ticket.wait(10_000)


def test_durability_error_comes_with_the_ticket(
    store: Store, ns: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(3)
    with monkeypatch.context() as patch, store.client() as client:
        patch.setattr(BlockIO, "sync", lambda _, fds: np.full(len(fds), -5, np.int32))
        ticket = client.submit_put(ns, keys, KIND.blocks(keys, [0] * 3), notify=Milestone.DURABLE)
        assert ticket.wait(10_000)
        assert isinstance(ticket.error, DurabilityError)
        assert ticket.error.blocks_lost == 3
        assert client.drain() == [ticket]
    assert not ns.contains(keys).any()


def test_read_only_store_has_tickets_too(store: Store, ns: Namespace, store_path: Path) -> None:
    keys = keys_of(3)
    ns.put(keys, KIND.blocks(keys, [0] * 3))
    store.flush()
    with open_store(store_path, None, read_only=True) as reader, reader.client() as client:
        out = KIND.empty(3)
        get = client.submit_get(reader.namespace(IDENTITY), keys, out)
        put = client.submit_put(reader.namespace(IDENTITY), keys, out)
        assert get.wait(10_000)
        assert get.result.all_ok
        assert put.wait(10_000)
        assert isinstance(put.error, ReadOnlyStoreError)


def test_client_gives_its_eventfd_back(store: Store) -> None:
    client = store.client()
    fd = client.fileno()
    os.fstat(fd)
    client.close()
    client.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_client_in_a_forked_child(store_path: Path) -> None:
    """The child is told; it neither waits for ever nor touches the parent's queue."""
    said = run_child(
        """
        import os, sys
        from pathlib import Path
        import flashkv
        from store_support import *
        kind = KINDS[0]
        store = open_store(Path(sys.argv[1]), kind.geometry)
        ns = store.namespace(IDENTITY)
        client = store.client()
        data = kind.blocks([b"a"], [0])
        assert client.submit_put(ns, [b"a"], data).wait(10_000)
        if os.fork() == 0:
            code = 1
            try:
                client.submit_put(ns, [b"b"], data)
            except flashkv.ForkedError:
                code = 0
            client.close()
            store.close()
            os._exit(code)
        assert os.wait()[1] == 0
        assert client.submit_get(ns, [b"a"], data).wait(10_000)
        assert len(client.drain()) == 2
        store.close()
        print("fine")
        """,
        store_path,
    )
    assert "fine" in said


def test_a_failed_ticket_holds_no_memory(store: Store, ns: Namespace) -> None:
    """Not even in cycles, until the collector comes."""

    class Memory(np.ndarray):
        pass

    memory = np.zeros(8, np.uint8).view(Memory)
    gone = weakref.ref(memory)
    gc.disable()
    try:
        with store.client() as client:
            ticket = client.submit_get(ns, keys_of(1), memory)
            del memory
            assert ticket.wait(20_000)
            assert isinstance(ticket.error, MemoryViewError)
            client.drain()
            wait_for(lambda: gone() is None)
    finally:
        gc.enable()


def test_buffers_of_a_failed_ticket_survive_the_collector(store: Store, ns: Namespace) -> None:
    """CPython crashes where a memoryview in a cycle is something else's buffer."""
    with store.client() as client:
        for _ in range(20):
            ticket = client.submit_get(ns, keys_of(1), [memoryview(bytes(4096))])
            assert ticket.wait(20_000)
            assert ticket.error is not None
            error = ticket.error
            error.cycle = [error, ticket]  # type: ignore[attr-defined]
            client.drain()
            del ticket, error
            gc.collect()


def wait_for(done: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """A thread's last frames may end a little after what it told."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_any_call_is_a_ticket(store: Store, ns: Namespace) -> None:
    keys = keys_of(4)
    with store.client() as client:
        put = client.submit("put", lambda: ns.put(keys, KIND.blocks(keys, [0] * 4)), write=True)
        assert put.wait(20_000)
        assert put.result.all_ok
        assert put.milestone == Milestone.CAPTURED
        both = client.submit("both", lambda: (ns.contains(keys), ns.match(keys)), write=False)
        assert both.wait(20_000)
        assert both.result[0].all()
        assert both.result[1].count == 4
        wrong = client.submit("wrong", lambda: 1 // 0, write=False)
        assert wrong.wait(20_000)
        assert isinstance(wrong.error, ZeroDivisionError)
        if sys.version_info >= (3, 11):
            assert "test_tickets.py" in wrong.error.__notes__[0]
        assert [ticket.kind for ticket in client.drain()] == ["put", "both", "wrong"]
