"""LMCache in-process over flashkv: its StorageManager over a restart.

Its multi-process server: test_lmcache_server.py, tests/process/test_lmcache_bench.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_stores import edit, segment_files
from store_support import ROOT

import flashkv

ENVIRONMENTS = Path(os.environ.get("FLASHKV_ENGINES") or ROOT / ".engines")
CHUNKS = 24
OPTIONS = {"segment_bytes": "4MiB", "free_floor_bytes": 0}

Scene = Callable[..., Any]


@pytest.fixture
def scene(run_engine: Callable[..., Any], store_path: Path) -> Scene:
    """Runs lmcache_storage.py and gives what it says."""

    def run(action: str, *, environment: dict[str, str] | None = None, **changes: Any) -> Any:
        given = {"action": action, "path": str(store_path), "settings": {"options": OPTIONS}}
        return run_engine(
            "lmcache", "lmcache_storage.py", json.dumps({**given, **changes}), **environment or {}
        )

    return run


def _options() -> flashkv.Options:
    return flashkv.Options(segment_bytes="4MiB", free_floor_bytes=0)


def test_the_example(store_path: Path, tmp_path: Path) -> None:
    python = ENVIRONMENTS / "lmcache" / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment for lmcache here: ./run test-engines makes it")
    done = subprocess.run(
        [str(python), str(ROOT / "examples" / "lmcache_storage.py"), str(store_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_TRACK_USAGE": "false"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    restored = re.findall(r"(\d+) of 2048 tokens restored", done.stdout)
    assert restored == ["0", "2048"]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"dtype": "float16", "heads": 1, "dimension": 96},
        {"mla": True, "heads": 1, "dimension": 576},
        {"dtype": "uint8"},
    ],
    ids=["gqa", "float16", "mla", "uint8"],
)
def test_chunks_come_back_after_a_restart(scene: Scene, form: dict[str, Any]) -> None:
    put = scene("put", **form)
    assert put["backend"] == "FlashKVBackend"
    assert put["stats"]["blocks"] == {"stored": CHUNKS}
    assert put["stats"]["opaque_reason"] == ""
    assert put["stats"]["events"] == {}
    got = scene("get", **form)
    assert got["right"] == list(range(CHUNKS))
    assert (got["present"], got["wrong"], got["absent"]) == (CHUNKS, [], [])
    assert got["stats"]["store"]["hit_blocks"] == CHUNKS
    assert got["memory_whole"]


def test_the_page_codec_knows_heads(scene: Scene) -> None:
    """Numbers like those of a model take less room: blocks are not opaque."""
    assert scene("put")["stats"]["store"]["compression"] > 1.2


def test_another_model_or_salt_finds_nothing(scene: Scene) -> None:
    scene("put")
    for changes in (
        {"settings": {"options": OPTIONS, "salt": "tenant"}},
        {"layers": 2},
        {"heads": 1, "dimension": 128},
    ):
        got = scene("get", **changes)
        assert got["present"] == 0
        assert got["absent"] == list(range(CHUNKS))


def test_a_damaged_segment_is_missed(scene: Scene, store_path: Path) -> None:
    scene("put")
    with edit(segment_files(store_path)[0]) as fd:
        for page in range(30, 400, 40):
            os.pwrite(fd, b"damage" * 8, page * 4096 + 100)
    got = scene("get")
    assert got["wrong"] == []
    assert got["absent"]
    assert sorted(got["right"] + got["absent"]) == list(range(CHUNKS))
    assert got["memory_whole"]
    scene("put")
    assert scene("get")["right"] == list(range(CHUNKS))


def test_a_locked_store_is_gone_without(scene: Scene, store_path: Path) -> None:
    geometry = flashkv.KVGeometry.opaque(4096)
    with flashkv.open(store_path, capacity="64MiB", geometry=geometry, options=_options()):
        put = scene("put")
        assert put["backend"] == "FlashKVBackend"
        assert "lock" in put["stats"]["no_store_reason"]
        got = scene("get")
    assert (got["present"], got["right"]) == (0, [])
    assert got["absent"] == list(range(CHUNKS))


def test_a_full_store_keeps_what_came_last(scene: Scene) -> None:
    scene("put", capacity="24MiB", chunks=600)
    got = scene("get", capacity="24MiB", chunks=600)
    assert got["wrong"] == []
    assert got["absent"]
    assert 599 in got["right"]


def test_chunks_of_another_form_are_not_stored(scene: Scene) -> None:
    put = scene("put", wrong_form=True)
    assert put["stats"]["events"] == {"form": CHUNKS}
    assert scene("get")["absent"] == list(range(CHUNKS))


def test_pins_hold_and_are_counted(scene: Scene) -> None:
    scene("put")
    seen = scene("pins")
    assert seen["found"] == [4, True]
    assert seen["leases"] == [2, 0]
    assert seen["removed"] == [False, False, True]
    assert not seen["there"]


def test_bad_settings_leave_the_engine_without_the_plugin(scene: Scene) -> None:
    """LMCache catches what a plugin's constructor raises, and logs it."""
    assert scene("put", settings={"capcity": 1})["backend"] == "NoneType"
