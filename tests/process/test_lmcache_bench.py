"""LMCache's own `lmcache bench l2` over flashkv: what its server does, with every byte verified.

LMCache runs on this interpreter's torch, from a folder that ./run test fills where it can
(.engines/lmcache-bench). Without it the tests skip.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from store_support import ROOT

import flashkv

PACKAGES = Path(os.environ.get("FLASHKV_ENGINES") or ROOT / ".engines") / "lmcache-bench"
STUBS = ROOT / "tests" / "engines" / "lmcache_stubs"

pytestmark = pytest.mark.slow


def require_lmcache() -> None:
    if not (PACKAGES / ".flashkv-engine").exists():
        pytest.skip(f"no LMCache in {PACKAGES}: ./run test fetches it where it can")
    compiled = f"lmcache_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not (PACKAGES / "lmcache" / compiled).exists():
        pytest.skip(f"the LMCache in {PACKAGES} is another Python's")


def bench(adapter: dict[str, Any], tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Output and figures of `lmcache bench l2`, store and load verified."""
    require_lmcache()
    command = [
        sys.executable, "-m", "lmcache.cli.main", "bench", "l2",
        "--l2-adapter", json.dumps(adapter),
        "--num-keys", "16", "--rounds", "3", "--data-size-kb", "1024", "--in-flight", "2",
        "--l1-align-bytes", "4096", "--no-skip-verify", "--lookup-max-hit-rate", "0.5",
        "--format", "json", *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, PACKAGES, STUBS))),
            "OMP_NUM_THREADS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
        },
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    match = re.search(r"^\{.*^\}", done.stdout, re.DOTALL | re.MULTILINE)
    assert match, output[-6000:]
    sections = json.loads(match.group())["metrics"].values()
    return output, {one["operation"]: one for one in sections if "operation" in one}


def native_plugin(path: Path) -> dict[str, Any]:
    return {
        "type": "native_plugin",
        "module_path": "flashkv.connectors.lmcache",
        "class_name": "FlashKVClient",
        "adapter_params": {"path": str(path), "capacity": "2GiB"},
    }


def test_bench_l2_verifies_and_a_restart_loads(store_path: Path, tmp_path: Path) -> None:
    output, figures = bench(native_plugin(store_path), tmp_path)
    assert "All 32 keys data verified OK" in output
    assert figures["Store"]["total_success"] == figures["Store"]["total_keys"] == 96
    assert figures["Load"]["total_success"] == figures["Load"]["total_keys"] == 96
    assert figures["Lookup"]["total_success"] == 48  # every other key was never stored
    _, figures = bench(native_plugin(store_path), tmp_path, "--only", "load")
    assert figures["Load"]["total_success"] == 96


def test_bench_l2_goes_on_with_a_locked_store(store_path: Path, tmp_path: Path) -> None:
    geometry = flashkv.KVGeometry.opaque(4096)
    options = flashkv.Options(segment_bytes="4MiB", free_floor_bytes=0)
    with flashkv.open(store_path, capacity="64MiB", geometry=geometry, options=options):
        output, figures = bench(native_plugin(store_path), tmp_path, "--skip-verify")
    assert output.count("goes on without the flashkv store") == 1
    assert [figures[name]["total_success"] for name in ("Store", "Lookup", "Load")] == [0, 0, 0]
