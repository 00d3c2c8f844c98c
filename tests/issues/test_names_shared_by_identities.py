"""Fault: fp16 and bf16 (or fp8) blocks of one size share a name; so do other weights under the same
model name, and two model names that look the same once characters were replaced for a path.

flashkv guarantees: whatever changes the meaning of the numbers makes another namespace, in which
the other's keys are misses; names are never turned into paths; and geometries that differ in dtype
alone are different.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from small_stores import assert_equal, make, names, payload

from flashkv import GeometryError, Identity, IdentityError, KVGeometry

KEYS = names(8)

IDENTITIES = [
    Identity(model="org/model"),
    Identity(model="org_model"),
    Identity(model="org--model"),
    Identity(model="org/model/"),
    Identity(model="ORG/model"),
    Identity(model="org/model", revision="main"),
    Identity(model="org/model", revision="Main"),
    Identity(model="org/model", weights_fingerprint="a" * 64),
    Identity(model="org/model", weights_fingerprint="b" * 64),
    Identity(model="org/model", kv_dtype="float16"),
    Identity(model="org/model", kv_dtype="fp8_e4m3"),
    Identity(model="org/model", kv_dtype="fp8_e5m2"),
    Identity(model="org/model", rope='{"factor": 2}'),
    Identity(model="org/model", adapter="lora-1"),
    Identity(model="org/model", extras={"chunk": 16}),
    Identity(model="org/model", extras={"chunk": "16"}),
    Identity(model="org/model", extras={"chunk": 16.0}),
    Identity(model="org/model", extras={"chunk": True}),
    Identity(model="org/modelmain"),
    Identity(model="caf\u00e9"),
    Identity(model="cafe\u0301"),
    Identity(model="../../etc"),
    Identity(model="a\0b"),
]


def test_every_identity_is_its_own(folder: Path) -> None:
    """The same keys in all of them: each reads its own bytes, before and after a reopen."""
    with make(folder) as store:
        digests = {store.namespace(identity).digest for identity in IDENTITIES}
        assert len(digests) == len(IDENTITIES)
        for seed, identity in enumerate(IDENTITIES):
            namespace = store.namespace(identity)
            assert not namespace.contains(KEYS).any(), identity
            assert (namespace.put(KEYS, payload(seed, 8)).statuses == 0).all()
    with make(folder) as store:
        for seed, identity in enumerate(IDENTITIES):
            assert_equal(store.namespace(identity), KEYS, payload(seed, 8))
        fresh = store.namespace(Identity(model="org/model", revision="other"))
        result = fresh.get(KEYS, np.zeros_like(payload(0, 8)))
        assert result.missed.all()
    assert not any("model" in path.name for path in folder.rglob("*"))


def test_equal_identities_meet() -> None:
    """What is only written differently is the same: the order of extras, aliases of a dtype."""
    geometry = KVGeometry.opaque(1)
    pairs = [
        (Identity(model="m", kv_dtype="bf16"), Identity(model="m", kv_dtype="bfloat16")),
        (
            Identity(model="m", extras={"a": 1, "b": 2}),
            Identity(model="m", extras={"b": 2, "a": 1}),
        ),
    ]
    for left, right in pairs:
        assert left.with_geometry(geometry).digest() == right.with_geometry(geometry).digest()


def test_geometries_of_one_size(folder: Path) -> None:
    """dtypes of one width: not the same store, not the same namespace."""
    geometries = [
        KVGeometry.gqa(2, 2, 64, "bfloat16"),
        KVGeometry.gqa(2, 2, 64, "float16"),
        KVGeometry.gqa(2, 2, 128, "fp8_e4m3"),
        KVGeometry.gqa(2, 2, 128, "fp8_e5m2"),
        KVGeometry.gqa(2, 1, 128, "bfloat16"),
        KVGeometry.gqa(1, 4, 64, "bfloat16"),
    ]
    assert len({geometry.block_bytes(0, 16) for geometry in geometries}) == 1
    digests = {Identity(model="m", geometry=geometry).digest() for geometry in geometries}
    assert len(digests) == len(geometries)
    for number, geometry in enumerate(geometries):
        make(folder / str(number), geometry=geometry).close()
    for (one, _), (_, other) in itertools.permutations(enumerate(geometries), 2):
        if geometries[one] != other:
            with pytest.raises(GeometryError):
                make(folder / str(one), geometry=other)


def test_an_identity_without_a_model() -> None:
    with pytest.raises(IdentityError, match="model"):
        Identity(model="")
