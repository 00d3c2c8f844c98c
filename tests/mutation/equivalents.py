"""Mutants that can change no result, each with the reason: equivalent.txt.

    codec_fxp.c choose_bases: if (sum > most) most = sum;      file, function: the line of code
        8 '>' -> '>=': why                                     column in that line, change: why

Invariants
  - an entry is of a line of code, not of a line's number: it moves with the line, and is void once
    the line is another.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutants import Mutant

LISTED = Path(__file__).resolve().parent / "equivalent.txt"
FUNCTION = re.compile(r"^[A-Za-z_][^;={}]*?(\w+)\([^;(){}]*\)\s*\{", re.MULTILINE)


def place_of(mutant: Mutant, source: str) -> str:
    """The line that the list knows it by."""
    functions = [m[1] for m in FUNCTION.finditer(source) if m.start() <= mutant.start]
    function = functions[-1] if functions else "-"
    return f"{mutant.file} {function}: {_line(mutant, source).strip()}"


def change_of(mutant: Mutant, source: str) -> str:
    """The change within that line."""
    line = _line(mutant, source)
    column = mutant.start - (source.rfind("\n", 0, mutant.start) + 1)
    column -= len(line) - len(line.lstrip())
    return f"{column} {mutant.old!r} -> {mutant.text!r}"


def _line(mutant: Mutant, source: str) -> str:
    return source.splitlines()[mutant.line - 1]


def listed(text: str | None = None) -> dict[tuple[str, str], str]:
    """Reasons by place and change."""
    found, place = {}, ""
    for line in (LISTED.read_text(encoding="utf-8") if text is None else text).splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            place = line
            continue
        entry = re.match(r"\s+(\d+ '[^']*' -> '[^']*'): (\S.*)", line)
        if not entry or not place:
            raise ValueError(f"no entry of {LISTED.name}: {line}")
        found[place, entry[1]] = entry[2]
    return found
