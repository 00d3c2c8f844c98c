"""flashkv-bench ttft with the real engines, on a tiny model: every source gives the first token
that computing gives, restores what it should, and from where it should. No speed is judged.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from flashkv.tools import bench
from flashkv.tools.ttft_environments import ENGINES, why_not
from store_support import ROOT
from typer.testing import CliRunner

ENVIRONMENTS = Path(os.environ.get("FLASHKV_ENGINES") or ROOT / ".engines")


@pytest.mark.parametrize("engine", list(ENGINES))
def test_every_source_is_timed(engine: str, tiny_model: Path, disk_path: Path) -> None:
    if reason := why_not(engine, ENVIRONMENTS):
        pytest.skip(reason)
    file = disk_path.parent / "out.json"
    arguments = ["ttft", "--engine", engine, "--engines", str(ENVIRONMENTS)]
    arguments += ["--model", str(tiny_model), "--tokens", "2048,1024", "--passes", "2"]
    arguments += ["--threads", "1", "--no-break-even", "--path", str(disk_path)]
    done = CliRunner().invoke(bench.app, [*arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    figures = json.loads(file.read_text())
    sources = {source for side in ENGINES[engine].sides.values() for source in side}
    for tokens in ("1024", "2048"):
        samples = figures["ttft_samples_s"][engine][tokens]
        assert set(samples) == sources
        for source, seconds in samples.items():
            assert len(seconds) == (1 if source == "computed" else 2)
            assert min(seconds) > 0
        for ours in ENGINES[engine].ours:
            assert figures["flashkv_to_own_tier"][engine][tokens][ours]["count"] == 2
    assert figures["engines"][engine]["prompt_tokens"] == {"1024": 992, "2048": 2016}
    assert list(disk_path.iterdir()) == []
