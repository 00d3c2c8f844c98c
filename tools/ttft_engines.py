"""flashkv-bench ttft, the engines: vLLM, SGLang, and LMCache with vLLM, each in its environment.

Method and keys: docs/benchmarks.md.

Invariants
  - all sides of an engine run at the same time and are asked in turn, forwards and then backwards:
    what disturbs the machine strikes them alike, and a ratio is made of neighbours;
  - a figure counts only where the source was the one named: the same first token from every one,
    all whole blocks restored, and read from the device or not, as the source says;
  - whatever happens, no process of an engine and no file of it is left.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .demo_protocol import DemoError
from .ttft_environments import ENGINES, Engine, linked_flashkv, variables, worker_settings
from .ttft_session import Session, drop_cached_pages

TAIL: Final = 32  # tokens that no source restores, of a prompt of whole blocks but for these
COMPUTED: Final = "computed"
HOST: Final = "host memory"
NOT_READ: Final = (COMPUTED, HOST)
READ_SHARE: Final = 0.25  # of the KV, at least or at most: compressed KV is read too, others' not
CAPACITY: Final = "4GiB"

Say = Callable[[str], None]
Samples = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class EngineSettings:
    """What the engines are measured with.

    folder       for stores; a folder of each engine is made in it and removed.
    model        folder of the model.
    text         token ids that prompts are made of.
    tokens       lengths; a prompt is TAIL tokens shorter, so that each source restores the same.
    environments folder with an environment of each engine.
    codec        of flashkv, where it knows the vectors; empty: the connectors' default.
    on_device    whether `folder` lies on a device: reading from it can then be seen.
    """

    folder: Path
    model: Path
    text: list[int]
    tokens: tuple[int, ...]
    passes: int
    threads: int
    dtype: str
    bytes_per_token: int
    environments: Path
    on_device: bool = True
    codec: str = ""

    def prompts(self) -> dict[str, list[int]]:
        """By their names: the lengths that were asked for."""
        most = max(self.tokens)
        text = (self.text * -(-most // len(self.text)))[:most]
        return {str(count): text[: count - TAIL] for count in sorted(self.tokens)}


@dataclass
class Measured:
    """An engine's figures: seconds by prompt and source, its first tokens, what they belong to."""

    samples: Samples = field(default_factory=dict)
    first_token: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def engine_steps(tokens: tuple[int, ...]) -> int:
    """How often measure_engine() calls step()."""
    return 1 + len(tokens)


def measure_engine(name: str, settings: EngineSettings, step: Say, progress: Say) -> Measured:
    """Figures of an engine; step(text) is called before each length. Raises DemoError."""
    engine = ENGINES[name]
    measured = Measured()
    step(f"{name}: starting")
    with _sides(name, engine, settings) as sides:
        facts = {name: side.session.ready() for name, side in sides.items()}
        measured.facts = _facts(engine, facts, settings)
        granule = max(int(fact["granule"]) for fact in facts.values())
        for prompt, tokens in settings.prompts().items():
            step(f"{name}: {prompt} tokens")
            whole = (len(tokens) - 1) // granule * granule
            turn = _Turn(engine, sides, settings, prompt, whole, progress)
            measured.samples[prompt] = turn.run()
            measured.first_token[prompt] = turn.token
    return measured


def _facts(
    engine: Engine, facts: Mapping[str, Mapping[str, Any]], settings: EngineSettings
) -> dict[str, Any]:
    one = next(iter(facts.values()))
    return {
        "version": one["version"],
        "dtype": one["dtype"],
        "codec": settings.codec,
        "kv_bytes_per_token": settings.bytes_per_token,
        "threads": settings.threads,
        "prompt_tokens": {name: len(ids) for name, ids in settings.prompts().items()},
        "block_tokens": one["granule"],
        "own_tier": engine.own_tier,
        "host_memory": engine.host_memory,
    }


@dataclass(frozen=True)
class _Side:
    """A running side, and where it keeps what it stores."""

    session: Session
    folder: Path


@contextmanager
def _sides(name: str, engine: Engine, settings: EngineSettings) -> Iterator[dict[str, _Side]]:
    """The engine's processes, started at once."""
    folder = settings.folder / name
    with ExitStack() as ends:
        folder.mkdir()
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        links = folder / "packages"
        linked_flashkv(links)
        sides: dict[str, _Side] = {}
        ends.callback(_end, sides)
        for number, side in enumerate(engine.sides):
            kept = folder / str(number)
            kept.mkdir()
            given = {
                "model": str(settings.model),
                "side": side,
                "folder": str(kept),
                "capacity": CAPACITY,
                "threads": settings.threads,
                "dtype": settings.dtype,
                "bytes_per_token": settings.bytes_per_token,
                "prompts": settings.prompts(),
                **worker_settings(engine, settings.environments, links),
            }
            file = folder / f"settings-{number}.json"
            file.write_text(json.dumps(given), encoding="utf-8")
            python = engine.python(settings.environments)
            session = Session(
                f"{name}, {side}",
                [str(python), "-m", f"flashkv.tools.{engine.worker}", str(file)],
                variables(engine, links, settings.threads, settings.codec),
            )
            sides[side] = _Side(session, kept)
        yield sides


def _end(sides: Mapping[str, _Side]) -> None:
    """All at the same time: an engine takes seconds to end."""
    with ThreadPoolExecutor(len(sides) or 1) as threads:
        list(threads.map(lambda side: side.session.end(), sides.values()))


class _Turn:
    """One prompt: computed, stored by each side, and restored from each source in turn."""

    def __init__(
        self,
        engine: Engine,
        sides: Mapping[str, _Side],
        settings: EngineSettings,
        prompt: str,
        whole: int,
        progress: Say,
    ) -> None:
        self.sides = sides
        self.settings = settings
        self.prompt = prompt
        self.whole = whole
        self.progress = progress
        self.side_of = {
            source: side for side, sources in engine.sides.items() for source in sources
        }
        self.token = -1
        self.samples: dict[str, list[float]] = {source: [] for source in self.side_of}

    def run(self) -> dict[str, list[float]]:
        restored = [source for source in self.side_of if source != COMPUTED]
        if COMPUTED in self.side_of:
            self._ask(COMPUTED)
        for side in dict.fromkeys(self.side_of[source] for source in restored):
            self.progress(f"{self.prompt} tokens, {side}: storing")
            session = self.sides[side].session
            self._same(side, session.answer(self.prompt, "fill"))
            session.settle()
        for number in range(self.settings.passes):
            for source in reversed(restored) if number % 2 else restored:
                self._ask(source)
        return self.samples

    def _ask(self, source: str) -> None:
        """Times one answer and checks where it came from."""
        self.progress(f"{self.prompt} tokens, {source}")
        side = self.sides[self.side_of[source]]
        session = side.session
        drop_cached_pages(side.folder)
        before = session.read_bytes()
        answer = session.answer(self.prompt, source)
        read = session.read_bytes() - before
        self._same(source, answer)
        expected = 0 if source == COMPUTED else self.whole
        if answer["restored"] != expected:
            raise DemoError(f"{source}: {answer['restored']} tokens restored, {expected} expected")
        share = read / (self.whole * self.settings.bytes_per_token)
        if self.settings.on_device and (share >= READ_SHARE) != (source not in NOT_READ):
            raise DemoError(f"{source}: {read} bytes were read, {share:.0%} of the KV")
        self.samples[source].append(float(answer["seconds"]))

    def _same(self, source: str, answer: Mapping[str, Any]) -> None:
        if self.token == -1:
            self.token = int(answer["token"])
        if answer["token"] != self.token:
            raise DemoError(
                f"{self.prompt} tokens: {source} leads to the first token {answer['token']},"
                f" not {self.token} as before"
            )
