"""flashkv-fsck: the command, its exit statuses and words; stores in order stay as they are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.fsck import CLEAN, FAILED, LEFT, MENDED, app, check, repair
from fsck_support import (
    ALIVE,
    Cut,
    access_times,
    age,
    build,
    copy,
    crashed,
    evicting,
    flip,
    held,
    logs,
    make_cut,
    segments,
    shard,
    snapshot,
    superblocks,
)
from small_stores import GEOMETRY, IDENTITY, make, names, payload, start_child
from store_support import file_system
from typer.testing import CliRunner

from flashkv.errors import LockedError, SuperblockError


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fsck") / "store")


@pytest.fixture
def store(template: Path, disk_path: Path) -> Path:
    return copy(template, disk_path / "store")


def run(*arguments: object) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of flashkv-fsck, in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """flashkv-fsck as a process of its own."""
    script = "from flashkv.tools.fsck import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


# ---- stores in order ----------------------------------------------------------------------------


def _foreign(path: Path) -> None:
    (path / "README.txt").write_text("somebody's")
    (path / "folder").mkdir()
    (path / "folder" / "file").write_bytes(bytes(5000))
    (shard(path) / "notes").write_text("more")
    (shard(path) / "segments" / "1.seg").write_bytes(b"not ours")
    (shard(path) / "link").symlink_to("nowhere")


def _torn_log(path: Path) -> None:
    log = logs(path)[-1]
    log.write_bytes(log.read_bytes()[:-7])


def _lost_sector(path: Path) -> None:
    """The last append was longer than a sector, of which the first was never written."""
    with make(path) as store:
        namespace = store.namespace(IDENTITY)
        assert namespace.put(names(200, "gone"), payload(9, 200)).all_ok
        store.flush()
        before = logs(path)[-1].stat().st_size
        namespace.delete(names(200, "gone"))
    log = logs(path)[-1]
    data = bytearray(log.read_bytes())
    assert len(data) - before > 6000
    data[before : before // 512 * 512 + 1024] = bytes(before // 512 * 512 + 1024 - before)
    log.write_bytes(data)


def _log_begun(path: Path) -> None:
    (shard(path) / "manifest.new").write_bytes(logs(path)[-1].read_bytes()[:100])


def _old_log(path: Path) -> None:
    shutil.copyfile(logs(path)[-1], shard(path) / "manifest-00000001.log")


def _log_renamed(path: Path) -> None:
    """The next log is there, no superblock names it yet."""
    _old_log(path)
    number = int(logs(path)[-1].stem.split("-")[1]) + 1
    (shard(path) / "manifest-00000001.log").rename(shard(path) / f"manifest-{number:08d}.log")


def _new_segment_file(path: Path) -> None:
    (shard(path) / "segments" / "00000003.seg").touch()


def _reopened(path: Path) -> None:
    make(path).close()


CLEAN_STATES: dict[str, Callable[[Path], None]] = {
    "closed": lambda _path: None,
    "reopened": _reopened,
    "crashed": crashed,
    "foreign files": _foreign,
    "log torn": _torn_log,
    "log torn, the first sector lost": _lost_sector,
    "log begun": _log_begun,
    "log left over": _old_log,
    "log renamed": _log_renamed,
    "segment file made": _new_segment_file,
}


def stays_as_it_is(path: Path) -> None:
    """Every way of asking changes nothing and answers 0."""
    before = snapshot(path)
    for how in ([], ["--json"], ["--repair"], ["--repair", "--dry-run"], ["--repair", "--json"]):
        status, text, error = run(path, *how)
        assert status == CLEAN, (how, text, error)
        assert snapshot(path) == before, how
        if "--json" in how:
            facts = json.loads(text)
            assert facts["status"] == CLEAN
            assert {finding["kind"] for finding in facts["findings"]} <= {"note", "unfinished"}
        else:
            assert text.splitlines()[-1].startswith("no damage")


@pytest.mark.parametrize("state", CLEAN_STATES)
def test_a_store_in_order_stays_as_it_is(store: Path, state: str) -> None:
    CLEAN_STATES[state](store)
    stays_as_it_is(store)


def test_a_new_store_and_one_that_used_its_space_again(disk_path: Path) -> None:
    make(disk_path / "new").close()
    stays_as_it_is(disk_path / "new")
    evicting(disk_path / "evicting")
    stays_as_it_is(disk_path / "evicting")


@pytest.mark.parametrize("torn", [0, 512])
def test_a_store_whose_making_was_cut_off(disk_path: Path, torn: int) -> None:
    """Wherever the power goes, what is left is no damage, and the next open makes the store."""
    for count in range(100):
        path = disk_path / f"store{count}"
        went = make_cut(path, Cut(count, torn=torn))
        if shard(path).exists():
            before = snapshot(path)
            for act in (check, repair):
                outcome = act(path)
                assert outcome.status == CLEAN, (count, outcome.findings)
            assert snapshot(path) == before, count
        make(path, capacity=48 << 20, geometry=GEOMETRY).close()
        assert check(path).findings == []
        if not went:
            assert count > 15
            return
    pytest.fail("it never came to an end")


def test_access_times_stay(store: Path) -> None:
    if file_system(store) in ("overlayfs", "nfs"):
        pytest.skip("this file system may renew access times whatever is asked")
    age(store)
    before = access_times(store)
    assert run(store)[0] == CLEAN
    assert access_times(store) == before


def test_takes_no_lock_and_opens_nothing_for_writing(store: Path) -> None:
    flip(segments(store)[0], 8)
    script = """
import os, sys
events = []
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith(sys.argv[1]):
        if (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            events.append((event, arguments))
    elif event.split(".")[0] in ("fcntl",) or event in (
        "os.remove", "os.rename", "os.utime", "os.mkdir", "os.truncate", "os.chmod"):
        events.append((event, arguments))
sys.addaudithook(watch)
from flashkv.tools.fsck import app
for option in ([], ["--json"], ["--repair", "--dry-run"]):
    app([sys.argv[1], *option], standalone_mode=False)
assert not events, events
"""
    before = snapshot(store)
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(store)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert snapshot(store) == before


# ---- the command --------------------------------------------------------------------------------


def test_from_damage_to_a_store_that_opens(store: Path) -> None:
    """The error of an open names the command that mends, as it is to be typed."""
    for block in superblocks(store):
        block.unlink()
    with pytest.raises(SuperblockError) as refused:
        make(store, geometry=None, capacity=None)
    assert str(refused.value).endswith(f"flashkv-fsck --repair {store}")
    looked = command(store)
    assert looked.returncode == MENDED
    assert looked.stdout.splitlines()[-1].endswith(f"flashkv-fsck --repair {store}")
    tried = command("--repair", "--dry-run", store)
    assert (tried.returncode, tried.stdout) == (looked.returncode, looked.stdout)
    done = command("--repair", store)
    assert done.returncode == MENDED
    assert "mended: " in done.stdout
    assert "superblock.a and superblock.b written anew" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 damaged places, all mended"
    assert command(store).returncode == CLEAN
    assert held(store) == ALIVE


def test_damage_that_stays(store: Path) -> None:
    path = segments(store)[1]
    path.unlink()
    path.mkdir()
    for how in ([], ["--repair"]):
        done = command(store, *how, "--json")
        assert done.returncode == LEFT
        facts = json.loads(done.stdout)
        (left,) = facts["left"]
        assert (left["file"], "move it away" in left["why"]) == (path.name, True)
    assert "can't be mended: 00000001.seg" in command(store).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--unknown"], "--unknown"),
        ([], "PATH"),
        (["--geometry", "{}", "x"], "--geometry"),
        (["--geometry", "[" * 100_000, "x"], "--geometry"),
        (["--capacity", "many", "x"], "--capacity"),
        (["--capacity", "-1", "x"], "--capacity"),
        (["--dry-run", "x"], "--repair"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (16, "")
    assert message in done.stderr or message.lower() in done.stderr


def test_no_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("something else")
    for path in (tmp_path / "nowhere", file, tmp_path):
        for how in ([], ["--repair"], ["--json"]):
            status, text, error = run(path, *how)
            assert status == FAILED
            assert str(path) in error
            assert not text or json.loads(text)["status"] == FAILED
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_store_of_another_version(store: Path) -> None:
    from flashkv.checksums import crc32c

    for block in superblocks(store):
        page = bytearray(block.read_bytes())
        page[12:16] = (7).to_bytes(4, "little")
        page[8:12] = bytes(4)
        page[8:12] = crc32c(0, bytes(page)).to_bytes(4, "little")
        block.write_bytes(page)
    before = snapshot(store)
    for how in ([], ["--repair"]):
        status, _, error = run(store, *how)
        assert status == FAILED
        assert "version, got 7" in error
    assert snapshot(store) == before


def test_a_lock_that_can_not_be_taken(store: Path) -> None:
    lock = shard(store) / "lock"
    lock.unlink()
    lock.mkdir()
    assert run(store)[0] == CLEAN
    status, _, error = run(store, "--repair")
    assert (status, str(store) in error) == (FAILED, True)


# ---- beside a writer ----------------------------------------------------------------------------


def test_beside_a_writer(disk_path: Path) -> None:
    path = disk_path / "store"
    writer = start_child(
        """
        store = make(path)
        namespace = store.namespace(IDENTITY)
        print("ready", flush=True)
        turn = 0
        while True:
            namespace.put(names(40, first=40 * (turn % 50)), payload(turn, 40), replace=True)
            store.flush()
            turn += 1
        """,
        path,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        for _ in range(4):
            status, text, _ = run(path)
            assert status == CLEAN, text
            assert "open for writing" in text.splitlines()[0]
            assert "may pass" in text.splitlines()[0]
        assert json.loads(run(path, "--json")[1])["writer_seen"]
        with pytest.raises(LockedError):
            repair(path)
        status, text, error = run(path, "--repair")
        assert (status, text) == (FAILED, "")
        assert "open for writing in another process" in error
        assert run(path, "--repair", "--dry-run")[0] == CLEAN
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
        for pipe in (writer.stdin, writer.stdout):
            if pipe is not None:
                pipe.close()
    before = snapshot(path)
    assert run(path, "--repair")[0] == CLEAN, "what a killed writer leaves is no damage"
    assert snapshot(path) == before
    assert not check(path).writer_seen


def test_beside_a_handle_of_this_process(store: Path) -> None:
    with make(store) as opened:
        assert check(store).status == CLEAN
        with pytest.raises(LockedError):
            repair(store)
        assert opened.namespace(IDENTITY).put([b"x"], np.zeros((1, 2, 2, 2, 16, 64), "u2")).all_ok
    assert repair(store).status == CLEAN
