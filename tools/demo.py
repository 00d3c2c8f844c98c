"""flashkv demo: a document's KV stored by one process, restored by a new one, and what that saves.

Invariants
 - who stores and who restores are different processes, started here, that share the store alone;
 - `checks` of a report tell whether a single byte of KV or a single token of the answer differs;
 - what it made is deleted at the end, but for a store that the caller named.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .demo_protocol import DemoError, run_worker

BLOCK_TOKENS: Final = 64
QUESTION_TOKENS: Final = 48
"""Room for what follows the document: question and the template's end."""
FAST_STEPS: Final = 3
MODEL_STEPS: Final = 9


def default_threads() -> int:
    """Threads of torch: the processors that this process may use, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class DemoOptions:
    """store: None for a temporary folder; model, document: None for those that come along."""

    store: Path | None = None
    model: Path | None = None
    document: Path | None = None
    tokens: int = 32
    threads: int = field(default_factory=default_threads)
    dtype: str = "auto"


class Steps:
    """The progress bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def done(self, text: str) -> None:
        self._progress.update(self._task, description=text, advance=1)

    def run(self, role: str, settings: dict[str, Any]) -> dict[str, Any]:
        return run_worker(role, settings, self.describe, self.done)


@contextmanager
def steps_shown(console: Console, total: int) -> Iterator[Steps]:
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        yield Steps(progress, progress.add_task("starting", total=total))


@contextmanager
def work_folders(store: Path | None) -> Iterator[tuple[Path, Path]]:
    """(store, scratch folder). /var/tmp before /tmp, which may be memory."""
    parent = os.environ.get("TMPDIR") or ("/var/tmp" if Path("/var/tmp").is_dir() else None)
    scratch = Path(tempfile.mkdtemp(prefix="flashkv-demo-", dir=parent))
    try:
        yield store if store is not None else scratch / "store", scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# ---- the two demos ------------------------------------------------------------------------------


def fast_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Put, new process, get, on the sample of real KV tensors."""
    with work_folders(options.store) as (store, _), steps_shown(console, FAST_STEPS) as steps:
        settings = {"store": str(store)}
        stored = steps.run("put-sample", settings)
        restored = steps.run("get-sample", settings)
        steps.describe("done")
    checks = {
        "every block was stored": stored["ok"],
        "a new process finds every block": restored["found"] == stored["blocks"],
        "and reads every block": restored["ok"],
        "the KV is the same, bit for bit": restored["digest"] == stored["digest"],
    }
    return {"checks": checks, **_figures(stored), "blocks": stored["blocks"]}


def model_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """A model prefills a document and answers; a new process restores its KV and answers."""
    with (
        work_folders(options.store) as (store, scratch),
        steps_shown(console, MODEL_STEPS) as steps,
    ):
        settings = {
            "store": str(store),
            "model": str(options.model or scratch / "model"),
            "packaged_model": options.model is None,
            "name": "SmolLM2-135M-Instruct" if options.model is None else "",
            "document": options.document.read_text("utf-8") if options.document else "",
            "tokens": options.tokens,
            "threads": options.threads,
            "dtype": options.dtype,
        }
        prompt = steps.run("prepare", settings)["prompt"]
        split = (len(prompt) - QUESTION_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
        if split <= 0:
            raise DemoError(f"the document is too short: {len(prompt)} tokens with the question")
        settings.update(prompt=prompt, split=split)
        cold = steps.run("without-store", settings)
        warm = steps.run("with-store", settings)
        steps.describe("done")
    checks = {
        "every block was stored": cold["ok"],
        "the new process restores the whole prefix": warm["restored"] == split,
        "the KV is the same, bit for bit": warm["digest"] == cold["digest"],
        "the answer is the same, token for token": warm["tokens"] == cold["tokens"],
    }
    return {
        "checks": checks,
        **_figures(cold),
        "blocks": cold["blocks"],
        "prompt_tokens": len(prompt),
        "restored_tokens": warm["restored"],
        "answer_tokens": len(warm["tokens"]),
        "answer": warm["text"],
        "compute_dtype": cold["dtype"],
        "threads": options.threads,
        "ttft_without_s": cold["ttft_s"],
        "ttft_with_s": warm["ttft_s"],
        "speedup": cold["ttft_s"] / warm["ttft_s"],
        "save_s": cold["save_s"],
        "open_s": warm["open_s"],
        "restore_s": warm["restore_s"],
    }


def _figures(stored: dict[str, Any]) -> dict[str, Any]:
    """What the storing process offered and wrote; ratios of nothing (all was there) are None."""
    stats = stored["stats"]
    wrote = stats["accepted_bytes"] > 0
    return {
        "offered_bytes": stored["offered_bytes"],
        "accepted_bytes": stats["accepted_bytes"],
        "record_bytes": stats["record_bytes_written"],
        "written_bytes": stats["total_bytes_written"],
        "compression": stats["compression"] if wrote else None,
        "wa_cleaning": stats["wa_cleaning"] if wrote else None,
        "wa_total": stats["wa_total"] if wrote else None,
        "backend": stats["backend"],
        "direct_io": stats["direct_io"],
        "codec": stats["codec"],
    }


# ---- for people ---------------------------------------------------------------------------------


def megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def show(report: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, text in _rows(report):
        table.add_row(name, text)
    console.print(table)
    if "answer" in report:
        console.print(f"[bold]answer[/bold]  {report['answer']}", highlight=False)
    for name, held in report["checks"].items():
        console.print(f"[green]yes[/green]  {name}" if held else f"[red]NO[/red]   {name}")


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "ttft_without_s" in report:
        yield (
            "prompt",
            f"{report['prompt_tokens']} tokens, {report['restored_tokens']} of them restored",
        )
        yield "time to first token without the store", f"{report['ttft_without_s']:.3f} s"
        yield (
            "time to first token with the store",
            f"{report['ttft_with_s']:.3f} s  ({report['speedup']:.1f} times faster)",
        )
        yield "of it, restoring", f"{report['restore_s']:.3f} s"
        yield "storing, until durable", f"{report['save_s']:.3f} s"
        yield "computed in", f"{report['compute_dtype']} by {report['threads']} threads"
    yield "KV offered", f"{megabytes(report['offered_bytes'])}, {report['blocks']} blocks, bfloat16"
    yield "written to the store", megabytes(report["written_bytes"])
    if report["compression"] is None:
        yield "of it new", "nothing: every block was there already"
    else:
        yield "compression ratio", f"{report['compression']:.3f} ({report['codec']})"
        yield (
            "write amplification",
            f"{report['wa_total']:.3f} in all, {report['wa_cleaning']:.3f} of records",
        )
    direct = "direct I/O" if report["direct_io"] else "buffered: no direct I/O on this file system"
    yield "I/O backend", f"{report['backend']}, {direct}"


def failed_checks(report: dict[str, Any]) -> list[str]:
    return [name for name, held in report["checks"].items() if not held]
