"""flashkv-bench peers: which peers there are, and in which environment each runs.

Invariants
  - a peer's process finds its own packages and this flashkv; what the bench itself runs in counts
    only for the peers that have no environment of their own;
  - nothing is imported to tell that an environment is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .ttft_environments import ENGINES, variables

LIBRARIES: Final = "peers"
"""Folder beside the environments, with packages for the interpreter of the bench itself."""


@dataclass(frozen=True)
class Entry:
    """How a peer is made.

    module       of flashkv.tools; its make(variant) gives the peer.
    environment  whose interpreter runs it; "": the bench's own.
    package      that pip installs for it into LIBRARIES.
    """

    module: str
    variant: str = ""
    environment: str = ""
    package: str = ""


ROSTER: Final[dict[str, Entry]] = {
    "files": Entry("peers_files", "plain"),
    "safetensors": Entry("peers_files", "safetensors", package="safetensors"),
    "lmdb": Entry("peers_databases", "lmdb", package="lmdb"),
    "rocksdb": Entry("peers_databases", "rocksdb", package="rocksdict"),
    "lmcache-raw_block-posix": Entry("peers_lmcache", "posix", "lmcache"),
    "lmcache-raw_block-io_uring": Entry("peers_lmcache", "io_uring", "lmcache"),
    "lmcache-fs_native": Entry("peers_lmcache", "fs_native", "lmcache"),
    "lmcache-local_disk": Entry("peers_lmcache", "local_disk", "lmcache"),
    "sglang-file": Entry("peers_sglang", "", "sglang"),
    "vllm-fs": Entry("peers_vllm", "", "vllm"),
    "flashkv-raw": Entry("peers_flashkv", "raw"),
    "flashkv-lossless": Entry("peers_flashkv", "lossless"),
}


def why_not(name: str, environments: Path) -> str:
    """Why a peer can't be started here, as far as files tell; empty where they don't."""
    environment = ROSTER[name].environment
    if not environment:
        return ""
    said = _last_line(environments / f"{environment}.log")
    if said:
        return f"{environment} could not be installed: {said}"
    if not (environments / environment / "bin" / "python").exists():
        return f"no environment {environment} here: ./run bench-peers makes it"
    return ""


def hint(name: str, environments: Path) -> str:
    """For a peer of the bench's own environment that could not be started: what to do, or why."""
    package = ROSTER[name].package
    if not package:
        return ""
    said = _last_line(environments / f"{LIBRARIES}-{package}.log")
    return f" (installing it: {said})" if said else " (./run bench-peers installs it)"


def _last_line(log: Path) -> str:
    """Of the log that an installation left which failed."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def command(name: str, settings: Path, environments: Path) -> list[str]:
    """Of a peer's process."""
    environment = ROSTER[name].environment
    python = environments / environment / "bin" / "python" if environment else sys.executable
    return [str(python), "-m", "flashkv.tools.peers_worker", str(settings)]


def process_variables(name: str, links: Path, environments: Path) -> Mapping[str, str]:
    """Of a peer's process; links: a folder with this flashkv and nothing else."""
    environment = ROSTER[name].environment
    if environment in ENGINES:
        return variables(ENGINES[environment], links, 1)
    path = [str(links)]
    if not environment:
        path.append(str((environments / LIBRARIES).resolve()))
    return {
        "PYTHONPATH": os.pathsep.join(path),
        # Started in a source tree, Python would take flashkv from there, which has no tools.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
