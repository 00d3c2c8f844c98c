"""Steps for a model's own KV: how much noise in each layer's K and V costs, and what follows.

One layer's K or V at a time is quantised as the bounded codec would do it, and the divergence of
the next tokens' distributions is measured. It grows with the square of the step, and twice the step
saves a bit in every layer: so the bits of all are best spent where steps are proportional to
1 / sqrt(divergence / step**2), the same slope everywhere. Two numbers are left: the scale, which a
level's bits set, and, as the square holds for small steps only, how coarse K is beside V: some
shares are tried at each level, and the one that costs least is taken.

Invariants
  - layers' factors of a plane have these proportions at each level, but where they would be finer
    than at the level before;
  - a profile is plain JSON, the same for the same measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .bfloat16 import to_bits, to_float
from .quality_bounded import code_k, code_v

Floats = NDArray[np.float32]
Probe = Callable[[NDArray[np.uint16]], float]
Factors = Mapping[str, Floats]


@dataclass(frozen=True)
class Trial:
    """What a store made of factors: bits a value, and the divergence when it is asked for."""

    bits: float
    loss: Callable[[], float]


Try = Callable[[Factors], Trial]

GOAL_BITS: Final = {"bounded-1": 5.3, "bounded-2": 4.3, "bounded-3": 3.38, "bounded-4": 2.76}
"""A little below what the levels promise on disk."""
SHARES: Final = (0.8, 1.0, 1.2, 1.4)
"""K's factors beside V's, in the proportions of one slope."""
PROBE_FACTOR: Final = 0.4
"""Of the deviation: noise that shows, and leaves the model what it is."""
RANGE: Final = 64.0
"""A layer that noise does not harm counts as this much less sensitive than the median, no less."""
TRIES: Final = 8
CODERS: Final = {"k": (0, code_k), "v": (1, code_v)}


def sensitivities(
    kv: NDArray[np.uint16], probe: Probe, say: Callable[[str], None]
) -> dict[str, NDArray[np.float64]]:
    """By plane, for each layer: divergence by the square of the step's factor.

    kv     bfloat16's bits [layer, K|V, head, token, dim].
    probe  mean divergence where the model's cache holds this KV instead.
    """
    floats = to_float(kv)
    layers = len(kv)
    found = {}
    for name, (plane, coder) in CODERS.items():
        factors = _start(floats[:, plane], name)
        noisy = to_bits(coder(floats[:, plane], factors))
        cost = np.zeros(layers)
        for layer in range(layers):
            say(f"noise in {name} of layer {layer + 1} of {layers}")
            changed = kv.copy()
            changed[layer, plane] = noisy[layer]
            cost[layer] = max(probe(changed), 0.0)
        found[name] = cost / factors.astype(np.float64) ** 2
    return found


def _start(values: Floats, name: str) -> Floats:
    """Factors whose steps are PROBE_FACTOR of each layer's deviation."""
    if name == "v":
        return np.full(len(values), PROBE_FACTOR, np.float32)
    spread = np.sqrt((values.std(axis=2) ** 2).mean(axis=(1, 2)))
    return np.asarray(PROBE_FACTOR * spread, np.float32)


def proportions(cost: Mapping[str, NDArray[np.float64]]) -> dict[str, Floats]:
    """Steps' factors of one common slope, by plane and layer."""
    every = np.concatenate([cost[name] for name in CODERS])
    floor = max(float(np.median(every)) / RANGE, 1e-30)
    return {
        name: (1 / np.sqrt(np.maximum(cost[name], floor))).astype(np.float32) for name in CODERS
    }


def scaled_to(relative: Factors, goal_bits: float, attempt: Try) -> tuple[Factors, Trial]:
    """The factors at which a value takes `goal_bits`, as near as the grid of steps lets it.

    Twice the step is a bit less, nearly: so each try's error tells the next scale.
    """
    scale = 1.0 / float(np.median(np.concatenate(list(relative.values()))))
    best: tuple[Factors, Trial] | None = None
    for _ in range(TRIES):
        factors = {name: (scale * values).astype(np.float32) for name, values in relative.items()}
        trial = attempt(factors)
        error = trial.bits - goal_bits
        if best is None or abs(error) < abs(best[1].bits - goal_bits):
            best = factors, trial
        if abs(error) <= 0.01:
            break
        scale *= 2.0**error
    assert best is not None
    return best


def shared_out(
    relative: Factors, goal_bits: float, attempt: Try, say: Callable[[str], None]
) -> Factors:
    """The factors of those bits whose share of K costs least."""
    found: list[tuple[float, Factors]] = []
    for share in SHARES:
        factors, trial = scaled_to({**relative, "k": share * relative["k"]}, goal_bits, attempt)
        found.append((trial.loss(), factors))
        say(f"K {share} times as coarse: {trial.bits:.2f} bits, KL {found[-1][0]:.6f}")
    return min(found, key=lambda pair: pair[0])[1]


def make_profile(
    model: str, relative: Factors, attempt: Try, say: Callable[[str], None]
) -> dict[str, Any]:
    """The profile of all levels, as Options(profile=...) takes it."""
    levels = {}
    finer = {name: np.zeros_like(values) for name, values in relative.items()}
    for level, goal in GOAL_BITS.items():
        say(f"steps of {level}")
        factors = shared_out(relative, goal, attempt, say)
        # No layer's steps are finer than at the level before, whatever the measurements say.
        finer = {name: np.maximum(values, finer[name]) for name, values in factors.items()}
        levels[level] = {name: [_short(value) for value in finer[name]] for name in CODERS}
    return {"model": model, "layers": len(relative["k"]), "levels": levels}


def _short(value: float) -> float:
    """Four digits say more than a measurement does."""
    return float(f"{float(value):.4g}")
