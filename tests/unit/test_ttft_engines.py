"""flashkv-bench ttft with stand-ins for engines: the order of questions, what counts as an answer,
and that nothing is left of an engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from flashkv.tools import bench, bench_ttft, ttft_engines, ttft_environments, ttft_session
from flashkv.tools.demo_protocol import DemoError
from flashkv.tools.ttft_engines import EngineSettings, Measured, measure_engine
from flashkv.tools.ttft_environments import Engine
from store_support import ROOT, file_system
from typer.testing import CliRunner

FAKE = Engine(
    worker="none",
    environment="fake",
    sides={"alone": ("computed",), "flashkv": ("ours",), "own": ("theirs", "host memory")},
    ours=("ours",),
    own_tier="theirs",
    host_memory="its memory",
)
ENGINES = {"fake": FAKE}


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """A folder with the stand-in's environment, where the bench looks for its engines."""
    monkeypatch.setattr(ttft_engines, "ENGINES", ENGINES)
    monkeypatch.setattr(ttft_environments, "ENGINES", ENGINES)
    monkeypatch.setattr(bench_ttft, "ENGINES", ENGINES)
    monkeypatch.setattr(bench_ttft, "ALL", ("transformers", *ENGINES))
    monkeypatch.setattr(bench, "ALL", ("transformers", *ENGINES))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    folder = tmp_path / "environments"
    (folder / "fake" / "bin").mkdir(parents=True)
    (folder / "fake" / "lib" / "python3.0" / "site-packages").mkdir(parents=True)
    python = folder / "fake" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/fake_engine.py" "$3"\n')
    python.chmod(0o755)
    return folder


@pytest.fixture
def settings(environments, disk_path):
    return EngineSettings(
        folder=disk_path,
        model=disk_path,
        text=list(range(300)),
        tokens=(512, 256),
        passes=2,
        threads=1,
        dtype="float32",
        bytes_per_token=2048,
        environments=environments,
        on_device=file_system(disk_path).startswith(("ext", "xfs", "btrfs")),
    )


def log_lines(environments, *words):
    """Lines of the stand-ins' log that begin with a word; all that are questions without one."""
    lines = (environments.parent / "log").read_text().splitlines()
    return [line for line in lines if line.split()[0] in words]


def is_running(process: int) -> bool:
    """False for one that only waits for its parent to collect it."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def check_nothing_is_left(environments, folder):
    for line in log_lines(environments, "child"):
        assert not is_running(int(line.split()[1])), "a process was left"
    for line in log_lines(environments, "shared"):
        assert not Path(line.split()[1]).exists(), "shared memory was left"
    assert list(folder.iterdir()) == []


def measure(settings):
    return measure_engine("fake", settings, lambda _: None, lambda _: None)


def test_sources_are_asked_in_turn_and_back(settings, environments):
    measured = measure(settings)
    turn = ["ours", "theirs", "host memory", "host memory", "theirs", "ours"]
    assert log_lines(environments, "224", "settle", "480") == [
        line
        for length in (224, 480)
        for line in (
            f"{length} computed",
            *(f"{length} fill", "settle") * 2,
            *(f"{length} {source}" for source in turn),
        )
    ]
    assert measured.samples["256"] == {
        "computed": [8.0 * 224],
        "ours": [2.0 * 224] * 2,
        "theirs": [4.0 * 224] * 2,
        "host memory": [1.0 * 224] * 2,
    }
    assert measured.first_token == {"256": 7, "512": 7}
    assert measured.facts["own_tier"] == "theirs"
    assert measured.facts["prompt_tokens"] == {"256": 224, "512": 480}
    check_nothing_is_left(environments, settings.folder)


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("no start", "can't start"),
        ("crash", "a library went down"),
        ("other token", "first token 8"),
        ("lost block", "128 tokens restored, 192 expected"),
        ("from memory", "ours: 0 bytes were read"),
        ("from disk", "host memory: "),
        ("hang", "gave no answer"),
    ],
)
def test_what_is_no_answer(settings, environments, monkeypatch, fault, word):
    if fault.startswith("from") and not settings.on_device:
        pytest.skip("no device below this folder whose reads are counted")
    monkeypatch.setenv("FAKE_ENGINE", fault)
    if fault == "hang":
        monkeypatch.setattr(ttft_session, "ANSWER_S", 5.0)
        monkeypatch.setattr(ttft_session, "END_S", 0.5)
    with pytest.raises(DemoError, match=word):
        measure(settings)
    if fault not in ("no start", "crash"):
        check_nothing_is_left(environments, settings.folder)


def test_an_engine_that_does_not_end_is_ended(settings, environments, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", "stubborn")
    monkeypatch.setattr(ttft_session, "END_S", 0.5)
    measure(settings)
    check_nothing_is_left(environments, settings.folder)


def test_an_ended_engine_has_given_its_memory_back(tmp_path):
    """Its workers, too, which the kernel takes down after the process that started them."""
    worker = "import time; kept = bytearray(1 << 29); print(flush=True); time.sleep(1000)"
    source = (
        "import subprocess, sys\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        'print(\'{"ready": {"worker": %d}}\' % worker.pid, flush=True)\n'
        "sys.stdin.read()\n"
    )
    session = ttft_session.Session("fake", [sys.executable, "-c", source], {})
    worker_id = session.ready()["worker"]
    session.end()
    assert not is_running(worker_id)


def test_an_engines_process_sees_this_flashkv_and_no_other_package(tmp_path):
    ttft_environments.linked_flashkv(tmp_path / "links")
    assert [item.name for item in (tmp_path / "links").iterdir()] == ["flashkv"]
    source = "import flashkv.tools.ttft_protocol as p, os; print(os.path.realpath(p.__file__))"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "links")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).parent == Path(ttft_environments.__file__).resolve().parent


# ---- what becomes of the figures ----


def test_ratios_are_made_of_neighbours(environments):
    figures = {key: {} for key in (
        "engines", "first_token", "ttft_s", "ttft_samples_s", "flashkv_to_own_tier",
        "flashkv_to_host_memory",
    )}  # fmt: skip
    samples = {
        "256": {"computed": [9.0], "ours": [1.0, 3.0], "theirs": [2.0, 2.0], "host memory": [1, 1]}
    }
    bench_ttft._add_measured(figures, "fake", Measured(samples, {"256": 7}, {"version": "1"}))
    assert figures["ttft_s"]["fake"]["256"]["ours"] == 2.0
    ratio = figures["flashkv_to_own_tier"]["fake"]["256"]["ours"]
    assert (ratio["min"], ratio["median"], ratio["max"]) == (0.5, 1.0, 1.5)
    assert figures["flashkv_to_host_memory"]["fake"]["256"]["ours"]["median"] == 2.0


def test_a_computed_figure_of_the_same_engine_serves_both(environments, monkeypatch):
    monkeypatch.setitem(ENGINES, "around", Engine(**{**vars(FAKE), "computed_by": "fake"}))
    figures = {"ttft_samples_s": {"fake": {"256": {"computed": [9.0]}}}}
    figures |= {key: {} for key in (
        "engines", "first_token", "ttft_s", "flashkv_to_own_tier", "flashkv_to_host_memory",
    )}  # fmt: skip
    samples = {"256": {"ours": [1.0], "theirs": [2.0], "host memory": [1.0]}}
    bench_ttft._add_measured(figures, "around", Measured(samples, {"256": 7}, {}))
    assert list(figures["ttft_s"]["around"]["256"]) == ["computed", "ours", "theirs", "host memory"]
    assert figures["ttft_s"]["around"]["256"]["computed"] == 9.0


@pytest.fixture
def bench_run(environments, disk_path, tmp_path):
    """Runs the command on a tiny model and gives its result and the JSON."""
    pytest.importorskip("transformers")
    from tiny_llama import make_model

    make_model().save_pretrained(tmp_path / "model")

    def run(*arguments):
        file = tmp_path / "out.json"
        given = ["ttft", "--model", str(tmp_path / "model"), "--tokens", "256", "--passes", "2"]
        given += ["--no-break-even", "--threads", "1", "--path", str(disk_path)]
        given += ["--json", str(file), "--engines", str(environments), *arguments]
        done = CliRunner().invoke(bench.app, given)
        assert list(disk_path.iterdir()) == []
        return done, json.loads(file.read_text()) if file.exists() else {}

    return run


@pytest.mark.slow
def test_engines_that_are_here_are_measured(bench_run):
    done, figures = bench_run("--engine", "fake")
    assert done.exit_code == 0, done.output
    assert figures["left_out"] == {"transformers": "not asked for"}
    assert figures["failed"] == {}
    assert figures["ttft_s"]["fake"]["256"]["ours"] == 2.0 * 224
    assert figures["flashkv_to_own_tier"]["fake"]["256"]["ours"]["median"] == 0.5
    assert figures["flashkv_to_host_memory"]["fake"]["256"]["ours"]["median"] == 2.0
    assert figures["engines"]["fake"]["dtype"] == "float32"
    assert "ours / theirs" in done.output


@pytest.mark.slow
def test_an_engine_that_fails_spoils_no_other(bench_run, monkeypatch):
    monkeypatch.setenv("FAKE_ENGINE", "other token")
    done, figures = bench_run()
    assert done.exit_code == 1
    assert "first token 8" in figures["failed"]["fake"]
    assert "first token 8" in " ".join(done.output.split())
    assert list(figures["ttft_s"]) == ["transformers"]


@pytest.mark.slow
def test_an_engine_that_is_missing_is_named(bench_run, environments):
    (environments / "fake" / "bin" / "python").unlink()
    done, figures = bench_run()
    assert done.exit_code == 0, done.output
    assert "./run test-engines" in figures["left_out"]["fake"]
    assert "left out: fake: no environment" in done.output
    assert list(figures["ttft_s"]) == ["transformers"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--engine", "other"], "transformers, fake"), (["--engine-dtype", "int4"], "float32")],
)
def test_engines_that_are_none(bench_run, arguments, word):
    done, _ = bench_run(*arguments)
    assert done.exit_code == 1
    assert word in " ".join(done.output.split())
