"""LMCache's native_plugin client: it needs no LMCache, so its faults are tested here."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import edit, segment_files

import flashkv
from flashkv.connectors.lmcache_client import FlashKVClient
from flashkv.connectors.opaque import OPAQUE_GEOMETRY, UNITS, split
from flashkv.errors import IdentityError, OptionsError

SIZE = 96 * 1024  # 3 units of 32 KiB
SMALL: dict[str, Any] = {
    "options": {"segment_bytes": "4MiB", "free_floor_bytes": 0},
    "capacity": "64MiB",
}


def make(path: Path, **params: Any) -> FlashKVClient:
    return FlashKVClient(path=str(path), **{**SMALL, **params})


@pytest.fixture
def client(store_path: Path) -> Iterator[FlashKVClient]:
    client = make(store_path)
    yield client
    client.close()


def wait(client: FlashKVClient, *ids: int) -> list[tuple[bool, str, list[bool] | None]]:
    """Completions of these, by the eventfd alone, as LMCache waits."""
    done: dict[int, tuple[bool, str, list[bool] | None]] = {}
    while set(done) < set(ids):
        assert select.select([client.event_fd()], [], [], 20)[0], "no completion"
        for number, ok, error, results in client.drain_completions():
            assert number not in done, "a completion came twice"
            done[number] = (ok, error, results)
    return [done[number] for number in ids]


def names(count: int, first: int = 0) -> list[str]:
    return [f"model@{i:08x}@0@{i:032x}" for i in range(first, first + count)]


def blocks(count: int, size: int = SIZE, seed: int = 0) -> list[memoryview]:
    data = np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)
    return [memoryview(row) for row in data]


def empty(count: int, size: int = SIZE) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


def same(left: Sequence[memoryview], right: Sequence[memoryview]) -> bool:
    return [bytes(one) for one in left] == [bytes(one) for one in right]


def store_all(client: FlashKVClient, keys: list[str], data: list[memoryview]) -> None:
    assert wait(client, client.submit_batch_set(keys, data)) == [(True, "", None)]


def load(
    client: FlashKVClient, keys: list[str], size: int = SIZE
) -> tuple[list[bool], list[memoryview]]:
    memory = empty(len(keys), size)
    ((ok, error, results),) = wait(client, client.submit_batch_get(keys, memory))
    assert ok
    assert not error
    assert results is not None
    return results, memory


def test_what_is_stored_comes_back(client: FlashKVClient) -> None:
    keys, data = names(8), blocks(8)
    store_all(client, keys, data)
    ((ok, _, found),) = wait(client, client.submit_batch_exists([*keys, "other"]))
    assert ok
    assert found == [True] * 8 + [False]
    results, memory = load(client, [keys[3], "other", keys[0]])
    assert results == [True, False, True]
    assert same([memory[0], memory[2]], [data[3], data[0]])


def test_a_restart_keeps_blocks(store_path: Path) -> None:
    first = make(store_path)
    store_all(first, names(8), blocks(8))
    first.close()
    first.close()
    second = make(store_path)
    results, memory = load(second, names(8))
    assert results == [True] * 8
    assert same(memory, blocks(8))
    second.close()


def test_blocks_of_several_sizes_in_one_batch(client: FlashKVClient) -> None:
    sizes = [SIZE, 16, 48, SIZE, 512 << 10, 17 * 1024]
    keys, data = names(6), [blocks(1, size, seed)[0] for seed, size in enumerate(sizes)]
    store_all(client, keys, data)
    memory = [memoryview(bytearray(size)) for size in sizes]
    assert wait(client, client.submit_batch_get(keys, memory)) == [(True, "", [True] * 6)]
    assert same(memory, data)


def test_another_size_is_a_miss_and_makes_room(client: FlashKVClient) -> None:
    keys = names(2)
    store_all(client, keys, blocks(2))
    results, memory = load(client, keys, 2 * SIZE)
    assert results == [False, False]
    assert not any(map(any, memory))
    assert client.stats()["events"]["other_size"] == 1
    store_all(client, keys, blocks(2, 2 * SIZE))
    results, memory = load(client, keys, 2 * SIZE)
    assert results == [True, True]
    assert same(memory, blocks(2, 2 * SIZE))


ODD = [1, 7, 15, 24, 1025 * 16, 4097, 1025 * 512 + 3, 99_999]


def test_sizes_that_no_unit_fits_are_padded(store_path: Path) -> None:
    client = make(store_path)
    keys, data = names(len(ODD)), [blocks(1, size, size)[0] for size in ODD]
    assert all(split(size) is None for size in ODD)
    store_all(client, keys, data)
    assert wait(client, client.submit_batch_exists(keys)) == [(True, "", [True] * len(ODD))]
    client.close()
    client = make(store_path)
    memory = [memoryview(bytearray(size)) for size in ODD]
    assert wait(client, client.submit_batch_get(keys, memory))[0][2] == [True] * len(ODD)
    assert same(memory, data)
    assert client.stats()["events"] == {}
    deleted = wait(client, client.submit_batch_delete([*keys, "other"]))
    assert deleted == [(True, "", [True] * len(ODD) + [False])]
    assert wait(client, client.submit_batch_get(keys, memory))[0][2] == [False] * len(ODD)
    client.close()


@pytest.mark.parametrize("other", [1025 * 16 - 1, 1025 * 16 + 1, 1024 * 16, 1026 * 16])
def test_another_odd_size_is_a_miss(client: FlashKVClient, other: int) -> None:
    size = 1025 * 16
    store_all(client, names(2), blocks(2, size))
    assert load(client, names(2), other)[0] == [False, False]
    store_all(client, names(2), blocks(2, other))
    results, memory = load(client, names(2), other)
    assert results == [True, True]
    assert same(memory, blocks(2, other))


def test_padded_blocks_stay_within_their_buffers(client: FlashKVClient) -> None:
    for size in ODD:
        store_all(client, names(1, size), blocks(1, size, size))
        guarded = np.full(size + 64, 0xA5, np.uint8)
        memory = memoryview(guarded)[32 : 32 + size]
        assert wait(client, client.submit_batch_get(names(1, size), [memory]))[0][2] == [True]
        assert bytes(memory) == bytes(blocks(1, size, size)[0])
        assert (guarded[:32] == 0xA5).all()
        assert (guarded[-32:] == 0xA5).all()


def test_no_bytes_are_no_block(client: FlashKVClient) -> None:
    empty_one = [memoryview(b"")]
    ((ok, error, _),) = wait(client, client.submit_batch_set(names(1), empty_one))
    assert not ok
    assert "not all" in error
    assert wait(client, client.submit_batch_get(names(1), empty_one))[0][2] == [False]
    assert client.stats()["events"] == {"set_size": 1, "get_size": 1}


def test_every_size_has_one_form() -> None:
    sizes = [unit * tokens for unit in UNITS for tokens in (1, 3, 5, 255, 1023)]
    forms = {}
    for size in sizes:
        form = split(size)
        assert form is not None
        assert OPAQUE_GEOMETRY.block_bytes(*form) == size
        forms.setdefault(form, size)
    assert len(forms) == len(set(sizes))
    assert [split(size) for size in (0, -16, 8, 24, 1025 << 10)] == [None] * 5


def test_deleted_keys_are_gone(client: FlashKVClient) -> None:
    store_all(client, names(3), blocks(3))
    deletion = client.submit_batch_delete([names(1)[0], "other"])
    assert wait(client, deletion) == [(True, "", [True, False])]
    assert load(client, names(3))[0] == [False, True, True]


def test_long_keys_are_digested(client: FlashKVClient) -> None:
    keys = ["m" * 300 + str(i) for i in range(2)]
    store_all(client, keys, blocks(2))
    results, memory = load(client, keys)
    assert results == [True, True]
    assert same(memory, blocks(2))


def test_a_batch_of_nothing(client: FlashKVClient) -> None:
    done = wait(
        client,
        client.submit_batch_get([], []),
        client.submit_batch_set([], []),
        client.submit_batch_exists([]),
        client.submit_batch_delete([]),
    )
    assert done == [(True, "", []), (True, "", None), (True, "", []), (True, "", [])]


def test_memory_that_cannot_be_written_fails_alone(client: FlashKVClient) -> None:
    store_all(client, names(1), blocks(1))
    read_only = memoryview(bytes(SIZE))
    ((ok, error, results),) = wait(client, client.submit_batch_get(names(1), [read_only]))
    assert not ok
    assert "can't be written" in error
    assert results is None
    assert load(client, names(1))[0] == [True]


def test_a_locked_store_is_said_once_and_misses(
    store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = flashkv.Options(**SMALL["options"])
    with flashkv.open(store_path, capacity="64MiB", geometry=OPAQUE_GEOMETRY, options=options):
        client = make(store_path)  # the lock counts within a process as well
        for _ in range(3):
            ((ok, error, _),) = wait(client, client.submit_batch_set(names(2), blocks(2)))
            assert not ok
            assert error
            assert load(client, names(2))[0] == [False, False]
            ((ok, _, found),) = wait(client, client.submit_batch_exists(names(2)))
            assert ok
            assert found == [False, False]
        assert client.stats()["no_store_reason"]
        assert client.stats()["store"] is None
        client.close()
    assert sum("goes on without" in record.message for record in caplog.records) == 1


def test_a_full_store_forgets_and_goes_on(store_path: Path) -> None:
    client = make(store_path, capacity="24MiB")
    for first in range(0, 600, 20):
        ((ok, _, _),) = wait(client, client.submit_batch_set(names(20, first), blocks(20)))
        assert ok
    results, memory = load(client, names(20, 580))
    assert all(results)
    assert same(memory, blocks(20))
    assert client.stats()["store"]["evicted_blocks"] > 0
    client.close()


def test_blocks_too_large_for_the_store_are_not_stored(store_path: Path) -> None:
    client = make(store_path)
    size = 2 << 20  # a segment of 4 MiB takes records of up to 1
    ((ok, _, _),) = wait(client, client.submit_batch_set(names(1), blocks(1, size)))
    assert not ok
    assert client.stats()["events"] == {"set_block_too_large": 1}
    assert load(client, names(1), size)[0] == [False]
    client.close()


def test_damage_is_a_miss_and_can_be_stored_anew(store_path: Path) -> None:
    first = make(store_path)
    store_all(first, names(16), blocks(16))
    first.close()
    (segment,) = segment_files(store_path)
    with edit(segment) as fd:
        for page in range(40, 400, 24):
            os.pwrite(fd, b"damage" * 8, page * 4096 + 100)
    second = make(store_path)
    results, memory = load(second, names(16))
    for row, good in enumerate(results):
        assert not good or bytes(memory[row]) == bytes(blocks(16)[row])
    assert results.count(False) > 0
    store_all(second, names(16), blocks(16))
    results, memory = load(second, names(16))
    assert all(results)
    assert same(memory, blocks(16))
    second.close()


def test_models_and_salts_do_not_meet(store_path: Path, tmp_path: Path) -> None:
    for name, width in (("one", 128), ("two", 256)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"hidden_size": {width}}}')
        (folder / "model.safetensors").write_bytes(b"\0" * 64 + name.encode())
    forms: list[dict[str, Any]] = [
        {},
        {"salt": "tenant"},
        {"kv_dtype": "float16"},
        {"model": str(tmp_path / "one")},
        {"model": str(tmp_path / "two")},
    ]
    clients = [make(store_path, **form) for form in forms]
    for number, client in enumerate(clients):
        store_all(client, names(1), blocks(1, seed=number))
    for number, client in enumerate(clients):
        results, memory = load(client, names(1))
        assert results == [True]
        assert same(memory, blocks(1, seed=number))
        client.close()


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({}, OptionsError, "need a path"),
        ({"path": "x", "capcity": 1}, OptionsError, "capcity"),
        ({"path": "x", "options": {"queue_depth": 0}}, OptionsError, "queue_depth"),
        ({"path": "x", "model": 3}, OptionsError, "model must be text"),
        ({"path": "x", "model": "/there/is/none"}, IdentityError, "neither a folder"),
    ],
)
def test_bad_settings_are_told_in_words(
    params: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        FlashKVClient(**params)


def test_more_than_the_ticket_limit_is_a_failed_completion(
    client: FlashKVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client._client, "_max_tickets", 2)
    ids = [client.submit_batch_exists(names(1)) for _ in range(5)]
    done = wait(client, *ids)
    assert [ok for ok, _, _ in done] == [True, True, False, False, False]
    assert "too many tickets" in done[-1][1]


def test_after_close_submitting_fails_quietly(store_path: Path) -> None:
    client = make(store_path)
    client.close()
    number = client.submit_batch_exists(names(1))
    ((done, ok, error, results),) = client.drain_completions()
    assert (done, ok, results) == (number, False, None)
    assert "is closed" in error


def test_many_threads(client: FlashKVClient) -> None:
    """LMCache's controllers call at once; each completion is told once."""
    ids: list[int] = []

    def work(first: int) -> None:
        for step in range(8):
            keys = names(4, 100 * first + 4 * step)
            ids.append(client.submit_batch_set(keys, blocks(4, seed=first)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ok for ok, _, _ in wait(client, *ids))
    for number in range(4):
        results, memory = load(client, names(4, 100 * number + 28))
        assert all(results)
        assert same(memory, blocks(4, seed=number))
