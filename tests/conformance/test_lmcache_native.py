"""Drives the store as LMCache's native plugin would: batches by id, ends through one eventfd.

What a native client is asked for (LMCache 0.5.6, l2 adapter "native_plugin"):
  - event_fd(), readable when there is something to collect;
  - submit_batch_set(keys, buffers), submit_batch_get, submit_batch_exists, submit_batch_delete ->
    id; buffers are memoryviews, of unequal length where a sequence's last chunk is not full;
  - drain_completions() -> [(id, ok, error, results)], each once; results: one bool a key;
  - close() finishes what was submitted. Keys are text of any length.
"""

from __future__ import annotations

import hashlib
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import MIB

import flashkv
from flashkv import Identity, KVGeometry, MemoryView, Milestone, Options, Pointers, Ticket

TOKEN_BYTES = 1536
CHUNK_TOKENS = 256
CHUNK_BYTES = TOKEN_BYTES * CHUNK_TOKENS

Completion = tuple[int, bool, str, list[bool] | None]


class FlashClient:
    """The adapter that a connector would be: a chunk is a block of up to 256 opaque tokens."""

    def __init__(self, path: Path, capacity: int = 64 * MIB, max_tickets: int = 4096) -> None:
        self.store = flashkv.open(
            path,
            capacity=capacity,
            geometry=KVGeometry.opaque(TOKEN_BYTES),
            options=Options(
                segment_bytes=4 * MIB, staging_bytes=8 * MIB, read_buffer_bytes=8 * MIB
            ),
        )
        self.namespace = self.store.namespace(Identity(model="org/model"))
        self.client = self.store.client(max_tickets=max_tickets)
        self.view = MemoryView(block_tokens=CHUNK_TOKENS)

    def event_fd(self) -> int:
        return self.client.fileno()

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        memory, tokens = self._memory(buffers, writable=False)
        return self.client.submit_put(
            self.namespace,
            encoded(keys),
            memory,
            view=self.view,
            tokens=tokens,
            notify=Milestone.CAPTURED,
        ).id

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        memory, tokens = self._memory(buffers, writable=True)
        return self.client.submit_get(
            self.namespace, encoded(keys), memory, view=self.view, tokens=tokens
        ).id

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self.client.submit_contains(self.namespace, encoded(keys)).id

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        return self.client.submit_delete(self.namespace, encoded(keys)).id

    def drain_completions(self) -> list[Completion]:
        return [completion(ticket) for ticket in self.client.drain()]

    def close(self) -> None:
        self.client.close()
        self.store.close()

    def _memory(self, buffers: Sequence[Any], *, writable: bool) -> tuple[Pointers, np.ndarray]:
        """Addresses and token counts of buffers of unequal length."""
        arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        lengths = np.array([len(array) for array in arrays])
        if (lengths % TOKEN_BYTES).any():
            raise ValueError("a buffer holds no whole tokens")
        writable = writable and all(array.flags.writeable for array in arrays)
        addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
        return Pointers(addresses, (arrays, buffers), writable=writable), lengths // TOKEN_BYTES


def encoded(keys: Sequence[str]) -> list[bytes]:
    """Keys of more than 255 bytes are hashed."""
    raw = [key.encode() for key in keys]
    return [key if len(key) <= 255 else hashlib.sha256(key).digest() for key in raw]


def completion(ticket: Ticket) -> Completion:
    if ticket.error is not None:
        return ticket.id, False, repr(ticket.error), None
    if ticket.kind == "contains":
        return ticket.id, True, "", ticket.result.tolist()
    return ticket.id, True, "", ticket.result.ok.tolist()


def collect(client: FlashClient, ids: set[int], timeout_s: float = 20.0) -> dict[int, Completion]:
    """Completions of these ids, by id; each must come once."""
    poll = select.poll()
    poll.register(client.event_fd(), select.POLLIN)
    found: dict[int, Completion] = {}
    end = time.monotonic() + timeout_s
    while found.keys() != ids:
        assert time.monotonic() < end, f"no completion of {ids - found.keys()}"
        if poll.poll(500):
            for entry in client.drain_completions():
                assert entry[0] in ids
                assert entry[0] not in found
                found[entry[0]] = entry
    return found


def results(client: FlashClient, submitted: int) -> list[bool]:
    """What one operation came to; it must not fail as a whole."""
    _, ok, error, values = collect(client, {submitted})[submitted]
    assert ok, error
    assert values is not None
    return values


def names(count: int, part: str = "") -> list[str]:
    """Keys as LMCache makes them."""
    return [f"org/model@2@0@{part}{hash_of(n)}@bfloat16" for n in range(count)]


def hash_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def chunks(count: int, seed: int, last_tokens: int = CHUNK_TOKENS) -> list[bytearray]:
    """Random chunks; the last one may not be full."""
    rng = np.random.default_rng(seed)
    sizes = [CHUNK_BYTES] * (count - 1) + [last_tokens * TOKEN_BYTES]
    return [bytearray(rng.bytes(size)) for size in sizes]


@pytest.fixture
def client(folder: Path) -> Any:
    made = FlashClient(folder)
    yield made
    made.close()


def test_set_exists_get_delete(client: FlashClient) -> None:
    keys, data = names(12), chunks(12, 1)
    assert results(client, client.submit_batch_exists(keys)) == [False] * 12
    buffers = [memoryview(chunk) for chunk in data]
    assert results(client, client.submit_batch_set(keys, buffers)) == [True] * 12
    assert results(client, client.submit_batch_exists([*keys, "x"])) == [True] * 12 + [False]
    out = [bytearray(CHUNK_BYTES) for _ in range(13)]
    got = results(client, client.submit_batch_get([*keys, "absent"], out))
    assert got == [True] * 12 + [False]
    assert out[:12] == data
    assert results(client, client.submit_batch_delete(keys[:4])) == [True] * 4
    assert results(client, client.submit_batch_exists(keys)) == [False] * 4 + [True] * 8
    assert results(client, client.submit_batch_set(keys, buffers)) == [True] * 12


def test_a_chunk_that_is_not_full(client: FlashClient) -> None:
    """Unequal buffers in one batch; a buffer of another length is a miss, and never overrun."""
    keys, data = names(5), chunks(5, 2, last_tokens=100)
    assert results(client, client.submit_batch_set(keys, data)) == [True] * 5
    out = [bytearray(len(chunk)) for chunk in data]
    assert results(client, client.submit_batch_get(keys, out)) == [True] * 5
    assert out == data
    small = bytearray(b"\xee" * (TOKEN_BYTES * 101))
    guarded = memoryview(small)[: TOKEN_BYTES * 100]
    full = bytearray(CHUNK_BYTES)
    got = results(client, client.submit_batch_get([keys[0], keys[4]], [guarded, full]))
    assert got == [False, False], "100 tokens for 256, 256 tokens for 100"
    assert small[TOKEN_BYTES * 100 :] == b"\xee" * TOKEN_BYTES
    got = results(client, client.submit_batch_get([keys[4], keys[0]], [guarded, full]))
    assert got == [True, True]
    assert bytes(guarded) == data[4]
    assert full == data[0]


def test_keys_of_any_length(client: FlashClient) -> None:
    keys = ["k", "k" * 255, "k" * 256, "k" * 5000, "schl\u00fcssel/" * 40]
    data = chunks(5, 3)
    assert results(client, client.submit_batch_set(keys, data)) == [True] * 5
    out = [bytearray(CHUNK_BYTES) for _ in keys]
    assert results(client, client.submit_batch_get(keys, out)) == [True] * 5
    assert out == data


def test_an_operation_that_fails_as_a_whole(client: FlashClient) -> None:
    """Bad arguments end in the operation's completion; what is submitted beside it goes on."""
    keys, data = names(3), chunks(3, 4)
    read_only = [bytes(CHUNK_BYTES)] * 3
    bad = client.submit_batch_get(keys, read_only)
    empty = client.submit_batch_exists(["", "x"])
    good = client.submit_batch_set(keys, data)
    found = collect(client, {bad, empty, good})
    assert found[bad][1] is False
    assert "read-only" in found[bad][2]
    assert found[empty][1] is False
    assert found[good][1:] == (True, "", [True] * 3)
    with pytest.raises(ValueError, match="whole tokens"):
        client.submit_batch_set(keys[:1], [bytearray(TOKEN_BYTES + 1)])


def test_many_operations_in_flight(client: FlashClient) -> None:
    """Ids grow, every completion comes once, whatever the order of their ends."""
    keys, data = names(40), chunks(40, 5)
    sets = [client.submit_batch_set(keys[n : n + 4], data[n : n + 4]) for n in range(0, 40, 4)]
    assert sets == sorted(set(sets))
    found = collect(client, set(sets))
    assert all(entry[1] and entry[3] == [True] * 4 for entry in found.values())
    out = [bytearray(CHUNK_BYTES) for _ in range(40)]
    gets = [client.submit_batch_get([keys[n]], [out[n]]) for n in range(40)]
    exists = [client.submit_batch_exists(keys) for _ in range(10)]
    found = collect(client, {*gets, *exists})
    assert all(found[entry][3] == [True] for entry in gets)
    assert all(found[entry][3] == [True] * 40 for entry in exists)
    assert out == data
    assert client.drain_completions() == []


def test_close_finishes_what_was_submitted(folder: Path) -> None:
    """What was set right before close() is there after a restart."""
    keys, data = names(20), chunks(20, 6)
    client = FlashClient(folder)
    submitted = [client.submit_batch_set(keys[n : n + 5], data[n : n + 5]) for n in range(0, 20, 5)]
    client.close()
    left = client.drain_completions()
    assert sorted(entry[0] for entry in left) == submitted
    assert all(entry[1] for entry in left)
    client = FlashClient(folder)
    out = [bytearray(CHUNK_BYTES) for _ in keys]
    assert results(client, client.submit_batch_get(keys, out)) == [True] * 20
    assert out == data
    client.close()


def test_two_clients_of_one_store(client: FlashClient) -> None:
    """Each worker thread has its own queue, and sees only its own completions."""
    second = FlashClient.__new__(FlashClient)
    second.__dict__.update(client.__dict__)
    second.client = client.store.client()
    assert second.event_fd() != client.event_fd()
    outcome: dict[str, list[bool]] = {}

    def work(who: FlashClient, part: str) -> None:
        keys, data = names(10, part), chunks(10, len(part))
        outcome[part] = results(who, who.submit_batch_set(keys, data))
        out = [bytearray(CHUNK_BYTES) for _ in keys]
        outcome[part] += results(who, who.submit_batch_get(keys, out))
        outcome[part].append(out == data)

    threads = [
        threading.Thread(target=work, args=(who, part))
        for who, part in ((client, "a"), (second, "bb"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcome == {"a": [True] * 21, "bb": [True] * 21}
    second.client.close()


def test_a_full_queue(folder: Path) -> None:
    client = FlashClient(folder, max_tickets=3)
    keys, data = names(2), chunks(2, 7)
    with client.store.writer_lock:
        ids = {client.submit_batch_set(keys, data) for _ in range(3)}
        with pytest.raises(BlockingIOError):
            client.submit_batch_exists(keys)
    found = collect(client, ids)
    assert all(entry[3] == [True, True] for entry in found.values())
    assert results(client, client.submit_batch_exists(keys)) == [True, True]
    client.close()
