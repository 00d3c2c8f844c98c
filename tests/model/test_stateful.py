"""A store against a dict: whatever the order of calls, crashes and reopenings, never a wrong byte.

The model knows of each key which version this handle shows, and which states a crash may leave:
a flushed version stays until it is evicted, a superseded or deleted one never comes back.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_support import (
    BACKENDS,
    IDENTITY,
    KINDS,
    MIB,
    ROOT,
    Kind,
    check_rest,
    crash,
    equal,
    file_system,
    image,
    open_store,
    shard_of,
)

from flashkv import BlockStatus, Identity, MemoryView, Milestone, Regions

KEYS = [f"key-{number}".encode() * (1 + number % 5) for number in range(160)]
OTHER = Identity(model="test/model", revision="2")
ABSENT = None


def scratch(in_memory: bool) -> Path:
    """A folder in memory, which is faster, or on a disk's file system, which is what counts."""
    if in_memory and os.access("/dev/shm", os.W_OK):
        return Path(tempfile.mkdtemp(dir="/dev/shm", prefix="flashkv-model-"))
    if file_system(Path(tempfile.gettempdir())) in ("tmpfs", "ramfs"):
        (ROOT / "build").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(dir=ROOT / "build", prefix="test-model-"))
    return Path(tempfile.mkdtemp(prefix="flashkv-model-"))


def pages_of(path: Path) -> np.ndarray:
    """uint8[pages, 4096]"""
    return np.fromfile(path, np.uint8).reshape(-1, 4096)


class StoreMachine(RuleBasedStateMachine):
    """Calls on a small store; every answer is compared with the model's."""

    in_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = scratch(self.in_memory)
        self.store: Any = None
        self.live: dict[bytes, int] = {}  # what this handle shows
        self.after_crash: dict[bytes, set[int | None]] = {}  # what a crash may leave
        self.version = 0
        self.evicted = 0
        self.durable: dict[Path, np.ndarray] = {}  # segment files as they were synced last

    def teardown(self) -> None:
        try:
            if self.store is not None:
                self.store.close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- opening ----

    @initialize(
        kind=st.sampled_from(KINDS),
        backend=st.sampled_from(BACKENDS),
        codec=st.sampled_from(["lossless", "raw"]),
        bloom=st.booleans(),
        segments=st.integers(4, 6),
        tokens=st.sampled_from([64, 256]),
    )
    def start(
        self, kind: Kind, backend: str, codec: str, bloom: bool, segments: int, tokens: int
    ) -> None:
        self.kind = kind
        self.capacity = (segments * 4 + 1) * MIB
        self.how = {
            "backend": backend,
            "codec": codec,
            "bloom": bloom,
            "growth": ((0, tokens), (512, 2 * tokens)),
        }
        self.store = open_store(
            self.folder / "store", kind.geometry, capacity=self.capacity, **self.how
        )
        self._names()

    def _names(self) -> None:
        self.ns = self.store.namespace(IDENTITY)
        self.other = self.store.namespace(OTHER)
        self.evicted = 0
        # An open syncs what it found; from here on each sync is noted.
        self.durable = {path: pages_of(path) for path in self._segment_paths()}
        real = self.store.io.sync

        def sync(fds: list[int]) -> np.ndarray:
            results: np.ndarray = real(fds)
            for fd in fds:
                path = Path(f"/proc/self/fd/{fd}").readlink()
                self.durable[path] = pages_of(path)
            return results

        self.store.io.sync = sync

    def _segment_paths(self) -> list[Path]:
        return sorted((shard_of(self.folder / "store") / "segments").glob("*.seg"))

    def _reopen(self, codec: str) -> None:
        self.how["codec"] = codec
        self.store = open_store(self.folder / "store", None, capacity=None, **self.how)
        self._names()

    # ---- the model's side ----

    def _note_evictions(self) -> None:
        """Eviction may take anything that is flushed: what it took stays away, crash or not."""
        evicted = self.store.stats().evicted_blocks
        if evicted == self.evicted:
            return
        self.evicted = evicted
        keys = list(self.live)
        found = self.ns.contains(keys)
        for key, there in zip(keys, found.tolist(), strict=True):
            if not there:
                del self.live[key]
                self.after_crash[key] = {ABSENT}
        for key, versions in self.after_crash.items():
            if len(versions) > 1 or key not in self.live:
                versions.add(ABSENT)

    def _settle(self, namespace: Any, where: str) -> dict[bytes, int]:
        """Compares every key with what a crash may leave; returns what is there."""
        found: dict[bytes, int] = {}
        out = self.kind.empty(len(KEYS))
        result = namespace.get(KEYS, out)
        for row, key in enumerate(KEYS):
            allowed = self.after_crash.get(key, {ABSENT})
            if result[row] == BlockStatus.MISS:
                assert ABSENT in allowed, f"{where}: {key!r} is gone, of {allowed}"
                continue
            assert result[row] == BlockStatus.OK
            versions = [
                version
                for version in allowed
                if version is not ABSENT and equal(out[row], self.kind.block(key, version))
            ]
            assert versions, f"{where}: {key!r} holds none of {allowed}"
            found[key] = versions[0]
        return found

    # ---- calls ----

    batches = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=40)
    runs = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 60)).map(
        lambda run: [(run[0] + i) % len(KEYS) for i in range(run[1])]
    )
    rows = st.one_of(batches, runs, runs)

    @rule(rows=rows, replace=st.booleans(), position=st.sampled_from([None, 0, 448]))
    def put(self, rows: list[int], replace: bool, position: int | None) -> None:
        self.version += 1
        keys = [KEYS[row] for row in rows]
        data = self.kind.blocks(keys, [self.version] * len(keys))
        before = dict(self.live)
        result = self.ns.put(keys, data, replace=replace, position=position)
        seen: set[bytes] = set()
        for row, key in enumerate(keys):
            status = result[row]
            if key in seen:
                assert status in (BlockStatus.DUPLICATE, BlockStatus.PRESENT)
                continue
            seen.add(key)
            if status == BlockStatus.PRESENT:
                assert key in before
                assert not replace
            else:
                assert status == BlockStatus.OK, result
                assert replace or key not in before
                self.live[key] = self.version
                self.after_crash.setdefault(key, {ABSENT}).add(self.version)
        self._note_evictions()

    @rule(rows=st.lists(st.integers(0, len(KEYS) - 1), max_size=25))
    def delete(self, rows: list[int]) -> None:
        keys = [KEYS[row] for row in rows]
        result = self.ns.delete(keys)
        assert [status == BlockStatus.OK for status in result] == [key in self.live for key in keys]
        for key in keys:
            self.live.pop(key, None)
            self.after_crash[key] = {ABSENT}

    @rule(rows=rows)
    def get(self, rows: list[int]) -> None:
        keys = [KEYS[row] for row in rows]
        out = self.kind.empty(len(keys))
        result = self.ns.get(keys, out)
        for row, key in enumerate(keys):
            assert result[row] == (BlockStatus.OK if key in self.live else BlockStatus.MISS)
            if key in self.live:
                assert equal(out[row], self.kind.block(key, self.live[key]))

    @precondition(lambda self: len(self.kind.shape()) == 5)
    @rule(data=st.data(), rows=batches, order=st.permutations(["layer", "plane", "head", "token"]))
    def get_part(self, data: Any, rows: list[int], order: list[str]) -> None:
        layers, planes, heads, tokens, dim = self.kind.shape()
        some_layers = data.draw(st.none() | _some(layers))
        some_heads = data.draw(st.none() | _some(heads))
        start = data.draw(st.integers(0, tokens - 1))
        stop = data.draw(st.integers(start + 1, tokens))
        keys = [KEYS[row] for row in rows]
        sizes = {
            "layer": len(some_layers or range(layers)),
            "plane": planes,
            "head": len(some_heads or range(heads)),
            "token": stop - start,
        }
        out = np.zeros((len(keys), *(sizes[name] for name in order), dim), self.kind.numpy_dtype())
        result = self.ns.get(
            keys,
            out,
            view=MemoryView(" ".join(order)),
            layers=some_layers,
            heads=some_heads,
            token_range=(start, stop),
        )
        axes = [["layer", "plane", "head", "token"].index(name) for name in order]
        for row, key in enumerate(keys):
            assert result[row] == (BlockStatus.OK if key in self.live else BlockStatus.MISS)
            if key not in self.live:
                continue
            block = self.kind.block(key, self.live[key])[:, :, :, start:stop]
            block = block[list(some_layers)] if some_layers else block
            block = block[:, :, list(some_heads)] if some_heads else block
            assert equal(out[row], block.transpose(*axes, 4))

    @precondition(lambda self: self.kind.name == "mla")
    @rule(data=st.data(), rows=batches)
    def get_part_of_latents(self, data: Any, rows: list[int]) -> None:
        some = data.draw(_some(3))
        start = data.draw(st.integers(0, self.kind.tokens - 1))
        stop = data.draw(st.integers(start + 1, self.kind.tokens))
        keys = [KEYS[row] for row in rows]
        latent = np.zeros((len(keys), len(some), stop - start, 128), np.uint16)
        rope = np.zeros((len(keys), len(some), stop - start, 64), np.uint16)
        result = self.ns.get(
            keys,
            Regions([latent, rope]),
            view=MemoryView(regions=("plane",)),
            layers=some,
            token_range=(start, stop),
        )
        for row, key in enumerate(keys):
            assert result.ok[row] == (key in self.live)
            if key not in self.live:
                continue
            flat = self.kind.block(key, self.live[key]).view(np.uint16).reshape(3, -1)
            whole = flat[:, : 48 * 128].reshape(3, 48, 128), flat[:, 48 * 128 :].reshape(3, 48, 64)
            assert equal(latent[row], whole[0][list(some), start:stop])
            assert equal(rope[row], whole[1][list(some), start:stop])

    @rule(rows=rows)
    def look_up(self, rows: list[int]) -> None:
        keys = [KEYS[row] for row in rows]
        there = [key in self.live for key in keys]
        assert self.ns.contains(keys).tolist() == there
        assert self.ns.contains_one(keys[0]) == there[0]
        leading = there.index(False) if False in there else len(there)
        assert self.ns.match(keys).count == leading
        match = self.ns.match(keys, lease_ms=5000)
        assert match.count == leading
        if match.lease is not None:
            match.lease.release()
        assert not self.other.contains(keys).any()

    @rule()
    def flush(self) -> None:
        self.store.flush()
        for key, version in self.live.items():
            self.after_crash[key] = {version}
        for key in self.after_crash:
            if key not in self.live:
                self.after_crash[key] = {ABSENT}

    @rule()
    def rotate(self) -> None:
        assert self.ns.rotate() == len(self.live)
        self.live.clear()
        self.after_crash.clear()

    @rule(codec=st.sampled_from(["lossless", "raw"]))
    def close_and_open(self, codec: str) -> None:
        self.store.close()
        self._reopen(codec)
        self.after_crash = {key: {version} for key, version in self.live.items()}
        assert self._settle(self.ns, "after close") == self.live

    @rule(codec=st.sampled_from(["lossless", "raw"]))
    def crash_and_open(self, codec: str) -> None:
        crash(self.store)
        self._reopen(codec)
        self.live = self._settle(self.ns, "after a crash")
        # Recovery makes what it found durable.
        self.after_crash = {key: {version} for key, version in self.live.items()}

    @rule(read_only=st.booleans())
    def look_at_an_image(self, read_only: bool) -> None:
        copy = image(self.store, self.folder / "image")
        with open_store(copy, None, capacity=None, read_only=read_only) as store:
            self._settle(store.namespace(IDENTITY), "in an image")
            check_rest(store)
            assert store.stats().damaged_blocks == 0
        shutil.rmtree(copy)

    @rule(seed=st.integers(0, 1 << 30))
    def look_after_a_power_cut(self, seed: int) -> None:
        """Of what was not synced, any pages may be lost, and any may be torn between sectors."""
        self.store._reach(Milestone.WRITTEN)
        rng = np.random.default_rng(seed)
        keeps = rng.choice([0.1, 0.5, 0.95])
        copy = image(self.store, self.folder / "image")
        for path in self._segment_paths():
            now = pages_of(path)
            before = self.durable.get(path, np.zeros_like(now))
            if len(before) < len(now):
                before = np.concatenate([before, np.zeros_like(now[len(before) :])])
            changed = np.flatnonzero((now != before).any(axis=1))
            if not len(changed):
                continue
            lost = changed[rng.random(len(changed)) > keeps]
            torn = np.arange(4096)[None, :] >= 512 * rng.integers(0, 8, len(lost))[:, None]
            now[lost] = np.where(torn, before[lost], now[lost])
            now.tofile(shard_of(copy) / "segments" / path.name)
        with open_store(copy, None, capacity=None) as store:
            self._settle(store.namespace(IDENTITY), "after a power cut")
            check_rest(store)
            assert store.stats().damaged_blocks == 0
        shutil.rmtree(copy)

    @invariant()
    def figures(self) -> None:
        if self.store is None or self.store.closed:
            return
        stats = check_rest(self.store)
        assert stats.blocks == len(self.live)
        assert stats.damaged_blocks == stats.lost_blocks == 0


def _some(count: int) -> Any:
    return st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)


RUNS = int(os.environ.get("FLASHKV_EXAMPLES", "200"))
PARTS = 8


def run(seed: int, examples: int, steps: int, *, in_memory: bool) -> None:
    """FLASHKV_SHRINK=1 looks for the shortest failing run: minutes."""
    print(f"seed {seed}")
    machine = type("Machine", (StoreMachine,), {"in_memory": in_memory})
    phases = set(Phase) - (
        set() if os.environ.get("FLASHKV_SHRINK") else {Phase.shrink, Phase.explain}
    )
    run_state_machine_as_test(
        hypothesis.seed(seed)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=[phase for phase in Phase if phase in phases],
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_store_against_a_dict(seed: int, part: int) -> None:
    run(seed, RUNS // PARTS, 50, in_memory=part > 0)


def test_reclaim_against_a_dict(seed: int) -> None:
    """The same calls, but so many puts that segments are reclaimed all the time."""
    random_ = random.Random(seed)
    machine = StoreMachine()
    try:
        machine.start(KINDS[4], BACKENDS[0], "raw", bloom=True, segments=4, tokens=64)
        for step in range(60):
            first = random_.randrange(len(KEYS))
            rows = [(first + i) % len(KEYS) for i in range(random_.randrange(1, 30))]
            machine.put(rows, random_.random() < 0.5, None)
            machine.get(rows)
            machine.look_up(random_.sample(range(len(KEYS)), 30))
            chance = random_.random()
            if chance < 0.2:
                machine.flush()
            elif chance < 0.3:
                machine.delete(random_.sample(range(len(KEYS)), 10))
            elif chance < 0.4:
                machine.crash_and_open(random_.choice(["raw", "lossless"]))
            elif chance < 0.45:
                machine.close_and_open("raw")
            elif chance < 0.55:
                machine.look_at_an_image(step % 2 == 0)
            elif chance < 0.7:
                machine.look_after_a_power_cut(step)
            machine.figures()
        assert machine.version == 60
    finally:
        machine.teardown()


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_store_against_a_dict_at_length(seed: int, part: int) -> None:
    run(seed, 20_000 // PARTS, 100, in_memory=part > 0)
