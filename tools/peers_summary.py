"""flashkv-bench peers: the figures' keys, and the tables for the terminal.

Invariants
  - the JSON's keys are those of docs/benchmarks.md; nothing is judged;
  - whoever was asked for has a row: with figures, or with the reason why there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from .measure import Measurement, spread
from .peers_protocol import Plan

if TYPE_CHECKING:
    from .peers_run import Outcome

MB = 10**6


def summary(outcome: Outcome, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Medians by case and peer, their spread and samples, and what was found out beside them."""
    figures: dict[str, Any] = {}
    spreads: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    for case, plan in plans.items():
        figures[case], spreads[case], samples[case] = {}, {}, {}
        puts, gets = outcome.puts.get(case, {}), outcome.gets.get(case, {})
        for name in puts.keys() & gets.keys():
            series = _series(puts[name], gets[name], outcome.disk_bytes[case][name])
            around = {key: spread(values) for key, values in series.items()}
            figures[case][name] = {key: value.median for key, value in around.items()}
            payload = plan.count * plan.block_bytes
            figures[case][name]["disk_ratio"] = around["disk_bytes"].median / payload
            spreads[case][name] = {key: value.as_dict() for key, value in around.items()}
            samples[case][name] = series
    return {
        "figures": figures,
        "damage": outcome.damage,
        "restart": outcome.restart,
        "peers": outcome.facts,
        "left_out": outcome.left_out,
        "failed": outcome.failed,
        "spread": spreads,
        "samples": samples,
        "order": outcome.order,
    }


def _series(
    puts: list[Measurement], gets: list[Measurement], disk_bytes: list[int]
) -> dict[str, list[float]]:
    return {
        "put_mb_per_s": [each.bytes_per_s / MB for each in puts],
        "get_mb_per_s": [each.bytes_per_s / MB for each in gets],
        "put_cpu_s_per_gb": [each.cpu_s_per_gb for each in puts],
        "get_cpu_s_per_gb": [each.cpu_s_per_gb for each in gets],
        "disk_bytes": [float(each) for each in disk_bytes],
    }


def peers_tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """A table a case, and one of what doesn't depend on it."""
    names = figures["settings"]["peers"]
    for case, by_peer in figures["figures"].items():
        yield _case_table(case, by_peer, names, figures)
    yield _facts_table(names, figures)


def peers_reasons(figures: Mapping[str, Any]) -> Iterator[str]:
    """Why peers have no figures, or not all of them."""
    for key, told in (("left_out", "left out"), ("failed", "failed")):
        for name, reason in figures[key].items():
            yield f"{name} {told}: {reason}"


def _case_table(
    case: str, by_peer: Mapping[str, Any], names: list[str], figures: Mapping[str, Any]
) -> Table:
    table = Table(box=box.SIMPLE, padding=0, collapse_padding=True)
    table.add_column(case, no_wrap=True)
    for title in ("put MB/s", "get MB/s", "put cpu s/GB", "get", "disk MB", "/data"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in names:
        if name not in by_peer:
            table.add_row(name, _without(name, figures))
            continue
        row = by_peer[name]
        early = "" if figures["peers"][name]["durable"] else "~"
        table.add_row(
            name,
            f"{early}{row['put_mb_per_s']:,.0f}",
            f"{row['get_mb_per_s']:,.0f}",
            f"{row['put_cpu_s_per_gb']:.2f}",
            f"{row['get_cpu_s_per_gb']:.2f}",
            f"{row['disk_bytes'] / MB:,.1f}",
            f"{row['disk_ratio']:.3f}",
        )
    table.caption = "~ what was put is not durable yet when the clock stops"
    return table


def _facts_table(names: list[str], figures: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE, padding=0, collapse_padding=True)
    for title in ("peer", "durable", "a flipped bit", "closed", "killed", "unflushed"):
        table.add_column(title, no_wrap=True)
    for name in names:
        facts = figures["peers"].get(name)
        if facts is None:
            table.add_row(name, _without(name, figures))
            continue
        back = figures["restart"].get(name, {})
        lives = ("closed", "killed_after_flush", "killed_before_flush")
        table.add_row(
            name,
            "yes" if facts["durable"] else "no",
            _damage(figures["damage"].get(name)),
            *(f"{back[life]}/{back['blocks']}" if life in back else "-" for life in lives),
        )
    return table


def _damage(found: Mapping[str, Any] | None) -> str:
    """The verdict, and how many blocks went with the damaged one."""
    if found is None:
        return "-"
    lost = len(found["blocks"]) - found["blocks"].count("right")
    return f"{found['verdict']}, {lost} lost" if found["verdict"] == "noticed" else found["verdict"]


def _without(name: str, figures: Mapping[str, Any]) -> str:
    return "left out" if name in figures["left_out"] else "failed"
