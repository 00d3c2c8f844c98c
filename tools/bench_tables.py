"""flashkv-bench's tables for the terminal: io, open, codec, quality.

Invariant: nothing is measured or judged here; the JSON has more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from .bench_io import RATIOS


def open_table(figures: Mapping[str, Any]) -> Table:
    """What opening a store takes."""
    table = Table("", "value", box=box.SIMPLE)
    for key in ("blocks", "open_s", "index_bytes_per_block", "contains_one_us"):
        table.add_row(key, f"{figures[key]:,.3f}".removesuffix(".000"))
    return table


def codec_table(figures: Mapping[str, Any]) -> Table:
    """The figures, one a line."""
    table = Table("figure", "value", box=box.SIMPLE)
    for name, value in figures.items():
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        if isinstance(value, dict):
            parts = ((key, f"{v:.3f}" if isinstance(v, float) else v) for key, v in value.items())
            text = ", ".join(f"{key}: {part}" for key, part in parts)
        table.add_row(name, text)
    return table


def quality_table(figures: Mapping[str, Any]) -> Table:
    """Levels, and CacheGen's scheme at their bits."""
    table = Table(box=box.SIMPLE)
    for title in ("level", "bits", "KL mean", "p99", "top-1", "CacheGen bits", "KL"):
        table.add_column(title, justify="left" if title == "level" else "right", no_wrap=True)
    for row in figures["levels"]:
        table.add_row(
            row["level"],
            f"{row['bits_on_disk']:.2f}",
            f"{row['kl_mean']:.5f}",
            f"{row['kl_p99']:.4f}",
            f"{100 * row['top1']:.1f} %",
            f"{row['cachegen_bits']:.2f}",
            f"{row['cachegen_kl']:.5f}",
        )
    return table


def io_table(figures: Mapping[str, Any]) -> Table:
    """Ratios with their spread, both sides' speed and processor time."""
    table = Table(box=box.SIMPLE, padding=0, collapse_padding=True)
    table.add_column("store beside fio", no_wrap=True)
    for title in ("ratio", "q1..q3", "MB/s", "fio", "cpu s/GB", "fio"):
        table.add_column(title, justify="right", no_wrap=True)
    for key, (ours, theirs) in RATIOS.items():
        around = figures["spread"][key]
        speed, cpu = figures["bytes_per_s"], figures["cpu_s_per_gb"]
        table.add_row(
            key,
            f"{figures[key]:.2f}",
            f"{around['q1']:.2f}..{around['q3']:.2f}",
            f"{speed[ours] / 1e6:,.0f}",
            f"{speed[theirs] / 1e6:,.0f}",
            f"{cpu[ours]:.2f}",
            f"{cpu[theirs]:.2f}",
        )
    table.caption = (
        f"control plane {figures['control_us_per_batch']:.0f} us a batch"
        f" + {figures['control_us_per_block']:.2f} us a block"
    )
    return table
