"""Texts for `flashkv-bench quality`: given ones, or what every installation has.

Invariant: the calibration's text is none of those that are reported.
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Final

from flashkv.data import load_document

from .bench_sets import BenchError

CHARACTERS: Final = 16_000
Text = str | list[dict[str, str]]
"""Running text, or a conversation of {"q": question, "a": answer}."""
DOCUMENTED: Final = ("doctest", "difflib", "decimal", "logging", "statistics", "random")


def report_texts(folder: Path | None) -> dict[str, Text]:
    """By name: the .txt and .json files of the folder, or a novel, a program and its documentation.

    A .json file is a conversation. Raises BenchError.
    """
    if folder is None:
        return {
            "novel": load_document(),
            "code": inspect.getsource(argparse)[20_000 : 20_000 + 2 * CHARACTERS],
            "documentation": _documentation(),
        }
    texts: dict[str, Text] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".txt":
            texts[path.stem] = path.read_text(encoding="utf-8")
        elif path.suffix == ".json":
            texts[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    if not texts:
        raise BenchError(f"no .txt or .json file in {folder}")
    return texts


def calibration_text() -> str:
    """Python's reference manual, as its interactive help has it."""
    from pydoc_data.topics import topics

    chapters = ("with", "try", "while", "for", "import", "class", "function", "lambda", "yield")
    return "\n".join(topics[name] for name in chapters)[: 2 * CHARACTERS]


def _documentation() -> str:
    """What the docstrings of some modules say."""
    parts = []
    for name in DOCUMENTED:
        module = __import__(name)
        parts.append(inspect.getdoc(module) or "")
        for _, member in inspect.getmembers(module):
            if inspect.getmodule(member) is module and inspect.getdoc(member):
                parts.append(inspect.getdoc(member) or "")
    return "\n\n".join(parts)[: 2 * CHARACTERS]
