"""Files that a crash or a bad disk left torn, short, lost or strange: what opens, and what is kept.

What is asserted of each: the store opens (or says why not), what it serves is right, what damage
did not touch is there, what was deleted stays away.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_support import (
    IDENTITY,
    KINDS,
    MIB,
    Kind,
    check_rest,
    crash,
    open_store,
    present,
    put_all,
    segment_file,
    shard_of,
)

from flashkv import FlashKVError, FormatError, Namespace, NotAStoreError, Store, SuperblockError
from flashkv.native import ffi

KIND: Kind = KINDS[0]  # 64 KiB a block
PAGE = 4096
KEYS = [f"key-{number}".encode() for number in range(24)]


def reopen(path: Path, **how: object) -> Store:
    return open_store(path, None, capacity=None, **how)  # type: ignore[arg-type]


def names(store: Store) -> Namespace:
    return store.namespace(IDENTITY)


def newest_log(path: Path) -> Path:
    return max(shard_of(path).glob("manifest-*.log"))


def entry_starts(log: bytes) -> list[int]:
    """Where each entry of a manifest begins, and where the last one ends."""
    size = ffi.sizeof("fkv_manifest_entry")
    starts, at = [], 0
    while at + size <= len(log):
        length = struct.unpack_from("<I", log, at + 8)[0]
        starts.append(at)
        at += size + (length + 7 & ~7)
    return [*starts, at]


def copy(path: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    subprocess.run(["cp", "-r", "--sparse=always", path, to], check=True)
    return to


def overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as out:
        out.seek(offset)
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def usable(store: Store) -> None:
    """Takes new blocks and gives them back."""
    ns = names(store)
    keys = [b"new-%d" % number for number in range(4)]
    put_all(ns, KIND, keys, 9, replace=True)
    store.flush()
    assert present(ns, KIND, keys, 9).all()
    check_rest(store)


# ---- manifest ----------------------------------------------------------------------------------


@pytest.fixture
def with_deletes(store_path: Path) -> tuple[Path, list[tuple[int, bytes]]]:
    """A store that crashed after 12 deletes; the log's length after each, and the deleted key."""
    store = open_store(store_path, KIND.geometry)
    ns = names(store)
    put_all(ns, KIND, KEYS)
    store.flush()
    log = newest_log(store_path)
    deleted = []
    for key in KEYS[:12]:
        assert ns.delete([key]).all_ok
        deleted.append((log.stat().st_size, key))
    crash(store)
    return store_path, deleted


def test_manifest_torn_anywhere(
    with_deletes: tuple[Path, list[tuple[int, bytes]]], disk_path: Path
) -> None:
    """Cut at every entry and every 512 bytes, with nothing, zeros or garbage behind the cut."""
    path, deleted = with_deletes
    log = newest_log(path).read_bytes()
    starts = entry_starts(log)
    assert starts[-1] == len(log)
    cuts = sorted({*starts[::2], len(log), starts[-2] + 7, *range(0, len(log) + 1, 512)})
    cuts = [cut for cut in cuts if cut <= len(log)]
    behind = [b"", b"\0", b"\xee"]
    for number, cut in enumerate(cuts):
        here = copy(path, disk_path / "torn")
        torn = log[:cut] + behind[number % 3] * (len(log) - cut)
        newest_log(here).write_bytes(torn)
        with reopen(here) as store:
            found = present(names(store), KIND, KEYS)
            assert found[12:].all(), f"cut at {cut}"
            for row, (length, _) in enumerate(deleted):
                if length <= cut:
                    assert not found[row], f"cut at {cut}: a delete before it came undone"
    with reopen(path) as store:
        usable(store)


@pytest.mark.parametrize("harm", ["missing", "empty", "garbage"])
def test_manifest_lost(store_path: Path, harm: str) -> None:
    """A lost log alone is rebuilt from the segments."""
    store = open_store(store_path, KIND.geometry)
    put_all(names(store), KIND, KEYS)
    store.close()
    for log in shard_of(store_path).glob("manifest-*.log"):
        if harm == "missing":
            log.unlink()
        else:
            log.write_bytes(b"" if harm == "empty" else b"\xee" * 700)
    with reopen(store_path) as store:
        assert store.stats().recovery["manifest_rebuilt"]
        assert present(names(store), KIND, KEYS).all()
        usable(store)
    with reopen(store_path) as store:
        assert not store.stats().recovery["manifest_rebuilt"]
        assert present(names(store), KIND, KEYS).all()


# ---- superblocks -------------------------------------------------------------------------------


@pytest.fixture
def closed(store_path: Path) -> Path:
    """A closed store: KEYS in their second version, one of them deleted."""
    store = open_store(store_path, KIND.geometry)
    ns = names(store)
    put_all(ns, KIND, KEYS, 1)
    store.flush()
    put_all(ns, KIND, KEYS, 2, replace=True)
    ns.delete(KEYS[:1])
    store.close()
    return store_path


def tear(file: Path, harm: str) -> None:
    if harm == "missing":
        file.unlink()
    elif harm == "short":
        file.write_bytes(file.read_bytes()[:1000])
    elif harm == "empty":
        file.write_bytes(b"")
    else:
        half = file.read_bytes()[:512]
        file.write_bytes(half + b"\xee" * (PAGE - 512))


@pytest.mark.parametrize("harm", ["missing", "short", "empty", "torn"])
@pytest.mark.parametrize("name", ["superblock.a", "superblock.b"])
def test_one_superblock_lost(closed: Path, name: str, harm: str) -> None:
    tear(shard_of(closed) / name, harm)
    files = sorted(closed.rglob("*"))
    with reopen(closed, read_only=True) as store:
        assert present(names(store), KIND, KEYS, 2).tolist() == [False] + [True] * (len(KEYS) - 1)
    assert sorted(closed.rglob("*")) == files
    for _ in range(2):
        with reopen(closed) as store:
            found = present(names(store), KIND, KEYS, 2)
            assert found.tolist() == [False] + [True] * (len(KEYS) - 1)
            usable(store)


@pytest.mark.parametrize("name", ["superblock.a", "superblock.b"])
def test_superblock_lost_after_deletes(store_path: Path, name: str) -> None:
    """Whichever copy is lost, what was deleted since it was written stays away."""
    store = open_store(store_path, KIND.geometry)
    put_all(names(store), KIND, KEYS)
    store.close()
    store = reopen(store_path)
    names(store).delete(KEYS[:5])
    crash(store)
    (shard_of(store_path) / name).unlink()
    with reopen(store_path) as store:
        found = present(names(store), KIND, KEYS)
        assert found.tolist() == [False] * 5 + [True] * (len(KEYS) - 5)


@pytest.mark.parametrize("harm", ["missing", "short", "empty", "torn"])
@pytest.mark.parametrize("read_only", [False, True])
def test_both_superblocks_lost(closed: Path, harm: str, read_only: bool) -> None:
    before = sorted(p.name for p in shard_of(closed).rglob("*"))
    for name in ("superblock.a", "superblock.b"):
        tear(shard_of(closed) / name, harm)
    with pytest.raises(SuperblockError, match=r"flashkv-fsck --repair"):
        reopen(closed, read_only=read_only)
    with pytest.raises(SuperblockError, match=r"flashkv-fsck --repair"):
        open_store(closed, KIND.geometry, read_only=read_only)
    after = sorted(p.name for p in shard_of(closed).rglob("*"))
    assert set(before) - set(after) <= {"superblock.a", "superblock.b"}, "something was removed"


def test_superblock_of_another_format(closed: Path) -> None:
    from flashkv.checksums import with_crc

    for name in ("superblock.a", "superblock.b"):
        file = shard_of(closed) / name
        page = file.read_bytes()
        file.write_bytes(with_crc(page[:12] + struct.pack("<I", 7) + page[16:]))
    with pytest.raises(FormatError, match="version") as caught:
        reopen(closed)
    assert not isinstance(caught.value, SuperblockError)
    assert caught.value.value == 7


def test_superblock_with_unknown_features(closed: Path) -> None:
    from flashkv.checksums import with_crc

    at = ffi.offsetof("fkv_superblock", "features_incompatible")
    for name in ("superblock.a", "superblock.b"):
        file = shard_of(closed) / name
        page = bytearray(file.read_bytes())
        page[at] = 1
        file.write_bytes(with_crc(bytes(page)))
    with pytest.raises(FormatError, match="feature"):
        reopen(closed)


# ---- unsealed tails ----------------------------------------------------------------------------


@pytest.fixture
def tail(store_path: Path) -> tuple[Path, np.ndarray]:
    """A store that crashed with 24 one-block records in its open segment; their directory rows."""
    store = open_store(store_path, KIND.geometry, growth=((0, 64),))
    put_all(names(store), KIND, KEYS)
    store.flush()
    places = store.index.lookup(names_digests(names(store)))
    assert len(np.unique(places["page"])) == len(KEYS)
    crash(store)
    return store_path, places


def names_digests(ns: Namespace) -> np.ndarray:
    from flashkv.index import Keys

    return Keys.pack(KEYS).digests(ns._space)


def test_tail_torn_at_any_page(tail: tuple[Path, np.ndarray], disk_path: Path) -> None:
    """Cut anywhere: whole records before the cut are there, the store goes on behind them."""
    path, places = tail
    row = places[1]
    first, end = int(row["page"]), int(row["page"] + row["pages"])
    pages = [first - 1, *range(first, end, 3), end - 1, end, int(places["page"][23]) + 3, 1]
    for page in pages:
        here = copy(path, disk_path / "torn")
        os.truncate(segment_file(here, 0), page * PAGE)
        with reopen(here) as store:
            found = present(names(store), KIND, KEYS)
            whole = places["page"] + places["pages"] <= page
            assert found.tolist() == whole.tolist(), f"cut at page {page}"
            if page % 4 == 0:
                missing = [key for key, there in zip(KEYS, found, strict=True) if not there]
                put_all(names(store), KIND, missing)
                store.flush()
                crash(store)
        if page % 4 == 0:
            with reopen(here) as store:
                assert present(names(store), KIND, KEYS).all()
                check_rest(store)


@pytest.mark.parametrize("what", ["header", "payload"])
@pytest.mark.parametrize("harm", [bytes(PAGE), b"\xee" * PAGE], ids=["zeros", "garbage"])
def test_page_lost_in_the_middle_of_a_tail(
    tail: tuple[Path, np.ndarray], what: str, harm: bytes
) -> None:
    path, places = tail
    row = places[7]
    page = int(row["page"]) + (0 if what == "header" else int(row["header_pages"]) + 2)
    overwrite(segment_file(path, 0), page * PAGE, harm)
    with reopen(path) as store:
        found = present(names(store), KIND, KEYS)
        assert found.tolist() == [number != 7 for number in range(len(KEYS))]
        assert store.stats().recovery["damaged_records"] == (what == "payload" or harm[0] != 0) or (
            what == "header"
        )
        usable(store)


def test_namespace_record_lost(tail: tuple[Path, np.ndarray]) -> None:
    """The readable identity is for people: blocks need only its digest."""
    path, _ = tail
    overwrite(segment_file(path, 0), PAGE, bytes(PAGE))
    with reopen(path) as store:
        assert present(names(store), KIND, KEYS).all()


def test_stale_contents_behind_a_tail(store_path: Path) -> None:
    """A reused segment's old records lie behind the new ones and are none."""
    store = open_store(store_path, KIND.geometry, capacity=17 * MIB)
    ns = names(store)
    first = [b"first-%d" % number for number in range(60)]
    put_all(ns, KIND, first)
    for number in range(400):
        put_all(ns, KIND, [b"more-%d" % number])
        if (stats := store.stats()).evicted_segments and stats.segments["open"]:
            newest = next(s for s in store.segments if s.state.value == "open")
            if newest.epoch > 1:
                break
    else:
        pytest.fail("no segment was used again")
    store.flush()
    there = [key for key in first if ns.contains_one(key)]
    gone = [key for key in first if key not in there]
    assert gone
    crash(store)
    with reopen(store_path) as store:
        ns = names(store)
        assert not ns.contains(gone).any()
        assert present(ns, KIND, there).all()
        check_rest(store)


# ---- sealed segments ---------------------------------------------------------------------------


@pytest.fixture
def sealed(store_path: Path) -> tuple[Path, list[bytes], np.ndarray]:
    """A closed store with several sealed segments: (path, keys, segment of each key)."""
    store = open_store(store_path, KIND.geometry)
    keys = [b"sealed-%d" % number for number in range(200)]
    for at in range(0, 200, 20):
        put_all(names(store), KIND, keys[at : at + 20])
    store.flush()
    stats = store.stats()
    assert stats.segments["sealed"] >= 2
    assert not stats.evicted_blocks
    from flashkv.index import Keys

    segments = store.index.lookup(Keys.pack(keys).digests(names(store)._space))["segment"].copy()
    store.close()
    return store_path, keys, segments


Sealed = tuple[Path, list[bytes], np.ndarray]


def footer_page(path: Path) -> int:
    return segment_file(path, 0).stat().st_size - PAGE


def directory_page(path: Path) -> int:
    """Offset of the first section of segment 0."""
    footer = segment_file(path, 0).read_bytes()[-PAGE:]
    at = ffi.offsetof("fkv_segment_footer", "sections") + ffi.offsetof(
        "fkv_section", "offset_bytes"
    )
    return int(struct.unpack_from("<Q", footer, at)[0])


@pytest.mark.parametrize("where", ["footer", "first section", "second section"])
@pytest.mark.parametrize("harm", [bytes(64), b"\xee" * 64], ids=["zeros", "garbage"])
def test_directory_damaged(sealed: Sealed, where: str, harm: bytes) -> None:
    """A bad directory is replaced by a scan: nothing is lost."""
    path, keys, _ = sealed
    offset = {
        "footer": footer_page,
        "first section": directory_page,
        "second section": lambda p: directory_page(p) + PAGE,
    }[where](path)
    overwrite(segment_file(path, 0), offset, harm)
    with reopen(path) as store:
        assert present(names(store), KIND, keys).all()
        recovery = store.stats().recovery
        assert recovery["scanned_segments"] >= 1
        assert recovery["damaged_directories"] == (where != "footer")
        usable(store)


def test_every_byte_of_a_footer(sealed: Sealed, disk_path: Path) -> None:
    """No byte of the footer can be wrong unseen."""
    from flashkv import directory

    path, _, _ = sealed
    data = segment_file(path, 0).read_bytes()
    page = data[-PAGE:]
    uuid = data[32:48]
    epoch = struct.unpack_from("<Q", data, ffi.offsetof("fkv_segment_header", "epoch"))[0]
    assert directory.decode_footer(page, uuid, epoch, len(data)) is not None
    for at in [*range(160), *range(160, PAGE, 37)]:
        bad = page[:at] + bytes([page[at] ^ 0x10]) + page[at + 1 :]
        assert directory.decode_footer(bad, uuid, epoch, len(data)) is None, at
    assert directory.decode_footer(page, uuid, epoch + 1, len(data)) is None
    assert directory.decode_footer(page, bytes(16), epoch, len(data)) is None


def test_segment_header_lost(sealed: Sealed) -> None:
    path, keys, segments = sealed
    overwrite(segment_file(path, 0), 0, bytes(PAGE))
    """The log knows uuid and epoch: the records count, and the damage is counted."""
    for _ in range(2):
        with reopen(path) as store:
            assert present(names(store), KIND, keys).all()
            assert store.stats().recovery["damaged_headers"] == 1
            usable(store)
    # Without the log nothing binds the records to a place: they are gone.
    for log in shard_of(path).glob("manifest-*.log"):
        log.unlink()
    with reopen(path) as store:
        assert present(names(store), KIND, keys).tolist() == (segments != 0).tolist()
        usable(store)


@pytest.mark.parametrize("size", [0, 100, PAGE, 3 * PAGE, 2 * MIB, 4 * MIB - 1, 4 * MIB - PAGE])
def test_segment_truncated(sealed: Sealed, size: int) -> None:
    path, keys, segments = sealed
    os.truncate(segment_file(path, 0), size)
    with reopen(path) as store:
        found = present(names(store), KIND, keys)
        assert found[segments != 0].all()
        if size <= 3 * PAGE:
            assert not found[segments == 0].any()
        if size >= 4 * MIB - PAGE:
            assert found.all()
        usable(store)
        fill(store, 200)  # the short file is used again
    with reopen(path) as store:
        check_rest(store)


def fill(store: Store, blocks: int) -> None:
    ns = names(store)
    for number in range(0, blocks, 10):
        put_all(ns, KIND, [b"fill-%d" % n for n in range(number, number + 10)])


def test_segment_too_long(sealed: Sealed) -> None:
    path, keys, _ = sealed
    with segment_file(path, 0).open("ab") as out:
        out.write(b"\xee" * 5 * PAGE)
    with reopen(path) as store:
        assert present(names(store), KIND, keys).all()
        fill(store, 200)
        check_rest(store)


def test_segment_missing(sealed: Sealed) -> None:
    path, keys, segments = sealed
    segment_file(path, 0).unlink()
    with reopen(path) as store:
        found = present(names(store), KIND, keys)
        assert found.tolist() == (segments != 0).tolist()
        fill(store, 200)
        check_rest(store)
    with reopen(path) as store:
        check_rest(store)


def test_segment_of_another_store(sealed: Sealed, disk_path: Path) -> None:
    """A file that was put in another one's place is none of this store's."""
    path, keys, segments = sealed
    other = open_store(disk_path / "other", KIND.geometry)
    foreign = [b"foreign-%d" % number for number in range(20)]
    put_all(names(other), KIND, foreign)
    other.close()
    shutil.copy(segment_file(disk_path / "other", 0), segment_file(path, 0))
    with reopen(path) as store:
        assert not names(store).contains(foreign).any()
        assert present(names(store), KIND, keys).tolist() == (segments != 0).tolist()


def test_segments_swapped(sealed: Sealed, disk_path: Path) -> None:
    """Two files that changed names: each says its own number, and neither is believed."""
    path, keys, segments = sealed
    zero, one, spare = segment_file(path, 0), segment_file(path, 1), disk_path / "spare"
    zero.rename(spare), one.rename(zero), spare.rename(one)
    with reopen(path) as store:
        assert present(names(store), KIND, keys).tolist() == (segments > 1).tolist()
        usable(store)


# ---- anything anywhere -------------------------------------------------------------------------


def harm_somewhere(path: Path, rng: np.random.Generator) -> str:
    """Flips bits, loses, repeats or swaps sectors in one file of the store; says what it did."""
    files = sorted(f for f in shard_of(path).rglob("*") if f.is_file() and f.stat().st_size)
    file = files[int(rng.integers(len(files)))]
    data = np.fromfile(file, np.uint8)
    used = np.flatnonzero(data)
    if not len(used):
        return f"nothing in {file.name}"
    kind = rng.choice(["bits", "zeros", "garbage", "copy", "cut"])
    at = int(rng.choice(used))
    sector = at // 512 * 512
    if kind == "bits":
        for _ in range(int(rng.integers(1, 9))):
            data[rng.choice(used)] ^= 1 << rng.integers(8)
    elif kind == "cut":
        data = data[:at]
    elif kind == "copy":
        other = int(rng.choice(used)) // 512 * 512
        size = min(512 * int(rng.integers(1, 64)), len(data) - max(sector, other))
        data[sector : sector + size] = data[other : other + size].copy()
    else:
        size = 512 * int(rng.integers(1, 64))
        fill = 0 if kind == "zeros" else rng.integers(0, 256, len(data[sector : sector + size]))
        data[sector : sector + size] = fill
    data.tofile(file)
    return f"{kind} in {file.name} at {at}"


def damage_and_look(sealed: Sealed, disk_path: Path, seed: int, times: int) -> None:
    """Whatever is damaged: right bytes or a miss, and a store that works."""
    print(f"seed {seed}")
    path, keys, _ = sealed
    with reopen(path) as store:
        names(store).delete(keys[:10])
        put_all(names(store), KIND, [b"tail-%d" % n for n in range(10)])
        store.flush()
        crash(store)
    keys = [*keys, *(b"tail-%d" % n for n in range(10))]
    rng = np.random.default_rng(seed)
    for _ in range(times):
        here = copy(path, disk_path / "harmed")
        done = [harm_somewhere(here, rng) for _ in range(int(rng.integers(1, 4)))]
        print(done)
        try:
            store = reopen(here)
        except FormatError:
            assert sum("superblock" in what for what in done) >= 2, done
            continue
        with store:
            found = present(names(store), KIND, keys)
            assert found.sum() > 50, done
            if not any("manifest" in what or "superblock" in what for what in done):
                assert not found[:10].any(), f"deleted blocks came back: {done}"
            assert (present(names(store), KIND, keys) <= found).all()
            usable(store)


def test_random_damage(sealed: Sealed, disk_path: Path, seed: int) -> None:
    damage_and_look(sealed, disk_path, seed, 5)


@pytest.mark.soak
def test_random_damage_at_length(sealed: Sealed, disk_path: Path, seed: int) -> None:
    damage_and_look(sealed, disk_path, seed, 200)


# ---- foreign files -----------------------------------------------------------------------------


def test_foreign_files_stay(closed: Path) -> None:
    """What the store didn't make is neither read, nor changed, nor removed."""
    shard = shard_of(closed)
    foreign = [
        closed / "README",
        shard / "notes.txt",
        shard / "segments" / "x.seg",
        shard / "segments" / "1.seg",
        shard / "segments" / "00000001.seg.bak",
        shard / "manifest-x.txt",
    ]
    for file in foreign:
        file.write_bytes(b"mine")
    (shard / "segments" / "folder").mkdir()
    with reopen(closed) as store:
        assert present(names(store), KIND, KEYS, 2)[1:].all()
        fill(store, 500)
        check_rest(store)
    for file in foreign:
        assert file.read_bytes() == b"mine"


def test_foreign_bytes_count(closed: Path) -> None:
    """Bytes that others keep in the folder, wherever, are the store's not to use."""
    for place in (closed / "big", shard_of(closed) / "segments" / "big"):
        place.write_bytes(b"\xee" * 5 * MIB)
        with reopen(closed) as store:
            fill(store, 500)
            check_rest(store)
        place.unlink()


@pytest.mark.parametrize("made", ["folder", "symlink", "dangling symlink", "fifo"])
def test_segment_name_taken(closed: Path, disk_path: Path, made: str) -> None:
    """Where a segment's name stands for something else, another number is used."""
    target = disk_path / "target"
    target.write_bytes(b"mine")
    for number in range(1, 9):
        place = segment_file(closed, number)
        if place.exists():
            continue
        if made == "folder":
            place.mkdir()
        elif made == "symlink":
            place.symlink_to(target)
        elif made == "dangling symlink":
            place.symlink_to(disk_path / "nowhere")
        else:
            os.mkfifo(place)
    with reopen(closed) as store:
        assert present(names(store), KIND, KEYS, 2)[1:].all()
        fill(store, 500)
        check_rest(store)
    assert target.read_bytes() == b"mine"
    assert not (disk_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["lock", "superblock.a", "manifest"])
def test_symlinks_in_the_shard_are_refused(closed: Path, disk_path: Path, name: str) -> None:
    """Nothing outside the folder is written through a link that lies in it."""
    shard = shard_of(closed)
    file = newest_log(closed) if name == "manifest" else shard / name
    target = disk_path / "target"
    shutil.copy(file, target)
    before = target.read_bytes()
    file.unlink()
    file.symlink_to(target)
    try:
        with reopen(closed) as store:
            fill(store, 100)
    except FlashKVError:
        pass
    assert target.read_bytes() == before


def test_store_through_a_symlink(closed: Path, disk_path: Path) -> None:
    """The path itself may be a link: the lock is that of the folder behind it."""
    link = disk_path / "link"
    link.symlink_to(closed)
    with reopen(link) as store:
        assert present(names(store), KIND, KEYS, 2)[1:].all()
        with pytest.raises(FlashKVError, match="open for writing"):
            reopen(closed)


def test_a_folder_of_something_else(disk_path: Path) -> None:
    (disk_path / "thing").mkdir()
    (disk_path / "thing" / "shards").write_bytes(b"mine")
    with pytest.raises(NotAStoreError, match="not a folder"):
        open_store(disk_path / "thing", KIND.geometry)
    with pytest.raises(NotAStoreError):
        open_store(disk_path / "thing", KIND.geometry, read_only=True)
    with pytest.raises(NotAStoreError):
        open_store(disk_path / "nothing", None, read_only=True)
    assert not (disk_path / "nothing").exists()


@pytest.fixture(autouse=True)
def _no_leak() -> Iterator[None]:
    """Every descriptor that a test opened is closed again."""
    from io_support import process_counts, settled_counts

    before = process_counts()
    yield
    after = settled_counts(before)
    assert after[0] <= before[0], "descriptors leaked"
