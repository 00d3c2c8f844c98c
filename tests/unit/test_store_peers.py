"""flashkv-bench peers: what is stored is compared, damage is seen, who can't start is named.

Nothing here judges a speed; peers whose packages aren't installed are skipped with the reason.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flashkv.tools import bench, peers_roster, peers_run, peers_worker
from flashkv.tools.bench_sets import BenchError
from flashkv.tools.measure import Measurement
from flashkv.tools.peers_blocks import TOKEN_BYTES, BlockSource, key_of, tokens_of
from flashkv.tools.peers_damage import flip_payload
from flashkv.tools.peers_protocol import Plan
from flashkv.tools.peers_roster import ROSTER, Entry
from flashkv.tools.peers_run import Outcome, PeersSettings, peers_steps, run_peers, verdict
from flashkv.tools.peers_summary import summary
from store_support import ROOT
from typer.testing import CliRunner

KIB256 = 256 << 10
PLAN = Plan("bf16", KIB256, 4, 10)
IN_PROCESS = ("files", "safetensors", "lmdb", "rocksdb", "flashkv-raw", "flashkv-lossless")
ENVIRONMENTS = Path(os.environ.get("FLASHKV_ENGINES") or ROOT / ".engines").resolve()
LIBRARIES = ENVIRONMENTS / peers_roster.LIBRARIES


@pytest.fixture(params=IN_PROCESS)
def worker(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> peers_worker.Worker:
    """What a peer's process holds, in this one."""
    entry = ROSTER[request.param]
    monkeypatch.syspath_prepend(str(LIBRARIES))
    if entry.package:
        try:
            importlib.import_module(entry.package)
        except ImportError:
            pytest.skip(f"{entry.package} is not installed: ./run bench-peers does it")
    return peers_worker.Worker(entry, tmp_path)


# ---- blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["opaque", "bf16"])
def test_a_block_is_known_by_its_number(kind: str) -> None:
    source = BlockSource(replace(PLAN, kind=kind))
    keys, blocks = source.batch(4, 3)
    assert keys == [key_of(4), key_of(5), key_of(6)]
    kept = blocks.copy()
    assert all(source.is_right(4 + i, kept[i]) for i in range(3))
    assert not source.is_right(8, kept[0]), "the same place of another batch"
    assert not source.is_right(5, kept[0])
    assert not source.is_right(4, kept[0][:-1])
    assert kept[0].tobytes().startswith(source.payload(4))
    kept[0][-1] ^= 1
    assert not source.is_right(4, kept[0])
    assert len({block.tobytes() for block in blocks[:, 8:]}) == 3


def test_blocks_are_whole_tokens() -> None:
    assert tokens_of(1 << 20) == 64
    for size in (TOKEN_BYTES, (1 << 20) + 1, 32 << 20):
        with pytest.raises(ValueError, match="must be a multiple"):
            tokens_of(size)


# ---- peers ---------------------------------------------------------------------------------------


def test_what_was_put_comes_back(worker: peers_worker.Worker) -> None:
    for kind in ("opaque", "bf16"):
        plan = replace(PLAN, kind=kind)
        done = worker.put(kind, plan, flush=True)
        assert done["bytes"] == 10 * KIB256
        assert done["seconds"] > 0
        worker.close(kind)
        got = worker.get(kind, plan)
        assert (got["right"], got["missing"], got["wrong"]) == (10, 0, 0)
        more = worker.check(kind, replace(plan, count=12))
        assert more == {"blocks": ["right"] * 10 + ["missing"] * 2, "raised": ""}
        worker.close(kind)


def test_damage_is_told_from_what_comes_back(worker: peers_worker.Worker) -> None:
    worker.put("damage", PLAN, flush=True)
    worker.close("damage")
    assert " at byte " in worker.damage("damage", PLAN, 5)["at"]
    seen = worker.check("damage", PLAN)
    checked = worker.entry.module == "peers_flashkv" or worker.entry.variant == "rocksdb"
    assert verdict(seen) == ("noticed" if checked else "wrong bytes")
    assert seen["blocks"].count("right") >= 4
    worker.close("damage")


def test_bytes_of_another_block_are_wrong(tmp_path: Path) -> None:
    worker = peers_worker.Worker(ROSTER["files"], tmp_path)
    worker.put("s", PLAN, flush=True)
    files = [tmp_path / "s" / key_of(number).hex() for number in (2, 6)]
    files[0].write_bytes(files[1].read_bytes())
    got = worker.get("s", PLAN)
    assert (got["right"], got["wrong"]) == (9, 1)
    worker.close("s")


def test_what_a_peer_raises_is_an_answer(tmp_path: Path) -> None:
    worker = peers_worker.Worker(ROSTER["files"], tmp_path)
    given = {"kind": "bf16", "block_bytes": KIB256, "batch": 4, "count": 4}
    command = {"do": "put", "store": "s", "plan": dict(given), "flush": True}
    assert worker.answer(dict(command))["bytes"] == 4 * KIB256
    (tmp_path / "s" / key_of(1).hex()).write_bytes(b"short")
    done = worker.answer({"do": "get", "store": "s", "plan": dict(given)})
    assert done == {"problem": "PeerError: a short read"}
    seen = worker.answer({"do": "check", "store": "s", "plan": dict(given)})
    assert seen == {"blocks": ["right", "raised", "right", "right"],
                    "raised": "PeerError: a short read"}  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        ("right right", "not reached"),
        ("right wrong missing", "wrong bytes"),
        ("right missing", "noticed"),
        ("missing missing", "noticed"),
        ("right raised", "noticed"),
        ("raised raised", "error"),
    ],
)
def test_verdicts(blocks: str, told: str) -> None:
    assert verdict({"blocks": blocks.split()}) == told


def test_one_bit_is_flipped(tmp_path: Path) -> None:
    content = np.zeros(3 << 12, np.uint8)
    content[5000:5064] = np.arange(64)
    (tmp_path / "large").write_bytes(content.tobytes())
    (tmp_path / "small").write_bytes(b"small")
    told = flip_payload(tmp_path, content[5000:5064].tobytes(), 100)
    assert told.startswith("large at byte 5100, in a payload")
    after = np.frombuffer((tmp_path / "large").read_bytes(), np.uint8)
    assert np.unpackbits(after ^ content).sum() == 1
    told = flip_payload(tmp_path, b"nowhere", 100)
    assert told.startswith("large at byte 5120, in the middle"), "of the page that isn't empty"
    with pytest.raises(FileNotFoundError, match="nothing is stored"):
        flip_payload(tmp_path / "large", b"", 0)


# ---- the run -------------------------------------------------------------------------------------


def settings(folder: Path, *peers: str, **changes: Any) -> PeersSettings:
    given: dict[str, Any] = {
        "environments": folder / "environments",
        "size_bytes": len(peers) * 4 * KIB256,
        "rounds": 2,
        "batch": 4,
        "block_bytes": (KIB256,),
        "kinds": ("bf16",),
        "peers": peers,
    }
    return PeersSettings(folder, **{**given, **changes})


def test_a_run(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: two that can be measured, one that can't be started, one that isn't here."""
    monkeypatch.setitem(ROSTER, "broken", Entry("peers_of_nobody", package="nobody"))
    peers = ("files", "flashkv-lossless", "broken", "vllm-fs")
    given = settings(disk_path, *peers, seed=4)
    (disk_path / "environments").mkdir()
    (disk_path / "environments" / "vllm.log").write_text("collecting\nERROR: no vllm for you\n")
    steps: list[str] = []
    figures = run_peers(given, steps.append)
    assert len(steps) == peers_steps(given)
    assert figures["failed"] == {}
    assert figures["left_out"]["vllm-fs"] == ("vllm could not be installed: ERROR: no vllm for you")
    assert "No module named" in figures["left_out"]["broken"]
    assert "./run bench-peers" in figures["left_out"]["broken"]
    (case,) = figures["figures"]
    assert case == "bf16 0.25 MiB"
    assert set(figures["figures"][case]) == {"files", "flashkv-lossless"}
    for name in ("files", "flashkv-lossless"):
        row = figures["figures"][case][name]
        assert row["put_mb_per_s"] > 0
        assert row["get_cpu_s_per_gb"] >= 0
        assert row["disk_bytes"] > 0
        assert figures["spread"][case][name]["get_mb_per_s"]["count"] == 2
        back = figures["restart"][name]
        assert (back["closed"], back["killed_after_flush"], back["blocks"]) == (4, 4, 4)
    assert figures["damage"]["files"]["verdict"] == "wrong bytes"
    assert figures["damage"]["flashkv-lossless"]["verdict"] == "noticed"
    orders = [one["peers"] for one in figures["order"]]
    assert len(orders) == 4
    assert len({tuple(order) for order in orders}) > 1
    assert [path.name for path in disk_path.iterdir()] == ["environments"]


def test_a_peer_that_fails_is_named(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that gives out other bytes in a round has no figures from there on."""

    def spoiled(self: Any, name: str, case: str, plan: Plan) -> None:
        if name == "files":
            for path in (self._kept(name) / case).iterdir():
                path.write_bytes(bytes(plan.block_bytes))
        original(self, name, case, plan)

    original = peers_run._Run._get
    monkeypatch.setattr(peers_run._Run, "_get", spoiled)
    figures = run_peers(settings(disk_path, "files", "flashkv-raw"), lambda _: None)
    assert "4 came with other bytes" in figures["failed"]["files"]
    assert list(figures["figures"]["bf16 0.25 MiB"]) == ["flashkv-raw"]
    assert "files" not in figures["damage"]
    assert figures["damage"]["flashkv-raw"]["verdict"] == "noticed"


def test_a_process_that_dies_spoils_no_other(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Any, name: str, case: str, plan: Plan) -> None:
        if name == "files":
            self._sessions[name].kill()
        original(self, name, case, plan)

    original = peers_run._Run._put
    monkeypatch.setattr(peers_run._Run, "_put", killed)
    figures = run_peers(settings(disk_path, "files", "flashkv-raw", rounds=1), lambda _: None)
    assert figures["failed"] == {"files": "bf16 0.25 MiB: gave no answer"}
    assert list(figures["figures"]["bf16 0.25 MiB"]) == ["flashkv-raw"]
    assert figures["restart"]["flashkv-raw"]["closed"] == 4


def test_nobody_can_be_started(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no environment vllm here"):
        run_peers(settings(tmp_path, "vllm-fs"), lambda _: None)
    assert not list(tmp_path.iterdir())


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="less than a block"):
        settings(tmp_path, "files", size_bytes=KIB256 - 1).plans()
    with pytest.raises(BenchError, match="must be a multiple"):
        settings(tmp_path, "files", block_bytes=(1000,)).plans()
    with pytest.raises(BenchError, match="are free here"):
        run_peers(settings(tmp_path, "files", size_bytes=1 << 60), lambda _: None)


def test_summary_takes_medians() -> None:
    case, outcome = "bf16 1 MiB", Outcome()
    outcome.puts = {case: {"p": [Measurement(10**6, 1, s, 0.002) for s in (1.0, 4.0, 2.0)]}}
    outcome.gets = {case: {"p": [Measurement(10**6, 1, s, 0.001) for s in (0.5, 0.5, 0.1)]}}
    outcome.disk_bytes = {case: {"p": [2 << 20, 2 << 20, 2 << 20]}}
    figures = summary(outcome, {case: Plan("bf16", 1 << 20, 1, 1)})
    row = figures["figures"][case]["p"]
    assert row["put_mb_per_s"] == pytest.approx(0.5)
    assert row["get_mb_per_s"] == pytest.approx(2)
    assert row["put_cpu_s_per_gb"] == pytest.approx(2)
    assert row["disk_ratio"] == 2
    assert figures["samples"][case]["p"]["put_mb_per_s"] == pytest.approx([1, 0.25, 0.5])


def test_the_command(disk_path: Path) -> None:
    file = disk_path.parent / "peers.json"
    arguments = ["peers", "--peer", "files", "--peer", "sglang-file", "--kind", "opaque"]
    arguments += ["--size", "1MiB", "--block", "256KiB", "--rounds", "1", "--batch", "2"]
    arguments += ["--engines", str(disk_path.parent / "no"), "--path", str(disk_path)]
    done = CliRunner().invoke(bench.app, [*arguments, "--seed", "9", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "seed 9" in done.output
    assert "sglang-file left out: no environment sglang here" in done.output
    figures = json.loads(file.read_text())
    assert figures["settings"]["seed"] == 9
    assert figures["settings"]["cases"]["opaque 0.25 MiB"]["count"] == 2
    assert not list(disk_path.iterdir())


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--peer", "nobody"], "--peer is 'nobody'"),
        (["--kind", "text"], "--kind is 'text'"),
        (["--block", "1000"], "must be a multiple"),
        (["--size", "lots"], "--size is no size"),
    ],
)
def test_options_are_checked(option: list[str], told: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(bench.app, ["peers", *option, "--path", str(tmp_path)])
    assert done.exit_code == 1
    assert told in " ".join(done.output.split())
