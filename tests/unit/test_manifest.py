"""The manifest: what was logged is read back, by whole entries, and by the ruling superblock."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flashkv import FormatError, NotAStoreError, StoreError, SuperblockError
from flashkv.checksums import with_crc
from flashkv.filesystem import FileSystem
from flashkv.folder import SUPERBLOCKS, is_own_file
from flashkv.manifest import Manifest
from flashkv.manifest_log import KILL, VOID, ManifestState, read_state, read_superblock
from flashkv.superblock import Superblock

UUID = bytes(range(16))
BLOCK = Superblock(UUID, 4 << 20, 32 << 20, b'{"groups":[]}', 1_700_000_000_000)
MIB = 1 << 20


def kills(*rows: tuple[int, int, int, int, int]) -> np.ndarray:
    """(segment, epoch, page, sequence, ordinal)"""
    out = np.zeros(len(rows), KILL)
    for at, (segment, epoch, page, sequence, ordinal) in enumerate(rows):
        out[at]["segment"], out[at]["epoch"], out[at]["page"] = segment, epoch, page
        out[at]["sequence"], out[at]["ordinal"] = sequence, ordinal
    return out


def facts(state: ManifestState) -> dict[str, Any]:
    """A state in a form that can be compared."""
    return {
        "epochs": dict(state.epochs),
        "freed": set(state.freed),
        "uuids": {s: u for s, u in state.uuids.items() if s in state.epochs},
        "kills": {
            segment: sorted(map(bytes, state.kills_of(segment)))
            for segment in state.kills
            if len(state.kills_of(segment))
        },
        "voids": {segment: rows.tobytes() for segment, rows in state.voids.items()},
        "namespaces": dict(state.namespaces),
        "retired": dict(state.retired),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shards" / "0"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def log(folder: Path) -> Iterator[Manifest]:
    log = Manifest.create(folder, BLOCK)
    yield log
    log.close()


def reread(folder: Path) -> ManifestState:
    state, found = read_state(folder, read_superblock(folder))
    assert found
    return state


# ---- superblocks -------------------------------------------------------------------------------


@given(
    segment_bytes=st.integers(1, 1 << 40),
    capacity=st.integers(0, (1 << 64) - 1),
    generation=st.integers(0, (1 << 64) - 1),
    geometry=st.binary(max_size=3000),
)
def test_superblock_round_trip(
    segment_bytes: int, capacity: int, generation: int, geometry: bytes
) -> None:
    block = Superblock(UUID, segment_bytes, capacity, geometry, 5, generation, generation // 2)
    assert Superblock.decode(block.encode(), "here") == block


@given(at=st.integers(0, 4095), bit=st.integers(0, 7))
def test_superblock_flipped(at: int, bit: int) -> None:
    page = BLOCK.encode()
    assert Superblock.decode(page[:at] + bytes([page[at] ^ 1 << bit]) + page[at + 1 :], "x") is None


def test_superblocks_take_turns(folder: Path, log: Manifest) -> None:
    """Each checkpoint writes the older copy; the newer one is left alone."""
    seen = []
    for _ in range(4):
        pages = {name: (folder / name).read_bytes() for name in SUPERBLOCKS}
        ruling = read_superblock(folder)
        log.checkpoint()
        changed = [n for n in SUPERBLOCKS if (folder / n).read_bytes() != pages[n]]
        assert len(changed) == 1
        assert read_superblock(folder).generation == ruling.generation + 1
        seen += changed
    assert seen[0] != seen[1]
    assert seen[:2] == seen[2:]
    assert len(list(folder.glob("manifest-*.log"))) == 2


def test_no_superblock(folder: Path) -> None:
    with pytest.raises(NotAStoreError):
        read_superblock(folder)
    (folder / "segments").mkdir()
    with pytest.raises(SuperblockError, match="fsck"):
        read_superblock(folder)


def test_other_features(folder: Path, log: Manifest) -> None:
    from flashkv.native import ffi

    page = bytearray(BLOCK.encode())
    for name in ("features_incompatible", "features_read_only", "page_shift", "checksum_id"):
        bad = bytearray(page)
        bad[ffi.offsetof("fkv_superblock", name)] ^= 1
        with pytest.raises(FormatError):
            Superblock.decode(with_crc(bytes(bad)), "here")
    compatible = bytearray(page)
    compatible[ffi.offsetof("fkv_superblock", "features_compatible")] ^= 1
    assert Superblock.decode(with_crc(bytes(compatible)), "here") is not None


# ---- entries -----------------------------------------------------------------------------------


def test_epochs_and_kills(folder: Path, log: Manifest) -> None:
    log.segment_opened(0, 1, b"a" * 16)
    log.segment_opened(1, 1, b"b" * 16)
    log.kill(kills((0, 1, 5, 10, 0), (0, 1, 5, 10, 1), (1, 1, 9, 11, 0)), sync=True)
    log.kill(kills((0, 7, 5, 10, 2)), sync=True)  # of no epoch that is
    state = reread(folder)
    assert facts(state) == facts(log.state)
    assert len(state.kills_of(0)) == 2
    log.segments_freed({0: 1}, kills((1, 1, 9, 12, 3)))
    state = reread(folder)
    assert state.freed == {0}
    assert len(state.kills_of(0)) == 0, "a kill list dies with its segment"
    assert len(state.kills_of(1)) == 2
    log.segment_opened(0, 2, b"a" * 16)
    state = reread(folder)
    assert state.freed == set()
    assert state.epochs == {0: 2, 1: 1}


def test_void_sequences(folder: Path, log: Manifest) -> None:
    """They last as long as their segment's epoch, through logs that are begun anew."""
    for segment in (0, 1):
        log.segment_opened(segment, 1, b"a" * 16)
    rows = np.zeros(3, VOID)
    rows["segment"], rows["epoch"] = (0, 0, 1), (1, 1, 7)  # the last one of no epoch that is
    rows["first_sequence"], rows["last_sequence"] = (3, 9, 1), (4, 20, 30)
    log.state.add_voids(rows)
    log.checkpoint()
    assert reread(folder).voids_of(0).tolist() == rows[:2].tolist()
    assert facts(reread(folder)) == facts(log.state)
    assert len(reread(folder).voids_of(1)) == 0
    log.segments_freed({0: 1}, kills())
    assert reread(folder).voids == {}
    log.segment_opened(0, 2, b"b" * 16)
    log.state.add_voids(rows)
    assert log.state.voids == {}


def test_a_profile_without_room_takes_none_from_others(folder: Path, log: Manifest) -> None:
    log.profile_used(b"a" * 32, b"{}", 100)
    log.profile_used(b"b" * 32, b"{}" * 60, 100)
    assert list(reread(folder).profiles) == list(log.state.profiles) == [b"a" * 32]


def test_namespaces(folder: Path, log: Manifest) -> None:
    log.namespace_added(b"n" * 32, b'{"model":"m"}')
    log.namespace_retired(b"n" * 32, 77)
    state = reread(folder)
    assert state.namespaces == {b"n" * 32: b'{"model":"m"}'}
    assert state.retired == {b"n" * 32: 77}


class LogMachine(RuleBasedStateMachine):
    """Random entries, checkpoints, failures; the files must always give the state of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.log: Manifest | None = None
        self.tmp: Any = None
        self.broken = False

    @initialize()
    def start(self) -> None:
        import tempfile

        self.tmp = tempfile.TemporaryDirectory()
        self.folder = Path(self.tmp.name) / "shards" / "0"
        self.folder.mkdir(parents=True)
        self.log = Manifest.create(self.folder, BLOCK)
        self.epochs = dict.fromkeys(range(5), 0)
        self.sequence = 1

    def teardown(self) -> None:
        if self.log is not None:
            self.log.close()
            self.tmp.cleanup()

    segments = st.integers(0, 4)

    @rule(segment=segments)
    def open(self, segment: int) -> None:
        assert self.log
        self.epochs[segment] += 1
        self.log.segment_opened(segment, self.epochs[segment], bytes([segment]) * 16)

    @rule(segment=segments)
    def free(self, segment: int) -> None:
        assert self.log
        if not self.epochs[segment]:
            self.open(segment)
        self.log.segments_freed({segment: self.epochs[segment]}, kills())

    @rule(segment=segments, count=st.integers(1, 30))
    def kill(self, segment: int, count: int) -> None:
        assert self.log
        self.sequence += 1
        rows = [(segment, self.epochs[segment], 1, self.sequence, n) for n in range(count)]
        self.log.kill(kills(*rows), sync=True)

    @rule(name=st.integers(0, 3))
    def retire(self, name: int) -> None:
        assert self.log
        self.sequence += 1
        self.log.namespace_added(bytes([name]) * 32, b"{}")
        self.log.namespace_retired(bytes([name]) * 32, self.sequence)

    @rule()
    def checkpoint(self) -> None:
        assert self.log
        self.log.checkpoint()

    @rule()
    def reopen(self) -> None:
        assert self.log
        self.log.close()
        block = read_superblock(self.folder)
        self.log = Manifest(self.folder, block, reread(self.folder))
        self.log.checkpoint()

    @rule(calls=st.integers(1, 4), segment=segments)
    def fail(self, calls: int, segment: int) -> None:
        """Some calls of the system fail: what was logged before is there, then it goes on."""
        assert self.log
        before = facts(reread(self.folder))
        count = 0

        def failing(original: Any) -> Any:
            def call(*arguments: Any) -> Any:
                nonlocal count
                count += 1
                if count >= calls:
                    raise OSError(errno.EIO, "injected")
                return original(*arguments)

            return call

        after: dict[str, Any] | None = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileSystem, "write", failing(FileSystem.write))
            patch.setattr(FileSystem, "sync_folder", failing(FileSystem.sync_folder))
            try:
                self.kill(segment, 3)
            except StoreError:
                after = facts(self.log.state)
        if after is not None:
            assert facts(reread(self.folder)) in (before, after)
        self.kill(segment, 1)  # repairs it

    @precondition(lambda self: self.log is not None)
    @invariant()
    def files_agree(self) -> None:
        assert self.log
        assert facts(reread(self.folder)) == facts(self.log.state)
        assert len(list(self.folder.glob("manifest-*.log"))) <= 2


def test_random_logs() -> None:
    run_state_machine_as_test(
        LogMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_torn_anywhere(folder: Path, log: Manifest) -> None:
    """Cut at any byte: the entries that are whole count, in order, and no other."""
    states = [facts(copy.deepcopy(log.state))]
    lengths = []
    file = max(folder.glob("manifest-*.log"))
    lengths.append(file.stat().st_size)
    for number in range(6):
        log.segment_opened(number, 1, bytes([number]) * 16)
        lengths.append(file.stat().st_size)
        states.append(facts(copy.deepcopy(log.state)))
        log.kill(kills((number, 1, 3, number, 0)), sync=True)
        lengths.append(file.stat().st_size)
        states.append(facts(copy.deepcopy(log.state)))
    data = file.read_bytes()
    for cut in range(lengths[0], len(data) + 1, 3):
        for tail in (b"", b"\xff" * 40, b"\x5a" * 4096):
            file.write_bytes(data[:cut] + tail)
            state, found = read_state(folder, log.superblock)
            assert found
            whole = max(i for i, length in enumerate(lengths) if length <= cut + 7)
            expected = [states[i] for i, length in enumerate(lengths) if length <= cut][-1]
            assert facts(state) in (expected, states[whole])
    file.write_bytes(data[: lengths[0] - 20])
    state, _ = read_state(folder, log.superblock)
    assert not state.kills


def test_damage_inside(folder: Path, log: Manifest) -> None:
    """One bad entry costs itself and the ends of segments behind it, not the kills behind it."""
    for number in range(4):
        log.segment_opened(number, 1, bytes([number + 1]) * 16)
    file = max(folder.glob("manifest-*.log"))
    lengths = [file.stat().st_size]
    for number in range(4):
        log.kill(kills((number, 1, 3, number, 0)), sync=True)
        lengths.append(file.stat().st_size)
    log.segments_freed({0: 1}, kills())
    data = file.read_bytes()
    for bad in range(4):
        for at in range(lengths[bad], lengths[bad + 1]):
            file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            state, found = read_state(folder, log.superblock)
            assert found
            assert state.damaged_entries == 1, at
            assert set(state.kills) == {0, 1, 2, 3} - {bad}, at
            assert not state.freed
    file.write_bytes(data)
    state, _ = read_state(folder, log.superblock)
    assert (state.damaged_entries, state.freed, set(state.kills)) == (0, {0}, {1, 2, 3})


def test_log_of_another_store(folder: Path, log: Manifest, tmp_path: Path) -> None:
    other = tmp_path / "other" / "shards" / "0"
    other.mkdir(parents=True)
    theirs = Manifest.create(other, Superblock(b"o" * 16, 4 << 20, 32 << 20, b"{}", 5))
    theirs.segment_opened(0, 9, b"x" * 16)
    theirs.close()
    mine, foreign = (max(f.glob("manifest-*.log")) for f in (folder, other))
    mine.write_bytes(foreign.read_bytes())
    state, found = read_state(folder, log.superblock)
    assert not found
    assert state.epochs == {}


def test_log_stays_short(folder: Path, log: Manifest) -> None:
    """Entries that don't count any more are left out by checkpoints: the files stay bounded."""
    for number in range(3000):
        log.segment_opened(number % 3, number + 1, b"s" * 16)
        rows = [(number % 3, number + 1, 1, number, n) for n in range(20)]
        log.kill(kills(*rows), sync=False)
    total = sum(file.stat().st_size for file in folder.glob("manifest-*.log"))
    assert total < MIB
    assert log.bytes_max() < MIB
    assert facts(reread(folder)) == facts(log.state)


def test_a_torn_entry_is_never_appended_to(
    folder: Path, log: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed write the log goes on in a new file; if that fails too, nowhere."""
    log.segment_opened(0, 1, b"a" * 16)
    real = FileSystem.write
    torn = {"left": 1}

    def half(files: FileSystem, fd: int, data: bytes) -> None:
        if torn["left"]:
            torn["left"] -= 1
            os.write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "full")
        real(files, fd, data)

    monkeypatch.setattr(FileSystem, "write", half)
    log.kill(kills((0, 1, 1, 1, 0)), sync=True)
    assert facts(reread(folder)) == facts(log.state)
    torn["left"] = 3  # on a full disk a log is tried again once it gave its room
    with pytest.raises(StoreError, match="manifest"):
        log.kill(kills((0, 1, 1, 1, 1)), sync=True)
    torn["left"] = 1
    with pytest.raises(StoreError, match="manifest"):
        log.kill(kills((0, 1, 1, 1, 2)), sync=True)
    log.kill(kills((0, 1, 1, 1, 3)), sync=True)
    state = reread(folder)
    assert facts(state) == facts(log.state)
    assert len(state.kills_of(0)) == 4


def test_whose_files(tmp_path: Path) -> None:
    own = ["lock", "superblock.a", "superblock.b", "manifest-00000007.log", "manifest.new"]
    for name in own:
        assert is_own_file(tmp_path, tmp_path, name)
        assert not is_own_file(tmp_path, tmp_path / "segments", name)
        assert not is_own_file(tmp_path, tmp_path.parent, name)
    for name in ("locks", "superblock.c", "manifest-x.log", "00000000.seg", "notes"):
        assert not is_own_file(tmp_path, tmp_path, name)
    assert is_own_file(tmp_path, tmp_path / "segments", "00000012.seg")
    for name in ("1.seg", "00000012.seg.bak", "000000012.seg"):
        assert not is_own_file(tmp_path, tmp_path / "segments", name)
