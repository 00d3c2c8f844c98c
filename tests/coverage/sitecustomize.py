"""Puts the core that counts its branches in place of the installed one: on PYTHONPATH in
`./run coverage`, and so in every interpreter that its tests start.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "coverage" / "lib" / "flashkv"


class CountingCore(MetaPathFinder):
    """Finds flashkv._native in the coverage build."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != "flashkv._native":
            return None
        return importlib.util.spec_from_file_location(fullname, next(FOLDER.glob("_native*.so")))


sys.meta_path.insert(0, CountingCore())
