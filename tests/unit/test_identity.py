"""Identities, shards, token chains: what differs in meaning differs in digest, in every process."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashkv.errors import IdentityError
from flashkv.geometry import KVGeometry
from flashkv.identity import WHOLE, Identity, Shard, keyspace, token_keys, weights_fingerprint
from flashkv.native import ffi

GEOMETRY = KVGeometry.gqa(4, 2, 64)
ROOT = Path(__file__).resolve().parents[2]
FIELDS = ("model", "revision", "weights_fingerprint", "kv_dtype", "rope", "adapter")

texts = st.text(st.characters(codec="utf-8"), max_size=12)
ints = st.integers(-(1 << 63), (1 << 64) - 1)
numbers = st.one_of(ints, st.booleans(), st.floats(allow_nan=False, allow_infinity=False))
extras = st.dictionaries(texts, texts | numbers, max_size=4)
identities = st.builds(
    Identity,
    model=texts.filter(bool),
    revision=texts,
    weights_fingerprint=texts,
    kv_dtype=st.sampled_from(["bfloat16", "float16", "fp8_e4m3", "int4 grouped"]),
    rope=texts,
    adapter=texts,
    geometry=st.just(GEOMETRY),
    extras=extras,
)


@given(identities, identities)
def test_digests_are_equal_just_for_equal_identities(one: Identity, other: Identity) -> None:
    same = one.to_json() == other.to_json()
    assert (one.digest() == other.digest()) == same
    assert json.loads(one.to_json())["model"] == one.model


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_counts(field: str) -> None:
    base = Identity("m", geometry=GEOMETRY)
    changed = Identity(**{"model": "m", "geometry": GEOMETRY, field: "something else"})
    assert changed.digest() != base.digest()


def test_geometry_and_extras_count() -> None:
    digests = {
        Identity("m", geometry=geometry, extras=more).digest()
        for geometry in (GEOMETRY, KVGeometry.gqa(4, 2, 64, "float16"), KVGeometry.gqa(2, 4, 64))
        for more in ({}, {"a": "1"}, {"a": 1}, {"a": True}, {"a": 1.0}, {"b": "1"}, {"a": ""})
    }
    assert len(digests) == 3 * 7


def test_text_moved_between_fields_differs() -> None:
    one = Identity("ab", revision="c", geometry=GEOMETRY)
    other = Identity("a", revision="bc", geometry=GEOMETRY)
    assert one.digest() != other.digest()


def test_names_that_sanitise_alike_stay_apart() -> None:
    names = ["org/model", "org_model", "org--model", "org:model", "Org/model", "org/model ",
             "org/модель", "org/mod\u00e9l", "org/mode\u0301l"]  # fmt: skip
    assert len({Identity(name, geometry=GEOMETRY).digest() for name in names}) == len(names)


def test_order_of_extras_and_spelling_of_dtypes_do_not_count() -> None:
    one = Identity("m", kv_dtype="bf16", geometry=GEOMETRY, extras={"a": 1, "b": 2})
    other = Identity("m", kv_dtype="torch.bfloat16", geometry=GEOMETRY, extras={"b": 2, "a": 1})
    assert one == other
    assert one.digest() == other.digest()
    assert hash(one) == hash(other)


def test_digests_are_equal_in_processes_with_other_hash_seeds() -> None:
    code = """
from flashkv.geometry import KVGeometry
from flashkv.identity import Identity, token_keys
g = KVGeometry.gqa(4, 2, 64)
i = Identity('m', geometry=g, extras={'x': 1, 'y': 'z', 'a': 2.5, 'b': True})
print(g.digest().hex(), i.digest().hex(), i.to_json(), token_keys(i.digest(), [1, 2, 3]))
"""
    seen = set()
    for seed in ("0", "1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        seen.add(done.stdout)
    assert len(seen) == 1
    assert len(seen.pop()) > 128


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": ""},
        {"model": 7},
        {"model": "m", "revision": None},
        {"model": "m", "rope": "\ud800"},
        {"model": "m", "adapter": "x" * 100_000},
        {"model": "m", "geometry": "gqa"},
        {"model": "m", "extras": {"a": [1]}},
        {"model": "m", "extras": {"a": float("nan")}},
        {"model": "m", "extras": {1: "a"}},
        {"model": "m", "extras": {str(i): i for i in range(100)}},
    ],
)
def test_impossible_identities_are_refused(arguments: dict) -> None:
    with pytest.raises(IdentityError):
        Identity(**arguments)


def test_no_digest_without_geometry() -> None:
    with pytest.raises(IdentityError, match="geometry"):
        Identity("m").digest()
    assert (
        Identity("m").with_geometry(GEOMETRY).digest() == Identity("m", geometry=GEOMETRY).digest()
    )


pairs = st.tuples(st.integers(0, 500), st.integers(1, 500)).map(lambda p: (p[0], p[0] + p[1]))
ranks = st.tuples(st.integers(0, 500), st.integers(1, 500)).map(lambda p: (p[0], p[0] + p[1]))


@given(st.none() | pairs, st.none() | pairs, st.none() | ranks)
def test_shard_round_trip(
    layers: tuple[int, int] | None, heads: tuple[int, int] | None, context: tuple[int, int] | None
) -> None:
    shard = Shard(layers, heads, context)
    assert len(shard.encode()) == 16
    assert Shard.decode(shard.encode()) == shard
    assert (shard.encode() == bytes(16)) == (shard == WHOLE)


@pytest.mark.parametrize(
    "arguments",
    [{"layers": (3, 3)}, {"layers": (-1, 2)}, {"heads": (0, 5000)}, {"layers": (1,)},
     {"context": (2, 2)}, {"context": (0, 100_000)}],
)  # fmt: skip
def test_impossible_shards_are_refused(arguments: dict) -> None:
    with pytest.raises(IdentityError):
        Shard(**arguments)


def test_a_shard_of_everything_is_the_whole() -> None:
    assert Shard((0, 4), (0, 2), (0, 1)).normalized(GEOMETRY) == WHOLE
    assert Shard((0, 3), None, (1, 2)).normalized(GEOMETRY) == Shard((0, 3), None, (1, 2))


def test_keyspace_holds_namespace_and_shard() -> None:
    digest = Identity("m", geometry=GEOMETRY).digest()
    space = keyspace(digest, Shard(layers=(1, 2)), 3)
    assert bytes(ffi.buffer(space.prefix)) == digest + Shard(layers=(1, 2)).encode()
    assert (space.namespace_id, space.digest_bytes) == (3, 16)


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=300),
    st.sampled_from([1, 16, 64, 256]),
    st.binary(max_size=20),
    st.binary(max_size=20),
)
def test_token_chain(tokens: list[int], granule: int, salt: bytes, extra: bytes) -> None:
    namespace = bytes(range(32))
    keys = token_keys(namespace, tokens, granule, salt, extra)
    link = hashlib.sha256(namespace + salt).digest()
    expected = []
    for start in range(0, len(tokens), granule):
        part = tokens[start : start + granule]
        link = hashlib.sha256(link + struct.pack(f"<{len(part)}i", *part) + extra).digest()
        expected.append(link)
    assert [row.tobytes() for row in keys] == expected


def test_a_chain_goes_on_from_a_key() -> None:
    namespace, tokens = bytes(range(32)), list(range(300))
    whole = token_keys(namespace, tokens, 64, b"salt", b"extra")
    rest = token_keys(namespace, tokens[128:], 64, extra=b"extra", parent=whole[1].tobytes())
    assert (rest == whole[2:]).all()
    other = token_keys(namespace, tokens[128:], 64, parent=whole[1].tobytes())
    assert not (other == whole[2:]).all(axis=1).any()


def test_a_parent_that_is_no_key_is_refused() -> None:
    for wrong in (b"short", bytes(33)):
        with pytest.raises(IdentityError, match="key of the chain"):
            token_keys(bytes(32), [1, 2], parent=wrong)
    with pytest.raises(IdentityError, match="parent"):
        token_keys(bytes(32), [1, 2], parent="text")  # type: ignore[arg-type]


def test_token_chain_takes_arrays_of_other_types() -> None:
    ids = np.arange(100)
    wanted = token_keys(bytes(32), ids.tolist())
    for dtype in (np.int64, np.uint16, np.int32):
        assert (token_keys(bytes(32), ids.astype(dtype)) == wanted).all()
    assert (token_keys(bytes(32), np.arange(200)[::2]) == token_keys(bytes(32), ids * 2)).all()


@pytest.mark.parametrize("tokens", [[1.5], [[1]], [2**31], np.zeros((2, 2), np.int32)])
def test_wrong_tokens_are_refused(tokens: object) -> None:
    with pytest.raises(IdentityError):
        token_keys(bytes(32), tokens)  # type: ignore[arg-type]


def safetensors(path: Path, data: bytes, name: str = "w") -> None:
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    )
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)


def test_weights_fingerprint(tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(3 << 20)
    safetensors(tmp_path / "a.safetensors", data)
    (tmp_path / "notes.txt").write_text("no weights")
    whole = weights_fingerprint(tmp_path)
    assert whole == weights_fingerprint(tmp_path / "a.safetensors")
    assert len(bytes.fromhex(whole)) == 32
    safetensors(tmp_path / "a.safetensors", data, "v")  # another header
    assert weights_fingerprint(tmp_path) != whole
    safetensors(tmp_path / "a.safetensors", data[:-1] + bytes([data[-1] ^ 1]))  # the last byte
    assert weights_fingerprint(tmp_path) != whole
    safetensors(tmp_path / "a.safetensors", data)
    safetensors(tmp_path / "b.safetensors", data)  # another file
    assert weights_fingerprint(tmp_path) != whole
    with pytest.raises(IdentityError, match="no weights"):
        weights_fingerprint(tmp_path / "missing")
