"""flashkv: the command for people. Its only job so far is the demo.

Invariant: the exit status is 0 only where everything came back as it was stored; 1 where something
differs or can't be done, 2 for a wrong command line.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .demo import DemoOptions, default_threads, failed_checks, fast_demo, model_demo, show
from .demo_protocol import DemoError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="flashkv: a store for LLM KV-cache blocks on flash.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flashkv {version('flashkv')}")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options of all commands; keeps `demo` a command of its own."""


@app.command()
def demo(
    fast: Annotated[
        bool, typer.Option("--fast", help="Sample KV tensors instead of a model: seconds.")
    ] = False,
    store: Annotated[
        Path | None, typer.Option(help="Folder of the store; kept. Default: temporary.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a model in transformers' format instead of SmolLM2-135M.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(help="Text to prefill instead of the novel.", exists=True, dir_okay=False),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens to generate.")] = 32,
    threads: Annotated[
        int | None, typer.Option(min=1, max=256, help="Threads of torch. Default: the processors.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Compute in bfloat16 or float32; auto: what is fast here.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
) -> None:
    """Prefill a document, store its KV, restore it in a new process, compare."""
    console = Console()
    options = DemoOptions(
        store=store,
        model=model,
        document=document,
        tokens=tokens,
        threads=threads or default_threads(),
        dtype=dtype,
    )
    try:
        report = fast_demo(options, console) if fast else model_demo(options, console)
    except DemoError as error:
        console.print(f"[red]flashkv demo:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None
    show(report, console)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if failed_checks(report):
        raise typer.Exit(1)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
