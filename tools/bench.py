"""flashkv-bench: the store's speed beside fio's and other stores', how fast it opens, what it does
for a model, what the codecs cost and gain.

Method and keys: docs/benchmarks.md.

Invariants
  - figures are reported, never judged: the exit status is non-zero only where nothing was measured;
  - the JSON's keys are fixed; the table on the terminal is for people and may change.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

import flashkv
from flashkv.options import BACKENDS, CODECS, parse_bytes

from .bench_codec import run_codec
from .bench_io import (
    DEFAULT_SIZE_BYTES,
    PAIRS_MIN,
    QUICK_SIZE_BYTES,
    SIZE_MIN_BYTES,
    IoSettings,
    io_steps,
    run_io,
)
from .bench_open import BLOCKS_MIN, OpenSettings, open_steps, run_open
from .bench_quality import BLOCK_TOKENS
from .bench_sets import BenchError
from .bench_tables import codec_table, io_table, open_table, quality_table
from .bench_ttft import ALL, TOKENS, TtftSettings, run_ttft, ttft_steps
from .demo_protocol import DemoError
from .fio import FioError, fio_path
from .peers_blocks import KINDS
from .peers_roster import ROSTER
from .peers_run import BATCH, BLOCK_BYTES, ROUNDS, PeersSettings, peers_steps, run_peers
from .peers_summary import peers_reasons, peers_tables
from .quality_session import QualitySettings, run_calibration, run_quality
from .ttft_tables import ttft_tables

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measures a store on this machine."
)
console = Console(stderr=True)

Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Folder = Annotated[
    Path,
    typer.Option(
        "--path",
        help="Folder on the file system to measure; a folder made in it is deleted at the end.",
        exists=True,
        file_okay=False,
        writable=True,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(help="Folder of a model of transformers. [SmolLM2-135M]", file_okay=False),
]
Threads = Annotated[int, typer.Option(min=1, help="That the model computes with.")]
ENGINES_FOLDER = Path(".engines")
REAL_KV = Path("../shared/data/realkv")
ENGINE_DTYPES = ("float32", "bfloat16", "float16")
Backend = Annotated[str, typer.Option(help=f"I/O backend of the store: {', '.join(BACKENDS)}.")]


@app.command("codec")
def codec_command(
    data: Annotated[
        Path | None, typer.Option(help="Folder of .safetensors files with K and V.", exists=True)
    ] = None,
    json_file: Json = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="Folder of peers' packages (pip install --target).", exists=True),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Instead: measure a model's steps and write its profile to this file."),
    ] = None,
    model: Model = None,
    threads: Threads = 2,
) -> None:
    """What the codecs make of real tensors, and how fast, beside others: CPU time.

    With --calibrate: a profile of the bounded levels for a model, from one text.
    """
    try:
        if calibrate is not None:
            settings = QualitySettings(Path(), model=model, threads=threads)
            write_json(calibrate, run_calibration(settings, say))
            return
        figures = run_codec(data or REAL_KV, say, peers)
    except (flashkv.FlashKVError, BenchError, DemoError, OSError) as error:
        fail(str(error))
    console.print(codec_table(figures))
    write_json(json_file, figures)


@app.command("quality")
def quality_command(
    json_file: Json = None,
    model: Model = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="Folder of .txt and .json texts.", exists=True, file_okay=False),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="A profile's file, or none. [the packaged one of SmolLM2-135M]"),
    ] = None,
    prefix: Annotated[int, typer.Option(min=64, help="Tokens stored, a multiple of 64.")] = 1024,
    positions: Annotated[int, typer.Option(min=1, help="Tokens computed on them.")] = 512,
    threads: Threads = 2,
    path: Folder = Path(),
) -> None:
    """What a model loses by each bounded level, after a store and a load, and CacheGen's scheme."""
    if prefix % BLOCK_TOKENS:
        fail(f"--prefix is {prefix}, must be a multiple of {BLOCK_TOKENS}")
    settings = QualitySettings(path, model, texts, profile, prefix, positions, threads)
    try:
        figures = run_quality(settings, say)
    except (flashkv.FlashKVError, BenchError, DemoError, OSError) as error:
        fail(str(error))
    write_json(json_file, figures)
    console.print(quality_table(figures))


@app.command("io")
def io_command(
    json_file: Json = None,
    quick: Annotated[bool, typer.Option(help="256 MiB a pass: well under 90 s in all.")] = False,
    pairs: Annotated[int, typer.Option(min=PAIRS_MIN, help="Pairs of store and fio.")] = PAIRS_MIN,
    path: Folder = Path(),
    size: Annotated[
        str | None,
        typer.Option(help="Bytes a pass, as 512MiB; about four times as much lies on disk. [1GiB]"),
    ] = None,
    backend: Backend = "auto",
) -> None:
    """Puts, gets, single pages and lossless gets beside fio, in alternating pairs."""
    if fio_path() is None:
        fail("fio is not installed: apt-get install fio (./run bench does it)")
    try:
        size_bytes = QUICK_SIZE_BYTES if quick else DEFAULT_SIZE_BYTES
        size_bytes = parse_bytes(size, "--size") if size is not None else size_bytes
        if size_bytes < SIZE_MIN_BYTES:
            fail(f"--size is {size_bytes} bytes, at least {SIZE_MIN_BYTES} are needed")
        settings = IoSettings(path, size_bytes, pairs, check_backend(backend))
        with progress(io_steps(settings)) as step:
            figures = run_io(settings, step)
    except (flashkv.FlashKVError, FioError, BenchError, OSError) as error:
        fail(str(error))
    write_json(json_file, figures)
    console.print(io_table(figures))


@app.command("open")
def open_command(
    json_file: Json = None,
    blocks: Annotated[int, typer.Option(min=BLOCKS_MIN, help="Blocks of 64 bytes.")] = 1_000_000,
    path: Folder = Path(),
    backend: Backend = "auto",
) -> None:
    """Time to open a store of many small blocks, bytes of index a block, one look-up."""
    try:
        settings = OpenSettings(path, blocks, check_backend(backend))
        with progress(open_steps(settings)) as step:
            figures = run_open(settings, step)
    except (flashkv.FlashKVError, BenchError, OSError) as error:
        fail(str(error))
    write_json(json_file, figures)
    console.print(open_table(figures))


@app.command("ttft")
def ttft_command(
    json_file: Json = None,
    model: Model = None,
    tokens: Annotated[str, typer.Option(help="Lengths of the prompts.")] = ",".join(
        map(str, TOKENS)
    ),
    passes: Annotated[int, typer.Option(min=1, help="Of each restored source.")] = 4,
    threads: Threads = 2,
    dtype: Annotated[str, typer.Option(help="To compute in; auto: what the machine has.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Of the cache, in transformers.")] = "bfloat16",
    engine: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(ALL)}; may be given again. [all that are here]"),
    ] = None,
    engines: Annotated[
        Path | None,
        typer.Option(help="Folder of the engines' environments. [.engines]", file_okay=False),
    ] = None,
    engine_dtype: Annotated[
        str, typer.Option(help="To compute in and of the cache, in the other engines.")
    ] = "float32",
    codec: Annotated[
        str | None,
        typer.Option(
            help="Of flashkv in the other engines. [raw for float32, which gains little, else"
            " lossless]"
        ),
    ] = None,
    break_even: Annotated[bool, typer.Option(help="Measure break-even speeds too.")] = True,
    path: Folder = Path(),
    backend: Backend = "auto",
) -> None:
    """Time to first token: computed, and restored by flashkv and what the engine itself has."""
    try:
        lengths = tuple(int(text) for text in tokens.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 2 or len(set(lengths)) != len(lengths):
        fail(f"--tokens is {tokens!r}, must be different lengths of at least 2, as 2048,4096")
    for name in engine or ():
        if name not in ALL:
            fail(f"--engine is {name!r}, must be one of {', '.join(ALL)}")
    if engine_dtype not in ENGINE_DTYPES:
        fail(f"--engine-dtype is {engine_dtype!r}, must be one of {', '.join(ENGINE_DTYPES)}")
    if codec is not None and codec not in CODECS:
        fail(f"--codec is {codec!r}, must be one of {', '.join(CODECS)}")
    settings = TtftSettings(
        path=path,
        model=model,
        tokens=lengths,
        passes=passes,
        threads=threads,
        dtype=dtype,
        kv_dtype=kv_dtype,
        backend=check_backend(backend),
        break_even=break_even,
        engines=tuple(engine or ALL),
        environments=engines or (ENGINES_FOLDER if ENGINES_FOLDER.is_dir() else None),
        engine_dtype=engine_dtype,
        codec=codec,
    )
    for name, reason in settings.left_out().items():
        console.print(f"left out: {name}: {reason}", highlight=False, markup=False)
    try:
        with progress(ttft_steps(settings) + 1) as step:
            step("preparing")
            figures = run_ttft(settings, step, step.say)
    except (flashkv.FlashKVError, BenchError, DemoError, OSError) as error:
        fail(str(error))
    write_json(json_file, figures)
    for table in ttft_tables(figures):
        console.print(table)
    if figures["failed"]:
        fail("\n".join(f"{name} failed: {why}" for name, why in figures["failed"].items()))


@app.command("peers")
def peers_command(
    json_file: Json = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(ROSTER)}; may be given again. [all]"),
    ] = None,
    engines: Annotated[
        Path, typer.Option(help="Folder of the peers' environments.", file_okay=False)
    ] = ENGINES_FOLDER,
    size: Annotated[
        str, typer.Option(help="Bytes of blocks on the disk at once, of all peers.")
    ] = "6GiB",
    rounds: Annotated[int, typer.Option(min=1)] = ROUNDS,
    batch: Annotated[int, typer.Option(min=1, max=256, help="Blocks in flight.")] = BATCH,
    block: Annotated[
        list[str] | None, typer.Option(help="Size of a block; may be given again. [1MiB, 4MiB]")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"Of what is stored: {' or '.join(KINDS)}. [both]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the order in each round. [by chance, and told]")
    ] = None,
    path: Folder = Path(),
) -> None:
    """Put and get beside other stores, in interleaved rounds; damage, and what outlives a kill."""
    for given, known, option in ((peer, ROSTER, "--peer"), (kind, KINDS, "--kind")):
        for name in given or ():
            if name not in known:
                fail(f"{option} is {name!r}, must be one of {', '.join(known)}")
    try:
        blocks = tuple(parse_bytes(text, "--block") for text in block or ())
        settings = PeersSettings(
            path=path,
            environments=engines.resolve(),
            size_bytes=parse_bytes(size, "--size"),
            rounds=rounds,
            batch=batch,
            block_bytes=blocks or BLOCK_BYTES,
            kinds=tuple(dict.fromkeys(kind or KINDS)),
            peers=tuple(dict.fromkeys(peer or ROSTER)),
            seed=random.randrange(1 << 32) if seed is None else seed,
        )
        say(f"seed {settings.seed}")
        with progress(peers_steps(settings)) as step:
            figures = run_peers(settings, step)
    except (flashkv.FlashKVError, BenchError, OSError) as error:
        fail(str(error))
    write_json(json_file, figures)
    for table in peers_tables(figures):
        console.print(table)
    for reason in peers_reasons(figures):
        console.print(reason, highlight=False, markup=False)


def check_backend(name: str) -> str:
    """The name, if it is a backend's; else ends the program with what would be one."""
    if name not in BACKENDS:
        fail(f"--backend is {name!r}, must be one of {', '.join(BACKENDS)}")
    return name


def fail(message: str) -> NoReturn:
    """Ends the program with status 1 and a reason."""
    console.print(f"flashkv-bench: {message}", style="red", highlight=False, markup=False)
    raise typer.Exit(1)


def say(text: str) -> None:
    """What is done next, on standard error."""
    console.print(text, style="dim", highlight=False, markup=False)


class Steps:
    """What moves a bar: called, the next step begins; say() tells what is done within it."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, text: str) -> None:
        self._bar.update(self._task, description=text, advance=1)

    def say(self, text: str) -> None:
        self._bar.update(self._task, description=text)


@contextmanager
def progress(steps: int) -> Iterator[Steps]:
    """A bar on standard error."""
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Drawn twice a second: the bar's own work must not show in the figures.
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as bar:
        yield Steps(bar, bar.add_task("", total=steps, completed=-1))


def write_json(file: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures, for people too: indented, in their order."""
    if file is None:
        return
    text = json.dumps(figures, indent=2, allow_nan=False) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")


def main() -> None:
    """Console script flashkv-bench."""
    app()


if __name__ == "__main__":
    main()
