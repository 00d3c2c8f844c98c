"""How long loads will take, learnt from those that were; plans that load and compute at once."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_stores import IDENTITY, make, names, payload

from flashkv import OptionsError
from flashkv.estimate import FIRST_BYTES_PER_S, FIRST_LATENCY_S, LoadModel, plan_load
from flashkv.limits import MIB, PAGE_BYTES
from flashkv.native import dtype_of


def predicted(model: LoadModel, size: float) -> float:
    return float(model.seconds(np.array([size]))[0])


def test_before_any_get() -> None:
    model = LoadModel()
    assert predicted(model, 0) == 0
    expected = FIRST_LATENCY_S + MIB / FIRST_BYTES_PER_S
    assert predicted(model, MIB) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("latency_s", [0.0, 100e-6, 5e-3])
@pytest.mark.parametrize("rate", [2e8, 5e9])
def test_learns_a_device(latency_s: float, rate: float, seed: int) -> None:
    """Loads of all sizes, each up to a tenth off: predicted within a tenth."""
    rng, model = random.Random(seed), LoadModel()
    for _ in range(300):
        size = int(PAGE_BYTES * 2 ** rng.uniform(0, 15))
        model.note(size, (latency_s + size / rate) * rng.uniform(0.9, 1.1))
    for size in (PAGE_BYTES, MIB, 100 * MIB):
        expected = latency_s + size / rate
        assert predicted(model, size) == pytest.approx(expected, rel=0.1, abs=20e-6)


@pytest.mark.parametrize("size", [1 << 32, 40 << 30])
def test_loads_of_many_gib(size: int) -> None:
    model = LoadModel()
    for _ in range(200):
        model.note(size, size / 2e9)
    assert predicted(model, size) == pytest.approx(size / 2e9, rel=0.1)


def test_loads_that_vary(seed: int) -> None:
    """Every second get meets a busy device, ten times slower: the mean is expected."""
    rng, model = random.Random(seed), LoadModel()
    for _ in range(2000):
        size = rng.choice([1, 4, 16]) * MIB
        model.note(size, (1e-4 + size / 2e9) * rng.choice([1, 10]))
    assert 0.5 < predicted(model, 4 * MIB) / (5.5 * (1e-4 + 4 * MIB / 2e9)) < 2


def test_loads_of_the_same_time(seed: int) -> None:
    """A millisecond whatever the size: a small one isn't said to take less."""
    rng, model = random.Random(seed), LoadModel()
    for _ in range(500):
        model.note(int(PAGE_BYTES * 2 ** rng.uniform(0, 8)), 1e-3 * rng.uniform(0.8, 1.2))
    assert 5e-4 < predicted(model, PAGE_BYTES) < 2e-3


def test_loads_of_one_size(seed: int) -> None:
    """They tell no latency; yet longer loads take longer, and none less than nothing."""
    rng, model = random.Random(seed), LoadModel()
    for _ in range(2000):
        model.note(MIB, 1e-3 * rng.uniform(0.9, 1.1))
    assert predicted(model, MIB) == pytest.approx(1e-3, rel=0.1)
    assert predicted(model, 8 * MIB) >= predicted(model, MIB) > 0
    assert predicted(model, PAGE_BYTES) >= 0


def test_forgets(seed: int) -> None:
    """A device that became four times slower is known after some hundred gets."""
    rng, model = random.Random(seed), LoadModel()
    for rate in (4e9, 1e9):
        for _ in range(400):
            size = rng.randrange(PAGE_BYTES, 16 * MIB)
            model.note(size, 1e-4 + size / rate)
    assert predicted(model, 8 * MIB) == pytest.approx(1e-4 + 8 * MIB / 1e9, rel=0.15)


def places(sizes_pages: list[int], tokens: list[int]) -> np.ndarray:
    rows = np.zeros(len(tokens), dtype_of("fkv_place"))
    rows["pages"], rows["tokens"], rows["record_tokens"] = sizes_pages, tokens, tokens
    return rows


@given(
    blocks=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 1024)), max_size=40),
    speed=st.floats(1, 1e7),
    loads=st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 100)), max_size=20),
)
def test_a_plan_is_never_slower(
    blocks: list[tuple[int, int]], speed: float, loads: list[tuple[int, float]]
) -> None:
    """Than the better of loading all and computing all, whatever was learnt; blocks add up."""
    model = LoadModel()
    for size, seconds in loads:
        model.note(size, seconds)
    plan = plan_load(model, places([p for p, _ in blocks], [t for _, t in blocks]), speed)
    assert plan.compute_blocks + plan.load_blocks == len(blocks)
    assert 0 <= plan.ms <= min(plan.load_ms, plan.compute_ms)
    assert plan.compute_ms == pytest.approx(1e3 * sum(t for _, t in blocks) / speed)


def test_both_ends_meet() -> None:
    """A device and a processor of equal speed share the work; a far slower one gets none."""
    model = LoadModel()
    for _ in range(500):
        for pages in (256, 256 * 64):
            model.note(pages * PAGE_BYTES, pages / 256 * 1e-3)
    rows = places([256] * 64, [256] * 64)  # 1 ms each
    even = plan_load(model, rows, 256e3)
    assert even.compute_blocks == 32
    assert even.ms == pytest.approx(32, rel=0.05)
    assert plan_load(model, rows, 1.0).compute_blocks == 0
    assert plan_load(model, rows, 5e-324).load_blocks == len(rows)
    assert plan_load(model, rows, 1e12).load_blocks == 0


def test_of_a_store(store_path: Path) -> None:
    """Gets teach it; absent keys cost nothing; a plan is of the leading keys that are there."""
    keys, data = names(32), payload(1, 32)
    with make(store_path) as store:
        space = store.namespace(IDENTITY)
        assert space.estimate(keys) == 0.0
        assert space.plan(keys, 1000.0).ms == 0.0
        assert space.put(keys, data).all_ok
        store.flush()
        before = store.load_model.fit()
        out = np.empty_like(data)
        for count in (32, 16, 1):
            assert space.get(keys[:count], out[:count]).all_ok
        assert store.load_model.fit() != before
        assert 0 < space.estimate(keys[:1]) <= space.estimate(keys)
        assert space.estimate([*keys, b"absent"]) == space.estimate(keys)
        plan = space.plan([*keys[:8], b"absent", *keys[8:]], 1.0)
        assert (plan.compute_blocks, plan.load_blocks) == (0, 8)
        assert plan.compute_ms == pytest.approx(8 * 16 * 1e3)
        for wrong in (0, -1, True, "9", None, 10**400, float("nan"), float("inf")):
            with pytest.raises(OptionsError, match="prefill_tokens_per_s"):
                space.plan(keys, wrong)  # type: ignore[arg-type]
