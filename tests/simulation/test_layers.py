"""Gets that bring lower layers first: a layer that is said to be in place is; one that is damaged
or doesn't come is named, and those before it are right.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation.device import ALWAYS, FAIL, FLIP, HANG, READ, Device, fail_allocations
from simulation.filesystem import SimFiles
from simulation.images import fresh, scratch
from simulation.workload import IDENTITY
from store_support import small_options

from flashkv import (
    BatchResult,
    BlockStatus,
    FlashKVError,
    Group,
    GroupKind,
    KVGeometry,
    LayerProgress,
    MemoryView,
    Namespace,
    OptionsError,
    Plane,
    Role,
    Store,
)
from flashkv.dtypes import DType
from flashkv.folder import segment_path
from flashkv.index import Keys
from flashkv.limits import PAGE_BYTES
from flashkv.native import aligned_array, lib

MIB = 1 << 20
LAYERS, HEADS, TOKENS, DIM = 12, 2, 128, 64
GEOMETRY = KVGeometry.gqa(LAYERS, HEADS, DIM, "bfloat16")
BLOCKS = 6  # of 768 KiB, in records of two
KEYS = [b"%d" % number for number in range(BLOCKS)]
LONG_MS = 30_000
POISON = 0xA5A5
VIEWS = {
    "layers outermost": MemoryView(),
    "planes outermost": MemoryView(order="plane layer head token"),
    "tokens outermost": MemoryView(order="token layer plane head"),
}
_AXES = ("layer", "plane", "head", "token")


@dataclass
class Given:
    """A store with blocks on a device. data: [block, layer, plane, head, token, dim]."""

    device: Device
    store: Store
    data: np.ndarray
    view: MemoryView

    @property
    def space(self) -> Namespace:
        return self.store.namespace(IDENTITY)

    def memory(self) -> np.ndarray:
        """For all blocks, in the view's order."""
        return np.full_like(in_order(self.data, self.view), POISON)

    def layers_of(self, memory: np.ndarray) -> np.ndarray:
        """Memory in the view's order as the data has it."""
        back = [1 + self.view.order.split().index(axis) for axis in _AXES]
        return memory.transpose(0, *back, 5)

    def forget_headers(self) -> None:
        for number in range(8):
            lib.fkv_header_cache_drop(self.store.io.engine, number)


def in_order(data: np.ndarray, view: MemoryView) -> np.ndarray:
    axes = [1 + _AXES.index(axis) for axis in view.order.split()]
    return np.ascontiguousarray(data.transpose(0, *axes, 5))


@contextmanager
def given(codec: str, view: MemoryView, *, inline: bool = False, **options: Any) -> Iterator[Given]:
    values = np.random.default_rng(3).standard_normal(
        (BLOCKS, LAYERS, 2, HEADS, TOKENS, DIM), np.float32
    )
    data = (values.view(np.uint32) >> 16).astype(np.uint16)
    chosen = small_options(codec=codec, segment_bytes=8 * MIB, workers=2, **options)
    with scratch() as folder, Device() as device, fresh(folder) as root:
        how: dict[str, Any] = {"read_only": False, "files": SimFiles(root, device, inline=inline)}
        with Store(root / "store", 48 * MIB, GEOMETRY, chosen, **how) as store:
            it = Given(device, store, data, view)
            assert it.space.put(KEYS, in_order(data, view), view=view).all_ok
            store.flush()
            yield it
            device.reset()
            device.release()


class Got:
    """A layerwise get on a thread of its own."""

    def __init__(self, it: Given, **more: Any) -> None:
        self.it, self.memory = it, it.memory()
        self.progress = LayerProgress(LAYERS)
        self.result: BatchResult | None = None
        self._more = more
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = self.it.space.get(
            KEYS, self.memory, view=self.it.view, progress=self.progress, **self._more
        )

    def runs(self) -> bool:
        return self._thread.is_alive()

    def check_settled(self) -> int:
        """How many layers are in place; they hold what was put."""
        count = self.progress.settled
        failed = self.progress.failed_layer
        count = count if failed is None else min(count, failed)
        there = self.it.layers_of(self.memory)[:, :count]
        assert np.array_equal(there, self.it.data[:, :count]), f"of {count} layers"
        return count

    def end(self) -> BatchResult:
        self._thread.join(LONG_MS / 1000)
        assert not self._thread.is_alive(), "it hangs"
        assert self.result is not None
        assert self.result.failed_layers is not None
        return self.result


def settle(got: Got) -> None:
    """A read hangs, or all is over; what the device can answer it has answered, most likely."""
    device, before = got.it.device, -1
    while got.runs() and (before != device.calls(READ) or not device.hanging()):
        before = device.calls(READ)
        time.sleep(0.02)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("headers", ["cached", "cold"])
@pytest.mark.parametrize("order", VIEWS)
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_what_is_settled_is_in_place(
    codec: str, order: str, headers: str, window: int, seed: int
) -> None:
    """Whichever reads the device owes; in the end all is there."""
    with given(codec, VIEWS[order]) as it:
        it.device.order(window)
        it.forget_headers()
        it.device.reset()
        whole = Got(it)
        assert whole.end().all_ok
        assert whole.check_settled() == LAYERS
        reads, seen = it.device.calls(READ), set()
        rng = random.Random(seed)
        for number in sorted(rng.sample(range(2, reads + 1), min(10, reads - 1))):
            if headers == "cold":
                it.forget_headers()
            it.device.reset()
            it.device.fault(READ, HANG, first=number, count=ALWAYS)
            got = Got(it)
            settle(got)
            seen.add(got.check_settled())
            it.device.reset()
            it.device.release()
            result = got.end()
            assert result.all_ok
            assert (result.failed_layers == -1).all()
            assert got.check_settled() == LAYERS
        if codec != "raw" or order == "layers outermost":
            assert any(0 < count < LAYERS for count in seen), f"seed {seed}: {seen}"


def pages_of(it: Given) -> Iterator[tuple[Path, int]]:
    """(file, page) of each page of each record's payload."""
    digests = Keys.pack(KEYS).digests(it.space._space)
    for place in np.unique(it.store.index.lookup(digests)):
        path = segment_path(it.store._folder, int(place["segment"]))
        for page in range(int(place["header_pages"]), int(place["pages"])):
            yield path, int(place["page"]) + page


@pytest.mark.parametrize("order", VIEWS)
@pytest.mark.parametrize("codec", ["raw", "lossless", "bounded-2"])
def test_a_damaged_layer_is_named(codec: str, order: str, seed: int) -> None:
    """It is the first that a block lacks; those below hold what was put, other blocks all."""
    rng = random.Random(seed)
    named = set()
    for _ in range(8):
        with given(codec, VIEWS[order]) as it:
            whole = it.memory()
            assert it.space.get(KEYS, whole, view=it.view).all_ok
            it.data = it.layers_of(whole)  # what a bounded code keeps of it
            path, page = rng.choice(list(pages_of(it)))
            with path.open("r+b") as file:
                file.seek(page * PAGE_BYTES + rng.randrange(PAGE_BYTES))
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 0x10]))
            got = Got(it)
            result = got.end()
            layers = result.failed_layers
            assert layers is not None
            bad = np.flatnonzero(layers >= 0)
            assert 1 <= len(bad) <= BLOCKS
            assert all(result[row] == BlockStatus.MISS for row in bad), result
            assert (result.ok == (layers < 0)).all()
            failed = got.progress.failed_layer
            assert failed == layers[bad].min()
            assert not got.progress.wait(failed)
            assert failed == 0 or got.progress.wait(failed - 1)
            got.check_settled()
            there = it.layers_of(got.memory)
            for row in range(BLOCKS):
                count = LAYERS if layers[row] < 0 else layers[row]
                assert np.array_equal(there[row, :count], it.data[row, :count]), f"seed {seed}"
            named.add(failed)
    if order != "tokens outermost" or codec != "raw":
        assert len(named) > 1, f"seed {seed}: {named}"


@pytest.mark.parametrize("headers", ["cached", "cold"])
@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("action", [FAIL, FLIP])
def test_any_read_fails(action: int, codec: str, headers: str) -> None:
    """Each read of a get in turn: what is said to be in place is, and nobody waits for ever."""
    number, more = 1, True
    while more:
        with given(codec, MemoryView(), retries=0) as it:
            if headers == "cached":
                assert it.space.get(KEYS, it.memory(), view=it.view).all_ok
            else:
                it.forget_headers()
            it.device.reset()
            it.device.fault(READ, action, first=number, result=-5, amount=999)
            got = Got(it)
            result = got.end()
            more = it.device.hits() > 0
            assert more != result.all_ok
            assert got.progress.settled == LAYERS
            got.check_settled()
            assert result.failed_layers is not None
            assert (result.ok == (result.failed_layers < 0)).all()
            number += 1
    assert number > BLOCKS // 2


def test_memory_runs_out(seed: int) -> None:
    """At any allocation: the blocks are BUSY, or all is there; nobody waits for ever."""
    with given("lossless", MemoryView(), inline=True) as it:
        for number in range(1, 400):
            it.forget_headers()
            memory, progress = it.memory(), LayerProgress(LAYERS)
            fail_allocations(number)
            try:
                result = it.space.get(KEYS, memory, progress=progress)
            finally:
                fail_allocations()
            assert progress.settled == LAYERS
            good = result.ok
            assert np.array_equal(memory[good], it.data[good])
            assert set(result) <= {BlockStatus.OK, BlockStatus.BUSY}, f"allocation {number}"
            if number > 20 and result.all_ok and progress.failed_layer is None:
                return
    pytest.fail("an allocation fails for ever")


def test_blocks_that_are_absent() -> None:
    """Lack the first layer; the others come all the same."""
    with given("lossless", MemoryView()) as it:
        keys, progress = [*KEYS, b"absent"], LayerProgress(LAYERS)
        memory = np.full((BLOCKS + 1, *it.data.shape[1:]), POISON, np.uint16)
        result = it.space.get(keys, memory, progress=progress)
        assert result.failed_layers is not None
        assert result.failed_layers.tolist() == [-1] * BLOCKS + [0]
        assert progress.failed_layer == 0
        assert not progress.wait(0)
        assert np.array_equal(memory[:BLOCKS], it.data)


def test_layers_that_are_not_wanted() -> None:
    """Nobody waits for them."""
    with given("lossless", MemoryView()) as it:
        out = np.full((BLOCKS, 2, *it.data.shape[2:]), POISON, np.uint16)
        progress = LayerProgress(LAYERS)
        result = it.space.get(KEYS, out, view=MemoryView(), layers=[7, 3], progress=progress)
        assert result.all_ok
        assert np.array_equal(out, it.data[:, [7, 3]])
        assert progress.wait(LAYERS - 1)


def test_tickets() -> None:
    """The same through a client; times run out, calls that fail let everybody go."""
    with given("lossless", MemoryView()) as it, it.store.client() as client:
        out = it.memory()
        it.device.reset()
        it.device.fault(READ, HANG, count=ALWAYS)
        it.forget_headers()
        ticket = client.submit_get(it.space, KEYS, out, layerwise=True)
        assert not ticket.wait_layer(0, timeout_ms=20)
        assert not ticket.done
        it.device.reset()
        it.device.release()
        for layer in range(LAYERS):
            assert ticket.wait_layer(layer, LONG_MS)
            assert np.array_equal(out[:, : layer + 1], it.data[:, : layer + 1])
        assert ticket.wait(LONG_MS)
        assert ticket.result.all_ok
        assert ticket.failed_layer is None
        failing = client.submit_get(it.space, KEYS, out[:2], layerwise=True)
        assert not failing.wait_layer(LAYERS - 1, LONG_MS)
        assert failing.failed_layer == 0
        assert failing.wait(LONG_MS)
        assert failing.error is not None
        plain = client.submit_get(it.space, KEYS, out)
        with pytest.raises(OptionsError, match="layerwise=True"):
            plain.wait_layer(0)
        with pytest.raises(OptionsError, match="layer"):
            ticket.wait_layer(LAYERS)


def direct(it: Given) -> np.ndarray:
    """Memory for all blocks into which a device can write."""
    like = in_order(it.data, it.view)
    return aligned_array(like.nbytes).view(like.dtype).reshape(like.shape)


def spoil(path: Path, page: int) -> None:
    with path.open("r+b") as file:
        file.seek(page * PAGE_BYTES + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


def test_a_low_layer_behind_a_high_one() -> None:
    """A direct read brings the end of K and the beginning of V, both damaged: V is named."""
    with given("raw", VIEWS["planes outermost"]) as it:
        pages = [page for _, page in pages_of(it)]
        path, first = next(pages_of(it))
        per_plane = LAYERS * HEADS * TOKENS * DIM * 2 // PAGE_BYTES
        spoil(path, first + per_plane - 1)
        spoil(path, first + per_plane)
        assert len(pages) >= 2 * per_plane
        out, progress = direct(it), LayerProgress(LAYERS)
        result = it.space.get(KEYS, out, view=it.view, progress=progress)
        assert result.failed_layers is not None
        assert min(layer for layer in result.failed_layers if layer >= 0) == 0
        assert progress.failed_layer == 0


def test_a_tail_behind_a_damaged_page() -> None:
    """The last, partial page of a direct read is another plane's first layer, and good."""
    planes = (
        Plane(Role.K, LAYERS, 1, 512, DType.BFLOAT16),
        Plane(Role.INDEX, 1, 1, 160, DType.BFLOAT16),
    )
    geometry = KVGeometry((Group("kv", GroupKind.FULL, planes),))
    tokens = 32
    view = MemoryView(order="plane layer head token", block_tokens=tokens)
    size = tokens * (LAYERS * 512 + 160)
    assert size % PAGE_BYTES
    data = np.random.default_rng(5).integers(1, 256, (1, size), np.uint8)
    options = small_options(codec="raw", segment_bytes=8 * MIB)
    with scratch() as folder, Device() as device, fresh(folder) as root:
        how: dict[str, Any] = {"read_only": False, "files": SimFiles(root, device, inline=False)}
        with Store(root / "store", 48 * MIB, geometry, options, **how) as store:
            space = store.namespace(IDENTITY)
            assert space.put(KEYS[:1], data, view=view).all_ok
            store.flush()
            place = store.index.lookup(Keys.pack(KEYS[:1]).digests(space._space))[0]
            first = int(place["page"]) + int(place["header_pages"])
            path = segment_path(store._folder, int(place["segment"]))
            spoil(path, first + (LAYERS - 1) * tokens * 512 // PAGE_BYTES)
            out, progress = aligned_array(size).reshape(1, size), LayerProgress(LAYERS)
            result = space.get(KEYS[:1], out, view=view, progress=progress)
            assert result.failed_layers is not None
            assert result.failed_layers.tolist() == [LAYERS - 1]
            at = tokens * LAYERS * 512
            assert np.array_equal(out[:, at:], data[:, at:])


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_memory_that_is_filled_at_the_end(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's is: of a block that failed no layer is there, and none is said to be."""

    def staged(data: Any, *, destination: bool) -> Any:
        assert destination
        copies = [np.zeros_like(tensor) for tensor in data.tensors]

        def finish(arrived: np.ndarray) -> None:
            for tensor, copy in zip(data.tensors, copies, strict=True):
                tensor[arrived] = copy[arrived]

        return type(data)(copies, None, data.row_axis), data, finish

    with given(codec, MemoryView()) as it:
        path, page = list(pages_of(it))[-1]
        spoil(path, page)
        monkeypatch.setattr("flashkv.memory.staged", staged)
        out, progress = it.memory(), LayerProgress(LAYERS)
        result = it.space.get(KEYS, out, progress=progress)
        assert result.failed_layers is not None
        assert set(result.failed_layers.tolist()) == {-1, 0}
        assert progress.failed_layer == 0
        assert np.array_equal(out[result.ok], it.data[result.ok])


def test_gets_that_raise_let_everybody_go() -> None:
    """Wherever they do; and a progress is of one get."""
    with given("lossless", MemoryView()) as it:
        for wrong in ({"keys": [b""]}, {"out": it.memory()[:1]}, {"group": 7}, {"tokens": -1}):
            progress = LayerProgress(LAYERS)
            call: dict[str, Any] = {"keys": KEYS, "out": it.memory(), **wrong}
            with pytest.raises(FlashKVError):
                it.space.get(progress=progress, **call)
            assert progress.settled == LAYERS
            assert not progress.wait(0)
            with pytest.raises(OptionsError, match="another get"):
                it.space.get(KEYS, it.memory(), progress=progress)


WAITING = """
import signal
from flashkv import LayerProgress

signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts tests may ignore it
progress = LayerProgress(1)
print("waits", flush=True)
progress.wait(0)
"""


def test_waiting_is_bounded() -> None:
    """In time, by signals, and only by numbers."""
    progress = LayerProgress(2)
    began = time.monotonic()
    assert not progress.wait(1, 250)
    assert time.monotonic() - began >= 0.25
    assert not progress.wait(1, -5)
    for wrong in ("soon", float("nan"), [1]):
        with pytest.raises(OptionsError, match="timeout_ms"):
            progress.wait(0, wrong)  # type: ignore[arg-type]
    threading.Timer(0.3, progress.end).start()
    assert progress.wait(1, float("inf"))
    child = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waits\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(20) != 0
    finally:
        child.kill()
        child.communicate()


def test_progress_of_another_group() -> None:
    """It would count layers that aren't there."""
    with given("lossless", MemoryView()) as it:
        for layers in (LAYERS - 1, LAYERS + 1):
            with pytest.raises(OptionsError, match="of_group"):
                it.space.get(KEYS, it.memory(), progress=LayerProgress(layers))
        with pytest.raises(OptionsError, match="progress"):
            it.space.get(KEYS, it.memory(), progress=True)  # type: ignore[arg-type]
        for wrong in (0, -1, 2.5, 1 << 40):
            with pytest.raises(OptionsError, match="layers"):
                LayerProgress(wrong)  # type: ignore[arg-type]


def test_an_empty_batch() -> None:
    with given("lossless", MemoryView()) as it:
        progress = LayerProgress(LAYERS)
        assert len(it.space.get([], it.data[:0], progress=progress)) == 0
        assert progress.wait(LAYERS - 1)
