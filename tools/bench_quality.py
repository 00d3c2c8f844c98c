"""flashkv-bench quality: what a model loses by a codec, after a real store and load.

Method and keys: docs/benchmarks.md.

Invariants
  - KV that a level is judged by went through a store on disk that was closed and opened in between;
  - `lossless` is measured first and must come back bit for bit: else the run fails;
  - the peer's scheme is measured on the same texts, at the bits that the level took on them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

import flashkv
from flashkv.options import CODECS

from . import quality_cachegen as cachegen
from .bench_sets import BenchError
from .bfloat16 import to_bits, to_float

if TYPE_CHECKING:
    from .quality_model import Divergence, Subject

EXACT: Final = "lossless"
LEVELS: Final = tuple(name for name in CODECS if name.startswith("bounded")) + tuple(
    name for name in CODECS if name == "cold"
)
BLOCK_TOKENS: Final = 64
PREFIX_TOKENS: Final = 1024
POSITIONS: Final = 512

Say = Callable[[str], None]


@dataclass(frozen=True)
class Text:
    """tokens, KV of its prefix (bfloat16's bits) and the distributions after it."""

    tokens: list[int]
    kv: NDArray[np.uint16]
    exact: Any


@dataclass(frozen=True)
class Loaded:
    """KV as it came back, and bytes of records on disk a value in bits."""

    kv: NDArray[np.uint16]
    bits: float


def prepare(subject: Subject, texts: dict[str, list[int]], step: Say) -> dict[str, Text]:
    prepared = {}
    for name, tokens in texts.items():
        step(f"prefill: {name}")
        kv = subject.prefill(tokens)
        prepared[name] = Text(tokens, kv, subject.go_on(tokens, kv))
    return prepared


def through_store(
    folder: Path, subject: Subject, text: Text, codec: str, profile: dict[str, Any] | None = None
) -> Loaded:
    """Stores the KV of a text in a new store, closes it, and loads it from there."""
    layers, planes, heads, tokens, dim = text.kv.shape
    shape = (layers, planes, heads, tokens // BLOCK_TOKENS, BLOCK_TOKENS, dim)
    blocks = np.ascontiguousarray(text.kv.reshape(shape).transpose(3, 0, 1, 2, 4, 5))
    chosen: dict[str, Any] = {} if profile is None else {"profile": profile}
    options = flashkv.Options(codec=codec, **chosen)
    identity = flashkv.Identity("flashkv-bench quality")
    path = Path(tempfile.mkdtemp(prefix="store-", dir=folder))
    try:
        with flashkv.open(
            path / "store", capacity=_capacity(blocks), geometry=subject.geometry, options=options
        ) as store:
            names = store.namespace(identity)
            keys = names.token_keys(np.array(text.tokens[:tokens]), block_tokens=BLOCK_TOKENS)
            if not names.put(keys, blocks, position=0).all_ok:
                raise BenchError(f"{codec}: not all blocks were stored")
            store.flush()
            written = store.stats().record_bytes_written
        with flashkv.open(path / "store") as store:
            loaded = np.zeros_like(blocks)
            if not store.namespace(identity).get(keys, loaded).all_ok:
                raise BenchError(f"{codec}: not all blocks came back")
    finally:
        shutil.rmtree(path, ignore_errors=True)
    kv = loaded.transpose(1, 2, 3, 0, 4, 5).reshape(text.kv.shape)
    return Loaded(np.ascontiguousarray(kv), 8 * written / kv.size)


def _capacity(blocks: NDArray[np.uint16]) -> int:
    return max(256 << 20, 16 * blocks.nbytes)


class Run:
    """One model, its texts, a folder for stores."""

    def __init__(self, subject: Subject, texts: dict[str, Text], folder: Path, step: Say) -> None:
        self.subject, self.texts, self.folder, self.step = subject, texts, folder, step
        self.scalings: tuple[str, ...] = cachegen.SCALINGS

    def check_exact(self) -> float:
        """Bits a value of the lossless codec. Raises BenchError where other bytes came back."""
        self.step(EXACT)
        bits = []
        for name, text in self.texts.items():
            loaded = through_store(self.folder, self.subject, text, EXACT)
            if not np.array_equal(loaded.kv, text.kv):
                raise BenchError(f"{name}: {EXACT} brought other bytes")
            bits.append(loaded.bits)
        return float(np.mean(bits))

    def level(
        self, codec: str, profile: dict[str, Any] | None
    ) -> tuple[dict[str, Any], list[float]]:
        """Figures of a level, and its bits on each text."""
        parts, bits = [], []
        for text in self.texts.values():
            loaded = through_store(self.folder, self.subject, text, codec, profile)
            parts.append(self.subject.compare(text.exact, text.tokens, loaded.kv))
            bits.append(loaded.bits)
        row = {"level": codec, "bits_on_disk": float(np.mean(bits)), **_joined(parts).figures()}
        row["kl_by_text"] = _by_text(self.texts, parts)
        self.step(f"{codec}: {row['bits_on_disk']:.2f} bits, KL {row['kl_mean']:.6f}")
        return row, bits

    def cachegen(self, bits: list[float]) -> dict[str, Any]:
        """CacheGen's scheme at these bits.

        The first time with both of its scalings; from then on with the one that was the better.
        """
        rows = [self._cachegen(bits, scaling) for scaling in self.scalings]
        best = min(rows, key=lambda row: float(row["cachegen_kl"]))
        self.scalings = (best["cachegen_bins"],)
        return best

    def _cachegen(self, bits: list[float], scaling: str) -> dict[str, Any]:
        parts, taken = [], []
        for text, wanted in zip(self.texts.values(), bits, strict=True):
            kv = to_float(text.kv)
            scale = cachegen.scale_for(kv, wanted, scaling)
            coded = [cachegen.code(kv[:, plane], scale, scaling) for plane in (0, 1)]
            changed = to_bits(np.stack([part.values for part in coded], axis=1))
            parts.append(self.subject.compare(text.exact, text.tokens, changed))
            taken.append(sum(part.bits for part in coded) / kv.size)
        mean, kl = float(np.mean(taken)), _joined(parts).figures()["kl_mean"]
        self.step(f"CacheGen's scheme, bins by {scaling}: {mean:.2f} bits, KL {kl:.6f}")
        return {"cachegen_bits": mean, "cachegen_kl": kl, "cachegen_bins": scaling}


def _joined(parts: list[Divergence]) -> Divergence:
    return type(parts[0]).joined(parts)


def _by_text(texts: dict[str, Text], parts: list[Divergence]) -> dict[str, float]:
    return {name: float(part.kl.mean()) for name, part in zip(texts, parts, strict=True)}


def measure(
    subject: Subject,
    texts: dict[str, list[int]],
    folder: Path,
    step: Say,
    *,
    levels: tuple[str, ...] = LEVELS,
    profile: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All figures; files lie in a new folder below `folder`. Raises BenchError."""
    scratch = Path(tempfile.mkdtemp(prefix="flashkv-bench-", dir=folder))
    try:
        run = Run(subject, prepare(subject, texts, step), scratch, step)
        figures: dict[str, Any] = {
            "texts": list(texts),
            "prefix_tokens": subject.prefix,
            "positions": subject.positions,
            "profile": profile["model"] if profile else None,
            "lossless_bits_on_disk": run.check_exact(),
            "levels": [],
        }
        for level in levels:
            row, bits = run.level(level, profile)
            figures["levels"].append(row | run.cachegen(bits))
        return figures
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_profile(path: Path) -> dict[str, Any]:
    """A profile's file. Raises BenchError."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"no profile in {path}: {error}") from None
    if not isinstance(profile, dict) or not {"model", "layers", "levels"} <= profile.keys():
        raise BenchError(f"{path} is no profile: model, layers or levels are missing")
    return profile
