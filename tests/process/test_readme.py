"""What README shows works as it stands there, and what it links to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

AFTERWARDS = """
assert found == 4
print(store.stats().disk_bytes >> 20)
store.close()
"""


def test_the_embed_example_runs(tmp_path):
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    done = subprocess.run(
        [sys.executable, "-c", example + AFTERWARDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"that is {done.stdout.strip()} MiB" in README, "what a fresh store takes"


def test_lines_fit_a_narrow_screen():
    assert not [line for line in README.splitlines() if len(line) > 120]


def test_links_lead_to_files():
    missing = [
        target
        for target in re.findall(r"\]\(([^)#]+)\)", README)
        if "://" not in target and not (ROOT / target).exists()
    ]
    assert not missing


def test_jobs_are_those_of_run():
    script = (ROOT / "run").read_text(encoding="utf-8")
    for job in set(re.findall(r"\./run ([a-z]+)", README)):
        assert re.search(rf"^    {job}\b", script, re.MULTILINE), job
