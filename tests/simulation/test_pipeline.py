"""Steps that load, compute and store: what overlaps, what is bounded, and whose memory is whose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from simulation.device import ALWAYS, FAIL, READ, WRITE, Device
from simulation.filesystem import SimFiles
from simulation.images import fresh, scratch
from simulation.workload import IDENTITY
from store_support import small_options

from flashkv import DurabilityError, KVGeometry, OptionsError, Store
from flashkv.pipeline import STEPS_MIN, Pipeline, Step
from flashkv.tickets import Ticket

MIB = 1 << 20
LAYERS, TOKENS = 4, 64
GEOMETRY = KVGeometry.gqa(LAYERS, 4, 64, "bfloat16")
BLOCK_SHAPE = (LAYERS, 2, 4, TOKENS, 64)  # 256 KiB
STEPS, STEP_BLOCKS = 24, 2
BLOCKS = STEPS * STEP_BLOCKS
TRIES, ROUNDS = 3, 3


@contextmanager
def opened() -> Iterator[tuple[Device, Store]]:
    options = small_options(codec="raw", segment_bytes=16 * MIB, workers=2, retries=0)
    with scratch() as folder, Device() as device, fresh(folder) as root:
        how: dict[str, Any] = {"read_only": False, "files": SimFiles(root, device, inline=False)}
        with Store(root / "store", 96 * MIB, GEOMETRY, options, **how) as store:
            yield device, store
            device.reset()
            device.rate()


def keys_of(step: int, kind: bytes = b"old") -> list[bytes]:
    return [b"%s-%d" % (kind, step * STEP_BLOCKS + n) for n in range(STEP_BLOCKS)]


def made() -> np.ndarray:
    values = np.random.default_rng(4).standard_normal((BLOCKS, *BLOCK_SHAPE), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def fill(store: Store) -> np.ndarray:
    data = made()
    space = store.namespace(IDENTITY)
    for step in range(STEPS):
        at = slice(step * STEP_BLOCKS, (step + 1) * STEP_BLOCKS)
        assert space.put(keys_of(step), data[at]).all_ok
    store.flush()
    return data


class Engine:
    """Computes a step's new blocks from its old ones: each bit turned. Memory is poisoned when it
    is released."""

    def __init__(self) -> None:
        self.computed: list[int] = []
        self.held: set[int] = set()
        self.seen: dict[int, np.ndarray] = {}

    def step_blocks(self, save: bool) -> int:
        return 2 * STEP_BLOCKS if save else STEP_BLOCKS

    def steps(self, *, save: bool, count: int = STEPS) -> Iterator[Step]:
        for number in range(count):
            self.held.add(number)
            memory = np.zeros((2, STEP_BLOCKS, *BLOCK_SHAPE), np.uint16)
            saved = (keys_of(number, b"new"), memory[1]) if save else None
            yield Step((keys_of(number), memory[0]), saved, (number, memory))

    def compute(self, step: Step, ticket: Ticket | None) -> None:
        number, memory = step.tag
        assert ticket is not None
        assert ticket.done
        self.computed.append(number)
        self.seen[number] = memory[0].copy()
        np.bitwise_not(memory[0], out=memory[1])

    def release(self, step: Step) -> None:
        number, memory = step.tag
        self.held.remove(number)
        memory[:] = 0xDEAD


@pytest.mark.parametrize("save", [False, True])
def test_every_step(save: bool) -> None:
    """In order, with its blocks there; what it made is stored; the bound holds."""
    with opened() as (_, store):
        data, engine = fill(store), Engine()
        space = store.namespace(IDENTITY)
        with Pipeline(store, space, blocks=BLOCKS, share=0.15) as pipeline:
            assert pipeline.bound == 7
            outcome = pipeline.run(engine.steps(save=save), engine.compute, engine.release)
            assert pipeline.most_blocks <= max(pipeline.bound, STEPS_MIN * engine.step_blocks(save))
        assert engine.computed == list(range(STEPS))
        assert not engine.held
        assert outcome.loaded_blocks == BLOCKS
        assert outcome.saved_blocks == (BLOCKS if save else 0)
        assert outcome.missed_blocks == outcome.unsaved_blocks == len(outcome.errors) == 0
        for number in range(STEPS):
            at = slice(number * STEP_BLOCKS, (number + 1) * STEP_BLOCKS)
            assert np.array_equal(engine.seen[number], data[at])
            if save:
                out = np.empty_like(data[at])
                assert space.get(keys_of(number, b"new"), out).all_ok
                assert np.array_equal(out, ~data[at])


def test_the_bound_by_default() -> None:
    """A twentieth of the blocks; but three steps always may be in hand."""
    with opened() as (_, store):
        fill(store)
        engine = Engine()
        with Pipeline(store, store.namespace(IDENTITY), blocks=BLOCKS) as pipeline:
            assert pipeline.bound == 2
            pipeline.run(engine.steps(save=True), engine.compute, engine.release)
            assert pipeline.most_blocks == STEPS_MIN * engine.step_blocks(save=True)


@pytest.mark.parametrize(("load", "save"), [(0, 2), (1, 8), (2, 2)])
def test_steps_in_hand_are_bounded(load: int, save: int) -> None:
    """Those that load nothing, too: what is taken and not released holds memory."""
    with opened() as (_, store):
        fill(store)
        held, most = set(), 0

        def steps() -> Iterator[Step]:
            nonlocal most
            for number in range(20):
                held.add(number)
                most = max(most, len(held))
                new = [b"%d-%d" % (number, n) for n in range(save)]
                yield Step(
                    (keys_of(number)[:load], np.zeros((load, *BLOCK_SHAPE), np.uint16))
                    if load
                    else None,
                    (new, np.ones((save, *BLOCK_SHAPE), np.uint16)),
                    number,
                )

        with Pipeline(store, store.namespace(IDENTITY), blocks=100) as pipeline:
            assert pipeline.bound == 5
            outcome = pipeline.run(steps(), lambda *_: None, lambda step: held.remove(step.tag))
        assert outcome.steps == 20
        assert outcome.saved_blocks == 20 * save
        assert most <= STEPS_MIN + 1  # the one that waits for room, too
        assert not held


def test_more_steps_than_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps wait for each other as they would for blocks."""
    monkeypatch.setattr("flashkv.pipeline.STEPS_MAX", 8)
    with opened() as (_, store):
        memory = np.zeros((1, *BLOCK_SHAPE), np.uint16)
        space = store.namespace(IDENTITY)
        with Pipeline(store, space, blocks=120_000) as pipeline:
            pipeline._client._max_tickets = 8
            outcome = pipeline.run(
                (Step(([b"%d" % n], memory)) for n in range(200)), lambda *_: None
            )
        assert outcome.steps == outcome.missed_blocks == 200


def test_a_put_that_is_refused() -> None:
    """It raises, once all memory is the caller's."""
    with opened() as (_, store):
        fill(store)
        engine = Engine()
        how: dict[str, Any] = {"blocks": BLOCKS, "put_options": {"notify": 7}}
        with (
            Pipeline(store, store.namespace(IDENTITY), **how) as pipeline,
            pytest.raises(OptionsError, match="notify"),
        ):
            pipeline.run(engine.steps(save=True), engine.compute, engine.release)
        assert not engine.held


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("at", range(1, 9))
def test_interrupted_while_it_waits(
    at: int, layerwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any wait: when run() raises, all memory is the caller's again."""
    wait, calls, mine = Ticket.wait, 0, threading.get_ident()

    def interrupted(ticket: Ticket, *given: Any) -> bool:
        nonlocal calls
        calls += threading.get_ident() == mine
        if threading.get_ident() == mine and calls == at:
            raise KeyboardInterrupt
        return wait(ticket, *given)

    with opened() as (_, store):
        fill(store)
        engine = Engine()
        compute = (lambda *_: None) if layerwise else engine.compute
        monkeypatch.setattr(Ticket, "wait", interrupted)
        space = store.namespace(IDENTITY)
        with Pipeline(store, space, blocks=BLOCKS, layerwise=layerwise) as pipeline:
            with pytest.raises(KeyboardInterrupt):
                pipeline.run(engine.steps(save=True), compute, engine.release)
            assert not engine.held
            assert not any(ticket for ticket in pipeline._client.drain())
        monkeypatch.undo()


@pytest.mark.parametrize("compute_share", [0.5, 1.0, 2.0])
def test_total_time(compute_share: float, say: Callable[[str], None]) -> None:
    """At most 1.1 times the longer of computing and transferring, on a device of known speed."""
    with opened() as (device, store):
        fill(store)
        space, moved = store.namespace(IDENTITY), made().nbytes
        transfer_s = 1.2
        device.rate(bytes_per_s=int(moved / transfer_s))
        compute_s = compute_share * transfer_s
        for _ in range(ROUNDS):
            engine = Engine()
            steps = list(engine.steps(save=False))
            with Pipeline(store, space, blocks=BLOCKS, share=0.15) as pipeline:
                began = time.perf_counter()
                pipeline.run(steps, lambda *_: time.sleep(compute_s / STEPS))
                taken = time.perf_counter() - began
            ratio = taken / max(compute_s, transfer_s)
            if ratio <= 1.1:
                break  # else others may have had the processors just then
        say(f"computing {compute_share} times the transfer: {ratio:.2f} times the longer of both")
        assert 0.99 <= ratio <= 1.1


def test_layer_by_layer() -> None:
    """Computing begins while the step's own blocks arrive."""
    with opened() as (_, store):
        data, engine = fill(store), Engine()

        def compute(step: Step, ticket: Ticket | None) -> None:
            number, memory = step.tag
            assert ticket is not None
            at = slice(number * STEP_BLOCKS, (number + 1) * STEP_BLOCKS)
            for layer in range(LAYERS):
                assert ticket.wait_layer(layer, 20_000)
                assert np.array_equal(memory[0][:, layer], data[at][:, layer])
            engine.computed.append(number)

        space = store.namespace(IDENTITY)
        with Pipeline(store, space, blocks=BLOCKS, layerwise=True) as pipeline:
            outcome = pipeline.run(engine.steps(save=False), compute, engine.release)
        assert engine.computed == list(range(STEPS))
        assert outcome.loaded_blocks == BLOCKS


@pytest.mark.parametrize("where", ["compute", "release", "steps"])
def test_errors_of_the_caller(where: str) -> None:
    """They come out once all memory is the caller's again; the pipeline can be used further."""
    with opened() as (_, store):
        fill(store)
        engine, calls = Engine(), 0

        def sometimes(call: Callable[..., None], *arguments: Any) -> None:
            nonlocal calls
            call(*arguments)
            calls += 1
            if calls == 5:
                raise ZeroDivisionError(where)

        def steps() -> Iterator[Step]:
            for step in engine.steps(save=True):
                if where == "steps" and step.tag[0] == 7:
                    engine.held.remove(7)
                    raise ZeroDivisionError(where)
                yield step

        compute, release = engine.compute, engine.release
        given_compute = (lambda *a: sometimes(compute, *a)) if where == "compute" else compute
        given_release = (lambda *a: sometimes(release, *a)) if where == "release" else release
        with Pipeline(store, store.namespace(IDENTITY), blocks=BLOCKS) as pipeline:
            with pytest.raises(ZeroDivisionError, match=where):
                pipeline.run(steps(), given_compute, given_release)
            assert not engine.held
            engine = Engine()
            outcome = pipeline.run(engine.steps(save=False), engine.compute, engine.release)
            assert outcome.loaded_blocks == BLOCKS


@pytest.mark.parametrize("kind", [READ, WRITE])
def test_a_device_that_fails(kind: int) -> None:
    """The run goes on: blocks miss, or are not stored."""
    with opened() as (device, store):
        fill(store)
        engine = Engine()
        device.reset()
        device.fault(kind, FAIL, first=3, count=ALWAYS, result=-5)
        with Pipeline(store, store.namespace(IDENTITY), blocks=BLOCKS) as pipeline:
            outcome = pipeline.run(engine.steps(save=True), engine.compute, engine.release)
        assert outcome.steps == STEPS
        assert not engine.held
        assert outcome.loaded_blocks + outcome.missed_blocks == BLOCKS
        assert outcome.saved_blocks + outcome.unsaved_blocks == BLOCKS
        if kind == READ:
            assert outcome.missed_blocks > BLOCKS // 2
        device.reset()
        with suppress(DurabilityError):
            store.flush()


def test_arguments() -> None:
    with opened() as (_, store):
        space = store.namespace(IDENTITY)
        for wrong in ({"blocks": 0}, {"blocks": 8, "share": 0}, {"blocks": 8, "share": 1.5}):
            with pytest.raises(OptionsError):
                Pipeline(store, space, **wrong)
        with Pipeline(store, space, blocks=1) as pipeline:
            outcome = pipeline.run([], lambda *_: None)
            assert (outcome.steps, outcome.loaded_blocks) == (0, 0)
            empty = pipeline.run([Step(tag="nothing to move")], lambda *_: None)
            assert empty.steps == 1
