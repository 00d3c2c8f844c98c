"""The demo's verdict: whatever differs between the two processes ends it with status 1."""

from __future__ import annotations

import json

import pytest
from flashkv.tools import cli
from flashkv.tools import demo as demo_module
from flashkv.tools.demo_protocol import DemoError, run_worker
from typer.testing import CliRunner

STATS = {
    "accepted_bytes": 1000,
    "record_bytes_written": 800,
    "total_bytes_written": 900,
    "compression": 1.25,
    "wa_cleaning": 1.0,
    "wa_total": 1.125,
    "backend": "threads",
    "direct_io": True,
    "codec": "lossless",
}
PROMPT = list(range(300))
RESULTS = {
    "put-sample": {"ok": True, "blocks": 2, "digest": "d", "offered_bytes": 1000, "stats": STATS},
    "get-sample": {"ok": True, "found": 2, "digest": "d", "stats": STATS},
    "prepare": {"prompt": PROMPT},
    "without-store": {
        "ok": True,
        "blocks": 3,
        "digest": "d",
        "offered_bytes": 1000,
        "ttft_s": 2.0,
        "save_s": 0.1,
        "tokens": [1, 2, 3],
        "text": "one two three",
        "dtype": "float32",
        "stats": STATS,
    },
    "with-store": {
        "restored": 192,
        "digest": "d",
        "ttft_s": 0.5,
        "open_s": 0.01,
        "restore_s": 0.1,
        "tokens": [1, 2, 3],
        "text": "one two three",
        "stats": STATS,
    },
}


@pytest.fixture
def results(monkeypatch):
    changed = {role: dict(result) for role, result in RESULTS.items()}
    monkeypatch.setattr(demo_module, "run_worker", lambda role, *_: changed[role])
    return changed


def run(*arguments):
    return CliRunner().invoke(cli.app, ["demo", *arguments])


def test_equal_is_success(results, tmp_path):
    figures = tmp_path / "figures.json"
    done = run("--json", str(figures))
    assert done.exit_code == 0, done.output
    report = json.loads(figures.read_text("utf-8"))
    assert report["speedup"] == 4.0
    assert report["restored_tokens"] == 192
    assert report["compression"] == 1.25
    assert run("--fast").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "role", "field", "value"),
    [
        (["--fast"], "put-sample", "ok", False),
        (["--fast"], "get-sample", "ok", False),
        (["--fast"], "get-sample", "found", 1),
        (["--fast"], "get-sample", "digest", "other"),
        ([], "without-store", "ok", False),
        ([], "with-store", "restored", 128),
        ([], "with-store", "digest", "other"),
        ([], "with-store", "tokens", [1, 2, 4]),
    ],
)
def test_any_difference_is_failure(results, arguments, role, field, value):
    results[role][field] = value
    done = run(*arguments)
    assert done.exit_code == 1
    assert "NO" in done.output


def test_a_short_document_is_refused(results):
    results["prepare"]["prompt"] = PROMPT[:100]
    done = run()
    assert done.exit_code == 1
    assert "too short" in done.output


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(DemoError, match="no-such-role"):
        run_worker("no-such-role", {}, lambda _: None, lambda _: None)
