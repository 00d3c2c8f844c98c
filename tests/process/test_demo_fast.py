"""`flashkv demo --fast`: what one process stored, a new one reads; misuse ends non-zero."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 120


def flashkv(*arguments):
    command = [sys.executable, "-m", "flashkv.tools.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_demo_fast(tmp_path, monkeypatch, backend):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("FLASHKV_BACKEND", backend)
    figures = tmp_path / "figures.json"
    done = flashkv("demo", "--fast", "--json", figures)
    if backend == "io_uring" and "BackendError" in done.stdout:
        pytest.skip("no io_uring here")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(figures.read_text(encoding="utf-8"))
    assert all(report["checks"].values())
    assert report["backend"] == backend
    assert report["blocks"] == 16
    assert report["offered_bytes"] == 16 * 64 * 4 * 2 * 3 * 64 * 2
    assert report["compression"] > 1.2
    assert 1.0 <= report["wa_total"] < 2.0
    left = [entry.name for entry in tmp_path.iterdir()]
    assert left == ["figures.json"]


def test_demo_keeps_a_named_store_and_runs_again_on_it(tmp_path):
    store = tmp_path / "store"
    assert flashkv("demo", "--fast", "--store", store).returncode == 0
    done = flashkv("demo", "--fast", "--store", store)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there already" in done.stdout


def test_demo_on_a_file_says_so(tmp_path):
    path = tmp_path / "file"
    path.write_text("something else", encoding="utf-8")
    done = flashkv("demo", "--fast", "--store", path)
    assert done.returncode == 1
    assert "NotAStoreError" in done.stdout
    assert path.read_text(encoding="utf-8") == "something else"


def test_demo_names_a_wrong_option():
    done = flashkv("demo", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_package_carries_its_data():
    import flashkv.data

    assert Path(flashkv.data.SAMPLE_PATH).stat().st_size < 5_000_000
    assert len(flashkv.data.load_document()) > 10_000
