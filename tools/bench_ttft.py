"""flashkv-bench ttft: time to first token of a model, computed and restored from several sources.

Method and keys: docs/benchmarks.md.

Invariants
  - figures belong to the model named in them; sources of one engine are timed in turn in one
    process, where another process (a restart) would change nothing but the start;
  - all files lie in one new folder, gone at the end whatever happens.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flashkv.data import load_document

from .bench_break_even import BreakEvenSettings, break_even_steps, run_break_even
from .demo_protocol import run_worker
from .machine import machine_facts
from .measure import spread

WORKER: Final = "flashkv.tools.ttft_worker"
TOKENS: Final = (2048, 4096, 8192)
PACKAGED_MODEL: Final = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class TtftSettings:
    """One run of flashkv-bench ttft.

    model     folder that transformers loads; None: SmolLM2-135M out of its package.
    tokens    lengths of the prompts.
    passes    of each restored source.
    kv_dtype  element type of the cache.
    """

    path: Path
    model: Path | None = None
    tokens: tuple[int, ...] = TOKENS
    passes: int = 5
    threads: int = 2
    dtype: str = "auto"
    kv_dtype: str = "bfloat16"
    backend: str = "auto"
    break_even: bool = True


def ttft_steps(settings: TtftSettings) -> int:
    """How often run_ttft() calls step()."""
    prepared = settings.model is None
    return prepared + len(settings.tokens) + (break_even_steps() if settings.break_even else 0)


def run_ttft(
    settings: TtftSettings, step: Callable[[str], None], progress: Callable[[str], None]
) -> dict[str, Any]:
    """All figures. step(text) is called before or after each step, progress(text) within."""
    folder = Path(tempfile.mkdtemp(prefix="flashkv-bench-", dir=settings.path))
    try:
        figures: dict[str, Any] = {"machine": machine_facts(folder)}
        figures |= _transformers(folder, settings, step, progress)
        if settings.break_even:
            even = run_break_even(BreakEvenSettings(folder, backend=settings.backend), step)
            figures["break_even"] = even
            figures["break_even_tokens_per_s"] = {
                name: {
                    codec: value["break_even_tokens_per_s"]
                    for codec, value in by_codec.items()
                    if isinstance(value, dict)
                }
                for name, by_codec in even.items()
            }
        return figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _transformers(
    folder: Path,
    settings: TtftSettings,
    step: Callable[[str], None],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    model = settings.model or folder / "model"
    given = {
        "model": str(model),
        "store": str(folder / "store"),
        "document": load_document(),
        "tokens": list(settings.tokens),
        "passes": settings.passes,
        "threads": settings.threads,
        "dtype": settings.dtype,
        "kv_dtype": settings.kv_dtype,
    }
    if settings.model is None:
        run_worker("prepare", given, progress, step, worker=WORKER)
    found = run_worker("measure", given, progress, step, worker=WORKER)
    samples: dict[str, dict[str, list[float]]] = found["ttft_s"]
    medians = {
        tokens: {source: spread(series).median for source, series in sources.items()}
        for tokens, sources in samples.items()
    }
    return {
        "model": PACKAGED_MODEL if settings.model is None else model.name,
        "bytes_per_token": found["bytes_per_token"],
        "compute_dtype": found["compute_dtype"],
        "kv_dtype": settings.kv_dtype,
        "threads": settings.threads,
        "compression": found["compression"],
        "ttft_s": {"transformers": medians},
        "ttft_samples_s": {"transformers": samples},
        "flashkv_to_host_memory": {
            tokens: _ratio(sources["flashkv"], sources["host memory"])
            for tokens, sources in samples.items()
        },
    }


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float | int]:
    """Spread of the ratios of passes that were timed one after the other."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)]).as_dict()
