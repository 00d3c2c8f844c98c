"""Realtime before background, at the device and for buffers; neither shuts the other out."""

from __future__ import annotations

import time

import numpy as np
import pytest
from simulation.device import ALWAYS, HANG, READ, SLOW, WRITE
from simulation.test_giving_up import BLOCKS, KEYS, LONG_MS, given, until

from flashkv import OptionsError
from flashkv.blockio import WRITE_DTYPE
from flashkv.native import address, aligned_array

DEPTH = 4
PAGE = 4096
REALTIME_READS = 100
PASSED_MAX = 16


def test_a_realtime_get_passes_a_background_one() -> None:
    with given(depth=1) as it, it.client() as client:
        it.device.fault(READ, SLOW, count=ALWAYS, amount=20_000)
        slow = client.submit_get(it.space, KEYS, it.memory(), priority="background")
        until(lambda: it.device.calls(READ) > 0, "it has begun")
        memory = it.memory(1)
        assert it.space.get(KEYS[:1], memory).all_ok
        passed = it.device.calls(READ)
        assert not slow.done
        assert passed < BLOCKS, "all of the background's reads went before"
        assert slow.wait(LONG_MS)
        assert slow.result.all_ok


def test_a_realtime_ticket_does_not_queue_behind_background_ones() -> None:
    with given() as it, it.client() as client:
        it.device.fault(READ, HANG, count=ALWAYS)
        stuck = [
            client.submit_get(it.space, KEYS, it.memory(), priority="background") for _ in range(5)
        ]
        until(lambda: it.device.hanging() > 0, "they hang")
        until(lambda: len(it.store.reads) == 5, "all have begun")
        it.device.reset()
        ticket = client.submit_get(it.space, KEYS, it.memory())
        assert ticket.wait(LONG_MS)
        assert ticket.result.all_ok
        it.device.release()
        assert all(one.wait(LONG_MS) and one.result.all_ok for one in stuck)


def test_background_leaves_a_reserve_of_the_queue() -> None:
    """However much of it hangs."""
    with given(depth=DEPTH) as it, it.client() as client:
        it.device.fault(READ, HANG, count=ALWAYS)
        time.sleep(0.05)  # of realtime reads shortly before the queue would leave more
        stuck = client.submit_get(it.space, KEYS, it.memory(), priority="background")
        until(lambda: it.device.hanging() == DEPTH - 1, "all but the reserve hangs")
        time.sleep(0.02)
        assert it.device.hanging() == DEPTH - 1
        it.device.reset()
        assert it.space.get(KEYS[:1], it.memory(1)).all_ok
        it.device.release()
        assert stuck.wait(LONG_MS)
        assert stuck.result.all_ok


def test_background_leaves_a_reserve_of_the_buffers() -> None:
    with given("lossless") as it, it.client() as client:
        it.device.fault(READ, HANG, count=ALWAYS)
        stuck = [
            client.submit_get(it.space, KEYS, it.shaped(it.memory()), priority="background")
            for _ in range(8)
        ]
        until(lambda: len(it.store.reads) == 8, "all have begun")
        until(lambda: it.store.io.counters()["buffer_waits"] > 0, "buffers are used up")
        it.device.reset()
        memory = it.memory(1)
        result = it.space.get(KEYS[:1], it.shaped(memory))
        assert result.all_ok
        it.check(result, memory)
        it.device.release()
        assert all(ticket.wait(LONG_MS) and ticket.result.all_ok for ticket in stuck)


def test_background_is_not_starved() -> None:
    """Writes wait behind a hundred realtime reads, there at once: one of seventeen is theirs."""
    with given(depth=1) as it, it.client() as client:
        pages = aligned_array(4 * PAGE)
        fd = it.store.segments.fds[0]
        end = it.store.segments.segment_bytes - len(pages)
        it.device.fault(READ, HANG, first=1)
        it.device.fault(READ, SLOW, count=ALWAYS, amount=500)
        it.device.fault(WRITE, SLOW, count=ALWAYS, amount=500)
        first = client.submit_get(it.space, KEYS[:1], it.memory(1))
        until(lambda: it.device.hanging() == 1, "the device is busy")
        gets = [client.submit_get(it.space, KEYS[:1], it.memory(1)) for _ in range(REALTIME_READS)]
        until(lambda: it.store.io.counters()["inflight"] == 1 + REALTIME_READS, "all wait")
        writes = np.zeros(4, WRITE_DTYPE)
        writes["tag"] = np.arange(4) + 1
        writes["offset"] = end + PAGE * np.arange(4)
        writes["length"] = PAGE
        writes["data"] = address(pages) + PAGE * np.arange(4, dtype=np.uint64)
        writes["fd"] = fd
        it.store.io.write_submit(writes, pages)
        it.device.release()
        assert all(ticket.wait(LONG_MS) for ticket in (first, *gets))
        assert it.device.calls(WRITE) >= 4, "background waited for all of them"
        landed = 0
        while landed < 4:
            landed += len(it.store.io.write_reap(4, LONG_MS))


@pytest.mark.parametrize("busy", [False, True])
def test_background_that_hangs_beside_realtime_reads_stops_no_background(busy: bool) -> None:
    """Two hang; others follow once no realtime read is about, or after some of them."""
    with given(depth=16) as it, it.client() as client:
        it.device.fault(READ, HANG, count=2)
        it.device.fault(READ, SLOW, count=ALWAYS, amount=500)
        stuck = [
            client.submit_get(it.space, KEYS[row : row + 1], it.memory(1), priority="background")
            for row in range(2)
        ]
        until(lambda: it.device.hanging() == 2, "two hang")
        assert it.space.get(KEYS[:1], it.memory(1)).all_ok  # a realtime read was about just now
        other = client.submit_get(it.space, KEYS[2:], it.memory(6), priority="background")
        end = time.monotonic() + LONG_MS / 1e3
        while busy and not other.done and time.monotonic() < end:
            assert it.space.get(KEYS[:1], it.memory(1)).all_ok
        assert other.wait(LONG_MS)
        assert other.result.all_ok
        assert not any(ticket.done for ticket in stuck)
        it.device.release()
        assert all(ticket.wait(LONG_MS) and ticket.result.all_ok for ticket in stuck)


def test_a_priority_that_is_none() -> None:
    with given() as it, it.client() as client:
        with pytest.raises(OptionsError, match="priority must be realtime or background"):
            it.space.get(KEYS, it.memory(), priority="soon")
        with pytest.raises(OptionsError, match="priority"):
            client.submit_get(it.space, KEYS, it.memory(), priority=1)
        with pytest.raises(OptionsError, match="bounce must be True or False"):
            it.space.get(KEYS, it.memory(), bounce=1)  # type: ignore[arg-type]
        for wrong in ("soon", "100", True, float("nan"), [1]):
            with pytest.raises(OptionsError, match="deadline_ms must be a number"):
                it.space.get(KEYS, it.memory(), deadline_ms=wrong)  # type: ignore[arg-type]
            with pytest.raises(OptionsError, match="deadline_ms"):
                client.submit_get(it.space, KEYS, it.memory(), deadline_ms=wrong)
        with pytest.raises(TypeError):
            client.submit_get(it.space, KEYS, it.memory(), prioritty="realtime")
        assert client.open_tickets == 0
