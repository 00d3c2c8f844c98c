"""flashkv-dump: what a store's files hold, for people and as JSON; checks every checksum.

Invariants
  - it takes no lock and changes nothing: not a byte, not a time stamp; it runs beside a live writer
    and on damaged stores;
  - exit status: 0 all well; 1 damage found; 2 a wrong command line, no store, or nothing there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flashkv.errors import FlashKVError

from . import dump_text
from .facts import StoreFacts, store_facts
from .inspection import StoreView
from .record_facts import (
    find_key,
    key_candidates,
    page_bytes,
    record_detail,
    segment_of,
    segment_records,
)
from .verify import VerifyReport, verify

app = typer.Typer(add_completion=False)

Address = tuple[int, int]


class UsageError(Exception):
    """A wrong command line, in words."""


def parse_address(text: str, option: str) -> Address:
    """(segment, page) of "N:P", decimal or 0x. Raises UsageError."""
    parts = text.split(":")
    try:
        segment, page = (int(part, 0) for part in parts)
    except ValueError:
        raise UsageError(
            f"{option} needs SEGMENT:PAGE, two numbers as in 3:17, got {text!r}"
        ) from None
    if segment < 0 or page < 0:
        raise UsageError(f"{option}: segment and page can't be negative, got {text!r}")
    return segment, page


@app.command()
def dump(
    path: Annotated[Path, typer.Argument(help="Folder of the store.", show_default=False)],
    segment: Annotated[
        int | None, typer.Option(metavar="N", help="List the records of a segment.")
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="N:PAGE", help="Show the record whose header is at a page, in full."),
    ] = None,
    page: Annotated[
        str | None, typer.Option(metavar="N:PAGE", help="Show a page of a segment in hexadecimal.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Find a key's blocks: hexadecimal or text (hex:... or text:...)."
        ),
    ] = None,
    verify_all: Annotated[
        bool, typer.Option("--verify", help="Check every checksum; exit status 1 on damage.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Shows what a store's files hold. Takes no lock, changes nothing, runs beside a live writer.

    Without an option: the store, its segments, its namespaces. Exit status: 0 all well; 1 damage
    found; 2 a wrong command line, no store, or nothing there.
    """
    asked = [option for option in (segment, record, page, key) if option is not None]
    out = dump_text.Output(as_json=as_json)
    try:
        if len(asked) + verify_all > 1:
            raise UsageError("give one of --segment, --record, --page, --key and --verify")
        if verify_all:
            raise typer.Exit(_verify(path, out))
        view = StoreView(path)
        if segment is not None:
            out.records(segment_records(view, segment_of(view, segment)))
        elif record is not None:
            detail = record_detail(view, *parse_address(record, "--record"))
            out.record(detail)
            if not detail.header_good or not all(crc.good for crc in detail.page_crcs):
                raise typer.Exit(1)
        elif page is not None:
            address = parse_address(page, "--page")
            out.page(*address, page_bytes(view, *address))
        elif key is not None:
            _key(view, key, out)
        else:
            facts: StoreFacts = store_facts(view)
            out.store(facts)
    except (UsageError, FlashKVError, OSError) as error:
        _complain(error)
        raise typer.Exit(2) from None


def _verify(path: Path, out: dump_text.Output) -> int:
    columns = (TextColumn("checking segments"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        report: VerifyReport = verify(
            path, lambda done, count: bar.update(task, completed=done, total=count)
        )
    return int(out.report(report))


def _key(view: StoreView, text: str, out: dump_text.Output) -> None:
    try:
        keys = key_candidates(text)
    except ValueError:
        raise UsageError(f"--key: {text!r} is no hexadecimal") from None
    if not keys:
        raise UsageError(f"--key: a key has 1 to 255 bytes, got {text!r}")
    places = find_key(view, keys)
    if not places:
        raise UsageError(f"no record of {view.path} holds the key {text!r}")
    out.places(places)


def _complain(error: Any) -> None:
    Console(stderr=True, soft_wrap=True).print(
        f"flashkv-dump: {error}", style="red", markup=False, highlight=False
    )


def main() -> None:
    """Entry of the console script."""
    app()


if __name__ == "__main__":
    main()
