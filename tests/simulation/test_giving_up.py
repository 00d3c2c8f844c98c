"""Gets that are given up, by a deadline or by cancel(), while the device hangs, is slow or goes on:
what is OK is right, memory is the device's no longer than it is said to be, and nobody else waits.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from simulation.device import ALWAYS, HANG, READ, SLOW, WRITE, Device
from simulation.filesystem import SimFiles
from simulation.images import fresh, scratch
from simulation.workload import IDENTITY
from store_support import small_options

from flashkv import (
    BatchResult,
    BlockStatus,
    CancelledError,
    Client,
    KVGeometry,
    LayerProgress,
    MemoryViewError,
    Milestone,
    Namespace,
    Release,
    Store,
    Ticket,
    TimedOutError,
)
from flashkv.getting import PendingGet
from flashkv.native import aligned_array, lib
from flashkv.operations import Operation, _State

MIB = 1 << 20
LONG_MS = 30_000
SHORT_MS = 60
BLOCKS = 8
BLOCK_BYTES = 256 << 10
KEYS = [b"block-%d" % number for number in range(BLOCKS)]
OPAQUE = KVGeometry.opaque(BLOCK_BYTES)
LAYERS, HEADS, TOKENS, DIM = 8, 2, 64, 64
HEADWISE = KVGeometry.gqa(LAYERS, HEADS, DIM, "bfloat16")  # 256 KiB a block of 64 tokens
POISON = 0xA5


@dataclass
class Given:
    """A store with eight blocks on a device. data: uint8[blocks, bytes]."""

    device: Device
    store: Store
    data: np.ndarray
    codec: str

    @property
    def space(self) -> Namespace:
        return self.store.namespace(IDENTITY)

    def memory(self, count: int = BLOCKS) -> np.ndarray:
        """Page-aligned, so that raw blocks land in it directly: uint8[count, bytes]."""
        memory = aligned_array(count * BLOCK_BYTES).reshape(count, BLOCK_BYTES)
        memory[:] = POISON
        return memory

    def shaped(self, memory: np.ndarray) -> np.ndarray:
        """As get and put take it."""
        if self.codec == "raw":
            return memory
        return memory.view(np.uint16).reshape(-1, LAYERS, 2, HEADS, TOKENS, DIM)

    def check(self, result: BatchResult, memory: np.ndarray, first: int = 0) -> None:
        """Blocks that are OK hold what was put."""
        for row in np.flatnonzero(result.ok).tolist():
            assert np.array_equal(memory[row], self.data[first + row]), f"block {row}"

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Closed once nothing hangs any more: it waits for its tickets."""
        with self.store.client() as client:
            try:
                yield client
            finally:
                self.device.reset()
                self.device.release()

    def forget_headers(self) -> None:
        for number in range(8):
            lib.fkv_header_cache_drop(self.store.io.engine, number)


@contextmanager
def given(codec: str = "raw", *, depth: int = 0, **options: Any) -> Iterator[Given]:
    generator = np.random.default_rng(5)
    if codec == "raw":
        data = generator.integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
    else:
        values = generator.standard_normal((BLOCKS, BLOCK_BYTES // 2), np.float32)
        data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    chosen = small_options(codec=codec, growth=((0, 64),), **options)
    with scratch() as folder, Device() as device, fresh(folder) as root:
        device.depth(depth)
        how: dict[str, Any] = {"read_only": False, "files": SimFiles(root, device, inline=False)}
        geometry = OPAQUE if codec == "raw" else HEADWISE
        with Store(root / "store", 32 * MIB, geometry, chosen, **how) as store:
            it = Given(device, store, data, codec)
            assert it.space.put(KEYS, it.shaped(data)).all_ok
            store.flush()
            memory = it.memory()
            assert it.space.get(KEYS, it.shaped(memory)).all_ok  # headers are known from now on
            assert np.array_equal(memory, data)
            device.reset()
            try:
                yield it
            finally:
                device.reset()
                device.rate()
                device.release()
            until(lambda: not len(store.reads), "reads that were given up are over")
            assert store.io.counters()["buffers_in_use"] == 0
            assert store.index.usage(range(8))["pins"].sum() == 0


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONG_MS / 1e3
    while not true():
        assert time.monotonic() < end, f"it never came that {what}"
        time.sleep(0.001)


def going(ticket: Ticket) -> None:
    """Returns once it isn't the lane's any more: what is cancelled before is so a little later."""
    operation = ticket.give_up.__self__  # type: ignore[union-attr]
    until(lambda: operation._state is _State.GOING, "it goes on by itself")


def hang(it: Given, *, first: int = 1, count: int = 1, kind: int = READ) -> None:
    it.device.reset()
    it.device.fault(kind, HANG, first=first, count=count)


# ---- deadlines ----


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("bounce", [False, True])
def test_a_deadline_is_kept_while_the_device_hangs(codec: str, bounce: bool) -> None:
    with given(codec) as it:
        hang(it, first=3, count=2)
        memory = it.memory()
        result = it.space.get(KEYS, it.shaped(memory), deadline_ms=SHORT_MS, bounce=bounce)
        assert result.counts()["TIMED_OUT"] >= 2, "of a busy machine others may come late too"
        assert list(result.lost) == [status is BlockStatus.TIMED_OUT for status in result]
        it.check(result, memory)
        assert (result.held is not None) == (codec == "raw" and not bounce)
        late = ~result.ok
        memory[late] = POISON
        it.device.reset()
        it.device.release()
        if result.held is not None:
            assert result.held.wait(LONG_MS / 1e3)
            written = (memory[late] != POISON).any(1)
            assert written.sum() >= 2, "the device wrote to it, late"
            assert np.array_equal(memory[late][written], it.data[late][written])
            memory[late] = POISON
        until(lambda: not len(it.store.reads), "the read is over")
        assert (memory[late] == POISON).all(), "memory that was the caller's again was written to"
        it.check(result, memory)
        again = it.space.get(KEYS, it.shaped(memory))
        assert again.all_ok
        it.check(again, memory)
        assert it.store.stats().damaged_blocks == 0


def test_a_deadline_that_is_far_changes_nothing() -> None:
    with given("lossless") as it:
        memory = it.memory()
        for deadline_ms in (LONG_MS, 1e300, float("inf")):
            memory[:] = POISON
            result = it.space.get(KEYS, it.shaped(memory), deadline_ms=deadline_ms)
            assert result.all_ok
            assert result.held is None
            it.check(result, memory)


@pytest.mark.parametrize("deadline_ms", [1e19, 1e300, float("inf")])
def test_a_far_deadline_of_a_ticket_stops_no_other(deadline_ms: float) -> None:
    with given() as it, it.client() as client:
        tickets = [
            client.submit_get(it.space, KEYS, it.memory(), deadline_ms=at)
            for at in (deadline_ms, LONG_MS, deadline_ms)
        ]
        assert all(ticket.wait(LONG_MS) and ticket.result.all_ok for ticket in tickets)
        late = client.submit_get(it.space, KEYS, it.memory(), deadline_ms=float("-inf"))
        assert late.wait(LONG_MS)


def test_a_deadline_keeps_nothing_alive() -> None:
    with given() as it, it.client() as client:
        memory = it.memory()
        ticket = client.submit_get(it.space, KEYS, memory, deadline_ms=1e6)
        assert ticket.wait(LONG_MS)
        client.drain()
        gone = weakref.ref(ticket)
        del ticket
        until(lambda: gc.collect() >= 0 and gone() is None, "the ticket is gone")


def test_a_deadline_of_memory_that_is_too_small() -> None:
    """To say so the record's length must be proved, and the device hangs."""
    with given("lossless") as it, it.client() as client:
        it.device.fault(READ, HANG, count=ALWAYS)
        small = it.shaped(it.memory())[:, :, :, :, : TOKENS // 2]
        began = time.monotonic()
        result = it.space.get(KEYS[:1], small[:1], deadline_ms=SHORT_MS)
        assert list(result) == [BlockStatus.MISS]
        tickets = [client.submit_get(it.space, KEYS[:1], small[:1]) for _ in range(3)]
        assert all(ticket.wait(LONG_MS) for ticket in tickets)
        assert time.monotonic() - began < LONG_MS / 1e3
        it.device.reset()
        it.device.release()
        with pytest.raises(MemoryViewError, match="doesn't fit"):
            it.space.get(KEYS[:1], small[:1], deadline_ms=LONG_MS)


def test_a_deadline_that_is_over_reads_nothing_and_says_so() -> None:
    with given() as it:
        for deadline_ms in (0, -5.0):
            result = it.space.get(KEYS, it.memory(), deadline_ms=deadline_ms)
            assert set(result) <= {BlockStatus.TIMED_OUT, BlockStatus.OK}
            if result.held is not None:
                assert result.held.wait(LONG_MS / 1e3)


def test_a_deadline_while_the_blocks_are_still_being_written() -> None:
    with given() as it:
        hang(it, kind=WRITE, count=ALWAYS)
        new = [b"new"]
        assert it.space.put(new, it.data[:1]).all_ok
        memory = it.memory(1)
        result = it.space.get(new, memory, deadline_ms=SHORT_MS)
        assert list(result) == [BlockStatus.TIMED_OUT]
        assert result.held is None
        with it.client() as client:
            late = client.submit_get(it.space, new, memory, deadline_ms=SHORT_MS)
            patient = [client.submit_get(it.space, new, it.memory(1)) for _ in range(4)]
            others = client.submit_get(it.space, KEYS, it.memory())
            assert others.wait(LONG_MS), "blocks that are written come meanwhile"
            assert others.result.all_ok
            assert late.wait(LONG_MS)
            assert list(late.result) == [BlockStatus.TIMED_OUT]
            it.device.reset()
            it.device.release()
            assert all(ticket.wait(LONG_MS) and ticket.result.all_ok for ticket in patient)


def test_ctrl_c_in_a_get_with_a_deadline() -> None:
    """The call ends with it; what the device does afterwards meets no freed memory."""
    with given() as it:
        hang(it, first=2, count=ALWAYS)
        previous = signal.signal(
            signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            with pytest.raises(KeyboardInterrupt):
                it.space.get(KEYS, it.memory(), deadline_ms=LONG_MS)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert len(it.store.reads) == 1, "it holds what the device writes to"


# ---- cancel ----


def test_cancelling_what_flies() -> None:
    with given() as it, it.client() as client:
        hang(it, first=2, count=1)
        memory = it.memory()
        ticket = client.submit_get(it.space, KEYS, memory)
        until(lambda: it.device.hanging() and it.device.calls(READ) == BLOCKS, "it hangs")
        until(lambda: it.store.io.counters()["inflight"] == 1, "the others have come")
        going(ticket)
        assert ticket.cancel() is Release.STILL_HELD
        assert ticket.done
        assert ticket.held
        assert ticket.cancel() is Release.STILL_HELD
        assert client.drain() == [ticket]
        assert client.drain_released() == []
        assert ticket.result.counts() == {"OK": BLOCKS - 1, "CANCELLED": 1}
        it.check(ticket.result, memory)
        assert not ticket.wait_released(SHORT_MS)
        it.device.release()
        assert ticket.wait_released(LONG_MS)
        assert not ticket.held
        assert ticket.cancel() is Release.RELEASED
        assert client.drain_released() == [ticket]
        assert client.drain_released() == client.drain() == []


def test_what_was_never_issued_is_released_at_once() -> None:
    with given(depth=2) as it, it.client() as client:
        it.device.fault(READ, HANG, count=ALWAYS)
        stuck = client.submit_get(it.space, KEYS, it.memory())
        until(lambda: it.device.hanging() == 2, "the device is full")
        memory = it.memory()
        ticket = client.submit_get(it.space, KEYS, memory)
        until(lambda: len(it.store.reads) == 2, "it has begun")
        until(lambda: it.store.io.counters()["inflight"] == 2 * BLOCKS, "it waits")
        going(ticket)
        going(stuck)
        assert ticket.cancel() is Release.RELEASED
        assert stuck.cancel() is Release.STILL_HELD


def test_ctrl_c_in_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    with given() as it, it.client() as client:
        hang(it, count=ALWAYS)
        ticket = client.submit_get(it.space, KEYS, it.memory(), deadline_ms=LONG_MS)
        until(lambda: it.device.hanging() > 0, "it hangs")
        going(ticket)
        give_up = PendingGet.give_up

        def cut(self: PendingGet) -> bool:
            give_up(self)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(PendingGet, "give_up", cut)
            with pytest.raises(KeyboardInterrupt):
                ticket.cancel()
        assert ticket.done
        assert isinstance(ticket.error, KeyboardInterrupt)
        other = client.submit_get(it.space, KEYS, it.memory(), deadline_ms=SHORT_MS)
        assert other.wait(LONG_MS)


def test_the_device_answers_while_a_get_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are given back once, and it is released after it was done."""
    with given() as it, it.client() as client:
        hang(it, count=ALWAYS)
        ticket = client.submit_get(it.space, KEYS, it.memory())
        until(lambda: it.device.hanging() == BLOCKS, "it hangs")
        going(ticket)
        end = Operation._end

        def slow(self: Operation, *arguments: Any, **options: Any) -> None:
            it.device.release()
            time.sleep(0.1)  # the device answers, and the thread of reads looks at it
            end(self, *arguments, **options)

        monkeypatch.setattr(Operation, "_end", slow)
        ticket.cancel()
        assert client.drain() == [ticket]
        assert ticket.wait_released(LONG_MS)
        until(lambda: client.drain_released() == [ticket], "it is told")
        assert it.store.stats().inflight_bytes == 0


def test_cancelling_a_bounced_get_gives_the_memory_back_at_once() -> None:
    with given() as it, it.client() as client:
        hang(it, count=ALWAYS)
        memory = it.memory()
        ticket = client.submit_get(it.space, KEYS, memory, bounce=True)
        until(lambda: it.device.hanging() > 0, "it hangs")
        going(ticket)
        assert ticket.cancel() is Release.RELEASED
        assert set(ticket.result) == {BlockStatus.CANCELLED}
        memory[:] = 7
        it.device.reset()
        it.device.release()
        until(lambda: not len(it.store.reads), "the read is over")
        assert (memory == 7).all()
        assert client.drain_released() == []


def test_cancelling_what_has_not_begun() -> None:
    with given() as it, it.client() as client:
        gate = threading.Event()
        blockers = [
            client.submit("block", gate.wait, write=write) for write in (True, False, False)
        ]
        progress = LayerProgress(1)
        put = client.submit_put(it.space, [b"new"], it.data[:1], notify=Milestone.DURABLE)
        get = client.submit_get(it.space, KEYS, it.memory(), progress=progress)
        call = client.submit("call", lambda: 1, write=False)
        late = client.submit("call", lambda: 1, write=False)
        for ticket in (put, get, call):
            assert not ticket.done
            assert ticket.cancel() is Release.RELEASED
            assert ticket.done
            assert ticket.cancel() is Release.RELEASED
        assert list(put.result) == [BlockStatus.CANCELLED]
        assert set(get.result) == {BlockStatus.CANCELLED}
        assert progress.failed_layer == 0
        assert not progress.wait(0, LONG_MS)
        assert isinstance(call.error, CancelledError)
        gate.set()
        assert late.wait(LONG_MS)
        assert all(ticket.wait(LONG_MS) for ticket in blockers)
        drained = [ticket.id for ticket in client.drain()]
        assert sorted(drained) == sorted(t.id for t in (*blockers, put, get, call, late))
        assert it.device.calls(READ) == 0
        assert not it.space.contains_one(b"new")
        assert it.store.stats().tickets_inflight == 0


def test_deadlines_of_what_has_not_begun() -> None:
    with given() as it, it.client() as client:
        gate = threading.Event()
        for write in (True, False, False):
            client.submit("block", gate.wait, write=write)
        put = client.submit_put(it.space, [b"new"], it.data[:1], deadline_ms=SHORT_MS)
        get = client.submit_get(it.space, KEYS, it.memory(), deadline_ms=2 * SHORT_MS)
        assert put.wait(LONG_MS)
        assert get.wait(LONG_MS)
        assert list(put.result) == [BlockStatus.TIMED_OUT]
        assert set(get.result) == {BlockStatus.TIMED_OUT}
        assert issubclass(TimedOutError, TimeoutError)
        gate.set()
    assert not get.held


def test_a_put_that_has_begun_goes_on() -> None:
    with given() as it, it.client() as client:
        hang(it, kind=WRITE, count=ALWAYS)
        ticket = client.submit_put(it.space, [b"new"], it.data[:1], notify=Milestone.WRITTEN)
        assert ticket.wait(LONG_MS, Milestone.CAPTURED)
        assert ticket.cancel() is Release.STILL_HELD
        assert not ticket.done
        it.device.reset()
        it.device.release()
        assert ticket.wait(LONG_MS)
        assert ticket.result.all_ok
        assert it.space.contains_one(b"new")


def test_layers_before_the_one_that_was_given_up_are_in_place() -> None:
    with given("lossless") as it, it.client() as client:
        memory = it.memory()
        it.device.fault(READ, HANG, first=5, count=ALWAYS)
        ticket = client.submit_get(it.space, KEYS, it.shaped(memory), layerwise=True)
        until(lambda: it.device.hanging() and it.store.io.counters()["inflight"] ==
              it.device.hanging(), "all that can come has come")  # fmt: skip
        going(ticket)
        ticket.cancel()
        assert ticket.done
        failed = ticket.result.failed_layers
        assert (failed[~ticket.result.ok] >= 0).all()
        assert ticket.failed_layer is not None
        shape = it.shaped(memory), it.shaped(it.data)
        for block, layer in enumerate(failed.tolist()):
            end = LAYERS if layer < 0 else layer
            assert np.array_equal(shape[0][block, :end], shape[1][block, :end])
        assert not ticket.wait_layer(LAYERS - 1, LONG_MS)


# ---- others ----


def test_hanging_reads_block_no_others() -> None:
    """More of them than a client has threads."""
    with given() as it, it.client() as client:
        it.device.fault(READ, HANG, count=6)
        stuck = []
        for number in range(6):  # one after the other: each meets a fault
            stuck.append(client.submit_get(it.space, KEYS[:1], it.memory(1)))
            until(lambda n=number: it.device.hanging() == n + 1, "it hangs")  # type: ignore[misc]
        memory = it.memory(BLOCKS - 1)
        others = client.submit_get(it.space, KEYS[1:], memory)
        assert others.wait(LONG_MS)
        assert others.result.all_ok
        it.check(others.result, memory, 1)
        assert it.space.get(KEYS[1:], memory).all_ok
        assert not any(ticket.done for ticket in stuck)
        assert it.store.stats().tickets_inflight == 6
        it.device.release()
        assert all(ticket.wait(LONG_MS) and ticket.result.all_ok for ticket in stuck)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_storm_of_cancels(codec: str, seed: int) -> None:
    """Gets on a device that answers out of order, of which most are given up at some time: each is
    done once, what is OK is right, and nobody writes to memory that was given back.
    """
    draw = random.Random(seed)
    with given(codec, depth=5) as it, it.client() as client:
        it.device.order(4)
        it.device.fault(READ, SLOW, count=ALWAYS, amount=300)
        for _ in range(12):
            round_of_cancels(it, client, draw)
        assert it.store.stats().tickets_inflight == 0
        assert it.store.stats().damaged_blocks == 0
        assert client.open_tickets == 0


def round_of_cancels(it: Given, client: Client, draw: random.Random) -> None:
    if draw.random() < 0.5:
        it.forget_headers()
    tickets: list[tuple[Ticket, np.ndarray, list[int]]] = []
    for _ in range(draw.randint(1, 8)):
        wanted = sorted(draw.sample(range(BLOCKS), draw.randint(1, BLOCKS)))
        memory = it.memory(len(wanted))
        ticket = client.submit_get(
            it.space,
            [KEYS[number] for number in wanted],
            it.shaped(memory),
            bounce=draw.random() < 0.3,
            priority=draw.choice(["realtime", "background"]),
            deadline_ms=draw.choice([None, None, draw.uniform(0, 8)]),
        )
        tickets.append((ticket, memory, wanted))
    for ticket, memory, _ in draw.sample(tickets, len(tickets)):
        if draw.random() < 0.7:
            time.sleep(draw.uniform(0, 0.003))
            if ticket.cancel() is Release.RELEASED and not ticket.result.ok.any():
                memory[:] = POISON
    for ticket, memory, wanted in tickets:
        assert ticket.wait(LONG_MS)
        assert ticket.error is None
        assert ticket.wait_released(LONG_MS)
        good = ticket.result.ok
        assert np.array_equal(memory[good], it.data[np.array(wanted)[good]])
        memory[~good] = POISON
    drained = client.drain()
    assert sorted(t.id for t in drained) == sorted(t.id for t, _, _ in tickets)
    until(lambda: not len(it.store.reads), "all reads are over")
    for ticket, memory, _ in tickets:
        assert (memory[~ticket.result.ok] == POISON).all()
    released = client.drain_released()
    assert {t.id for t in released} <= {t.id for t in drained}
    assert len(released) == len(set(released))
