"""Imports run one way (docs/path.md, DESIGN §10): a module imports only what lies below it.

Also: the codec does no I/O, reader and writer don't know each other, and only errors.py reads
native status numbers.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "flashkv"
TOOLS = PACKAGE.parent / "tools"

# From the bottom up. A module may import those of lower levels, and of its own where they are
# named together in SAME_LEVEL.
LEVELS: list[set[str]] = [
    {"_native", "limits", "gate", "background"},
    {"errors", "native"},
    {"checks", "profiles"},
    {"dtypes", "options", "openfiles", "filesystem"},
    {"geometry", "arrays", "checksums", "folder"},
    {"layout", "identity", "staging", "superblock"},
    {"memory", "stats", "manifest_log", "progress", "estimate"},
    {"blockio", "tickets"},
    {"index", "codec", "codec_choice", "manifest", "policies", "budget"},
    {"segments", "leases", "records"},
    {"directory", "flights", "space", "reads", "asking", "lanes"},
    {"sealer"},
    {"segment_writer", "segment_reader", "recovery", "cleaning"},
    {"opening", "conversion", "putting", "getting"},
    {"namespace", "operations"},
    {"client"},
    {"snapshot", "registry"},
    {"store"},
    {"pipeline"},
    {"__init__"},
    {"tiers", "data"},
    {"connectors"},
    {"tools"},  # the demo drives a connector
]
SAME_LEVEL = {
    ("errors", "native"),  # inside functions: a build that fails to load raises our errors
    ("native", "errors"),
    ("flights", "directory"),
    ("space", "directory"),
    ("identity", "layout"),
}
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}


def module_name(path: Path) -> str:
    """The part of the package that a file belongs to."""
    if path.is_relative_to(TOOLS):
        return "tools"
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def type_checking_lines(tree: ast.Module) -> set[int]:
    """Lines under `if TYPE_CHECKING:`; they import nothing at run time."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body
        for line in range(child.lineno, (child.end_lineno or child.lineno) + 1)
    }


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    tree = ast.parse(path.read_text())
    typing_only = type_checking_lines(tree)
    found = set()
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            parts = node.module.split(".")
            if parts[0] == "flashkv":
                names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
                found.update(name if name in LEVEL_OF else "__init__" for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "flashkv":
                    found.add(parts[1] if len(parts) > 1 else "__init__")
    return found


FILES = sorted(PACKAGE.rglob("*.py")) + sorted(TOOLS.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_a_module_imports_only_what_lies_below(path: Path) -> None:
    name = module_name(path)
    assert name in LEVEL_OF, f"{path} has no level: add it where it belongs"
    for other in imported(path) - {name}:
        below = LEVEL_OF[other] < LEVEL_OF[name] or (name, other) in SAME_LEVEL
        assert below, f"{path.name} ({name}) must not import flashkv.{other}"


def test_codec_does_no_io() -> None:
    source = (PACKAGE / "codec.py").read_text()
    assert not imported(PACKAGE / "codec.py") & {"blockio", "manifest", "segments"}
    assert not re.search(r"\bimport os\b|\bopen\(", source)


def test_reader_and_writer_do_not_know_each_other() -> None:
    assert "segment_writer" not in imported(PACKAGE / "segment_reader.py")
    assert "segment_reader" not in imported(PACKAGE / "segment_writer.py")


def test_only_errors_reads_native_statuses() -> None:
    statuses = re.compile(r"lib\.FKV_(OK|MISS|DAMAGED|IO_ERROR|TOO_LARGE|NO_MEMORY|CANCELLED)\b")
    for path in FILES:
        if path.name != "errors.py":
            assert not statuses.search(path.read_text()), f"{path} reads native status numbers"


def test_levels_name_only_modules() -> None:
    """Names that exist, or that the design names for later."""
    later = {"cleaning", "tiers", "policies", "_native"}
    there = {module_name(path) for path in FILES} | later
    assert set(LEVEL_OF) <= there
