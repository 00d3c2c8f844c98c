"""flashkv-bench ttft: which engines there are, in which environments, and what they need there.

Invariants
  - an engine's process finds its own packages and this flashkv, and nothing of the environment that
    the bench itself runs in;
  - asking costs no start of an engine: an engine that is missing is told from the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import flashkv
from flashkv.options import ENV_CODEC

TOOLS: Final = Path(__file__).resolve().parent
STANDINS: Final = TOOLS.parent / "tests" / "engines"
"""What engines lack on a processor; only a source tree has it, as it has ./run test-engines."""


@dataclass(frozen=True)
class Engine:
    """How an engine is measured.

    worker       module of flashkv.tools that holds it.
    environment  whose interpreter runs the worker; beside: others that it takes things from.
    sides        of each process, what it can answer from.
    ours         sources of flashkv, to be set beside own_tier.
    own_tier     source of the engine's own way to keep KV on a disk.
    host_memory  what the source "host memory" is in this engine.
    computed_by  engine whose "computed" is this one's too, where it has none of its own.
    """

    worker: str
    environment: str
    sides: Mapping[str, tuple[str, ...]]
    ours: tuple[str, ...]
    own_tier: str
    host_memory: str
    computed_by: str = ""
    beside: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = (".",)
    variables: Mapping[str, str] = field(default_factory=dict)

    def python(self, environments: Path) -> Path:
        return environments / self.environment / "bin" / "python"


ENGINES: Final[Mapping[str, Engine]] = {
    "vllm": Engine(
        worker="ttft_vllm",
        environment="vllm",
        sides={
            "alone": ("computed",),
            "flashkv": ("flashkv",),
            "flashkv tier": ("flashkv tier",),
            "fs": ("fs", "host memory"),
        },
        ours=("flashkv", "flashkv tier"),
        own_tier="fs",
        host_memory="the primary tier of vLLM's offloading, above fs",
    ),
    "sglang": Engine(
        worker="ttft_sglang",
        environment="sglang",
        sides={"alone": ("computed",), "flashkv": ("flashkv",), "file": ("file", "host memory")},
        ours=("flashkv",),
        own_tier="file",
        host_memory="the host pool of SGLang's hierarchical cache, above file",
        stand_ins=(".", "sglang_stubs"),
        variables={
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        },
    ),
    "lmcache": Engine(
        worker="ttft_lmcache",
        environment="vllm",
        sides={"flashkv": ("flashkv",), "raw_block": ("raw_block", "host memory")},
        ours=("flashkv",),
        own_tier="raw_block",
        host_memory="the L1 of LMCache's server, above raw_block",
        computed_by="vllm",
        beside=("lmcache",),
    ),
}


def why_not(name: str, environments: Path | None) -> str:
    """Why an engine can't be measured here; empty where it can."""
    if environments is None:
        return (
            "no environments of engines here: ./run test-engines makes them, --engines names them"
        )
    if not STANDINS.is_dir():
        return "engines are measured from a source tree, which has what they lack on a processor"
    engine = ENGINES[name]
    for each in (engine.environment, *engine.beside):
        if not (environments / each / "bin" / "python").exists():
            return f"no environment {environments / each}: ./run test-engines makes it"
        if _packages(environments, each) is None:
            return f"{environments / each} has no packages"
    return ""


def _packages(environments: Path, name: str) -> Path | None:
    return next((environments / name).glob("lib/python3*/site-packages"), None)


def linked_flashkv(folder: Path) -> None:
    """Makes a folder with nothing but this flashkv in it, its tools where an installation has them.

    A tree keeps them elsewhere; and beside an installed flashkv lie packages that would hide the
    engine's own.
    """
    package = folder / "flashkv"
    package.mkdir(parents=True)
    for item in Path(flashkv.__file__).resolve().parent.iterdir():
        if item.name not in ("tools", "__pycache__"):
            (package / item.name).symlink_to(item)
    (package / "tools").symlink_to(TOOLS)


def worker_settings(engine: Engine, environments: Path, links: Path) -> dict[str, Any]:
    """What a worker needs to know of other environments."""
    given: dict[str, Any] = {}
    for name in engine.beside:
        given[f"{name}_python"] = str(environments / name / "bin" / "python")
        given[f"{name}_packages"] = str(_packages(environments, name))
        given[f"{name}_links"] = str(links.parent / f"packages-of-{name}")
    return given


def variables(engine: Engine, links: Path, threads: int, codec: str = "") -> dict[str, str]:
    """Of the environment of an engine's processes. codec: flashkv's, whatever they ask for."""
    stand_ins = [str((STANDINS / name).resolve()) for name in engine.stand_ins]
    return {
        "PYTHONPATH": os.pathsep.join((str(links), *stand_ins)),
        # Started in a source tree, Python would take flashkv from there, which has no tools.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
        # Spinning threads on busy cores make torch many times slower.
        "OMP_WAIT_POLICY": "passive",
        "SGLANG_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({ENV_CODEC: codec} if codec else {}),
        **engine.variables,
    }
