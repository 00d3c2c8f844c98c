"""flashkv-bench ttft: time to first token of a model, computed and restored from several sources.

Method and keys: docs/benchmarks.md.

Invariants
  - figures belong to the model named in them; sources of one engine are timed in turn;
  - an engine that is left out, or failed while it was measured, is named with the reason; the
    others' figures are there;
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
from .demo_protocol import DemoError, run_worker
from .machine import machine_facts
from .measure import spread
from .ttft_engines import COMPUTED, HOST, EngineSettings, Measured, engine_steps, measure_engine
from .ttft_environments import ENGINES, why_not

WORKER: Final = "flashkv.tools.ttft_worker"
TOKENS: Final = (2048, 4096, 8192)
PACKAGED_MODEL: Final = "SmolLM2-135M-Instruct"
TRANSFORMERS: Final = "transformers"
ALL: Final = (TRANSFORMERS, *ENGINES)
IN_MEMORY: Final = ("tmpfs", "ramfs")

Say = Callable[[str], None]


@dataclass(frozen=True)
class TtftSettings:
    """One run of flashkv-bench ttft.

    model         folder that transformers loads; None: SmolLM2-135M out of its package.
    tokens        lengths of the prompts.
    passes        of each restored source.
    dtype         to compute in, kv_dtype: of the cache, in transformers; engine_dtype: both, in the
                  other engines.
    codec         of flashkv in the other engines; None: see engine_codec.
    engines       which to measure, of ALL; environments: folder with an environment of each.
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
    engines: tuple[str, ...] = ALL
    environments: Path | None = None
    engine_dtype: str = "float32"
    codec: str | None = None

    @property
    def engine_codec(self) -> str:
        """Of flashkv in the other engines: as docs/codecs.md advises, or as asked for."""
        return self.codec or ("raw" if self.engine_dtype == "float32" else "lossless")

    def left_out(self) -> dict[str, str]:
        """Engines that are not measured, and why."""
        return {
            name: "not asked for" if name not in self.engines else reason
            for name in ALL
            if (reason := self._why_not(name)) or name not in self.engines
        }

    def _why_not(self, name: str) -> str:
        return "" if name == TRANSFORMERS else why_not(name, self.environments)


def ttft_steps(settings: TtftSettings) -> int:
    """How often run_ttft() calls step()."""
    measured = [name for name in ALL if name not in settings.left_out()]
    engines = [name for name in measured if name != TRANSFORMERS]
    return (
        (settings.model is None)
        + (len(settings.tokens) if TRANSFORMERS in measured else 0)
        + len(engines) * engine_steps(settings.tokens)
        + (break_even_steps() if settings.break_even else 0)
    )


def run_ttft(settings: TtftSettings, step: Say, progress: Say) -> dict[str, Any]:
    """All figures. step(text) is called before or after each step, progress(text) within."""
    folder = Path(tempfile.mkdtemp(prefix="flashkv-bench-", dir=settings.path))
    try:
        machine = machine_facts(folder)
        left_out = settings.left_out()
        figures: dict[str, Any] = {
            "machine": machine,
            "model": PACKAGED_MODEL if settings.model is None else settings.model.name,
            "left_out": left_out,
            "failed": {},
            "engines": {},
            "ttft_s": {},
            "ttft_samples_s": {},
            "first_token": {},
            "flashkv_to_host_memory": {},
            "flashkv_to_own_tier": {},
        }
        if settings.model is None:
            run_worker("prepare", _given(folder, settings), progress, step, worker=WORKER)
        if TRANSFORMERS not in left_out:
            _add_transformers(figures, _given(folder, settings), progress, step)
        engines = [name for name in ENGINES if name not in left_out]
        if engines:
            _add_engines(figures, engines, folder, settings, step, progress)
        if settings.break_even:
            _add_break_even(figures, BreakEvenSettings(folder, backend=settings.backend), step)
        return figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _given(folder: Path, settings: TtftSettings) -> dict[str, Any]:
    return {
        "model": str(settings.model or folder / "model"),
        "store": str(folder / "store"),
        "document": load_document(),
        "tokens": list(settings.tokens),
        "passes": settings.passes,
        "threads": settings.threads,
        "dtype": settings.dtype,
        "kv_dtype": settings.kv_dtype,
        "engine_dtype": settings.engine_dtype,
    }


def _add_break_even(figures: dict[str, Any], settings: BreakEvenSettings, step: Say) -> None:
    even = run_break_even(settings, step)
    figures["break_even"] = even
    figures["break_even_tokens_per_s"] = {
        name: {
            codec: value["break_even_tokens_per_s"]
            for codec, value in by_codec.items()
            if isinstance(value, dict)
        }
        for name, by_codec in even.items()
    }


def _add_transformers(
    figures: dict[str, Any], given: dict[str, Any], progress: Say, step: Say
) -> None:
    found = run_worker("measure", given, progress, step, worker=WORKER)
    figures |= {
        "bytes_per_token": found["bytes_per_token"],
        "compute_dtype": found["compute_dtype"],
        "kv_dtype": given["kv_dtype"],
        "threads": given["threads"],
        "compression": found["compression"],
    }
    _add_samples(figures, TRANSFORMERS, found["ttft_s"], ours=("flashkv",))
    shutil.rmtree(given["store"], ignore_errors=True)


def _add_engines(
    figures: dict[str, Any],
    names: list[str],
    folder: Path,
    settings: TtftSettings,
    step: Say,
    progress: Say,
) -> None:
    """Each engine's figures, or why it failed."""
    given = _given(folder, settings)
    described = run_worker("describe", given, progress, step, worker=WORKER)
    assert settings.environments is not None
    asked = EngineSettings(
        folder=folder,
        model=Path(given["model"]).resolve(),
        text=described["text"],
        tokens=settings.tokens,
        passes=settings.passes,
        threads=settings.threads,
        dtype=settings.engine_dtype,
        bytes_per_token=described["bytes_per_token"],
        environments=settings.environments.resolve(),  # links and processes lie elsewhere
        codec=settings.engine_codec,
        on_device=figures["machine"]["file_system"].get("type") not in IN_MEMORY,
    )
    for name in names:
        try:
            measured = measure_engine(name, asked, step, progress)
        except DemoError as error:
            figures["failed"][name] = str(error)
            continue
        _add_measured(figures, name, measured)


def _add_measured(figures: dict[str, Any], name: str, measured: Measured) -> None:
    engine = ENGINES[name]
    samples = measured.samples
    figures["engines"][name] = measured.facts
    figures["first_token"][name] = measured.first_token
    computed_by = figures["ttft_samples_s"].get(engine.computed_by, {})
    for tokens, sources in samples.items():
        if tokens in computed_by and COMPUTED not in sources:
            samples[tokens] = {COMPUTED: computed_by[tokens][COMPUTED], **sources}
    _add_samples(figures, name, samples, ours=engine.ours)
    figures["flashkv_to_own_tier"][name] = _ratios(samples, engine.ours, engine.own_tier)


def _add_samples(
    figures: dict[str, Any],
    name: str,
    samples: dict[str, dict[str, list[float]]],
    ours: tuple[str, ...],
) -> None:
    figures["ttft_samples_s"][name] = samples
    figures["ttft_s"][name] = {
        tokens: {source: spread(series).median for source, series in sources.items()}
        for tokens, sources in samples.items()
    }
    figures["flashkv_to_host_memory"][name] = _ratios(samples, ours, HOST)


def _ratios(
    samples: dict[str, dict[str, list[float]]], ours: tuple[str, ...], theirs: str
) -> dict[str, dict[str, dict[str, float | int]]]:
    """By prompt and source of ours: spread of the ratios to `theirs`."""
    return {
        tokens: {source: _ratio(sources[source], sources[theirs]) for source in ours}
        for tokens, sources in samples.items()
    }


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float | int]:
    """Spread of the ratios of passes that were timed one after the other."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)]).as_dict()
