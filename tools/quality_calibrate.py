"""Steps for a model's own KV: how much noise in each layer's K and V costs, and what follows.

One layer's K or V at a time is quantised as the bounded codec would do it, and the divergence of
the next tokens' distributions is measured. It grows with the square of the step, and twice the step
saves a bit in every layer: so the bits of all are best spent where steps are proportional to
1 / sqrt(divergence / step**2), the same slope everywhere. One number is left, which the levels set.

Invariants
  - layers' factors of a level have these proportions; from level to level they are scaled alone;
  - a profile is plain JSON, the same for the same measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .bfloat16 import to_bits, to_float
from .quality_bounded import code_k, code_v

Floats = NDArray[np.float32]
Probe = Callable[[NDArray[np.uint16]], float]

GOAL_BITS: Final = {"bounded-1": 5.3, "bounded-2": 4.3, "bounded-3": 3.38, "bounded-4": 2.72}
"""A little below what the levels promise on disk."""
PROBE_FACTOR: Final = 0.4
"""Of the deviation: noise that shows, and leaves the model what it is."""
RANGE: Final = 64.0
"""A layer that noise does not harm counts as this much less sensitive than the median, no less."""
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


def scaled_to(
    relative: Mapping[str, Floats], goal_bits: float, bits: Callable[[Mapping[str, Floats]], float]
) -> dict[str, Floats]:
    """The factors at which a value takes `goal_bits`, as near as the grid of steps lets it.

    Twice the step is a bit less, nearly: so each try's error tells the next scale.
    """
    scale = 1.0 / float(np.median(np.concatenate(list(relative.values()))))
    best, least = dict(relative), np.inf
    for _ in range(8):
        factors = {name: (scale * values).astype(np.float32) for name, values in relative.items()}
        error = bits(factors) - goal_bits
        if abs(error) < least:
            best, least = factors, abs(error)
        if least <= 0.01:
            break
        scale *= 2.0**error
    return best


def make_profile(
    model: str,
    relative: Mapping[str, Floats],
    bits: Callable[[Mapping[str, Floats]], float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The profile of all levels, as Options(profile=...) takes it."""
    levels = {}
    for level, goal in GOAL_BITS.items():
        say(f"steps of {level}")
        factors = scaled_to(relative, goal, bits)
        levels[level] = {name: [_short(value) for value in factors[name]] for name in CODERS}
    return {"model": model, "layers": len(relative["k"]), "levels": levels}


def _short(value: float) -> float:
    """Four digits say more than a measurement does."""
    return float(f"{float(value):.4g}")
