"""flashkv-bench peers: one byte of a stored block is changed on the disk.

Invariants
  - exactly one bit of one file changes, through an ordinary descriptor, synced and out of the page
    cache afterwards, so that whoever reads the file, however, sees it;
  - where the payload isn't found as it was put (compressed), the byte is one in the middle of what
    was written to the largest file: there is little else than payload in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np

WINDOW_BYTES: Final = 64 << 20
OVERLAP_BYTES: Final = 4096


def flip_payload(folder: Path, payload: bytes, distance: int) -> str:
    """Flips a bit `distance` bytes behind where `payload` lies. Tells where, and how it was found.

    Raises FileNotFoundError where the folder holds nothing.
    """
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
        reverse=True,
    )
    if not files or not files[0].stat().st_size:
        raise FileNotFoundError(f"nothing is stored in {folder}")
    for path in files:
        at = _find(path, payload)
        if at >= 0 and at + distance < path.stat().st_size:
            return f"{flip(path, at + distance)}, in a payload stored as it is"
    at = _middle_of_written(files[0])
    return f"{flip(files[0], at)}, in the middle of what was written"


def flip(path: Path, at: int) -> str:
    """Flips a bit of the byte at an offset. Tells the file's name and the offset."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([byte ^ 0x10]), at)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return f"{path.name} at byte {at}"


def _find(path: Path, payload: bytes) -> int:
    """Where the bytes lie, or -1; the file is read in windows that overlap."""
    begin = 0
    with path.open("rb") as file:
        while True:
            file.seek(begin)
            window = file.read(WINDOW_BYTES + OVERLAP_BYTES)
            at = window.find(payload)
            if at >= 0:
                return begin + at
            if len(window) <= WINDOW_BYTES:
                return -1
            begin += WINDOW_BYTES


def _middle_of_written(path: Path) -> int:
    """Of a file's pages that aren't all zero, the one in the middle; a byte in the midst of it."""
    page = 4096
    written: list[int] = []
    with path.open("rb") as file:
        begin = 0
        while window := file.read(WINDOW_BYTES):
            whole = len(window) // page * page
            pages = np.frombuffer(window, np.uint8, whole).reshape(-1, page)
            written.extend((begin // page + np.flatnonzero(pages.any(axis=1))).tolist())
            begin += len(window)
    middle = written[len(written) // 2] if written else 0
    return min(middle * page + page // 4, path.stat().st_size - 1)
