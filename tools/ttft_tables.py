"""flashkv-bench ttft's tables for the terminal: seconds by source, and the ratios that count.

Invariant: nothing is measured or judged here; the JSON has more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich import box
from rich.table import Table

HOST: Final = "host memory"


def ttft_tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """A table an engine, and one of the speeds up to which loading pays."""
    for engine, by_tokens in figures["ttft_s"].items():
        yield _engine_table(engine, by_tokens, figures)
    speeds = figures.get("break_even_tokens_per_s", {})
    if speeds:
        yield _break_even_table(speeds)


def _engine_table(
    engine: str, by_tokens: Mapping[str, Mapping[str, float]], figures: Mapping[str, Any]
) -> Table:
    table = Table(engine, *(f"{tokens} tokens" for tokens in by_tokens), box=box.SIMPLE)
    for source in next(iter(by_tokens.values())):
        table.add_row(source, *(f"{seconds[source]:.3f} s" for seconds in by_tokens.values()))
    own_tier = figures["engines"].get(engine, {}).get("own_tier", "")
    for key, theirs in {"flashkv_to_own_tier": own_tier, "flashkv_to_host_memory": HOST}.items():
        ratios = figures[key].get(engine, {})
        for source in next(iter(ratios.values()), {}):
            told = (f"{ratios[tokens][source]['median']:.2f}" for tokens in by_tokens)
            table.add_row(f"{source} / {theirs}", *told)
    return table


def _break_even_table(speeds: Mapping[str, Mapping[str, float]]) -> Table:
    codecs = list(next(iter(speeds.values())))
    table = Table("loading pays up to, tokens/s", *codecs, box=box.SIMPLE)
    for geometry, by_codec in speeds.items():
        table.add_row(geometry, *(f"{by_codec[codec]:,.0f}" for codec in codecs))
    return table
