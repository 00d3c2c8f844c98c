"""flashkv-dump finds every kind of damage, changes nothing, runs beside a writer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flashkv.tools.dump import app
from flashkv.tools.facts import store_facts
from flashkv.tools.inspection import StoreView
from flashkv.tools.verify import DAMAGE, NOTE, UNFINISHED, VerifyReport, verify
from small_stores import IDENTITY, PAGE, edit, make, names, payload, start_child
from typer.testing import CliRunner

from flashkv.native import ffi

KEYS = names(500)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two segments with a directory, one that is open; a namespace; a deleted block."""
    path = tmp_path_factory.mktemp("dump") / "store"
    data = payload(1, len(KEYS))
    with make(path, bloom=True) as store:
        namespace = store.namespace(IDENTITY)
        for first in range(0, len(KEYS), 50):
            assert namespace.put(KEYS[first : first + 50], data[first : first + 50]).all_ok
        namespace.delete(KEYS[:1])
    return path


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    """A copy to be harmed."""
    return Path(shutil.copytree(template, tmp_path / "store"))


def run(*arguments: object) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of flashkv-dump."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def snapshot(path: Path) -> dict[str, tuple[object, ...]]:
    """Everything about every file but its access time."""
    found = {}
    for entry in [path, *sorted(path.rglob("*"))]:
        status = entry.stat()
        digest = hashlib.sha256(entry.read_bytes()).hexdigest() if entry.is_file() else ""
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found[str(entry)] = (status.st_ino, status.st_size, status.st_blocks, *times, digest)
    return found


def shard(path: Path) -> Path:
    return path / "shards" / "0"


def segment(path: Path, number: int) -> Path:
    return shard(path) / "segments" / f"{number:08d}.seg"


def change(path: Path, offset: int, length: int, make_bytes: Callable[[bytes], bytes]) -> None:
    """Replaces bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(length)
        file.seek(offset)
        new = make_bytes(old)
        assert new != old
        file.write(new)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    change(path, offset, 1, lambda old: bytes([old[0] ^ 1 << bit]))


def zero(path: Path, page: int) -> None:
    change(path, page * PAGE, PAGE, lambda _old: bytes(PAGE))


def damage(report: VerifyReport) -> list[tuple[str, int | None, str]]:
    return [(finding.file, finding.page, finding.what) for finding in report.of(DAMAGE)]


# ---- a store in order ---------------------------------------------------------------------------


def test_what_it_shows(template: Path) -> None:
    status, text, _ = run(template)
    assert status == 0
    for word in ("sealed", "open", "test/model", "manifest-00000003.log: whole", "version 0"):
        assert word in text
    status, text, _ = run(template, "--json")
    assert status == 0
    facts = json.loads(text)
    assert [s["state"] for s in facts["segments"]] == ["sealed", "open"]
    assert (facts["blocks"], facts["live_blocks"]) == (500, 499)
    assert facts["namespaces"][0]["identity"]["model"] == "test/model"
    for one in [*facts["segments"]]:
        assert sum(one["space"].values()) == facts["segment_bytes"]
    with make(template, read_only=True) as opened:
        stats = opened.stats()
        assert stats.blocks == facts["live_blocks"]
        assert stats.live_bytes == facts["space"]["live"]
        assert stats.records == facts["live_records"]


def test_records_in_full(template: Path) -> None:
    rows = json.loads(run(template, "--segment", 0, "--json")[1])
    assert rows[0]["kind"] == "namespace"
    data = [row for row in rows if row["kind"] == "data"]
    assert data[0]["live_blocks"] == data[0]["blocks"] - 1, "one was deleted"
    address = f"0:{data[0]['page']}"
    assert run(template, "--record", address)[0] == 0
    detail = json.loads(run(template, "--record", address, "--json")[1])
    assert [block["key_text"] for block in detail["blocks"]] == [
        key.decode() for key in KEYS[: len(detail["blocks"])]
    ]
    assert [block["live"] for block in detail["blocks"]][:2] == [False, True]
    assert {crc["good"] for crc in detail["page_crcs"]} == {True}
    tokens: dict[int, int] = {}
    for stripe in detail["stripes"]:
        assert stripe["first_token"] == tokens.get(stripe["stream"], 0)
        tokens[stripe["stream"]] = stripe["first_token"] + stripe["tokens"]
        assert stripe["offset_bytes"] + stripe["length_bytes"] <= PAGE
    assert set(tokens.values()) == {detail["header"]["tokens"]}
    assert len(tokens) == len(detail["streams"]) == 2 * 2 * 2
    assert run(template, "--record", f"0:{rows[0]['page']}")[0] == 0


def test_pages_and_keys(template: Path) -> None:
    status, text, _ = run(template, "--page", "0:0")
    assert status == 0
    assert "46 4b 56 53 45 47 4d 54" in text
    page = json.loads(run(template, "--page", "0x0:0x1", "--json")[1])
    assert bytes.fromhex(page["bytes"]) == segment(template, 0).read_bytes()[PAGE : 2 * PAGE]
    for form in ("k000123", "text:k000123", KEYS[123].hex(), f"hex:{KEYS[123].hex()}"):
        status, text, _ = run(template, "--key", form, "--json")
        assert status == 0
        (place,) = json.loads(text)
        assert place["live"]
        assert bytes.fromhex(place["key"]) == KEYS[123]
    assert not json.loads(run(template, "--key", "k000000", "--json")[1])[0]["live"]


def test_a_clean_store_is_clean_and_stays_as_it_is(store: Path) -> None:
    before = snapshot(store)
    status, text, _ = run(store, "--verify")
    assert (status, "no damage" in text) == (0, True)
    report = json.loads(run(store, "--verify", "--json")[1])
    assert (report["damaged"], report["findings"]) == (False, [])
    assert report["records"] >= 30
    assert report["directories"] == 1
    assert report["pages"] > 1000
    for arguments in ([], ["--json"], ["--segment", 1], ["--record", "0:2"], ["--page", "0:0"]):
        assert run(store, *arguments)[0] == 0
    assert run(store, "--key", "k000001")[0] == 0
    assert snapshot(store) == before


def test_opens_nothing_for_writing_and_takes_no_lock(template: Path) -> None:
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
from flashkv.tools.dump import app
for option in ([], ["--verify"], ["--segment", "0"], ["--key", "k000001"]):
    app([sys.argv[1], *option], standalone_mode=False)
assert not events, events
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(template)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- damage -------------------------------------------------------------------------------------


def place(path: Path, what: str) -> tuple[Path, int]:
    """(file, byte) of something in segment 0, which has a directory."""
    view = StoreView(path)
    one = view.segments[0]
    assert one.contents is not None
    assert one.footer is not None
    row = one.contents.records[2]
    sections = {kind: offset for kind, offset, _, _ in one.footer.sections}
    pages = {
        "segment header": 0,
        "namespace record": 1,
        "record header": int(row["page"]),
        "payload": int(row["page"]) + int(row["header_pages"]) + 3,
        "last payload": int(row["page"]) + int(row["pages"]) - 1,
        "directory records": sections[1] // PAGE,
        "directory blocks": sections[2] // PAGE,
        "directory namespaces": sections[3] // PAGE,
        "bloom": sections[4] // PAGE,
        "footer": one.end_page,
    }
    return segment(path, 0), pages[what] * PAGE


PLACES = [
    "segment header",
    "namespace record",
    "record header",
    "payload",
    "last payload",
    "directory records",
    "directory blocks",
    "directory namespaces",
    "bloom",
    "footer",
]


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("how", ["bit", "zeroed page"])
def test_damage_in_a_segment_is_found(store: Path, what: str, how: str) -> None:
    path, offset = place(store, what)
    if how == "zeroed page":
        zero(path, offset // PAGE)
    else:
        flip(path, offset + 20, 3)
    found = damage(verify(store))
    assert found
    assert {name for name, _, _ in found} == {path.name}
    pages = {page for _, page, _ in found}
    assert offset // PAGE in pages or what == "namespace record", found
    assert len(found) == 1, "one fault, one finding"
    if how == "bit":
        status, text, _ = run(store, "--verify")
        assert status == 1
        assert f"damage: {path.name}" in text
        assert run(store)[0] == 0, "what can be shown is shown"
    assert json.loads(run(store, "--segment", 0, "--json")[1])


@pytest.mark.parametrize("name", ["superblock.a", "superblock.b"])
@pytest.mark.parametrize("offset", [0, 9, 200, 4095])
def test_damage_in_a_superblock_is_found(store: Path, name: str, offset: int) -> None:
    flip(shard(store) / name, offset, 5)
    assert [file for file, _, _ in damage(verify(store))] == [name]
    (shard(store) / name).unlink()
    assert [file for file, _, _ in damage(verify(store))] == [name]
    assert run(store, "--verify")[0] == 1
    assert run(store)[0] == 0


def test_damage_in_the_manifest_is_found(store: Path) -> None:
    log = next(iter(sorted(shard(store).glob("manifest-*.log"))[-1:]))
    data = log.read_bytes()
    entry = int(ffi.sizeof("fkv_manifest_entry"))
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at + 8 : at + 12], "little")
        for offset in (at, at + 4, at + 8, at + 12, at + entry + length - 1):
            flip(log, offset, 2)
            assert [file for file, _, _ in damage(verify(store))] == [log.name], offset
            log.write_bytes(data)
        at += entry + (length + 7 & ~7)
    assert not damage(verify(store))
    log.write_bytes(data[:-5])
    report = verify(store)
    assert (damage(report), len(report.of(UNFINISHED))) == ([], 1), "as a crash leaves it"
    log.unlink()
    assert [file for file, _, _ in damage(verify(store))] == [log.name]
    assert run(store)[0] == 0


def test_a_segment_cut_short_overlong_or_gone(store: Path) -> None:
    path = segment(store, 0)
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - PAGE, len(whole) // 2, PAGE, 100, 0):
        path.write_bytes(whole[:cut])
        assert any("bytes" in what for _, _, what in damage(verify(store))), cut
        assert run(store)[0] == 0
    path.write_bytes(whole + bytes(PAGE))
    assert [what for _, _, what in damage(verify(store))] == [
        f"the file has {len(whole) + PAGE} of {len(whole)} bytes"
    ]
    path.unlink()
    assert [what for _, _, what in damage(verify(store))] == ["the file is missing or unreadable"]
    assert "missing" in run(store)[1]


def test_pages_in_each_others_place(store: Path) -> None:
    path, offset = place(store, "payload")
    data = bytearray(path.read_bytes())
    one, two = slice(offset, offset + PAGE), slice(offset + PAGE, offset + 2 * PAGE)
    data[one], data[two] = data[two], data[one]
    path.write_bytes(data)
    assert {page for _, page, _ in damage(verify(store))} == {offset // PAGE, offset // PAGE + 1}


def test_damage_where_nothing_lives_is_a_note(store: Path) -> None:
    path, offset = place(store, "payload")
    view = StoreView(store)
    contents = view.segments[0].contents
    assert contents is not None
    ordinals = (
        int(contents.records[:2]["block_count"].sum()),
        int(contents.records[2]["block_count"]),
    )
    with make(store) as opened:
        opened.namespace(IDENTITY).delete(KEYS[ordinals[0] : sum(ordinals)])
    flip(path, offset)
    report = verify(store)
    assert damage(report) == []
    assert [finding.page for finding in report.of(NOTE)] == [offset // PAGE]


def test_an_open_segment(store: Path) -> None:
    """In front of a good record damage is damage; behind the last one it may be a write cut off."""
    path = segment(store, 1)
    rows = json.loads(run(store, "--segment", 1, "--json")[1])
    data = [row for row in rows if row["kind"] == "data"]
    whole = path.read_bytes()
    middle, last = data[1], data[-1]
    for page in (middle["page"], middle["page"] + middle["header_pages"] + 1):
        flip(path, page * PAGE + 8)
        assert page in {at for _, at, _ in damage(verify(store))}
        path.write_bytes(whole)
    zero(path, middle["page"])
    assert [at for _, at, _ in damage(verify(store))] == [middle["page"]]
    path.write_bytes(whole)
    flip(path, (last["page"] + last["pages"] - 1) * PAGE)
    report = verify(store)
    assert damage(report) == []
    assert len(report.of(UNFINISHED)) == 1
    assert run(store, "--verify")[0] == 0
    path.write_bytes(whole[: last["page"] * PAGE] + bytes(len(whole) - last["page"] * PAGE))
    assert run(store, "--verify")[0] == 0


def test_without_superblocks_and_manifest(store: Path) -> None:
    """What the store refuses, the tool opens: segments describe themselves."""
    expected = json.loads(run(store, "--json")[1])
    for path in [*shard(store).glob("superblock.*"), *shard(store).glob("manifest-*")]:
        path.unlink()
    status, text, _ = run(store, "--json")
    facts = json.loads(text)
    assert status == 0
    assert facts["store_uuid"] == expected["store_uuid"]
    assert facts["blocks"] == expected["blocks"]
    assert facts["live_blocks"] == expected["live_blocks"] + 1, "the delete was in the log"
    assert facts["namespaces"][0]["identity"]["model"] == "test/model"
    assert facts["namespaces"][0]["source"] == "segment 0"
    assert run(store, "--verify")[0] == 1
    assert {file.split(".")[0] for file, _, _ in damage(verify(store))} == {
        "superblock",
        "manifest-00000000",
    }


def test_random_bits_of_a_sealed_segment(store: Path, seed: int) -> None:
    """Every byte up to the directory, and of the footer's page, is covered by a checksum."""
    path = segment(store, 0)
    footer = StoreView(store).segments[0].footer
    assert footer is not None
    used = footer.span()[0]
    rng = np.random.default_rng(seed)
    for at in [*rng.integers(0, used, 10).tolist(), path.stat().st_size - 1]:
        bit = int(rng.integers(0, 8))
        flip(path, at, bit)
        found = damage(verify(store))
        assert found, (at, bit)
        flip(path, at, bit)
    assert not verify(store).findings


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--segment", "7"], "no segment 7"),
        (["--segment", "-1"], "no segment -1"),
        (["--segment", "x"], "--segment"),
        (["--record", "0"], "SEGMENT:PAGE"),
        (["--record", "0:1:2"], "SEGMENT:PAGE"),
        (["--record", "a:b"], "SEGMENT:PAGE"),
        (["--record", "0:0"], "begins no record"),
        (["--record", "9:1"], "no segment 9"),
        (["--record", "0:999999"], "no page 999999"),
        (["--page", "0:-1"], "negative"),
        (["--page", f"0:{1 << 70}"], "no page"),
        (["--page", "0:1024"], "no page 1024"),
        (["--key", "nowhere"], "no record"),
        (["--key", ""], "1 to 255 bytes"),
        (["--key", "hex:xyz"], "hexadecimal"),
        (["--key", "k" * 300], "1 to 255 bytes"),
        (["--verify", "--segment", "0"], "give one of"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_arguments(template: Path, arguments: list[str], message: str) -> None:
    status, text, error = run(template, *arguments)
    assert status == 2
    assert text == ""
    assert message in error


def test_no_store(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("something else")
    (tmp_path / "shards" / "0").mkdir(parents=True)
    for path in (tmp_path / "nowhere", file, tmp_path):
        for option in ([], ["--verify"], ["--json"]):
            status, text, error = run(path, *option)
            assert (status, text) == (2, "")
            assert str(path) in error
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["file", "shards"]


def test_another_version_is_named(store: Path) -> None:
    from flashkv.checksums import crc32c

    for name in ("superblock.a", "superblock.b"):
        page = bytearray((shard(store) / name).read_bytes())
        page[12:16] = (7).to_bytes(4, "little")
        page[8:12] = bytes(4)
        page[8:12] = crc32c(0, bytes(page)).to_bytes(4, "little")
        (shard(store) / name).write_bytes(page)
    status, _, error = run(store)
    assert status == 2
    assert "version, got 7" in error


def test_the_console_script(template: Path) -> None:
    script = "from flashkv.tools.dump import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, str(template), "--verify"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no damage\n")


# ---- beside a writer ----------------------------------------------------------------------------


WRITER = """
store = make(path, capacity=28 << 20)
namespace = store.namespace(IDENTITY)
data = payload(3, 64)
print("ready", flush=True)
turn = 0
while True:
    keys = names(64, first=64 * (turn % 64))
    namespace.put(keys, data, replace=turn % 3 == 0)
    if turn % 5 == 0:
        namespace.delete(keys[::7])
    if turn % 4 == 0:
        store.flush()
    turn += 1
"""


def test_beside_a_writer_that_reclaims(disk_path: Path) -> None:
    path = disk_path / "store"
    writer = start_child(WRITER, path)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        end, checks, epochs = time.monotonic() + 4, 0, set()
        while time.monotonic() < end:
            report = verify(path)
            assert damage(report) == []
            facts = store_facts(StoreView(path))
            assert facts.writer_seen
            epochs |= {(one.number, one.epoch) for one in facts.segments}
            assert run(path)[0] == 0
            checks += 1
        assert checks >= 2
        assert len(epochs) > len(facts.segments), "space was used again meanwhile"
        assert writer.poll() is None
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        for pipe in (writer.stdin, writer.stdout):
            if pipe is not None:
                pipe.close()
    assert not StoreView(path).writer_seen()
    assert damage(verify(path)) == [], "what a killed writer leaves is no damage"
    with make(path) as store:
        assert store.stats().blocks > 0
    assert damage(verify(path)) == []


def test_edits_are_seen_through_direct_io_too(store: Path) -> None:
    """The tool reads through the page cache, the store beside it: both see the same bytes."""
    path, offset = place(store, "payload")
    with edit(path) as fd:
        os.pwrite(fd, bytes(PAGE), offset)
    assert len(damage(verify(store))) == 1
