"""What a caller can get wrong: each fault has its own clear answer, and the store goes on.

One test for each entry of the list "bad input": it names value and limit, stores nothing, loses
nothing, leaks nothing.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from io_support import run_child
from store_support import (
    IDENTITY,
    KINDS,
    MIB,
    Kind,
    check_rest,
    open_store,
    present,
    put_all,
    shard_of,
    small_options,
)

import flashkv
from flashkv import (
    BackendError,
    BlockStatus,
    CapacityError,
    Client,
    FlashKVError,
    FormatError,
    GeometryError,
    Group,
    GroupKind,
    Identity,
    IdentityError,
    KeyFormatError,
    KVGeometry,
    MemoryView,
    MemoryViewError,
    Milestone,
    Namespace,
    NotAStoreError,
    Options,
    OptionsError,
    Pointers,
    ReadOnlyDestinationError,
    ReadOnlyStoreError,
    Regions,
    Shard,
    Store,
    StoreAccessError,
)

KIND: Kind = KINDS[0]
KEYS = [b"kept-%d" % number for number in range(6)]
SHAPE = KIND.shape()  # 2 layers, K and V, 2 heads, 64 tokens, 64 elements


def name(value: object) -> str:
    """repr() without addresses: every process that shares the tests must find the same ones."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """Holds KEYS; afterwards it must still hold them, nothing else, and work."""
    with open_store(store_path, KIND.geometry) as store:
        ns = store.namespace(IDENTITY)
        put_all(ns, KIND, KEYS)
        yield store
        assert present(ns, KIND, KEYS).all()
        assert check_rest(store).blocks == len(KEYS)
        put_all(ns, KIND, [b"after"])
        store.flush()
        assert present(ns, KIND, [b"after"]).all()


@pytest.fixture
def ns(store: Store) -> Namespace:
    return store.namespace(IDENTITY)


def blocks(count: int) -> np.ndarray:
    return np.zeros((count, *SHAPE), np.uint16)


def refused(error: type[FlashKVError], *words: object) -> Any:
    """The error is raised and its message names all of the words."""
    pattern = "".join(f"(?=.*{str(word).replace('[', '.').replace(']', '.')})" for word in words)
    return pytest.raises(error, match=f"(?s){pattern}")


# ---- shapes, dtypes, strides -------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        (2, *SHAPE[:-1], 63),
        (2, *SHAPE[:-1], 65),
        (2, 3, *SHAPE[1:]),
        (2, *SHAPE, 2),
        (2, 2, 2, 64, 64),
        (2, 2, 2, 64, 2, 64),
        (2, 100),
    ],
    ids=str,
)
def test_wrong_shape(ns: Namespace, shape: tuple[int, ...]) -> None:
    for call in (ns.put, ns.get):
        with refused(MemoryViewError, "uint16", shape[1], "layer 2"):
            call([b"a", b"b"], np.zeros(shape, np.uint16))


def test_wrong_count(ns: Namespace) -> None:
    for call in (ns.put, ns.get):
        with refused(MemoryViewError, "differ in number", 3, 2):
            call([b"a", b"b"], blocks(3))
        with refused(MemoryViewError, "differ in number", 1, 2):
            call([b"a", b"b"], [blocks(1)[0]])
        with refused(MemoryViewError, "differ in number", 1, 2):
            call([b"a", b"b"], blocks(1))


def test_wrong_view(ns: Namespace) -> None:
    with refused(MemoryViewError, "layer", "token"):
        MemoryView("layer plane head")
    with refused(MemoryViewError, "regions"):
        MemoryView(regions=("head",))
    with refused(MemoryViewError, "regions", 2):
        ns.put([b"a"], blocks(1), view=MemoryView(regions=("plane",)))
    with refused(MemoryViewError, "layer plane token head"):
        ns.put([b"a"], blocks(1), view=MemoryView("layer plane token head"))


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float64, np.int32, np.complex64, np.bool_, ">u2", np.float16, "O", "M8[s]"],
)
def test_wrong_dtype(ns: Namespace, dtype: Any) -> None:
    for call in (ns.put, ns.get):
        with refused(MemoryViewError, "dtype"):
            call([b"a"], np.zeros((1, *SHAPE), dtype))


@pytest.mark.parametrize(
    "data", [None, 7, "text", b"", b"short", object(), {}, [], [None]], ids=name
)
def test_no_memory_at_all(ns: Namespace, data: Any) -> None:
    for call in (ns.put, ns.get):
        with pytest.raises(MemoryViewError):
            call([b"a"], data)


def test_wrong_strides(ns: Namespace) -> None:
    wide = np.zeros((1, *SHAPE[:-1], 128), np.uint16)
    for call in (ns.put, ns.get):
        with refused(MemoryViewError, "backwards", "stride of -4 bytes"):
            call([b"a"], wide[..., ::-2])
    flat = np.zeros((1, KIND.block_bytes * 2), np.uint8)
    with refused(MemoryViewError, "contiguous"):
        ns.put([b"a"], flat[:, ::2])


def test_strides_that_are_fine(ns: Namespace) -> None:
    """Negative and wide strides outside the vector are only unusual."""
    data = KIND.blocks([b"x", b"y"], [5, 5])
    wide = np.zeros((2, 2, 2, 2, 64, 96), np.uint16)
    wide[..., :64] = data
    assert ns.put([b"x", b"y"], wide[..., :64]).all_ok
    out = KIND.empty(2)
    assert ns.get([b"x", b"y"], out[:, ::-1, :, ::-1, ::-1]).all_ok
    assert np.array_equal(out[:, ::-1, :, ::-1, ::-1], data)
    assert ns.delete([b"x", b"y"]).all_ok


def test_destination_that_overlaps_itself(ns: Namespace) -> None:
    one = np.zeros((1, *SHAPE), np.uint16)
    shared = np.broadcast_to(one, (2, *SHAPE))
    with pytest.raises(MemoryViewError):
        ns.get(KEYS[:2], shared)
    shared = np.lib.stride_tricks.as_strided(one, (1, *SHAPE), (0, 0, *one.strides[2:]))
    with refused(MemoryViewError, "share memory"):
        ns.get(KEYS[:1], shared)
    block = KIND.empty(1)[0]
    with refused(MemoryViewError, "same destination"):
        ns.get(KEYS[:2], [block, block])
    with refused(MemoryViewError, "same row"):
        ns.get(KEYS[:2], Regions([KIND.empty(4)], rows=[1, 1]))


def test_wrong_rows(ns: Namespace) -> None:
    pool = KIND.empty(4)
    for call in (ns.put, ns.get):
        with refused(MemoryViewError, "row", 4, "0 to 3"):
            call(KEYS[:2], Regions([pool], rows=[0, 4]))
        with refused(MemoryViewError, "row", -1):
            call(KEYS[:2], Regions([pool], rows=[-1, 0]))
        with refused(MemoryViewError, "one int a block"):
            call(KEYS[:2], Regions([pool], rows=[0, 1, 2]))
        with refused(MemoryViewError, "one int a block"):
            call(KEYS[:2], Regions([pool], rows=[0.0, 1.0]))
        with refused(MemoryViewError, "row axis", 9):
            call(KEYS[:2], Regions([pool], rows=[0, 1], row_axis=9))


def test_wrong_pointers(ns: Namespace) -> None:
    view = MemoryView(block_tokens=64)
    with refused(MemoryViewError, "zero"):
        ns.get(KEYS[:1], Pointers(np.zeros((1, 1), np.uint64)), view=view)
    with refused(MemoryViewError, "shape"):
        ns.get(KEYS[:1], Pointers(np.ones((2, 1), np.uint64)), view=view)
    with refused(MemoryViewError, "block_tokens"):
        ns.get(KEYS[:1], Pointers(np.full((1, 1), 4096, np.uint64)))
    with refused(ReadOnlyDestinationError, "read-only"):
        ns.get(KEYS[:1], Pointers(np.full((1, 1), 4096, np.uint64), writable=False), view=view)


@pytest.mark.parametrize(
    "how",
    [
        {"layers": []},
        {"layers": [2]},
        {"layers": [-1]},
        {"layers": [0, 0]},
        {"heads": [5]},
        {"heads": []},
        {"token_range": (0, 0)},
        {"token_range": (5, 4)},
        {"token_range": (-1, 4)},
        {"token_range": (0, 5000)},
    ],
    ids=str,
)
def test_wrong_selection(ns: Namespace, how: Any) -> None:
    with pytest.raises(MemoryViewError) as caught:
        ns.get(KEYS[:1], blocks(1), **how)
    assert caught.value.value is not None
    assert caught.value.limit is not None


def test_range_beyond_a_block(ns: Namespace) -> None:
    """Tokens that the block doesn't have are no block: MISS; the others come."""
    out = np.zeros((1, 2, 2, 2, 1, 64), np.uint16)
    assert ns.get(KEYS[:1], out, token_range=(64, 65))[0] == BlockStatus.MISS
    assert ns.get(KEYS[:1], out, token_range=(63, 64))[0] == BlockStatus.OK


def test_destination_too_small(ns: Namespace) -> None:
    """Room for fewer tokens than the block has: said before anything is read or written."""
    small = np.full((2, 2, 2, 2, 16, 64), 0xA5A5, np.uint16)
    with refused(MemoryViewError, "block 1 ", "64 tokens", "16 tokens"):
        ns.get([b"absent", KEYS[0]], small)
    assert (small == 0xA5A5).all()


@pytest.mark.parametrize("tokens", [0, -1, 65, [64], [64, 0], [1.5, 2.0], "2", 70000], ids=repr)
def test_wrong_token_counts(ns: Namespace, tokens: Any) -> None:
    with pytest.raises(MemoryViewError):
        ns.put([b"a", b"b"], blocks(2), tokens=tokens)


@pytest.mark.parametrize("position", [-1, 1 << 63, "0", 1.5])
def test_wrong_position(ns: Namespace, position: Any) -> None:
    with pytest.raises((MemoryViewError, TypeError)):
        ns.put([b"a"], blocks(1), position=position)


# ---- read-only destinations --------------------------------------------------------------------


def test_read_only_destination(ns: Namespace) -> None:
    out = blocks(1)
    out.flags.writeable = False
    with refused(ReadOnlyDestinationError, "can't be written"):
        ns.get(KEYS[:1], out)
    with refused(ReadOnlyDestinationError, "can't be written"):
        ns.get(KEYS[:1], bytes(KIND.block_bytes))
    with refused(ReadOnlyDestinationError, "can't be written"):
        ns.get(KEYS[:1], [memoryview(bytes(KIND.block_bytes))])
    assert ns.put([b"from-bytes"], bytes(KIND.block_bytes)).all_ok  # a source may be read-only
    assert ns.delete([b"from-bytes"]).all_ok


# ---- keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 256, 1000, 70000])
def test_key_of_a_wrong_length(ns: Namespace, size: int) -> None:
    keys = [b"fine", b"k" * size]
    for call in (
        lambda: ns.put(keys, blocks(2)),
        lambda: ns.get(keys, blocks(2)),
        lambda: ns.contains(keys),
        lambda: ns.match(keys),
        lambda: ns.delete(keys),
    ):
        with refused(KeyFormatError, "key 1 ", f"{size} bytes", "1 to 255 bytes"):
            call()
    with refused(KeyFormatError, f"{size} bytes", "1 to 255 bytes"):
        ns.contains_one(keys[1])
    with pytest.raises(KeyFormatError):
        ns.contains(np.zeros((2, size), np.uint8))
    with refused(KeyFormatError, "255 bytes"):
        ns.put([b"fine"], blocks(1), parents=[b"p" * 256])


@pytest.mark.parametrize(
    "keys",
    [
        b"one",
        "one",
        ["text"],
        [None],
        [1],
        5,
        None,
        [bytearray(b"x"), 3],
        np.zeros(4, np.uint8),
        np.zeros((2, 4), np.int8),
        np.zeros((2, 4, 4), np.uint8),
        [memoryview(b"abcd").cast("I")],
    ],
    ids=lambda keys: name(keys)[:30],
)
def test_keys_that_are_none(ns: Namespace, keys: Any) -> None:
    for call in (
        lambda: ns.put(keys, blocks(1)),
        lambda: ns.get(keys, blocks(1)),
        lambda: ns.contains(keys),
        lambda: ns.match(keys),
        lambda: ns.delete(keys),
    ):
        with pytest.raises(KeyFormatError):
            call()


@pytest.mark.parametrize("key", ["text", None, 5, bytearray(b"x"), [b"x"]], ids=repr)
def test_one_key_that_is_none(ns: Namespace, key: Any) -> None:
    with pytest.raises(KeyFormatError):
        ns.contains_one(key)


def test_longest_and_shortest_keys(ns: Namespace) -> None:
    keys = [b"s", b"l" * 255, bytes(255), b"\0", b"\0\0"]
    put_all(ns, KIND, keys)
    assert present(ns, KIND, keys).all()
    assert ns.delete(keys).all_ok


def test_wrong_parents(ns: Namespace) -> None:
    with refused(KeyFormatError, "parents", 1, 2):
        ns.put([b"a", b"b"], blocks(2), parents=[b"p"])
    with pytest.raises(KeyFormatError):
        ns.put([b"a"], blocks(1), parents=["p"])


def test_empty_batches(ns: Namespace, store: Store) -> None:
    before = store.stats()
    empties: list[Any] = [[], (), np.zeros((0, 8), np.uint8)]
    for keys in empties:
        for data in (blocks(0), [], b"", np.zeros((0, KIND.block_bytes), np.uint8)):
            assert len(ns.put(keys, data)) == 0
        for out in (blocks(0), [], bytearray()):
            result = ns.get(keys, out)
            assert len(result) == 0
            assert result.all_ok
        assert ns.contains(keys).shape == (0,)
        assert ns.match(keys).count == 0
        assert ns.match(keys, lease_ms=10).lease is None
        assert len(ns.delete(keys)) == 0
    after = store.stats()
    assert (before.blocks, before.record_bytes_written) == (
        after.blocks,
        after.record_bytes_written,
    )


def test_duplicate_keys(ns: Namespace) -> None:
    """The first of a batch wins, in whatever company."""
    keys = [b"twice", b"once", b"twice", KEYS[0], KEYS[0], b"twice"]
    data = KIND.blocks([b"twice", b"once", b"other", b"x", b"y", b"z"], [0] * 6)
    result = ns.put(keys, data)
    assert list(result) == [
        BlockStatus.OK,
        BlockStatus.OK,
        BlockStatus.DUPLICATE,
        BlockStatus.PRESENT,
        BlockStatus.DUPLICATE,
        BlockStatus.DUPLICATE,
    ]
    out = KIND.empty(3)
    assert ns.get([b"twice", b"once", b"twice"], out).all_ok
    assert np.array_equal(out, data[[0, 1, 0]])
    assert ns.delete([b"twice", b"once", b"twice"]).counts() == {"OK": 3}


def test_duplicate_keys_that_replace(ns: Namespace) -> None:
    data = KIND.blocks([b"new", b"newer"], [0, 0])
    result = ns.put([KEYS[1], KEYS[1]], data, replace=True)
    assert list(result) == [BlockStatus.OK, BlockStatus.DUPLICATE]
    out = KIND.empty(1)
    assert ns.get([KEYS[1]], out).all_ok
    assert np.array_equal(out[0], data[0])
    put_all(ns, KIND, [KEYS[1]], replace=True)


# ---- paths, permissions, formats ---------------------------------------------------------------


def test_path_is_a_file(disk_path: Path) -> None:
    file = disk_path / "file"
    file.write_bytes(b"mine")
    for read_only in (False, True):
        with refused(NotAStoreError, "file", "not a folder"):
            open_store(file, KIND.geometry, read_only=read_only)
    with refused(NotAStoreError, "not a folder"):
        open_store(file / "below", KIND.geometry)
    assert file.read_bytes() == b"mine"


@pytest.mark.parametrize("path", ["\0", "a" * 300], ids=["NUL", "too long"])
def test_path_that_is_none(disk_path: Path, path: str) -> None:
    with pytest.raises((FlashKVError, ValueError)):
        open_store(disk_path / path, KIND.geometry)


def test_no_permission(disk_path: Path) -> None:
    """As a user who may not: in a child, since root may everything."""
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    open_store(disk_path / "store", KIND.geometry).close()
    (disk_path / "closed").mkdir(mode=0o755)
    for parent in [disk_path, *disk_path.parents]:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    said = run_child(
        """
        import os, sys
        import flashkv
        from pathlib import Path
        from store_support import open_store, GQA
        folder = Path(sys.argv[1])
        os.setgid(65534); os.setuid(65534)
        for path, how in ((folder / "store", {}), (folder / "closed" / "new", {})):
            try:
                open_store(path, GQA, **how)
            except flashkv.StoreAccessError as error:
                print(error)
            else:
                raise SystemExit("opened")
        with open_store(folder / "store", None, read_only=True) as store:
            print(store.stats().blocks, "blocks")
        os.chmod  # reading alone is allowed to everybody
        """,
        disk_path,
    )
    assert said.count("no permission") == 2
    assert "0 blocks" in said


def test_unreadable_files(disk_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    store = open_store(disk_path / "store", KIND.geometry)
    put_all(store.namespace(IDENTITY), KIND, KEYS)
    store.close()
    for file in shard_of(disk_path / "store").rglob("*"):
        if file.is_file():
            file.chmod(0o600)
    for parent in [disk_path, *disk_path.parents]:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    said = run_child(
        """
        import os, sys
        import flashkv
        from pathlib import Path
        from store_support import open_store
        os.setgid(65534); os.setuid(65534)
        try:
            open_store(Path(sys.argv[1]), None, read_only=True)
        except flashkv.StoreAccessError as error:
            print(error)
        """,
        disk_path / "store",
    )
    assert "no permission" in said


def test_cap_too_small(disk_path: Path) -> None:
    for capacity in (1, 4096, 4 * MIB, 16 * MIB):
        with refused(CapacityError, f"{capacity} bytes", "at least"):
            flashkv.open(disk_path / "s", capacity=capacity, geometry=KIND.geometry)
    for capacity in (0, -5):
        with pytest.raises((CapacityError, OptionsError)):
            flashkv.open(disk_path / "s", capacity=capacity, geometry=KIND.geometry)
    for text in ("8 GiBB", "", "many", True, 1.5):
        with pytest.raises(OptionsError):
            flashkv.open(disk_path / "s", capacity=text, geometry=KIND.geometry)  # type: ignore[arg-type]
    # The limit that the message names is one that works, and nothing was left in the way.
    with pytest.raises(CapacityError) as caught:
        flashkv.open(
            disk_path / "s", capacity="1MiB", geometry=KIND.geometry, options=small_options()
        )
    least = int(str(caught.value.limit).split()[2])
    with open_store(disk_path / "s", KIND.geometry, capacity=least) as store:
        put_all(store.namespace(IDENTITY), KIND, KEYS)
    with refused(CapacityError, f"{least - MIB} bytes"):
        open_store(disk_path / "s", None, capacity=least - MIB)
    with open_store(disk_path / "s", None, capacity=None) as store:
        assert store.capacity_bytes == least
        assert present(store.namespace(IDENTITY), KIND, KEYS).all()


def test_smaller_cap_later(store_path: Path) -> None:
    keys = [b"shrink-%d" % number for number in range(600)]
    with open_store(store_path, KIND.geometry, capacity=64 * MIB) as store:
        for at in range(0, 600, 100):
            put_all(store.namespace(IDENTITY), KIND, keys[at : at + 100])
    with open_store(store_path, None, capacity=24 * MIB) as store:
        stats = check_rest(store)
        found = present(store.namespace(IDENTITY), KIND, keys)
        assert 0 < found.sum() < len(keys)
        assert stats.disk_bytes <= 24 * MIB
        assert found[-20:].all(), "the oldest go first"
    with open_store(store_path, None, capacity=None) as store:
        assert (present(store.namespace(IDENTITY), KIND, keys) == found).all()


def test_block_too_large(disk_path: Path) -> None:
    geometry = KVGeometry.gqa(4, 4, 128, "bfloat16")  # 8 KiB a token
    with open_store(disk_path / "s", geometry) as store:
        ns = store.namespace(IDENTITY)
        limit = store.block_bytes_max
        large = limit // 8192 + 1
        data = np.zeros((3, 4, 2, 4, large, 128), np.uint16)
        result = ns.put([b"a", b"b", b"c"], data, tokens=[large, 64, large - 1])
        assert list(result) == [BlockStatus.BLOCK_TOO_LARGE, BlockStatus.OK, BlockStatus.OK]
        assert ns.contains([b"a", b"b", b"c"]).tolist() == [False, True, True]
        out = np.ones((1, 4, 2, 4, large, 128), np.uint16)
        assert ns.get([b"c"], out).all_ok
        assert not out[..., : large - 1, :].any()
        assert check_rest(store).refused_blocks == 1


def test_opaque_block_too_large(disk_path: Path) -> None:
    geometry = KVGeometry.opaque(2 * MIB)
    with open_store(disk_path / "s", geometry) as store:
        ns = store.namespace(IDENTITY)
        result = ns.put([b"a", b"b"], np.zeros((2, 2 * MIB), np.uint8))
        assert result.counts() == {"BLOCK_TOO_LARGE": 2}
        check_rest(store)


def test_store_of_another_format(store_path: Path) -> None:
    from flashkv.checksums import with_crc

    open_store(store_path, KIND.geometry).close()
    before = {}
    for name in ("superblock.a", "superblock.b"):
        file = shard_of(store_path) / name
        page = file.read_bytes()
        file.write_bytes(with_crc(page[:12] + struct.pack("<I", 99) + page[16:]))
    before = {p: p.read_bytes() for p in shard_of(store_path).rglob("*") if p.is_file()}
    for read_only in (False, True):
        with refused(FormatError, "version", 99):
            open_store(store_path, None, read_only=read_only)
    assert before == {p: p.read_bytes() for p in before}, "a store of another format was changed"


def test_folder_that_holds_no_store(disk_path: Path) -> None:
    (disk_path / "photos").mkdir()
    (disk_path / "photos" / "a.jpg").write_bytes(b"mine")
    with refused(NotAStoreError, "no flashkv store"):
        open_store(disk_path / "photos", None, read_only=True)
    with refused(GeometryError, "no geometry"):
        open_store(disk_path / "photos", None)
    with refused(NotAStoreError, "no flashkv store"):
        open_store(disk_path / "missing", None, read_only=True)
    assert (disk_path / "photos" / "a.jpg").read_bytes() == b"mine"


def test_no_geometry_leaves_nothing_in_the_way(disk_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(GeometryError):
            open_store(disk_path / "s", None)
    open_store(disk_path / "s", KIND.geometry).close()


def test_another_geometry(store: Store, store_path: Path) -> None:
    store.flush()
    with refused(GeometryError, "another geometry"):
        open_store(store_path, KVGeometry.gqa(2, 2, 32, "bfloat16"), read_only=True)


# ---- identities, options, use of handles -------------------------------------------------------


@pytest.mark.parametrize("identity", [None, "model", {"model": "m"}, b""], ids=repr)
def test_no_identity(store: Store, identity: Any) -> None:
    with pytest.raises(IdentityError):
        store.namespace(identity)


def test_identity_that_says_nothing() -> None:
    with pytest.raises(IdentityError):
        Identity(model="")


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "aio"},
        {"codec": "zip"},
        {"queue_depth": 0},
        {"queue_depth": 1 << 20},
        {"workers": 0},
        {"segment_bytes": 4096},
        {"segment_bytes": 4 * MIB + 1},
        {"high_watermark": 1.5},
        {"low_watermark": 0.99},
        {"growth": ()},
        {"growth": ((0, 0),)},
        {"staging_bytes": 1},
        {"read_buffer_bytes": "1"},
        {"direct_io": 1},
        {"max_lease_ms": 0},
    ],
    ids=str,
)
def test_wrong_options(options: Any) -> None:
    with pytest.raises(OptionsError) as caught:
        Options(**options)
    assert str(next(iter(options))) in str(caught.value)


def test_backend_that_is_not_there(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKV_BACKEND", "spdk")
    with refused(OptionsError, "FLASHKV_BACKEND", "spdk"):
        open_store(disk_path / "s", KIND.geometry)
    with pytest.raises((BackendError, OptionsError)):
        flashkv.blockio.BlockIO(disk_path, backend="spdk")


@pytest.mark.parametrize("lease_ms", [0, -1, 60_001, 1 << 40])
def test_wrong_lease(ns: Namespace, lease_ms: int) -> None:
    with refused(OptionsError, "lease_ms", lease_ms, "1 to 60000"):
        ns.match(KEYS, lease_ms=lease_ms)


@pytest.mark.parametrize("group", [1, -1, "other", None, 0.5], ids=repr)
def test_no_such_group(ns: Namespace, group: Any) -> None:
    for call in (ns.put, ns.get):
        with refused(GeometryError, "group", "kv"):
            call([b"a"], blocks(1), group=group)


def test_writing_to_a_read_only_store(store: Store, store_path: Path) -> None:
    store.flush()
    with open_store(store_path, None, read_only=True) as reader:
        ns = reader.namespace(IDENTITY)
        assert present(ns, KIND, KEYS).all()
        for call in (
            lambda: ns.put([b"a"], blocks(1)),
            lambda: ns.delete(KEYS[:1]),
            ns.rotate,
            reader.flush,
        ):
            with refused(ReadOnlyStoreError, "read-only"):
                call()
        check_rest(reader)


def test_no_bad_call_writes_anything(store_path: Path, store: Store, ns: Namespace) -> None:
    """After a dozen refusals the files are as they were."""
    store.flush()
    before = subprocess.run(
        ["sha256sum", *sorted(map(str, store_path.rglob("*.*")))], capture_output=True, check=False
    ).stdout
    for _ in range(3):
        for call in (
            lambda: ns.put([b"a"], blocks(2)),
            lambda: ns.put([b""], blocks(1)),
            lambda: ns.put([b"a"], blocks(1), tokens=99),
            lambda: ns.get([b"a"], blocks(2)),
            lambda: ns.delete([b"k" * 300]),
        ):
            with pytest.raises(FlashKVError):
                call()
    after = subprocess.run(
        ["sha256sum", *sorted(map(str, store_path.rglob("*.*")))], capture_output=True, check=False
    ).stdout
    assert before == after


def test_tickets_carry_the_error(store: Store, ns: Namespace) -> None:
    """A bad call by ticket fails when it is carried out; its error is the one of the plain call."""
    with store.client() as client:
        tickets = [
            client.submit_put(ns, [b"a"], blocks(2), notify=Milestone.DURABLE),
            client.submit_get(ns, [b"k" * 300], blocks(1)),
            client.submit_contains(ns, "text"),
            client.submit_delete(ns, [b""]),
        ]
        for ticket in tickets:
            assert ticket.wait(5000)
            assert isinstance(ticket.error, (MemoryViewError, KeyFormatError))
            assert ticket.result is None
        assert len(client.drain()) == 4


def test_too_many_things(store: Store, ns: Namespace) -> None:
    """A batch has a limit too."""
    keys = np.zeros(((1 << 16) + 1, 4), np.uint8)
    for call in (
        lambda: ns.put(keys, b""),
        lambda: ns.get(keys, bytearray()),
        lambda: ns.contains(keys),
        lambda: ns.match(keys),
        lambda: ns.delete(keys),
    ):
        with refused(KeyFormatError, "65537", "65536"):
            call()
    for count in (0, 1 << 21):
        with refused(OptionsError, "max_tickets", count):
            store.client(max_tickets=count)


def test_access_errors_are_both(disk_path: Path) -> None:
    """Every error derives from FlashKVError and from the builtin that fits."""
    assert issubclass(StoreAccessError, PermissionError)
    assert issubclass(KeyFormatError, ValueError)
    assert issubclass(NotAStoreError, OSError)


# ---- arguments of another type -----------------------------------------------------------------


class Place(NamedTuple):
    """What the calls below are made on."""

    store: Store
    ns: Namespace
    client: Client


WRONG_CALLS: dict[str, tuple[Callable[[Place], Any], str]] = {
    "layers number": (lambda at: at.ns.get(KEYS[:1], blocks(1), layers=5), "layers.*5"),
    "heads bool": (lambda at: at.ns.get(KEYS[:1], blocks(1), heads=True), "heads.*True"),
    "layers text": (lambda at: at.ns.get(KEYS[:1], blocks(1), layers=["a"]), "layers.*'a'"),
    "layers float": (lambda at: at.ns.get(KEYS[:1], blocks(1), layers=[0.7]), "layers.*0.7"),
    "layers array": (
        lambda at: at.ns.get(KEYS[:1], blocks(1), layers=np.array([0.5])),
        "layers.*0.5",
    ),
    "heads text": (lambda at: at.ns.get(KEYS[:1], blocks(1), heads="0"), "heads.*'0'"),
    "range number": (
        lambda at: at.ns.get(KEYS[:1], blocks(1), token_range=5),
        "token_range.*5",
    ),
    "range of one": (
        lambda at: at.ns.get(KEYS[:1], blocks(1), token_range=(0,)),
        r"token_range.*\(0,\)",
    ),
    "range of text": (
        lambda at: at.ns.get(KEYS[:1], blocks(1), token_range=("a", "b")),
        "token_range.*'a'",
    ),
    "range of float": (
        lambda at: at.ns.get(KEYS[:1], blocks(1), token_range=(0, 1.5)),
        "token_range.*1.5",
    ),
    "put view": (lambda at: at.ns.put([b"a"], blocks(1), view="token"), "view.*'token'"),
    "get view": (lambda at: at.ns.get([b"a"], blocks(1), view=0), "view.*0"),
    "put tokens": (
        lambda at: at.ns.put([b"a", b"b"], blocks(2), tokens=[[1], [1, 2]]),
        r"token counts.*\[\[1\], \[1, 2\]\]",
    ),
    "get tokens": (
        lambda at: at.ns.get([b"a", b"b"], blocks(2), tokens=[[1], [1, 2]]),
        r"token counts.*\[\[1\], \[1, 2\]\]",
    ),
    "parents number": (lambda at: at.ns.put([b"a"], blocks(1), parents=5), "parents.*5"),
    "parents set": (lambda at: at.ns.put([b"a"], blocks(1), parents={b"p"}), "parents.*b'p'"),
    "no regions": (lambda _: Regions(None), "Regions.*None"),
    "row_axis text": (lambda _: Regions([blocks(1)], row_axis="0"), "row_axis.*'0'"),
    "rows ragged": (
        lambda at: at.ns.put([b"a"], Regions([blocks(1)], rows=[[0], [0, 1]])),
        r"rows.*\[\[0\], \[0, 1\]\]",
    ),
    "lease text": (lambda at: at.ns.match(KEYS, lease_ms="5"), "lease_ms.*'5'"),
    "lease float": (lambda at: at.ns.match(KEYS, lease_ms=1.5), "lease_ms.*1.5"),
    "position bool": (lambda at: at.ns.put([b"a"], blocks(1), position=True), "position.*True"),
    "position huge": (
        lambda at: at.ns.put([b"a"], blocks(1), position=1 << 20000),
        "position.*too long",
    ),
    "salt text": (lambda at: at.ns.token_keys([1], salt="pepper"), "salt.*'pepper'"),
    "extra number": (lambda at: at.ns.token_keys([1], extra=7), "extra.*7"),
    "block_tokens float": (
        lambda at: at.ns.token_keys([1], block_tokens=1.5),
        "block_tokens.*1.5",
    ),
    "ragged ids": (lambda at: at.ns.token_keys([1, [2, 3]]), r"token_ids.*\[1, \[2, 3\]\]"),
    "shard pair": (lambda at: at.store.namespace(IDENTITY, shard=(0, 1)), r"shard.*\(0, 1\)"),
    "no shard": (lambda at: at.store.namespace(IDENTITY, shard=0), "shard.*0"),
    "context number": (lambda _: Shard(context=5), "context.*5"),
    "context text": (lambda _: Shard(context=("a", "b")), "context.*'a'"),
    "layers of floats": (lambda _: Shard(layers=(0.5, 1.5)), "layers.*0.5"),
    "large extra": (
        lambda _: Identity("m", extras={"seed": 1 << 64}),
        f"seed.*{1 << 64}",
    ),
    "small extra": (
        lambda _: Identity("m", extras={"seed": -(1 << 63) - 1}),
        f"seed.*{-(1 << 63) - 1}",
    ),
    "tickets text": (lambda at: at.store.client(max_tickets="9"), "max_tickets.*'9'"),
    "tickets float": (lambda at: at.store.client(max_tickets=9.5), "max_tickets.*9.5"),
    "notify": (
        lambda at: at.client.submit_put(at.ns, [b"a"], blocks(1), notify="durable"),
        "notify.*'durable'",
    ),
    "amplification": (
        lambda _: Options(read_amplification="2"),
        "read_amplification.*'2'",
    ),
    "options": (lambda _: flashkv.open("none", options={"retries": 1}), "options.*retries"),
    "no options": (lambda _: flashkv.open("none", options=0), "options.*0"),
    "geometry": (lambda _: flashkv.open("none", geometry="gqa"), "geometry.*'gqa'"),
    "path": (lambda _: flashkv.open(None, geometry=KIND.geometry), "path.*None"),
    "NUL": (lambda _: flashkv.open("no\0ne", geometry=KIND.geometry), "path.*no.x00ne"),
    "NUL in bytes": (lambda _: flashkv.open(b"\0", geometry=KIND.geometry), "path.*x00"),
    "groups number": (lambda _: KVGeometry(5), "groups.*5"),
    "groups": (lambda _: KVGeometry((1,)), "groups.*1"),
    "planes": (lambda _: Group("kv", GroupKind.FULL, (1,)), "planes.*1"),
    "regions number": (lambda _: MemoryView(regions=5), "regions.*5"),
    "regions list": (lambda _: MemoryView(regions=[[1]]), r"regions.*\[1\]"),
    "room bool": (lambda _: MemoryView(block_tokens=True), "block_tokens.*True"),
    "put a set": (lambda at: at.ns.put({b"a"}, blocks(1)), "keys.*b'a'"),
    "get a set": (lambda at: at.ns.get({b"a"}, blocks(1)), "keys.*b'a'"),
    "keys of a dict": (lambda at: at.ns.contains({b"a": 1}), "keys.*b'a'"),
    "keys once": (lambda at: at.ns.contains(iter([b"a"])), "keys.*iter"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_argument_of_another_type(store: Store, ns: Namespace, name: str) -> None:
    """An error of flashkv's own, at once, that names the argument and its value."""
    call, message = WRONG_CALLS[name]
    with store.client() as client, pytest.raises(FlashKVError, match=f"(?s){message}") as caught:
        call(Place(store, ns, client))
    assert isinstance(caught.value, ValueError)


def test_capacity_beyond_all_bounds(disk_path: Path) -> None:
    for capacity in ((1 << 62) + 1, 1 << 200):
        with refused(CapacityError, capacity, 1 << 62):
            flashkv.open(disk_path / "s", capacity=capacity, geometry=KIND.geometry)
    for text in ("9" * 400 + ".5GiB", "9" * 5000):
        with refused(OptionsError, "capacity"):
            flashkv.open(disk_path / "s", capacity=text, geometry=KIND.geometry)
    assert not list((disk_path / "s").rglob("superblock*"))


def test_path_may_be_bytes(disk_path: Path) -> None:
    open_store(os.fsencode(disk_path / "s"), KIND.geometry).close()  # type: ignore[arg-type]
    assert shard_of(disk_path / "s").is_dir()


def test_numbers_may_be_numpys(ns: Namespace) -> None:
    out = np.zeros((1, 1, 2, 2, 64, 64), np.uint16)
    assert ns.get(KEYS[:1], out, layers=np.array([1])).all_ok
    assert ns.get(KEYS[:1], out, layers=[np.int32(1)]).all_ok
    assert ns.match(KEYS, lease_ms=np.int64(5)).count == len(KEYS)
    assert Shard(layers=[0, np.int64(1)]) == Shard(layers=(0, 1))  # type: ignore[arg-type]
    assert len(ns.token_keys([1, 2], block_tokens=np.int16(1))) == 2
