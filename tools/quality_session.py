"""A model, its texts and what is measured on them: the jobs behind `flashkv-bench quality` and
`flashkv-bench codec --calibrate`.

Invariant: the model's files that were unpacked for a run are gone at its end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .bench_quality import LEVELS, POSITIONS, PREFIX_TOKENS, measure, read_profile, through_store
from .bench_quality import Text as StoredText
from .bench_sets import BenchError
from .machine import machine_facts
from .quality_calibrate import Trial, make_profile, proportions, sensitivities
from .quality_texts import Text, calibration_text, report_texts

if TYPE_CHECKING:
    from .quality_model import Subject

PACKAGED_MODEL: Final = "SmolLM2-135M-Instruct"
PACKAGED_PROFILE: Final = "profile_smollm2_135m.json"
NO_PROFILE: Final = "none"
TEXTS: Final = Path("../shared/data/realkv/texts")

Say = Callable[[str], None]


@dataclass(frozen=True)
class QualitySettings:
    """One run.

    path       folder in which a folder for the stores is made; gone at the end.
    model      folder that transformers loads; None: SmolLM2-135M out of its package.
    texts      folder of .txt and .json files; None: TEXTS where it is, else what Python brings.
    profile    a profile's file, "none", or None: the packaged one for the packaged model.
    prefix     tokens that are stored, positions: tokens computed on them.
    """

    path: Path
    model: Path | None = None
    texts: Path | None = None
    profile: str | None = None
    prefix: int = PREFIX_TOKENS
    positions: int = POSITIONS
    threads: int = 2

    @property
    def model_name(self) -> str:
        return PACKAGED_MODEL if self.model is None else self.model.name

    def report_texts(self) -> dict[str, Text]:
        return report_texts(self.texts or (TEXTS if TEXTS.is_dir() else None))

    def read_profile(self) -> dict[str, Any] | None:
        """Raises BenchError."""
        if self.profile == NO_PROFILE:
            return None
        if self.profile is not None:
            return read_profile(Path(self.profile))
        packaged = resources.files("flashkv.data") / PACKAGED_PROFILE
        if self.model is not None or not packaged.is_file():
            return None
        with resources.as_file(packaged) as path:
            return read_profile(path)


@contextmanager
def _subject(
    settings: QualitySettings, texts: dict[str, Text], step: Say
) -> Iterator[tuple[Subject, dict[str, list[int]]]]:
    """The loaded model and the texts' tokens. Raises BenchError."""
    try:
        from . import demo_model, quality_model
    except ImportError as error:
        raise BenchError(f"a package is missing: {error}. Install flashkv[demo]") from None
    with tempfile.TemporaryDirectory(prefix="flashkv-model-") as folder:
        step("loading the model")
        source = settings.model
        if source is None:
            source = Path(folder)
            demo_model.quiet()
            demo_model.prepare_packaged_model(source)
        tokens = settings.prefix + settings.positions
        ids = quality_model.tokenize(source, texts, tokens)
        yield (
            quality_model.load_subject(
                source, settings.prefix, settings.positions, settings.threads
            ),
            ids,
        )


def run_quality(settings: QualitySettings, step: Say) -> dict[str, Any]:
    """All figures of `flashkv-bench quality`. Raises BenchError, FlashKVError, DemoError."""
    profile = settings.read_profile()
    facts = {"model": settings.model_name, "machine": machine_facts(settings.path)}
    with _subject(settings, settings.report_texts(), step) as (subject, texts):
        return facts | measure(subject, texts, settings.path, step, profile=profile)


def run_calibration(settings: QualitySettings, step: Say) -> dict[str, Any]:
    """A profile of the model's levels, from one text. Raises BenchError, DemoError."""
    with _subject(settings, {"manual": calibration_text()}, step) as (subject, texts):
        tokens = texts["manual"]
        step("exact distributions")
        kv = subject.prefill(tokens)
        exact = subject.go_on(tokens, kv)

        def probe(changed: Any) -> float:
            return float(subject.compare(exact, tokens, changed).kl.mean())

        def attempt(factors: Mapping[str, Any]) -> Trial:
            level = {name: [float(value) for value in row] for name, row in factors.items()}
            profile = {"model": "", "layers": len(kv), "levels": {LEVELS[0]: level}}
            text = StoredText(tokens, kv, exact)
            loaded = through_store(settings.path, subject, text, LEVELS[0], profile)
            return Trial(loaded.bits, lambda: probe(loaded.kv))

        cost = sensitivities(kv, probe, step)
        return make_profile(settings.model_name, proportions(cost), attempt, step)
