"""codec="auto": the choice by injected figures, and in a store by measured ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_support import open_store

from flashkv import Identity, KVGeometry, Options, StoreError
from flashkv.codec_choice import (
    PROBE_BYTES,
    REST_S,
    RETRY_S,
    CodecChoice,
    decoder_speeds,
    device_speed,
)

GB = 1e9


class Bench:
    """Figures that a test sets, and how often they were asked for."""

    def __init__(self, device: float | None, dense: float = 2 * GB, quick: float = 6 * GB) -> None:
        self.device, self.decoders = device, {"lossless": dense, "fast": quick}
        self.now, self.looks = 100.0, 0

    def measure(self) -> float | None:
        self.looks += 1
        return self.device

    def choice(self, codec: str = "auto") -> CodecChoice:
        return CodecChoice(codec, self.measure, lambda: dict(self.decoders), lambda: self.now)

    def later(self, choice: CodecChoice, device: float | None) -> str:
        self.device, self.now = device, self.now + REST_S
        return choice.current()


@pytest.mark.parametrize(
    ("device", "dense", "quick", "chosen"),
    [
        (0.5, 2, 6, "lossless"),  # the device is slower than any decoder: the denser one is faster
        (1.3, 2, 6, "lossless"),  # just as fast as lossless is decoded
        (1.6, 2, 6, "lossless"),  # fast: 2.24 GB/s against 2: not clearly more
        (1.7, 2, 6, "fast"),
        (12, 2, 6, "fast"),
        (12, 8, 9, "lossless"),  # both decoders keep up with nearly the same
        (12, 20, 60, "lossless"),  # many cores
    ],
)
def test_choice(device: float, dense: float, quick: float, chosen: str) -> None:
    bench = Bench(device * GB, dense * GB, quick * GB)
    choice = bench.choice()
    assert choice.current() == chosen
    facts = choice.facts()
    assert facts["codec"] == chosen
    assert facts["device_bytes_per_s"] == int(device * GB)
    assert facts["lossless_decode_bytes_per_s"] == int(dense * GB)
    assert facts["fast_decode_bytes_per_s"] == int(quick * GB)
    assert facts["changes"] == int(chosen == "fast")


def test_what_was_chosen_stays_while_the_figures_are_close() -> None:
    bench = Bench(1.3 * GB)
    choice = bench.choice()
    assert choice.current() == "lossless"
    assert bench.later(choice, 1.6 * GB) == "lossless"  # 1.12 times: not enough to change
    assert bench.later(choice, 1.8 * GB) == "fast"  # 1.26 times
    assert bench.later(choice, 1.6 * GB) == "fast"  # 1.12 times: not enough to go back
    assert bench.later(choice, 1.4 * GB) == "lossless"  # 0.98 times
    assert choice.facts()["changes"] == 2


@pytest.mark.parametrize("error", [OSError(5, "no"), MemoryError(), StoreError("closed")])
def test_a_put_does_not_fail_for_want_of_a_figure(error: Exception) -> None:
    def measure() -> float:
        raise error

    choice = CodecChoice("auto", measure, dict, lambda: 1.0)
    assert choice.current() == "lossless"


def test_it_is_not_measured_at_every_put() -> None:
    bench = Bench(5 * GB)
    choice = bench.choice()
    assert bench.looks == 0
    assert [choice.current() for _ in range(5)] == ["fast"] * 5
    assert bench.looks == 1
    bench.now += REST_S - 1
    choice.current()
    assert bench.looks == 1
    bench.now += 1
    choice.current()
    assert bench.looks == 2


def test_without_a_figure_it_is_lossless_and_tried_again_soon() -> None:
    bench = Bench(None)
    choice = bench.choice()
    assert choice.current() == "lossless"
    assert choice.facts() == {"codec": "lossless", "changes": 0}
    bench.device = 5 * GB
    assert choice.current() == "lossless"
    bench.now += RETRY_S
    assert choice.current() == "fast"
    assert bench.later(choice, None) == "fast"  # what is known stays
    assert choice.facts()["device_bytes_per_s"] == int(5 * GB)


@pytest.mark.parametrize("codec", ["lossless", "fast", "raw"])
def test_a_named_codec_is_never_measured(codec: str) -> None:
    bench = Bench(5 * GB)
    choice = bench.choice(codec)
    assert choice.current() == codec
    assert choice.facts() == {}
    assert bench.looks == 0


def test_speed_of_a_device() -> None:
    sizes: list[int] = []

    def read(array: np.ndarray) -> int:
        sizes.append(array.nbytes)
        return 0

    speed = device_speed(read)
    assert speed is not None
    assert speed > 0
    assert set(sizes) == {PROBE_BYTES}
    assert device_speed(lambda _: -5) is None
    assert device_speed(read, 4 << 20) is not None
    assert sizes[-1] == 4 << 20


def test_speed_of_decoders() -> None:
    one, many = decoder_speeds(1), decoder_speeds(64)
    assert set(one) == {"lossless", "fast"}
    for codec, speed in one.items():
        assert 1e7 < speed < 1e11
        assert many[codec] > 0.2 * speed


def test_a_store_chooses(tmp_path: Path) -> None:
    """Until a segment is full nothing is known; then speeds are, and what was put comes back."""
    geometry = KVGeometry.gqa(2, 2, 64, "bfloat16")
    rng = np.random.default_rng(1)
    words = rng.normal(size=(96, 2, 2, 2, 64, 64)).astype(np.float32).view(np.uint32) >> 16
    data = words.astype(np.uint16)
    keys = [b"%d" % number for number in range(len(data))]
    with open_store(tmp_path / "store", geometry, codec="auto", capacity="64MiB") as store:
        namespace = store.namespace(Identity(model="auto"))
        assert store.stats().codec_choice == {"codec": "lossless", "changes": 0}
        assert namespace.put(keys, data).all_ok
        store.flush()
    with open_store(tmp_path / "store", None, codec="auto", capacity=None) as store:
        namespace = store.namespace(Identity(model="auto"))
        more = [key + b" more" for key in keys[:4]]
        assert namespace.put(more, data[:4]).all_ok
        stats = store.stats()
        assert stats.codec == "auto"
        assert stats.segments["sealed"] >= 1
        assert int(stats.codec_choice["device_bytes_per_s"]) > 1e6
        assert stats.codec_choice["codec"] in ("lossless", "fast")
        back = np.empty_like(data[:4])
        assert namespace.get(more, back).all_ok
        assert (back == data[:4]).all()


def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().codec == "lossless"
    assert Options(codec="auto").resolved({}).codec == "auto"
    assert Options(codec="auto").resolved({"FLASHKV_CODEC": "raw"}).codec == "raw"
    assert Options().resolved({"FLASHKV_CODEC": "auto"}).codec == "auto"
