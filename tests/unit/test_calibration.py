"""Calibration: the numpy codec keeps its promise, steps follow what noise costs."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
from flashkv.tools import quality_bounded as bounded
from flashkv.tools import quality_calibrate as calibrate
from flashkv.tools.bfloat16 import to_bits, to_float

LAYERS = 4


@pytest.fixture(scope="module")
def kv() -> np.ndarray:
    """Keys that follow one another, values whose tokens differ in size."""
    rng = np.random.default_rng(7)
    noise = rng.normal(size=(LAYERS, 2, 2, 300, 32))
    for token in range(1, 300):
        noise[:, 0, :, token] += 0.8 * noise[:, 0, :, token - 1]
    noise[:, 1] *= np.exp(rng.normal(size=(LAYERS, 2, 300, 1)))
    return to_bits(noise.astype(np.float32))


def test_errors_are_half_a_step_at_most(kv: np.ndarray) -> None:
    floats = to_float(kv)
    factors = np.array([0.1, 0.2, 0.4, 0.8], np.float32)
    keys = bounded.code_k(floats[:, 0], factors)
    error = np.abs(keys - floats[:, 0])
    step = bounded.on_grid(factors)
    assert (error.max(axis=(1, 2, 3)) <= step / 2 * 1.0001).all()
    assert (error.max(axis=(1, 2, 3)) > step / 2 * 0.9).all()
    values = bounded.code_v(floats[:, 1], factors)
    spread = floats[:, 1].std(axis=3)
    error = np.abs(values - floats[:, 1]).max(axis=3)
    assert (error <= factors[:, None, None] * spread * 2 ** (1 / 16) / 2 * 1.0001).all()
    for coded, plane in ((keys, 0), (values, 1)):
        assert (coded[:, :, : bounded.EXACT_TOKENS] == floats[:, plane, :, :4]).all()
        assert (coded[:, :, 4:] != floats[:, plane, :, 4:]).mean() > 0.9


def test_keys_are_predicted(kv: np.ndarray) -> None:
    """With steps larger than the numbers, what is left is the prediction: it follows the keys."""
    keys = to_float(kv)[:, 0]
    coded = bounded.code_k(keys, np.full(LAYERS, 4.0, np.float32))
    follows = np.corrcoef(coded[:, :, 5:256].ravel(), keys[:, :, 4:255].ravel())[0, 1]
    assert follows > 0.5


def test_steps_follow_what_noise_costs(kv: np.ndarray) -> None:
    """A model that minds squared errors, by layer and plane, as it is told."""
    told = {"k": np.array([1.0, 4.0, 16.0, 64.0]), "v": np.array([64.0, 16.0, 4.0, 1.0])}
    exact = to_float(kv)
    said: list[str] = []

    def probe(changed: np.ndarray) -> float:
        error = (to_float(changed) - exact) ** 2
        assert ((error != 0).any(axis=(2, 3, 4))).sum() == 1  # one layer, one plane
        by_part = error.mean(axis=(2, 3, 4))
        return float((by_part[:, 0] * told["k"]).sum() + (by_part[:, 1] * told["v"]).sum())

    cost = calibrate.sensitivities(kv, probe, said.append)
    assert len(said) == 2 * LAYERS
    relative = calibrate.proportions(cost)
    for name in ("k", "v"):
        ratio = relative[name] * np.sqrt(told[name])
        assert ratio / ratio.mean() == pytest.approx(1, abs=0.25)


def test_harmless_layers_stay_bounded() -> None:
    cost = {"k": np.array([1.0, 0.0]), "v": np.array([1.0, 1.0])}
    relative = calibrate.proportions(cost)
    assert relative["k"][1] == pytest.approx(np.sqrt(calibrate.RANGE) * relative["k"][0])


def test_a_profile_meets_the_levels_bits() -> None:
    relative = {"k": np.array([1, 2, 1, 2], np.float32), "v": np.array([1, 1, 2, 2], np.float32)}
    tries: list[float] = []

    def attempt(factors: Mapping[str, np.ndarray]) -> calibrate.Trial:
        """A bit more than it should for each octave of the steps, and only in tenths.

        What costs least is keys 1.2 times as coarse.
        """
        share = float((factors["k"] / factors["v"])[0])
        every = np.concatenate([factors["k"], factors["v"]])
        tries.append(round(3 - 1.1 * float(np.log2(every).mean()), 1))
        return calibrate.Trial(tries[-1], lambda: abs(share - 1.2))

    profile = calibrate.make_profile("tiny", relative, attempt, lambda _: None)
    assert json.loads(json.dumps(profile)) == profile
    assert (profile["model"], profile["layers"]) == ("tiny", LAYERS)
    assert list(profile["levels"]) == list(calibrate.GOAL_BITS)
    assert len(tries) <= calibrate.TRIES * len(calibrate.SHARES) * len(calibrate.GOAL_BITS)
    for level, goal in calibrate.GOAL_BITS.items():
        factors = {n: np.array(f, np.float32) for n, f in profile["levels"][level].items()}
        assert attempt(factors).bits == pytest.approx(goal, abs=0.1)
        assert factors["k"][0] == pytest.approx(1.2 * factors["v"][0], rel=1e-3)
        assert factors["k"][1] == pytest.approx(2 * factors["k"][0], rel=1e-3)
