"""Calibration profiles: how fine the steps of each layer are at each bounded level.

Invariants
  - a profile is its canonical JSON; its digest is SHA-256 of that, so equal profiles have one name;
  - what coding takes from it was checked when it was read: a factor above 0 for each layer of each
    level that it has;
  - decoding needs none: steps lie in the record's header.

Without a profile, or where it lacks a level, steps are in proportion to a stream's own mean
deviation, alike for all layers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashkv import limits
from flashkv.errors import OptionsError

BOUNDED_LEVELS: Final = ("bounded-1", "bounded-2", "bounded-3", "bounded-4")
DEFAULT_FACTORS: Final = {
    "bounded-1": (0.064, 0.137),
    "bounded-2": (0.129, 0.278),
    "bounded-3": (0.252, 0.54),
    "bounded-4": (0.41, 0.88),
}
"""(channels, tokens): steps are this times the mean deviation of a stream's channels, and times the
token's own deviation."""

_ADVICE: Final = (
    'a profile is {"model": ..., "layers": L, "levels": {"bounded-1": {"k": [L factors], "v": [L'
    " factors]}, ...}}"
)


@dataclass(frozen=True)
class Profile:
    """A checked profile. Made by load(); compared and hashed by its JSON."""

    json: bytes

    @classmethod
    def load(cls, source: object) -> Profile:
        """From a file's path, a mapping, JSON bytes or a Profile. Raises OptionsError."""
        if isinstance(source, Profile):
            return source
        try:
            if isinstance(source, (str, os.PathLike)):
                source = Path(source).read_bytes()
            plain = json.loads(source) if isinstance(source, bytes) else source
        except (OSError, ValueError) as error:
            raise OptionsError(f"the profile can't be read: {error}", advice=_ADVICE) from error
        return cls(_canonical(plain))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes."""
        return hashlib.sha256(self.json).digest()

    @cached_property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        plain: dict[str, Any] = json.loads(self.json)
        return plain

    @property
    def layers(self) -> int:
        """Of the model that it was made for."""
        return int(self.plain["layers"])

    def factors(self, level: str, first_layer: int, layers: int) -> NDArray[np.float32] | None:
        """float32[2, layers]: of channels, of tokens; None where it lacks the level."""
        chosen = self.plain["levels"].get(level)
        if chosen is None:
            return None
        both = np.array([chosen["k"], chosen["v"]], np.float32)
        return np.ascontiguousarray(both[:, first_layer : first_layer + layers])


def step_factors(
    codec: str, profile: object, first_layer: int, layers: int
) -> tuple[NDArray[np.float32] | None, bytes | None]:
    """(float32[2, layers], the profile's digest if they come from it); None for other codecs.

    Of channels, then of tokens; below zero where they are in proportion to a stream's own mean
    deviation: the default.
    """
    if codec not in BOUNDED_LEVELS:
        return None, None
    if isinstance(profile, Profile):
        factors = profile.factors(codec, first_layer, layers)
        if factors is not None:
            return factors, profile.digest
    channels, tokens = DEFAULT_FACTORS[codec]
    default = np.array([[-channels], [-tokens]], np.float32)
    return np.repeat(default, layers, axis=1), None


def check_layers(profile: object, layers: int) -> None:
    """Raises OptionsError where a profile was made for a model of another number of layers."""
    if isinstance(profile, Profile) and profile.layers != layers:
        raise OptionsError(
            "the profile was made for a model of another depth",
            value=f"{profile.layers} layers",
            limit=f"{layers} layers",
        )


def _canonical(plain: object) -> bytes:
    """Canonical JSON of a profile. Raises OptionsError where it is none."""
    if not isinstance(plain, Mapping):
        raise OptionsError("a profile must be a mapping", value=type(plain).__name__)
    layers, levels = plain.get("layers"), plain.get("levels")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise OptionsError("a profile's layers must be an int above 0", value=repr(layers))
    if not isinstance(levels, Mapping):
        raise OptionsError("a profile's levels must be a mapping", value=repr(levels))
    for name, level in levels.items():
        if name not in BOUNDED_LEVELS:
            raise OptionsError(
                "a profile has an unknown level",
                value=repr(name),
                limit=", ".join(BOUNDED_LEVELS),
            )
        for role in ("k", "v"):
            row = level.get(role) if isinstance(level, Mapping) else None
            if not isinstance(row, (list, tuple)) or len(row) != layers:
                raise OptionsError(f"{name} needs {layers} factors for {role}", advice=_ADVICE)
            if not all(_factor(value) for value in row):
                raise OptionsError(
                    f"factors of {name} for {role} must be numbers from 1e-30 to 1e30"
                )
    _check_order(levels)
    try:
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise OptionsError(f"the profile can't be written as JSON: {error}") from error
    if len(text) > limits.PROFILE_BYTES_MAX:
        raise OptionsError(
            "the profile is too long", value=len(text), limit=limits.PROFILE_BYTES_MAX
        )
    return text


def _check_order(levels: Mapping[str, Any]) -> None:
    """Raises OptionsError where a later level is finer than one before: lookups go by the order."""
    known = [name for name in BOUNDED_LEVELS if name in levels]
    for (finer, coarser), role in product(pairwise(known), ("k", "v")):
        pairs = zip(levels[finer][role], levels[coarser][role], strict=True)
        for layer, (fine, coarse) in enumerate(pairs):
            if coarse < fine:
                raise OptionsError(
                    f"{coarser} is finer than {finer} in layer {layer}",
                    value=f"a factor of {coarse} for {role}",
                    limit=f"{fine} or more",
                )


def _factor(value: object) -> bool:
    """Whether steps can be this, or this times a deviation; float32 has it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 1e-30 <= value <= 1e30  # type: ignore[operator]
