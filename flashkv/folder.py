"""What a shard's folder holds: names of its files, and what of a capacity is for all but segments.

Invariant: everything that the store makes has a name that is_own_file() knows; all else is foreign.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from flashkv import limits

SHARD: Final = Path("shards") / "0"
SUPERBLOCKS: Final = ("superblock.a", "superblock.b")
SEGMENTS: Final = "segments"
NEW_LOG: Final = "manifest.new"
_SHARD_FILE: Final = re.compile(r"lock|superblock\.[ab]|manifest-\d+\.log|manifest\.new")
_LOG: Final = re.compile(r"manifest-\d+\.log")
_SEGMENT_FILE: Final = re.compile(r"\d{8}\.seg")


def segment_path(folder: Path, segment: int) -> Path:
    """The file of a segment."""
    return folder / f"{SEGMENTS}/{segment:08d}.seg"


def is_own_file(shard: Path | str, folder: Path | str, name: str) -> bool:
    """Whether a file of this name is the shard's own; others may keep files there too."""
    if str(folder) == f"{shard}/{SEGMENTS}":
        return _SEGMENT_FILE.fullmatch(name) is not None
    return str(folder) == str(shard) and _SHARD_FILE.fullmatch(name) is not None


def manifest_name(generation: int) -> str:
    """The file name of a log."""
    return f"manifest-{generation:08d}.log"


def is_log(name: str) -> bool:
    """Whether a file of this name is a manifest log."""
    return _LOG.fullmatch(name) is not None


def reserve_of(capacity_bytes: int) -> int:
    """Metadata's share of a capacity: a 64th, within 1 and 64 MiB."""
    return max(limits.MIB, min(capacity_bytes // 64, 64 * limits.MIB))
