"""The examples that need no engine of an environment of their own run, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from store_support import ROOT

pytest.importorskip("torch")


def run(name: str, *arguments: str) -> list[int]:
    """Tokens that each of an example's runs restored."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(count) for count in re.findall(r"(\d+) of \d+ tokens restored", done.stdout)]


def test_embed_in_your_engine(store_path: Path) -> None:
    assert run("embed_in_your_engine.py", str(store_path)) == [0, 2944]
    assert run("embed_in_your_engine.py", str(store_path)) == [2944, 2944]


def test_transformers_prefix(store_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tiny_llama import make_model

    make_model().save_pretrained(tmp_path / "model")
    assert run("transformers_prefix.py", str(tmp_path / "model"), str(store_path)) == [0, 1984]
